/* The reference, in the order in which one would explain it: one query row's attention, one token's
 * term, the sum over rows and heads, classes; before it reading (ref_read.c), after it pooling and
 * order (ref_select.c).
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
#include "kernels/ref_priv.h"

#include "kernels/convert.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

/* ---- one query row ---- */

static bool visible(const struct dkv_ref_job *job, size_t last_seen, size_t j)
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
static bool rounds(const struct dkv_ref_job *job)
{
    const enum dkv_dtype dtype = job->block->query.dtype;
    return job->params->p_round == DKV_P_ROUND_INPUT && (dtype == DKV_BF16 || dtype == DKV_FP16);
}

static double round_to_input(const struct dkv_ref_job *job, double x)
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
static void weigh(const struct dkv_ref_job *job, const double *p, size_t last_seen, size_t left_out,
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
static size_t attend(const struct dkv_ref_job *job, const double *z, size_t last_seen,
                     size_t left_out, uint32_t query_head, double *p, double *sink_p_out,
                     double *output)
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
static double distance_left_out(struct dkv_ref_job *job, size_t last_seen, uint32_t query_head,
                                size_t j, double *p_scratch)
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
static void score_published(struct dkv_ref_job *job, size_t last_seen)
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
static enum dkv_status score_row(struct dkv_ref_job *job, uint32_t query_head, size_t t,
                                 double *p_scratch)
{
    const struct dkv_params *params = job->params;
    const size_t last_seen = job->n - job->plan->window + t;
    bool finite;
    size_t bad = 0;
    const enum dkv_status status = dkv_ref_read_row(job, &job->block->query, query_head,
                                                    job->plan->first_row + t, job->d, job->query,
                                                    &finite, &bad);
    if (status != DKV_OK)
        return status;
    if (!finite)
        return dkv_ref_not_finite(job, "query", "row", query_head, job->plan->first_row + t, bad);

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
static enum dkv_status score_head(struct dkv_ref_job *job, uint64_t h, double *raw,
                                  double *p_scratch)
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

static void classify(const struct dkv_ref_job *job, uint8_t *token_class)
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

/* ---- the whole block ---- */

static enum dkv_status run_head(struct dkv_ref_job *job, uint64_t h, double *p_scratch)
{
    const struct dkv_plan *plan = job->plan;
    struct dkv_ref_answer *answer = job->answer;
    const uint64_t first = job->block->valid_from;
    double *raw = answer->raw + h * job->n;
    uint8_t *token_class = answer->token_class + h * job->n;
    int32_t *keep = answer->keep + h * plan->keep_tokens;

    enum dkv_status status = dkv_ref_load_head(job, h);
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
    struct dkv_ref_job job = {
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
