/* The reference, in the order in which one would explain it: read a row, read the page table, one
 * query row's attention, one token's term, the sum over rows and heads, pooling, classes, order.
 *
 * Everything is double. A KV head's keys and values are first copied into plain arrays through the
 * address rule, so that the mathematics below sees matrices. A query row then goes in three steps:
 *
 *   z_j = scale * <q, k_j>, soft-capped;   p_j = exp(z_j - max) / sum;   a = sum_j p_j v_j
 *   b_j = the output if token j did not exist
 *   term_j = p_j^2 |b_j - v_j|^2
 *
 * b_j - v_j is (a - v_j) / (1 - p_j). That quotient is accurate while p_j <= 1/2. At most one token
 * of a row has more; for it the row is really computed again without the token, because 1 - p_j
 * may be far below the precision of a double.
 */
#include "kernels/ref.h"

#include "kernels/convert.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

/* One KV head: its tokens as matrices. */
struct head {
    double *key;     /* [n][d] */
    double *value;   /* [n][dv] */
    bool *invisible; /* [n]: before valid_from, or masked */
};

/* One query row's attention over the visible tokens. */
struct row {
    double *z;      /* [n] */
    double *p;      /* [n]; 0 where not visible */
    double sink_p;  /* share of the sink logit; 0 without one */
    double *output; /* [dv] */
};

struct job {
    const struct dkv_block *block;
    const struct dkv_params *params;
    const struct dkv_plan *plan;
    size_t n, d, dv;
    struct head head;
    struct row row;
    double *query;       /* [d] */
    double *without;     /* [dv]: output with one token left out */
    double *query_score; /* [n]: the sum of one query head's terms */
    struct dkv_ref_answer *answer;
    struct dkv_error *err;
};

/* ---- reading memory ---- */

static bool is_key(const struct job *job, const struct dkv_view *view)
{
    return view == &job->block->key;
}

/* Entry(i) of the address rule: the page that holds tokens i*page .. */
static enum dkv_status read_entry(const struct job *job, const struct dkv_view *view, uint64_t i,
                                  int64_t *entry_out)
{
    const struct dkv_block *block = job->block;
    const bool own = !is_key(job, view) && block->v_table.entries != NULL;
    const struct dkv_page_table *table = own ? &block->v_table : &block->table;
    const uint64_t limit = is_key(job, view) ? job->plan->k_entry_limit : job->plan->v_entry_limit;
    const char *name = own ? "v_table" : "table";

    if (table->entries == NULL) {
        *entry_out = (int64_t)i;
        return DKV_OK;
    }
    int64_t stored;
    const char *at = (const char *)table->entries + i * table->entry_bytes;
    if (table->entry_bytes == sizeof(int32_t)) {
        int32_t narrow;
        memcpy(&narrow, at, sizeof(narrow));
        stored = narrow;
    } else {
        memcpy(&stored, at, sizeof(stored));
    }
    const int64_t entry = table->mask != 0 ? stored & table->mask : stored;
    if (table->has_null_entry && (stored == table->null_entry || entry == table->null_entry))
        return dkv_error_set(job->err, DKV_E_INVALID,
                             "%s: entry %llu is the null entry %lld, but holds valid tokens", name,
                             (unsigned long long)i, (long long)stored);
    if (entry < 0 || (uint64_t)entry >= limit)
        return dkv_error_set(job->err, DKV_E_INVALID, "%s: entry %llu is %lld, not in 0..%lld",
                             name, (unsigned long long)i, (long long)entry, (long long)limit - 1);
    *entry_out = entry;
    return DKV_OK;
}

/* Where the row of token t of head h starts. */
static enum dkv_status locate(const struct job *job, const struct dkv_view *view, uint64_t h,
                              uint64_t t, const char **at_out)
{
    int64_t at = (int64_t)view->offset + (int64_t)h * view->head_stride;
    const uint64_t page = job->block->page_tokens;
    if (page == 0 || view == &job->block->query) {
        at += (int64_t)t * view->token_stride;
    } else {
        int64_t entry = 0;
        const enum dkv_status status = read_entry(job, view, t / page, &entry);
        if (status != DKV_OK)
            return status;
        at += entry * view->page_stride + (int64_t)(t % page) * view->token_stride;
    }
    *at_out = (const char *)view->base + at;
    return DKV_OK;
}

/* Reads one row as doubles; *finite_out tells whether all are, *bad_out the first that is not. */
static enum dkv_status read_row(const struct job *job, const struct dkv_view *view, uint64_t h,
                                uint64_t t, size_t dim, double *out, bool *finite_out,
                                size_t *bad_out)
{
    const char *at;
    const enum dkv_status status = locate(job, view, h, t, &at);
    if (status != DKV_OK)
        return status;
    const size_t bytes = dkv_dtype_bytes(view->dtype);
    double scale = view->scale != 0 ? view->scale : 1.0;
    if (view->head_scales != NULL)
        scale = view->head_scales[h];
    *finite_out = true;
    for (size_t e = dim; e-- > 0;) {
        out[e] = scale * (double)dkv_element_to_f32(at + e * bytes, view->dtype);
        if (!isfinite(out[e])) {
            *finite_out = false;
            *bad_out = e;
        }
    }
    return DKV_OK;
}

static enum dkv_status not_finite(const struct job *job, const char *tensor, const char *kind,
                                  uint64_t h, uint64_t t, size_t e)
{
    return dkv_error_set(job->err, DKV_E_INVALID,
                         "%s: head %llu, %s %llu, element %zu is not finite", tensor,
                         (unsigned long long)h, kind, (unsigned long long)t, e);
}

/* Loads KV head h; tokens that must not be looked at are marked invisible. */
static enum dkv_status load_head(struct job *job, uint64_t h)
{
    const struct dkv_block *block = job->block;
    for (uint64_t t = 0; t < job->n; t++) {
        job->head.invisible[t] = t < block->valid_from;
        if (t < block->valid_from)
            continue;
        const struct {
            const struct dkv_view *view;
            const char *name;
            double *to;
            size_t dim;
        } sides[] = {{&block->key, "key", job->head.key + t * job->d, job->d},
                     {&block->value, "value", job->head.value + t * job->dv, job->dv}};
        for (size_t s = 0; s < 2; s++) {
            bool finite;
            size_t bad = 0;
            const enum dkv_status status = read_row(job, sides[s].view, h, t, sides[s].dim,
                                                    sides[s].to, &finite, &bad);
            if (status != DKV_OK)
                return status;
            if (!finite && job->params->nonfinite == DKV_NONFINITE_ERROR)
                return not_finite(job, sides[s].name, "token", h, t, bad);
            if (!finite)
                job->head.invisible[t] = true;
        }
    }
    return DKV_OK;
}

/* ---- one query row ---- */

static bool visible(const struct job *job, size_t last_seen, size_t j)
{
    return j <= last_seen && !job->head.invisible[j];
}

static double dot(const double *a, const double *b, size_t dim)
{
    double sum = 0;
    for (size_t e = 0; e < dim; e++)
        sum += a[e] * b[e];
    return sum;
}

static double squared_distance(const double *a, const double *b, size_t dim)
{
    double sum = 0;
    for (size_t e = 0; e < dim; e++)
        sum += (a[e] - b[e]) * (a[e] - b[e]);
    return sum;
}

/* Whether p is rounded at all: fp32 holds it as it is, and fp8 is no type for probabilities. */
static bool rounds(const struct job *job)
{
    const enum dkv_dtype dtype = job->block->query.dtype;
    return job->params->p_round == DKV_P_ROUND_INPUT && (dtype == DKV_BF16 || dtype == DKV_FP16);
}

static double round_to_input(const struct job *job, double x)
{
    return rounds(job) ? (double)dkv_round_to_dtype((float)x, job->block->query.dtype) : x;
}

static double sum_without(const double *p, size_t last_seen, size_t left_out)
{
    double sum = 0;
    for (size_t j = 0; j <= last_seen; j++)
        sum += j == left_out ? 0 : p[j];
    return sum;
}

/* output = sum of p_j v_j over all tokens but `left_out` (SIZE_MAX: all). */
static void weigh(const struct job *job, const double *p, size_t last_seen, size_t left_out,
                  double *output)
{
    for (size_t e = 0; e < job->dv; e++)
        output[e] = 0;
    for (size_t j = 0; j <= last_seen; j++) {
        if (p[j] == 0 || j == left_out)
            continue;
        for (size_t e = 0; e < job->dv; e++)
            output[e] += p[j] * job->head.value[j * job->dv + e];
    }
}

/* Softmax of row->z over the visible tokens but `left_out` (SIZE_MAX: all), with the query head's
 * sink logit as one more term of value 0, and the output. Returns how many tokens took part. */
static size_t attend(const struct job *job, const double *z, size_t last_seen, size_t left_out,
                     uint32_t query_head, double *p, double *sink_p_out, double *output)
{
    const float *sink_logits = job->block->sink_logits;
    size_t seen = 0;
    double max = sink_logits != NULL ? (double)sink_logits[query_head] : -INFINITY;
    for (size_t j = 0; j <= last_seen; j++)
        if (visible(job, last_seen, j) && j != left_out && z[j] > max)
            max = z[j];
    const double sink = sink_logits != NULL ? exp((double)sink_logits[query_head] - max) : 0;
    double sum = sink;
    for (size_t j = 0; j < job->n; j++) {
        p[j] = 0;
        if (!visible(job, last_seen, j) || j == left_out)
            continue;
        seen++;
        p[j] = exp(z[j] - max);
        sum += p[j];
    }
    for (size_t j = 0; j <= last_seen; j++)
        p[j] /= sum;
    *sink_p_out = sink / sum;
    weigh(job, p, last_seen, SIZE_MAX, output);
    return seen;
}

/* |b_j - v_j|: how far token j's value is from the output without it. */
static double distance_left_out(struct job *job, size_t last_seen, uint32_t query_head, size_t j,
                                double *p_scratch)
{
    const double *v = job->head.value + j * job->dv;
    const double p = job->row.p[j];
    if (p <= 0.5)
        return sqrt(squared_distance(job->row.output, v, job->dv)) / (1 - p);
    double sink_p;
    attend(job, job->row.z, last_seen, j, query_head, p_scratch, &sink_p, job->without);
    return sqrt(squared_distance(job->without, v, job->dv));
}

/* The published form, (p / (1 - p + eps))^2 |a - v_j|^2, p rounded where asked and a made of that
 * p. For a token with most of the mass both 1 - p and a - v_j are differences of nearly equal
 * numbers, so they are summed from the other tokens: 1 - p = sum p_i, a - v_j = sum p_i v_i -
 * (1 - p) v_j. A rounded p makes 1 - p exact as it stands. */
static void score_published(struct job *job, size_t last_seen)
{
    const double eps = job->params->eps;
    double *p = job->row.p, *output = job->row.output, *rest = job->without;
    for (size_t j = 0; j <= last_seen; j++)
        p[j] = round_to_input(job, p[j]);
    weigh(job, p, last_seen, SIZE_MAX, output);
    for (size_t j = 0; j <= last_seen; j++) {
        if (!visible(job, last_seen, j))
            continue;
        const double *v = job->head.value + j * job->dv;
        double left = 1 - p[j], distance = squared_distance(output, v, job->dv);
        if (p[j] > 0.5) {
            if (!rounds(job))
                left = job->row.sink_p + sum_without(p, last_seen, j);
            weigh(job, p, last_seen, j, rest);
            distance = 0;
            for (size_t e = 0; e < job->dv; e++)
                distance += (rest[e] - left * v[e]) * (rest[e] - left * v[e]);
        }
        const double weight = p[j] / (left + eps);
        job->query_score[j] += weight * weight * distance;
    }
}

/* Adds one query row's terms to query_score. Row t of the window sees tokens up to n - w + t. */
static enum dkv_status score_row(struct job *job, uint32_t query_head, size_t t, double *p_scratch)
{
    const struct dkv_params *params = job->params;
    const size_t last_seen = job->n - job->plan->window + t;
    bool finite;
    size_t bad = 0;
    const enum dkv_status status = read_row(job, &job->block->query, query_head,
                                            job->plan->first_row + t, job->d, job->query, &finite,
                                            &bad);
    if (status != DKV_OK)
        return status;
    if (!finite)
        return not_finite(job, "query", "row", query_head, job->plan->first_row + t, bad);

    for (size_t j = 0; j <= last_seen; j++) {
        if (!visible(job, last_seen, j))
            continue;
        double z = job->plan->scale * dot(job->query, job->head.key + j * job->d, job->d);
        if (params->logit_softcap > 0)
            z = params->logit_softcap * tanh(z / params->logit_softcap);
        job->row.z[j] = z;
    }
    const size_t seen = attend(job, job->row.z, last_seen, SIZE_MAX, query_head, job->row.p,
                               &job->row.sink_p, job->row.output);
    if (seen < 2)
        return DKV_OK; /* one key: protected by class, adds nothing */

    if (params->eps == 0) {
        for (size_t j = 0; j <= last_seen; j++) {
            if (!visible(job, last_seen, j))
                continue;
            const double term = round_to_input(job, job->row.p[j]) *
                                distance_left_out(job, last_seen, query_head, j, p_scratch);
            job->query_score[j] += term * term;
        }
        return DKV_OK;
    }
    score_published(job, last_seen);
    return DKV_OK;
}

/* ---- one KV head ---- */

/* The group's query heads, reduced into raw[n]. */
static enum dkv_status score_head(struct job *job, uint64_t h, double *raw, double *p_scratch)
{
    const uint32_t group = job->plan->group;
    for (size_t j = 0; j < job->n; j++)
        raw[j] = 0;
    for (uint32_t g = 0; g < group; g++) {
        const uint32_t query_head = (uint32_t)h * group + g;
        for (size_t j = 0; j < job->n; j++)
            job->query_score[j] = 0;
        for (size_t t = 0; t < job->plan->window; t++) {
            const enum dkv_status status = score_row(job, query_head, t, p_scratch);
            if (status != DKV_OK)
                return status;
        }
        for (size_t j = 0; j < job->n; j++) {
            if (job->params->gqa == DKV_GQA_MAX)
                raw[j] = fmax(raw[j], job->query_score[j]);
            else
                raw[j] += job->query_score[j];
        }
    }
    for (size_t j = 0; j < job->n && job->params->gqa == DKV_GQA_MEAN; j++)
        raw[j] /= group;
    return DKV_OK;
}

static void classify(const struct job *job, uint8_t *token_class)
{
    const size_t first = job->block->valid_from;
    const size_t window = job->plan->window;
    for (size_t j = first; j < job->n; j++) {
        const bool sink = j < first + job->plan->sinks;
        const bool recent = j >= job->n - job->plan->recent;
        token_class[j] = sink || recent ? DKV_REF_PROTECTED : DKV_REF_CANDIDATE;
        if (job->head.invisible[j])
            token_class[j] = DKV_REF_LOWEST;
    }
    for (size_t t = 0; t < window; t++) { /* a key that some row sees alone */
        size_t seen = 0, key = 0;
        for (size_t j = first; j <= job->n - window + t; j++) {
            if (job->head.invisible[j])
                continue;
            seen++;
            key = j;
        }
        if (seen == 1)
            token_class[key] = DKV_REF_PROTECTED;
    }
}

/* ---- selection ---- */

static void pool(const double *raw, uint64_t n, const struct dkv_params *params,
                 const struct dkv_plan *plan, double *pooled)
{
    const bool prefix = params->pool_scope == DKV_POOL_SCOPE_PREFIX;
    const int64_t begin = prefix ? (int64_t)plan->sinks : 0;
    const int64_t end = (int64_t)(prefix ? n - plan->recent : n);
    const int64_t half = params->kernel / 2;
    for (int64_t i = 0; i < (int64_t)n; i++) {
        pooled[i] = raw[i];
        if (params->pool == DKV_POOL_NONE || i < begin || i >= end)
            continue;
        double max = 0, sum = 0;
        for (int64_t j = i - half; j <= i + half; j++) {
            if (j < begin || j >= end)
                continue;
            max = fmax(max, raw[j]);
            sum += raw[j];
        }
        pooled[i] = params->pool == DKV_POOL_MAX ? max : sum / (double)params->kernel;
    }
}

struct candidate {
    uint8_t token_class;
    double pooled;
    double raw;
    int32_t index;
};

static int better_first(const void *left, const void *right)
{
    const struct candidate *a = left, *b = right;
    if (a->token_class != b->token_class)
        return a->token_class > b->token_class ? -1 : 1;
    if (a->pooled != b->pooled)
        return a->pooled > b->pooled ? -1 : 1;
    if (a->raw != b->raw)
        return a->raw > b->raw ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static int ascending(const void *left, const void *right)
{
    const int32_t a = *(const int32_t *)left, b = *(const int32_t *)right;
    return (a > b) - (a < b);
}

enum dkv_status dkv_ref_select(const double *raw, const uint8_t *token_class, uint64_t n,
                               const struct dkv_params *params, const struct dkv_plan *plan,
                               double *pooled_out, int32_t *keep_out)
{
    struct candidate *order = calloc(n, sizeof(*order));
    if (order == NULL)
        return DKV_E_NOMEM;
    pool(raw, n, params, plan, pooled_out);
    for (uint64_t i = 0; i < n; i++)
        order[i] = (struct candidate){token_class[i], pooled_out[i], raw[i], (int32_t)i};
    qsort(order, n, sizeof(*order), better_first);
    for (uint64_t i = 0; i < plan->keep_tokens; i++)
        keep_out[i] = order[i].index;
    qsort(keep_out, plan->keep_tokens, sizeof(*keep_out), ascending);
    free(order);
    return DKV_OK;
}

/* ---- the whole block ---- */

static enum dkv_status run_head(struct job *job, uint64_t h, double *p_scratch)
{
    const struct dkv_plan *plan = job->plan;
    struct dkv_ref_answer *answer = job->answer;
    const uint64_t first = job->block->valid_from;
    double *raw = answer->raw + h * job->n;
    uint8_t *token_class = answer->token_class + h * job->n;
    int32_t *keep = answer->keep + h * plan->keep_tokens;

    enum dkv_status status = load_head(job, h);
    if (status == DKV_OK)
        status = score_head(job, h, raw, p_scratch);
    if (status != DKV_OK)
        return status;
    classify(job, token_class);
    status = dkv_ref_select(raw + first, token_class + first, plan->n_valid, job->params, plan,
                            answer->pooled + h * job->n + first, keep);
    for (uint64_t i = 0; i < plan->keep_tokens && status == DKV_OK; i++)
        keep[i] += (int32_t)first;
    return status;
}

enum dkv_status dkv_ref_run(const struct dkv_block *block, const struct dkv_params *params,
                            const struct dkv_plan *plan, struct dkv_ref_answer *answer_out,
                            struct dkv_error *err)
{
    const size_t n = block->n_tokens, heads = block->kv_heads, dv = plan->v_dim;
    struct dkv_ref_answer answer = {
        .raw = calloc(heads * n, sizeof(double)),
        .pooled = calloc(heads * n, sizeof(double)),
        .token_class = calloc(heads * n, 1),
        .keep = calloc(heads * plan->keep_tokens, sizeof(int32_t)),
    };
    struct job job = {
        .block = block,
        .params = params,
        .plan = plan,
        .n = n,
        .d = block->head_dim,
        .dv = dv,
        .head = {calloc(n * block->head_dim, sizeof(double)), calloc(n * dv, sizeof(double)),
                 calloc(n, sizeof(bool))},
        .row = {calloc(n, sizeof(double)), calloc(n, sizeof(double)), 0,
                calloc(dv, sizeof(double))},
        .query = calloc(block->head_dim, sizeof(double)),
        .without = calloc(dv, sizeof(double)),
        .query_score = calloc(n, sizeof(double)),
        .answer = &answer,
        .err = err,
    };
    double *p_scratch = calloc(n, sizeof(double));
    const void *blocks_of_memory[] = {
        answer.raw,     answer.pooled,      answer.token_class, answer.keep, job.head.key,
        job.head.value, job.head.invisible, job.row.z,          job.row.p,   job.row.output,
        job.query,      job.without,        job.query_score,    p_scratch};
    enum dkv_status status = DKV_OK;
    for (size_t i = 0; i < sizeof(blocks_of_memory) / sizeof(blocks_of_memory[0]); i++)
        if (blocks_of_memory[i] == NULL)
            status = dkv_error_set(err, DKV_E_NOMEM, "reference: out of memory");
    for (uint64_t h = 0; h < heads && status == DKV_OK; h++)
        status = run_head(&job, h, p_scratch);

    free(job.head.key);
    free(job.head.value);
    free(job.head.invisible);
    free(job.row.z);
    free(job.row.p);
    free(job.row.output);
    free(job.query);
    free(job.without);
    free(job.query_score);
    free(p_scratch);
    if (status != DKV_OK)
        dkv_ref_answer_fini(&answer);
    *answer_out = answer;
    return status;
}

void dkv_ref_answer_fini(struct dkv_ref_answer *answer)
{
    free(answer->raw);
    free(answer->pooled);
    free(answer->token_class);
    free(answer->keep);
    *answer = (struct dkv_ref_answer){0};
}
