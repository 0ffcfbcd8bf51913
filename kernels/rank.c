/* Ranking finds the cut by radix: which class it falls into follows from counting, then the keys of
 * that class (doubles as integers that order alike) are narrowed by histograms, as in select.c,
 * pooled scores first and raw scores among those that tie. Time is linear whatever the scores are.
 */
#include "kernels/rank.h"

#include <string.h>

#define N_BINS 2048u

struct cut {
    enum dkv_token_class token_class;
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

/* Keys lo .. hi, both included. */
struct range {
    uint64_t lo, hi;
};

/* One pass: histogram of the keys inside `range` of the units of the cut's class (and, for raw, of
 * its pooled key). Returns the smallest and the largest of them. */
static struct range count_keys(const struct dkv_units *units, const struct cut *cut, bool raw,
                               struct range range, unsigned shift, uint64_t bins[N_BINS])
{
    const double *scores = raw ? units->raw : units->pooled;
    struct range met = {UINT64_MAX, 0};
    for (uint32_t h = 0; h < units->heads; h++)
        for (uint64_t i = h * units->stride; i < h * units->stride + units->n; i++) {
            if (units->token_class[i] != (uint8_t)cut->token_class ||
                (raw && key_of(units->pooled[i]) != cut->pooled))
                continue;
            const uint64_t key = key_of(scores[i]);
            if (key < range.lo || key > range.hi)
                continue;
            bins[(key - range.lo) >> shift]++;
            met.lo = key < met.lo ? key : met.lo;
            met.hi = key > met.hi ? key : met.hi;
        }
    return met;
}

/* Narrows `ties` best of these units down to one key: the bin that the cut is in becomes the next
 * range, which ends at the keys that were met, so that plateaus are known after a pass or two. True
 * if nothing below needs to be looked at: all that have the key are kept. */
static bool narrow(const struct dkv_units *units, struct cut *cut, bool raw)
{
    struct range range = {0, UINT64_MAX};
    for (;;) {
        uint64_t bins[N_BINS] = {0};
        unsigned shift = 0;
        while ((range.hi - range.lo) >> shift >= N_BINS)
            shift++;
        const struct range met = count_keys(units, cut, raw, range, shift, bins);
        uint64_t bin = (met.hi - range.lo) >> shift;
        while (bins[bin] < cut->ties)
            cut->ties -= bins[bin--];
        const uint64_t lo = range.lo + (bin << shift), last = (UINT64_C(1) << shift) - 1;
        range.hi = met.hi - lo < last ? met.hi : lo + last;
        range.lo = met.lo > lo ? met.lo : lo;
        *(raw ? &cut->raw : &cut->pooled) = range.lo;
        if (bins[bin] == cut->ties)
            return true;
        if (range.lo == range.hi)
            return false;
    }
}

/* Whether a unit of the cut's class and pooled key is kept. */
static bool settle_tie(struct cut *cut, uint64_t raw)
{
    if (raw != cut->raw)
        return raw > cut->raw;
    if (cut->ties == 0)
        return false;
    cut->ties--;
    return true;
}

void dkv_keep_best(const struct dkv_units *units, uint64_t k, uint8_t *kept)
{
    uint64_t counts[DKV_TOKEN_CLASSES] = {0};
    for (uint32_t h = 0; h < units->heads; h++)
        for (uint64_t t = 0; t < units->n; t++)
            counts[units->token_class[h * units->stride + t]]++;
    struct cut cut = {.token_class = DKV_CLASS_PLACE, .ties = k};
    while (cut.ties > counts[cut.token_class]) {
        cut.ties -= counts[cut.token_class];
        cut.token_class--;
    }
    const bool one_score = units->raw == units->pooled;
    const bool all = cut.ties == counts[cut.token_class] || narrow(units, &cut, false) ||
                     (!one_score && narrow(units, &cut, true));
    if (all)
        cut.ties = UINT64_MAX;
    for (uint64_t t = 0; t < units->n; t++)
        for (uint32_t h = 0; h < units->heads; h++) {
            const uint64_t i = h * units->stride + t;
            const uint64_t pooled = key_of(units->pooled[i]);
            bool keep = units->token_class[i] > (uint8_t)cut.token_class;
            if (units->token_class[i] == (uint8_t)cut.token_class)
                keep = pooled != cut.pooled
                           ? pooled > cut.pooled
                           : settle_tie(&cut, one_score ? 0 : key_of(units->raw[i]));
            kept[i] = keep;
        }
}
