/* One timerfd for all fences, since libuv's timers count milliseconds. Each has a pace of its own,
 * so that those who wait for long cost no more when others come: 50 us for the first millisecond,
 * then a twentieth of the time waited, up to 1 ms.
 *
 * However many wait, the loop has others to serve: one turn looks at CROWD of them at most, the
 * next ones come a while later, and so each of a great many is looked at more rarely.
 *
 * The slot is read by pread(), since the front maps no memory of clients. The kernel may copy the
 * eight bytes in pieces, so a value counts when it was seen twice: the second read is not torn by
 * the store that tore the first.
 */
#include "server/fence.h"

#include "server/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define PAUSE_MIN_NS 50000u
#define PAUSE_MAX_NS 1000000u
#define PAUSE_SHARE  20u
#define CROWD        256u    /* fences of one turn: some 0.1 ms of system calls */
#define CROWD_NS     256000u /* until the next turn, where there are more */

struct dkv_fences {
    uv_poll_t poll;
    int timer_fd;
    struct dkv_list waiting;
    uint64_t due_ns; /* the timer's; 0: it is off */
    bool crowded;    /* more waited in the last turn than it had looks */
};

/* Off with a pause of 0. */
static void set_timer(struct dkv_fences *fences, uint64_t now_ns, uint64_t pause_ns)
{
    const struct itimerspec spec = {.it_value.tv_nsec = (long)pause_ns};
    fences->due_ns = pause_ns > 0 ? now_ns + pause_ns : 0;
    timerfd_settime(fences->timer_fd, 0, &spec, NULL);
}

static uint64_t pause_after(uint64_t waited_ns)
{
    const uint64_t share_ns = waited_ns / PAUSE_SHARE;
    return share_ns < PAUSE_MIN_NS   ? PAUSE_MIN_NS
           : share_ns > PAUSE_MAX_NS ? PAUSE_MAX_NS
                                     : share_ns;
}

bool dkv_fence_reached(struct dkv_fence *fence, struct dkv_error *err)
{
    *err = (struct dkv_error){0};
    for (int i = 0; i < 2; i++) {
        uint64_t now = 0;
        if (dkv_region_read(fence->region, fence->offset, &now, sizeof(now), err) != DKV_OK ||
            now < fence->value)
            return false;
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return true;
}

/* Looks at one fence; it leaves the set if it is decided. */
static void look(struct dkv_fence *fence, uint64_t now_ns)
{
    struct dkv_error err;
    enum dkv_status status = DKV_OK;
    if (!dkv_fence_reached(fence, &err)) {
        if (err.status == DKV_OK && now_ns < fence->deadline_ns) {
            fence->next_ns = now_ns + pause_after(now_ns - fence->since_ns);
            return;
        }
        status = err.status != DKV_OK
                     ? err.status
                     : dkv_error_set(&err, DKV_E_TIMEOUT,
                                     "fence: the producer did not reach %llu before the deadline",
                                     (unsigned long long)fence->value);
    }
    dkv_list_remove(&fence->node);
    fence->ready(fence, status, &err);
}

/* ready() may end other requests and with them their fences, so the walk takes them from a list of
 * its own. They come behind the others then, whose turn is the next. */
uint64_t dkv_fences_look(struct dkv_fences *fences, uint64_t now_ns)
{
    struct dkv_list turn;
    struct dkv_list *node;
    uint64_t next_ns = UINT64_MAX;
    dkv_list_init(&turn);
    for (unsigned n = 0; n < CROWD && (node = dkv_list_first(&fences->waiting)) != NULL; n++) {
        dkv_list_remove(node);
        dkv_list_push_back(&turn, node);
    }
    fences->crowded = !dkv_list_empty(&fences->waiting);
    while ((node = dkv_list_first(&turn)) != NULL) {
        struct dkv_fence *fence = DKV_LIST_OF(node, struct dkv_fence, node);
        dkv_list_remove(node);
        dkv_list_push_back(&fences->waiting, node);
        if (fence->next_ns <= now_ns)
            look(fence, now_ns);
    }
    if (fences->crowded)
        return CROWD_NS;
    DKV_LIST_EACH (at, &fences->waiting) {
        const struct dkv_fence *fence = DKV_LIST_OF(at, struct dkv_fence, node);
        next_ns = fence->next_ns < next_ns ? fence->next_ns : next_ns;
    }
    if (next_ns == UINT64_MAX)
        return 0;
    return next_ns > now_ns ? next_ns - now_ns : 1;
}

static void on_timer(uv_poll_t *poll, int status, int events)
{
    struct dkv_fences *fences = poll->data;
    uint64_t n_expired;
    (void)status;
    (void)events;
    if (read(fences->timer_fd, &n_expired, sizeof(n_expired)) < 0 && errno == EAGAIN)
        return;
    const uint64_t now_ns = dkv_clock_ns();
    set_timer(fences, now_ns, dkv_fences_look(fences, now_ns));
}

enum dkv_status dkv_fences_open(uv_loop_t *loop, struct dkv_fences **fences_out,
                                struct dkv_error *err)
{
    struct dkv_fences *fences = calloc(1, sizeof(*fences));
    if (fences == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for fences");
    fences->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (fences->timer_fd < 0) {
        free(fences);
        return dkv_error_set(err, DKV_E_IO, "fences: no timer: %s", strerror(errno));
    }
    dkv_list_init(&fences->waiting);
    if (uv_poll_init(loop, &fences->poll, fences->timer_fd) != 0) {
        close(fences->timer_fd);
        free(fences);
        return dkv_error_set(err, DKV_E_IO, "fences: their timer cannot be polled");
    }
    fences->poll.data = fences;
    uv_poll_start(&fences->poll, UV_READABLE, on_timer);
    *fences_out = fences;
    return DKV_OK;
}

static void on_closed(uv_handle_t *handle)
{
    free(handle->data);
}

void dkv_fences_close(struct dkv_fences *fences)
{
    if (fences == NULL)
        return;
    uv_close((uv_handle_t *)&fences->poll, on_closed);
    close(fences->timer_fd);
}

void dkv_fence_wait(struct dkv_fences *fences, struct dkv_fence *fence)
{
    const uint64_t now_ns = dkv_clock_ns();
    dkv_list_push_back(&fences->waiting, &fence->node);
    fence->since_ns = now_ns;
    fence->next_ns = now_ns + PAUSE_MIN_NS;
    if (fences->due_ns == 0 || (fences->due_ns > fence->next_ns && !fences->crowded))
        set_timer(fences, now_ns, PAUSE_MIN_NS);
}

void dkv_fence_drop(struct dkv_fence *fence)
{
    dkv_list_remove(&fence->node);
}
