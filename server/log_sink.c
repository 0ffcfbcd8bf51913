/* Where lines go: a descriptor, or the journal's socket.
 *
 * A line leaves in one write() or datagram, which keeps lines whole when threads log at once; a
 * pipe, file or journal that cannot take it loses that line rather than stalling the loop. A file
 * is reopened over the very same descriptor, so that a thread in the middle of a line cannot find
 * it closed.
 *
 * To the journal goes its native protocol rather than lines with a priority in front: only there do
 * stream, request and times become fields that `journalctl DROPKV_STREAM=chat-7` finds. It is one
 * datagram of NAME=value lines, so no library is needed for it. It is sent by name each time, since
 * a connected socket would not survive a restart of the journal.
 */
#include "server/log_priv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static struct {
    enum dkv_log_format format;
    int fd;
    bool priority; /* standard error leads to the journal */
    bool is_file;
    char path[DKV_LOG_PATH_BYTES]; /* of a file, to open it again */
    struct sockaddr_un journal;
} sink = {.format = DKV_LOG_TEXT, .fd = STDERR_FILENO};

static _Atomic uint64_t n_lost;

/* systemd says in $JOURNAL_STREAM which device and inode it gave us. */
static bool leads_to_journal(int fd)
{
    unsigned long long device, inode;
    struct stat info;
    const char *text = getenv("JOURNAL_STREAM");
    return text != NULL && sscanf(text, "%llu:%llu", &device, &inode) == 2 &&
           fstat(fd, &info) == 0 && info.st_dev == device && info.st_ino == inode;
}

void dkv_log_sink_use(enum dkv_log_format format, int fd)
{
    sink.format = format;
    sink.fd = fd;
    sink.is_file = false;
    sink.priority = format == DKV_LOG_TEXT && leads_to_journal(fd);
}

static enum dkv_status open_journal(const char *path, struct dkv_error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(address.sun_path))
        return dkv_error_set(err, DKV_E_INVALID,
                             "log_file: %zu characters, the name of a journal's socket has at "
                             "most %zu",
                             strlen(path), sizeof(address.sun_path) - 1);
    strcpy(address.sun_path, path);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || access(path, W_OK) != 0) {
        dkv_error_set(err, DKV_E_IO, "log_file: no journal takes messages at %.108s: %s", path,
                      strerror(errno));
        if (fd >= 0)
            close(fd);
        return DKV_E_IO;
    }
    dkv_log_sink_use(DKV_LOG_JOURNALD, fd);
    sink.journal = address;
    return DKV_OK;
}

static int open_file(const char *path)
{
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0640);
}

enum dkv_status dkv_log_open(enum dkv_log_format format, enum dkv_log_level level, const char *path,
                             struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    if (strlen(path) >= sizeof(sink.path))
        return dkv_error_set(err, DKV_E_INVALID, "log_file: %zu characters, at most %zu",
                             strlen(path), sizeof(sink.path) - 1);
    if (format == DKV_LOG_JOURNALD) {
        status = open_journal(*path != '\0' ? path : DKV_LOG_JOURNAL_SOCKET, err);
    } else if (*path == '\0') {
        dkv_log_sink_use(format, STDERR_FILENO);
    } else {
        const int fd = open_file(path);
        if (fd < 0)
            return dkv_error_set(err, DKV_E_IO, "log_file: cannot open %.120s: %s", path,
                                 strerror(errno));
        dkv_log_sink_use(format, fd);
        sink.is_file = true;
        strcpy(sink.path, path);
    }
    if (status == DKV_OK)
        dkv_log_set_level(level);
    return status;
}

/* Only what a signal handler may call. */
bool dkv_log_reopen(void)
{
    if (!sink.is_file)
        return true;
    const int saved = errno;
    const int fd = open_file(sink.path);
    bool ok = fd >= 0 && dup3(fd, sink.fd, O_CLOEXEC) >= 0;
    if (fd >= 0)
        close(fd);
    errno = ok ? saved : errno;
    return ok;
}

void dkv_log_sink_write(const struct dkv_log_event *event)
{
    char line[DKV_LOG_LINE_BYTES];
    const size_t n = dkv_log_line(event, sink.format, sink.priority, line);
    const ssize_t sent = sink.format == DKV_LOG_JOURNALD
                             ? sendto(sink.fd, line, n, MSG_NOSIGNAL | MSG_DONTWAIT,
                                      (const struct sockaddr *)&sink.journal, sizeof(sink.journal))
                             : write(sink.fd, line, n);
    if (sent != (ssize_t)n)
        n_lost++; /* nowhere left to say so but /metrics */
}

uint64_t dkv_log_n_lost(void)
{
    return n_lost;
}
