/* The table of streams: what it forgets, what a share is, what a strip shows. */
#include "server/streams.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

static void a_full_table_forgets_who_was_quiet_longest(void **unused)
{
    struct dkv_streams streams;
    char name[16];
    (void)unused;
    assert_int_equal(dkv_streams_open(&streams, 3, false, NULL), DKV_OK);
    for (unsigned i = 0; i < 3; i++) {
        snprintf(name, sizeof(name), "s%u", i);
        dkv_streams_get(&streams, name, "", i)->n_failed = i + 1;
    }
    assert_int_equal(dkv_streams_get(&streams, "s0", "", 10)->n_failed, 1);
    assert_int_equal(dkv_streams_get(&streams, "s0", "other", 11)->n_failed, 0); /* in s1's place */
    assert_int_equal(streams.n_evicted, 1);
    assert_int_equal(dkv_streams_get(&streams, "s2", "", 12)->n_failed, 3);
    assert_int_equal(dkv_streams_get(&streams, "s0", "", 12)->n_failed, 1);
    assert_int_equal(dkv_streams_get(&streams, "s1", "", 13)->n_failed, 0);
    assert_int_equal(streams.n, 3);
    for (unsigned i = 0; i < 1000; i++) { /* every chain is used and unlinked many times */
        snprintf(name, sizeof(name), "t%u", i % 37);
        struct dkv_stream *stream = dkv_streams_get(&streams, name, "", 20 + i);
        assert_string_equal(stream->name, name);
    }
    assert_int_equal(streams.n, 3);
    dkv_streams_close(&streams);
}

static void the_share_of_a_quiet_stream_halves(void **unused)
{
    struct dkv_streams streams;
    const struct dkv_stream *top[4];
    struct dkv_job job = {.n_read_bytes = 1000};
    (void)unused;
    assert_int_equal(dkv_streams_open(&streams, 8, false, NULL), DKV_OK);
    struct dkv_stream *early = dkv_streams_get(&streams, "early", "", 0);
    dkv_stream_answered(&streams, early, &job, DKV_TRANSPORT_HTTP, 0, 0);
    struct dkv_stream *late = dkv_streams_get(&streams, "late", "", DKV_STREAM_HALF_LIFE_MS);
    job.n_read_bytes = 600;
    dkv_stream_answered(&streams, late, &job, DKV_TRANSPORT_HTTP, 0, DKV_STREAM_HALF_LIFE_MS);
    assert_true(fabs(dkv_stream_weight(early, DKV_STREAM_HALF_LIFE_MS) - 500) < 1e-6);
    assert_int_equal(dkv_streams_top(&streams, DKV_STREAM_HALF_LIFE_MS, top, 4), 2);
    assert_ptr_equal(top[0], late);
    assert_int_equal(dkv_streams_top(&streams, DKV_STREAM_HALF_LIFE_MS, top, 1), 1);
    dkv_streams_close(&streams);
}

/* Two KV heads of 128 tokens, so that a part has two: the first head keeps all of part 0, the
 * second one token of part 63. */
static void a_strip_says_how_much_of_each_part_was_kept(void **unused)
{
    struct dkv_streams streams;
    int32_t keep[] = {0, 1, 3, 127};
    struct dkv_job job = {
        .keep = keep, .n_keep = 4, .kv_heads = 2, .keep_tokens = 2, .n_tokens = 128};
    (void)unused;
    job.request.n_blocks = 1;
    assert_int_equal(dkv_streams_open(&streams, 8, true, NULL), DKV_OK);
    struct dkv_stream *stream = dkv_streams_get(&streams, "", "", 0);
    dkv_stream_answered(&streams, stream, &job, DKV_TRANSPORT_HTTP, 0, 0);
    assert_true(stream->has_strip);
    assert_int_equal(stream->strip[0], 128); /* 2 of 4 */
    assert_int_equal(stream->strip[1], 64);  /* 1 of 4 */
    assert_int_equal(stream->strip[2], 0);
    assert_int_equal(stream->strip[63], 64);
    int32_t offsets[] = {0, 1, 4}; /* heads that keep different numbers */
    job.offsets = offsets;
    keep[1] = 0;
    dkv_stream_answered(&streams, stream, &job, DKV_TRANSPORT_HTTP, 0, 0);
    assert_true(stream->has_strip);
    assert_int_equal(stream->strip[0], 128); /* one each of 2 */
    assert_int_equal(stream->strip[1], 64);
    assert_int_equal(stream->strip[63], 64);
    offsets[2] = 5; /* past the answer's end */
    dkv_stream_answered(&streams, stream, &job, DKV_TRANSPORT_HTTP, 0, 0);
    assert_false(stream->has_strip);
    job.offsets = NULL;
    keep[1] = 1;
    dkv_stream_answered(&streams, stream, &job, DKV_TRANSPORT_HTTP, 0, 0);
    dkv_streams_set_strips(&streams, false);
    assert_false(stream->has_strip);
    assert_int_equal(stream->strip[0], 0);
    job.n_tokens = 1; /* fewer tokens than parts */
    job.keep_tokens = job.n_keep = 1;
    job.kv_heads = 1;
    dkv_streams_set_strips(&streams, true);
    dkv_stream_answered(&streams, stream, &job, DKV_TRANSPORT_HTTP, 0, 0);
    unsigned sum = 0;
    for (unsigned bin = 0; bin < DKV_STREAM_BINS; bin++)
        sum += stream->strip[bin];
    assert_int_equal(sum, 255);
    job.keep_tokens = 2; /* says more than there is, or less */
    dkv_stream_answered(&streams, stream, &job, DKV_TRANSPORT_HTTP, 0, 0);
    assert_false(stream->has_strip);
    job.keep_tokens = 1;
    job.n_keep = 2;
    dkv_stream_answered(&streams, stream, &job, DKV_TRANSPORT_HTTP, 0, 0);
    assert_false(stream->has_strip);
    dkv_streams_close(&streams);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_table_forgets_who_was_quiet_longest),
        cmocka_unit_test(the_share_of_a_quiet_stream_halves),
        cmocka_unit_test(a_strip_says_how_much_of_each_part_was_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
