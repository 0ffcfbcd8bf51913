/* random's hash, as a function of both languages. */
#ifndef DKV_KERNELS_POLICIES_RANDOM_H
#define DKV_KERNELS_POLICIES_RANDOM_H

#include <stdint.h>

#ifdef __CUDACC__
#define DKV_EVERYWHERE __host__ __device__
#else
#define DKV_EVERYWHERE
#endif

/* One step of splitmix64. */
DKV_EVERYWHERE static inline uint64_t dkv_random_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* What all tokens of a layer have in common, and what is left to do for one of them. */
DKV_EVERYWHERE static inline uint64_t dkv_random_layer(int64_t seed, uint64_t layer)
{
    return dkv_random_mix(dkv_random_mix((uint64_t)seed) + layer);
}

DKV_EVERYWHERE static inline uint32_t dkv_random_bits(uint64_t of_layer, uint64_t head,
                                                      uint64_t token)
{
    const uint64_t hash = dkv_random_mix(dkv_random_mix(of_layer + head) + token);
    return (uint32_t)(hash >> 40);
}

#endif
