/* The embedded transport over an engine that works by itself, as one on a GPU does: here the CPU
 * engine, whose batches end when a test says so. */
#include "client/embedded.h"
#include "tests/client/calls.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* ---- the engine ---- */

enum { DEPTH = 2 };

/* There is one at a time. */
static struct {
    struct dkv_engine *cpu;
    struct dkv_engine_config config;
    struct {
        struct dkv_item *items;
        size_t n;
    } batches[DEPTH];
    unsigned n_in_flight;
    unsigned n_through;   /* of them, from the oldest on */
    unsigned n_submitted; /* since open */
    unsigned n_forced;    /* that were waited for before they were through */
    const void *nowhere;  /* an address that the engine cannot read */
    enum dkv_status refusal;
    bool lost;
} held;

static enum dkv_status held_open(const struct dkv_engine_config *config,
                                 struct dkv_engine **engine_out, struct dkv_error *err)
{
    memset(&held, 0, sizeof(held));
    held.config = *config;
    *engine_out = (struct dkv_engine *)&held;
    return dkv_engine_cpu.open(config, &held.cpu, err);
}

static void held_close(struct dkv_engine *engine)
{
    if (engine == NULL)
        return;
    assert_int_equal(held.n_in_flight, 0);
    dkv_engine_cpu.close(held.cpu);
}

static void held_info(const struct dkv_engine *engine, struct dkv_engine_info *info_out)
{
    (void)engine;
    dkv_engine_cpu.info(held.cpu, info_out);
}

static enum dkv_status held_submit(struct dkv_engine *engine, struct dkv_item *items, size_t n,
                                   struct dkv_error *err)
{
    (void)engine;
    assert_true(held.n_in_flight < DEPTH);
    if (held.refusal != DKV_OK)
        return dkv_error_set(err, held.refusal, "not now");
    for (size_t i = 0; i < n; i++)
        items[i].status = DKV_OK;
    held.batches[held.n_in_flight].items = items;
    held.batches[held.n_in_flight++].n = n;
    held.n_submitted++;
    return DKV_OK;
}

/* Computes what nobody has cancelled. */
static enum dkv_status held_wait(struct dkv_engine *engine, struct dkv_error *err)
{
    (void)engine;
    assert_true(held.n_in_flight > 0);
    struct dkv_item *items = held.batches[0].items;
    for (size_t i = 0; i < held.batches[0].n && !held.lost; i++)
        if (items[i].status == DKV_OK)
            assert_int_equal(dkv_engine_run(&dkv_engine_cpu, held.cpu, &items[i], 1, err), DKV_OK);
    held.batches[0] = held.batches[1];
    held.n_in_flight--;
    if (held.n_through > 0)
        held.n_through--;
    else
        held.n_forced++;
    return held.lost ? dkv_error_set(err, DKV_E_DEVICE, "the device is lost") : DKV_OK;
}

static bool held_ready(struct dkv_engine *engine)
{
    (void)engine;
    return held.n_through > 0;
}

static enum dkv_status held_place(struct dkv_engine *engine, const void *at,
                                  enum dkv_place *place_out, struct dkv_error *err)
{
    (void)engine;
    *place_out = DKV_PLACE_HOST;
    return at == held.nowhere ? dkv_error_set(err, DKV_E_INVALID, "lies on cuda:7") : DKV_OK;
}

/* The oldest batch that was not yet is through. */
static void end_batch(void)
{
    assert_true(held.n_through < held.n_in_flight);
    held.n_through++;
    held.config.on_done(held.config.on_done_arg);
}

static const struct dkv_engine_ops held_ops = {
    .abi = DKV_ENGINE_ABI,
    .name = "held",
    .open = held_open,
    .close = held_close,
    .info = held_info,
    .submit = held_submit,
    .wait = held_wait,
    .max_in_flight = DEPTH,
    .ready = held_ready,
    .place = held_place,
};

enum dkv_status dkv_embedded_find(const char *device, const struct dkv_engine_ops **ops_out,
                                  int *ordinal_out, struct dkv_error *err)
{
    (void)err;
    assert_string_equal(device, "cuda:3");
    *ordinal_out = 3;
    *ops_out = &held_ops;
    return DKV_OK;
}

/* ---- what is asked ---- */

enum { Q_HEADS = 4, KV_HEADS = 2, TOKENS = 200, DIM = 32, ROWS = 8, BATCH = 200, KEEP = 20 };

static float query[BATCH][Q_HEADS][ROWS][DIM];
static float key[BATCH][KV_HEADS][TOKENS][DIM];
static float value[BATCH][KV_HEADS][TOKENS][DIM];

static const struct dkv_test_shape shape = {Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS};

static struct dropkv_request make_request(uint32_t first, uint32_t batch)
{
    static const struct dropkv_param params[] = {{"keep_tokens", DROPKV_PARAM_INT, KEEP, 0, NULL}};
    struct dropkv_request r = dkv_test_request(&shape, batch, query[first], key[first],
                                               value[first]);
    r.params = params;
    r.n_params = 1;
    return r;
}

static struct dropkv_client *open_client(void)
{
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    options.cuda_stream = &held;
    if (dropkv_client_open("embedded:cuda:3?threads=1", &options, &client, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    assert_ptr_equal(held.config.stream, &held);
    assert_int_equal(held.config.device, 3);
    return client;
}

static uint64_t submit(struct dropkv_client *client, const struct dropkv_request *r)
{
    uint64_t id = 0;
    struct dropkv_error error;
    if (dropkv_submit(client, r, &id, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return id;
}

static void dispatch(struct dropkv_client *client)
{
    assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
}

/* The next result is this request's, and is what the CPU engine says. */
static void expect_answer(struct dropkv_client *client, uint64_t id, uint32_t first, uint32_t batch)
{
    struct dropkv_result *result = dropkv_next_result(client);
    assert_non_null(result);
    assert_string_equal(result->error_text, "");
    assert_int_equal(result->id, id);
    assert_int_equal(result->batch, batch);
    for (uint32_t i = 0; i < batch; i++) {
        const struct dropkv_request r = make_request(first + i, 1);
        struct dkv_call call = {0};
        int32_t keep[KV_HEADS * KEEP];
        assert_int_equal(dkv_call_init(&call, &r, NULL), DKV_OK);
        struct dkv_item item = {.block = &call.blocks[0],
                                .params = &call.request.params,
                                .plan = &call.plans[0],
                                .keep_out = keep};
        assert_int_equal(dkv_engine_run(&dkv_engine_cpu, held.cpu, &item, 1, NULL), DKV_OK);
        assert_memory_equal(keep, result->keep_indices + (size_t)i * KV_HEADS * KEEP, sizeof(keep));
        dkv_call_fini(&call);
    }
    dropkv_result_free(result);
}

static void expect_failure(struct dropkv_client *client, uint64_t id, enum dropkv_status status)
{
    struct dropkv_result *result = dropkv_next_result(client);
    assert_non_null(result);
    assert_int_equal(result->id, id);
    assert_int_equal(result->status, status);
    dropkv_result_free(result);
}

/* ---- the tests ---- */

static void a_request_is_under_way_when_submit_returns(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    const struct dropkv_request r = make_request(0, 1);
    const uint64_t id = submit(client, &r);
    assert_int_equal(held.n_submitted, 1);
    assert_false(dkv_test_is_readable(client));
    dispatch(client);
    assert_null(dropkv_next_result(client));
    end_batch();
    assert_true(dkv_test_is_readable(client));
    dispatch(client);
    expect_answer(client, id, 0, 1);
    assert_false(dkv_test_is_readable(client));
    assert_int_equal(held.n_forced, 0);
    dropkv_client_close(client);
}

/* Two batches are under way; what comes then is batched, in order, when one has ended. */
static void what_finds_no_room_goes_out_together(void **state)
{
    (void)state;
    enum { N = 6 };
    struct dropkv_client *client = open_client();
    uint64_t ids[N];
    for (uint32_t i = 0; i < N; i++) {
        const struct dropkv_request r = make_request(i, 1);
        ids[i] = submit(client, &r);
    }
    assert_int_equal(held.n_submitted, 2);
    end_batch();
    dispatch(client);
    expect_answer(client, ids[0], 0, 1);
    assert_int_equal(held.n_submitted, 3);
    assert_int_equal(held.batches[1].n, N - 2);
    end_batch();
    end_batch();
    dispatch(client);
    for (uint32_t i = 1; i < N; i++)
        expect_answer(client, ids[i], i, 1);
    assert_int_equal(dropkv_in_flight(client), 0);
    dropkv_client_close(client);
}

/* A request of more sequences than a batch takes is answered once all its batches are. */
static void a_large_request_is_several_batches(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    const struct dropkv_request r = make_request(0, BATCH);
    const uint64_t id = submit(client, &r);
    assert_int_equal(held.n_submitted, 2);
    assert_int_equal(held.batches[0].n + held.batches[1].n, BATCH);
    end_batch();
    dispatch(client);
    assert_null(dropkv_next_result(client));
    end_batch();
    dispatch(client);
    expect_answer(client, id, 0, BATCH);
    dropkv_client_close(client);
}

/* Its tensors are read to the end; its neighbours lose nothing. */
static void cancelling_waits_for_what_is_under_way(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    const struct dropkv_request r[] = {make_request(0, 1), make_request(1, 1), make_request(2, 1)};
    uint64_t ids[3];
    for (int i = 0; i < 3; i++)
        ids[i] = submit(client, &r[i]);
    assert_int_equal(dropkv_cancel(client, ids[1]), DROPKV_OK);
    assert_int_equal(held.n_forced, 2);
    assert_int_equal(held.n_in_flight, 1); /* the third has found room */
    assert_true(dkv_test_is_readable(client));
    dispatch(client);
    expect_answer(client, ids[0], 0, 1);
    assert_int_equal(dropkv_cancel(client, ids[1]), DROPKV_E_NOT_FOUND);
    end_batch();
    dispatch(client);
    expect_answer(client, ids[2], 2, 1);
    dropkv_client_close(client);
}

static void what_was_not_started_is_cancelled_at_once(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    const struct dropkv_request r = make_request(0, 1);
    submit(client, &r);
    submit(client, &r);
    const uint64_t waiting = submit(client, &r);
    assert_int_equal(dropkv_cancel(client, waiting), DROPKV_OK);
    assert_int_equal(held.n_forced, 0);
    assert_int_equal(held.n_submitted, 2);
    dropkv_client_close(client);
}

/* The descriptor tells of the deadline. The batch goes on, and writes nothing to a result that may
 * have been freed: sanitizers watch. */
static void a_deadline_ends_a_request_under_way(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    struct dropkv_request r = make_request(0, 3);
    r.timeout_us = 2000;
    const uint64_t late = submit(client, &r);
    const struct dropkv_request other = make_request(7, 1);
    const uint64_t good = submit(client, &other);
    assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    expect_failure(client, late, DROPKV_E_TIMEOUT);
    assert_int_equal(held.n_forced, 0);
    assert_int_equal(dropkv_in_flight(client), 1);
    end_batch();
    end_batch();
    dispatch(client);
    expect_answer(client, good, 7, 1);
    assert_null(dropkv_next_result(client));
    assert_int_equal(held.n_in_flight, 0);
    dispatch(client);
    assert_false(dkv_test_is_readable(client));
    dropkv_client_close(client);
}

static void a_call_that_waits_ends_at_the_deadline(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    struct dropkv_request r = make_request(0, 1);
    struct dropkv_result *result;
    r.timeout_us = 2000;
    assert_int_equal(dropkv_score(client, &r, &result, NULL), DROPKV_E_TIMEOUT);
    assert_int_equal(held.n_in_flight, 1);
    dropkv_client_close(client);
}

static void closing_waits_for_what_is_under_way_and_begins_nothing(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    struct dropkv_request r = make_request(0, 1);
    r.timeout_us = 1;
    submit(client, &r); /* one that times out, another under way and three that wait */
    assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    expect_failure(client, 1, DROPKV_E_TIMEOUT);
    r.timeout_us = 0;
    for (int i = 0; i < 4; i++)
        submit(client, &r);
    dropkv_client_close(client);
    assert_int_equal(held.n_submitted, 2);
    assert_int_equal(held.n_in_flight, 0);
}

/* A batch that the engine refuses fails those in it; the next one is tried anew. */
static void a_refused_batch_is_a_result(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    const struct dropkv_request r = make_request(0, 1);
    held.refusal = DKV_E_INVALID;
    const uint64_t refused = submit(client, &r);
    assert_true(dkv_test_is_readable(client));
    dispatch(client);
    expect_failure(client, refused, DROPKV_E_INVALID);
    held.refusal = DKV_OK;
    const uint64_t id = submit(client, &r);
    end_batch();
    dispatch(client);
    expect_answer(client, id, 0, 1);
    dropkv_client_close(client);
}

static void a_lost_device_fails_everything(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    const struct dropkv_request r = make_request(0, 1);
    assert_int_equal(dropkv_health(client, 0, NULL), DROPKV_OK);
    const uint64_t ids[] = {submit(client, &r), submit(client, &r)};
    held.lost = true;
    end_batch();
    end_batch();
    dispatch(client);
    expect_failure(client, ids[0], DROPKV_E_DEVICE);
    expect_failure(client, ids[1], DROPKV_E_DEVICE);
    assert_int_equal(dropkv_health(client, 0, NULL), DROPKV_E_UNAVAILABLE);
    dropkv_client_close(client);
}

static void memory_that_cannot_be_read_is_named(void **state)
{
    (void)state;
    struct dropkv_client *client = open_client();
    const struct dropkv_request r = make_request(0, 1);
    struct dropkv_error error;
    held.nowhere = key[0];
    assert_int_equal(dropkv_submit(client, &r, NULL, &error), DROPKV_E_INVALID);
    assert_string_equal(error.text, "key: lies on cuda:7");
    assert_int_equal(held.n_submitted, 0);
    dropkv_client_close(client);
}

static int fill(void **state)
{
    (void)state;
    dkv_test_fill(query, sizeof(query), 21);
    dkv_test_fill(key, sizeof(key), 22);
    dkv_test_fill(value, sizeof(value), 23);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_request_is_under_way_when_submit_returns),
        cmocka_unit_test(what_finds_no_room_goes_out_together),
        cmocka_unit_test(a_large_request_is_several_batches),
        cmocka_unit_test(cancelling_waits_for_what_is_under_way),
        cmocka_unit_test(what_was_not_started_is_cancelled_at_once),
        cmocka_unit_test(a_deadline_ends_a_request_under_way),
        cmocka_unit_test(a_call_that_waits_ends_at_the_deadline),
        cmocka_unit_test(closing_waits_for_what_is_under_way_and_begins_nothing),
        cmocka_unit_test(a_refused_batch_is_a_result),
        cmocka_unit_test(a_lost_device_fails_everything),
        cmocka_unit_test(memory_that_cannot_be_read_is_named),
    };
    return cmocka_run_group_tests(tests, fill, NULL);
}
