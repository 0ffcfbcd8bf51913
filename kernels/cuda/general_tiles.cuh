/* The general scorer's tiles: queries, keys and values as float32 in shared memory, 32 rows by 64
 * keys by 64 dimensions at a time, and the products of queries and keys. Included by general.cu. */
#ifndef DKV_KERNELS_CUDA_GENERAL_TILES_CUH
#define DKV_KERNELS_CUDA_GENERAL_TILES_CUH

#include "kernels/cuda/general_work.cuh"

namespace
{

/* Shared memory of accumulate and score, in floats; the query's stride depends on head_dim. */
struct shared_tiles {
    float *query;  /* [chunk_rows][query_stride] */
    float *tile;   /* [tile_keys][tile_stride]: keys, then values, 64 dimensions at a time */
    float *center; /* [DKV_HEAD_DIM_MAX] */
    float *terms;  /* [chunk_rows][tile_stride]: logits, weights, outputs or terms */
    const unsigned char **key_rows; /* [tile_keys], NULL: not there */
    const unsigned char **value_rows;
    int query_stride;
};

__host__ __device__ inline int padded_dims(uint32_t dims)
{
    return static_cast<int>(ceil_div(dims, chunk_dims) * chunk_dims);
}

__host__ __device__ inline size_t shared_bytes(uint32_t head_dim)
{
    const size_t floats = chunk_rows * (padded_dims(head_dim) + 4) + tile_keys * tile_stride +
                          chunk_rows * tile_stride + DKV_HEAD_DIM_MAX;
    return floats * sizeof(float) + 2 * tile_keys * sizeof(void *);
}

__device__ shared_tiles carve(unsigned char *memory, uint32_t head_dim)
{
    shared_tiles s;
    s.key_rows = reinterpret_cast<const unsigned char **>(memory);
    s.value_rows = s.key_rows + tile_keys;
    s.query_stride = padded_dims(head_dim) + 4;
    s.tile = reinterpret_cast<float *>(s.value_rows + tile_keys);
    s.terms = s.tile + tile_keys * tile_stride;
    s.center = s.terms + chunk_rows * tile_stride;
    s.query = s.center + DKV_HEAD_DIM_MAX;
    return s;
}

__device__ void note_nonfinite(const dkv_cu_unit &unit, int tensor, uint32_t head, uint32_t token,
                               uint32_t element)
{
    atomicMin(&unit.report->nonfinite, DKV_CU_PLACE(tensor, head, token, element));
}

/* Loads rows first_row.. of the unit's queries, zero-padded in both directions. */
__device__ void load_query(const dkv_cu_block &block, const dkv_cu_unit &unit,
                           const shared_tiles &s, uint32_t first_row, uint32_t rows)
{
    const int groups = padded_dims(block.head_dim) / 8;
    const int bytes = static_cast<int>(dkv_cu_dtype_bytes(block.q_dtype));
    for (int i = threadIdx.x; i < chunk_rows * groups; i += threads) {
        const uint32_t row = first_row + i / groups;
        const uint32_t dim = i % groups * 8;
        float x[8] = {};
        if (row < rows && dim < block.head_dim) {
            const uint32_t head = row / block.window;
            const uint32_t t = row % block.window;
            dkv_cu_load8(unit.q + head * block.q_head_stride + t * block.q_row_stride + dim * bytes,
                         block.q_dtype, block.q_align, unit.q_scales ? unit.q_scales[head] : 1.0f,
                         x);
            for (int e = 0; e < 8; e++)
                if (!dkv_cu_finite(x[e]))
                    note_nonfinite(unit, 0, unit.head * block.group + head, t, dim + e);
        }
        float *to = s.query + (i / groups) * s.query_stride + dim;
        for (int e = 0; e < 8; e++)
            to[e] = x[e];
    }
}

/* Finds the rows of 64 keys from `first_key` on; `last_key` ends the range. */
__device__ void find_rows(const dkv_cu_block &block, const dkv_cu_unit &unit, const shared_tiles &s,
                          uint32_t first_key, uint32_t last_key)
{
    if (threadIdx.x < 2 * tile_keys) {
        const uint32_t slot = threadIdx.x % tile_keys;
        const uint32_t key = first_key + slot;
        const bool wanted = key < last_key && !dkv_cu_masked(unit, key);
        const uint32_t token = block.valid_from + key;
        if (threadIdx.x < tile_keys)
            s.key_rows[slot] = wanted
                                   ? dkv_cu_row(block.k, unit.k, token, &unit.report->bad_k_entry)
                                   : nullptr;
        else
            s.value_rows[slot] = wanted && block.v_dim > 0
                                     ? dkv_cu_row(block.v, unit.v, token, &unit.report->bad_v_entry)
                                     : nullptr;
    }
}

/* Where terms are distances values are used less the first visible key's value. Scores do not
 * change, but then values that are all equal give exact zeros, and a common offset costs no digits.
 * Rounded probabilities do not add up to 1, nor do an average's over the prefix, so there nothing
 * may be taken away. */
__device__ void load_center(const dkv_cu_block &block, const dkv_cu_unit &unit, float *center)
{
    uint32_t key = 0;
    while (key < block.n_valid && dkv_cu_masked(unit, key))
        key++;
    const unsigned char *row = nullptr;
    if (key < block.n_valid && moves_origin(block))
        row = dkv_cu_row(block.v, unit.v, block.valid_from + key, &unit.report->bad_v_entry);
    for (uint32_t dim = threadIdx.x; dim < DKV_HEAD_DIM_MAX; dim += blockDim.x)
        center[dim] = row && dim < block.v_dim
                          ? dkv_cu_load1(row + dim * dkv_cu_dtype_bytes(block.v.dtype),
                                         block.v.dtype, unit.v_scale)
                          : 0.0f;
}

/* Loads dimensions first_dim.. of 64 rows into s.tile, zero-padded; thread i: row i/4, 16 of the
 * 64 dimensions; `center` is taken away if there is one. Returns the largest magnitude; reports
 * what is not finite if asked to. */
__device__ float load_tile(const dkv_cu_rows &rows, const unsigned char *const *row_at,
                           const shared_tiles &s, float scale, const float *center,
                           uint32_t first_dim, uint32_t dims, const dkv_cu_unit *report_to,
                           int tensor, uint32_t first_token)
{
    const int slot = threadIdx.x / 4;
    const int bytes = static_cast<int>(dkv_cu_dtype_bytes(rows.dtype));
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t at = (threadIdx.x % 4 + i * 4) * 8;
        const uint32_t dim = first_dim + at;
        float x[8] = {};
        if (row_at[slot] && dim < dims) {
            dkv_cu_load8(row_at[slot] + dim * bytes, rows.dtype, rows.align, scale, x);
            for (int e = 0; e < 8; e++) {
                if (report_to && !dkv_cu_finite(x[e]))
                    note_nonfinite(*report_to, tensor, report_to->head, first_token + slot,
                                   dim + e);
                x[e] -= center ? center[dim + e] : 0.0f;
                largest = fmaxf(largest, fabsf(x[e]));
            }
        }
        float4 *to = reinterpret_cast<float4 *>(s.tile + slot * tile_stride + at);
        to[0] = make_float4(x[0], x[1], x[2], x[3]);
        to[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
    return largest;
}

/* Products of 32 rows x 64 keys: thread (y, x) has rows y, y+16 and keys x, x+16, x+32, x+48. Both
 * passes call this, so that they see the same logits. */
__device__ void products(const dkv_cu_block &block, const dkv_cu_unit &unit, const shared_tiles &s,
                         const dkv_cu_unit *report_to, uint32_t first_key, float (&z)[2][4])
{
    const int x = threadIdx.x % 16;
    const int y = threadIdx.x / 16;
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 4; k++)
            z[r][k] = 0;
    for (uint32_t dim = 0; dim < block.head_dim; dim += chunk_dims) {
        float sum[2][4][2] = {}; /* even and odd dimensions of this chunk: short sums err less */
        __syncthreads();
        load_tile(block.k, s.key_rows, s, unit.k_scale, nullptr, dim, block.head_dim, report_to, 1,
                  block.valid_from + first_key);
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < chunk_dims; d += 4) {
            float4 q[2];
            for (int r = 0; r < 2; r++)
                q[r] = *reinterpret_cast<const float4 *>(s.query + (y + 16 * r) * s.query_stride +
                                                         dim + d);
            for (int k = 0; k < 4; k++) {
                const float4 key = *reinterpret_cast<const float4 *>(
                    s.tile + (x + 16 * k) * tile_stride + d);
                for (int r = 0; r < 2; r++) {
                    sum[r][k][0] = fmaf(q[r].x, key.x, sum[r][k][0]);
                    sum[r][k][1] = fmaf(q[r].y, key.y, sum[r][k][1]);
                    sum[r][k][0] = fmaf(q[r].z, key.z, sum[r][k][0]);
                    sum[r][k][1] = fmaf(q[r].w, key.w, sum[r][k][1]);
                }
            }
        }
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 4; k++)
                z[r][k] += sum[r][k][0] + sum[r][k][1];
    }
}

/* A logit from a product of a query and a key. */
__device__ float logit(const dkv_cu_block &block, float product)
{
    const float z = product * block.scale;
    return block.softcap > 0 ? block.softcap * tanhf(z / block.softcap) : z;
}

/* logit - reference, rounded once. */
__device__ float logit_above(const dkv_cu_block &block, float product, float reference)
{
    return block.softcap > 0 ? logit(block, product) - reference
                             : fmaf(product, block.scale, -reference);
}

/* One element of a key's value, less the center. */
__device__ float value_at(const dkv_cu_block &block, const dkv_cu_unit &unit, const float *center,
                          int key, uint32_t dim)
{
    const unsigned char *row = dkv_cu_row(block.v, unit.v, block.valid_from + key,
                                          &unit.report->bad_v_entry);
    return row ? dkv_cu_load1(row + dim * dkv_cu_dtype_bytes(block.v.dtype), block.v.dtype,
                              unit.v_scale) -
                     center[dim]
               : 0.0f;
}

} // namespace

#endif
