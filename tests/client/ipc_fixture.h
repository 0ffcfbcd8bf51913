/* A real daemon on a socket of its own, and what every test of the local socket asks of the
 * library. Failures end the running cmocka test. */
#ifndef DKV_TESTS_CLIENT_IPC_FIXTURE_H
#define DKV_TESTS_CLIENT_IPC_FIXTURE_H

#include "client/dropkv.h"

#include <stdbool.h>
#include <sys/types.h>

extern char dkv_test_endpoint[80];
extern pid_t dkv_test_daemon_pid;

/* Makes a folder for the socket of `program`; 0, or -1. */
int dkv_test_begin(const char *program);
/* Removes it; 0 unless something was left in it. A teardown of cmocka's. */
int dkv_test_end(void **unused);

void dkv_test_start_daemon(void);
void dkv_test_stop_daemon(int signal_number); /* SIGTERM: it must exit with 0 */

/* At the daemon; or, with "embedded:cpu", the engine in this process. */
struct dropkv_client *dkv_test_open(const char *endpoint);

struct dropkv_result *dkv_test_score(struct dropkv_client *client, const struct dropkv_request *r);

/* What the engine in this process says. */
struct dropkv_result *dkv_test_expect(const struct dropkv_request *r);

/* A buffer that was added to the client. */
struct dropkv_buffer *dkv_test_buffer(struct dropkv_client *client, size_t bytes, bool writable);

#endif
