/* Allocation of a job's parts. Everything is allocated before the job is queued, so that between
 * dequeue and reply nothing can fail for want of memory. */
#include "server/job.h"

#include "server/loan.h"
#include "server/region.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

/* What each block takes here, and in the arena for a worker. */
#define BLOCK_BYTES \
    ((uint64_t)(sizeof(struct dkv_block) + sizeof(struct dkv_plan) + sizeof(struct dkv_link_block)))

struct dkv_job *dkv_job_new(struct dkv_arena *arena)
{
    struct dkv_job *job = malloc(sizeof(*job));
    if (job != NULL)
        dkv_job_init(job, arena);
    return job;
}

void dkv_job_init(struct dkv_job *job, struct dkv_arena *arena)
{
    memset(job, 0, sizeof(*job));
    job->arena = arena;
    dkv_list_init(&job->ended_node);
}

void dkv_job_charge_to(struct dkv_job *job, struct dkv_quota *quota,
                       struct dkv_quota_holder *holder)
{
    assert(job->charge.quota == NULL);
    job->charge = dkv_charge_begin(quota, holder);
}

/* All that it holds must fit into one client's share, or coming back would not help. */
static enum dkv_status check_share(const struct dkv_job *job, uint64_t bytes, struct dkv_error *err)
{
    const struct dkv_quota *quota = job->charge.quota;
    const uint64_t held = job->body.charge.bytes + job->rows.charge.bytes + job->charge.bytes;
    if (quota == NULL || (held <= quota->client_bytes && bytes <= quota->client_bytes - held))
        return DKV_OK;
    return dkv_error_set(err, DKV_E_TOO_LARGE,
                         "request: body, copies and answer take %llu bytes, one client may hold "
                         "%llu",
                         (unsigned long long)(held + bytes),
                         (unsigned long long)quota->client_bytes);
}

enum dkv_status dkv_job_charge(struct dkv_job *job, uint64_t bytes, struct dkv_error *err)
{
    const enum dkv_status status = check_share(job, bytes, err);
    return status == DKV_OK ? dkv_charge_add(&job->charge, bytes, err) : status;
}

enum dkv_status dkv_job_add_rows(struct dkv_job *job, struct dkv_body_pool *pool, uint64_t bytes,
                                 struct dkv_error *err)
{
    const enum dkv_status status = check_share(job, bytes, err);
    if (status != DKV_OK)
        return status;
    return dkv_body_reserve(&job->rows, pool, job->charge.holder, bytes, 0, true, err);
}

enum dkv_transport dkv_job_transport(const struct dkv_job *job, enum dkv_transport front)
{
    for (uint32_t i = 0; job->parts != NULL && i < job->entry.n_parts; i++)
        if (job->parts[i].device != DKV_ADMISSION_ANY_DEVICE)
            return DKV_TRANSPORT_DEVICE;
    return job->loans == NULL ? front : DKV_TRANSPORT_SHARED;
}

enum dkv_status dkv_job_add_side(struct dkv_job *job, uint64_t bytes, struct dkv_error *err)
{
    const enum dkv_status status = dkv_job_charge(job, bytes, err);
    if (status != DKV_OK)
        return status;
    job->side = dkv_arena_alloc(job->arena, bytes);
    if (job->side == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %llu bytes of numbers",
                             (unsigned long long)bytes);
    job->side_bytes = bytes;
    return DKV_OK;
}

enum dkv_status dkv_job_add_loans(struct dkv_job *job, unsigned n, struct dkv_error *err)
{
    job->loans = n <= DKV_JOB_FEW ? job->few_loans : calloc(n, sizeof(struct dkv_loan *));
    return job->loans != NULL ? DKV_OK : dkv_error_set(err, DKV_E_NOMEM, "no memory for a job");
}

/* A message of 150 bytes may ask for 1,024 layers, so that they count like what is sent. */
enum dkv_status dkv_job_add_blocks(struct dkv_job *job, uint32_t n_blocks, struct dkv_error *err)
{
    const enum dkv_status status = n_blocks == 1 ? DKV_OK
                                                 : dkv_job_charge(job, n_blocks * BLOCK_BYTES, err);
    if (status != DKV_OK)
        return status;
    job->blocks = n_blocks == 1 ? &job->only_block : calloc(n_blocks, sizeof(*job->blocks));
    job->plans = n_blocks == 1 ? &job->only_plan : calloc(n_blocks, sizeof(*job->plans));
    if (job->blocks == NULL || job->plans == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %u blocks", n_blocks);
    job->request.blocks = job->blocks;
    job->request.n_blocks = n_blocks;
    return DKV_OK;
}

/* Elements of all outputs. They cannot overflow: 4096 blocks of 1024 heads of 2^21 tokens. */
static void count_outputs(struct dkv_job *job)
{
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        const struct dkv_block *block = &job->blocks[i];
        job->n_keep += job->plans[i].keep_capacity;
        job->n_heads += block->kv_heads;
        job->ragged = job->ragged || job->plans[i].ragged;
        job->n_scores += job->request.want_scores ? block->n_tokens * block->kv_heads : 0;
        job->n_stored_tokens += block->n_tokens;
        job->n_scored_tokens += job->plans[i].n_valid * block->kv_heads;
        job->n_read_bytes += dkv_job_read_bytes(block, &job->plans[i]);
    }
    job->kv_heads = job->blocks[0].kv_heads;
    job->window = job->plans[0].window;
    job->keep_tokens = job->plans[0].keep_tokens;
    job->n_tokens = job->blocks[0].n_tokens;
}

/* The arena's range is touched, not just reserved: by a worker, or for an answer by recency. */
static bool answers_in_arena(const struct dkv_job *job)
{
    return job->target == NULL || job->request.params.on_overload == DKV_OVERLOAD_RECENCY;
}

enum dkv_status dkv_job_prepare(struct dkv_job *job, uint64_t max_bytes, struct dkv_error *err)
{
    count_outputs(job);
    const bool offsets = job->ragged ||
                         (job->infer != NULL && job->infer->outputs[DKV_OIP_KEEP_OFFSETS].wanted);
    const uint64_t n_bytes = job->n_keep * sizeof(*job->keep) +
                             job->n_scores * sizeof(*job->scores) +
                             (offsets ? (job->n_heads + 1) * sizeof(*job->offsets) : 0);
    job->output_bytes = n_bytes + 1;
    if (n_bytes > max_bytes)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "reply: %llu bytes are above %llu",
                             (unsigned long long)n_bytes, (unsigned long long)max_bytes);
    const enum dkv_status status = dkv_job_charge(job, answers_in_arena(job) ? n_bytes : 0, err);
    if (status != DKV_OK)
        return status;
    job->keep = dkv_arena_alloc(job->arena, n_bytes + 1);
    if (job->keep == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a reply of %llu bytes",
                             (unsigned long long)n_bytes);
    if (job->n_scores > 0)
        job->scores = (float *)(void *)(job->keep + job->n_keep);
    if (offsets)
        job->offsets = job->keep + job->n_keep + job->n_scores;
    return dkv_job_divide(job, err);
}

static int32_t *keep_recent(const struct dkv_block *block, const struct dkv_plan *plan,
                            int32_t *keep)
{
    const uint64_t n_sinks = plan->sinks < plan->keep_tokens ? plan->sinks : plan->keep_tokens;
    const uint64_t n_recent = plan->keep_tokens - n_sinks;
    for (uint32_t h = 0; h < block->kv_heads; h++) {
        for (uint64_t i = 0; i < n_sinks; i++)
            *keep++ = (int32_t)(block->valid_from + i);
        for (uint64_t i = 0; i < n_recent; i++)
            *keep++ = (int32_t)(block->n_tokens - n_recent + i);
    }
    return keep;
}

void dkv_job_answer_by_recency(struct dkv_job *job)
{
    assert(job->n_scores == 0);
    job->degraded = true;
    job->status = DKV_OK;
}

void dkv_job_write_recency(struct dkv_job *job)
{
    int32_t *keep = job->keep;
    uint64_t head = 0;
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        (void)keep_recent(&job->blocks[i], &job->plans[i], keep);
        keep += job->plans[i].keep_capacity;
        for (uint32_t h = 0; h < job->blocks[i].kv_heads && job->offsets != NULL; h++)
            job->offsets[++head] = (int32_t)job->plans[i].keep_tokens;
    }
}

/* Turns the counts of a block's heads, the first of which is `head`, into offsets. False: together
 * they are above its capacity. */
static bool add_up(const struct dkv_job *job, uint32_t i, uint64_t head)
{
    const struct dkv_plan *plan = &job->plans[i];
    uint64_t room = plan->keep_capacity;
    for (uint32_t h = 0; h < job->blocks[i].kv_heads; h++, head++) {
        const uint64_t n = plan->ragged ? (uint32_t)job->offsets[head + 1] : plan->keep_tokens;
        if (n > room)
            return false;
        room -= n;
        job->offsets[head + 1] = job->offsets[head] + (int32_t)n;
    }
    return true;
}

enum dkv_status dkv_job_close_ranks(struct dkv_job *job, struct dkv_error *err)
{
    const int32_t *from = job->keep;
    int32_t *to = job->keep;
    uint64_t head = 0;
    if (job->offsets == NULL)
        return DKV_OK;
    job->offsets[0] = 0;
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        const uint64_t begin = (uint64_t)job->offsets[head];
        if (!add_up(job, i, head))
            return dkv_error_set(err, DKV_E_INTERNAL,
                                 "block %u: its heads keep more than the %llu indices that they "
                                 "have room for",
                                 i, (unsigned long long)job->plans[i].keep_capacity);
        head += job->blocks[i].kv_heads;
        const uint64_t n = (uint64_t)job->offsets[head] - begin;
        memmove(to, from, n * sizeof(*to));
        to += n;
        from += job->plans[i].keep_capacity;
    }
    job->n_keep = (uint64_t)job->offsets[job->n_heads];
    if (job->n_scores > 0)
        job->scores = memmove(to, job->scores, job->n_scores * sizeof(*job->scores));
    job->offsets = memmove(to + job->n_scores, job->offsets,
                           (job->n_heads + 1) * sizeof(*job->offsets));
    return DKV_OK;
}

void dkv_job_release_inputs(struct dkv_job *job)
{
    for (int i = 0; job->infer != NULL && i < DKV_OIP_INPUTS + DKV_OIP_OUTPUTS; i++) {
        if (job->shm[i] != NULL)
            dkv_region_unuse(job->shm[i]);
        job->shm[i] = NULL;
    }
    dkv_body_release(&job->rows);
    dkv_body_release(&job->body);
    dkv_arena_free(job->arena, job->side, job->side_bytes, job->side_bytes);
    dkv_job_drop_parts(job);
    if (job->blocks != &job->only_block)
        free(job->blocks);
    if (job->plans != &job->only_plan)
        free(job->plans);
    free(job->rings);
    if (job->loans != job->few_loans)
        free(job->loans);
    job->side = NULL;
    job->blocks = NULL;
    job->plans = NULL;
    job->rings = NULL;
    job->loans = NULL;
    job->n_loans = 0;
    job->request.blocks = NULL;
}

void dkv_job_free(struct dkv_job *job)
{
    if (job == NULL)
        return;
    dkv_job_fini(job);
    free(job);
}

void dkv_job_fini(struct dkv_job *job)
{
    dkv_job_release_inputs(job);
    if (job->infer != NULL)
        dkv_oip_infer_fini(job->infer);
    free(job->infer);
    dkv_arena_free(job->arena, job->keep, job->output_bytes,
                   job->target == NULL || job->degraded ? job->output_bytes : 0);
    dkv_charge_end(&job->charge);
}
