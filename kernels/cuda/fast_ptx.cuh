/* The instructions that the fast kernels are made of, one thin function each: tensor core products,
 * matrix loads, mbarriers, asynchronous copies, named barriers and the release/acquire
 * pair that thread blocks exchange partial results with. */
#ifndef DKV_KERNELS_CUDA_FAST_PTX_CUH
#define DKV_KERNELS_CUDA_FAST_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace dkv_fast
{

struct bf16_type;
struct fp16_type;

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/* 2^x and 1/x to about 2^-22. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rcp_fast(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two floats as a pair of 16-bit elements (first in the low half), and back. */
template <class type> __device__ __forceinline__ uint32_t pack(float first, float second);
template <> __device__ __forceinline__ uint32_t pack<bf16_type>(float first, float second)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
template <> __device__ __forceinline__ uint32_t pack<fp16_type>(float first, float second)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}

template <class type> __device__ __forceinline__ float2 unpack(uint32_t pair);
template <> __device__ __forceinline__ float2 unpack<bf16_type>(uint32_t pair)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack<fp16_type>(uint32_t pair)
{
    __half2 h;
    memcpy(&h, &pair, sizeof(h));
    return __half22float2(h);
}

/* c += a * b for a 16 x 16 by 16 x 8 product. With g = lane / 4 and t = lane % 4 a thread holds
 *   a[0] (g, 2t..)  a[1] (g + 8, 2t..)  a[2] (g, 2t + 8..)  a[3] (g + 8, 2t + 8..)
 *   b0 (2t.., g)    b1 (2t + 8.., g)
 *   c[0] (g, 2t)    c[1] (g, 2t + 1)    c[2] (g + 8, 2t)    c[3] (g + 8, 2t + 1) */
template <class type>
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<bf16_type>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<fp16_type>(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                               uint32_t a3, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <class type>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    mma<type>(c, a[0], a[1], a[2], a[3], b0, b1);
}

/* Four 8 x 8 matrices of 16-bit elements; lane 8i + r names row r of matrix i. */
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(address));
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, float a, float b, float c, float d)
{
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(a), "f"(b), "f"(c),
                 "f"(d)
                 : "memory");
}

__device__ __forceinline__ float4 load_shared4(uint32_t address)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/* mbarriers, by shared address. */
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives when all copies that this thread has started so far are done. */
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* 16 bytes from global to shared memory, or zeros if there is nothing to read. */
__device__ __forceinline__ void copy_16(uint32_t to, const void *from, bool exists, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(from), "r"(exists ? 16 : 0), "l"(policy)
                 : "memory");
}

/* L2: drop this line first; treat it as any other. */
__device__ __forceinline__ uint64_t policy_evict_first(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t policy_normal(void)
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

template <int id, int threads> __device__ __forceinline__ void barrier(void)
{
    asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

/* Counters between thread blocks: add() publishes what this thread (and, through a barrier before
 * it, its thread block) wrote; wait_for() makes it visible. */
__device__ __forceinline__ void counter_add(unsigned *counter)
{
    __threadfence();
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void counter_wait(const unsigned *counter, unsigned target)
{
    unsigned seen;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen < target);
}

/* This warpgroup's registers per thread, from `launched` to `wanted`. */
template <int wanted, int launched> __device__ __forceinline__ void registers_set(void)
{
    if constexpr (wanted > launched)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(wanted));
    else if constexpr (wanted < launched)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(wanted));
}

} // namespace dkv_fast

#endif
