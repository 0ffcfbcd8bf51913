/* A seeded generator: the same numbers on every machine, from a seed that a failing test prints. */
#ifndef DKV_TESTS_SUPPORT_RANDOM_H
#define DKV_TESTS_SUPPORT_RANDOM_H

#include <math.h>
#include <stdint.h>

struct dkv_random {
    uint64_t state;
};

/* splitmix64 */
static inline uint64_t dkv_random_u64(struct dkv_random *random)
{
    uint64_t z = random->state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* lo .. hi, both included. */
static inline uint64_t dkv_random_range(struct dkv_random *random, uint64_t lo, uint64_t hi)
{
    return lo + dkv_random_u64(random) % (hi - lo + 1);
}

/* [0, 1) */
static inline double dkv_random_unit(struct dkv_random *random)
{
    return (double)(dkv_random_u64(random) >> 11) * 0x1p-53;
}

/* True once in `times`. */
static inline int dkv_random_once_in(struct dkv_random *random, uint64_t times)
{
    return dkv_random_u64(random) % times == 0;
}

/* Normal, mean 0, deviation 1. */
static inline double dkv_random_normal(struct dkv_random *random)
{
    const double radius = sqrt(-2 * log(1 - dkv_random_unit(random)));
    return radius * cos(6.283185307179586 * dkv_random_unit(random));
}

#endif
