/* Views of registered regions in place of a body: each named tensor becomes a range of its region,
 * small vectors are copied, GPU memory becomes a loan. */
#include "server/infer_shm.h"

#include "server/shm.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static bool is_vector(int input)
{
    return input >= DKV_OIP_SINK_LOGITS;
}

static enum dkv_status check_range(uint64_t offset, uint64_t bytes, const struct dkv_region *region,
                                   const char *what, const char *name, struct dkv_error *err)
{
    if (dkv_range_fits(offset, bytes, region->bytes))
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID,
                         "%s %s: %" PRIu64 " bytes at %" PRIu64
                         " are not within the shared memory region's %" PRIu64,
                         what, name, bytes, offset, region->bytes);
}

/* A region that the job uses from now on, as job->shm[place]. */
static enum dkv_status use(const struct dkv_exchange *exchange, struct dkv_job *job, int place,
                           const char *name, const char *what, struct dkv_error *err)
{
    struct dkv_region *region = NULL;
    struct dkv_error why = {0};
    const enum dkv_status status = dkv_shm_find(exchange->server->shm, exchange->client_name, name,
                                                &region, &why);
    if (status != DKV_OK)
        return dkv_error_set(err, status, "%s: %.200s", what, why.text);
    dkv_region_use(region);
    job->shm[place] = region;
    return DKV_OK;
}

/* The vector is what its input names from now on. */
static enum dkv_status read_vector(struct dkv_job *job, int input, char *to,
                                   struct dkv_oip_memory *memory, struct dkv_error *err)
{
    struct dkv_oip_tensor *tensor = &job->infer->inputs[input];
    const struct dkv_region *region = job->shm[input];
    if (dkv_region_on_gpu(region))
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "input %s: only tensors may lie on a GPU",
                             dkv_oip_input_name(input));
    const enum dkv_status status = dkv_region_read(region, tensor->offset, to, tensor->bytes, err);
    memory->regions[input].base = to;
    memory->regions[input].bytes = tensor->bytes;
    tensor->offset = 0;
    return status;
}

static enum dkv_status find_inputs(const struct dkv_exchange *exchange, struct dkv_job *job,
                                   struct dkv_oip_memory *memory, char *vectors,
                                   struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    for (int i = 0; status == DKV_OK && i < DKV_OIP_INPUTS; i++) {
        const struct dkv_oip_tensor *tensor = &job->infer->inputs[i];
        if (tensor->source != DKV_OIP_SHM)
            continue;
        status = use(exchange, job, i, tensor->region, dkv_oip_input_name(i), err);
        if (status == DKV_OK)
            status = check_range(tensor->offset, tensor->bytes, job->shm[i], "input",
                                 dkv_oip_input_name(i), err);
        if (status != DKV_OK)
            return status;
        memory->regions[i].base = dkv_region_base(job->shm[i]);
        memory->regions[i].bytes = job->shm[i]->bytes;
        if (!is_vector(i))
            continue;
        status = read_vector(job, i, vectors, memory, err);
        vectors += tensor->bytes;
    }
    return status;
}

static enum dkv_status find_outputs(const struct dkv_exchange *exchange, struct dkv_job *job,
                                    struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    for (int i = 0; status == DKV_OK && i < DKV_OIP_OUTPUTS; i++) {
        const struct dkv_oip_wanted *wanted = &job->infer->outputs[i];
        if (!wanted->wanted || wanted->region[0] == '\0')
            continue;
        status = use(exchange, job, DKV_OIP_INPUTS + i, wanted->region, dkv_oip_output_name(i),
                     err);
        if (status != DKV_OK)
            return status;
        const struct dkv_region *region = job->shm[DKV_OIP_INPUTS + i];
        if (!region->writable)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "output %s: the shared memory region cannot be written",
                                 dkv_oip_output_name(i));
        status = check_range(wanted->region_offset, wanted->region_bytes, region, "output",
                             dkv_oip_output_name(i), err);
    }
    return status;
}

enum dkv_status dkv_infer_shm_find(struct dkv_exchange *exchange, struct dkv_job *job,
                                   struct dkv_oip_memory *memory, void **vectors_out,
                                   struct dkv_error *err)
{
    *vectors_out = NULL;
    if (!job->infer->uses_shm)
        return DKV_OK;
    if (job->infer->side_bytes > 0 && (*vectors_out = malloc(job->infer->side_bytes)) == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    const enum dkv_status status = find_inputs(exchange, job, memory, *vectors_out, err);
    return status == DKV_OK ? find_outputs(exchange, job, err) : status;
}

static void add_loan(struct dkv_job *job, struct dkv_loan *loan)
{
    for (unsigned i = 0; i < job->n_loans; i++)
        if (job->loans[i] == loan)
            return;
    job->loans[job->n_loans++] = loan;
}

enum dkv_status dkv_infer_shm_lend(struct dkv_job *job, struct dkv_error *err)
{
    if (!job->infer->uses_shm)
        return DKV_OK;
    job->loans = calloc(DKV_OIP_INPUTS + DKV_OIP_OUTPUTS, sizeof(struct dkv_loan *));
    if (job->loans == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    for (int i = 0; i < DKV_OIP_INPUTS + DKV_OIP_OUTPUTS; i++)
        if (job->shm[i] != NULL)
            add_loan(job, job->shm[i]->loan);
    const struct dkv_region *const *shm = (const struct dkv_region *const *)job->shm;
    for (int i = DKV_OIP_QUERY; i <= DKV_OIP_VALUE; i++) {
        if (shm[i] == NULL || !dkv_region_on_gpu(shm[i]))
            continue;
        for (uint32_t b = 0; b < job->request.n_blocks; b++) {
            struct dkv_block *block = &job->blocks[b];
            struct dkv_view *view = i == DKV_OIP_QUERY ? &block->query
                                    : i == DKV_OIP_KEY ? &block->key
                                                       : &block->value;
            view->place = DKV_PLACE_DEVICE;
        }
    }
    return DKV_OK;
}

static uint64_t output_bytes(const struct dkv_job *job, int output)
{
    if (output == DKV_OIP_KEEP_OFFSETS)
        return (job->n_heads + 1) * sizeof(*job->offsets);
    return output == DKV_OIP_KEEP_INDICES ? job->n_keep * sizeof(*job->keep)
                                          : job->n_scores * sizeof(*job->scores);
}

enum dkv_status dkv_infer_shm_check(const struct dkv_exchange *exchange, const struct dkv_job *job,
                                    struct dkv_error *err)
{
    for (int i = 0; i < DKV_OIP_OUTPUTS; i++)
        if (job->shm[DKV_OIP_INPUTS + i] != NULL &&
            job->infer->outputs[i].region_bytes < output_bytes(job, i))
            return dkv_error_set(
                err, DKV_E_INVALID,
                "output %s: shared_memory_byte_size %" PRIu64 " should be at least %" PRIu64,
                dkv_oip_output_name(i), job->infer->outputs[i].region_bytes, output_bytes(job, i));
    if (job->n_read_bytes <= exchange->server->max_body_bytes || !dkv_job_reads_loose(job))
        return DKV_OK;
    return dkv_error_set(err, DKV_E_TOO_LARGE,
                         "%" PRIu64 " bytes would have to be copied, at most %" PRIu64 " are",
                         job->n_read_bytes, exchange->server->max_body_bytes);
}

uint64_t dkv_infer_shm_bytes(const struct dkv_job *job)
{
    uint64_t n_bytes = 0;
    for (int i = 0; i < DKV_OIP_OUTPUTS; i++)
        n_bytes += job->shm[DKV_OIP_INPUTS + i] != NULL ? output_bytes(job, i) : 0;
    return n_bytes;
}

void dkv_infer_shm_write(struct dkv_job *job)
{
    for (int i = 0; job->status == DKV_OK && i < DKV_OIP_OUTPUTS; i++) {
        const struct dkv_region *region = job->shm[DKV_OIP_INPUTS + i];
        const void *from = i == DKV_OIP_KEEP_INDICES   ? (const void *)job->keep
                           : i == DKV_OIP_KEEP_OFFSETS ? (const void *)job->offsets
                                                       : (const void *)job->scores;
        if (region != NULL)
            job->status = dkv_region_write(region, job->infer->outputs[i].region_offset, from,
                                           output_bytes(job, i), &job->error);
    }
}
