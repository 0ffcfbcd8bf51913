/* A real daemon on a socket of its own. Failures end the running cmocka test. */
#ifndef DKV_TESTS_CLIENT_IPC_FIXTURE_H
#define DKV_TESTS_CLIENT_IPC_FIXTURE_H

#include <sys/types.h>

extern char dkv_test_endpoint[80];
extern pid_t dkv_test_daemon_pid;

/* Makes a folder for the socket of `program`; 0, or -1. */
int dkv_test_begin(const char *program);
/* Removes it; 0 unless something was left in it. A teardown of cmocka's. */
int dkv_test_end(void **unused);

void dkv_test_start_daemon(void);
void dkv_test_stop_daemon(int signal_number); /* SIGTERM: it must exit with 0 */

#endif
