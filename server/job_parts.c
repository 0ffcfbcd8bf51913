/* A job in parts, one for each device that has to do with it.
 *
 * Memory of a GPU is read by the worker of that GPU alone, so a block whose keys, values, queries
 * or page table lie there goes to it; a block of host memory goes to whichever device is least
 * loaded. Nearly every job has one part. Outputs keep the order of the blocks whatever the parts
 * are.
 */
#include "server/job.h"

#include "server/loan.h"

#include <stdlib.h>

uint64_t dkv_job_read_bytes(const struct dkv_block *block, const struct dkv_plan *plan)
{
    const uint64_t key_row = block->head_dim * dkv_dtype_bytes(block->key.dtype);
    const uint64_t value_row = plan->v_dim * dkv_dtype_bytes(block->value.dtype);
    const uint64_t query_row = block->head_dim * dkv_dtype_bytes(block->query.dtype);
    return block->n_tokens * block->kv_heads * (key_row + value_row) +
           (uint64_t)plan->window * block->q_heads * query_row;
}

/* ---- which blocks belong together ---- */

static bool lies_in(const void *at, const struct dkv_loan *loan)
{
    const struct dkv_link_range range = dkv_loan_range(loan);
    return at != NULL && (uint64_t)(uintptr_t)at - (uint64_t)(uintptr_t)range.base < range.bytes;
}

#define POINTERS 5u

/* What of a block may lie in a loan. */
static void list_pointers(const struct dkv_block *block, const void *pointers[POINTERS])
{
    pointers[0] = block->query.base;
    pointers[1] = block->key.base;
    pointers[2] = block->value.base;
    pointers[3] = block->table.entries;
    pointers[4] = block->v_table.entries;
}

static bool any_lies_in(const struct dkv_block *block, const struct dkv_loan *loan)
{
    const void *pointers[POINTERS];
    list_pointers(block, pointers);
    for (unsigned k = 0; k < POINTERS; k++)
        if (lies_in(pointers[k], loan))
            return true;
    return false;
}

/* A fence or an output may be loose, too. */
bool dkv_job_reads_loose(const struct dkv_job *job)
{
    for (unsigned i = 0; i < job->n_loans; i++)
        for (uint32_t b = 0; job->loans[i]->loose && b < job->request.n_blocks; b++)
            if (any_lies_in(&job->blocks[b], job->loans[i]))
                return true;
    return false;
}

/* The device of the memory that `at` points into, which is said to be `device` so far. */
static enum dkv_status add_device(const struct dkv_job *job, uint32_t block, const void *at,
                                  uint32_t *device, struct dkv_error *err)
{
    for (unsigned i = 0; at != NULL && i < job->n_loans; i++) {
        const uint32_t its = job->loans[i]->device;
        if (!lies_in(at, job->loans[i]))
            continue;
        if (its == DKV_LOAN_EVERYWHERE || its == *device)
            return DKV_OK;
        if (*device != DKV_ADMISSION_ANY_DEVICE)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "block %u: its memory lies on two GPUs, which no worker can read",
                                 block);
        *device = its;
        return DKV_OK;
    }
    return DKV_OK;
}

static enum dkv_status find_device(const struct dkv_job *job, uint32_t i, uint32_t *device_out,
                                   struct dkv_error *err)
{
    const void *pointers[POINTERS];
    enum dkv_status status = DKV_OK;
    list_pointers(&job->blocks[i], pointers);
    *device_out = DKV_ADMISSION_ANY_DEVICE;
    for (unsigned k = 0; status == DKV_OK && k < POINTERS; k++)
        status = add_device(job, i, pointers[k], device_out, err);
    return status;
}

/* Blocks of one key can share a launch. A part of several kinds has a batch of its own kind. */
static uint64_t batch_key(const struct dkv_block *block, const struct dkv_plan *plan)
{
    return (uint64_t)block->query.dtype << 48 | (uint64_t)block->key.dtype << 40 |
           (uint64_t)block->head_dim << 20 | plan->v_dim;
}

static void add_block(struct dkv_admission_part *part, const struct dkv_block *block,
                      const struct dkv_plan *plan)
{
    const uint64_t key = batch_key(block, plan);
    part->key = part->n_blocks == 0 || part->key == key ? key : UINT64_MAX;
    part->n_blocks++;
    part->n_tokens += block->n_tokens;
    part->n_bytes += dkv_job_read_bytes(block, plan);
}

static bool has_gpu_memory(const struct dkv_job *job)
{
    for (unsigned i = 0; i < job->n_loans; i++)
        if (dkv_loan_on_gpu(job->loans[i]))
            return true;
    return false;
}

/* Says of each block which part it belongs to, and sums up the parts. */
static enum dkv_status assign(struct dkv_job *job, struct dkv_admission_part *parts,
                              uint32_t *n_parts_out, uint32_t *part_of, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    uint32_t n = 0;
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        uint32_t device, p = 0;
        status = find_device(job, i, &device, err);
        if (status != DKV_OK)
            return status;
        while (p < n && parts[p].device != device)
            p++;
        if (p == n)
            parts[n++] = (struct dkv_admission_part){.device = device};
        add_block(&parts[p], &job->blocks[i], &job->plans[i]);
        part_of[i] = p;
    }
    *n_parts_out = n;
    return DKV_OK;
}

/* ---- what workers are told ---- */

/* Where a block's answer goes: all one after the other. */
struct cursor {
    uint32_t memory;
    uint64_t keep, scores, counts;
};

static struct cursor first_place(const struct dkv_job *job)
{
    const bool in_arena = job->target == NULL;
    struct cursor at = {in_arena ? DKV_LINK_IN_ARENA : job->target->number,
                        in_arena ? dkv_arena_offset(job->arena, job->keep) : job->target_offset, 0,
                        0};
    at.scores = at.keep + job->n_keep * sizeof(*job->keep);
    at.counts = at.scores + job->n_scores * sizeof(*job->scores) + sizeof(*job->offsets);
    return at;
}

static void place_outputs(const struct dkv_job *job, uint32_t i, struct cursor *at,
                          struct dkv_link_block *packed)
{
    const uint64_t heads = job->blocks[i].kv_heads;
    packed->keep = (struct dkv_link_addr){at->memory, at->keep};
    at->keep += job->plans[i].keep_capacity * sizeof(*job->keep);
    if (job->offsets != NULL) {
        packed->counts = (struct dkv_link_addr){at->memory, at->counts};
        at->counts += heads * sizeof(*job->offsets);
    }
    if (job->n_scores == 0)
        return;
    packed->scores = (struct dkv_link_addr){at->memory, at->scores};
    at->scores += job->blocks[i].n_tokens * heads * sizeof(*job->scores);
}

static enum dkv_status write_part(struct dkv_job *job, const struct dkv_request *request,
                                  const struct dkv_plan *plans, const struct dkv_link_range *ranges,
                                  struct dkv_job_descriptor *to, struct dkv_error *err)
{
    const uint64_t n_bytes = dkv_link_job_bytes(job->arena, request->blocks, request->n_blocks,
                                                ranges, job->n_loans);
    to->job = dkv_arena_alloc(job->arena, n_bytes);
    if (to->job == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a job");
    to->bytes = n_bytes;
    dkv_link_pack(job->arena, request, plans, ranges, job->n_loans, to->job);
    return DKV_OK;
}

/* One of several parts: its blocks, copied together. */
static enum dkv_status write_some(struct dkv_job *job, uint32_t p, const uint32_t *part_of,
                                  const struct dkv_link_range *ranges, struct dkv_error *err)
{
    const uint32_t n = job->parts[p].n_blocks;
    struct dkv_block *blocks = calloc(n, sizeof(*blocks));
    struct dkv_plan *plans = calloc(n, sizeof(*plans));
    enum dkv_status status = DKV_E_NOMEM;
    if (blocks == NULL || plans == NULL) {
        dkv_error_set(err, status, "no memory for a job");
    } else {
        struct dkv_request request = job->request;
        uint32_t to = 0;
        for (uint32_t i = 0; i < job->request.n_blocks; i++)
            if (part_of[i] == p) {
                blocks[to] = job->blocks[i];
                plans[to++] = job->plans[i];
            }
        request.blocks = blocks;
        request.n_blocks = n;
        status = write_part(job, &request, plans, ranges, &job->written[p], err);
    }
    free(blocks);
    free(plans);
    return status;
}

static enum dkv_status write_all(struct dkv_job *job, const uint32_t *part_of,
                                 struct dkv_error *err)
{
    struct dkv_link_range few[DKV_JOB_FEW];
    struct dkv_link_range *ranges = few;
    enum dkv_status status = DKV_OK;
    if (job->n_loans > DKV_JOB_FEW) {
        ranges = calloc(job->n_loans, sizeof(*ranges));
        if (ranges == NULL)
            return dkv_error_set(err, DKV_E_NOMEM, "no memory for a job");
    }
    for (unsigned i = 0; i < job->n_loans; i++)
        ranges[i] = dkv_loan_range(job->loans[i]);
    if (job->entry.n_parts == 1)
        status = write_part(job, &job->request, job->plans, ranges, &job->written[0], err);
    else
        for (uint32_t p = 0; status == DKV_OK && p < job->entry.n_parts; p++)
            status = write_some(job, p, part_of, ranges, err);
    if (ranges != few)
        free(ranges);
    if (status != DKV_OK)
        return status;
    struct cursor at = first_place(job);
    uint32_t n_placed[DKV_ADMISSION_LANES_MAX] = {0};
    for (uint32_t i = 0; i < job->request.n_blocks; i++) {
        const uint32_t p = part_of != NULL ? part_of[i] : 0;
        struct dkv_link_block *packed = &job->written[p].job->blocks[n_placed[p]++];
        place_outputs(job, i, &at, packed);
        if (job->rings != NULL)
            packed->ring = job->rings[i];
    }
    return DKV_OK;
}

/* ---- the two of them ---- */

static void fill_entry(struct dkv_job *job, uint32_t n_parts)
{
    const uint64_t priority = (uint64_t)job->request.params.priority;
    job->entry = (struct dkv_admission_entry){
        .parts = job->parts,
        .n_parts = n_parts,
        .priority = priority < UINT32_MAX ? (uint32_t)priority : UINT32_MAX,
        .timeout_us = (uint64_t)job->request.params.timeout,
        .degrade = job->request.params.on_overload == DKV_OVERLOAD_RECENCY &&
                   !job->request.want_scores,
    };
}

static enum dkv_status divide_by_device(struct dkv_job *job, struct dkv_error *err)
{
    struct dkv_admission_part parts[DKV_ADMISSION_LANES_MAX];
    uint32_t n_parts = 0;
    uint32_t only = 0;
    uint32_t *part_of = job->request.n_blocks == 1
                            ? &only
                            : malloc(job->request.n_blocks * sizeof(*part_of));
    if (part_of == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a job");
    enum dkv_status status = assign(job, parts, &n_parts, part_of, err);
    if (status == DKV_OK && n_parts > 1) {
        job->parts = calloc(n_parts, sizeof(*job->parts));
        job->written = calloc(n_parts, sizeof(*job->written));
        if (job->parts == NULL || job->written == NULL)
            status = dkv_error_set(err, DKV_E_NOMEM, "no memory for a job");
    }
    if (status == DKV_OK) {
        for (uint32_t p = 0; p < n_parts; p++)
            job->parts[p] = parts[p];
        fill_entry(job, n_parts);
        status = write_all(job, part_of, err);
    }
    if (part_of != &only)
        free(part_of);
    return status;
}

enum dkv_status dkv_job_divide(struct dkv_job *job, struct dkv_error *err)
{
    job->parts = &job->only_part;
    job->written = &job->only_written;
    if (has_gpu_memory(job))
        return divide_by_device(job, err);
    job->only_part = (struct dkv_admission_part){.device = DKV_ADMISSION_ANY_DEVICE};
    for (uint32_t i = 0; i < job->request.n_blocks; i++)
        add_block(&job->only_part, &job->blocks[i], &job->plans[i]);
    fill_entry(job, 1);
    return write_all(job, NULL, err);
}

void dkv_job_drop_parts(struct dkv_job *job)
{
    for (uint32_t p = 0; job->written != NULL && p < job->entry.n_parts; p++)
        dkv_arena_free(job->arena, job->written[p].job, job->written[p].bytes,
                       job->written[p].bytes);
    if (job->parts != &job->only_part)
        free(job->parts);
    if (job->written != &job->only_written)
        free(job->written);
    job->parts = NULL;
    job->written = NULL;
    job->entry.n_parts = 0;
}
