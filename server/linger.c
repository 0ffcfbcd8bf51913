/* Reads and throws away until one of the ends named in the header is reached. */
#include "server/linger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

struct dkv_linger {
    struct dkv_linger *next, *prev;
    struct dkv_linger_set *set;
    uv_poll_t poll;
    uv_timer_t timer;
    int fd;
    uint64_t left_bytes;
    unsigned n_open; /* handles not closed yet */
};

static void on_handle_closed(uv_handle_t *handle)
{
    struct dkv_linger *linger = handle->data;
    if (--linger->n_open > 0)
        return;
    close(linger->fd);
    free(linger);
}

static void end(struct dkv_linger *linger)
{
    struct dkv_linger_set *set = linger->set;
    if (linger->prev != NULL)
        linger->prev->next = linger->next;
    else
        set->first = linger->next;
    if (linger->next != NULL)
        linger->next->prev = linger->prev;
    set->n--;
    uv_close((uv_handle_t *)&linger->poll, on_handle_closed);
    uv_close((uv_handle_t *)&linger->timer, on_handle_closed);
}

static void on_time(uv_timer_t *timer)
{
    end(timer->data);
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    static char waste[65536];
    struct dkv_linger *linger = poll->data;
    (void)events;
    /* A few rounds, then the loop's other business. */
    for (int i = 0; i < 16 && status == 0; i++) {
        ssize_t n = recv(linger->fd, waste, sizeof(waste), MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0 || (uint64_t)n >= linger->left_bytes) {
            end(linger);
            return;
        }
        linger->left_bytes -= (uint64_t)n;
    }
    if (status != 0)
        end(linger);
}

void dkv_linger_add(struct dkv_linger_set *set, uv_loop_t *loop, int fd)
{
    if (set->n >= DKV_LINGER_MAX)
        return;
    struct dkv_linger *linger = calloc(1, sizeof(*linger));
    int copy = linger != NULL ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (copy < 0 || uv_poll_init(loop, &linger->poll, copy) != 0) {
        if (copy >= 0)
            close(copy);
        free(linger);
        return;
    }
    shutdown(copy, SHUT_WR);
    uv_timer_init(loop, &linger->timer);
    linger->set = set;
    linger->fd = copy;
    linger->left_bytes = DKV_LINGER_BYTES;
    linger->n_open = 2;
    linger->poll.data = linger;
    linger->timer.data = linger;
    linger->next = set->first;
    if (linger->next != NULL)
        linger->next->prev = linger;
    set->first = linger;
    set->n++;
    uv_poll_start(&linger->poll, UV_READABLE, on_readable);
    uv_timer_start(&linger->timer, on_time, DKV_LINGER_MS, 0);
}

void dkv_linger_close_all(struct dkv_linger_set *set)
{
    while (set->first != NULL)
        end(set->first);
}
