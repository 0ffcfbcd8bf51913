/* libdropkv: a client and its endpoint, which may be an engine in this process. Part of dropkv.h.
 */
#ifndef DROPKV_CLIENT_H
#define DROPKV_CLIENT_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

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

    /* How long a call that waits looks for the answer before it sleeps, at most 1,000,000. It takes
     * the processor meanwhile, and saves the 10 to 20 us that a sleeping one takes to wake up: for
     * short requests to a GPU, a daemon's or here. 0: not at all, except that a client of the local
     * socket finds out: with two processors it tries now and then whether looking for up to 150 us
     * brings its answers sooner, and goes on while it does; with four also where answers take
     * longer but equally long, at their end. 1: hardly. */
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

#ifdef __cplusplus
}
#endif
#endif
