/* Allocation of a job's parts. Everything is allocated before the job is queued, so that between
 * dequeue and reply nothing can fail for want of memory. */
#include "server/job.h"

#include <assert.h>
#include <stdlib.h>

struct dkv_job *dkv_job_new(void)
{
    return calloc(1, sizeof(struct dkv_job));
}

enum dkv_status dkv_job_add_blocks(struct dkv_job *job, uint32_t n_blocks, struct dkv_error *err)
{
    job->blocks = calloc(n_blocks, sizeof(*job->blocks));
    job->plans = calloc(n_blocks, sizeof(*job->plans));
    job->items = calloc(n_blocks, sizeof(*job->items));
    if (job->blocks == NULL || job->plans == NULL || job->items == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %u blocks", n_blocks);
    job->request.blocks = job->blocks;
    job->request.n_blocks = n_blocks;
    return DKV_OK;
}

/* Bytes of the rows that scoring a block reads once. The gate has bounded every factor. */
static uint64_t read_bytes(const struct dkv_block *block, const struct dkv_plan *plan)
{
    const uint64_t key_row = block->head_dim * dkv_dtype_bytes(block->key.dtype);
    const uint64_t value_row = plan->v_dim * dkv_dtype_bytes(block->value.dtype);
    const uint64_t query_row = block->head_dim * dkv_dtype_bytes(block->query.dtype);
    return block->n_tokens * block->kv_heads * (key_row + value_row) +
           (uint64_t)plan->window * block->q_heads * query_row;
}

/* Blocks of one key can share a launch. A request of several kinds has a batch of its own kind. */
static uint64_t batch_key(const struct dkv_job *job)
{
    uint64_t key = 0;
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        const struct dkv_block *block = &job->blocks[i];
        const uint64_t one = (uint64_t)block->query.dtype << 48 | (uint64_t)block->key.dtype << 40 |
                             (uint64_t)block->head_dim << 20 | job->plans[i].v_dim;
        if (i > 0 && one != key)
            return UINT64_MAX;
        key = one;
    }
    return key;
}

static void describe_part(struct dkv_job *job)
{
    job->part = (struct dkv_admission_part){
        .key = batch_key(job),
        .device = DKV_ADMISSION_ANY_DEVICE,
        .n_blocks = job->request.n_blocks,
        .n_tokens = job->n_stored_tokens,
        .n_bytes = job->n_read_bytes,
    };
    const uint64_t priority = (uint64_t)job->request.params.priority;
    job->entry = (struct dkv_admission_entry){
        .parts = &job->part,
        .n_parts = 1,
        .priority = priority < UINT32_MAX ? (uint32_t)priority : UINT32_MAX,
        .timeout_us = (uint64_t)job->request.params.timeout,
        .degrade = job->request.params.on_overload == DKV_OVERLOAD_RECENCY &&
                   !job->request.want_scores,
    };
    dkv_list_init(&job->ended_node);
}

/* Elements of all outputs. They cannot overflow: 4096 blocks of 1024 heads of 2^21 tokens. */
static void count_outputs(struct dkv_job *job)
{
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        const struct dkv_block *block = &job->blocks[i];
        job->n_keep += job->plans[i].keep_tokens * block->kv_heads;
        job->n_scores += job->request.want_scores ? block->n_tokens * block->kv_heads : 0;
        job->n_stored_tokens += block->n_tokens;
        job->n_scored_tokens += job->plans[i].n_valid * block->kv_heads;
        job->n_read_bytes += read_bytes(block, &job->plans[i]);
    }
    job->kv_heads = job->blocks[0].kv_heads;
    job->window = job->plans[0].window;
    job->keep_tokens = job->plans[0].keep_tokens;
    job->n_tokens = job->blocks[0].n_tokens;
}

enum dkv_status dkv_job_prepare(struct dkv_job *job, uint64_t max_bytes, struct dkv_error *err)
{
    count_outputs(job);
    describe_part(job);
    const uint64_t n_bytes = job->n_keep * sizeof(*job->keep) +
                             job->n_scores * sizeof(*job->scores);
    if (n_bytes > max_bytes)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "reply: %llu bytes are above %llu",
                             (unsigned long long)n_bytes, (unsigned long long)max_bytes);
    job->keep = malloc(n_bytes + 1);
    if (job->keep == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a reply of %llu bytes",
                             (unsigned long long)n_bytes);

    job->scores = job->n_scores > 0 ? (float *)(void *)(job->keep + job->n_keep) : NULL;
    int32_t *keep = job->keep;
    float *scores = job->scores;
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        const struct dkv_block *block = &job->blocks[i];
        job->items[i] = (struct dkv_item){
            .block = block,
            .params = &job->request.params,
            .plan = &job->plans[i],
            .keep_out = keep,
            .scores_out = scores,
        };
        keep += job->plans[i].keep_tokens * block->kv_heads;
        if (scores != NULL)
            scores += block->n_tokens * block->kv_heads;
    }
    return DKV_OK;
}

static void keep_recent(const struct dkv_block *block, const struct dkv_plan *plan, int32_t *keep)
{
    const uint64_t n_sinks = plan->sinks < plan->keep_tokens ? plan->sinks : plan->keep_tokens;
    const uint64_t n_recent = plan->keep_tokens - n_sinks;
    for (uint32_t h = 0; h < block->kv_heads; h++) {
        for (uint64_t i = 0; i < n_sinks; i++)
            *keep++ = (int32_t)(block->valid_from + i);
        for (uint64_t i = 0; i < n_recent; i++)
            *keep++ = (int32_t)(block->n_tokens - n_recent + i);
    }
}

void dkv_job_answer_by_recency(struct dkv_job *job)
{
    assert(job->n_scores == 0);
    for (uint32_t i = 0; i < job->request.n_blocks; i++)
        keep_recent(&job->blocks[i], &job->plans[i], job->items[i].keep_out);
    job->degraded = true;
    job->status = DKV_OK;
}

void dkv_job_release_inputs(struct dkv_job *job)
{
    dkv_body_release(&job->body);
    free(job->side);
    free(job->blocks);
    free(job->plans);
    free(job->items);
    job->side = NULL;
    job->blocks = NULL;
    job->plans = NULL;
    job->items = NULL;
    job->request.blocks = NULL;
}

void dkv_job_free(struct dkv_job *job)
{
    if (job == NULL)
        return;
    dkv_job_release_inputs(job);
    dkv_oip_infer_fini(&job->infer);
    free(job->keep);
    free(job);
}
