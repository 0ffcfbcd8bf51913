/* Host tensors on their way to the device: what is copied from where.
 *
 * Rows are gathered into pinned chunks, one copy each (ring.c). Memory that is pinned already, and
 * not paged, is copied from where it is. Page tables are read and checked here, entry by entry; a
 * bad one fails the job's item.
 */
#include <string.h>

#include "kernels/cuda/host.h"

enum { TABLE_WINDOW = 512 };

/* Reads a table in order; entries of a table on the device come in windows. */
struct table_reader {
    const struct dkv_cu_source *source;
    int64_t window[TABLE_WINDOW];
    uint64_t first; /* entry in window[0], as stored */
    uint64_t count;
};

static int64_t widen(const unsigned char *at, uint32_t entry_bytes)
{
    int32_t narrow;
    int64_t wide;
    if (entry_bytes == sizeof(wide)) {
        memcpy(&wide, at, sizeof(wide));
        return wide;
    }
    memcpy(&narrow, at, sizeof(narrow));
    return narrow;
}

static enum dkv_status fill_window(struct dkv_cu_engine *engine, struct table_reader *reader,
                                   uint64_t index, struct dkv_error *err)
{
    const struct dkv_page_table *table = reader->source->table;
    const uint64_t left = table->n_entries - index;
    unsigned char stored[TABLE_WINDOW * sizeof(int64_t)];
    const unsigned char *from = (const unsigned char *)table->entries + index * table->entry_bytes;
    reader->first = index;
    reader->count = left < TABLE_WINDOW ? left : TABLE_WINDOW;
    const size_t bytes = reader->count * table->entry_bytes;
    if (table->place == DKV_PLACE_DEVICE) {
        const enum dkv_status status = dkv_cu_check(
            engine, cudaMemcpy(stored, from, bytes, cudaMemcpyDeviceToHost), "reading a page table",
            err);
        if (status != DKV_OK)
            return status;
    } else {
        memcpy(stored, from, bytes);
    }
    for (uint64_t i = 0; i < reader->count; i++)
        reader->window[i] = widen(stored + i * table->entry_bytes, table->entry_bytes);
    return DKV_OK;
}

static enum dkv_status page_of(struct dkv_cu_engine *engine, struct table_reader *reader,
                               uint64_t index, uint64_t *page_out, struct dkv_error *err)
{
    const struct dkv_page_table *table = reader->source->table;
    if (table == NULL) {
        *page_out = index;
        return DKV_OK;
    }
    if (index < reader->first || index >= reader->first + reader->count) {
        const enum dkv_status status = fill_window(engine, reader, index, err);
        if (status != DKV_OK)
            return status;
    }
    const int64_t stored = reader->window[index - reader->first];
    const int64_t entry = table->mask != 0 ? stored & table->mask : stored;
    const bool null_page = table->has_null_entry &&
                           (stored == table->null_entry || entry == table->null_entry);
    if (null_page || entry < 0 || (uint64_t)entry >= reader->source->entry_limit)
        return dkv_cu_bad_entry(table, reader->source->name, index, stored,
                                reader->source->entry_limit, err);
    *page_out = (uint64_t)entry;
    return DKV_OK;
}

static bool is_pinned(const void *memory)
{
    struct cudaPointerAttributes attributes;
    if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
        (void)cudaGetLastError();
        return false;
    }
    return attributes.type == cudaMemoryTypeHost;
}

/* Copies `count` rows to `to`: runs of adjacent rows at once. */
static void gather_rows(unsigned char *to, const unsigned char *from, uint64_t count,
                        size_t row_bytes, size_t stride)
{
    if (stride == row_bytes) {
        memcpy(to, from, count * row_bytes);
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        memcpy(to + i * row_bytes, from + i * stride, row_bytes);
}

enum dkv_status dkv_cu_stage_fill(struct dkv_cu_engine *engine, const struct dkv_cu_stage_job *job,
                                  unsigned char *to, struct dkv_error *err)
{
    const struct dkv_cu_source *source = &job->source;
    const struct dkv_view *view = source->view;
    if (view == NULL) { /* plain bytes */
        memcpy(to, job->from, job->bytes);
        return DKV_OK;
    }
    struct table_reader reader = {.source = source};
    const size_t row_bytes = source->dims * dkv_dtype_bytes(view->dtype);
    const size_t stride = (size_t)view->token_stride;
    const uint64_t page_tokens = source->page_tokens;
    uint64_t token = source->first_token;
    if (page_tokens == 0) {
        gather_rows(to, job->from + token * stride, source->n_tokens - token, row_bytes, stride);
        return DKV_OK;
    }
    while (token < source->n_tokens) {
        const uint64_t slot = token % page_tokens;
        const uint64_t in_page = page_tokens - slot;
        const uint64_t left = source->n_tokens - token;
        const uint64_t count = in_page < left ? in_page : left;
        uint64_t page = 0;
        const enum dkv_status status = page_of(engine, &reader, token / page_tokens, &page, err);
        if (status != DKV_OK)
            return status;
        gather_rows(to, job->from + page * (uint64_t)view->page_stride + slot * stride, count,
                    row_bytes, stride);
        to += count * row_bytes;
        token += count;
    }
    return DKV_OK;
}

/* A table in device memory is read through the engine's own thread. */
static bool needs_device(const struct dkv_cu_stage_job *job)
{
    return job->source.table != NULL && job->source.table->place == DKV_PLACE_DEVICE;
}

enum dkv_status dkv_cu_stage_flush(struct dkv_cu_engine *engine, struct dkv_error *err)
{
    bool by_threads = true;
    for (unsigned i = 0; i < engine->n_jobs; i++)
        by_threads = by_threads && !needs_device(&engine->jobs[i]);
    enum dkv_status status = dkv_cu_check(engine, dkv_cu_ring_run(engine, by_threads),
                                          "staging host memory", err);
    for (unsigned i = 0; i < engine->n_jobs && status == DKV_OK; i++) {
        const struct dkv_cu_stage_job *job = &engine->jobs[i];
        if (job->error.status == DKV_OK)
            continue;
        if (engine->lost)
            status = dkv_error_set(err, job->error.status, "%s", job->error.text);
        else
            dkv_cu_fail_item(job->item, &job->error);
    }
    engine->n_jobs = 0;
    return status;
}

static enum dkv_status add_job(struct dkv_cu_engine *engine, const struct dkv_cu_stage_job *job,
                               struct dkv_error *err)
{
    engine->jobs[engine->n_jobs++] = *job;
    return engine->n_jobs < DKV_CU_JOBS ? DKV_OK : dkv_cu_stage_flush(engine, err);
}

enum dkv_status dkv_cu_stage_bytes(struct dkv_cu_engine *engine, struct dkv_item *item,
                                   const void *from, size_t bytes, void *to_device,
                                   struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    for (size_t at = 0; at < bytes && status == DKV_OK; at += DKV_CU_CHUNK_BYTES) {
        const size_t left = bytes - at;
        const struct dkv_cu_stage_job job = {
            .item = item,
            .from = (const unsigned char *)from + at,
            .bytes = left < DKV_CU_CHUNK_BYTES ? left : DKV_CU_CHUNK_BYTES,
            .to_device = (unsigned char *)to_device + at,
        };
        status = add_job(engine, &job, err);
    }
    return status;
}

enum dkv_status dkv_cu_stage_head(struct dkv_cu_engine *engine, struct dkv_item *item,
                                  const struct dkv_cu_source *source, uint32_t head,
                                  unsigned char *to_device, struct dkv_error *err)
{
    const struct dkv_view *view = source->view;
    const size_t row_bytes = source->dims * dkv_dtype_bytes(view->dtype);
    const size_t stride = (size_t)view->token_stride;
    const unsigned char *from = (const unsigned char *)view->base + view->offset +
                                (uint64_t)head * (uint64_t)view->head_stride;
    const uint64_t n_tokens = source->n_tokens - source->first_token;
    if (source->page_tokens == 0 && stride == row_bytes && is_pinned(from))
        return dkv_cu_check(engine,
                            cudaMemcpyAsync(to_device, from + source->first_token * stride,
                                            n_tokens * row_bytes, cudaMemcpyHostToDevice,
                                            engine->copies),
                            "copying pinned host memory", err);
    if (source->page_tokens == 0 && stride > row_bytes && is_pinned(from))
        return dkv_cu_check(
            engine,
            cudaMemcpy2DAsync(to_device, row_bytes, from + source->first_token * stride, stride,
                              row_bytes, n_tokens, cudaMemcpyHostToDevice, engine->copies),
            "copying pinned host memory", err);

    const uint64_t per_chunk = DKV_CU_CHUNK_BYTES / row_bytes;
    enum dkv_status status = DKV_OK;
    for (uint64_t token = source->first_token; token < source->n_tokens && status == DKV_OK;
         token += per_chunk) {
        const uint64_t left = source->n_tokens - token;
        struct dkv_cu_stage_job job = {
            .source = *source, .item = item, .from = from, .to_device = to_device};
        job.source.first_token = token;
        job.source.n_tokens = token + (left < per_chunk ? left : per_chunk);
        job.bytes = (job.source.n_tokens - token) * row_bytes;
        to_device += job.bytes;
        status = add_job(engine, &job, err);
    }
    return status;
}
