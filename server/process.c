/* Read from /proc, a few reads of a line each. */
#include "server/process.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static double seconds(const struct timeval *time)
{
    return (double)time->tv_sec + (double)time->tv_usec * 1e-6;
}

uint64_t dkv_process_resident_bytes(pid_t pid)
{
    char path[40];
    unsigned long long pages = 0;
    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    FILE *file = pid > 0 ? fopen(path, "re") : NULL;
    if (file == NULL)
        return 0;
    if (fscanf(file, "%*s %llu", &pages) != 1)
        pages = 0;
    fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Clock ticks between the machine's start and this process's: the 22nd field of stat. The second
 * one is the program's name in parentheses, which may hold spaces and parentheses. */
static double start_after_boot_s(void)
{
    char line[1024];
    unsigned long long ticks = 0;
    FILE *file = fopen("/proc/self/stat", "re");
    if (file == NULL)
        return 0;
    const size_t n = fread(line, 1, sizeof(line) - 1, file);
    fclose(file);
    line[n] = '\0';
    const char *rest = strrchr(line, ')');
    if (rest == NULL || sscanf(rest + 1,
                               "%*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                               "%*s %*s %*s %llu",
                               &ticks) != 1)
        return 0;
    return (double)ticks / (double)sysconf(_SC_CLK_TCK);
}

/* Now, minus how long ago it was: whoever sets the clock moves it, once for all who compare. */
static double start_time_s(void)
{
    struct timespec now, up;
    const double start = start_after_boot_s();
    if (start <= 0 || clock_gettime(CLOCK_REALTIME, &now) != 0 ||
        clock_gettime(CLOCK_BOOTTIME, &up) != 0)
        return 0;
    return (double)(now.tv_sec - up.tv_sec) + (double)(now.tv_nsec - up.tv_nsec) * 1e-9 + start;
}

static uint64_t count_fds(void)
{
    uint64_t n = 0;
    DIR *folder = opendir("/proc/self/fd");
    if (folder == NULL)
        return 0;
    while (readdir(folder) != NULL)
        n++;
    closedir(folder);
    return n > 3 ? n - 3 : 0; /* ".", "..", and the folder's own */
}

void dkv_process_facts(struct dkv_process_facts *facts_out)
{
    struct rusage usage = {0};
    struct rlimit limit = {0};
    getrusage(RUSAGE_SELF, &usage);
    getrlimit(RLIMIT_NOFILE, &limit);
    *facts_out = (struct dkv_process_facts){
        .cpu_s = seconds(&usage.ru_utime) + seconds(&usage.ru_stime),
        .start_time_s = start_time_s(),
        .resident_bytes = dkv_process_resident_bytes(getpid()),
        .n_fds = count_fds(),
        .max_fds = limit.rlim_cur,
    };
}
