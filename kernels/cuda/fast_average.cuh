/* Pass B where the rows of a query head become one before the term is taken:
 *
 *   score(j) = 1/g sum over heads of pbar / (1 - pbar) |abar - v_j|
 *   pbar = sum over t of c_t p_tj        abar = sum over t of c_t a_t, without the window's values
 *
 * Each of a quad's threads has one head: of a block's 32 rows, those from 8 t on are of that head.
 * Heads of 16 or 32 rows belong to two or four threads, of which the first one adds. Pass B begins
 * with making abar of the rows, as operand for the tensor cores, whose rows 2t and 2t + 1 are hi
 * and lo of thread t's head: its products with the thread's keys come to the thread itself, and
 * there are an eighth as many as with rows that stand for themselves.
 *
 * A key that is the top key of one of a head's rows may have most of pbar. Then 1 - pbar and
 * abar - v are small differences; they are built of what the rows' other keys weigh instead,
 *
 *   1 - pbar = sum of c_t (1 - p_t)      abar - v = sum of c_t (1 - p_t) (b_t - v)
 *
 * (b_t: the row's output without the key, of which the merge leaves b_t - v; other rows enter with
 * c_t (a_t - v)), both relative to the largest c_t (1 - p_t), so that none vanishes. A key of the
 * window has no part in abar: |abar - v| is then no small difference, and 1 - pbar alone is built.
 */
#ifndef DKV_KERNELS_CUDA_FAST_AVERAGE_CUH
#define DKV_KERNELS_CUDA_FAST_AVERAGE_CUH

#include "kernels/cuda/fast_rows.cuh"
#include "kernels/cuda/fast_terms.cuh"

namespace dkv_fast
{

/* An average's squared distance below this part of |v|^2 is for the general scorer. */
constexpr float TOO_NEAR = 1.0f / 65536;

/* The query heads of a block of 32 rows. */
struct bar_heads {
    int log_rows; /* of a head: 3, 4 or 5 */

    __device__ __forceinline__ explicit bar_heads(const job &work)
        : log_rows(work.block.window >= 32   ? 5
                   : work.block.window >= 16 ? 4
                                             : 3)
    {
    }
    __device__ __forceinline__ unsigned rows_of(int head) const
    {
        return (~0u >> (32 - (1 << log_rows))) << (head << log_rows);
    }
    /* The head that a thread of a quad has, and whether it is the one that adds. */
    __device__ __forceinline__ int head_of(int t) const
    {
        return t >> (log_rows - 3);
    }
    __device__ __forceinline__ bool adds(int t) const
    {
        return (t & ((1 << (log_rows - 3)) - 1)) == 0;
    }
    /* x[j][i]: the thread's sum over two rows of tile j for key i; becomes that over its head. */
    __device__ __forceinline__ void sum_rows(const float (&x)[ROW_TILES][2], int t,
                                             float (&sum)[2]) const
    {
        float half[2][2];
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float away = t & 2 ? x[j][i] : x[2 + j][i];
                half[j][i] = (t & 2 ? x[2 + j][i] : x[j][i]) + __shfl_xor_sync(~0u, away, 2);
            }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float away = t & 1 ? half[0][i] : half[1][i];
            sum[i] = (t & 1 ? half[1][i] : half[0][i]) + __shfl_xor_sync(~0u, away, 1);
        }
        if (log_rows > 3) {
            sum[0] += __shfl_xor_sync(~0u, sum[0], 1);
            sum[1] += __shfl_xor_sync(~0u, sum[1], 1);
        }
        if (log_rows > 4) {
            sum[0] += __shfl_xor_sync(~0u, sum[0], 2);
            sum[1] += __shfl_xor_sync(~0u, sum[1], 2);
        }
    }
};

/* c_t a_t of two adjacent dimensions of a row of a block. */
template <class S> __device__ __forceinline__ float2 output_pair(uint32_t a_rows, int row, int pair)
{
    const uint32_t from = a_rows + element_offset<S>(row, pair / 4) + 4 * (pair % 4);
    const float2 hi = unpack<typename S::type>(load_shared(from));
    const float2 lo = unpack<typename S::type>(load_shared(from + ROW_TILES * S::EIGHT_BYTES));
    return make_float2(hi.x + lo.x, hi.y + lo.y);
}

/* The operand of a block's heads. */
template <class S>
__device__ __forceinline__ uint32_t bar_operand(const shared_memory<S> &shared, int block)
{
    return shared_address(shared.query) + S::OPERAND_BYTES + block * S::EIGHT_BYTES;
}

/* Two adjacent dimensions of abar into the operand, hi and lo; the sum of their squares. */
template <class S>
__device__ __forceinline__ float store_bar(uint32_t operand, int thread, int pair,
                                           const float2 &bar)
{
    using type = typename S::type;
    const uint32_t hi = pack<type>(bar.x, bar.y);
    const float2 h = unpack<type>(hi);
    const uint32_t lo = pack<type>(bar.x - h.x, bar.y - h.y);
    const float2 l = unpack<type>(lo);
    const uint32_t at = operand + 4 * (pair % 4);
    store_shared(at + element_offset<S>(2 * thread, pair / 4), hi);
    store_shared(at + element_offset<S>(2 * thread + 1, pair / 4), lo);
    return (h.x + l.x) * (h.x + l.x) + (h.y + l.y) * (h.y + l.y);
}

/* Makes abar and |abar|^2 of each thread's head, by all of pass B. A half warp has 16 of a block's
 * rows and 16 pairs of dimensions. Parts of the norms meet in `norm`, which no one else uses. */
template <class S>
__device__ __forceinline__ void make_bars(shared_memory<S> &shared, const bar_heads &heads,
                                          const place<S> &at, float (&norm)[S::ROWS / BLOCK_ROWS])
{
    constexpr int BLOCKS = S::ROWS / BLOCK_ROWS;
    const int lane = here(at.lane);
    const int half = lane >> 4;
    const int pair = 16 * at.warp + (lane & 15);
    float *parts = shared.rows.norm[0]; /* [block][thread of a quad][warp] */
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
        float2 sum[2] = {};
#pragma unroll
        for (int i = 0; i < 16 && pair < S::DIM / 2; i++) {
            const int row = 16 * half + (i ^ 4 * half); /* halves meet no bank twice */
            const float2 a = output_pair<S>(shared_address(shared.rows.a[block]), row, pair);
            sum[i / 8].x += a.x;
            sum[i / 8].y += a.y;
        }
        if (heads.log_rows > 3) {
            sum[0].x += sum[1].x;
            sum[0].y += sum[1].y;
            if (heads.log_rows > 4) {
                sum[0].x += __shfl_xor_sync(~0u, sum[0].x, 16);
                sum[0].y += __shfl_xor_sync(~0u, sum[0].y, 16);
            }
            sum[1] = sum[0];
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float square = pair < S::DIM / 2 ? store_bar<S>(bar_operand(shared, block),
                                                            2 * half + j, pair, sum[j])
                                             : 0.0f;
#pragma unroll
            for (int lanes = 1; lanes < 16; lanes *= 2)
                square += __shfl_xor_sync(~0u, square, lanes);
            if ((lane & 15) == 0)
                parts[(block * ROW_TILES + 2 * half + j) * 4 + at.warp] = square;
        }
    }
    fence_async_proxy();
    group_barrier(BARRIER_B);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const float *of = parts + (block * ROW_TILES + at.t) * 4;
        norm[block] = (of[0] + of[1]) + (of[2] + of[3]);
    }
}

/* Four adjacent dimensions of a row of a block. */
template <class S>
__device__ __forceinline__ float4 output_part(uint32_t a_rows, int row, int dimension)
{
    const float2 low = output_pair<S>(a_rows, row, dimension / 2);
    const float2 high = output_pair<S>(a_rows, row, dimension / 2 + 1);
    return make_float4(low.x, low.y, high.x, high.y);
}

__device__ __forceinline__ float length_squared(const float4 &x)
{
    return (x.x * x.x + x.y * x.y) + (x.z * x.z + x.w * x.w);
}

__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

/* |abar - v|^2 of a head and a key of the unit, summed plainly by the whole warp; the value is read
 * again, as its tile may be gone. `rows`: the head's. */
template <class S>
__device__ __forceinline__ float plain_bar_distance(const job &work, uint32_t a_rows, unsigned rows,
                                                    int key, int lane)
{
    const int dimension = 4 * here(lane) % S::DIM;
    const float4 v = value_of<S>(work, key, dimension);
    float4 gap = scale_add(-1.0f, v, no_values());
#pragma unroll 1
    for (unsigned left = rows; left != 0; left &= left - 1)
        gap = scale_add(1.0f, output_part<S>(a_rows, __ffs(left) - 1, dimension), gap);
    const bool counts = 4 * lane < S::DIM;
    const float sum = warp_sum(counts ? length_squared(gap) : 0.0f);
    const float scale = warp_sum(counts ? length_squared(v) : 0.0f);
    return sum < TOO_NEAR * scale ? NAN : sum;
}

/* A key of this warp that is the top key of some of a head's rows. */
struct bar_top {
    int key;       /* of the warp's 16 */
    int head;      /* of the block */
    unsigned rows; /* of the head */
    unsigned tops; /* of these, those whose top key it is */
    bool is_mine;  /* the thread has this head and key */
    bool outside;  /* a key of the window */

    /* Takes the first of the rows that are left. `mine`: see take_top_terms(). */
    template <class S>
    __device__ __forceinline__ bar_top(unsigned &left, int mine, const bar_heads &heads,
                                       const place<S> &at, int keys_to_window)
    {
        const int row = __ffs(left) - 1;
        key = __shfl_sync(~0u, mine, row);
        head = row >> heads.log_rows;
        rows = heads.rows_of(head);
        tops = __ballot_sync(~0u, mine == key) & rows;
        left &= ~tops;
        is_mine = at.g == key % 8 && heads.head_of(at.t) == head;
        outside = key >= keys_to_window;
    }

    /* The lane's row: log2 of c_t (1 - p_t), and what that is relative to. */
    template <class S>
    __device__ __forceinline__ float octaves(const merged<S> &from, int first_row, int lane,
                                             float *reference) const
    {
        const int row = first_row + lane;
        const float mine = tops >> lane & 1 ? from.top_weight[row] : log2f(from.weight[row]);
        float largest = rows >> lane & 1 ? mine : NO_KEY;
        for (int lanes = 16; lanes > 0; lanes /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
        *reference = outside ? 0.0f : fmaxf(largest, NO_KEY);
        return mine;
    }
};

/* |abar - v|^2 of such a key, relative to the square of what octaves() says; by the whole warp.
 * `first_key`: the warp's. */
template <class S>
__device__ __forceinline__ float top_bar_distance(const job &work, const merged<S> &from, int block,
                                                  const bar_top &top, int first_key, int lane)
{
    const int first_row = block * BLOCK_ROWS;
    const int dimension = 4 * here(lane) % S::DIM;
    const float *gaps = gaps_of<S>(work) + first_row * S::DIM + dimension;
    float reference;
    const float octaves = top.octaves(from, first_row, lane, &reference);
    const float weight = from.weight[first_row + lane];
    const bool is_top = top.tops >> lane & 1;
    const float share = !is_top       ? (weight > 0.0f ? exp2_fast(-reference) : 0.0f)
                        : top.outside ? weight
                                      : exp2_fast(octaves - reference);
    const float4 v = value_of<S>(work, first_key + top.key, dimension);
    float4 gap = no_values();
#pragma unroll 4
    for (int row = 0; row < BLOCK_ROWS; row++) {
        const float of_row = __shfl_sync(~0u, share, row);
        const float counts = __shfl_sync(~0u, weight, row);
        if (!(top.rows >> row & 1))
            continue;
        const float4 add = top.tops >> row & 1
                               ? __ldcg(reinterpret_cast<const float4 *>(gaps + row * S::DIM))
                               : scale_add(
                                     -counts, v,
                                     output_part<S>(shared_address(from.a[block]), row, dimension));
        gap = scale_add(of_row, add, gap);
    }
    return warp_sum(4 * lane < S::DIM ? length_squared(gap) : 0.0f);
}

/* Distances that cancel, again. `cancels`: the thread's keys, a bit each. Rare. */
template <class S>
__device__ __forceinline__ void bar_distances_again(const job &work, uint32_t a_rows,
                                                    unsigned cancels, const bar_heads &heads,
                                                    int first_key, int lane_of_warp,
                                                    float (&distance)[2])
{
    for (;;) {
        const unsigned lanes = __ballot_sync(~0u, cancels != 0);
        if (lanes == 0)
            return;
        const int lane = __ffs(lanes) - 1;
        const int which = __ffs(__shfl_sync(~0u, cancels, lane)) - 1;
        const int key = min(first_key + 8 * which + lane / 4,
                            static_cast<int>(work.block.n_valid) - 1);
        const float exact = plain_bar_distance<S>(
            work, a_rows, heads.rows_of(heads.head_of(lane % 4)), key, lane_of_warp);
        if (lane_of_warp == lane) {
            cancels &= ~(1u << which);
            distance[0] = which == 0 ? exact : distance[0];
            distance[1] = which == 0 ? distance[1] : exact;
        }
    }
}

/* What a term is made of, for the thread's head and keys. */
struct bar_terms {
    float bar[2];      /* pbar, with the range factor */
    float rest[2];     /* 1 - pbar */
    float distance[2]; /* |abar - v|^2 */

    /* A token that nothing else stands beside has no odds: it is protected. */
    __device__ __forceinline__ float value(int i) const
    {
        const float term = bar[i] * rcp_fast(rest[i]) * sqrt_fast(distance[i]);
        return rest[i] <= 0.0f ? 0.0f : term;
    }
};

/* Terms of keys that are top keys, relative to what octaves() says. `mine`: see take_top_terms(); p
 * has the range factor. Rare. */
template <class S>
__device__ __forceinline__ void take_top_bars(const job &work, const merged<S> &from, int block,
                                              int mine, const bar_heads &heads, int first_key,
                                              const place<S> &at, const float (&p)[ROW_TILES][4],
                                              bar_terms &terms)
{
    const int first_row = block * BLOCK_ROWS;
    const int to_window = first_left_out<S>(work) - first_key;
    unsigned left = __ballot_sync(~0u, static_cast<unsigned>(mine) < 16);
    while (left != 0) {
        const bar_top top(left, mine, heads, at, to_window);
        const float distance = top_bar_distance(work, from, block, top, first_key, at.lane);
        float reference;
        const float octaves = top.octaves(from, first_row, at.lane, &reference);
        const float weight = from.weight[first_row + at.lane];
        const float of_top = exp2_fast(octaves - reference);
        const float factor = exp2_fast(-reference);
        float sum = 0.0f; /* over the thread's rows of the head */
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = 8 * j + 2 * at.t + e;
                const float is_top = __shfl_sync(~0u, of_top, row);
                const float counts = __shfl_sync(~0u, weight, row);
                const float of_row = top.key < 8 ? p[j][e] : p[j][2 + e];
                const float is_other = counts > 0.0f ? factor * fmaf(-RANGE, of_row, counts) : 0.0f;
                if (top.rows >> row & 1)
                    sum += top.tops >> row & 1 ? is_top : is_other;
            }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool is_it = top.is_mine && top.key / 8 == i;
            terms.distance[i] = is_it ? distance : terms.distance[i];
            terms.rest[i] = is_it ? sum : terms.rest[i];
        }
    }
}

/* Adds the terms of the thread's head to the sums of its keys; logits become p. `dots`: abar . v;
 * `first_key`: the warp's. */
template <class S>
__device__ __forceinline__ void add_bar_terms(
    const job &work, const merged<S> &from, int block, const bar_heads &heads, float norm,
    const float (&square)[2], const float (&dots)[2], int first_key, const place<S> &at,
    float (&z)[ROW_TILES][4], const row_constants (&rows)[ROW_TILES][2], float (&sum)[2])
{
    float pairs[ROW_TILES][2];
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++) {
#pragma unroll
        for (int c = 0; c < 4; c++)
            z[j][c] = exp2_fast(z[j][c] - rows[j][c & 1].shift);
        pairs[j][0] = z[j][0] + z[j][1];
        pairs[j][1] = z[j][2] + z[j][3];
    }
    const int mine = from.top[block * BLOCK_ROWS + at.lane] - first_key;
    bar_terms terms;
    heads.sum_rows(pairs, at.t, terms.bar);
    float term[2];
    unsigned cancels = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float whole = norm + square[i];
        terms.rest[i] = fmaf(-RANGE, terms.bar[i], 1.0f);
        terms.distance[i] = fmaf(-2.0f, dots[i], whole);
        term[i] = terms.value(i);
        cancels |= terms.distance[i] < CANCELS * whole ? 1u << i : 0;
    }
    if (__any_sync(~0u, static_cast<unsigned>(mine) < 16 || cancels != 0)) {
        bar_distances_again<S>(work, shared_address(from.a[block]), cancels, heads, first_key,
                               at.lane, terms.distance);
        take_top_bars(work, from, block, mine, heads, first_key, at, z, terms);
        term[0] = terms.value(0);
        term[1] = terms.value(1);
    }
    sum[0] += heads.adds(at.t) ? term[0] : 0.0f;
    sum[1] += heads.adds(at.t) ? term[1] : 0.0f;
}

} // namespace dkv_fast

#endif
