/* libdropkv: ask which tokens of a KV cache to keep.
 *
 * A request hands over the last query rows, the keys and the values of one layer, for one or more
 * sequences; the answer lists, for every KV head, the tokens to keep. Tensors are read where they
 * lie, through byte strides, and are sent without a copy of the library's own.
 *
 *     struct dropkv_client *client;
 *     struct dropkv_result *result;
 *     struct dropkv_error error;
 *     if (dropkv_client_open("http://127.0.0.1:8480", NULL, &client, &error) != DROPKV_OK)
 *         ...error.text says why...
 *
 *     struct dropkv_param params[] = {dropkv_real("keep_ratio", 0.1), dropkv_int("sinks", 4)};
 *     struct dropkv_request request = DROPKV_REQUEST_INIT;
 *     request.batch = 1, request.q_heads = 32, request.kv_heads = 8, request.head_dim = 128;
 *     request.q_rows = 64, request.n_tokens = n;
 *     request.query = (struct dropkv_tensor){.data = q, .dtype = DROPKV_BF16};
 *     ...key and value in the same way...
 *     request.params = params, request.n_params = 2;
 *     if (dropkv_score(client, &request, &result, &error) == DROPKV_OK)
 *         ...result->keep_indices...
 *     dropkv_result_free(result);
 *     dropkv_client_close(client);
 *
 * Threads     a client belongs to one thread at a time: the caller serialises all calls on it.
 *             Different clients are independent. The library starts no thread, installs no signal
 *             handler and keeps no state outside its clients. An embedded engine has threads of its
 *             own.
 * Processes   a client belongs to the process that opened it: after fork() the child may only close
 *             it, which does nothing there.
 * Errors      every function that can fail returns a status; where it takes a `struct
 *             dropkv_error *`, that may be NULL, and is written only on failure.
 * Deadlines   every call ends: a request without a deadline of its own gets the client's.
 * Memory      once as many requests of a size were in flight as ever will be, further ones allocate
 *             nothing over unix:/// (messages of up to 4 MiB, scores of up to 16 MiB) and embedded:
 *             results that were freed are used again.
 * ABI         structures that the caller makes begin with their size, set by the _INIT macros, and
 *             grow at their end; structures that the library makes grow at their end too. Status
 *             and type numbers are never reused. The soname changes when this does not hold.
 */
#ifndef DROPKV_H
#define DROPKV_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define DROPKV_API __attribute__((visibility("default")))
#else
#define DROPKV_API
#endif

#define DROPKV_VERSION_MAJOR  0
#define DROPKV_VERSION_MINOR  1
#define DROPKV_VERSION_PATCH  0
#define DROPKV_VERSION_NUMBER 100 /* major * 10000 + minor * 100 + patch */

/* The version of the library that is running, as text ("0.1.0") and as DROPKV_VERSION_NUMBER. */
DROPKV_API const char *dropkv_version(void);
DROPKV_API int dropkv_version_number(void);

/* ---- status ---- */

enum dropkv_status {
    DROPKV_OK = 0,

    /* The request has to change. */
    DROPKV_E_MALFORMED = 1,   /* an answer or message could not be read */
    DROPKV_E_INVALID = 2,     /* a field is outside its allowed range */
    DROPKV_E_UNSUPPORTED = 3, /* well formed, but not something this version can do */
    DROPKV_E_NOT_FOUND = 4,
    DROPKV_E_DENIED = 5,    /* a token is missing or wrong */
    DROPKV_E_TOO_LARGE = 6, /* above a size limit of the server */

    /* The same request may succeed later. */
    DROPKV_E_BUSY = 16,    /* too much is waiting already */
    DROPKV_E_TIMEOUT = 17, /* the deadline passed */
    DROPKV_E_DRAINING = 18,
    DROPKV_E_CANCELLED = 19,
    DROPKV_E_UNAVAILABLE = 20, /* nobody answers at the endpoint */

    /* This side or the server failed. */
    DROPKV_E_NOMEM = 32,
    DROPKV_E_DEVICE = 33,
    DROPKV_E_IO = 34,
    DROPKV_E_INTERNAL = 35,
};

/* Why something failed: one sentence with the field, its value and the allowed range. */
struct dropkv_error {
    enum dropkv_status status;
    char text[248];
};

/* "INVALID", and "a field is outside its allowed range". Static strings, never NULL. */
DROPKV_API const char *dropkv_status_name(enum dropkv_status status);
DROPKV_API const char *dropkv_status_text(enum dropkv_status status);

/* 1 if the same request may succeed later, else 0. */
DROPKV_API int dropkv_status_retryable(enum dropkv_status status);

/* ---- element types ---- */

enum dropkv_dtype {
    DROPKV_BF16 = 1,
    DROPKV_FP16 = 2,
    DROPKV_FP32 = 3,
    DROPKV_F8_E4M3 = 4, /* the "fn" variant: no infinities */
    DROPKV_F8_E5M2 = 5,
};

/* Size of one element in bytes; 0 for an unknown type. */
DROPKV_API size_t dropkv_dtype_bytes(enum dropkv_dtype dtype);

/* ---- the client ---- */

struct dropkv_client;

struct dropkv_client_options {
    size_t struct_size;

    /* Bearer token sent with every HTTP request; NULL: the environment variable DROPKV_TOKEN, and
     * none if that is unset or empty. Copied. */
    const char *token;

    int64_t timeout_us;       /* deadline of a request that names none; 0: 30 seconds */
    uint32_t max_in_flight;   /* submitted and not yet answered; 0: 256; beyond: BUSY */
    uint32_t max_connections; /* to the server at a time; 0: 16; further requests wait */

    /* How often a request is sent again after a failure that a second try may cure (no connection,
     * a connection that broke, BUSY and DRAINING with the server's Retry-After), always within its
     * deadline. Scoring changes nothing on the server, so that is safe. Negative: never; 0: 2. */
    int32_t max_retries;

    /* How long a call that waits looks for the answer before it sleeps, at most 1,000,000; 0: not
     * at all. It takes the processor meanwhile, and saves the 10 to 20 us that a sleeping one takes
     * to wake up: for short requests to a GPU, a daemon's or here. */
    uint32_t busy_poll_us;

    /* A CUstream or cudaStream_t of the caller's, for embedded:cuda:N alone: see "an engine in this
     * process" below. NULL: a stream of the library's own. The default streams are named by
     * CU_STREAM_LEGACY and CU_STREAM_PER_THREAD. Borrowed until the client is closed. */
    void *cuda_stream;
};

#define DROPKV_CLIENT_OPTIONS_INIT                                      \
    {                                                                   \
        sizeof(struct dropkv_client_options), NULL, 0, 0, 0, 0, 0, NULL \
    }

/* Makes a client for an endpoint. Connects to nothing yet: the first request does. An embedded
 * engine is opened here, with all its memory.
 *
 * endpoint   "unix:///PATH", the socket of a daemon on this host; "http://HOST:PORT" or
 *            "https://HOST:PORT", with an optional path prefix; "embedded:", "embedded:cpu" or
 *            "embedded:cuda:N", an engine in this process, with "?threads=T" behind it if it is not
 *            to have a thread for each processor. Copied.
 * options    NULL: all defaults. Copied.
 * client_out the caller's, to be closed by dropkv_client_close(); written only on success.
 * Errors     INVALID: not an endpoint, or an option out of range. UNSUPPORTED: also an engine that
 *            is not installed or cannot run here. NOMEM.
 */
DROPKV_API enum dropkv_status dropkv_client_open(const char *endpoint,
                                                 const struct dropkv_client_options *options,
                                                 struct dropkv_client **client_out,
                                                 struct dropkv_error *error);

/* Abandons what is in flight and frees everything but results that were taken already. NULL is
 * fine. */
DROPKV_API void dropkv_client_close(struct dropkv_client *client);

/* ---- an engine in this process ----
 *
 * Endpoints "embedded:" need no daemon: the engines are a module (dkv-engine.so, and dkv-cuda.so
 * for GPUs), which is opened with the first such client. The calls, the answers and the errors are
 * those of a daemon; what protects a daemon is missing: no queue shared with others, no isolation.
 *
 *     struct dropkv_client_options options = DROPKV_CLIENT_OPTIONS_INIT;
 *     options.cuda_stream = stream;
 *     dropkv_client_open("embedded:cuda:0", &options, &client, &error);
 *     ...kernels that write query, key and value are launched on the stream...
 *     dropkv_submit(client, &request, &id, &error);
 *     ...other work is launched; dropkv_fd() gets readable when the answer is there...
 *
 * CPU      computes within dropkv_dispatch(), and so within calls that wait. dropkv_fd() is
 *          readable while something waits to be computed.
 * CUDA     works on the caller's stream, in that stream's context; without one on a stream of its
 *          own, in the device's primary context, so that what it is to read must be there before.
 *          dropkv_submit() queues the work behind what the stream holds and returns; nothing waits
 *          for the stream but calls that say so, and the submission of layers=cake, whose budget is
 *          dealt out on the host. A request that finds two batches under way waits
 *          for one to end and goes out in a later dropkv_dispatch(), still in the stream's order.
 *          The thread's current device and context are as before after every call.
 * Memory   tensors may lie in the memory of the client's GPU, from any allocator, or the host's;
 *          buffers and exports are not needed. Host tensors are copied within dropkv_submit(), by
 *          threads. Answers are in host memory. An engine on a GPU takes about 0.5 GB there and
 *          0.1 GB of pinned host memory, for as long as it is open.
 * Borrowed until the result was taken, as ever. dropkv_cancel() and dropkv_client_close() wait
 * until the tensors are not read any more. A request whose deadline passes while the GPU has it
 *          ends with TIMEOUT at once: work of it may still be in the stream, so its memory is
 *          written again in the stream's order. dropkv_client_detach_buffer() waits for what is
 *          under way. A prompt takes what it needs of its cache and stash at submission; query
 *          rows around the end of a ring in host memory are copied then.
 * Fences   are UNSUPPORTED: the stream's order takes their place.
 * Stream   not captured to a graph while requests are submitted (INVALID); it outlives the client.
 * Errors   DEVICE: the context was lost, perhaps to other work in it; everything fails from then
 * on.
 */

/* ---- memory shared with a daemon on the same host ----
 *
 * Over unix:/// tensors that lie in a buffer are read by the daemon where they are; others are
 * sent. The answers are the same. With other endpoints a buffer is memory like any other, so a
 * program need not know which one it has.
 *
 *     struct dropkv_buffer *buffer;
 *     dropkv_buffer_new(bytes, &buffer, &error);
 *     dropkv_client_add_buffer(client, buffer, &error);
 *     request.key.data = (char *)dropkv_buffer_data(buffer) + offset;
 */

struct dropkv_buffer;

/* A memfd of `bytes`, sealed against shrinking and growing, allocated and mapped, zeroed. NOMEM,
 * INVALID for 0 bytes. */
DROPKV_API enum dropkv_status dropkv_buffer_new(size_t bytes, struct dropkv_buffer **buffer_out,
                                                struct dropkv_error *error);

/* Not before it was removed from its clients, or they were closed. NULL is fine. */
DROPKV_API void dropkv_buffer_free(struct dropkv_buffer *buffer);

/* Of GPU memory: the device's address, not to be read by the host. */
DROPKV_API void *dropkv_buffer_data(const struct dropkv_buffer *buffer);
DROPKV_API size_t dropkv_buffer_bytes(const struct dropkv_buffer *buffer);

/* The memfd, to be passed to other processes that write there; -1: GPU memory. Owned by the buffer.
 */
DROPKV_API int dropkv_buffer_fd(const struct dropkv_buffer *buffer);

/* ---- GPU memory ----
 *
 * A buffer over the caller's own GPU memory, which a daemon on the same host reads in place. It is
 * used like any other buffer, and tensors are given by their device addresses:
 *
 *     dropkv_buffer_from_cuda(kv, bytes, DROPKV_CUDA_ANY, &buffer, &error);
 *     dropkv_client_add_buffer(client, buffer, &error);
 *     request.key.data = (char *)kv + offset;
 *
 * It is for unix:/// and a daemon whose worker has that GPU; nothing is ever copied or sent
 * instead, so where a daemon refuses the memory, requests that need it fail with the reason. The
 * daemon reads whenever it likes between submission and answer: what the producer's stream writes
 * must be there before (a fence, or a synchronise).
 *
 * The CUDA driver is opened when this is first called; libdropkv does not link to it.
 */

enum dropkv_cuda_export {
    DROPKV_CUDA_ANY = 0,
    DROPKV_CUDA_VMM = 1,    /* memory of cuMemCreate() with POSIX file descriptor handles, in one
                               chunk or several side by side; for daemons of any user */
    DROPKV_CUDA_LEGACY = 2, /* memory of cudaMalloc(); for daemons of the caller's own user. The
                               daemon can then reach all of the allocation, and what shares its
                               2 MiB block */
};

/* [pointer, pointer + bytes): anywhere inside one allocation, or across chunks. The memory stays
 * the caller's. The buffer holds descriptors of VMM memory, which keep it allocated. INVALID: not
 * GPU memory of this process, or not so much. UNSUPPORTED: no driver, or memory that cannot be
 * shared; the text says how to allocate it instead. */
DROPKV_API enum dropkv_status dropkv_buffer_from_cuda(const void *pointer, size_t bytes,
                                                      enum dropkv_cuda_export how,
                                                      struct dropkv_buffer **buffer_out,
                                                      struct dropkv_error *error);

/* For an owner that releases the memory and maps other memory at the same address: after the daemon
 * has let go, the buffer lets go too; before the daemon gets it back, it is exported anew. In
 * between the buffer cannot be registered. */
DROPKV_API void dropkv_buffer_unexport(struct dropkv_buffer *buffer);
DROPKV_API enum dropkv_status dropkv_buffer_export_again(struct dropkv_buffer *buffer,
                                                         struct dropkv_error *error);

/* Tensors of requests submitted from now on may lie in the buffer. A client registers it with its
 * daemon, and again whenever it has to connect again. The buffer is borrowed until it is removed or
 * the client is closed. One that the daemon refuses is sent like other memory. NOMEM. */
DROPKV_API enum dropkv_status dropkv_client_add_buffer(struct dropkv_client *client,
                                                       const struct dropkv_buffer *buffer,
                                                       struct dropkv_error *error);

/* The same for a buffer that answers may be written to as well (dropkv_prompt.output). Without this
 * a daemon has a buffer for reading alone. */
DROPKV_API enum dropkv_status dropkv_client_add_output(struct dropkv_client *client,
                                                       const struct dropkv_buffer *buffer,
                                                       struct dropkv_error *error);

/* Requests in flight that use it are still answered. The daemon may look at the memory until they
 * are. Caches and stashes that lie in it are removed first. */
DROPKV_API void dropkv_client_remove_buffer(struct dropkv_client *client,
                                            const struct dropkv_buffer *buffer);

/* For an owner that is about to free, remap or hand on the memory while its registrations stay:
 * returns when the last work that reads the buffer has ended and the daemon has let go of it. Until
 * attach, prompts that need the buffer fail with NOT_FOUND, and tensors that lie in it are sent.
 * Blocks until timeout_us at most (0: the client's). An embedded engine waits for what is under
 * way, and keeps no account of buffers. UNSUPPORTED over HTTP; NOT_FOUND for a buffer that was not
 * added; TIMEOUT: the daemon may still have it. */
DROPKV_API enum dropkv_status dropkv_client_detach_buffer(struct dropkv_client *client,
                                                          const struct dropkv_buffer *buffer,
                                                          int64_t timeout_us,
                                                          struct dropkv_error *error);

/* The memory is back, in the same place of the same buffer; GPU memory that was mapped anew has
 * been exported again (dropkv_buffer_unexport() after detach, dropkv_buffer_export_again() before
 * this). Does not wait. INVALID unless it is detached. */
DROPKV_API enum dropkv_status dropkv_client_attach_buffer(struct dropkv_client *client,
                                                          const struct dropkv_buffer *buffer,
                                                          struct dropkv_error *error);

/* ---- a request ---- */

/* A tensor [batch][heads][tokens][dim] in the caller's memory. Element (b, h, t, d) lies at
 * data + b * batch_stride + h * head_stride + t * token_stride + d * element size. Strides are in
 * bytes, in any order ([tokens][heads][dim] is only numbers); those of heads and tokens are not
 * negative; a stride of 0 means that of a dense row-major tensor. Any alignment. This struct never
 * changes. */
struct dropkv_tensor {
    const void *data;
    enum dropkv_dtype dtype;
    float scale;              /* element value = stored * scale; fp8 only; 0 means 1 */
    const float *head_scales; /* [heads], instead of scale; NULL: one scale */
    int64_t batch_stride;
    int64_t head_stride;
    int64_t token_stride;
};

enum dropkv_param_kind { DROPKV_PARAM_INT = 0, DROPKV_PARAM_REAL = 1, DROPKV_PARAM_TEXT = 2 };

/* A scoring parameter by name; dropkv-client(1) lists names, ranges and defaults. This struct never
 * changes. */
struct dropkv_param {
    const char *name;
    enum dropkv_param_kind kind;
    int64_t integer;
    double real;
    const char *text;
};

static inline struct dropkv_param dropkv_int(const char *name, int64_t value)
{
    struct dropkv_param param = {name, DROPKV_PARAM_INT, value, 0.0, NULL};
    return param;
}

static inline struct dropkv_param dropkv_real(const char *name, double value)
{
    struct dropkv_param param = {name, DROPKV_PARAM_REAL, 0, value, NULL};
    return param;
}

/* The text of any kind of value: dropkv_text("pool", "max"), dropkv_text("window", "8"). */
static inline struct dropkv_param dropkv_text(const char *name, const char *value)
{
    struct dropkv_param param = {name, DROPKV_PARAM_TEXT, 0, 0.0, value};
    return param;
}

struct dropkv_request {
    size_t struct_size;

    uint32_t batch;   /* sequences; >= 1 */
    uint32_t q_heads; /* a multiple of kv_heads; query heads h*g .. h*g+g-1 belong to KV head h */
    uint32_t kv_heads;
    uint32_t head_dim; /* of queries and keys: a multiple of 8, at most 512 */
    uint32_t v_dim;    /* of values; 0: head_dim */
    uint64_t q_rows;   /* query rows per head, the last of which belongs to the last token; the last
                          `window` of them are used */
    uint64_t n_tokens; /* cached tokens */

    struct dropkv_tensor query; /* [batch][q_heads][q_rows][head_dim] */
    struct dropkv_tensor key;   /* [batch][kv_heads][n_tokens][head_dim] */
    struct dropkv_tensor value; /* [batch][kv_heads][n_tokens][v_dim] */

    /* [q_heads]: learned sink logits, one more softmax term per query head whose value is the zero
     * vector (gpt-oss); NULL: none. Copied. */
    const float *sink_logits;

    const struct dropkv_param *params; /* [n_params]; names not given have their defaults */
    size_t n_params;

    int want_scores;    /* not 0: return every token's raw score too */
    int64_t timeout_us; /* deadline, counted from submission; 0: the parameter `timeout` if it is
                           given, else the client's */
    void *user;         /* comes back in the result; never looked at */

    /* Over unix:/// (output also embedded), and as in dropkv_prompt below: nothing is read before
     * the number at fence_offset is fence_value or more, and the answer goes to output. With a
     * fence all three tensors lie in buffers, since what is sent is read at once. NULL: neither. */
    const struct dropkv_buffer *fence;
    size_t fence_offset;
    uint64_t fence_value;
    const struct dropkv_buffer *output;
    size_t output_offset;
    size_t output_bytes;

    /* What some policies take beside the tensors (dropkv-client(1), --policy), dense; a policy that
     * does not take one refuses it. Borrowed as the tensors are, and always sent. NULL: none.
     * Scores that a call reported are the carry_in of the next. */
    const float *token_weight;    /* [batch][kv_heads][n_tokens], >= 0: criticalkv */
    const float *carry_in;        /* [batch][kv_heads][n_tokens], >= 0: h2o, kvzip */
    const float *external_scores; /* [batch][kv_heads][n_tokens]: external, which needs them */
    const float *value_metric;    /* [q_heads][v_dim][v_dim]: restkv */
};

/* clang-format off */
#ifdef __cplusplus /* which has no designated initialisers before C++20 */
static inline struct dropkv_request dropkv_request_make(void)
{
    struct dropkv_request request = {};
    request.struct_size = sizeof(request);
    return request;
}
#define DROPKV_REQUEST_INIT dropkv_request_make()
#else
#define DROPKV_REQUEST_INIT {.struct_size = sizeof(struct dropkv_request)}
#endif
/* clang-format on */

/* ---- caches that are registered once ----
 *
 * An engine's cache does not move: tell its layout once, and a message of about 150 bytes asks for
 * all layers of a prompt. Over unix:/// and embedded; elsewhere these calls are UNSUPPORTED.
 *
 *     dropkv_client_add_buffer(client, kv, &error);               the cache's memory
 *     dropkv_client_add_buffer(client, rows, &error);             the query rows'
 *     struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
 *     ...geometry, and where each layer's keys and values lie...
 *     dropkv_cache_add(client, &layout, &cache, &error);
 *     dropkv_stash_add(client, &stash_layout, &stash, &error);
 *     for each prompt:
 *         struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
 *         prompt.cache = cache, prompt.stash = stash, prompt.n_tokens = n, ...
 *         dropkv_score_prompt(client, &prompt, &result, &error);
 *
 * Caches and stashes belong to their client, which registers them with the daemon, and again
 * whenever it has to connect again; a daemon's refusal is the answer of every prompt that names
 * them. client/examples/prompts.c is a whole program.
 */

/* Where the keys, or the values, of one layer lie in a buffer: head h of token t at
 *     offset + entry(t / page_tokens) * page_stride + (t % page_tokens) * token_stride
 *            + h * head_stride
 * in bytes, with entry() of the prompt's page table. A cache without pages has page_tokens 0, and
 * token t lies at offset + t * token_stride + h * head_stride. The buffer was added to the client
 * and is borrowed until the cache is removed. This struct never changes. */
struct dropkv_view {
    const struct dropkv_buffer *buffer;
    size_t offset;
    enum dropkv_dtype dtype;
    float scale; /* element value = stored * scale; fp8 only; 0 means 1 */
    int64_t page_stride;
    int64_t token_stride;
    int64_t head_stride;
};

/* This struct never changes. */
struct dropkv_layer {
    struct dropkv_view key;
    struct dropkv_view value;
};

struct dropkv_cache_layout {
    size_t struct_size;
    uint32_t q_heads; /* of every layer; a multiple of kv_heads */
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t v_dim;                    /* of values; 0: head_dim */
    uint32_t page_tokens;              /* tokens per entry of a page table; 0: no pages */
    uint32_t n_layers;                 /* 1..1024 */
    const struct dropkv_layer *layers; /* [n_layers]; copied */
    const float *head_scales; /* [n_layers][key, value][kv_heads], instead of the views' scales;
                                 NULL: those; copied */
    const float *sink_logits; /* [n_layers][q_heads]: learned sink logits; NULL: none; copied */
    double scale;             /* of logits; 0: 1 / sqrt(head_dim) */
    double logit_softcap;     /* 0: none */
};

/* A ring of query rows that the producer writes while it prefills: row r of head h of a slot's
 * ring, for one layer, lies in the buffer at offset + layer * layer_stride + slot * slot_stride + r
 * * row_stride + h * head_stride bytes. A slot serves one sequence at a time. */
struct dropkv_stash_layout {
    size_t struct_size;
    const struct dropkv_buffer *buffer; /* as in dropkv_view */
    size_t offset;
    enum dropkv_dtype dtype; /* BF16, FP16 or FP32 */
    uint32_t n_layers;       /* 1..1024 */
    uint32_t n_slots;
    uint32_t n_rows; /* of a slot's ring: at least the window */
    int64_t layer_stride;
    int64_t slot_stride;
    int64_t row_stride;
    int64_t head_stride;
};

struct dropkv_cache;
struct dropkv_stash;

/* Nothing is waited for. *cache_out, *stash_out: the client's, valid until removed or the client is
 * closed; written only on success. INVALID names the field; UNSUPPORTED; NOMEM. */
DROPKV_API enum dropkv_status dropkv_cache_add(struct dropkv_client *client,
                                               const struct dropkv_cache_layout *layout,
                                               struct dropkv_cache **cache_out,
                                               struct dropkv_error *error);
DROPKV_API enum dropkv_status dropkv_stash_add(struct dropkv_client *client,
                                               const struct dropkv_stash_layout *layout,
                                               struct dropkv_stash **stash_out,
                                               struct dropkv_error *error);

/* Prompts that the daemon has are still answered; others that name it end with NOT_FOUND. NULL is
 * fine. */
DROPKV_API void dropkv_cache_remove(struct dropkv_client *client, struct dropkv_cache *cache);
DROPKV_API void dropkv_stash_remove(struct dropkv_client *client, struct dropkv_stash *stash);

/* A request for layers of a registered cache. */
struct dropkv_prompt {
    size_t struct_size;
    struct dropkv_cache *cache;
    struct dropkv_stash *stash;
    uint32_t first_layer;
    uint32_t n_layers; /* 0: all from first_layer on */

    uint32_t n_tokens;   /* stored tokens of the sequence */
    uint32_t valid_from; /* the first that exists; answers count stored positions all the same */
    uint32_t slot;       /* of the stash */
    uint32_t newest_row; /* of the slot's ring: the query of token n_tokens - 1 */
    uint32_t q_rows;     /* rows that are there, the newest included; the last `window` are used */

    /* The page table of a paged cache: table_entries int32 or int64 numbers, inline (`table`,
     * copied) or in a buffer. NULL both: page i of the sequence is page i of the view. */
    const void *table;
    const struct dropkv_buffer *table_buffer;
    size_t table_offset; /* in the buffer */
    uint32_t table_entries;
    uint32_t table_entry_bytes; /* 4 or 8 */
    uint64_t table_mask;        /* applied to each entry; 0: all bits */
    int64_t null_entry;         /* of a page that is not there, */
    int has_null_entry;         /* if this is not 0 */

    /* Nothing is read before the 8-byte number at fence_offset of the buffer, host byte order and a
     * multiple of 8, is fence_value or more (unsigned). The producer writes it after the data, by a
     * store or from its stream; the daemon looks, until the deadline. NULL: read at once. */
    const struct dropkv_buffer *fence;
    size_t fence_offset;
    uint64_t fence_value;

    /* Where the answer goes: room for keep_indices, then scores if wanted, at a multiple of 4 of a
     * buffer that was given to dropkv_client_add_output(). The result's arrays point there, until
     * something else is written there. After a cancel or TIMEOUT it may still be written until
     * dropkv_client_detach_buffer() has returned. NULL: into memory of the result's own. */
    const struct dropkv_buffer *output;
    size_t output_offset;
    size_t output_bytes;

    const struct dropkv_param *params; /* as in dropkv_request, and below; copied */
    size_t n_params;
    int want_scores;
    int64_t timeout_us;
    void *user;

    /* As in dropkv_request, for each of the n_layers; sent, also with a fence. NULL: none. */
    const float *token_weight;    /* [n_layers][kv_heads][n_tokens] */
    const float *carry_in;        /* [n_layers][kv_heads][n_tokens] */
    const float *external_scores; /* [n_layers][kv_heads][n_tokens] */
    const float *value_metric;    /* [n_layers][q_heads][v_dim][v_dim] */
};

/* clang-format off */
#ifdef __cplusplus
#define DROPKV_CACHE_LAYOUT_INIT dropkv_cache_layout_make()
#define DROPKV_STASH_LAYOUT_INIT dropkv_stash_layout_make()
#define DROPKV_PROMPT_INIT dropkv_prompt_make()
static inline struct dropkv_cache_layout dropkv_cache_layout_make(void)
{
    struct dropkv_cache_layout layout = {};
    layout.struct_size = sizeof(layout);
    return layout;
}
static inline struct dropkv_stash_layout dropkv_stash_layout_make(void)
{
    struct dropkv_stash_layout layout = {};
    layout.struct_size = sizeof(layout);
    return layout;
}
static inline struct dropkv_prompt dropkv_prompt_make(void)
{
    struct dropkv_prompt prompt = {};
    prompt.struct_size = sizeof(prompt);
    return prompt;
}
#else
#define DROPKV_CACHE_LAYOUT_INIT {.struct_size = sizeof(struct dropkv_cache_layout)}
#define DROPKV_STASH_LAYOUT_INIT {.struct_size = sizeof(struct dropkv_stash_layout)}
#define DROPKV_PROMPT_INIT {.struct_size = sizeof(struct dropkv_prompt)}
#endif
/* clang-format on */

/* ---- the answer ---- */

/* Made by the library, freed by dropkv_result_free(). Do not copy or measure it: it may grow. Over
 * unix:/// an answer of 16 KiB or more lies in memory that the daemon's worker has written itself:
 * up to eight such pieces are kept for a client, and a further one where none is free is sent. */
struct dropkv_result {
    enum dropkv_status status; /* not DROPKV_OK: only id, user, error_text and times are set */
    const char *error_text;    /* "" on success */
    uint64_t id;               /* what dropkv_submit() gave */
    void *user;                /* the request's */

    uint32_t batch; /* of a prompt: the number of layers */
    uint32_t kv_heads;
    uint64_t n_tokens;
    uint64_t keep_tokens; /* k; with keep_offsets the mean over heads, rounded down */

    /* [batch][kv_heads][keep_tokens]: positions 0..n_tokens-1, ascending. With keep_offsets the
     * heads' indices one after the other. */
    const int32_t *keep_indices;

    /* [batch][kv_heads][n_tokens]: raw scores before pooling; NULL unless asked for. */
    const float *scores;

    int degraded; /* not 0: an overloaded server kept sinks and the newest tokens, unscored */
    const char *backend; /* what computed it ("cpu/avx512bf16", "cuda/sm_90a"); "" if not told */

    uint64_t elapsed_ns; /* from submission to answer, as the caller saw it */
    uint64_t queue_ns;   /* in the server's queue; 0 if not told */
    uint64_t compute_ns; /* in the engine; 0 if not told */
    uint32_t n_attempts; /* how often the request was sent */

    /* [batch * kv_heads + 1], or NULL where every head keeps keep_tokens: head i, counted through
     * all blocks, keeps keep_indices[keep_offsets[i]] up to [keep_offsets[i + 1]]. Budgets that
     * differ by head or layer (parameters heads, layers) give such answers. */
    const int32_t *keep_offsets;
};

/* NULL is fine. Valid also after its client was closed. */
DROPKV_API void dropkv_result_free(struct dropkv_result *result);

/* ---- blocking ---- */

/* Scores one request and waits for the answer or the deadline. Other submitted requests go on
 * meanwhile; their results stay for dropkv_next_result().
 *
 * request      borrowed for the call, with everything it points to.
 * result_out   the caller's; set to NULL on failure.
 * Errors       INVALID, UNSUPPORTED and TOO_LARGE before anything is sent where this side can tell;
 *              whatever the server answers; TIMEOUT, UNAVAILABLE, MALFORMED, NOMEM.
 */
DROPKV_API enum dropkv_status dropkv_score(struct dropkv_client *client,
                                           const struct dropkv_request *request,
                                           struct dropkv_result **result_out,
                                           struct dropkv_error *error);

/* The same for layers of a registered cache. What is wrong with the prompt is told by the daemon.
 */
DROPKV_API enum dropkv_status dropkv_score_prompt(struct dropkv_client *client,
                                                  const struct dropkv_prompt *prompt,
                                                  struct dropkv_result **result_out,
                                                  struct dropkv_error *error);

/* ---- driven by an event loop ----
 *
 * Watch dropkv_fd() for reading in any event loop; when it is readable, call dropkv_dispatch() with
 * a timeout of 0, then take results until there are none:
 *
 *     dropkv_submit(client, &request, &id, &error);
 *     ...
 *     on_readable:
 *         dropkv_dispatch(client, 0, &error);
 *         while ((result = dropkv_next_result(client)) != NULL)
 *             ...
 */

/* Starts a request.
 *
 * request   the struct, its parameters and scales are copied; the tensors' memory is borrowed and
 *           must stay unchanged until the result was taken, dropkv_cancel() returned, or the client
 *           was closed.
 * id_out    names the request in this client; never 0. May be NULL.
 * Errors    as dropkv_score() for what is wrong with the request; BUSY if max_in_flight is reached.
 *           After an error nothing was started and nothing is borrowed.
 */
DROPKV_API enum dropkv_status dropkv_submit(struct dropkv_client *client,
                                            const struct dropkv_request *request, uint64_t *id_out,
                                            struct dropkv_error *error);

/* The same for layers of a registered cache: the struct, an inline page table and parameters are
 * copied; cache, stash and buffers are named; what policies take is borrowed as tensors are. */
DROPKV_API enum dropkv_status dropkv_submit_prompt(struct dropkv_client *client,
                                                   const struct dropkv_prompt *prompt,
                                                   uint64_t *id_out, struct dropkv_error *error);

/* One descriptor for the client's whole life: readable when dropkv_dispatch() has something to do,
 * timers included. Owned by the client: never read, write or close it. */
DROPKV_API int dropkv_fd(const struct dropkv_client *client);

/* Does what can be done: sends, receives, honours deadlines. Waits up to timeout_us for something
 * to happen (0: does not wait; negative: until a result is there or nothing is in flight). An
 * embedded CPU engine computes here. A request that fails is a result, not an error of this
 * call. Errors: IO, if the system refuses to poll. */
DROPKV_API enum dropkv_status dropkv_dispatch(struct dropkv_client *client, int64_t timeout_us,
                                              struct dropkv_error *error);

/* Takes the oldest finished request, the caller's to free; NULL if none is finished. */
DROPKV_API struct dropkv_result *dropkv_next_result(struct dropkv_client *client);

/* Abandons a request: no result will come, and its tensors are not read after the return. OK also
 * if it had finished (its result is dropped); NOT_FOUND if there is no such request, or its result
 * was taken. */
DROPKV_API enum dropkv_status dropkv_cancel(struct dropkv_client *client, uint64_t id);

/* Submitted and not yet finished. */
DROPKV_API uint32_t dropkv_in_flight(const struct dropkv_client *client);

/* ---- the server ---- */

/* OK if the endpoint is ready for requests; UNAVAILABLE, DRAINING, TIMEOUT or DENIED if not.
 * timeout_us 0: the client's. Blocks. */
DROPKV_API enum dropkv_status dropkv_health(struct dropkv_client *client, int64_t timeout_us,
                                            struct dropkv_error *error);

/* What an endpoint says about itself. Made by the library, freed by dropkv_info_free(); it may
 * grow. Texts are never NULL; what was not told is "". */
struct dropkv_info {
    const char *server;   /* "dropkvd" */
    const char *version;  /* of the server */
    const char *platform; /* of the model, in the Open Inference Protocol's metadata */
    const char *backend;  /* "cpu/avx512bf16", "cuda/sm_90a" */
    const char *device;   /* "NVIDIA H200", or the processor's name */
};

/* Asks the endpoint. Blocks until timeout_us at most (0: the client's). *info_out is the caller's
 * to free; written only on success. */
DROPKV_API enum dropkv_status dropkv_client_info(struct dropkv_client *client, int64_t timeout_us,
                                                 struct dropkv_info **info_out,
                                                 struct dropkv_error *error);

/* NULL is fine. */
DROPKV_API void dropkv_info_free(struct dropkv_info *info);

#ifdef __cplusplus
}
#endif
#endif
