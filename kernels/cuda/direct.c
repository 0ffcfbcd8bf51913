/* Large answers that go straight to where the caller wants them.
 *
 * Results come down into the engine's own pinned memory, all of a wave's in one copy, and are
 * copied from there. Where the caller's memory is pinned as well, the device writes large ones to
 * it, which saves the second copy: 210 KB that a processor has not seen yet take it some 10 us, 52
 * KB some 5. Small ones are cheaper together, since each copy of the driver's costs 2 us or more.
 *
 * Such results are there before anybody has judged the unit's report. On an error the outputs are
 * undefined, so that is no one's loss.
 */
#include "kernels/cuda/host.h"

#define DIRECT_FROM ((size_t)32 << 10) /* bytes of a block's indices */

static bool is_pinned(const void *at)
{
    struct cudaPointerAttributes is;
    const cudaError_t error = cudaPointerGetAttributes(&is, at);
    (void)cudaGetLastError();
    return error == cudaSuccess && is.type == cudaMemoryTypeHost;
}

bool dkv_cu_goes_direct(const struct dkv_item *item)
{
    return item->block->kv_heads * item->plan->keep_tokens * sizeof(int32_t) >= DIRECT_FROM &&
           is_pinned(item->keep_out) && (item->scores_out == NULL || is_pinned(item->scores_out));
}

/* `n` heads' rows, `from_pitch` apart on the device. */
static cudaError_t send(struct dkv_cu_engine *engine, void *to, size_t to_pitch, const void *from,
                        size_t from_pitch, size_t row_bytes, uint32_t n)
{
    if (n == 1 || (to_pitch == row_bytes && from_pitch == row_bytes))
        return cudaMemcpyAsync(to, from, row_bytes * n, cudaMemcpyDeviceToHost, engine->stream);
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, row_bytes, n, cudaMemcpyDeviceToHost,
                             engine->stream);
}

/* Adjacent heads of one block, whose results lie at equal distances. */
static cudaError_t send_heads(struct dkv_cu_engine *engine, const struct dkv_cu_slot *slot,
                              const struct dkv_cu_pending *first, uint32_t n)
{
    const struct dkv_item *item = &slot->items[first->item];
    const size_t keep_bytes = item->plan->keep_tokens * sizeof(int32_t);
    const size_t pitch = n > 1 ? first[1].keep - first->keep : keep_bytes;
    const cudaError_t error = send(engine, item->keep_out + first->head * item->plan->keep_tokens,
                                   keep_bytes, slot->io_device + first->keep, pitch, keep_bytes, n);
    if (error != cudaSuccess || first->scores == 0)
        return error;
    const size_t n_tokens = item->block->n_tokens;
    return send(engine, item->scores_out + first->head * n_tokens + item->block->valid_from,
                n_tokens * sizeof(float), slot->io_device + first->scores, pitch,
                item->plan->n_valid * sizeof(float), n);
}

enum dkv_status dkv_cu_send_direct(struct dkv_cu_engine *engine, const struct dkv_cu_slot *slot,
                                   uint32_t n_units, struct dkv_error *err)
{
    const struct dkv_cu_pending *pending = &slot->pending[slot->n_pending];
    cudaError_t error = cudaSuccess;
    for (uint32_t i = 0, n; i < n_units && error == cudaSuccess; i += n) {
        n = 1;
        if (!pending[i].direct)
            continue;
        while (i + n < n_units && pending[i + n].item == pending[i].item &&
               pending[i + n].head == pending[i].head + n)
            n++;
        error = send_heads(engine, slot, &pending[i], n);
    }
    return dkv_cu_check(engine, error, "sending results", err);
}
