/* GPU memory shared through the library's calls, with a real daemon on the same GPU: every kind
 * that can be shared has the answers of the same numbers sent, and what cannot be is refused with
 * what to do instead.
 *
 * usage: test_gpu_export DROPKVD
 *
 * Exit 77 without a device.
 */
#include "client/cuda_driver.h"
#include "client/dropkv.h"

#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { Q_HEADS = 8, KV_HEADS = 2, TOKENS = 900, DIM = 64, ROWS = 8 };
#define MIB ((size_t)1 << 20)

struct tensors {
    float query[Q_HEADS][ROWS][DIM];
    float key[KV_HEADS][TOKENS][DIM];
    float value[KV_HEADS][TOKENS][DIM];
};

static const struct dkv_cuda_driver *driver;
static char folder[] = "/tmp/dropkv-test-XXXXXX";
static char path[64];
static char endpoint[80];
static pid_t daemon_pid;
static struct tensors tensors, others;
static const struct dropkv_param params[] = {{"keep_tokens", DROPKV_PARAM_INT, 60, 0, NULL}};

/* Before this process has a context. False: it says why there is no daemon. */
static bool start_daemon(const char *program)
{
    int log[2];
    char line[512] = "";
    if (mkdtemp(folder) == NULL || pipe(log) != 0)
        return false;
    snprintf(path, sizeof(path), "%s/socket", folder);
    snprintf(endpoint, sizeof(endpoint), "unix://%s", path);
    daemon_pid = fork();
    if (daemon_pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(log[1], STDERR_FILENO);
        close(log[0]);
        close(log[1]);
        execl(program, program, "--http", "off", "--device", "cuda:0", "--socket", path,
              (char *)NULL);
        _exit(127);
    }
    close(log[1]);
    FILE *text = fdopen(log[0], "r");
    do
        if (fgets(line, sizeof(line), text) == NULL) {
            printf("skipped: no daemon on a GPU: %s\n", line);
            fclose(text);
            return false;
        }
    while (strstr(line, "listening at") == NULL);
    return true; /* the log stays open: a pipe without a reader would end the daemon's lines */
}

static void fill(struct tensors *to, uint32_t seed)
{
    float *at = (float *)to;
    for (size_t i = 0; i < sizeof(*to) / sizeof(float); i++) {
        seed = seed * 1664525u + 1013904223u;
        at[i] = (float)(seed >> 8) / (float)(1u << 23) - 1.0f;
    }
}

static struct dropkv_client *open_client(void)
{
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    if (dropkv_client_open(endpoint, NULL, &client, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return client;
}

/* Tensors that begin at `base`, here or on the device. */
static struct dropkv_request request_at(const void *base)
{
    const char *at = base;
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    r.batch = 1;
    r.q_heads = Q_HEADS;
    r.kv_heads = KV_HEADS;
    r.head_dim = DIM;
    r.q_rows = ROWS;
    r.n_tokens = TOKENS;
    r.query = (struct dropkv_tensor){.data = at + offsetof(struct tensors, query),
                                     .dtype = DROPKV_FP32};
    r.key = (struct dropkv_tensor){.data = at + offsetof(struct tensors, key),
                                   .dtype = DROPKV_FP32};
    r.value = (struct dropkv_tensor){.data = at + offsetof(struct tensors, value),
                                     .dtype = DROPKV_FP32};
    r.params = params;
    r.n_params = 1;
    r.want_scores = 1;
    return r;
}

static struct dropkv_result *score(struct dropkv_client *client, const void *base)
{
    const struct dropkv_request r = request_at(base);
    struct dropkv_result *result;
    struct dropkv_error error = {0};
    if (dropkv_score(client, &r, &result, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return result;
}

/* The answer for tensors on the device is that for the same ones sent. */
static void assert_answer(struct dropkv_client *client, const void *base,
                          const struct tensors *sent)
{
    struct dropkv_result *expected = score(client, sent);
    struct dropkv_result *result = score(client, base);
    assert_memory_equal(result->keep_indices, expected->keep_indices,
                        sizeof(int32_t) * KV_HEADS * expected->keep_tokens);
    assert_memory_equal(result->scores, expected->scores, sizeof(float) * KV_HEADS * TOKENS);
    dropkv_result_free(expected);
    dropkv_result_free(result);
}

static struct dropkv_buffer *export(const void *at, size_t bytes, enum dropkv_cuda_export how)
{
    struct dropkv_buffer *buffer = NULL;
    struct dropkv_error error;
    if (dropkv_buffer_from_cuda(at, bytes, how, &buffer, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    return buffer;
}

static void assert_refused(const void *at, size_t bytes, enum dropkv_cuda_export how,
                           enum dropkv_status status, const char *word)
{
    struct dropkv_buffer *buffer = NULL;
    struct dropkv_error error = {0};
    assert_int_equal(dropkv_buffer_from_cuda(at, bytes, how, &buffer, &error), status);
    if (strstr(error.text, word) == NULL)
        fail_msg("'%s' is not in: %s", word, error.text);
    assert_null(buffer);
}

static size_t free_bytes(void)
{
    size_t free = 0, total;
    assert_int_equal(cudaMemGetInfo(&free, &total), cudaSuccess);
    return free;
}

/* ---- chunks ---- */

struct chunks {
    dkv_cuda_ptr at;
    size_t bytes;
    size_t sizes[4];
    unsigned n;
};

static void map_chunks(struct chunks *c, int handle_types)
{
    const struct dkv_cuda_properties properties = {.type = DKV_CUDA_PINNED,
                                                   .handle_types = handle_types,
                                                   .location = {DKV_CUDA_LOCATION_DEVICE, 0}};
    const struct dkv_cuda_access access = {{DKV_CUDA_LOCATION_DEVICE, 0}, DKV_CUDA_READ_WRITE};
    dkv_cuda_ptr at = c->at;
    for (unsigned i = 0; i < c->n; i++) {
        uint64_t memory;
        assert_int_equal(driver->create(&memory, c->sizes[i], &properties, 0), 0);
        assert_int_equal(driver->map(at, c->sizes[i], 0, memory, 0), 0);
        assert_int_equal(driver->forget(memory), 0);
        at += c->sizes[i];
    }
    assert_int_equal(driver->set_access(c->at, c->bytes, &access, 1), 0);
}

static struct chunks make_chunks(unsigned n, int handle_types)
{
    struct chunks c = {.n = n};
    for (unsigned i = 0; i < n; i++) {
        c.sizes[i] = 2 * (i + 1) * MIB;
        c.bytes += c.sizes[i];
    }
    assert_int_equal(driver->reserve(&c.at, c.bytes, 0, 0, 0), 0);
    map_chunks(&c, handle_types);
    return c;
}

static void unmap_chunks(const struct chunks *c)
{
    dkv_cuda_ptr at = c->at;
    for (unsigned i = 0; i < c->n; at += c->sizes[i], i++)
        assert_int_equal(driver->unmap(at, c->sizes[i]), 0);
}

static void free_chunks(const struct chunks *c)
{
    unmap_chunks(c);
    assert_int_equal(driver->unreserve(c->at, c->bytes), 0);
}

static void write_at(dkv_cuda_ptr at, const struct tensors *from)
{
    assert_int_equal(driver->copy_to_device(at, from, sizeof(*from)), 0);
}

/* ---- tests ---- */

static void a_pointer_into_an_allocation(void **unused)
{
    struct dropkv_client *client = open_client();
    struct dropkv_error error;
    char *memory = NULL;
    (void)unused;
    assert_int_equal(cudaMalloc((void **)&memory, 16 * MIB), cudaSuccess);
    write_at((dkv_cuda_ptr)(uintptr_t)(memory + 5 * MIB + 256), &tensors);
    struct dropkv_buffer *buffer = export(memory + 5 * MIB, 4 * MIB, DROPKV_CUDA_ANY);
    assert_ptr_equal(dropkv_buffer_data(buffer), memory + 5 * MIB);
    assert_int_equal(dropkv_buffer_fd(buffer), -1);
    assert_int_equal(dropkv_client_add_buffer(client, buffer, &error), DROPKV_OK);
    assert_answer(client, memory + 5 * MIB + 256, &tensors);
    dropkv_client_remove_buffer(client, buffer);
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
    assert_refused(memory + 15 * MIB, 2 * MIB, DROPKV_CUDA_ANY, DROPKV_E_INVALID, "1048576");
    assert_refused(memory, MIB, DROPKV_CUDA_VMM, DROPKV_E_UNSUPPORTED, "DROPKV_CUDA_LEGACY");
    assert_int_equal(cudaFree(memory), cudaSuccess);
}

static void chunks_side_by_side(void **unused)
{
    struct dropkv_client *client = open_client();
    struct dropkv_error error;
    struct chunks c = make_chunks(3, DKV_CUDA_HANDLE_FD); /* 2, 4 and 6 MiB */
    (void)unused;
    /* Across both borders, one after the other. */
    for (unsigned i = 0; i < 2; i++) {
        const dkv_cuda_ptr at = c.at + (i == 0 ? 2 * MIB : 6 * MIB) - 4096;
        write_at(at, &tensors);
        struct dropkv_buffer *buffer = export((void *)(uintptr_t)(c.at + MIB), 10 * MIB,
                                              DROPKV_CUDA_ANY);
        assert_int_equal(dropkv_client_add_buffer(client, buffer, &error), DROPKV_OK);
        assert_answer(client, (void *)(uintptr_t)at, &tensors);
        dropkv_client_remove_buffer(client, buffer);
        dropkv_buffer_free(buffer);
    }
    void *first = (void *)(uintptr_t)c.at;
    assert_refused(first, c.bytes + 1, DROPKV_CUDA_VMM, DROPKV_E_INVALID, "12582912 of them");
    assert_refused(first, MIB, DROPKV_CUDA_LEGACY, DROPKV_E_UNSUPPORTED, "DROPKV_CUDA_VMM");
    dropkv_client_close(client);
    free_chunks(&c);
}

/* As a serving engine that sleeps does: other memory at the same address. */
static void memory_that_is_released_and_mapped_again(void **unused)
{
    struct dropkv_client *client = open_client();
    struct dropkv_error error;
    struct chunks c = make_chunks(2, DKV_CUDA_HANDLE_FD);
    void *base = (void *)(uintptr_t)c.at;
    (void)unused;
    write_at(c.at, &tensors);
    struct dropkv_buffer *buffer = export(base, c.bytes, DROPKV_CUDA_VMM);
    assert_int_equal(dropkv_client_add_buffer(client, buffer, &error), DROPKV_OK);
    assert_answer(client, base, &tensors);
    const size_t before = free_bytes();
    if (dropkv_client_detach_buffer(client, buffer, 0, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    dropkv_buffer_unexport(buffer);
    unmap_chunks(&c);
    assert_true(free_bytes() >=
                before + c.bytes); /* the daemon has let go, and so has the buffer */
    map_chunks(&c, DKV_CUDA_HANDLE_FD);
    write_at(c.at, &others);
    if (dropkv_buffer_export_again(buffer, &error) != DROPKV_OK ||
        dropkv_client_attach_buffer(client, buffer, &error) != DROPKV_OK)
        fail_msg("%s", error.text);
    assert_answer(client, base, &others);
    dropkv_client_remove_buffer(client, buffer);
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
    free_chunks(&c);
}

static void what_cannot_be_shared_says_what_to_do(void **unused)
{
    void *memory = NULL;
    (void)unused;
    assert_refused(&tensors, 64, DROPKV_CUDA_ANY, DROPKV_E_INVALID, "not CUDA memory");
    assert_int_equal(cudaMallocHost(&memory, MIB), cudaSuccess);
    assert_refused(memory, MIB, DROPKV_CUDA_ANY, DROPKV_E_INVALID, "dropkv_buffer_new");
    assert_int_equal(cudaFreeHost(memory), cudaSuccess);

    assert_int_equal(cudaMallocAsync(&memory, MIB, 0), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    assert_refused(memory, MIB, DROPKV_CUDA_ANY, DROPKV_E_UNSUPPORTED, "cudaMallocAsync");
    assert_refused(memory, MIB, DROPKV_CUDA_LEGACY, DROPKV_E_UNSUPPORTED, "cudaMallocAsync");
    assert_int_equal(cudaFreeAsync(memory, 0), cudaSuccess);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);

    struct chunks c = make_chunks(1, 0);
    assert_refused((void *)(uintptr_t)c.at, MIB, DROPKV_CUDA_ANY, DROPKV_E_UNSUPPORTED,
                   "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR");
    free_chunks(&c);
}

/* A tensor that begins in a buffer of GPU memory and ends outside is never copied. */
static void a_tensor_that_leaves_its_buffer(void **unused)
{
    struct dropkv_client *client = open_client();
    struct dropkv_error error;
    struct dropkv_result *result = NULL;
    char *memory = NULL;
    (void)unused;
    assert_int_equal(cudaMalloc((void **)&memory, 4 * MIB), cudaSuccess);
    struct dropkv_buffer *buffer = export(memory, sizeof(tensors) - 4, DROPKV_CUDA_ANY);
    assert_int_equal(dropkv_client_add_buffer(client, buffer, &error), DROPKV_OK);
    const struct dropkv_request r = request_at(memory);
    assert_int_equal(dropkv_score(client, &r, &result, &error), DROPKV_E_INVALID);
    assert_non_null(strstr(error.text, "ends before"));
    dropkv_client_close(client);
    dropkv_buffer_free(buffer);
    assert_int_equal(cudaFree(memory), cudaSuccess);
}

/* Connections come and go; the memory is registered anew with each. */
static void a_client_that_connects_again(void **unused)
{
    char *memory = NULL;
    (void)unused;
    assert_int_equal(cudaMalloc((void **)&memory, 4 * MIB), cudaSuccess);
    write_at((dkv_cuda_ptr)(uintptr_t)memory, &tensors);
    struct dropkv_buffer *buffer = export(memory, 4 * MIB, DROPKV_CUDA_ANY);
    for (int i = 0; i < 5; i++) {
        struct dropkv_client *client = open_client();
        assert_int_equal(dropkv_client_add_buffer(client, buffer, NULL), DROPKV_OK);
        assert_answer(client, memory, &tensors);
        dropkv_client_close(client);
    }
    dropkv_buffer_free(buffer);
    assert_int_equal(cudaFree(memory), cudaSuccess);
}

/* Answers that the device itself writes to the caller's memory, and ones too small for that: with
 * and without scores, several blocks together, and around them not a byte. */
static void answers_into_the_callers_memory(void **unused)
{
    enum { LONG = 30000, BATCH = 3, AT = 4096 + 64, EDGE = 64 };
    static float block[(Q_HEADS * ROWS + 2 * KV_HEADS * LONG) * DIM];
    static const int64_t kept[] = {100, 8191, 8192, 12345};
    const size_t room = AT + sizeof(float) * BATCH * KV_HEADS * 2 * LONG + EDGE;
    struct dropkv_client *client = open_client();
    struct dropkv_buffer *output;
    (void)unused;
    for (size_t i = 0; i < sizeof(block) / sizeof(block[0]); i++)
        block[i] = ((const float *)&tensors)[i * 7 % (sizeof(tensors) / sizeof(float))];
    assert_int_equal(dropkv_buffer_new(room, &output, NULL), DROPKV_OK);
    assert_int_equal(dropkv_client_add_output(client, output, NULL), DROPKV_OK);
    char *memory = dropkv_buffer_data(output);
    for (int i = 0; i < 8; i++) {
        const struct dropkv_param keep[] = {dropkv_int("keep_tokens", kept[i % 4])};
        struct dropkv_result *sent, *placed;
        struct dropkv_request r = request_at(block);
        r.batch = BATCH;
        r.n_tokens = LONG;
        r.key.data = block + Q_HEADS * ROWS * DIM;
        r.value.data = block + (Q_HEADS * ROWS + KV_HEADS * LONG) * DIM;
        r.query.batch_stride = r.key.batch_stride = r.value.batch_stride = 4;
        r.n_tokens = LONG - 1; /* what the strides reach is there */
        r.params = keep;
        r.want_scores = i >= 4;
        assert_int_equal(dropkv_score(client, &r, &sent, NULL), DROPKV_OK);
        r.output = output;
        r.output_offset = AT;
        r.output_bytes = room - AT - EDGE;
        memset(memory, 0x5a, room);
        assert_int_equal(dropkv_score(client, &r, &placed, NULL), DROPKV_OK);
        const size_t n_keep = (size_t)BATCH * KV_HEADS * (size_t)kept[i % 4];
        const size_t n_scores = r.want_scores ? (size_t)BATCH * KV_HEADS * r.n_tokens : 0;
        assert_ptr_equal(placed->keep_indices, memory + AT);
        assert_memory_equal(placed->keep_indices, sent->keep_indices, n_keep * sizeof(int32_t));
        if (n_scores > 0)
            assert_memory_equal(placed->scores, sent->scores, n_scores * sizeof(float));
        for (size_t k = 0; k < EDGE; k++) {
            assert_int_equal(memory[AT - 1 - k], 0x5a);
            assert_int_equal(memory[AT + (n_keep + n_scores) * 4 + k], 0x5a);
        }
        dropkv_result_free(sent);
        dropkv_result_free(placed);
    }
    dropkv_client_close(client);
    dropkv_buffer_free(output);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_into_the_callers_memory),
        cmocka_unit_test(a_pointer_into_an_allocation),
        cmocka_unit_test(chunks_side_by_side),
        cmocka_unit_test(memory_that_is_released_and_mapped_again),
        cmocka_unit_test(what_cannot_be_shared_says_what_to_do),
        cmocka_unit_test(a_tensor_that_leaves_its_buffer),
        cmocka_unit_test(a_client_that_connects_again),
    };
    struct dkv_error err;
    if (argc != 2) {
        fprintf(stderr, "usage: %s DROPKVD\n", argv[0]);
        return 64;
    }
    if (!start_daemon(argv[1]))
        return 77;
    if (dkv_cuda_driver(&driver, &err) != DKV_OK || cudaSetDevice(0) != cudaSuccess ||
        cudaFree(NULL) != cudaSuccess) {
        printf("skipped: %s\n", err.text);
        kill(daemon_pid, SIGKILL);
        return 77;
    }
    fill(&tensors, 1);
    fill(&others, 2);
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    kill(daemon_pid, SIGTERM);
    waitpid(daemon_pid, NULL, 0);
    rmdir(folder);
    return failed != 0;
}
