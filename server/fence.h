/* Waiting for a producer: a request that names a fence is held until an 8-byte slot in its client's
 * memory holds a value, or its deadline passes.
 *
 * The slot is polled on the CPU; a device that waits for it could be made to wait for ever. Polling
 * begins at 50 us and slows down to 1 ms for those who take long, each at its own pace, and further
 * for all where more than 256 wait: a microsecond for each of them. Nothing runs while nobody
 * waits.
 *
 * Owner   open/close of the set; a fence is embedded in its request, and in the set from wait()
 *         until its `ready` was called or drop().
 * Thread  loop.
 */
#ifndef DKV_SERVER_FENCE_H
#define DKV_SERVER_FENCE_H

#include "server/list.h"
#include "server/region.h"

#include <uv.h>

struct dkv_fence;

/* OK: reached. TIMEOUT: deadline_ns passed. INVALID: the slot cannot be read any more. */
typedef void (*dkv_fence_ready_fn)(struct dkv_fence *fence, enum dkv_status status,
                                   const struct dkv_error *err);

struct dkv_fence {
    /* The caller's, before wait(). */
    const struct dkv_region *region; /* in use by the caller while the fence waits */
    uint64_t offset;                 /* multiple of 8, inside the region */
    uint64_t value;
    uint64_t deadline_ns;
    dkv_fence_ready_fn ready;

    struct dkv_list node;
    uint64_t since_ns, next_ns; /* when it began to wait, and is to be looked at again */
};

struct dkv_fences;

enum dkv_status dkv_fences_open(uv_loop_t *loop, struct dkv_fences **fences_out,
                                struct dkv_error *err);

/* Nobody may wait any more. The loop must be run until its handles are closed. NULL is fine. */
void dkv_fences_close(struct dkv_fences *fences);

/* True at once if the slot holds the value already; else `ready` is called later, never from
 * here. */
bool dkv_fence_reached(struct dkv_fence *fence, struct dkv_error *err);
void dkv_fence_wait(struct dkv_fences *fences, struct dkv_fence *fence);

/* What the timer does: looks at those whose turn it is. How long until the next one's; 0: nobody
 * waits. */
uint64_t dkv_fences_look(struct dkv_fences *fences, uint64_t now_ns);

/* `ready` will not be called. Harmless if the fence does not wait. */
void dkv_fence_drop(struct dkv_fence *fence);

#endif
