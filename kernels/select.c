/* Linear-time selection by adaptive histograms.
 *
 * Scores are never negative, so their bit patterns order like their values and selection is a
 * search for the k-th largest integer. Which class the cut falls into follows from counting. Inside
 * that class a pass over the scores makes a histogram of a range of keys, the bin that holds the
 * cut becomes the next range, and so on until the tokens left are all taken or all equal. The
 * range also shrinks to the smallest and largest key met, so that plateaus and zeros, which
 * pooling makes plenty of, are recognised after one pass, whatever their number.
 *
 * There are three tiers of keys, each searched among the tokens that tie in those before:
 *
 *   pooled   the pooled score rounded to float, 31 bits: nearly always enough, and cheap
 *   sum      the sum behind an average in double precision; a maximum has no such tier
 *   raw      the raw score
 *
 * and where these are equal too the lower indices win. The result is a cut (class, three keys, how
 * many of the ties), and a last pass writes every token above it in ascending order.
 *
 * Pooled scores are recomputed by each pass, a tile at a time (pool.c): with three to five passes
 * that costs less than an array of size n.
 */
#include "kernels/select.h"

#include "kernels/pool.h"

#include <assert.h>
#include <string.h>

#define N_BINS 4096u

enum token_class { CLASS_LOWEST = 0, CLASS_CANDIDATE, CLASS_PROTECTED, N_CLASSES };
enum tier { TIER_POOLED = 0, TIER_SUM, TIER_RAW, N_TIERS };

/* What is kept: every token above the cut, and the first `ties` of those that equal it. */
struct cut {
    enum token_class token_class;
    uint64_t key[N_TIERS];
    uint64_t ties;
};

struct scratch {
    struct dkv_pool_tile tile;
    uint8_t token_class[DKV_POOL_TILE];
    uint32_t bins[2][N_BINS]; /* by turns: equal neighbours would wait for each other's store */
};

struct job {
    const struct dkv_select_spec *spec;
    struct dkv_pool_spec pool;
    const float *raw;
    const uint8_t *flags;
    struct scratch *s;
};

/* Keys lo .. hi, both included. */
struct range {
    uint64_t lo, hi;
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

static inline uint32_t float_key(float score)
{
    uint32_t bits;
    memcpy(&bits, &score, sizeof(bits));
    return bits;
}

static inline uint64_t double_key(double score)
{
    uint64_t bits;
    memcpy(&bits, &score, sizeof(bits));
    return bits;
}

/* Key of a tile's token i; 0 in a tier that the kind of pooling does not have. */
static inline uint64_t key_of(const struct job *job, enum tier tier, uint64_t first, size_t i)
{
    switch (tier) {
    case TIER_POOLED: return float_key(job->s->tile.pooled[i]);
    case TIER_SUM: return job->pool.pool == DKV_POOL_AVG ? double_key(job->s->tile.sum[i]) : 0;
    default: return float_key(job->raw[first + i] + 0.0f); /* -0 equals 0 */
    }
}

static size_t tile_count(const struct job *job, uint64_t first)
{
    const uint64_t left = job->spec->n - first;
    return left < DKV_POOL_TILE ? (size_t)left : DKV_POOL_TILE;
}

static void load_classes(const struct job *job, uint64_t first, size_t count)
{
    const struct dkv_select_spec *spec = job->spec;
    const uint64_t end = spec->n - spec->recent;
    uint8_t *token_class = job->s->token_class;
    memset(token_class, CLASS_CANDIDATE, count);
    for (uint64_t t = first; t < spec->sinks && t < first + count; t++)
        token_class[t - first] = CLASS_PROTECTED;
    for (uint64_t t = end > first ? end : first; t < first + count; t++)
        token_class[t - first] = CLASS_PROTECTED;
    for (size_t i = 0; i < count && job->flags != NULL; i++) {
        const uint8_t flag = job->flags[first + i];
        if (flag & DKV_TOKEN_LOWEST)
            token_class[i] = CLASS_LOWEST;
        else if (flag & DKV_TOKEN_PROTECTED)
            token_class[i] = CLASS_PROTECTED;
    }
}

static void load_tile(const struct job *job, uint64_t first, size_t count)
{
    load_classes(job, first, count);
    dkv_pool_tile(&job->pool, job->raw, first, count, &job->s->tile);
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
                counts[job->s->token_class[i]]++;
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

/* True if token i of the tile is of the cut's class and equals the cut in all tiers before. */
static inline bool sought(const struct job *job, const struct cut *cut, enum tier tier,
                          uint64_t first, size_t i)
{
    if (job->s->token_class[i] != cut->token_class)
        return false;
    for (int before = TIER_POOLED; before < (int)tier; before++)
        if (key_of(job, (enum tier)before, first, i) != cut->key[before])
            return false;
    return true;
}

/* One pass: histogram of the sought keys inside `range`, which then shrinks to those met. */
static void count_keys(const struct job *job, const struct cut *cut, enum tier tier, unsigned shift,
                       struct range *range)
{
    struct scratch *s = job->s;
    const uint64_t base = range->lo, span = range->hi - range->lo;
    uint64_t smallest = span, largest = 0;
    memset(s->bins, 0, sizeof(s->bins));
    for (uint64_t first = 0; first < job->spec->n; first += DKV_POOL_TILE) {
        const size_t count = tile_count(job, first);
        load_tile(job, first, count);
        for (size_t i = 0; i < count; i++) {
            if (!sought(job, cut, tier, first, i))
                continue;
            const uint64_t key = key_of(job, tier, first, i) - base;
            if (key > span)
                continue;
            s->bins[i % 2][key >> shift]++;
            smallest = key < smallest ? key : smallest;
            largest = key > largest ? key : largest;
        }
    }
    *range = (struct range){base + smallest, base + largest};
}

/* Narrows the cut's best `ties` tokens of a tier down to one key: tokens with a larger key are
 * kept (and no longer counted), and `ties` of those with exactly this key. Returns true if these
 * are all that have it. */
static bool find_key(const struct job *job, struct cut *cut, enum tier tier)
{
    struct range range = {0, tier == TIER_SUM ? INT64_MAX : INT32_MAX};
    for (;;) {
        unsigned shift = 0;
        while ((range.hi - range.lo) >> shift >= N_BINS)
            shift++;
        const struct range searched = range;
        count_keys(job, cut, tier, shift, &range);

        uint64_t bin = (range.hi - searched.lo) >> shift, in_bin;
        for (;; bin--) {
            in_bin = (uint64_t)job->s->bins[0][bin] + job->s->bins[1][bin];
            if (in_bin >= cut->ties)
                break;
            cut->ties -= in_bin;
        }
        const uint64_t lo = searched.lo + (bin << shift), hi = lo + ((uint64_t)1 << shift) - 1;
        range.lo = lo > range.lo ? lo : range.lo;
        range.hi = hi < range.hi ? hi : range.hi;
        cut->key[tier] = range.lo;
        if (in_bin == cut->ties)
            return true;
        if (range.lo == range.hi)
            return false;
    }
}

static struct cut find_cut(const struct job *job)
{
    uint64_t in_class;
    struct cut cut = find_class(job, &in_class);
    bool all = cut.ties == in_class;
    for (int tier = TIER_POOLED; tier < N_TIERS && !all; tier++)
        if (tier != TIER_SUM || job->pool.pool == DKV_POOL_AVG)
            all = find_key(job, &cut, (enum tier)tier);
    if (all) /* and the tiers not searched have key 0: nothing is below them */
        cut.ties = UINT64_MAX;
    return cut;
}

/* Whether a token of the cut's class, with that pooled key, is kept. */
static bool settle_tie(const struct job *job, struct cut *cut, uint64_t first, size_t i)
{
    for (int tier = TIER_SUM; tier < N_TIERS; tier++) {
        const uint64_t key = key_of(job, (enum tier)tier, first, i);
        if (key != cut->key[tier])
            return key > cut->key[tier];
    }
    if (cut->ties == 0)
        return false;
    cut->ties--;
    return true;
}

static void write_kept(const struct job *job, struct cut cut, int32_t *keep_out)
{
    const struct dkv_select_spec *spec = job->spec;
    uint64_t kept = 0;
    for (uint64_t first = 0; first < spec->n && kept < spec->keep; first += DKV_POOL_TILE) {
        const size_t count = tile_count(job, first);
        load_tile(job, first, count);
        for (size_t i = 0; i < count; i++) {
            const enum token_class token_class = job->s->token_class[i];
            const uint64_t pooled = key_of(job, TIER_POOLED, first, i);
            bool keep = token_class > cut.token_class;
            if (token_class == cut.token_class)
                keep = pooled != cut.key[TIER_POOLED] ? pooled > cut.key[TIER_POOLED]
                                                      : settle_tie(job, &cut, first, i);
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
        .s = scratch,
    };
    write_kept(&job, find_cut(&job), keep_out);
}
