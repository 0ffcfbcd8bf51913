/* A fixed table of mappings, so that the handler only reads memory that is always there. */
#include "client/cli/guard.h"

#include <signal.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

#define WATCHED_MAX 64u

static struct {
    const uint8_t *volatile begin; /* NULL: a free slot */
    uint64_t bytes;
    const char *path;
} watched[WATCHED_MAX];

static void say(const char *text)
{
    /* Nothing better can be done if standard error is closed. */
    if (write(STDERR_FILENO, text, strlen(text)) < 0)
        return;
}

static void on_sigbus(int signal_number, siginfo_t *info, void *context)
{
    const uint8_t *at = info->si_addr;
    (void)context;
    for (unsigned i = 0; i < WATCHED_MAX; i++) {
        const uint8_t *begin = watched[i].begin;
        if (begin == NULL || at < begin || (uint64_t)(at - begin) >= watched[i].bytes)
            continue;
        say("dropkv-client: ");
        say(watched[i].path);
        say(": could not be read to its end: it shrank while it was being read, or its disk "
            "failed\n");
        _exit(EX_IOERR);
    }
    /* Not ours: let it have its usual effect when the instruction is tried again. */
    signal(signal_number, SIG_DFL);
}

void dkv_guard_add(const struct dkv_tensor_file *file)
{
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    for (unsigned i = 0; i < WATCHED_MAX; i++) {
        if (watched[i].begin != NULL)
            continue;
        watched[i].bytes = file->bytes;
        watched[i].path = file->path;
        watched[i].begin = file->map;
        sigaction(SIGBUS, &action, NULL);
        return;
    }
}

void dkv_guard_remove(const struct dkv_tensor_file *file)
{
    for (unsigned i = 0; i < WATCHED_MAX; i++)
        if (watched[i].begin == file->map)
            watched[i].begin = NULL;
}
