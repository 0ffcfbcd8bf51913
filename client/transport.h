/* The seam between a client and what carries its calls.
 *
 * A job is one call on its way. The client makes it, a transport carries it and hands it back by
 * dkv_job_done(); until then the transport may read the job's tensors. Transports: HTTP
 * (client/http.c); the local socket (client/ipc.c); an engine inside the process
 * (client/embedded.c).
 *
 * Thread  the client's.
 */
#ifndef DKV_CLIENT_TRANSPORT_H
#define DKV_CLIENT_TRANSPORT_H

#include "client/call.h"
#include "client/result.h"
#include "proto/oip.h"

struct dkv_transport;
struct dkv_transport_objects;

struct dkv_job {
    struct dkv_call call;
    int64_t submitted_ns; /* CLOCK_MONOTONIC */
    int64_t deadline_ns;
    struct dropkv_result *result; /* made at submission; the transport fills it */
    bool done;
    void *carrier; /* the transport's own part; NULL once it has let go of the job */
    struct dropkv_client *client;
    struct dkv_job *next;
    struct dkv_job *prev;
};

/* What the client tells every transport. */
struct dkv_transport_config {
    const char *address; /* the endpoint as given */
    const char *token;   /* NULL: none */
    uint32_t max_connections;
    uint32_t max_retries;
    void *cuda_stream; /* the caller's; NULL: none */
};

struct dkv_transport_ops {
    enum dkv_status (*open)(const struct dkv_transport_config *config,
                            struct dkv_transport **transport_out, struct dkv_error *err);

    /* NULL is fine. No job is in flight: the client cancelled them. */
    void (*close)(struct dkv_transport *transport);

    /* Takes a job, to be handed back by dkv_job_done() from a later dispatch. On failure nothing
     * was started. */
    enum dkv_status (*submit)(struct dkv_transport *transport, struct dkv_job *job,
                              struct dkv_error *err);

    /* Lets go of a job without an answer. */
    void (*cancel)(struct dkv_transport *transport, struct dkv_job *job);

    /* One descriptor for the transport's life, readable when dispatch has something to do. */
    int (*fd)(const struct dkv_transport *transport);

    /* True if it is readable or will be at once: for callers that look, since it may take less time
     * than to poll. NULL: poll. */
    bool (*ready)(struct dkv_transport *transport);

    /* Callers that wait without saying how may find out whether looking pays: who answers is
     * another process, which needs a processor too. */
    bool learns;

    /* Does what can be done without waiting for others. */
    enum dkv_status (*dispatch)(struct dkv_transport *transport, struct dkv_error *err);

    /* Both block until the deadline at most. */
    enum dkv_status (*health)(struct dkv_transport *transport, int64_t deadline_ns,
                              struct dkv_error *err);
    enum dkv_status (*info)(struct dkv_transport *transport, int64_t deadline_ns,
                            struct dkv_oip_info *info_out, struct dkv_error *err);

    /* From now on, or no longer, tensors in the buffer need no copy; answers may go there if it is
     * `writable`. NULL: it makes no difference to this transport. */
    enum dkv_status (*add_buffer)(struct dkv_transport *transport,
                                  const struct dropkv_buffer *buffer, bool writable,
                                  struct dkv_error *err);
    void (*remove_buffer)(struct dkv_transport *transport, const struct dropkv_buffer *buffer);

    const struct dkv_transport_objects *objects; /* NULL: none */
};

/* What a daemon on the same host, or an embedded engine, keeps for a client; client/dropkv/
 * documents each. detach blocks until the deadline at most. */
struct dkv_transport_objects {
    enum dkv_status (*add_cache)(struct dkv_transport *transport,
                                 const struct dropkv_cache_layout *layout,
                                 struct dropkv_cache **cache_out, struct dkv_error *err);
    enum dkv_status (*add_stash)(struct dkv_transport *transport,
                                 const struct dropkv_stash_layout *layout,
                                 struct dropkv_stash **stash_out, struct dkv_error *err);
    /* False: it is another's. */
    bool (*remove_cache)(struct dkv_transport *transport, struct dropkv_cache *cache);
    bool (*remove_stash)(struct dkv_transport *transport, struct dropkv_stash *stash);
    enum dkv_status (*detach)(struct dkv_transport *transport, const struct dropkv_buffer *buffer,
                              int64_t deadline_ns, struct dkv_error *err);
    enum dkv_status (*attach)(struct dkv_transport *transport, const struct dropkv_buffer *buffer,
                              struct dkv_error *err);
};

/* HTTP(S), through libcurl. */
extern const struct dkv_transport_ops dkv_transport_http;

/* The local socket (client/ipc.c). */
extern const struct dkv_transport_ops dkv_transport_ipc;

/* An engine in this process (client/embedded.h). */
extern const struct dkv_transport_ops dkv_transport_embedded;

/* Opens a client on a transport: what dropkv_client_open() does once it knows which. */
enum dkv_status dkv_client_open(const char *endpoint, const struct dropkv_client_options *options,
                                const struct dkv_transport_ops *ops,
                                struct dropkv_client **client_out, struct dkv_error *err);

/* Hands a job back. With anything but DKV_OK, `text` says why (copied). */
void dkv_job_done(struct dkv_job *job, enum dkv_status status, const char *text);

/* CLOCK_MONOTONIC. */
int64_t dkv_now_ns(void);

#endif
