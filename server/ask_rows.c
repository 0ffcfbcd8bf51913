/* Query rows that lie around the end of a ring, laid out one after the other.
 *
 * A copy keeps the ring's order, heads outside or rows outside, so that where rows or heads are
 * adjacent there, one read fetches a whole run of them: the front reads clients' memory by system
 * calls, and a prompt has 32 layers of 32 heads.
 */
#include "server/ask.h"

#include <inttypes.h>

#define ROWS_BYTES_MAX (UINT64_C(64) << 20) /* of one request */

/* Stands for copies until they have a place; the gate wants an address. */
static const uint8_t nowhere = 0;

static uint64_t row_bytes(const struct dkv_block *block)
{
    return block->head_dim * dkv_dtype_bytes(block->query.dtype);
}

static uint64_t copy_bytes(const struct dkv_block *block)
{
    return row_bytes(block) * block->q_heads * block->q_rows;
}

void dkv_ask_shape_rows(const struct dkv_ask_ring *ring, struct dkv_block *block)
{
    const uint64_t row = row_bytes(block);
    const bool rows_outside = ring->head_stride == row;
    block->query.base = &nowhere;
    block->query.bytes = copy_bytes(block); /* the gate has bounded its factors, or refuses */
    block->query.offset = 0;
    block->query.token_stride = (int64_t)(rows_outside ? row * block->q_heads : row);
    block->query.head_stride = (int64_t)(rows_outside ? row : row * block->q_rows);
}

enum dkv_status dkv_ask_place_rows(struct dkv_ask *ask, struct dkv_error *err)
{
    uint64_t total = 0;
    struct dkv_block *blocks = ask->job->blocks;
    if (ask->rings == NULL)
        return DKV_OK;
    for (uint32_t i = 0; i < ask->job->request.n_blocks && total <= ROWS_BYTES_MAX; i++)
        total += ask->rings[i].region != NULL ? copy_bytes(&blocks[i]) : 0;
    if (total == 0)
        return DKV_OK;
    if (total > ROWS_BYTES_MAX)
        return dkv_error_set(err, DKV_E_TOO_LARGE,
                             "query rows around the end of their rings are above %" PRIu64 " bytes",
                             ROWS_BYTES_MAX);
    const enum dkv_status status = dkv_job_add_rows(ask->job, &ask->server->bodies, total, err);
    if (status != DKV_OK)
        return status;
    uint8_t *next = ask->job->rows.data;
    for (uint32_t i = 0; i < ask->job->request.n_blocks; i++) {
        if (ask->rings[i].region == NULL)
            continue;
        ask->rings[i].copy = next;
        blocks[i].query.base = next;
        next += copy_bytes(&blocks[i]);
    }
    return DKV_OK;
}

/* `n_bytes` from a row of the ring on, which are adjacent both there and in the copy. */
static enum dkv_status read_run(const struct dkv_ask_ring *ring, const struct dkv_block *block,
                                uint64_t copy_row, uint64_t ring_row, uint64_t n_bytes,
                                uint64_t head, struct dkv_error *err)
{
    const uint64_t at = ring->start + ring_row * ring->row_stride + head * ring->head_stride;
    uint8_t *to = ring->copy + copy_row * (uint64_t)block->query.token_stride +
                  head * (uint64_t)block->query.head_stride;
    return dkv_region_read(ring->region, at, to, n_bytes, err);
}

/* A stretch of rows that does not wrap. */
static enum dkv_status read_stretch(const struct dkv_ask_ring *ring, const struct dkv_block *block,
                                    uint64_t copy_row, uint64_t ring_row, uint64_t n,
                                    struct dkv_error *err)
{
    const uint64_t row = row_bytes(block);
    const bool heads_adjacent = ring->head_stride == row;
    const uint64_t unit = heads_adjacent ? row * block->q_heads : row;
    const uint64_t n_heads = heads_adjacent ? 1 : block->q_heads;
    const uint64_t n_runs = ring->row_stride == unit ? 1 : n;
    enum dkv_status status = DKV_OK;
    for (uint64_t h = 0; h < n_heads; h++)
        for (uint64_t r = 0; status == DKV_OK && r < n_runs; r++)
            status = read_run(ring, block, copy_row + r, ring_row + r, unit * (n / n_runs), h, err);
    return status;
}

enum dkv_status dkv_ask_read_rows(struct dkv_ask *ask, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (ask->rings == NULL)
        return DKV_OK;
    for (uint32_t i = 0; status == DKV_OK && i < ask->job->request.n_blocks; i++) {
        const struct dkv_ask_ring *ring = &ask->rings[i];
        const struct dkv_block *block = &ask->job->blocks[i];
        if (ring->region == NULL)
            continue;
        const uint64_t first = ring->first % ring->n_rows;
        const uint64_t to_end = ring->n_rows - first;
        const uint64_t n = block->q_rows < to_end ? block->q_rows : to_end;
        status = read_stretch(ring, block, 0, first, n, err);
        if (status == DKV_OK && n < block->q_rows)
            status = read_stretch(ring, block, n, 0, block->q_rows - n, err);
    }
    return status;
}
