/* What the files of the local socket's transport share; nobody else includes this.
 *
 *   ipc.c           the connection: opened, lost, driven
 *   ipc_send.c      requests on their way: carriers, their attempts, copied bytes
 *   ipc_receive.c   what the daemon says
 *   ipc_objects.c   what the daemon knows by number, and buffers, the first kind of it
 *   ipc_cache.c     caches and stashes, the others
 *   ipc_message.c   a call's blocks as a message
 *   ipc_prompt.c    a prompt as a message
 *   ipc_result.c    an answer back into a result
 *   ipc_answer.c    memory for large ones, shared with the daemon
 *
 * Owner   the transport has everything; caches and stashes are public handles into it.
 * Thread  the client's.
 */
#ifndef DKV_CLIENT_IPC_PRIV_H
#define DKV_CLIENT_IPC_PRIV_H

#include "client/alarm.h"
#include "client/buffer.h"
#include "client/transport.h"
#include "proto/conn.h"

#include <sys/un.h>

#define DKV_IPC_FIRST_PAUSE_NS INT64_C(20000000)

#define DKV_IPC_ANSWERS_MAX 8u

/* Memory that the daemon writes answers to. The transport has one reference, the request or result
 * that uses it another. */
struct dkv_ipc_answer {
    struct dkv_held held; /* first */
    struct dkv_ipc_answer *next;
    struct dropkv_buffer *buffer;
};

/* A job on its way. */
struct dkv_ipc_carrier {
    struct dkv_ipc_carrier *next;
    struct dkv_job *job;
    struct dkv_ipc_answer *answer; /* NULL: its answer comes with the reply, or where it was asked
                                      to */
    uint64_t id;                   /* 0: not sent on this connection */
    int64_t not_before_ns;         /* of the next attempt */
    uint32_t n_attempts;
};

/* Bytes that are copied for a message: tensors, tables, scales. They stay until the connection has
 * sent them, whatever becomes of the request. */
struct dkv_ipc_bulk {
    struct dkv_ipc_bulk *next;
    uint8_t *bytes;
    uint64_t room;
    uint64_t number; /* in the order of the connection's bulks */
};

enum dkv_ipc_kind { DKV_IPC_REGION, DKV_IPC_CACHE, DKV_IPC_STASH, DKV_IPC_KINDS };

/* Something that the daemon knows by number. */
struct dkv_ipc_object {
    struct dkv_ipc_object *next;
    uint32_t number; /* 0: not registered on this connection */
    uint64_t add_id; /* of the message that registers it; 0: none is under way */
    bool refused;    /* on this connection, and why: */
    struct dkv_error why;
};

struct dkv_ipc_region {
    struct dkv_ipc_object object;
    const struct dropkv_buffer *buffer;
    bool writable;
    bool detached;
    uint64_t detach_id; /* of the message that asks for it; 0: none is under way */
    uint32_t generation;
};

/* Where a layer lies: the wire's view, whose region is found by the buffer when it is sent. */
struct dkv_ipc_view {
    const struct dropkv_buffer *buffer;
    struct dkv_wire_view wire;
};

struct dropkv_cache {
    struct dkv_ipc_object object;
    struct dkv_wire_cache wire;
    struct dkv_ipc_view *views; /* [n_layers][key, value] */
    float *floats;              /* the message's bulk */
};

struct dropkv_stash {
    struct dkv_ipc_object object;
    struct dkv_wire_stash wire;
    const struct dropkv_buffer *buffer;
};

/* Something that was removed while the message that registers it was on its way. */
struct dkv_ipc_leaving {
    struct dkv_ipc_leaving *next;
    uint64_t add_id;
    uint8_t type; /* of the message that drops it */
};

/* A message that asks for an answer, ready to send. */
struct dkv_ipc_request {
    uint8_t type;
    uint8_t *payload; /* DKV_WIRE_PAYLOAD_MAX bytes of room */
    size_t payload_bytes;
    struct dkv_ipc_bulk *bulk; /* NULL: none */
    uint64_t bulk_bytes;
};

struct dkv_transport {
    struct sockaddr_un address;
    struct dkv_wire_conn *conn; /* NULL: disconnected */
    bool greeted;
    struct dkv_wire_welcome welcome;
    struct dkv_oip_info about; /* the daemon */
    uint64_t last_id;
    uint64_t pong_id; /* of the last pong */
    int64_t connect_not_before_ns;
    unsigned n_failures; /* to connect, in a row */

    struct dkv_ipc_carrier *first; /* all, oldest first */
    struct dkv_ipc_carrier *idle;  /* to be used again */
    struct dkv_ipc_carrier *receiving;
    uint64_t received_bytes; /* of its bulk */
    bool skipping;           /* a bulk that nobody wants */
    bool unread;             /* conn may hold more that came already */

    struct dkv_ipc_answer *answers;
    uint32_t n_answers;
    struct dkv_ipc_object *objects[DKV_IPC_KINDS];
    struct dkv_ipc_leaving *leaving;
    struct dkv_ipc_bulk *first_bulk, **last_bulk; /* the connection's */
    uint64_t n_bulks;
    struct dkv_ipc_bulk *idle_bulks;
    uint64_t idle_bytes;

    int epoll_fd;
    struct dkv_alarm alarm;
    uint32_t events; /* that the socket is watched for */
    uint32_t max_retries;
    uint8_t payload[DKV_WIRE_PAYLOAD_MAX];
};

/* ---- ipc.c ---- */

/* Sends a small message. BUSY: no room now. */
enum dkv_status dkv_ipc_send(struct dkv_transport *t, uint8_t type, const void *payload,
                             size_t payload_bytes, uint64_t *id_out);

/* The daemon is gone, or broke the protocol. */
void dkv_ipc_disconnect(struct dkv_transport *t, enum dkv_status status, const char *text);

/* Drives the connection, at most until the deadline, until done() or it is lost. TIMEOUT,
 * UNAVAILABLE. */
enum dkv_status dkv_ipc_wait(struct dkv_transport *t,
                             bool (*done)(const struct dkv_transport *t, const void *what),
                             const void *what, int64_t deadline_ns, struct dkv_error *err);

/* ---- ipc_send.c ---- */

enum dkv_status dkv_ipc_carrier_add(struct dkv_transport *t, struct dkv_job *job,
                                    struct dkv_error *err);
void dkv_ipc_carrier_remove(struct dkv_transport *t, struct dkv_ipc_carrier *carrier);
struct dkv_ipc_carrier *dkv_ipc_carrier_find(const struct dkv_transport *t, uint64_t id);

/* The job's end. */
void dkv_ipc_hand_back(struct dkv_transport *t, struct dkv_ipc_carrier *carrier,
                       enum dkv_status status, const char *text);

/* Another attempt after a pause, or the end. */
void dkv_ipc_retry(struct dkv_transport *t, struct dkv_ipc_carrier *carrier, int64_t pause_ns,
                   enum dkv_status status, const char *text);

/* Sends what waits, as far as connection and daemon take it. True: the connection is full. */
bool dkv_ipc_send_waiting(struct dkv_transport *t);

/* Ends those whose deadline has passed. */
void dkv_ipc_expire(struct dkv_transport *t);

/* Room for bytes to copy; NULL if there is no memory. Given to the connection with a message, or
 * put back. */
struct dkv_ipc_bulk *dkv_ipc_bulk_get(struct dkv_transport *t, uint64_t bytes);
void dkv_ipc_bulk_put(struct dkv_transport *t, struct dkv_ipc_bulk *bulk); /* NULL is fine */
void dkv_ipc_bulk_given(struct dkv_transport *t, struct dkv_ipc_bulk *bulk);
void dkv_ipc_bulks_sent(struct dkv_transport *t, uint64_t up_to);

void dkv_ipc_send_fini(struct dkv_transport *t);

/* ---- ipc_answer.c ---- */

/* Before a request is sent: its answer shall go to a buffer of ours, if it is large and there is
 * one. */
void dkv_ipc_answer_place(struct dkv_transport *t, struct dkv_ipc_carrier *carrier);

/* The daemon has answered with an error, or nothing was sent: the buffer is free. */
void dkv_ipc_answer_release(struct dkv_ipc_carrier *carrier);

/* The answer is in the buffer, which is the result's from now on. */
void dkv_ipc_answer_hold(struct dkv_ipc_carrier *carrier);

/* The daemon may still write there. */
void dkv_ipc_answer_give_up(struct dkv_transport *t, struct dkv_ipc_carrier *carrier);

void dkv_ipc_answers_fini(struct dkv_transport *t);

/* ---- ipc_receive.c ---- */

/* Reads and handles what is there; may disconnect. */
void dkv_ipc_receive(struct dkv_transport *t);

/* ---- ipc_cache.c ---- */

extern const struct dkv_transport_objects dkv_ipc_objects;

/* Tell the daemon, if it knows all the buffers. What finds no room is tried again. */
void dkv_ipc_cache_send(struct dkv_transport *t, struct dropkv_cache *cache);
void dkv_ipc_stash_send(struct dkv_transport *t, struct dropkv_stash *stash);
void dkv_ipc_cache_free(struct dropkv_cache *cache);

/* ---- ipc_objects.c ---- */

void dkv_ipc_object_add(struct dkv_transport *t, enum dkv_ipc_kind kind,
                        struct dkv_ipc_object *object);
void dkv_ipc_object_unlink(struct dkv_transport *t, enum dkv_ipc_kind kind,
                           struct dkv_ipc_object *object);

/* Whether a public handle is one of ours. It is not looked into: it may be another kind of
 * client's.
 */
bool dkv_ipc_object_has(const struct dkv_transport *t, enum dkv_ipc_kind kind, const void *handle);

/* Sends the message that registers it; takes the bulk, which may be NULL. */
enum dkv_status dkv_ipc_object_send(struct dkv_transport *t, struct dkv_ipc_object *object,
                                    uint8_t type, size_t payload_bytes, struct dkv_ipc_bulk *bulk,
                                    uint64_t bulk_bytes);

/* Tells the daemon that its number is no longer used. */
void dkv_ipc_object_drop(struct dkv_transport *t, uint8_t type,
                         const struct dkv_ipc_object *object);

/* Finds the region of something that lies in a buffer. False: not yet, or never (`refused`). */
bool dkv_ipc_object_find(const struct dkv_transport *t, struct dkv_ipc_object *object,
                         const struct dropkv_buffer *buffer, const char *what,
                         uint32_t *number_out);

enum dkv_status dkv_ipc_detach(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                               int64_t deadline_ns, struct dkv_error *err);
enum dkv_status dkv_ipc_attach(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                               struct dkv_error *err);

enum dkv_status dkv_ipc_add_buffer(struct dkv_transport *t, const struct dropkv_buffer *buffer,
                                   bool writable, struct dkv_error *err);
void dkv_ipc_remove_buffer(struct dkv_transport *t, const struct dropkv_buffer *buffer);

/* Tells the daemon of what it does not know yet. */
void dkv_ipc_objects_register(struct dkv_transport *t);

/* True if requests may be sent: every object is registered, refused, or waits for its owner. */
bool dkv_ipc_objects_settled(const struct dkv_transport *t);

/* The connection's end: nothing is registered any more. */
void dkv_ipc_objects_forget(struct dkv_transport *t);

/* Answers to what was asked about an object. False: it concerns none. */
void dkv_ipc_objects_done(struct dkv_transport *t, uint64_t id, uint32_t number);
bool dkv_ipc_objects_refused(struct dkv_transport *t, uint64_t id, const struct dkv_error *why);

/* The region that holds [at, at + bytes); NULL if none is registered. */
const struct dkv_ipc_region *dkv_ipc_region_find(const struct dkv_transport *t, const void *at,
                                                 uint64_t bytes, uint64_t *offset_out);

/* GPU memory can be named or refused, but not copied: why a tensor there cannot be sent. OK: it
 * can.
 */
enum dkv_status dkv_ipc_check_copying(const struct dkv_transport *t, const void *at, uint64_t bytes,
                                      struct dkv_error *err);

/* The number of a buffer, for a field called `what`. NOT_FOUND, or why it was refused. */
enum dkv_status dkv_ipc_region_number(const struct dkv_transport *t,
                                      const struct dropkv_buffer *buffer, const char *what,
                                      uint32_t *number_out, struct dkv_error *err);

void dkv_ipc_objects_fini(struct dkv_transport *t);

/* ---- ipc_message.c, ipc_prompt.c, ipc_result.c ---- */

/* Fill payload, type and bulk. `timeout_us` is what is left until the deadline. NOMEM; of a prompt
 * also NOT_FOUND and why an object was refused; for a tensor in GPU memory that is not registered:
 * why not. */
enum dkv_status dkv_ipc_put_blocks(struct dkv_transport *t, const struct dkv_call *call,
                                   uint64_t timeout_us, struct dkv_ipc_request *request,
                                   struct dkv_error *err);
enum dkv_status dkv_ipc_put_prompt(struct dkv_transport *t, const struct dkv_call *call,
                                   uint64_t timeout_us, struct dkv_ipc_request *request,
                                   struct dkv_error *err);

/* Names the buffers of the call's fence and output, if it has them. NOT_FOUND, why they were
 * refused.
 */
enum dkv_status dkv_ipc_name_places(const struct dkv_transport *t, const struct dkv_call *call,
                                    struct dkv_wire_fence *fence, struct dkv_wire_output *output,
                                    struct dkv_error *err);

/* Parameters as they are sent; returns their bytes. */
size_t dkv_ipc_put_params(const struct dkv_call *call, uint64_t timeout_us,
                          uint8_t out[DKV_WIRE_PARAMS_MAX]);

/* Judges a RESULT against the call and makes room for its numbers in the job's result, in order:
 * all indices, then all scores. MALFORMED, NOMEM. */
enum dkv_status dkv_ipc_take_result(struct dkv_job *job,
                                    const struct dkv_wire_conn_message *message,
                                    struct dkv_error *err);

#endif
