/* The monotonic clock: every deadline and duration of the daemon. Steps of the wall clock have no
 * effect on it.
 *
 * Thread  any.
 */
#ifndef DKV_SERVER_CLOCK_H
#define DKV_SERVER_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t dkv_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t dkv_clock_ms(void)
{
    return dkv_clock_ns() / 1000000u;
}

#endif
