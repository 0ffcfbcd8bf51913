/* The instructions that the fast kernels are made of, one thin function each: shared
 * memory, mbarriers, asynchronous copies, named barriers and the release/acquire
 * pair that thread blocks exchange partial results with. */
#ifndef DKV_KERNELS_CUDA_FAST_PTX_CUH
#define DKV_KERNELS_CUDA_FAST_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

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

/* The logarithm to about 2^-22, absolutely between 1/2 and 2. */
__device__ __forceinline__ float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The square root to about 2^-22; 0 below the normal numbers. */
__device__ __forceinline__ float sqrt_fast(float x)
{
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float rsqrt_fast(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

/* What generic writes left in shared memory, this thread having seen them, is there for wgmma. */
__device__ __forceinline__ void fence_async_proxy(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

__device__ __forceinline__ float load_shared_float(uint32_t address)
{
    return __uint_as_float(load_shared(address));
}

__device__ __forceinline__ void store_shared(uint32_t address, float a, float b)
{
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t address, uint32_t (&words)[4])
{
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ uint32_t load_shared_16(uint32_t address)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ float2 load_shared_pair(uint32_t address)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t word)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t address, uint32_t word)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(word))
                 : "memory");
}

/* Four matrices of 8 x 8 16-bit elements, of which a lane has in each of row lane / 4 those of
 * columns 2 (lane % 4) and the next. Lane 8 m + r gives the address of matrix m's row r. */
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void load_shared(uint32_t address, float (&words)[4])
{
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(words[0]), "=f"(words[1]), "=f"(words[2]), "=f"(words[3])
                 : "r"(address)
                 : "memory");
}

/* mbarriers, by shared address. */
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/* Where a thread hands something over. In the build that check_fast_shaken is made of it now and
 * then sleeps before, for as long as a few tiles take, so that roles meet in orders that are rare
 * otherwise. */
__device__ __forceinline__ void may_be_late(void)
{
#ifdef DKV_FAST_SHAKEN
    const uint32_t x = (static_cast<uint32_t>(clock64()) + threadIdx.x * 977 + blockIdx.x) *
                       2654435761u;
    if (x >> 27 == 0)
        __nanosleep(x >> 14 & 8191);
#endif
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier)
{
    may_be_late();
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Arrives, and adds bytes that copies will bring before the phase ends. */
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
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

/* This thread's copies since the last call become a group, which cp.async.wait_group counts. */
__device__ __forceinline__ void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* 16 bytes from global to shared memory, or zeros if there is nothing to read. */
__device__ __forceinline__ void copy_16(uint32_t to, const void *from, bool exists, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
                 "l"(from), "r"(exists ? 16 : 0), "l"(policy)
                 : "memory");
}

/* Copies a multiple of 16 bytes from global to shared memory, counted by the barrier; from what
 * this thread has seen of global memory. */
__device__ __forceinline__ void copy_bulk(uint32_t to, const void *from, uint32_t bytes,
                                          uint32_t barrier)
{
    asm volatile("fence.proxy.async;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* 4 bytes from global to shared memory, or zeros if there is nothing to read. */
__device__ __forceinline__ void copy_4(uint32_t to, const void *from, bool exists)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(exists ? 4 : 0)
                 : "memory");
}

/* x, by a way that the compiler does not see through: what is computed from it is computed here,
 * not kept in registers from a loop's start. */
__device__ __forceinline__ int here(int x)
{
    asm volatile("" : "+r"(x));
    return x;
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

/* Meeting point of a group of four warps. */
__device__ __forceinline__ void group_barrier(int id)
{
    asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory");
}

/* The same; whether x is true for any thread of the group. */
__device__ __forceinline__ bool group_any(int id, bool x)
{
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred mine, one;\n"
                 "setp.ne.u32 mine, %2, 0;\n"
                 "bar.red.or.pred one, %1, 128, mine;\n"
                 "selp.u32 %0, 1, 0, one;\n"
                 "}"
                 : "=r"(any)
                 : "r"(id), "r"(static_cast<uint32_t>(x))
                 : "memory");
    return any;
}

/* Counters between thread blocks: publish() makes known what this thread (and, through a barrier
 * before it, its thread block) wrote; wait() makes it visible. */
__device__ __forceinline__ void counter_publish(unsigned *counter)
{
    asm volatile("fence.acq_rel.gpu;\n"
                 "red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter)
                 : "memory");
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

/* Kernels that follow each other start early: each waits here before it reads what the one before
 * has written. */
__device__ __forceinline__ void griddepcontrol_wait(void)
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch(void)
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

} // namespace dkv_fast

#endif
