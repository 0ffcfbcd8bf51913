/* Linear-time selection by adaptive histograms.
 *
 * Scores are never negative, so their bit patterns order like their values and selection is a
 * search for the k-th largest integer. Which class the cut falls into follows from counting. Inside
 * that class a pass over the scores makes a histogram of a range of keys, the bin that holds the
 * cut becomes the next range, and so on until the tokens left are all taken or all equal. The
 * range also shrinks to the smallest and largest key met, so that plateaus and zeros, which
 * pooling makes plenty of, are recognised after one pass, whatever their number. Where pooled
 * scores are equal the same search goes on over raw scores, and where those are equal too the lower
 * indices win. The result is a cut (class, pooled, raw, how many of the ties), and a last pass
 * writes every token above it in ascending order.
 *
 * Pooled scores are recomputed by each pass, a tile at a time (pool.c): with two to four passes
 * that is cheaper than an array of size n is large.
 */
#include "kernels/select.h"

#include "kernels/pool.h"

#include <assert.h>
#include <string.h>

#define N_BINS     4096u
#define NOT_SOUGHT UINT64_MAX /* key of a token outside the class or the tie that is searched */

enum token_class { CLASS_LOWEST = 0, CLASS_CANDIDATE, CLASS_PROTECTED, N_CLASSES };

/* What is kept: every token above the cut, and the first `ties` of those that equal it. */
struct cut {
    enum token_class token_class;
    uint64_t pooled; /* keys */
    uint64_t raw;
    uint64_t ties;
};

/* Which key a pass looks at. */
enum tier { TIER_POOLED, TIER_RAW };

struct scratch {
    struct dkv_pool_scratch pool;
    double pooled[DKV_POOL_TILE];
    uint64_t key[DKV_POOL_TILE];
    uint8_t token_class[DKV_POOL_TILE];
    uint32_t bins[2][N_BINS]; /* by turns: equal neighbours would wait for each other's store */
};

struct job {
    const struct dkv_select_spec *spec;
    struct dkv_pool_spec pool;
    const float *raw;
    const uint8_t *flags;
    struct scratch *scratch;
};

/* A range of keys, and what a pass found in it. */
struct range {
    uint64_t lo, hi; /* inclusive */
};

struct dkv_select_spec dkv_select_spec_of(const struct dkv_block *block,
                                          const struct dkv_params *params,
                                          const struct dkv_plan *plan)
{
    return (struct dkv_select_spec){
        .pool = params->pool,
        .scope = params->pool_scope,
        .kernel = (uint32_t)params->kernel,
        .n = plan->n_valid,
        .sinks = plan->sinks,
        .recent = plan->recent,
        .keep = plan->keep_tokens,
        .first_index = (int32_t)block->valid_from,
    };
}

size_t dkv_select_scratch_bytes(void)
{
    return sizeof(struct scratch);
}

/* A non-negative score as an integer of the same order. Keys count from just under the smallest
 * float, 2^-149, so that the first histogram spends no bins on exponents that only a double has;
 * zero is key 0. */
static inline uint64_t key_of(double score)
{
    const uint64_t base = (uint64_t)(1023 - 150) << 52;
    uint64_t bits;
    memcpy(&bits, &score, sizeof(bits));
    return bits > base ? bits - base : 0;
}

/* Above every key: 2^138 is more than DKV_KERNEL_MAX times the largest float. */
#define KEY_MAX ((uint64_t)(138 + 150) << 52)

static inline uint64_t raw_key_of(float score)
{
    return key_of((double)(score + 0.0f));
}

static size_t tile_count(const struct job *job, uint64_t first)
{
    const uint64_t left = job->spec->n - first;
    return left < DKV_POOL_TILE ? (size_t)left : DKV_POOL_TILE;
}

static void load_classes(const struct job *job, uint64_t first, size_t count)
{
    const struct dkv_select_spec *spec = job->spec;
    uint8_t *token_class = job->scratch->token_class;
    for (size_t i = 0; i < count; i++) {
        const uint64_t token = first + i;
        token_class[i] = token < spec->sinks || token >= spec->n - spec->recent ? CLASS_PROTECTED
                                                                                : CLASS_CANDIDATE;
    }
    if (job->flags == NULL)
        return;
    for (size_t i = 0; i < count; i++) {
        const uint8_t flag = job->flags[first + i];
        if (flag & DKV_TOKEN_LOWEST)
            token_class[i] = CLASS_LOWEST;
        else if (flag & DKV_TOKEN_PROTECTED)
            token_class[i] = CLASS_PROTECTED;
    }
}

/* The class the cut falls into and, in `ties`, how many of it are kept. *count_out is its size. */
static struct cut find_class(const struct job *job, uint64_t *count_out)
{
    const struct dkv_select_spec *spec = job->spec;
    uint64_t counts[N_CLASSES] = {0};
    if (job->flags == NULL) {
        counts[CLASS_PROTECTED] = spec->sinks + spec->recent;
        counts[CLASS_CANDIDATE] = spec->n - counts[CLASS_PROTECTED];
    } else {
        for (uint64_t first = 0; first < spec->n; first += DKV_POOL_TILE) {
            const size_t count = tile_count(job, first);
            load_classes(job, first, count);
            for (size_t i = 0; i < count; i++)
                counts[job->scratch->token_class[i]]++;
        }
    }
    struct cut cut = {.token_class = CLASS_PROTECTED, .ties = spec->keep};
    while (cut.ties > counts[cut.token_class]) {
        cut.ties -= counts[cut.token_class];
        cut.token_class--;
    }
    *count_out = counts[cut.token_class];
    return cut;
}

/* Fills the tile's keys: the tier's key of tokens that are sought, NOT_SOUGHT for the others. */
static void load_keys(const struct job *job, const struct cut *cut, enum tier tier, uint64_t first,
                      size_t count)
{
    struct scratch *s = job->scratch;
    load_classes(job, first, count);
    dkv_pool_tile(&job->pool, job->raw, first, count, &s->pool, s->pooled);
    for (size_t i = 0; i < count; i++)
        s->key[i] = key_of(s->pooled[i]);
    if (tier == TIER_RAW)
        for (size_t i = 0; i < count; i++)
            s->key[i] = s->key[i] == cut->pooled ? raw_key_of(job->raw[first + i]) : NOT_SOUGHT;
    for (size_t i = 0; i < count; i++)
        s->key[i] = s->token_class[i] == cut->token_class ? s->key[i] : NOT_SOUGHT;
}

/* One pass: histogram of the keys inside `range`, which then shrinks to those met. */
static void count_keys(const struct job *job, const struct cut *cut, enum tier tier, unsigned shift,
                       struct range *range)
{
    struct scratch *s = job->scratch;
    const uint64_t base = range->lo, span = range->hi - range->lo;
    uint64_t smallest = NOT_SOUGHT, largest = 0;
    memset(s->bins, 0, sizeof(s->bins));
    for (uint64_t first = 0; first < job->spec->n; first += DKV_POOL_TILE) {
        const size_t count = tile_count(job, first);
        load_keys(job, cut, tier, first, count);
        for (size_t i = 0; i < count; i++) {
            const uint64_t key = s->key[i] - base;
            if (key > span)
                continue;
            s->bins[i % 2][key >> shift]++;
            smallest = key < smallest ? key : smallest;
            largest = key > largest ? key : largest;
        }
    }
    assert(smallest != NOT_SOUGHT);
    *range = (struct range){base + smallest, base + largest};
}

/* Narrows `*need` best keys of the tier down to one key: tokens with a larger key are kept (and no
 * longer counted in *need), and of those with exactly this key *need are. Returns true if that is
 * all of them. */
static bool find_key(const struct job *job, const struct cut *cut, enum tier tier, uint64_t *need,
                     uint64_t *key_out)
{
    struct range range = {0, KEY_MAX};
    for (;;) {
        unsigned shift = 0;
        while ((range.hi - range.lo) >> shift >= N_BINS)
            shift++;
        const struct range seen = range;
        count_keys(job, cut, tier, shift, &range);

        uint64_t bin = (range.hi - seen.lo) >> shift, in_bin;
        for (;; bin--) {
            in_bin = (uint64_t)job->scratch->bins[0][bin] + job->scratch->bins[1][bin];
            if (in_bin >= *need)
                break;
            *need -= in_bin;
        }
        const uint64_t lo = seen.lo + (bin << shift), hi = lo + ((uint64_t)1 << shift) - 1;
        range.lo = lo > range.lo ? lo : range.lo;
        range.hi = hi < range.hi ? hi : range.hi;
        *key_out = range.lo;
        if (in_bin == *need)
            return true;
        if (range.lo == range.hi)
            return false;
    }
}

static struct cut find_cut(const struct job *job)
{
    uint64_t in_class;
    struct cut cut = find_class(job, &in_class);
    /* Ties without number: with keys of 0, everything of the class is kept. */
    const bool all = cut.ties == in_class ||
                     find_key(job, &cut, TIER_POOLED, &cut.ties, &cut.pooled) ||
                     find_key(job, &cut, TIER_RAW, &cut.ties, &cut.raw);
    if (all)
        cut.ties = UINT64_MAX;
    return cut;
}

static inline bool above(const struct cut *cut, enum token_class token_class, uint64_t pooled,
                         uint64_t raw)
{
    if (token_class != cut->token_class)
        return token_class > cut->token_class;
    if (pooled != cut->pooled)
        return pooled > cut->pooled;
    return raw > cut->raw;
}

static void write_kept(const struct job *job, struct cut cut, int32_t *keep_out)
{
    const struct dkv_select_spec *spec = job->spec;
    struct scratch *s = job->scratch;
    uint64_t kept = 0;
    for (uint64_t first = 0; first < spec->n && kept < spec->keep; first += DKV_POOL_TILE) {
        const size_t count = tile_count(job, first);
        load_classes(job, first, count);
        dkv_pool_tile(&job->pool, job->raw, first, count, &s->pool, s->pooled);
        for (size_t i = 0; i < count; i++) {
            const uint64_t pooled = key_of(s->pooled[i]), raw = raw_key_of(job->raw[first + i]);
            const enum token_class token_class = s->token_class[i];
            bool keep = above(&cut, token_class, pooled, raw);
            if (!keep && cut.ties > 0 && token_class == cut.token_class && pooled == cut.pooled &&
                raw == cut.raw) {
                cut.ties--;
                keep = true;
            }
            if (keep)
                keep_out[kept++] = spec->first_index + (int32_t)(first + i);
        }
    }
    assert(kept == spec->keep);
}

void dkv_select(const struct dkv_select_spec *spec, const float *raw, const uint8_t *flags,
                void *scratch, int32_t *keep_out)
{
    assert(spec->keep >= 1 && spec->keep <= spec->n && spec->n <= DKV_TOKENS_MAX);
    assert(spec->sinks + spec->recent <= spec->n);
    const bool prefix = spec->scope == DKV_POOL_SCOPE_PREFIX;
    const struct job job = {
        .spec = spec,
        .pool = {.pool = spec->pool,
                 .kernel = spec->kernel,
                 .begin = prefix ? spec->sinks : 0,
                 .end = prefix ? spec->n - spec->recent : spec->n},
        .raw = raw,
        .flags = flags,
        .scratch = scratch,
    };
    write_kept(&job, find_cut(&job), keep_out);
}
