/* The daemon is a child process whose log tells when it listens; its socket lies in a folder of its
 * own, which is removed at the end. */
#include "tests/client/ipc_fixture.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

char dkv_test_endpoint[80];
pid_t dkv_test_daemon_pid;

static const char *program;
static char folder[] = "/tmp/dropkv-test-XXXXXX";
static char path[64];
static FILE *daemon_log; /* of a few lines, which the pipe holds */

void dkv_test_start_daemon(void)
{
    int log[2];
    char line[512];
    assert_int_equal(pipe(log), 0);
    dkv_test_daemon_pid = fork();
    if (dkv_test_daemon_pid == 0) {
        dup2(log[1], STDERR_FILENO);
        close(log[0]);
        close(log[1]);
        execl(program, program, "--http", "off", "--socket", path, (char *)NULL);
        _exit(127);
    }
    close(log[1]);
    daemon_log = fdopen(log[0], "r");
    do
        if (fgets(line, sizeof(line), daemon_log) == NULL)
            fail_msg("the daemon did not start");
    while (strstr(line, "listening at") == NULL);
}

void dkv_test_stop_daemon(int signal_number)
{
    int status;
    kill(dkv_test_daemon_pid, signal_number);
    assert_int_equal(waitpid(dkv_test_daemon_pid, &status, 0), dkv_test_daemon_pid);
    fclose(daemon_log);
    if (signal_number == SIGTERM)
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int dkv_test_begin(const char *daemon)
{
    program = daemon;
    if (mkdtemp(folder) == NULL)
        return -1;
    snprintf(path, sizeof(path), "%s/run/s", folder);
    snprintf(dkv_test_endpoint, sizeof(dkv_test_endpoint), "unix://%s", path);
    dkv_test_start_daemon();
    return 0;
}

int dkv_test_end(void **unused)
{
    (void)unused;
    char directory[64];
    dkv_test_stop_daemon(SIGTERM);
    snprintf(directory, sizeof(directory), "%s/run", folder);
    return rmdir(directory) != 0 || rmdir(folder) != 0; /* the socket is gone */
}
