/* The engine on the caller's GPU, in the caller's context and on the caller's stream: what is in
 * the stream before a submission is seen, nothing else is waited for, and the caller's CUDA is left
 * as it was found.
 *
 * Exit 77 without a device.
 */
#include "client/cli/synth.h"
#include "client/dropkv.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { Q_HEADS = 32, KV_HEADS = 8, TOKENS = 4096, DIM = 128, ROWS = 8, KEEP = 200 };

struct tensors {
    uint16_t query[Q_HEADS][ROWS][DIM];
    uint16_t key[KV_HEADS][TOKENS][DIM];
    uint16_t value[KV_HEADS][TOKENS][DIM];
};

static struct tensors *tensors;         /* pinned */
static struct tensors *copy;            /* on the device */
static struct dropkv_result *reference; /* of the tensors */

#define CUDA(call) assert_int_equal(call, cudaSuccess)

/* ---- the driver, found through the runtime ---- */

static CUresult (*get_current)(CUcontext *);
static CUresult (*context_create)(CUcontext *, unsigned, CUdevice);
static CUresult (*context_destroy)(CUcontext);
static CUresult (*set_current)(CUcontext);
static CUresult (*stream_create)(CUstream *, unsigned);
static CUresult (*stream_destroy)(CUstream);

static void find_driver(void)
{
    static const struct {
        const char *name;
        void **to;
        unsigned version; /* whose signature is declared above */
    } symbols[] = {
        {"cuCtxGetCurrent", (void **)&get_current, 4000},
        {"cuCtxSetCurrent", (void **)&set_current, 4000},
        {"cuCtxCreate", (void **)&context_create, 3020},
        {"cuCtxDestroy", (void **)&context_destroy, 4000},
        {"cuStreamCreate", (void **)&stream_create, 2000},
        {"cuStreamDestroy", (void **)&stream_destroy, 4000},
    };
    enum cudaDriverEntryPointQueryResult found;
    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++)
        CUDA(cudaGetDriverEntryPointByVersion(symbols[i].name, symbols[i].to, symbols[i].version,
                                              cudaEnableDefault, &found));
}

/* ---- what is asked ---- */

/* Tensors that begin at `base`, here or on the device. */
static struct dropkv_request request_at(const struct tensors *base)
{
    static const struct dropkv_param params[] = {
        {"keep_tokens", DROPKV_PARAM_INT, KEEP, 0, NULL},
        {"nonfinite", DROPKV_PARAM_TEXT, 0, 0, "error"},
    };
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    r.batch = 1;
    r.q_heads = Q_HEADS;
    r.kv_heads = KV_HEADS;
    r.head_dim = DIM;
    r.q_rows = ROWS;
    r.n_tokens = TOKENS;
    r.query = (struct dropkv_tensor){.data = base->query, .dtype = DROPKV_BF16};
    r.key = (struct dropkv_tensor){.data = base->key, .dtype = DROPKV_BF16};
    r.value = (struct dropkv_tensor){.data = base->value, .dtype = DROPKV_BF16};
    r.params = params;
    r.n_params = 2;
    r.want_scores = 1;
    return r;
}

static struct dropkv_client *open_on(void *stream)
{
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    options.cuda_stream = stream;
    if (dropkv_client_open("embedded:cuda:0", &options, &client, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
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

static struct dropkv_result *score(struct dropkv_client *client, const struct tensors *base)
{
    const struct dropkv_request r = request_at(base);
    struct dropkv_result *result;
    struct dropkv_error error = {0};
    if (dropkv_score(client, &r, &result, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return result;
}

static void expect_reference(struct dropkv_result *result)
{
    assert_non_null(result);
    assert_string_equal(result->error_text, "");
    assert_memory_equal(result->keep_indices, reference->keep_indices,
                        sizeof(int32_t) * KV_HEADS * KEEP);
    assert_memory_equal(result->scores, reference->scores, sizeof(float) * KV_HEADS * TOKENS);
    dropkv_result_free(result);
}

static bool is_readable(const struct dropkv_client *client)
{
    struct pollfd pollfd = {.fd = dropkv_fd(client), .events = POLLIN};
    return poll(&pollfd, 1, 0) == 1;
}

/* ---- a stream that stands still ---- */

struct gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    bool open;
};

#define GATE_INIT                                                  \
    {                                                              \
        PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false \
    }

static void wait_at_gate(void *arg)
{
    struct gate *gate = arg;
    pthread_mutex_lock(&gate->lock);
    while (!gate->open)
        pthread_cond_wait(&gate->opened, &gate->lock);
    pthread_mutex_unlock(&gate->lock);
}

static void open_gate(struct gate *gate)
{
    pthread_mutex_lock(&gate->lock);
    gate->open = true;
    pthread_cond_signal(&gate->opened);
    pthread_mutex_unlock(&gate->lock);
}

static void *open_gate_later(void *arg)
{
    const struct timespec while_others_wait = {.tv_nsec = 20000000};
    nanosleep(&while_others_wait, NULL);
    open_gate(arg);
    return NULL;
}

/* ---- the tests ---- */

/* The tensors arrive behind a delay in the stream; submission waits for neither. */
static void what_the_stream_writes_first_is_seen(void **state)
{
    (void)state;
    struct gate gate = GATE_INIT;
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    struct dropkv_client *client = open_on(stream);
    CUDA(cudaMemset(copy, 0xff, sizeof(*copy))); /* NaN, which is refused */
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaLaunchHostFunc(stream, wait_at_gate, &gate));
    CUDA(cudaMemcpyAsync(copy, tensors, sizeof(*copy), cudaMemcpyHostToDevice, stream));
    const struct dropkv_request r = request_at(copy);
    submit(client, &r);
    CUDA(cudaMemsetAsync(copy, 0xff, sizeof(*copy), stream)); /* comes after it, too */
    assert_int_equal(cudaStreamQuery(stream), cudaErrorNotReady);
    assert_false(is_readable(client));
    assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
    assert_null(dropkv_next_result(client));
    open_gate(&gate);
    assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
    expect_reference(dropkv_next_result(client));
    dropkv_client_close(client);
    CUDA(cudaMemcpyAsync(copy, tensors, sizeof(*copy), cudaMemcpyHostToDevice, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaStreamDestroy(stream));
}

/* An answer comes while another stream of the same context stands still. */
static void other_streams_are_not_waited_for(void **state)
{
    (void)state;
    struct gate gate = GATE_INIT;
    cudaStream_t stream, other;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    struct dropkv_client *client = open_on(stream);
    CUDA(cudaLaunchHostFunc(other, wait_at_gate, &gate));
    const struct dropkv_request r = request_at(copy);
    for (int i = 0; i < 5; i++)
        submit(client, &r); /* more than are under way at a time */
    /* The descriptor may need the driver's one thread for such calls, which stands at the gate. */
    while (dropkv_in_flight(client) > 0)
        assert_int_equal(dropkv_dispatch(client, 0, NULL), DROPKV_OK);
    assert_int_equal(cudaStreamQuery(other), cudaErrorNotReady);
    for (int i = 0; i < 5; i++)
        expect_reference(dropkv_next_result(client));
    open_gate(&gate);
    dropkv_client_close(client);
    CUDA(cudaStreamSynchronize(other));
    CUDA(cudaStreamDestroy(other));
    CUDA(cudaStreamDestroy(stream));
}

/* A deadline passes while the stream stands still; the next request is answered all the same. */
static void a_deadline_does_not_wait_for_the_stream(void **state)
{
    (void)state;
    struct gate gate = GATE_INIT;
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    struct dropkv_client *client = open_on(stream);
    struct dropkv_request r = request_at(copy);
    struct dropkv_result *result;
    r.timeout_us = 5000;
    CUDA(cudaLaunchHostFunc(stream, wait_at_gate, &gate));
    assert_int_equal(dropkv_score(client, &r, &result, NULL), DROPKV_E_TIMEOUT);
    open_gate(&gate);
    expect_reference(score(client, copy));
    dropkv_client_close(client);
    CUDA(cudaStreamDestroy(stream));
}

/* After either the caller may write the tensors at once, in no stream's order. */
static void cancelling_and_closing_wait_for_its_own(void **state)
{
    (void)state;
    const struct dropkv_request r = request_at(copy);
    for (int closing = 0; closing < 2; closing++) {
        struct gate gate = GATE_INIT;
        pthread_t thread;
        cudaStream_t stream;
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        struct dropkv_client *client = open_on(stream);
        CUDA(cudaLaunchHostFunc(stream, wait_at_gate, &gate));
        const uint64_t id = submit(client, &r);
        submit(client, &r);
        submit(client, &r);
        assert_int_equal(pthread_create(&thread, NULL, open_gate_later, &gate), 0);
        if (closing)
            dropkv_client_close(client);
        else
            assert_int_equal(dropkv_cancel(client, id), DROPKV_OK);
        assert_true(gate.open);
        pthread_join(thread, NULL);
        while (!closing && dropkv_in_flight(client) > 0)
            assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
        for (int i = 0; i < 2 && !closing; i++)
            expect_reference(dropkv_next_result(client));
        if (!closing)
            dropkv_client_close(client);
        CUDA(cudaStreamDestroy(stream));
    }
}

/* Setting none takes the topmost off. */
static void leave_all_contexts(void)
{
    CUcontext current = NULL;
    while (get_current(&current) == CUDA_SUCCESS && current != NULL)
        assert_int_equal(set_current(NULL), CUDA_SUCCESS);
}

static void expect_current(CUcontext expected)
{
    CUcontext current = NULL;
    assert_int_equal(get_current(&current), CUDA_SUCCESS);
    assert_ptr_equal(current, expected);
}

/* A context that is not the device's primary one. */
static void a_context_of_the_callers_own_is_used(void **state)
{
    (void)state;
    CUcontext before, own;
    CUstream stream;
    void *there;
    assert_int_equal(get_current(&before), CUDA_SUCCESS);
    assert_int_equal(context_create(&own, 0, 0), CUDA_SUCCESS);
    assert_int_equal(stream_create(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    CUDA(cudaMalloc(&there, sizeof(*tensors)));
    CUDA(cudaMemcpyAsync(there, tensors, sizeof(*tensors), cudaMemcpyHostToDevice, stream));
    leave_all_contexts();
    struct dropkv_client *client = open_on(stream);
    expect_current(NULL);
    expect_reference(score(client, there));
    expect_reference(score(client, tensors)); /* host memory, staged */
    expect_current(NULL);
    dropkv_client_close(client);
    expect_current(NULL);
    assert_int_equal(set_current(own), CUDA_SUCCESS);
    CUDA(cudaMemsetAsync(there, 0, sizeof(*tensors), stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(there));
    assert_int_equal(stream_destroy(stream), CUDA_SUCCESS);
    assert_int_equal(context_destroy(own), CUDA_SUCCESS);
    assert_int_equal(set_current(before), CUDA_SUCCESS);
}

/* Twenty clients come and go; the caller's context, its memory and its thread stay. */
static void the_callers_context_is_left_as_it_was(void **state)
{
    (void)state;
    CUcontext primary;
    size_t free_before, free_after, all;
    assert_int_equal(get_current(&primary), CUDA_SUCCESS);
    dropkv_client_close(open_on(NULL)); /* what is loaded once, is */
    CUDA(cudaMemGetInfo(&free_before, &all));
    for (int i = 0; i < 20; i++) {
        struct dropkv_client *client = open_on(NULL);
        expect_current(primary);
        expect_reference(score(client, copy));
        expect_current(primary);
        dropkv_client_close(client);
        expect_current(primary);
    }
    CUDA(cudaMemGetInfo(&free_after, &all));
    assert_true(free_after + (8u << 20) > free_before);
    CUDA(cudaMemset(copy, 0, 1));
    CUDA(cudaMemcpy(copy, tensors, sizeof(*copy), cudaMemcpyHostToDevice));
}

/* A registered cache, and query rows around the end of a ring on the device, which the engine puts
 * in order on the stream. */
static void a_prompt_is_its_layer(void **state)
{
    enum { RING = 11, NEWEST = 4 };
    (void)state;
    static uint16_t ring[RING][Q_HEADS][DIM];
    char *there;
    cudaStream_t stream;
    struct dropkv_buffer *buffer;
    struct dropkv_error error;
    struct dropkv_result *result;
    const size_t kv_bytes = sizeof(tensors->key);
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < Q_HEADS; h++)
            memcpy(ring[(NEWEST + 1 + RING - ROWS + r) % RING][h], tensors->query[h][r],
                   sizeof(ring[0][0]));
    CUDA(cudaMalloc((void **)&there, 2 * kv_bytes + sizeof(ring)));
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    struct dropkv_client *client = open_on(stream);
    CUDA(cudaMemcpyAsync(there, tensors->key, 2 * kv_bytes, cudaMemcpyHostToDevice, stream));
    CUDA(cudaMemcpyAsync(there + 2 * kv_bytes, ring, sizeof(ring), cudaMemcpyHostToDevice, stream));
    if (dropkv_buffer_from_cuda(there, 2 * kv_bytes + sizeof(ring), DROPKV_CUDA_ANY, &buffer,
                                &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    struct dropkv_layer layer = {.key = {.buffer = buffer,
                                         .dtype = DROPKV_BF16,
                                         .token_stride = sizeof(tensors->key[0][0]),
                                         .head_stride = sizeof(tensors->key[0])}};
    layer.value = layer.key;
    layer.value.offset = kv_bytes;
    struct dropkv_cache_layout cache = DROPKV_CACHE_LAYOUT_INIT;
    struct dropkv_stash_layout stash = DROPKV_STASH_LAYOUT_INIT;
    struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
    const struct dropkv_request r = request_at(tensors);
    cache.q_heads = Q_HEADS, cache.kv_heads = KV_HEADS, cache.head_dim = DIM;
    cache.n_layers = 1, cache.layers = &layer;
    stash.buffer = buffer, stash.offset = 2 * kv_bytes, stash.dtype = DROPKV_BF16;
    stash.n_layers = 1, stash.n_slots = 1, stash.n_rows = RING;
    stash.row_stride = sizeof(ring[0]), stash.head_stride = sizeof(ring[0][0]);
    if (dropkv_client_add_buffer(client, buffer, &error) != DROPKV_OK ||
        dropkv_cache_add(client, &cache, &prompt.cache, &error) != DROPKV_OK ||
        dropkv_stash_add(client, &stash, &prompt.stash, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    prompt.n_tokens = TOKENS, prompt.newest_row = NEWEST, prompt.q_rows = ROWS;
    prompt.params = r.params, prompt.n_params = r.n_params, prompt.want_scores = 1;
    for (int i = 0; i < 3; i++) {
        if (dropkv_score_prompt(client, &prompt, &result, &error) != DROPKV_OK)
            fail_msg("%s", error.text);
        expect_reference(result);
    }
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
    CUDA(cudaFree(there));
    CUDA(cudaStreamDestroy(stream));
}

/* The default streams by their names, and two clients on two streams. */
static void any_stream_will_do(void **state)
{
    (void)state;
    struct dropkv_client *clients[] = {open_on(CU_STREAM_LEGACY), open_on(CU_STREAM_PER_THREAD)};
    const struct dropkv_request r = request_at(copy);
    for (int i = 0; i < 4; i++)
        submit(clients[i % 2], &r);
    for (int i = 0; i < 2; i++) {
        while (dropkv_in_flight(clients[i]) > 0)
            assert_int_equal(dropkv_dispatch(clients[i], -1, NULL), DROPKV_OK);
        expect_reference(dropkv_next_result(clients[i]));
        expect_reference(dropkv_next_result(clients[i]));
        dropkv_client_close(clients[i]);
    }
}

static void what_is_wrong_is_said(void **state)
{
    (void)state;
    cudaStream_t stream;
    cudaGraph_t graph;
    struct dropkv_error error = {0};
    struct dropkv_result *result;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    struct dropkv_client *client = open_on(stream);
    const struct dropkv_request r = request_at(copy);

    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_INVALID);
    assert_non_null(strstr(error.text, "captured"));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphDestroy(graph));

    CUDA(cudaMemset(copy->key[3][1000], 0xff, sizeof(copy->key[3][1000])));
    CUDA(cudaDeviceSynchronize());
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_INVALID);
    assert_non_null(strstr(error.text, "KV head 3, token 1000"));
    CUDA(cudaMemcpy(copy, tensors, sizeof(*copy), cudaMemcpyHostToDevice));
    expect_reference(score(client, copy));
    dropkv_client_close(client);

    struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
    options.cuda_stream = stream;
    assert_int_not_equal(dropkv_client_open("embedded:cuda:1", &options, &client, &error),
                         DROPKV_OK);
    assert_non_null(strstr(error.text, "cuda:0") != NULL ? error.text
                                                         : strstr(error.text, "devices"));
    CUDA(cudaStreamDestroy(stream));
}

/* ---- how long it takes ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

/* Prints medians: of a call that waits, and of submission alone. */
static void it_is_timed(void **state)
{
    (void)state;
    enum { N = 101 };
    double whole[N], submission[N];
    for (uint32_t look_us = 0; look_us <= 1000; look_us += 1000) {
        struct dropkv_client *client;
        struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
        struct dropkv_request r = request_at(copy);
        options.busy_poll_us = look_us;
        r.want_scores = 0;
        assert_int_equal(dropkv_client_open("embedded:cuda:0", &options, &client, NULL), DROPKV_OK);
        for (int i = 0; i < N; i++) {
            const double begin = now_us();
            submit(client, &r);
            submission[i] = now_us() - begin;
            assert_int_equal(dropkv_dispatch(client, -1, NULL), DROPKV_OK);
            whole[i] = now_us() - begin;
            dropkv_result_free(dropkv_next_result(client));
        }
        qsort(whole, N, sizeof(double), by_value);
        qsort(submission, N, sizeof(double), by_value);
        printf("4,096 tokens, %s: %.1f us, of which submission %.1f\n",
               look_us > 0 ? "looking" : "sleeping", whole[N / 2], submission[N / 2]);
        dropkv_client_close(client);
    }
}

static int begin(void **state)
{
    struct dkv_random random;
    (void)state;
    find_driver();
    CUDA(cudaMallocHost((void **)&tensors, sizeof(*tensors)));
    CUDA(cudaMalloc((void **)&copy, sizeof(*copy)));
    dkv_random_init(&random, 5);
    dkv_random_normal(&random, DKV_BF16, tensors, sizeof(*tensors) / sizeof(uint16_t));
    CUDA(cudaMemcpy(copy, tensors, sizeof(*copy), cudaMemcpyHostToDevice));
    struct dropkv_client *client = open_on(NULL);
    reference = score(client, tensors); /* from host memory, on a stream of its own */
    dropkv_client_close(client);
    return 0;
}

static int end(void **state)
{
    (void)state;
    dropkv_result_free(reference);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_the_stream_writes_first_is_seen),
        cmocka_unit_test(other_streams_are_not_waited_for),
        cmocka_unit_test(a_deadline_does_not_wait_for_the_stream),
        cmocka_unit_test(cancelling_and_closing_wait_for_its_own),
        cmocka_unit_test(a_context_of_the_callers_own_is_used),
        cmocka_unit_test(the_callers_context_is_left_as_it_was),
        cmocka_unit_test(a_prompt_is_its_layer),
        cmocka_unit_test(any_stream_will_do),
        cmocka_unit_test(what_is_wrong_is_said),
        cmocka_unit_test(it_is_timed),
    };
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        printf("skipped: no CUDA device is visible\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, begin, end);
}
