/* Starts and stops the daemon that the benches of the local socket ask. */
#include "tests/bench/socket_daemon.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void give_up(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

void socket_daemon_start(struct socket_daemon *daemon, const char *program)
{
    int log[2];
    char line[512] = "", path[64];
    snprintf(daemon->folder, sizeof(daemon->folder), "/tmp/dropkv-bench-XXXXXX");
    if (mkdtemp(daemon->folder) == NULL || pipe(log) != 0)
        give_up("folder", "none");
    snprintf(path, sizeof(path), "%s/s", daemon->folder);
    snprintf(daemon->endpoint, sizeof(daemon->endpoint), "unix://%s", path);
    daemon->pid = fork();
    if (daemon->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        dup2(log[1], STDERR_FILENO);
        execl(program, program, "--http", "off", "--socket", path, "--threads", "1", (char *)NULL);
        _exit(127);
    }
    close(log[1]);
    FILE *text = fdopen(log[0], "r"); /* stays open: what it logs later must go somewhere */
    do
        if (text == NULL || fgets(line, sizeof(line), text) == NULL)
            give_up("the daemon did not start", line);
    while (strstr(line, "listening at") == NULL);
}

void socket_daemon_stop(const struct socket_daemon *daemon)
{
    kill(daemon->pid, SIGTERM);
    waitpid(daemon->pid, NULL, 0);
    rmdir(daemon->folder);
}

double bench_clock_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}
