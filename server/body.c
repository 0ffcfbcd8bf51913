/* Where bodies live.
 *
 * A range of its own per large body means that releasing it returns the memory: the daemon holds
 * what is in flight, whatever sizes came before. The price is that every page has to be found and
 * zeroed while the body arrives, in competition with the copy out of the HTTP server's buffer. Two
 * things lower it: pages are asked for many at a time, and the last range is kept warm for a
 * second, since prompts arrive as a series of equal bodies, layer after layer. What is in a warm
 * range is another request's data; nothing reads a body beyond the bytes it received.
 *
 * Of what the processor does for a body of 256 MiB, some 90 ms, an eighth is the copy here and
 * nearly all else the network stack's; a cold one costs 160 ms more. Tried and no better: writing
 * new pages by pwrite(), which spares clearing them, saves 60 ms for a cold body and costs 70 for
 * the next one, which finds them unmapped; fallocate() first changes nothing. Larger reads spare
 * system calls, but the HTTP library clears its whole buffer for every request.
 *
 * Charging is by bytes, not by ranges: a client that announces a length is charged for it before
 * its first byte arrives, so that accepted bodies always fit; a chunked one is charged in steps.
 */
#include "server/body.h"

#include "server/clock.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define CHARGE_STEP   (UINT64_C(1) << 20) /* of a chunked body */
#define POPULATE_STEP (UINT64_C(1) << 20) /* of a large one */
#define STREAM_FROM   (UINT64_C(4) << 20) /* ranges above this are written past the caches */

void dkv_body_pool_init(struct dkv_body_pool *pool, struct dkv_arena *arena, uint64_t limit_bytes,
                        uint64_t client_bytes)
{
    *pool = (struct dkv_body_pool){
        .arena = arena,
        .quota = {.limit_bytes = limit_bytes, .client_bytes = client_bytes},
    };
}

static void drop_warm(struct dkv_body_pool *pool)
{
    dkv_arena_free(pool->arena, pool->warm, pool->warm_bytes, pool->warm_bytes);
    pool->warm = NULL;
}

void dkv_body_pool_fini(struct dkv_body_pool *pool)
{
    assert(pool->quota.charged_bytes == 0);
    drop_warm(pool);
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
    body->populated_bytes = pool->warm_bytes;
    pool->warm = NULL;
    return true;
}

static void map(struct dkv_body *body, uint64_t n_bytes)
{
    const bool large = n_bytes > DKV_BODY_SMALL_BYTES + DKV_BODY_ALIGN;
    if (large && take_warm(body, n_bytes))
        return;
    if (large)
        drop_warm(body->pool);
    body->mapping = dkv_arena_alloc(body->pool->arena, n_bytes);
    body->mapping_bytes = n_bytes;
    body->populated_bytes = large ? 0 : n_bytes;
}

/* Pages for the next bytes up to `end` of the mapping, and some more. */
static void populate(struct dkv_body *body, uint64_t end)
{
    if (end <= body->populated_bytes)
        return;
    uint64_t up_to = (end + POPULATE_STEP - 1) / POPULATE_STEP * POPULATE_STEP;
    up_to = up_to < body->mapping_bytes ? up_to : body->mapping_bytes;
    dkv_arena_populate((unsigned char *)body->mapping + body->populated_bytes,
                       up_to - body->populated_bytes);
    body->populated_bytes = up_to;
}

enum dkv_status dkv_body_reserve(struct dkv_body *body, struct dkv_body_pool *pool,
                                 struct dkv_quota_holder *holder, uint64_t capacity_bytes,
                                 uint64_t head_bytes, bool length_known, struct dkv_error *err)
{
    assert(body->pool == NULL && head_bytes <= capacity_bytes);
    struct dkv_body fresh = {.pool = pool,
                             .capacity_bytes = capacity_bytes,
                             .charge = dkv_charge_begin(&pool->quota, holder)};
    enum dkv_status status = dkv_charge_add(&fresh.charge, length_known ? capacity_bytes : 0, err);
    if (status != DKV_OK) {
        dkv_charge_end(&fresh.charge);
        return status;
    }
    map(&fresh, capacity_bytes + DKV_BODY_ALIGN);
    if (fresh.mapping == NULL) {
        dkv_charge_end(&fresh.charge);
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
    if (needed > body->charge.bytes) {
        uint64_t step = needed - body->charge.bytes;
        const uint64_t room = body->capacity_bytes - body->charge.bytes;
        step = step > CHARGE_STEP ? step : (room < CHARGE_STEP ? room : CHARGE_STEP);
        enum dkv_status status = dkv_charge_add(&body->charge, step, err);
        if (status != DKV_OK)
            return status;
    }
    populate(body, (uint64_t)(body->data - (unsigned char *)body->mapping) + needed);
    copy_in(body->data + body->received_bytes, bytes, n_bytes, body->mapping_bytes >= STREAM_FROM);
    body->received_bytes = needed;
    return DKV_OK;
}

void dkv_body_release(struct dkv_body *body)
{
    struct dkv_body_pool *pool = body->pool;
    if (pool == NULL)
        return;
    dkv_charge_end(&body->charge);
    const bool large = body->mapping_bytes > DKV_BODY_SMALL_BYTES + DKV_BODY_ALIGN;
    if (!large || pool->warm != NULL || body->received_bytes < body->mapping_bytes / 2) {
        /* All of it, since whoever does not append() writes where it likes. */
        dkv_arena_free(pool->arena, body->mapping, body->mapping_bytes, body->mapping_bytes);
    } else {
        pool->warm = body->mapping;
        pool->warm_bytes = body->mapping_bytes;
        pool->warm_ms = dkv_clock_ms();
    }
    *body = (struct dkv_body){0};
}
