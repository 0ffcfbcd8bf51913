/* Servers for tests of the HTTP transport: a real daemon, and one that says what it is told to,
 * because no real server misbehaves on demand. */
#ifndef DKV_TESTS_CLIENT_HTTP_FIXTURE_H
#define DKV_TESTS_CLIENT_HTTP_FIXTURE_H

#include "client/dropkv.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* ---- a real dropkvd ---- */

struct dkv_test_daemon {
    pid_t pid;
    int log_fd; /* its standard error */
    unsigned port;
    char url[64];
};

/* Starts `program` on `port` (0: a free one) and returns once it listens. Aborts if it does not. */
void dkv_test_daemon_start(struct dkv_test_daemon *daemon, const char *program, unsigned port);

/* Ends it with `signal_number` and waits. */
void dkv_test_daemon_stop(struct dkv_test_daemon *daemon, int signal_number);

/* ---- a scripted server ---- */

/* Whose turn it is, in a scene that waits for the test. */
enum dkv_test_turn {
    DKV_TEST_ASKING, /* the request has not come */
    DKV_TEST_HELD,   /* it has: the test says RELEASED */
    DKV_TEST_RELEASED,
    DKV_TEST_REPLIED, /* and closed the connection, or hangs */
};

/* What one connection does. */
struct dkv_test_scene {
    const char *reply; /* sent once the request is there; NULL: none */
    size_t n_bytes;
    bool reply_early; /* after the request's head, without waiting for its body */
    bool hang;        /* keeps the connection until the server is stopped */
};

struct dkv_test_server;

/* For scenes that wait for the test; NULL: they reply at once. */
extern _Atomic enum dkv_test_turn *dkv_test_turn;

/* Plays the scenes, one a connection; further connections are closed at once. */
struct dkv_test_server *dkv_test_server_start(const struct dkv_test_scene *scenes, size_t n_scenes,
                                              char url_out[64]);

/* Stops and frees it; returns how many connections it saw. */
size_t dkv_test_server_stop(struct dkv_test_server *server);

/* ---- a client ---- */

/* Aborts if it cannot be opened. */
struct dropkv_client *dkv_test_http_client(const char *url, int32_t max_retries);

#endif
