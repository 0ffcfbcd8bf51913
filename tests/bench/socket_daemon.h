/* A daemon for the benches of the local socket: a CPU worker of one thread, and a socket in a
 * folder of its own. It dies with the bench. One at a time. */
#ifndef DKV_TESTS_BENCH_SOCKET_DAEMON_H
#define DKV_TESTS_BENCH_SOCKET_DAEMON_H

#include <sys/types.h>

struct socket_daemon {
    pid_t pid;
    char folder[32];
    char endpoint[80]; /* for dropkv_client_open() */
};

/* Returns when it listens; ends the bench with a line if it does not come to that. */
void socket_daemon_start(struct socket_daemon *daemon, const char *program);
void socket_daemon_stop(const struct socket_daemon *daemon);

/* The benches' clock. */
double bench_clock_us(void);

#endif
