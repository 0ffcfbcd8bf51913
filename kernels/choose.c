/* Pool, classify, deal out, rank (rank.c), write. */
#include "kernels/choose.h"

#include "kernels/rank.h"

#include <math.h>
#include <string.h>

/* ---- memory ---- */

static size_t rounded(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

size_t dkv_choice_bytes(uint32_t heads, uint64_t n, bool chunks)
{
    const size_t count = (size_t)heads * n;
    return (chunks ? 3 : 2) * rounded(count * sizeof(double)) + 3 * rounded(count) +
           rounded(heads * sizeof(uint64_t));
}

void dkv_choice_place(struct dkv_choice_work *work, uint32_t heads, uint64_t n, bool chunks,
                      void *memory)
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
    at += rounded(count);
    work->counts = (uint64_t *)(void *)at;
    at += rounded(heads * sizeof(uint64_t));
    work->unit_raw = chunks ? (double *)(void *)at : NULL;
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
        token_class[t] = inside || (flags[t] & DKV_TOKEN_PROTECTED) ? DKV_CLASS_PROTECTED
                                                                    : DKV_CLASS_CANDIDATE;
        if (flags[t] & DKV_TOKEN_LOWEST)
            token_class[t] = DKV_CLASS_LOWEST;
    }
}

/* ---- chunks ---- */

/* The chunk of token t, counted from the one that token 0 is in. */
static inline uint64_t unit_of(const struct dkv_choice *choice, uint64_t t)
{
    const uint64_t first = (uint64_t)choice->spec.first_index;
    return (first + t) / choice->chunk - first / choice->chunk;
}

static uint64_t unit_count(const struct dkv_choice *choice)
{
    return unit_of(choice, choice->spec.n - 1) + 1;
}

/* Sums a head's tokens up to chunks, in place; a chunk is of the best class of its tokens, or
 * protected by its place. */
static void gather_chunks(const struct dkv_choice *choice, const struct dkv_choice_work *work,
                          uint32_t h)
{
    const uint64_t n = choice->spec.n;
    double *pooled = work->pooled + h * n, *unit_raw = work->unit_raw + h * n;
    const double *raw = work->raw + h * n;
    uint8_t *token_class = work->token_class + h * n;
    for (uint64_t t = 0; t < n;) {
        const uint64_t unit = unit_of(choice, t), begin = t;
        double pooled_sum = 0.0, raw_sum = 0.0;
        uint8_t best = DKV_CLASS_LOWEST;
        for (; t < n && unit_of(choice, t) == unit; t++) {
            pooled_sum += pooled[t];
            raw_sum += raw[t];
            best = token_class[t] > best ? token_class[t] : best;
        }
        if (begin < choice->spec.sinks || begin >= n - choice->spec.recent)
            best = DKV_CLASS_PLACE;
        pooled[unit] = pooled_sum;
        unit_raw[unit] = raw_sum;
        token_class[unit] = best;
    }
}

/* From chunks to tokens again; a chunk's number is never above that of its tokens. */
static void spread_chunks(const struct dkv_choice *choice, uint8_t *kept)
{
    for (uint64_t t = choice->spec.n; t-- > 0;)
        kept[t] = kept[unit_of(choice, t)];
}

/* ---- budgets ---- */

/* A block's units. */
struct deal {
    const struct dkv_choice *choice;
    const struct dkv_choice_work *work;
    uint64_t units;    /* of a head */
    uint64_t protect;  /* of them, by position */
    const double *raw; /* of units */
};

static struct dkv_units units_of(const struct deal *deal, uint32_t first, uint32_t heads)
{
    const uint64_t at = first * deal->choice->spec.n;
    return (struct dkv_units){
        deal->work->pooled + at, deal->raw + at, deal->work->token_class + at, heads, deal->units,
        deal->choice->spec.n};
}

/* Units that a head keeps of k tokens. */
static uint64_t units_for(const struct deal *deal, uint64_t k)
{
    const uint64_t tokens = deal->choice->spec.sinks + deal->choice->spec.recent;
    if (k >= deal->choice->spec.n)
        return deal->units;
    return deal->protect + (k > tokens ? (k - tokens) / deal->choice->chunk : 0);
}

static uint64_t clamp(uint64_t x, uint64_t low, uint64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Makes the best `units` of each head safe. */
static void make_safe(const struct deal *deal, uint64_t units)
{
    const uint64_t n = deal->choice->spec.n;
    for (uint32_t h = 0; h < deal->choice->heads && units > deal->protect; h++) {
        const struct dkv_units head = units_of(deal, h, 1);
        uint8_t *kept = deal->work->kept + h * n;
        dkv_keep_best(&head, units, kept);
        for (uint64_t u = 0; u < deal->units; u++)
            if (kept[u] && deal->work->token_class[h * n + u] < DKV_CLASS_PROTECTED)
                deal->work->token_class[h * n + u] = DKV_CLASS_PROTECTED;
    }
}

/* Counts of each head among the best of all. */
static void count_best(const struct deal *deal, uint64_t total)
{
    const struct dkv_choice *choice = deal->choice;
    const struct dkv_units all = units_of(deal, 0, choice->heads);
    dkv_keep_best(&all, total, deal->work->kept);
    for (uint32_t h = 0; h < choice->heads; h++) {
        deal->work->counts[h] = 0;
        for (uint64_t u = 0; u < deal->units; u++)
            deal->work->counts[h] += deal->work->kept[h * choice->spec.n + u];
    }
}

static void deal_out(const struct deal *deal)
{
    const struct dkv_choice *choice = deal->choice;
    const uint64_t mean = units_for(deal, choice->spec.keep);
    const uint64_t least = clamp(units_for(deal, choice->min_keep + choice->chunk - 1), 1, mean);
    uint64_t *counts = deal->work->counts;
    uint64_t safe = least;
    switch (choice->mode) {
    case DKV_HEADS_UNIFORM:
        for (uint32_t h = 0; h < choice->heads; h++)
            counts[h] = choice->each != NULL ? units_for(deal, choice->each[h]) : mean;
        return;
    case DKV_HEADS_ADAKV_MIX: {
        const double share = (double)(mean - deal->protect);
        if (mean == deal->units) { /* all is kept: rounded shares must not leave one out */
            for (uint32_t h = 0; h < choice->heads; h++)
                counts[h] = mean;
            return;
        }
        count_best(deal, choice->heads * mean);
        for (uint32_t h = 0; h < choice->heads; h++) {
            const double best = counts[h] > deal->protect ? (double)(counts[h] - deal->protect) : 0;
            const double mixed = rint((1 - choice->alpha) * best + floor(choice->alpha * share));
            counts[h] = clamp(deal->protect + (uint64_t)mixed, least, deal->units);
        }
        return;
    }
    case DKV_HEADS_ADAKV_FLOOR:
        safe = units_for(deal, (uint64_t)floor(choice->alpha * (double)choice->spec.keep));
        safe = safe > least ? safe : least;
        break;
    case DKV_HEADS_GLOBAL: break;
    }
    make_safe(deal, safe);
    count_best(deal, choice->heads * mean);
}

void dkv_cake_shares(const double *preferences, size_t n, uint64_t total, uint64_t most,
                     uint64_t *shares_out)
{
    double sum = 0.0;
    uint64_t dealt = 0;
    for (size_t l = 0; l < n; l++)
        sum += preferences[l];
    for (size_t l = 0; l < n; l++) {
        const double part = sum > 0 ? preferences[l] / sum : 1.0 / (double)n;
        const double share = floor(part * (double)total);
        shares_out[l] = share < (double)most ? (uint64_t)share : most;
        dealt += shares_out[l];
    }
    for (; dealt > total; dealt--) { /* where a product was rounded up to a whole number */
        size_t largest = 0;
        for (size_t l = 1; l < n; l++)
            largest = shares_out[l] > shares_out[largest] ? l : largest;
        shares_out[largest]--;
    }
    /* What truncation and the clip have left, evenly, the remainder to the first layers. */
    while (dealt < total) {
        size_t open = 0;
        for (size_t l = 0; l < n; l++)
            open += shares_out[l] < most;
        const uint64_t left = total - dealt, each = left / open;
        uint64_t remainder = left % open;
        for (size_t l = 0; l < n; l++) {
            if (shares_out[l] >= most)
                continue;
            const uint64_t more = clamp(each + (remainder > 0), 0, most - shares_out[l]);
            remainder -= remainder > 0;
            shares_out[l] += more;
            dealt += more;
        }
    }
}

/* ---- the whole ---- */

/* criticalkv: what the first stage keeps is safe, and scores become the second stage's. */
static void second_stage(const struct dkv_choice *choice, const struct dkv_choice_work *work,
                         struct dkv_units *head, uint32_t h)
{
    const uint64_t n = choice->spec.n, half = work->counts[h] / 2;
    const float *weight = choice->weight != NULL ? choice->weight + h * choice->weight_stride
                                                 : NULL;
    double *raw = work->raw + h * n, *pooled = work->pooled + h * n;
    uint8_t *token_class = work->token_class + h * n, *kept = work->kept + h * n;
    if (half > 0) {
        dkv_keep_best(head, half, kept);
        for (uint64_t t = 0; t < n; t++)
            if (kept[t])
                token_class[t] = DKV_CLASS_PROTECTED;
    }
    for (uint64_t t = 0; t < n; t++) {
        raw[t] = (pooled[t] + 1e-4) * (weight != NULL ? (double)weight[t] : 1.0);
        pooled[t] = raw[t];
    }
    head->raw = head->pooled;
}

static uint32_t write_kept(const struct dkv_select_spec *spec, const uint8_t *kept, int32_t *to)
{
    uint32_t count = 0;
    for (uint64_t t = 0; t < spec->n; t++)
        if (kept[t])
            to[count++] = spec->first_index + (int32_t)t;
    return count;
}

/* Pools, classifies and gathers a head. */
static void prepare_head(void *context, size_t h, unsigned thread)
{
    const struct deal *deal = context;
    const struct dkv_choice *choice = deal->choice;
    const struct dkv_choice_work *work = deal->work;
    const uint64_t n = choice->spec.n;
    (void)thread;
    pool_head(choice, work->raw + h * n, work->pooled + h * n);
    classify_head(&choice->spec, work->flags + h * n, work->token_class + h * n);
    if (choice->chunk > 1)
        gather_chunks(choice, work, (uint32_t)h);
}

/* Marks what a head keeps, once its count is known. */
static void choose_head(void *context, size_t h, unsigned thread)
{
    const struct deal *deal = context;
    const struct dkv_choice *choice = deal->choice;
    struct dkv_units head = units_of(deal, (uint32_t)h, 1);
    uint8_t *kept = deal->work->kept + h * choice->spec.n;
    (void)thread;
    if (choice->two_stages)
        second_stage(choice, deal->work, &head, (uint32_t)h);
    dkv_keep_best(&head, deal->work->counts[h], kept);
    if (choice->chunk > 1)
        spread_chunks(choice, kept);
}

static void for_heads(struct deal *deal, dkv_choice_task_fn task, uint32_t heads)
{
    if (deal->choice->run != NULL && heads > 1) {
        deal->choice->run(deal->choice->crew, task, deal, heads);
        return;
    }
    for (uint32_t h = 0; h < heads; h++)
        task(deal, h, 0);
}

void dkv_choose(const struct dkv_choice *choice, const struct dkv_choice_work *work,
                int32_t *keep_out, uint32_t *counts_out)
{
    const struct dkv_select_spec *spec = &choice->spec;
    const uint64_t n = spec->n;
    const bool chunks = choice->chunk > 1, copies = choice->one_set && !choice->two_stages;
    const uint32_t heads = copies ? 1 : choice->heads;
    struct deal deal = {.choice = choice, .work = work, .units = n};
    deal.raw = chunks ? work->unit_raw : work->raw;
    deal.protect = spec->sinks + spec->recent;
    if (chunks) {
        deal.units = unit_count(choice);
        deal.protect = (spec->sinks > 0 ? unit_of(choice, spec->sinks - 1) + 1 : 0) +
                       (spec->recent > 0 ? deal.units - unit_of(choice, n - spec->recent) : 0);
    }
    for_heads(&deal, prepare_head, heads);
    deal_out(&deal);
    for_heads(&deal, choose_head, heads);
    for (uint32_t h = 0; h < choice->heads; h++) {
        const uint32_t count = write_kept(spec, work->kept + (h < heads ? h : 0) * n, keep_out);
        keep_out += count;
        if (counts_out != NULL)
            counts_out[h] = count;
    }
}
