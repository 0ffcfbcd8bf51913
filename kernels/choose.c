/* Pool, classify, rank, write.
 *
 * Ranking finds the cut by radix: which class it falls into follows from counting, then the keys of
 * that class (doubles as integers that order alike) are narrowed eleven bits at a time, pooled
 * scores first and raw scores among those that tie. Time is linear whatever the scores are.
 */
#include "kernels/choose.h"

#include <assert.h>
#include <math.h>
#include <string.h>

enum token_class { CLASS_LOWEST = 0, CLASS_CANDIDATE, CLASS_PROTECTED, N_CLASSES };

#define DIGIT_BITS 11u
#define N_BINS     (1u << DIGIT_BITS)

/* ---- memory ---- */

static size_t rounded(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

size_t dkv_choice_bytes(uint32_t heads, uint64_t n)
{
    const size_t count = (size_t)heads * n;
    return 2 * rounded(count * sizeof(double)) + 3 * rounded(count);
}

void dkv_choice_place(struct dkv_choice_work *work, uint32_t heads, uint64_t n, void *memory)
{
    const size_t count = (size_t)heads * n;
    uint8_t *at = memory;
    work->raw = (double *)(void *)at;
    at += rounded(count * sizeof(double));
    work->pooled = (double *)(void *)at;
    at += rounded(count * sizeof(double));
    work->flags = at;
    at += rounded(count);
    work->token_class = at;
    at += rounded(count);
    work->kept = at;
}

/* ---- pooling: select.h's, in double ---- */

#define TILE 1024u

struct pool_tile {
    double x[TILE + DKV_KERNEL_MAX - 1];
};

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static void max_tile(double *out, double *x, size_t count, uint32_t kernel)
{
    uint32_t p = 1;
    for (; 2 * p <= kernel; p *= 2)
        for (size_t i = 0; i < count + kernel - 2 * p; i++)
            x[i] = larger(x[i], x[i + p]);
    for (size_t i = 0; i < count; i++)
        out[i] = larger(x[i], x[i + kernel - p]);
}

static void avg_tile(double *out, double *x, size_t count, uint32_t kernel)
{
    memset(out, 0, count * sizeof(*out));
    uint32_t done = 0;
    for (uint32_t p = 1; done < kernel; p *= 2) {
        if (kernel & p) {
            for (size_t i = 0; i < count; i++)
                out[i] += x[i + done];
            done += p;
        }
        if (2 * p <= kernel)
            for (size_t i = 0; i < count + kernel - 2 * p; i++)
                x[i] += x[i + p];
    }
    for (size_t i = 0; i < count; i++)
        out[i] /= (double)kernel;
}

static void pool_head(const struct dkv_choice *choice, const double *raw, double *pooled)
{
    const struct dkv_select_spec *spec = &choice->spec;
    const bool prefix = spec->scope == DKV_POOL_SCOPE_PREFIX;
    const int64_t begin = prefix ? (int64_t)spec->sinks : 0;
    const int64_t end = (int64_t)(prefix ? spec->n - spec->recent : spec->n);
    const double padding = spec->pool == DKV_POOL_MAX && choice->any_sign ? -INFINITY : 0.0;
    struct pool_tile tile;
    memcpy(pooled, raw, spec->n * sizeof(*pooled));
    if (spec->pool == DKV_POOL_NONE)
        return;
    for (int64_t first = begin; first < end; first += TILE) {
        const size_t count = end - first < (int64_t)TILE ? (size_t)(end - first) : TILE;
        for (size_t i = 0; i < count + spec->kernel - 1; i++) {
            const int64_t token = first - spec->kernel / 2 + (int64_t)i;
            tile.x[i] = token >= begin && token < end ? raw[token] : padding;
        }
        if (spec->pool == DKV_POOL_MAX)
            max_tile(pooled + first, tile.x, count, spec->kernel);
        else
            avg_tile(pooled + first, tile.x, count, spec->kernel);
    }
}

/* ---- classes ---- */

static void classify_head(const struct dkv_select_spec *spec, const uint8_t *flags,
                          uint8_t *token_class)
{
    for (uint64_t t = 0; t < spec->n; t++) {
        const bool inside = t < spec->sinks || t >= spec->n - spec->recent;
        token_class[t] = inside || (flags[t] & DKV_TOKEN_PROTECTED) ? CLASS_PROTECTED
                                                                    : CLASS_CANDIDATE;
        if (flags[t] & DKV_TOKEN_LOWEST)
            token_class[t] = CLASS_LOWEST;
    }
}

/* ---- ranking ---- */

/* Units that are ranked together: [heads][n]. */
struct ranked {
    const double *pooled, *raw;
    const uint8_t *token_class;
    uint32_t heads;
    uint64_t n;
};

struct cut {
    enum token_class token_class;
    uint64_t pooled, raw;
    uint64_t ties; /* how many that equal it are kept */
};

/* Doubles as integers that order alike; -0 is 0. */
static inline uint64_t key_of(double x)
{
    uint64_t bits;
    x += 0.0;
    memcpy(&bits, &x, sizeof(bits));
    return bits >> 63 ? ~bits : bits | UINT64_C(1) << 63;
}

/* Narrows `ties` best of the units of the cut's class (and, for raw, of its pooled key) down to one
 * key. True if nothing below needs to be looked at: all that have it are kept. */
static bool narrow(const struct ranked *units, struct cut *cut, bool raw)
{
    const uint64_t count = units->heads * units->n;
    const double *scores = raw ? units->raw : units->pooled;
    uint64_t prefix = 0;
    for (unsigned high = 64; high > 0;) {
        const unsigned low = high > DIGIT_BITS ? high - DIGIT_BITS : 0;
        const uint64_t mask = (UINT64_C(1) << (high - low)) - 1;
        uint64_t bins[N_BINS] = {0};
        for (uint64_t i = 0; i < count; i++) {
            if (units->token_class[i] != (uint8_t)cut->token_class ||
                (raw && key_of(units->pooled[i]) != cut->pooled))
                continue;
            const uint64_t key = key_of(scores[i]);
            if (high == 64 || key >> high == prefix >> high)
                bins[key >> low & mask]++;
        }
        uint64_t bin = mask;
        while (bins[bin] < cut->ties)
            cut->ties -= bins[bin--];
        prefix |= bin << low;
        *(raw ? &cut->raw : &cut->pooled) = prefix;
        if (bins[bin] == cut->ties)
            return true;
        high = low;
    }
    return false;
}

/* kept[] of all units: 1 for the k best, 1 <= k <= units. */
static void keep_best(const struct ranked *units, uint64_t k, uint8_t *kept)
{
    const uint64_t count = units->heads * units->n;
    uint64_t counts[N_CLASSES] = {0};
    for (uint64_t i = 0; i < count; i++)
        counts[units->token_class[i]]++;
    struct cut cut = {.token_class = CLASS_PROTECTED, .ties = k};
    while (cut.ties > counts[cut.token_class]) {
        cut.ties -= counts[cut.token_class];
        cut.token_class--;
    }
    const bool all = cut.ties == counts[cut.token_class] || narrow(units, &cut, false) ||
                     narrow(units, &cut, true);
    if (all)
        cut.ties = UINT64_MAX;
    for (uint64_t t = 0; t < units->n; t++)
        for (uint32_t h = 0; h < units->heads; h++) {
            const uint64_t i = h * units->n + t;
            const uint64_t pooled = key_of(units->pooled[i]), raw = key_of(units->raw[i]);
            bool keep = units->token_class[i] > (uint8_t)cut.token_class;
            if (units->token_class[i] == (uint8_t)cut.token_class) {
                if (pooled != cut.pooled)
                    keep = pooled > cut.pooled;
                else if (raw != cut.raw)
                    keep = raw > cut.raw;
                else if (cut.ties > 0) {
                    keep = true;
                    cut.ties--;
                }
            }
            kept[i] = keep;
        }
}

/* ---- the whole ---- */

static struct ranked head_of(const struct dkv_choice *choice, const struct dkv_choice_work *work,
                             uint32_t h)
{
    const uint64_t n = choice->spec.n;
    return (struct ranked){work->pooled + h * n, work->raw + h * n, work->token_class + h * n, 1,
                           n};
}

/* criticalkv: what the first stage keeps is safe, and scores become the second stage's. */
static void second_stage(const struct dkv_choice *choice, const struct dkv_choice_work *work,
                         uint32_t h, uint64_t k)
{
    const uint64_t n = choice->spec.n;
    const float *weight = choice->weight != NULL ? choice->weight + h * choice->weight_stride
                                                 : NULL;
    double *raw = work->raw + h * n, *pooled = work->pooled + h * n;
    uint8_t *token_class = work->token_class + h * n, *kept = work->kept + h * n;
    if (k / 2 > 0) {
        const struct ranked head = head_of(choice, work, h);
        keep_best(&head, k / 2, kept);
        for (uint64_t t = 0; t < n; t++)
            if (kept[t])
                token_class[t] = CLASS_PROTECTED;
    }
    for (uint64_t t = 0; t < n; t++) {
        raw[t] = (pooled[t] + 1e-4) * (weight != NULL ? (double)weight[t] : 1.0);
        pooled[t] = raw[t];
    }
}

static int32_t *write_kept(const struct dkv_select_spec *spec, const uint8_t *kept, int32_t *to)
{
    for (uint64_t t = 0; t < spec->n; t++)
        if (kept[t])
            *to++ = spec->first_index + (int32_t)t;
    return to;
}

void dkv_choose(const struct dkv_choice *choice, const struct dkv_choice_work *work,
                int32_t *keep_out)
{
    const struct dkv_select_spec *spec = &choice->spec;
    const uint64_t n = spec->n;
    for (uint32_t h = 0; h < choice->heads; h++) {
        if (h > 0 && choice->one_set && !choice->two_stages) {
            memcpy(work->kept + h * n, work->kept, n);
            continue;
        }
        pool_head(choice, work->raw + h * n, work->pooled + h * n);
        classify_head(spec, work->flags + h * n, work->token_class + h * n);
        if (choice->two_stages)
            second_stage(choice, work, h, spec->keep);
        const struct ranked head = head_of(choice, work, h);
        keep_best(&head, spec->keep, work->kept + h * n);
    }
    for (uint32_t h = 0; h < choice->heads; h++)
        keep_out = write_kept(spec, work->kept + h * n, keep_out);
}
