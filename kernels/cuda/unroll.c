/* Query rows around the end of a ring, one after the other (kernels/engine.h: unroll).
 *
 * A ring has its rows outside its heads or inside them; the copy keeps the order, so that each of
 * the two stretches of rows is one copy of the driver's. They are queued on the engine's stream, in
 * front of the kernels that read them.
 */
#include "kernels/cuda/import.h"

static cudaError_t copy(struct dkv_cu_engine *engine, unsigned char *to, size_t to_pitch,
                        const unsigned char *from, size_t from_pitch, size_t width, size_t height)
{
    if (height == 1 || (to_pitch == width && from_pitch == width))
        return cudaMemcpyAsync(to, from, width * height, cudaMemcpyDeviceToDevice, engine->stream);
    return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height,
                             cudaMemcpyDeviceToDevice, engine->stream);
}

/* n rows of every head from row `row` of the ring, to row `at` of the copy. */
static cudaError_t copy_stretch(struct dkv_cu_engine *engine, const struct dkv_block *block,
                                const struct dkv_view *ring, unsigned char *to, uint64_t at,
                                uint64_t row, uint64_t n)
{
    const size_t row_bytes = block->head_dim * dkv_dtype_bytes(ring->dtype);
    const size_t token_stride = (size_t)ring->token_stride, head_stride = (size_t)ring->head_stride;
    const unsigned char *from = (const unsigned char *)ring->base + ring->offset +
                                row * token_stride;
    if (head_stride == row_bytes) {
        const size_t width = row_bytes * block->q_heads;
        return copy(engine, to + at * width, width, from, token_stride, width, n);
    }
    return copy(engine, to + at * row_bytes, block->q_rows * row_bytes, from, head_stride,
                n * row_bytes, block->q_heads);
}

enum dkv_status dkv_cu_unroll(struct dkv_engine *opaque, const struct dkv_ring *ring,
                              struct dkv_block *block, struct dkv_error *err)
{
    struct dkv_cu_engine *engine = (struct dkv_cu_engine *)opaque;
    struct dkv_cu_slot *slot =
        &engine->slots[(engine->oldest + engine->n_in_flight) % DKV_CU_SLOTS];
    const struct dkv_view from = block->query;
    const size_t row_bytes = block->head_dim * dkv_dtype_bytes(from.dtype);
    const size_t bytes = row_bytes * block->q_heads * block->q_rows;
    const uint64_t to_end = ring->n_rows - ring->first;
    const uint64_t n = block->q_rows < to_end ? block->q_rows : to_end;
    unsigned char *to = dkv_cu_take(&slot->rows, bytes);
    if (to == NULL)
        return dkv_error_set(err, DKV_E_BUSY,
                             "stash: this batch has too many rows around the end of rings");
    enum dkv_status status = dkv_cu_enter(engine, err);
    if (status != DKV_OK)
        return status;
    cudaError_t error = copy_stretch(engine, block, &from, to, 0, ring->first, n);
    if (error == cudaSuccess && n < block->q_rows)
        error = copy_stretch(engine, block, &from, to, n, 0, block->q_rows - n);
    status = dkv_cu_check(engine, error, "copying query rows", err);
    dkv_cu_leave();
    if (status != DKV_OK)
        return status;
    const bool rows_outside = (size_t)from.head_stride == row_bytes;
    block->query.base = to;
    block->query.bytes = bytes;
    block->query.offset = 0;
    block->query.token_stride = (int64_t)(rows_outside ? row_bytes * block->q_heads : row_bytes);
    block->query.head_stride = (int64_t)(rows_outside ? row_bytes : row_bytes * block->q_rows);
    return DKV_OK;
}
