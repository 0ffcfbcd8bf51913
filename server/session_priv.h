/* What the parts of the local socket's front share: sessions.c (who comes in), session.c (one
 * connection), session_objects.c (what is registered), session_ask.c and ask*.c (requests). Nobody
 * else includes this.
 */
#ifndef DKV_SERVER_SESSION_PRIV_H
#define DKV_SERVER_SESSION_PRIV_H

#include "proto/conn.h"
#include "server/fence.h"
#include "server/list.h"
#include "server/region.h"
#include "server/session.h"
#include "server/shm_name.h"

/* Quotas of one connection. */
#define DKV_SESSION_REGIONS   256u
#define DKV_SESSION_FDS       512u                /* of its regions */
#define DKV_SESSION_BYTES     (UINT64_C(8) << 40) /* of its regions: addresses that they take */
#define DKV_SESSION_CACHES    64u
#define DKV_SESSION_FLOATS    (UINT64_C(16) << 20) /* bytes of its caches: the largest has 12 MiB */
#define DKV_CACHES_BYTES_MAX  (UINT64_C(1) << 29)  /* of all connections, requests in flight too */
#define DKV_SESSION_STASHES   64u
#define DKV_SESSION_IN_FLIGHT 256u

struct dkv_sessions {
    struct dkv_server *server;
    char path[108];
    gid_t group;    /* whose members may connect too */
    bool inherited; /* the service manager's socket: its file is not ours to remove */
    int listen_fd;
    int spare_fd; /* given up for a moment when descriptors run out, to turn a client away */
    uv_poll_t poll;
    struct dkv_fences *fences;
    struct dkv_list sessions;
    struct dkv_list unsent; /* those with answers that go out when the backend has settled */
    unsigned n_sessions;
    uint64_t n_ever;   /* numbers given to sessions */
    uint64_t instance; /* random */
};

/* A registered cache; requests in flight count too. */
struct dkv_cache {
    uint32_t n_refs;
    struct dkv_server *server;   /* counts its bytes */
    uint64_t bytes;              /* of views and floats */
    struct dkv_wire_cache wire;  /* without `layers` */
    struct dkv_wire_view *views; /* [n_layers][key, value] */
    float *floats;               /* the message's bulk */
};

/* One place of a table of registered objects. Numbers are never used twice in a connection. */
struct dkv_slot {
    uint32_t number; /* 0: free */
    void *object;
};

struct dkv_slots {
    struct dkv_slot *slots; /* [n] */
    uint32_t n;
    uint32_t n_given; /* numbers so far */
};

/* Reads the bulk of the message in hand. */
struct dkv_session_bulk {
    uint8_t *to; /* NULL: thrown away */
    uint64_t got;
    struct dkv_wire_header header;
    const uint8_t *payload;
    struct dkv_cache *cache; /* one of these, or neither */
    struct dkv_ask *ask;
};

struct dkv_session {
    struct dkv_sessions *all;
    struct dkv_list node;
    struct dkv_list unsent_node;
    uint64_t number;                      /* never used twice */
    char shm_prefix[DKV_SHM_PREFIX_SIZE]; /* "": it may not name memory */
    uid_t uid;                            /* the peer's */
    bool trusted;                         /* the peer is the daemon's own user */
    struct dkv_backend_client *client;    /* whose share of the device it uses */
    struct dkv_wire_conn *conn;           /* NULL: closed, the handles are being closed */
    uv_poll_t poll;
    uv_timer_t timer;
    int events;
    unsigned n_open_handles;
    bool greeted;
    bool doomed;    /* out of memory: ends with the next flush */
    bool receiving; /* a bulk */
    bool unread;    /* conn may hold messages that were not handled yet */
    struct dkv_session_bulk bulk;
    uint64_t heard_ms; /* when more last came of a message that is not complete */
    uint64_t took_ms;  /* when the peer last took of what is to be sent */

    struct dkv_slots regions, caches, stashes;

    struct dkv_list asks;    /* without an answer */
    struct dkv_list ended;   /* answers that do not fit into conn yet */
    struct dkv_list sending; /* results whose bulk conn is sending, in that order */
    struct dkv_list outbox;  /* small messages that do not fit yet */
    unsigned n_asks;         /* in all three lists */
    uint64_t newest_id;      /* the highest that an ask had */
    uint64_t n_bulks;        /* given to conn */
};

/* ---- session.c ---- */

/* A session on a connection of user `uid` that was let in. Takes the descriptor, also on failure.
 */
enum dkv_status dkv_session_new(struct dkv_sessions *all, int fd, uid_t uid, struct dkv_error *err);

/* Closes the connection and gives back everything; what is left is the struct, with conn NULL,
 * until the loop's next turn. Harmless the second time. */
void dkv_session_end(struct dkv_session *session);

/* Sends a small message, or keeps it until there is room. */
void dkv_session_send(struct dkv_session *session, uint8_t type, uint64_t id, const void *payload,
                      size_t payload_bytes);
void dkv_session_send_error(struct dkv_session *session, uint64_t id, const struct dkv_error *err,
                            uint64_t retry_us);
void dkv_session_send_done(struct dkv_session *session, uint64_t id, uint32_t object,
                           uint32_t generation);

/* Sends what there is, as far as the socket takes it; may end the session. */
void dkv_session_flush(struct dkv_session *session);

/* The peer broke the protocol: one line, an error message, the end. */
void dkv_session_violation(struct dkv_session *session, uint64_t id, const struct dkv_error *err);

/* ---- session_greet.c ---- */

/* Answers the first message, or ends the session. */
void dkv_session_greet(struct dkv_session *session, const struct dkv_wire_conn_message *message);

/* ---- session_objects.c ---- */

enum dkv_status dkv_slots_init(struct dkv_slots *slots, uint32_t n);
void *dkv_slots_find(const struct dkv_slots *slots, uint32_t number);

/* Handles one message about an object; true if it was one. Sends its answer. */
bool dkv_session_handle_object(struct dkv_session *session,
                               const struct dkv_wire_conn_message *message);
void dkv_session_cache_received(struct dkv_session *session);   /* its bulk is here */
unsigned dkv_session_free_objects(struct dkv_session *session); /* how many regions it had */
void dkv_cache_unref(struct dkv_cache *cache);                  /* NULL is fine */

/* ---- session_ask.c ---- */

void dkv_session_handle_score(struct dkv_session *session,
                              const struct dkv_wire_conn_message *message);
void dkv_session_ask_received(struct dkv_session *session); /* its bulk is here */
void dkv_session_cancel(struct dkv_session *session, uint64_t target);
void dkv_session_send_ended(struct dkv_session *session); /* what fits into conn now */
void dkv_session_free_sent(struct dkv_session *session);  /* bulks that have left */
void dkv_session_drop_asks(struct dkv_session *session);  /* the peer has gone */

#endif
