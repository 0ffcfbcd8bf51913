/* Where bodies live.
 *
 * A mapping of its own per large body means that releasing it returns the memory: the daemon holds
 * what is in flight, whatever sizes came before. The price is that every page is faulted in and
 * zeroed while the body arrives, in competition with the copy out of the HTTP server's buffer. Two
 * things lower it: huge pages (a hint: one fault per 2 MiB), and keeping the last mapping warm for
 * a second, since prompts arrive as a series of equal bodies, layer after layer. What is in a warm
 * mapping is another request's data; nothing reads a body beyond the bytes it received.
 *
 * Charging is by bytes, not by mappings: a client that announces a length is charged for it before
 * its first byte arrives, so that accepted bodies always fit; a chunked one is charged in steps.
 */
#include "server/body.h"

#include "server/clock.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define SMALL_KEPT  64u                 /* blocks on the free list */
#define CHARGE_STEP (UINT64_C(1) << 20) /* of a chunked body */
#define HUGE_FROM   (UINT64_C(4) << 20) /* mappings above this ask for huge pages */

struct dkv_body_small {
    struct dkv_body_small *next;
};

static const size_t small_block_bytes = DKV_BODY_SMALL_BYTES + DKV_BODY_ALIGN;

void dkv_body_pool_init(struct dkv_body_pool *pool, uint64_t limit_bytes)
{
    *pool = (struct dkv_body_pool){.limit_bytes = limit_bytes};
}

static void drop_warm(struct dkv_body_pool *pool)
{
    if (pool->warm != NULL)
        munmap(pool->warm, pool->warm_bytes);
    pool->warm = NULL;
}

void dkv_body_pool_fini(struct dkv_body_pool *pool)
{
    assert(pool->charged_bytes == 0);
    drop_warm(pool);
    while (pool->free_list != NULL) {
        struct dkv_body_small *block = pool->free_list;
        pool->free_list = block->next;
        free(block);
    }
    pool->n_free = 0;
}

static enum dkv_status charge(struct dkv_body *body, uint64_t n_bytes, struct dkv_error *err)
{
    struct dkv_body_pool *pool = body->pool;
    if (n_bytes > pool->limit_bytes - pool->charged_bytes)
        return dkv_error_set(err, DKV_E_BUSY, "bodies waiting hold %llu of %llu bytes",
                             (unsigned long long)pool->charged_bytes,
                             (unsigned long long)pool->limit_bytes);
    pool->charged_bytes += n_bytes;
    body->charged_bytes += n_bytes;
    return DKV_OK;
}

static void *small_block_take(struct dkv_body_pool *pool)
{
    struct dkv_body_small *block = pool->free_list;
    if (block == NULL)
        return aligned_alloc(DKV_BODY_ALIGN, small_block_bytes);
    pool->free_list = block->next;
    pool->n_free--;
    return block;
}

static void small_block_give(struct dkv_body_pool *pool, void *memory)
{
    struct dkv_body_small *block = memory;
    if (pool->n_free >= SMALL_KEPT) {
        free(block);
        return;
    }
    block->next = pool->free_list;
    pool->free_list = block;
    pool->n_free++;
}

void dkv_body_pool_trim(struct dkv_body_pool *pool, uint64_t now_ms)
{
    if (pool->warm != NULL && now_ms - pool->warm_ms >= DKV_BODY_WARM_MS)
        drop_warm(pool);
}

/* The warm mapping, if it is large enough and not much too large. */
static bool take_warm(struct dkv_body *body, uint64_t n_bytes)
{
    struct dkv_body_pool *pool = body->pool;
    if (pool->warm == NULL || pool->warm_bytes < n_bytes ||
        pool->warm_bytes > n_bytes + n_bytes / 8)
        return false;
    body->mapping = pool->warm;
    body->mapping_bytes = pool->warm_bytes;
    pool->warm = NULL;
    return true;
}

static bool map_large(struct dkv_body *body, uint64_t n_bytes)
{
    if (take_warm(body, n_bytes))
        return true;
    drop_warm(body->pool);
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    madvise(memory, n_bytes, MADV_DONTDUMP);
    if (n_bytes >= HUGE_FROM)
        madvise(memory, n_bytes, MADV_HUGEPAGE);
    body->mapping = memory;
    body->mapping_bytes = n_bytes;
    return true;
}

enum dkv_status dkv_body_reserve(struct dkv_body *body, struct dkv_body_pool *pool,
                                 uint64_t capacity_bytes, uint64_t head_bytes, bool length_known,
                                 struct dkv_error *err)
{
    assert(body->pool == NULL && head_bytes <= capacity_bytes);
    struct dkv_body fresh = {.pool = pool, .capacity_bytes = capacity_bytes};
    if (length_known) {
        enum dkv_status status = charge(&fresh, capacity_bytes, err);
        if (status != DKV_OK)
            return status;
    }
    if (capacity_bytes <= DKV_BODY_SMALL_BYTES) {
        fresh.mapping = small_block_take(pool);
    } else {
        map_large(&fresh, capacity_bytes + DKV_BODY_ALIGN);
    }
    if (fresh.mapping == NULL) {
        pool->charged_bytes -= fresh.charged_bytes;
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a body of %llu bytes",
                             (unsigned long long)capacity_bytes);
    }
    fresh.data = (unsigned char *)fresh.mapping + (-head_bytes & (DKV_BODY_ALIGN - 1));
    *body = fresh;
    return DKV_OK;
}

/* Copies into a body. A large one is written past the caches: it would push out of them what the
 * network stack and the HTTP server work on, and by the time the engine reads it, it is gone from
 * them anyway. Stores of whole lines also spare reading each line before it is overwritten. */
static void copy_in(unsigned char *to, const unsigned char *from, size_t n_bytes, bool large)
{
#ifdef __SSE2__
    const size_t head = -(uintptr_t)to & 15u;
    if (large && n_bytes > head) {
        memcpy(to, from, head);
        to += head;
        from += head;
        n_bytes -= head;
        for (; n_bytes >= 16; n_bytes -= 16, to += 16, from += 16)
            _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)from));
        _mm_sfence();
    }
#else
    (void)large;
#endif
    memcpy(to, from, n_bytes);
}

enum dkv_status dkv_body_append(struct dkv_body *body, const void *bytes, size_t n_bytes,
                                struct dkv_error *err)
{
    if (n_bytes > body->capacity_bytes - body->received_bytes)
        return dkv_error_set(err, DKV_E_TOO_LARGE, "body is above %llu bytes",
                             (unsigned long long)body->capacity_bytes);
    const uint64_t needed = body->received_bytes + n_bytes;
    if (needed > body->charged_bytes) {
        uint64_t step = needed - body->charged_bytes;
        const uint64_t room = body->capacity_bytes - body->charged_bytes;
        step = step > CHARGE_STEP ? step : (room < CHARGE_STEP ? room : CHARGE_STEP);
        enum dkv_status status = charge(body, step, err);
        if (status != DKV_OK)
            return status;
    }
    copy_in(body->data + body->received_bytes, bytes, n_bytes, body->mapping_bytes >= HUGE_FROM);
    body->received_bytes = needed;
    return DKV_OK;
}

static void give_large(struct dkv_body *body)
{
    struct dkv_body_pool *pool = body->pool;
    if (pool->warm != NULL || body->received_bytes < body->mapping_bytes / 2) {
        munmap(body->mapping, body->mapping_bytes);
        return;
    }
    pool->warm = body->mapping;
    pool->warm_bytes = body->mapping_bytes;
    pool->warm_ms = dkv_clock_ms();
}

void dkv_body_release(struct dkv_body *body)
{
    if (body->pool == NULL)
        return;
    body->pool->charged_bytes -= body->charged_bytes;
    if (body->mapping_bytes != 0)
        give_large(body);
    else
        small_block_give(body->pool, body->mapping);
    *body = (struct dkv_body){0};
}
