/* libdropkv: asking, by a call that waits or from an event loop, and the answer. Part of dropkv.h.
 */
#ifndef DROPKV_SCORE_H
#define DROPKV_SCORE_H

#include "base.h"
#include "cache.h"
#include "client.h"
#include "request.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the answer ---- */

/* Made by the library, freed by dropkv_result_free(). Do not copy or measure it: it may grow. Over
 * unix:/// an answer of 4 KiB or more lies in memory that the daemon's worker has written itself:
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
