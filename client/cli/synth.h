/* Synthetic tensors: normally distributed elements from a fixed seed.
 *
 * Thread  any; the generator's state is the caller's.
 */
#ifndef DKV_CLIENT_CLI_SYNTH_H
#define DKV_CLIENT_CLI_SYNTH_H

#include "proto/types.h"

struct dkv_random {
    uint64_t state[4];
};

void dkv_random_init(struct dkv_random *random, uint64_t seed);

/* Fills n elements of `dtype` with N(0, 1), rounded to nearest even, at most the type's largest. */
void dkv_random_normal(struct dkv_random *random, enum dkv_dtype dtype, void *out, size_t n);

/* The bits of x in `dtype`. x is finite. */
uint32_t dkv_round_to(enum dkv_dtype dtype, float x);

#endif
