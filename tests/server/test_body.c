/* Bodies: the arena they lie in, the places they get, and how much of it a client may hold. */
#include "server/body.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static struct dkv_arena open_arena(void)
{
    struct dkv_arena arena;
    struct dkv_error err;
    assert_int_equal(dkv_arena_open(&arena, UINT64_C(4) << 30, 1u << 20, &err), DKV_OK);
    return arena;
}

/* Blocks that the file has. */
static uint64_t backed_bytes(struct dkv_arena *arena)
{
    struct stat info;
    assert_false(dkv_arena_scrub(arena, UINT64_MAX));
    assert_int_equal(arena->dirty_bytes, 0);
    assert_int_equal(fstat(arena->fd, &info), 0);
    return (uint64_t)info.st_blocks * 512;
}

/* Many ranges of random sizes, each filled with its own byte, freed in random order. */
static void ranges_never_overlap_and_all_comes_back(void **unused)
{
    enum { N = 64 };
    struct dkv_arena arena = open_arena();
    unsigned char *ranges[N] = {0};
    uint64_t sizes[N] = {0};
    uint32_t seed = 1;
    (void)unused;
    for (unsigned step = 0; step < 4000; step++) {
        seed = seed * 1664525u + 1013904223u;
        const unsigned i = (seed >> 8) % N;
        if (ranges[i] != NULL) {
            for (uint64_t at = 0; at < sizes[i]; at += 1 + sizes[i] / 7)
                assert_int_equal(ranges[i][at], i);
            dkv_arena_free(&arena, ranges[i], sizes[i], sizes[i]);
            ranges[i] = NULL;
            continue;
        }
        sizes[i] = 1 + (seed >> 14) % (1u << ((seed >> 4) % 22));
        ranges[i] = dkv_arena_alloc(&arena, sizes[i]);
        assert_non_null(ranges[i]);
        assert_int_equal((uintptr_t)ranges[i] % DKV_ARENA_PAGE, 0);
        assert_true(dkv_arena_has(&arena, ranges[i] + sizes[i] - 1));
        memset(ranges[i], (int)i, sizes[i]);
    }
    for (unsigned i = 0; i < N; i++)
        dkv_arena_free(&arena, ranges[i], sizes[i], sizes[i]);
    assert_int_equal(arena.used_bytes, 0);
    assert_true(backed_bytes(&arena) <= DKV_ARENA_KEPT_BYTES);
    assert_null(dkv_arena_alloc(&arena, arena.bytes + 1));
    dkv_arena_close(&arena);
}

/* What an earlier owner wrote to a kept range goes back to the system, too. */
static void pages_go_back_whoever_touched_them(void **unused)
{
    enum { BYTES = 512 << 10, N = DKV_ARENA_KEPT_BYTES / BYTES };
    struct dkv_arena arena = open_arena();
    void *untouched[N], *touched[N];
    (void)unused;
    for (int i = 0; i < N; i++)
        memset(untouched[i] = dkv_arena_alloc(&arena, BYTES), 1, BYTES);
    for (int i = 0; i < N; i++)
        dkv_arena_free(&arena, untouched[i], BYTES, BYTES);
    for (int i = 0; i < N; i++)
        untouched[i] = dkv_arena_alloc(&arena, BYTES);
    for (int i = 0; i < N; i++)
        memset(touched[i] = dkv_arena_alloc(&arena, BYTES), 1, BYTES);
    for (int i = 0; i < N; i++)
        dkv_arena_free(&arena, touched[i], BYTES, BYTES);
    for (int i = 0; i < N; i++)
        dkv_arena_free(&arena, untouched[i], BYTES, 0);
    assert_true(backed_bytes(&arena) <= DKV_ARENA_KEPT_BYTES);
    dkv_arena_close(&arena);
}

/* A worker that is wrong, or a peer that the fd reached, cannot make the daemon fault. */
static void pages_of_large_ranges_go_back_piece_by_piece(void **unused)
{
    enum { BYTES = 10 << 20, STEP = 1 << 20 };
    struct dkv_arena arena = open_arena();
    struct stat info;
    unsigned n_steps = 1;
    (void)unused;
    unsigned char *range = dkv_arena_alloc(&arena, BYTES);
    memset(range, 1, BYTES);
    dkv_arena_free(&arena, range, BYTES, BYTES);
    assert_int_equal(arena.used_bytes, 0);
    unsigned char *other = dkv_arena_alloc(&arena, BYTES);
    assert_true(other >= range + BYTES); /* not where pages are left that nobody counts */
    dkv_arena_free(&arena, other, BYTES, 0);
    for (; dkv_arena_scrub(&arena, STEP); n_steps++) {
        assert_int_equal(fstat(arena.fd, &info), 0);
        assert_int_equal(info.st_blocks * 512, BYTES - n_steps * STEP);
    }
    assert_int_equal(n_steps, BYTES / STEP);
    assert_ptr_equal(dkv_arena_alloc(&arena, BYTES), range);
    dkv_arena_free(&arena, range, BYTES, 0);
    dkv_arena_close(&arena);
}

/* ... but no more wait than a while takes. */
static void pages_above_a_bound_go_back_at_once(void **unused)
{
    enum { BYTES = 64 << 20, N = 6 };
    struct dkv_arena arena = open_arena();
    unsigned char *ranges[N];
    struct stat info;
    (void)unused;
    for (int i = 0; i < N; i++) {
        ranges[i] = dkv_arena_alloc(&arena, BYTES);
        for (uint64_t at = 0; at < BYTES; at += DKV_ARENA_PAGE)
            ranges[i][at] = 1;
    }
    for (int i = 0; i < N; i++)
        dkv_arena_free(&arena, ranges[i], BYTES, BYTES);
    assert_int_equal(fstat(arena.fd, &info), 0);
    assert_true((uint64_t)info.st_blocks * 512 <= DKV_ARENA_DIRTY_BYTES);
    dkv_arena_close(&arena);
}

static void the_arena_cannot_be_resized(void **unused)
{
    struct dkv_arena arena = open_arena();
    (void)unused;
    assert_int_equal(ftruncate(arena.fd, 0), -1);
    assert_int_equal(ftruncate(arena.fd, (off_t)(arena.bytes * 2)), -1);
    dkv_arena_close(&arena);
}

static void the_tensor_section_is_aligned_whatever_the_head(void **unused)
{
    struct dkv_body_pool pool;
    struct dkv_error err;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 64u << 20, 64u << 20);
    for (uint64_t head = 0; head < 200; head++)
        for (uint64_t capacity = 1000; capacity < 4u << 20; capacity += (1u << 20) - 1) {
            struct dkv_body body = {0};
            assert_int_equal(dkv_body_reserve(&body, &pool, NULL, capacity, head, true, &err),
                             DKV_OK);
            assert_int_equal((uintptr_t)(body.data + head) % DKV_BODY_ALIGN, 0);
            memset(body.data, 1, capacity);
            dkv_body_release(&body);
        }
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

static void a_body_takes_what_fits_and_no_more(void **unused)
{
    struct dkv_body_pool pool;
    struct dkv_body body = {0};
    struct dkv_error err;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 1u << 20, 1u << 20);
    assert_int_equal(dkv_body_reserve(&body, &pool, NULL, 10, 0, true, &err), DKV_OK);
    assert_int_equal(dkv_body_append(&body, "12345", 5, &err), DKV_OK);
    assert_int_equal(dkv_body_append(&body, "123456", 6, &err), DKV_E_TOO_LARGE);
    assert_int_equal(body.received_bytes, 5);
    assert_int_equal(dkv_body_append(&body, "67890", 5, &err), DKV_OK);
    assert_memory_equal(body.data, "1234567890", 10);
    assert_int_equal(dkv_body_append(&body, "", 0, &err), DKV_OK);
    dkv_body_release(&body);
    dkv_body_release(&body);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

static void a_large_body_arrives_as_it_was_sent(void **unused)
{
    static unsigned char sent[5u << 20];
    struct dkv_body_pool pool;
    struct dkv_body body = {0};
    struct dkv_error err;
    (void)unused;
    for (size_t i = 0; i < sizeof(sent); i++)
        sent[i] = (unsigned char)(i * 2654435761u >> 13);
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 64u << 20, 64u << 20);
    assert_int_equal(dkv_body_reserve(&body, &pool, NULL, sizeof(sent), 13, true, &err), DKV_OK);
    for (size_t at = 0, n = 1; at < sizeof(sent); at += n, n = n * 3 % 99991) {
        n = n < sizeof(sent) - at ? n : sizeof(sent) - at;
        assert_int_equal(dkv_body_append(&body, sent + at, n, &err), DKV_OK);
    }
    assert_memory_equal(body.data, sent, sizeof(sent));
    dkv_body_release(&body);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

static void bodies_together_stay_within_the_limit(void **unused)
{
    static const char piece[65536];
    struct dkv_body_pool pool;
    struct dkv_body known = {0}, chunked = {0}, refused = {0};
    struct dkv_error err;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 4u << 20, 4u << 20);
    assert_int_equal(dkv_body_reserve(&known, &pool, NULL, 3u << 20, 0, true, &err), DKV_OK);
    assert_int_equal(pool.quota.charged_bytes, 3u << 20);
    assert_int_equal(dkv_body_reserve(&refused, &pool, NULL, (1u << 20) + 1, 0, true, &err),
                     DKV_E_BUSY);
    assert_null(refused.pool);
    assert_int_equal(dkv_body_reserve(&chunked, &pool, NULL, 1u << 30, 0, false, &err), DKV_OK);
    assert_int_equal(pool.quota.charged_bytes, 3u << 20);
    enum dkv_status status = DKV_OK;
    while ((status = dkv_body_append(&chunked, piece, sizeof(piece), &err)) == DKV_OK)
        assert_true(pool.quota.charged_bytes <= pool.quota.limit_bytes);
    assert_int_equal(status, DKV_E_BUSY);
    assert_int_equal(chunked.received_bytes, 1u << 20);
    dkv_body_release(&chunked);
    dkv_body_release(&known);
    assert_int_equal(pool.quota.charged_bytes, 0);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

/* Fills a body of `n_bytes` and releases it, so that its mapping is warm. */
static void *use_body(struct dkv_body_pool *pool, uint64_t n_bytes)
{
    struct dkv_body body = {0};
    struct dkv_error err;
    assert_int_equal(dkv_body_reserve(&body, pool, NULL, n_bytes, 0, true, &err), DKV_OK);
    void *mapping = body.mapping;
    body.received_bytes = n_bytes;
    dkv_body_release(&body);
    return mapping;
}

static void a_mapping_stays_warm_for_a_second(void **unused)
{
    struct dkv_body_pool pool;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 1u << 30, 1u << 30);
    void *first = use_body(&pool, 8u << 20);
    assert_ptr_equal(pool.warm, first);
    assert_ptr_equal(use_body(&pool, 8u << 20), first);
    dkv_body_pool_trim(&pool, pool.warm_ms + DKV_BODY_WARM_MS - 1);
    assert_non_null(pool.warm);
    dkv_body_pool_trim(&pool, pool.warm_ms + DKV_BODY_WARM_MS);
    assert_null(pool.warm);
    use_body(&pool, 8u << 20);
    use_body(&pool, 4u << 20);
    assert_true(pool.warm_bytes < 5u << 20);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

/* As the local socket's bulks and copied query rows are, by whoever reserved it. */
static void pages_that_were_written_directly_go_back(void **unused)
{
    enum { BYTES = 8 << 20 };
    struct dkv_body_pool pool;
    struct dkv_body bodies[2] = {{0}};
    struct dkv_error err;
    (void)unused;
    struct dkv_arena arena = open_arena();
    dkv_body_pool_init(&pool, &arena, 1u << 30, 1u << 30);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(dkv_body_reserve(&bodies[i], &pool, NULL, BYTES, 0, true, &err), DKV_OK);
        memset(bodies[i].data, 1, BYTES);
    }
    bodies[0].received_bytes = BYTES; /* stays warm; the other one was cut off */
    dkv_body_release(&bodies[0]);
    dkv_body_release(&bodies[1]);
    assert_true(backed_bytes(&arena) <= BYTES + (1u << 20));
    dkv_body_pool_trim(&pool, pool.warm_ms + DKV_BODY_WARM_MS);
    assert_true(backed_bytes(&arena) <= 1u << 20);
    dkv_body_pool_fini(&pool);
    dkv_arena_close(&arena);
}

/* ---- whose memory it is ---- */

struct quota_world {
    struct dkv_arena arena;
    struct dkv_body_pool pool;
    struct dkv_quota_holder *one, *other;
    struct dkv_error err;
};

/* 4 MiB, of which a client may hold 2. */
static void open_quota(struct quota_world *w)
{
    w->arena = open_arena();
    dkv_body_pool_init(&w->pool, &w->arena, 4u << 20, 2u << 20);
    w->one = dkv_quota_holder_new();
    w->other = dkv_quota_holder_new();
}

static void close_quota(struct quota_world *w)
{
    assert_int_equal(w->pool.quota.charged_bytes, 0);
    dkv_quota_holder_unref(w->one);
    dkv_quota_holder_unref(w->other);
    dkv_body_pool_fini(&w->pool);
    dkv_arena_close(&w->arena);
}

static enum dkv_status reserve(struct quota_world *w, struct dkv_body *body,
                               struct dkv_quota_holder *holder, uint64_t bytes)
{
    *body = (struct dkv_body){0};
    return dkv_body_reserve(body, &w->pool, holder, bytes, 0, true, &w->err);
}

static void one_client_holds_its_share_and_no_more(void **unused)
{
    struct quota_world w;
    struct dkv_body first, second, its;
    (void)unused;
    open_quota(&w);
    assert_int_equal(reserve(&w, &first, w.one, 1u << 20), DKV_OK);
    assert_int_equal(reserve(&w, &second, w.one, 1u << 20), DKV_OK);
    assert_int_equal(reserve(&w, &its, w.one, 1), DKV_E_BUSY);
    assert_true(w.one->over_share);
    assert_string_equal(w.err.text, "this client's share of memory: its bodies and answers hold "
                                    "2097152 of 2097152 bytes, 1 more asked for");
    assert_int_equal(reserve(&w, &its, w.other, 2u << 20), DKV_OK);
    dkv_body_release(&first);
    assert_int_equal(w.one->charged_bytes, 1u << 20);
    assert_int_equal(reserve(&w, &first, w.one, 1u << 20), DKV_OK);
    assert_false(w.one->over_share);
    dkv_body_release(&first);
    dkv_body_release(&second);
    dkv_body_release(&its);
    close_quota(&w);
}

static void what_all_hold_is_another_reason_than_ones_share(void **unused)
{
    struct quota_world w;
    struct dkv_body nobodys, its, refused;
    (void)unused;
    open_quota(&w);
    assert_int_equal(reserve(&w, &nobodys, NULL, 3u << 20), DKV_OK);
    assert_int_equal(reserve(&w, &its, w.one, 1u << 20), DKV_OK);
    assert_int_equal(reserve(&w, &refused, w.one, 1u << 20), DKV_E_BUSY);
    assert_false(w.one->over_share);
    assert_string_equal(w.err.text, "bodies and answers hold 4194304 of 4194304 bytes, 1048576 "
                                    "more asked for");
    dkv_body_release(&nobodys);
    dkv_body_release(&its);
    close_quota(&w);
}

static void a_chunked_body_grows_up_to_its_clients_share(void **unused)
{
    static const char piece[65536];
    struct quota_world w;
    struct dkv_body body = {0};
    enum dkv_status status;
    (void)unused;
    open_quota(&w);
    assert_int_equal(dkv_body_reserve(&body, &w.pool, w.one, 1u << 30, 0, false, &w.err), DKV_OK);
    while ((status = dkv_body_append(&body, piece, sizeof(piece), &w.err)) == DKV_OK)
        assert_true(w.one->charged_bytes <= 2u << 20);
    assert_int_equal(status, DKV_E_BUSY);
    assert_true(w.one->over_share);
    assert_int_equal(body.received_bytes, 2u << 20);
    dkv_body_release(&body);
    close_quota(&w);
}

static void a_charge_outlives_its_client(void **unused)
{
    struct quota_world w;
    struct dkv_body body;
    (void)unused;
    open_quota(&w);
    assert_int_equal(reserve(&w, &body, w.one, 1u << 20), DKV_OK);
    dkv_quota_holder_unref(w.one);
    w.one = NULL;
    assert_int_equal(w.pool.quota.charged_bytes, 1u << 20);
    dkv_body_release(&body);
    close_quota(&w);
}

static void limits_that_were_lowered_refuse_until_enough_is_given_back(void **unused)
{
    struct quota_world w;
    struct dkv_body body, more;
    (void)unused;
    open_quota(&w);
    assert_int_equal(reserve(&w, &body, w.one, 2u << 20), DKV_OK);
    w.pool.quota.limit_bytes = w.pool.quota.client_bytes = 1u << 20;
    assert_int_equal(reserve(&w, &more, w.one, 1), DKV_E_BUSY);
    assert_int_equal(reserve(&w, &more, w.other, 1), DKV_E_BUSY);
    dkv_body_release(&body);
    assert_int_equal(reserve(&w, &more, w.one, 1u << 20), DKV_OK);
    dkv_body_release(&more);
    close_quota(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranges_never_overlap_and_all_comes_back),
        cmocka_unit_test(pages_go_back_whoever_touched_them),
        cmocka_unit_test(pages_of_large_ranges_go_back_piece_by_piece),
        cmocka_unit_test(pages_above_a_bound_go_back_at_once),
        cmocka_unit_test(the_arena_cannot_be_resized),
        cmocka_unit_test(the_tensor_section_is_aligned_whatever_the_head),
        cmocka_unit_test(a_body_takes_what_fits_and_no_more),
        cmocka_unit_test(a_large_body_arrives_as_it_was_sent),
        cmocka_unit_test(bodies_together_stay_within_the_limit),
        cmocka_unit_test(a_mapping_stays_warm_for_a_second),
        cmocka_unit_test(pages_that_were_written_directly_go_back),
        cmocka_unit_test(one_client_holds_its_share_and_no_more),
        cmocka_unit_test(what_all_hold_is_another_reason_than_ones_share),
        cmocka_unit_test(a_chunked_body_grows_up_to_its_clients_share),
        cmocka_unit_test(a_charge_outlives_its_client),
        cmocka_unit_test(limits_that_were_lowered_refuse_until_enough_is_given_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
