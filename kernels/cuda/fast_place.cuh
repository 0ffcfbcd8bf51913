/* What a thread of passes A and B needs in both: where it stands, how tiles lie in shared memory,
 * and the logits of a tile. */
#ifndef DKV_KERNELS_CUDA_FAST_PLACE_CUH
#define DKV_KERNELS_CUDA_FAST_PLACE_CUH

#include "kernels/cuda/fast_shape.cuh"

namespace dkv_fast
{

/* Constants of a thread in a pass that `warps` warps run. */
template <class S, int warps> struct place {
    static constexpr int STRIP_WARPS = warps / S::ROW_TILES;
    static constexpr int STRIPS = 4 / STRIP_WARPS;

    int warp;
    int lane;
    int g;
    int t;
    int row_tile;
    int strip_warp;
    uint32_t matrix;     /* this lane's address within a strip for load_matrices(), column 0 */
    uint32_t transposed; /* the same for load_matrices_transposed() */

    __device__ __forceinline__ explicit place(int thread)
    {
        warp = thread >> 5;
        lane = thread & 31;
        g = lane >> 2;
        t = lane & 3;
        row_tile = warp % S::ROW_TILES;
        strip_warp = warp / S::ROW_TILES;
        const int m = lane >> 3;
        const int r = lane & 7;
        matrix = ((m >> 1) * 8 + r) * S::ROW_BYTES + (((m & 1) ^ r) << 4);
        transposed = ((m & 1) * 8 + r) * S::ROW_BYTES + (((m >> 1) ^ r) << 4);
    }

    /* Strip s of this warp, 0..3 within a tile; its first key is 16 times that. */
    __device__ __forceinline__ int strip(int s) const
    {
        return strip_warp * STRIPS + s;
    }
    __device__ __forceinline__ int row(int i) const
    {
        return row_tile * 16 + 8 * i + g;
    }
    /* Where the logits of strip s, half n, lie in a slot. */
    __device__ __forceinline__ uint32_t slot_cell(int s, int n) const
    {
        return (((row_tile * 4 + strip(s)) * 2 + n) * 32 + lane) * 16;
    }
};

/* Rows of a half tile are adjacent; the 16-byte columns of row r are permuted by r mod 8, so that
 * eight rows of one column lie in different banks. */
template <class S> __device__ __forceinline__ uint32_t element_offset(int key, int column)
{
    return key * S::ROW_BYTES + ((column ^ (key & 7)) << 4);
}

/* Logits of one block: how a dot product becomes octaves, and what each row sees. */
struct logit_rule {
    float to_octaves; /* scale * log2(e) */
    float cap;        /* soft cap in octaves; 0: none */
    float inner;      /* scale / soft cap */
    int last_key[2];  /* that this thread's rows see; padding rows see all */
    int open_keys;    /* keys below this are visible to every row */

    template <class P> __device__ __forceinline__ void set(const job &work, const P &at, int first_row)
    {
        const dkv_cu_block &block = work.block;
        const float log2e = 1.4426950408889634f;
        to_octaves = block.scale * log2e;
        cap = block.softcap * log2e;
        inner = block.softcap != 0.0f ? block.scale / block.softcap : 0.0f;
        open_keys = static_cast<int>(block.n_valid - block.window) + 1;
        const int rows = block.group * block.window;
        for (int i = 0; i < 2; i++) {
            const int row = first_row + at.row(i);
            last_key[i] = row < rows ? open_keys - 1 + row % static_cast<int>(block.window)
                                     : static_cast<int>(block.n_valid);
        }
    }
};

/* The query as A operand of mma, for the thread's row tile. */
template <class S, class P>
__device__ __forceinline__ void load_query(const job &work, const P &at, uint32_t (&q)[S::K_STEPS][4])
{
    const dkv_cu_block &block = work.block;
    const uint32_t rows = block.group * block.window;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t row = work.item.row_group * S::ROWS + at.row(i);
        const unsigned char *from = work.unit.q + (row / block.window) * block.q_head_stride +
                                    (row % block.window) * block.q_row_stride + 4 * at.t;
#pragma unroll
        for (int k = 0; k < S::K_STEPS; k++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                q[k][2 * half + i] =
                    row < rows ? __ldg(reinterpret_cast<const uint32_t *>(from + 32 * k + 16 * half))
                               : 0;
        }
    }
}

/* Dot products of the thread's rows with the keys of its strips. `strip` is the first one's shared
 * address. */
template <class S, class P>
__device__ __forceinline__ void strip_dots(uint32_t strip, const uint32_t (&q)[S::K_STEPS][4],
                                           const P &at, float (&z)[P::STRIPS][2][4])
{
#pragma unroll
    for (int i = 0; i < P::STRIPS * 8; i++)
        z[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++) {
#pragma unroll
        for (int s = 0; s < P::STRIPS; s++) {
            uint32_t m[4];
            load_matrices(m, strip + 16 * s * S::ROW_BYTES + (at.matrix ^ 32 * k));
            mma<typename S::type>(z[s][0], q[k], m[0], m[1]);
            mma<typename S::type>(z[s][1], q[k], m[2], m[3]);
        }
    }
}

/* Dot products become logits in octaves, -inf where a row does not see the key. Pass B calls this
 * again for tiles that were not kept: same order, same bits. */
__device__ __forceinline__ void strip_logits(const logit_rule &rule, int first_key, int t,
                                             float (&z)[2][4])
{
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            z[n][c] = rule.cap == 0.0f ? z[n][c] * rule.to_octaves
                                       : rule.cap * tanhf(z[n][c] * rule.inner);
    if (first_key + 16 > rule.open_keys) {
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (first_key + 8 * n + 2 * t + (c & 1) > rule.last_key[c >> 1])
                    z[n][c] = -INFINITY;
            }
    }
}

/* |v|^2 of a strip's keys 2t, 2t + 1 (n = 0) and 2t + 8, 2t + 9 (n = 1): the diagonal of v v^T. */
template <class S, class P>
__device__ __forceinline__ void strip_squares(uint32_t strip, const P &at, float (&square)[2][2])
{
    using type = typename S::type;
    float diagonal[2][4] = {};
#pragma unroll
    for (int k = 0; k < S::K_STEPS; k++) {
        uint32_t m[4];
        load_matrices(m, strip + (at.matrix ^ 32 * k));
        /* The registers of the B operand, read as an A operand, are the strip's 16 keys. */
        mma<type>(diagonal[0], m[0], m[2], m[1], m[3], m[0], m[1]);
        mma<type>(diagonal[1], m[0], m[2], m[1], m[3], m[2], m[3]);
    }
    square[0][0] = __shfl_sync(~0u, diagonal[0][0], 9 * at.t);
    square[0][1] = __shfl_sync(~0u, diagonal[0][1], 9 * at.t + 4);
    square[1][0] = __shfl_sync(~0u, diagonal[1][2], 9 * at.t);
    square[1][1] = __shfl_sync(~0u, diagonal[1][3], 9 * at.t + 4);
}

} // namespace dkv_fast

#endif
