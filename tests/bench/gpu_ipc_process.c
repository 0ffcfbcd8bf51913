/* The other processes of bench_gpu_ipc, daemons and one that keeps the GPU full, and its clock. */
#include "tests/bench/gpu_ipc.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/bench_kernels.h"

void bench_die(const char *what, const char *why)
{
    fprintf(stderr, "bench_gpu_ipc: %s: %s\n", what, why);
    exit(1);
}

double bench_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_quantile(struct bench_times *times, double q)
{
    if (times->n == 0)
        return 0;
    qsort(times->us, times->n, sizeof(double), ascending);
    return times->us[(size_t)(q * (double)(times->n - 1))];
}

void bench_daemon_start(struct bench_daemon *server, const char *program, const char *path,
                        const char *option, const char *value)
{
    int log[2];
    char line[512];
    snprintf(server->endpoint, sizeof(server->endpoint), "unix://%s", path);
    if (pipe(log) != 0)
        bench_die("pipe", "no descriptors");
    server->pid = fork(); /* before this process has a context */
    if (server->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM);
        dup2(log[1], STDERR_FILENO);
        close(log[0]);
        close(log[1]);
        execl(program, program, "--http", "off", "--device", "cuda:0", "--socket", path, option,
              value, (char *)NULL);
        _exit(127);
    }
    close(log[1]);
    FILE *text = fdopen(log[0], "r");
    do
        if (text == NULL || fgets(line, sizeof(line), text) == NULL) {
            printf("skipped: the daemon did not start: %s\n", line);
            exit(77);
        }
    while (strstr(line, "listening at") == NULL);
    fclose(text); /* later lines are of no interest; a daemon ignores SIGPIPE */
}

void bench_daemon_stop(const struct bench_daemon *server)
{
    kill(server->pid, SIGTERM);
    waitpid(server->pid, NULL, 0);
}

double bench_cpu_us(pid_t pid)
{
    char path[64], text[1024];
    unsigned long user = 0, kernel = 0;
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return 0;
    const size_t n = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[n] = '\0';
    const char *rest = strrchr(text, ')');
    if (rest == NULL || sscanf(rest + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
                               &user, &kernel) != 2)
        return 0;
    return (double)(user + kernel) * 1e6 / (double)sysconf(_SC_CLK_TCK);
}

pid_t bench_worker_of(const struct bench_daemon *server)
{
    char path[96];
    int pid = 0;
    snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)server->pid, (int)server->pid);
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        if (fscanf(file, "%d", &pid) != 1)
            pid = 0;
        fclose(file);
    }
    return pid;
}

pid_t bench_hog_start(int *go_out)
{
    int ready[2];
    char byte;
    if (pipe(ready) != 0)
        bench_die("pipe", "no descriptors");
    const pid_t pid = fork(); /* before this process has a context */
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (read(ready[0], &byte, 1) != 1)
            _exit(0);
        bench_hog();
        _exit(1);
    }
    close(ready[0]);
    *go_out = ready[1];
    return pid;
}
