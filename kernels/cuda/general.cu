/* The general scorer: every shape, type, view and profile, in plain float32 arithmetic.
 *
 * It answers what no faster scorer takes and is the judge of those, so it is written to be read.
 * Keys [n][D], values [n][Dv], rows R = g * w of a unit; three kernels, each launched once a wave:
 *
 *   accumulate   item = (unit, key range, 32 rows). Online softmax over the range's keys, 64 at a
 *                time: logits, then sum of exp(z) v over all keys but the row's largest so far.
 *   merge        item = (unit, row). Joins the ranges in their order: where the row's largest
 *                logit is, the output without that key (b), the output (a).
 *   score        item = (unit, 64 keys). Logits again, and p^2 |b_j - v_j|^2 added up over rows.
 *
 * The key that is left out of the sums is what makes the answer exact at attention sinks: with p
 * near 1 neither 1 - p nor a - v survives float32, but p, b and v do (docs/numerics.md).
 * When a later key turns out larger, the one left out so far joins the sums, its value read again.
 *
 * With eps > 0 and p_round the output is made of rounded probabilities, which need the softmax's
 * sum first: such blocks run accumulate and merge a second time.
 *
 * Key ranges depend on the block alone and are joined in order, so the split of the work over the
 * chip never shows in the bits. 256 threads: 2 rows x 4 keys of logits each, or (warp) 4 rows x
 * (lane) 2 columns of every 64 values.
 */
#include "kernels/cuda/device.cuh"

namespace
{

constexpr int threads = 256;
constexpr int tile_keys = 64;
constexpr int chunk_rows = 32;
constexpr int chunk_dims = 64;
constexpr int tile_stride = chunk_dims + 4; /* rows four banks apart: no conflicts of 16 bytes */
constexpr int max_ranges = 32;
constexpr int min_range_keys = 512;
constexpr size_t unit_partial_bytes = 4u << 20;

/* What accumulate leaves per (range, row); the sums follow it: [v_dim] float32. */
struct partial {
    float top;    /* largest logit, -inf if the row sees no key of this range */
    int top_key;  /* its key, or -1 */
    float second; /* largest of the others: what the sums are relative to */
    float sum;    /* of exp(z - second) over the others */
};

/* What merge leaves per row; p of a key is exp(z - top) * p_top. */
struct row_result {
    float top;
    float p_top;    /* 0: this row adds nothing */
    int top_key;    /* its term is top_term */
    float top_term; /* already times the range factor */
};

/* Where things are in unit.work. */
struct layout {
    uint32_t rows;
    uint32_t n_ranges;
    uint32_t range_keys;
    uint32_t partial_floats;
    size_t value_max; /* float [n_ranges]: largest |v| */
    size_t results;   /* row_result [rows] */
    size_t output;    /* float [rows][v_dim] */
    size_t bytes;
};

__host__ __device__ inline layout layout_of(const dkv_cu_block &block)
{
    layout l;
    l.rows = block.group * block.window;
    l.partial_floats = sizeof(partial) / sizeof(float) + block.v_dim;
    const size_t range_bytes = static_cast<size_t>(l.rows) * l.partial_floats * sizeof(float);
    size_t ranges = unit_partial_bytes / range_bytes;
    ranges = ranges > max_ranges ? max_ranges : ranges < 4 ? 4 : ranges;
    size_t keys = (block.n_valid + ranges - 1) / ranges;
    keys = keys < min_range_keys ? min_range_keys : keys;
    l.range_keys = static_cast<uint32_t>((keys + tile_keys - 1) / tile_keys * tile_keys);
    l.n_ranges = (block.n_valid + l.range_keys - 1) / l.range_keys;
    l.value_max = range_bytes * l.n_ranges;
    l.results = l.value_max + max_ranges * sizeof(float);
    l.output = l.results + l.rows * sizeof(row_result);
    l.bytes = l.output + static_cast<size_t>(l.rows) * block.v_dim * sizeof(float);
    return l;
}

__host__ __device__ inline uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* The wave's work: item i of a kernel belongs to the last unit whose first item is <= i. */
struct work_list {
    const dkv_cu_block *blocks;
    const dkv_cu_unit *units;
    const uint32_t *first_item; /* [n_units + 1] */
    uint32_t n_units;
};

__device__ uint32_t find_unit(const work_list &work, uint32_t item)
{
    uint32_t lo = 0;
    uint32_t hi = work.n_units;
    while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (work.first_item[mid] <= item)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

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
            s.value_rows[slot] = wanted
                                     ? dkv_cu_row(block.v, unit.v, token, &unit.report->bad_v_entry)
                                     : nullptr;
    }
}

/* True if this block's output is made of rounded probabilities. */
__device__ __host__ inline bool rounds_output(const dkv_cu_block &block)
{
    return block.p_round && block.eps > 0 &&
           (block.q_dtype == DKV_BF16 || block.q_dtype == DKV_FP16);
}

/* Values are used less the first visible key's value. Scores do not change, but then values that
 * are all equal give exact zeros, and a common offset costs no digits. Rounded probabilities do not
 * add up to 1, so there nothing may be taken away. */
__device__ void load_center(const dkv_cu_block &block, const dkv_cu_unit &unit, float *center)
{
    uint32_t key = 0;
    while (key < block.n_valid && dkv_cu_masked(unit, key))
        key++;
    const unsigned char *row = nullptr;
    if (key < block.n_valid && !rounds_output(block))
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

__device__ bool sees(const dkv_cu_block &block, uint32_t row, uint32_t key)
{
    return key <= block.n_valid - block.window + row % block.window;
}

/* The largest logit, its key, and the largest of the others. */
struct top_two {
    float first;
    int key;
    float second;
};

__device__ top_two join(const top_two &a, const top_two &b)
{
    const bool b_first = b.first > a.first || (b.first == a.first && b.key < a.key);
    const top_two &win = b_first ? b : a;
    const top_two &lose = b_first ? a : b;
    return {win.first, win.key, fmaxf(win.second, lose.first)};
}

__device__ top_two warp_top_two(top_two mine)
{
    for (int step = 16; step; step >>= 1) {
        const top_two other = {__shfl_xor_sync(~0u, mine.first, step),
                               __shfl_xor_sync(~0u, mine.key, step),
                               __shfl_xor_sync(~0u, mine.second, step)};
        mine = join(mine, other);
    }
    return mine;
}

__device__ float warp_sum(float x)
{
    for (int step = 16; step; step >>= 1)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* exp(x - reference), where both may be -inf. */
__device__ float weight(float x, float reference)
{
    return x == -INFINITY ? 0.0f : expf(x - reference);
}

/* One row's softmax over one tile: turns the row's logits in `z` into weights relative to the new
 * state.second and updates the state. What the accumulated sums must be multiplied by, and the
 * weight and key of the value that now joins them, are returned. */
struct rescale {
    float keep;
    float join_weight; /* 0: none joins */
    int join_key;
};

__device__ rescale absorb(partial &state, float *z, int lane, int first_key)
{
    const float x[2] = {z[lane], z[lane + 32]};
    const top_two low = {x[0], first_key + lane, -INFINITY};
    const top_two high = {x[1], first_key + lane + 32, -INFINITY};
    const top_two tile = warp_top_two(join(low, high));

    const bool larger = tile.first > state.top; /* of equals the first stays out */
    const float second = fmaxf(state.second, larger ? fmaxf(state.top, tile.second) : tile.first);
    rescale r = {weight(state.second, second), 0.0f, -1};
    if (larger && state.top_key >= 0) {
        r.join_weight = weight(state.top, second);
        r.join_key = state.top_key;
    }
    float sum = 0;
    for (int i = 0; i < 2; i++) {
        const bool left_out = larger && first_key + lane + 32 * i == tile.key;
        const float p = left_out ? 0.0f : weight(x[i], second);
        z[lane + 32 * i] = p;
        sum += p;
    }
    state.sum = state.sum * r.keep + r.join_weight + warp_sum(sum);
    state.second = second;
    if (larger) {
        state.top = tile.first;
        state.top_key = tile.key;
    }
    return r;
}

/* The same for the second pass of p_round: the final, rounded probabilities. */
__device__ rescale absorb_rounded(const row_result &row, uint32_t dtype, float *z, int lane)
{
    for (int i = 0; i < 2; i++) {
        float &x = z[lane + 32 * i];
        x = dkv_cu_round(weight(x, row.top) * row.p_top, dtype);
    }
    return {1.0f, 0.0f, -1};
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

/* Adds the value that was left out so far to the lane's columns of one row's sums. */
template <int columns>
__device__ __forceinline__ void join_value(const dkv_cu_block &block, const dkv_cu_unit &unit,
                                           const rescale &change, const float *center, int lane,
                                           float (&sums)[columns])
{
#pragma unroll
    for (int i = 0; i < columns; i++) {
        const uint32_t dim = i / 2 * chunk_dims + lane * 2 + i % 2;
        if (dim < block.v_dim)
            sums[i] = fmaf(change.join_weight, value_at(block, unit, center, change.join_key, dim),
                           sums[i]);
    }
}

template <int chunks>
__global__ void __launch_bounds__(threads, 2) accumulate(work_list work, bool rounded)
{
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ float warp_largest[threads / 32];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    if (rounded && !rounds_output(block))
        return;
    const layout l = layout_of(block);
    const uint32_t n_chunks = ceil_div(l.rows, chunk_rows);
    const uint32_t item = blockIdx.x - work.first_item[index];
    const uint32_t range = item / n_chunks;
    const uint32_t first_row = item % n_chunks * chunk_rows;
    const uint32_t range_end = min(block.n_valid, (range + 1) * l.range_keys);
    const shared_tiles s = carve(memory, block.head_dim);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const dkv_cu_unit *report_to = rounded ? nullptr : &unit;
    const row_result *results = reinterpret_cast<row_result *>(unit.work + l.results);

    partial state[4];
    float sums[4][2 * chunks] = {};
    float largest = 0;
    for (int r = 0; r < 4; r++)
        state[r] = {-INFINITY, -1, -INFINITY, 0.0f};
    load_query(block, unit, s, first_row, l.rows);
    load_center(block, unit, s.center);

    for (uint32_t first_key = range * l.range_keys; first_key < range_end; first_key += tile_keys) {
        __syncthreads();
        find_rows(block, unit, s, first_key, range_end);
        float z[2][4];
        products(block, unit, s, report_to, first_key, z);
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 4; k++) {
                const int row = threadIdx.x / 16 + 16 * r;
                const int slot = threadIdx.x % 16 + 16 * k;
                const bool visible = s.key_rows[slot] &&
                                     sees(block, first_row + row, first_key + slot);
                const float logit_here = logit(block, z[r][k]);
                if (visible && !dkv_cu_finite(logit_here) && first_row + row < l.rows)
                    atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
                s.terms[row * tile_stride + slot] = visible ? logit_here : -INFINITY;
            }
        __syncthreads();

#pragma unroll
        for (int r = 0; r < 4; r++) {
            const uint32_t row = first_row + warp * 4 + r;
            float *terms = s.terms + (warp * 4 + r) * tile_stride;
            const rescale change = !rounded
                                       ? absorb(state[r], terms, lane, static_cast<int>(first_key))
                                   : row < l.rows
                                       ? absorb_rounded(results[row], block.q_dtype, terms, lane)
                                       : rescale{1.0f, 0.0f, -1};
#pragma unroll
            for (int c = 0; c < chunks; c++) {
                sums[r][2 * c] *= change.keep;
                sums[r][2 * c + 1] *= change.keep;
            }
            if (change.join_weight > 0) /* the whole warp agrees */
                join_value(block, unit, change, s.center, lane, sums[r]);
        }

#pragma unroll
        for (int c = 0; c < chunks; c++) {
            if (c * chunk_dims >= block.v_dim)
                break;
            __syncthreads();
            largest = fmaxf(largest, load_tile(block.v, s.value_rows, s, unit.v_scale, s.center,
                                               c * chunk_dims, block.v_dim, report_to, 2,
                                               block.valid_from + first_key));
            __syncthreads();
#pragma unroll 2
            for (int slot = 0; slot < tile_keys; slot += 4) {
                float2 v[4];
                for (int i = 0; i < 4; i++)
                    v[i] = *reinterpret_cast<const float2 *>(s.tile + (slot + i) * tile_stride +
                                                             lane * 2);
                for (int r = 0; r < 4; r++) {
                    const float4 p = *reinterpret_cast<const float4 *>(
                        s.terms + (warp * 4 + r) * tile_stride + slot);
                    const float weights[4] = {p.x, p.y, p.z, p.w};
                    for (int i = 0; i < 4; i++) {
                        sums[r][2 * c] = fmaf(weights[i], v[i].x, sums[r][2 * c]);
                        sums[r][2 * c + 1] = fmaf(weights[i], v[i].y, sums[r][2 * c + 1]);
                    }
                }
            }
        }
    }

    float *partials = reinterpret_cast<float *>(unit.work) +
                      static_cast<size_t>(range) * l.rows * l.partial_floats;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const uint32_t row = first_row + warp * 4 + r;
        if (row >= l.rows)
            continue;
        float *to = partials + static_cast<size_t>(row) * l.partial_floats;
        if (lane == 0)
            *reinterpret_cast<partial *>(to) = state[r];
#pragma unroll
        for (int c = 0; c < chunks; c++)
            if (const uint32_t dim = c * chunk_dims + lane * 2; dim < block.v_dim)
                *reinterpret_cast<float2 *>(to + sizeof(partial) / sizeof(float) +
                                            dim) = make_float2(sums[r][2 * c], sums[r][2 * c + 1]);
    }
    for (int step = 16; step; step >>= 1)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    if (lane == 0)
        warp_largest[warp] = largest;
    __syncthreads();
    if (threadIdx.x == 0 && first_row == 0 && !rounded) {
        for (int w = 1; w < threads / 32; w++)
            largest = fmaxf(largest, warp_largest[w]);
        reinterpret_cast<float *>(unit.work + l.value_max)[range] = largest;
    }
}

/* The exponent e of the range factor: 40, or less where |v| or 1/eps would let the sum of R terms
 * (p 2^e)^2 |b - v|^2 leave float32. */
__device__ int factor_exponent(const dkv_cu_block &block, const layout &l, float value_max)
{
    const float octaves = 2 * log2f(fmaxf(value_max, 1e-18f)) +
                          log2f(4.0f * static_cast<float>(block.v_dim * l.rows)) -
                          (block.eps > 0 ? 2 * fminf(log2f(block.eps), 0.0f) : 0.0f);
    return min(DKV_CU_EXPONENT, static_cast<int>(floorf((126.0f - octaves) / 2)));
}

constexpr int merge_threads = 128;

__device__ float block_sum(float x, float *shared)
{
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        shared[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared[0];
    for (int w = 1; w < merge_threads / 32; w++)
        x += shared[w];
    return x;
}

/* The term of the row's largest key: p is known to the last bit of 1 - p only here. */
__device__ float top_term(const dkv_cu_block &block, float p, float rest, float distance,
                          float factor)
{
    const float front = block.p_round ? dkv_cu_round(p, block.q_dtype) : p;
    if (block.eps == 0) {
        const float x = front * factor;
        return x * x * distance;
    }
    const float x = p / (rest + block.eps) * rest * factor;
    return x * x * distance;
}

__global__ void __launch_bounds__(merge_threads) merge(work_list work)
{
    __shared__ partial ranges[max_ranges];
    __shared__ float shared[merge_threads / 32];
    __shared__ float center[DKV_HEAD_DIM_MAX];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t row = blockIdx.x - work.first_item[index];
    const float *partials = reinterpret_cast<float *>(unit.work) +
                            static_cast<size_t>(row) * l.partial_floats;
    const size_t range_stride = static_cast<size_t>(l.rows) * l.partial_floats;
    const float *range_values = reinterpret_cast<float *>(unit.work + l.value_max);
    float *output = reinterpret_cast<float *>(unit.work + l.output) +
                    static_cast<size_t>(row) * block.v_dim;

    if (threadIdx.x < l.n_ranges)
        ranges[threadIdx.x] = *reinterpret_cast<const partial *>(partials +
                                                                 threadIdx.x * range_stride);
    load_center(block, unit, center);
    __syncthreads();

    uint32_t best = 0;
    float value_max = 0;
    for (uint32_t i = 0; i < l.n_ranges; i++) {
        if (ranges[i].top > ranges[best].top)
            best = i;
        value_max = fmaxf(value_max, range_values[i]);
    }
    float second = -INFINITY;
    for (uint32_t i = 0; i < l.n_ranges; i++)
        second = fmaxf(second, fmaxf(ranges[i].second, i == best ? -INFINITY : ranges[i].top));
    const bool alone = second == -INFINITY; /* one visible key, or none */
    const float sink = unit.sink_logits ? unit.sink_logits[row / block.window] : -INFINITY;
    second = fmaxf(second, sink);

    const float top = ranges[best].top;
    const int top_key = ranges[best].top_key;
    float sum = weight(sink, second);
    for (uint32_t i = 0; i < l.n_ranges; i++) {
        sum = fmaf(weight(ranges[i].second, second), ranges[i].sum, sum);
        sum += i == best ? 0.0f : weight(ranges[i].top, second);
    }
    const float others = alone ? 0.0f : sum * expf(second - top); /* relative to the top key */
    const float p = 1.0f / (1.0f + others);
    const float rest = others > 1e30f ? 1.0f : others / (1.0f + others);

    float distance = 0;
    for (uint32_t dim = threadIdx.x; dim < block.v_dim; dim += merge_threads) {
        float b = -weight(sink, second) * center[dim]; /* the sink's value is 0 */
        for (uint32_t i = 0; i < l.n_ranges; i++) {
            const float *sums = partials + i * range_stride + sizeof(partial) / sizeof(float);
            b = fmaf(weight(ranges[i].second, second), sums[dim], b);
            if (i != best && ranges[i].top_key >= 0)
                b = fmaf(weight(ranges[i].top, second),
                         value_at(block, unit, center, ranges[i].top_key, dim), b);
        }
        b = alone ? 0.0f : b / sum;
        const float v = top_key >= 0 ? value_at(block, unit, center, top_key, dim) : 0.0f;
        output[dim] = fmaf(p, v, rest * b);
        distance = fmaf(b - v, b - v, distance);
    }
    distance = block_sum(distance, shared);

    if (threadIdx.x == 0) {
        const int exponent = factor_exponent(block, l, value_max);
        row_result result = {0.0f, 0.0f, -1, 0.0f};
        if (!alone) {
            result = {top, p, top_key, top_term(block, p, rest, distance, ldexpf(1.0f, exponent))};
            if (rounds_output(block))
                result.top_key = -1; /* the published form has no exact term */
        }
        reinterpret_cast<row_result *>(unit.work + l.results)[row] = result;
        if (row == 0)
            *unit.exponent = exponent;
        if (!(value_max <= 1e18f) || !dkv_cu_finite(distance))
            atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
    }
}

/* After the second accumulate: the output of rounded probabilities, itself rounded. */
__global__ void __launch_bounds__(merge_threads) merge_rounded(work_list work)
{
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    if (!rounds_output(block))
        return;
    const layout l = layout_of(block);
    const uint32_t row = blockIdx.x - work.first_item[index];
    const float *sums = reinterpret_cast<float *>(unit.work) +
                        static_cast<size_t>(row) * l.partial_floats +
                        sizeof(partial) / sizeof(float);
    float *output = reinterpret_cast<float *>(unit.work + l.output) +
                    static_cast<size_t>(row) * block.v_dim;
    for (uint32_t dim = threadIdx.x; dim < block.v_dim; dim += merge_threads) {
        float a = 0;
        for (uint32_t i = 0; i < l.n_ranges; i++)
            a += sums[static_cast<size_t>(i) * l.rows * l.partial_floats + dim];
        output[dim] = dkv_cu_round(a, block.q_dtype);
    }
}

/* p / (1 - p), as the block's profile wants it, for every key but the row's largest. */
__device__ float odds(const dkv_cu_block &block, float p)
{
    const float front = block.p_round ? dkv_cu_round(p, block.q_dtype) : p;
    return block.eps == 0 ? front / (1.0f - p) : front / (1.0f - front + block.eps);
}

/* Sums of rows, per key: over t inside a query head, then over heads as `gqa` says. */
struct gatherer {
    float head;
    float total;
};

__device__ void gather(gatherer &g, const dkv_cu_block &block, uint32_t row, float term)
{
    g.head += term;
    if ((row + 1) % block.window == 0) {
        g.total = block.gqa == DKV_GQA_MAX ? fmaxf(g.total, g.head) : g.total + g.head;
        g.head = 0;
    }
}

/* |a - v|^2 for the thread's 2 rows x 4 keys. */
__device__ void distances(const dkv_cu_block &block, const dkv_cu_unit &unit, const layout &l,
                          const shared_tiles &s, uint32_t first_row, float (&d2)[2][4])
{
    const float *output = reinterpret_cast<const float *>(unit.work + l.output);
    const int x = threadIdx.x % 16;
    const int y = threadIdx.x / 16;
    for (int r = 0; r < 2; r++)
        for (int k = 0; k < 4; k++)
            d2[r][k] = 0;
    for (uint32_t dim = 0; dim < block.v_dim; dim += chunk_dims) {
        __syncthreads();
        load_tile(block.v, s.value_rows, s, unit.v_scale, s.center, dim, block.v_dim, nullptr, 2,
                  0);
        for (int i = threadIdx.x; i < chunk_rows * chunk_dims; i += threads) {
            const uint32_t row = first_row + i / chunk_dims;
            const uint32_t at = dim + i % chunk_dims;
            s.terms[i / chunk_dims * tile_stride + i % chunk_dims] =
                row < l.rows && at < block.v_dim
                    ? output[static_cast<size_t>(row) * block.v_dim + at]
                    : 0.0f;
        }
        __syncthreads();
        float sum[2][4][2] = {};
#pragma unroll 4
        for (int d = 0; d < chunk_dims; d += 4) {
            float4 a[2];
            for (int r = 0; r < 2; r++)
                a[r] = *reinterpret_cast<const float4 *>(s.terms + (y + 16 * r) * tile_stride + d);
            for (int k = 0; k < 4; k++) {
                const float4 v = *reinterpret_cast<const float4 *>(s.tile +
                                                                   (x + 16 * k) * tile_stride + d);
                for (int r = 0; r < 2; r++) {
                    sum[r][k][0] = fmaf(a[r].x - v.x, a[r].x - v.x, sum[r][k][0]);
                    sum[r][k][1] = fmaf(a[r].y - v.y, a[r].y - v.y, sum[r][k][1]);
                    sum[r][k][0] = fmaf(a[r].z - v.z, a[r].z - v.z, sum[r][k][0]);
                    sum[r][k][1] = fmaf(a[r].w - v.w, a[r].w - v.w, sum[r][k][1]);
                }
            }
        }
        for (int r = 0; r < 2; r++)
            for (int k = 0; k < 4; k++)
                d2[r][k] += sum[r][k][0] + sum[r][k][1];
    }
}

__global__ void __launch_bounds__(threads, 2) score(work_list work)
{
    extern __shared__ __align__(16) unsigned char memory[];
    const uint32_t index = find_unit(work, blockIdx.x);
    const dkv_cu_unit &unit = work.units[index];
    const dkv_cu_block &block = work.blocks[unit.block];
    const layout l = layout_of(block);
    const uint32_t first_key = (blockIdx.x - work.first_item[index]) * tile_keys;
    const shared_tiles s = carve(memory, block.head_dim);
    const row_result *results = reinterpret_cast<const row_result *>(unit.work + l.results);
    const float factor = ldexpf(1.0f, *unit.exponent);
    gatherer sum = {0.0f, 0.0f};

    find_rows(block, unit, s, first_key, block.n_valid);
    load_center(block, unit, s.center);
    for (uint32_t first_row = 0; first_row < l.rows; first_row += chunk_rows) {
        __syncthreads();
        load_query(block, unit, s, first_row, l.rows);
        float z[2][4];
        float d2[2][4];
        products(block, unit, s, nullptr, first_key, z);
        distances(block, unit, l, s, first_row, d2);
        __syncthreads(); /* s.terms changes from outputs to terms */
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int slot_row = threadIdx.x / 16 + 16 * r;
            const uint32_t row = first_row + slot_row;
            const row_result result = row < l.rows ? results[row] : row_result{0, 0, -1, 0};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int slot = threadIdx.x % 16 + 16 * k;
                const uint32_t key = first_key + slot;
                float term = 0;
                if (s.key_rows[slot] && result.p_top > 0 && sees(block, row, key)) {
                    const float x = odds(block, expf(logit_above(block, z[r][k], result.top)) *
                                                    result.p_top) *
                                    factor;
                    term = static_cast<int>(key) == result.top_key ? result.top_term
                                                                   : x * x * d2[r][k];
                }
                s.terms[slot_row * tile_stride + slot] = term;
            }
        }
        __syncthreads();
        if (threadIdx.x < tile_keys)
            for (uint32_t r = 0; r < chunk_rows && first_row + r < l.rows; r++)
                gather(sum, block, first_row + r, s.terms[r * tile_stride + threadIdx.x]);
    }
    const uint32_t key = first_key + threadIdx.x;
    if (threadIdx.x < tile_keys && key < block.n_valid) {
        const float total = block.gqa == DKV_GQA_MEAN ? sum.total / static_cast<float>(block.group)
                                                      : sum.total;
        if (!dkv_cu_finite(total))
            atomicOr(&unit.report->flags, DKV_CU_OVERFLOW);
        unit.scores[key] = total;
    }
}

/* ---- launching ---- */

enum kernel_index { kernel_accumulate, kernel_merge, kernel_score, n_kernels };

uint32_t items_of(const dkv_cu_block &block, int kernel)
{
    const layout l = layout_of(block);
    switch (kernel) {
    case kernel_accumulate: return l.n_ranges * ceil_div(l.rows, chunk_rows);
    case kernel_merge: return l.rows;
    default: return ceil_div(block.n_valid, tile_keys);
    }
}

typedef void (*accumulate_fn)(work_list, bool);

/* By the largest v_dim of the launch, in chunks of 64. */
accumulate_fn accumulate_for(uint32_t v_dim)
{
    return v_dim <= 64    ? accumulate<1>
           : v_dim <= 128 ? accumulate<2>
           : v_dim <= 256 ? accumulate<4>
                          : accumulate<8>;
}

cudaError_t prepare(const dkv_cu_device *)
{
    const int most = static_cast<int>(shared_bytes(DKV_HEAD_DIM_MAX));
    const void *plain[] = {reinterpret_cast<const void *>(merge),
                           reinterpret_cast<const void *>(merge_rounded)};
    for (const void *kernel : plain) {
        cudaFuncAttributes attributes; /* loads the kernel now, not at its first launch */
        const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
        if (error != cudaSuccess)
            return error;
    }
    for (uint32_t v_dim = 64; v_dim <= DKV_HEAD_DIM_MAX; v_dim *= 2) {
        const cudaError_t error = cudaFuncSetAttribute(
            accumulate_for(v_dim), cudaFuncAttributeMaxDynamicSharedMemorySize, most);
        if (error != cudaSuccess)
            return error;
    }
    return cudaFuncSetAttribute(score, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
}

bool takes(const dkv_cu_device *, const dkv_cu_block *)
{
    return true;
}

size_t unit_bytes(const dkv_cu_block *block)
{
    return layout_of(*block).bytes;
}

size_t extra_bytes(const dkv_cu_device *, const dkv_cu_wave *, uint32_t, uint32_t n)
{
    return sizeof(uint32_t) * (n + 1) * n_kernels;
}

void fill(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n, void *extra)
{
    uint32_t *at = static_cast<uint32_t *>(extra);
    for (int kernel = 0; kernel < n_kernels; kernel++) {
        uint32_t items = 0;
        for (uint32_t u = 0; u < n; u++) {
            *at++ = items;
            items += items_of(wave->blocks_host[wave->units_host[first + u].block], kernel);
        }
        *at++ = items;
    }
}

cudaError_t launch(const dkv_cu_device *, const dkv_cu_wave *wave, uint32_t first, uint32_t n,
                   const void *extra_host, const void *extra_device, cudaStream_t stream)
{
    const uint32_t *counts = static_cast<const uint32_t *>(extra_host);
    const uint32_t *lists = static_cast<const uint32_t *>(extra_device);
    uint32_t head_dim = 0;
    uint32_t v_dim = 0;
    bool rounded = false;
    for (uint32_t u = 0; u < n; u++) {
        const dkv_cu_block &block = wave->blocks_host[wave->units_host[first + u].block];
        head_dim = head_dim > block.head_dim ? head_dim : block.head_dim;
        v_dim = v_dim > block.v_dim ? v_dim : block.v_dim;
        rounded = rounded || rounds_output(block);
    }
    work_list work[n_kernels];
    uint32_t items[n_kernels];
    for (int kernel = 0; kernel < n_kernels; kernel++) {
        work[kernel] = {wave->blocks, wave->units + first, lists + kernel * (n + 1), n};
        items[kernel] = counts[kernel * (n + 1) + n];
    }
    const size_t plain = shared_bytes(head_dim);
    accumulate_for(v_dim)<<<items[kernel_accumulate], threads, plain, stream>>>(
        work[kernel_accumulate], false);
    merge<<<items[kernel_merge], merge_threads, 0, stream>>>(work[kernel_merge]);
    if (rounded) {
        accumulate_for(v_dim)<<<items[kernel_accumulate], threads, plain, stream>>>(
            work[kernel_accumulate], true);
        merge_rounded<<<items[kernel_merge], merge_threads, 0, stream>>>(work[kernel_merge]);
    }
    score<<<items[kernel_score], threads, shared_bytes(head_dim), stream>>>(work[kernel_score]);
    return cudaGetLastError();
}

} // namespace

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_general = {
    "general", prepare, takes, unit_bytes, nullptr, extra_bytes, fill, launch};
