/* The stream, received: messages however the bytes are cut, and bulk. */
#include "tests/proto/conn_fixture.h"

static void a_message_comes_together_byte_by_byte(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[64];
    const size_t n = message(bytes, DKV_WIRE_PING, 0, 42, 0);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(next(p.daemon, &m), DKV_OK);
        assert_int_equal(m.header.type, 0);
        assert_int_equal(dkv_wire_conn_in_message(p.daemon), i > 0);
        put(&p, bytes + i, 1, 0);
    }
    expect(&p, DKV_WIRE_PING, 42);
    assert_false(dkv_wire_conn_in_message(p.daemon));
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    assert_false(dkv_wire_conn_in_message(p.daemon));
    end(&p);
}

static void several_messages_in_one_piece_come_one_by_one(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[4096];
    size_t n = 0;
    for (uint64_t id = 1; id <= 100; id++)
        n += message(bytes + n, DKV_WIRE_PING, 0, id, 0);
    put(&p, bytes, n, 0);
    for (uint64_t id = 1; id <= 100; id++)
        expect(&p, DKV_WIRE_PING, id);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    assert_int_equal(m.header.type, 0);
    end(&p);
}

static void another_version_is_told_from_rubbish(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[64];
    const size_t n = message(bytes, DKV_WIRE_PING, 0, 1, 0);
    bytes[0] = 9;
    put(&p, bytes, n, 0);
    assert_int_equal(next(p.daemon, &m), DKV_E_UNSUPPORTED);
    end(&p);
    p = begin(false);
    put(&p, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 35, 0);
    assert_int_equal(next(p.daemon, &m), DKV_E_UNSUPPORTED); /* 'G' is no version we know */
    end(&p);
}

static void a_peer_that_goes_away_is_unavailable(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[64];
    const size_t n = message(bytes, DKV_WIRE_PING, 0, 1, 0);
    put(&p, bytes, n - 1, 0);
    close(p.raw);
    p.raw = -1;
    assert_int_equal(next(p.daemon, &m), DKV_E_UNAVAILABLE);
    end(&p);
}

/* --- bulk ---------------------------------------------------------------------------------- */

static void bulk_goes_to_its_place_and_the_next_message_follows(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    enum { BULK = 300000 };
    uint8_t *bulk = malloc(BULK), *got = calloc(1, BULK), bytes[512];
    assert_true(bulk != NULL && got != NULL);
    for (size_t i = 0; i < BULK; i++)
        bulk[i] = (uint8_t)(i * 7);
    const size_t n = message(bytes, DKV_WIRE_SCORE, 0, 1, BULK);
    memcpy(bytes + n, bulk, 100); /* the start of the bulk comes with its header */
    put(&p, bytes, n + 100, 0);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    assert_int_equal(dkv_wire_conn_bulk_left(p.daemon), BULK);
    size_t sent = 100, read = 0;
    uint64_t step;
    while (dkv_wire_conn_bulk_left(p.daemon) > 0) {
        const size_t piece = sent < BULK && BULK - sent > 5000 ? 5000 : BULK - sent;
        if (piece > 0)
            put(&p, bulk + sent, piece, 0);
        sent += piece;
        assert_int_equal(dkv_wire_conn_read_bulk(p.daemon, got + read, 7000, &step, &err), DKV_OK);
        read += step;
    }
    assert_int_equal(read, BULK);
    assert_memory_equal(bulk, got, BULK);
    put(&p, bytes, message(bytes, DKV_WIRE_PING, 0, 2, 0), 0);
    expect(&p, DKV_WIRE_PING, 2);
    free(bulk);
    free(got);
    end(&p);
}

static void bulk_can_be_thrown_away(void **state)
{
    (void)state;
    struct pair p = begin(false);
    struct dkv_wire_conn_message m;
    uint8_t bytes[512], zeros[1000] = {0};
    uint64_t step;
    put(&p, bytes, message(bytes, DKV_WIRE_SCORE, 0, 1, 50 * sizeof(zeros)), 0);
    for (int i = 0; i < 50; i++)
        put(&p, zeros, sizeof(zeros), 0);
    put(&p, bytes, message(bytes, DKV_WIRE_REGION_ADD, 1, 2, 0), 1);
    assert_int_equal(next(p.daemon, &m), DKV_OK);
    while (dkv_wire_conn_bulk_left(p.daemon) > 0)
        assert_int_equal(dkv_wire_conn_read_bulk(p.daemon, NULL, UINT64_MAX, &step, &err), DKV_OK);
    expect(&p, DKV_WIRE_REGION_ADD, 2);
    end(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_message_comes_together_byte_by_byte),
        cmocka_unit_test(several_messages_in_one_piece_come_one_by_one),
        cmocka_unit_test(another_version_is_told_from_rubbish),
        cmocka_unit_test(a_peer_that_goes_away_is_unavailable),
        cmocka_unit_test(bulk_goes_to_its_place_and_the_next_message_follows),
        cmocka_unit_test(bulk_can_be_thrown_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
