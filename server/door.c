/* Accepting and peeking.
 *
 * Peeking leaves the bytes in the socket, so a level-triggered poll would fire for ever on half a
 * header. SO_RCVLOWAT raises what counts as readable to one byte more than was seen, which makes it
 * fire once per arrival. Most headers arrive whole: those guests are never polled at all.
 *
 * Where no further connection may or can be taken (the limit, or no descriptor left), the listening
 * socket is not polled for a while: the kernel's backlog holds who comes meanwhile.
 */
#include "server/door.h"

#include "server/clock.h"
#include "server/http_scan.h"
#include "server/raw_reply.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define ACCEPTS_PER_WAKE 64
#define SWEEP_MS         50
#define PEEK_BYTES       (DKV_HTTP_HEAD_BYTES_MAX + 1024u)

struct guest {
    struct guest *next, *prev;
    struct dkv_door *door;
    uv_poll_t poll;
    bool polled; /* `poll` is open */
    int fd;
    ssize_t n_seen; /* bytes at the last look */
    uint64_t since_ms;
    struct sockaddr_storage address;
    socklen_t address_bytes;
};

struct dkv_door {
    uv_loop_t *loop;
    uv_poll_t poll;
    uv_timer_t timer; /* runs while somebody waits, inside or outside */
    unsigned n_open;  /* of these two handles */
    int listen_fd;
    bool listening;
    struct dkv_door_config config;
    struct dkv_door_calls calls;
    struct dkv_linger_set lingering;
    struct guest *first;
    unsigned n_guests;
    char peeked[PEEK_BYTES];
};

static void free_guest(uv_handle_t *handle)
{
    free(handle->data);
}

/* Forgets a guest; its socket is the caller's. */
static int dismiss(struct guest *guest)
{
    struct dkv_door *door = guest->door;
    const int fd = guest->fd;
    if (guest->prev != NULL)
        guest->prev->next = guest->next;
    else
        door->first = guest->next;
    if (guest->next != NULL)
        guest->next->prev = guest->prev;
    door->n_guests--;
    if (guest->polled)
        uv_close((uv_handle_t *)&guest->poll, free_guest);
    else
        free(guest);
    return fd;
}

static void send_away(struct guest *guest, unsigned http_status, enum dkv_refusal reason,
                      const char *text)
{
    struct dkv_door *door = guest->door;
    const int fd = dismiss(guest);
    door->calls.refused(door->calls.owner, reason, text);
    if (dkv_raw_reply(fd, http_status, text))
        dkv_linger_add(&door->lingering, door->loop, fd);
    close(fd);
}

static void let_in(struct guest *guest)
{
    struct dkv_door *door = guest->door;
    const int one = 1;
    const struct sockaddr_storage address = guest->address;
    const socklen_t address_bytes = guest->address_bytes;
    if (guest->polled)
        setsockopt(guest->fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one));
    const int fd = dismiss(guest);
    door->calls.welcome(door->calls.owner, fd, (const struct sockaddr *)&address, address_bytes);
}

static void look(struct guest *guest);
static void on_timer(uv_timer_t *timer);

static void start_timer(struct dkv_door *door)
{
    if (!uv_is_active((uv_handle_t *)&door->timer))
        uv_timer_start(&door->timer, on_timer, SWEEP_MS, SWEEP_MS);
}

static void on_guest(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    look(poll->data);
}

static void wait_for_more(struct guest *guest, ssize_t n_seen)
{
    const int low_water = (int)n_seen + 1;
    guest->n_seen = n_seen;
    setsockopt(guest->fd, SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof(low_water));
    if (guest->polled)
        return;
    if (uv_poll_init(guest->door->loop, &guest->poll, guest->fd) != 0) {
        close(dismiss(guest));
        return;
    }
    guest->poll.data = guest;
    guest->polled = true;
    uv_poll_start(&guest->poll, UV_READABLE, on_guest);
    start_timer(guest->door);
}

static void look(struct guest *guest)
{
    struct dkv_door *door = guest->door;
    struct dkv_http_verdict verdict;
    char *bytes = door->peeked;
    const ssize_t n = recv(guest->fd, bytes, PEEK_BYTES, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        wait_for_more(guest, guest->n_seen);
        return;
    }
    /* Readable without anything new: the peer has closed in the middle. */
    if (n <= guest->n_seen) {
        close(dismiss(guest));
        return;
    }
    switch (dkv_http_scan(bytes, (size_t)n, &verdict)) {
    case DKV_HTTP_SCAN_GOOD: let_in(guest); break;
    case DKV_HTTP_SCAN_MORE: wait_for_more(guest, n); break;
    case DKV_HTTP_SCAN_BAD:
        send_away(guest, verdict.http_status, verdict.reason, verdict.text);
        break;
    }
}

enum accepted { ACCEPTED, NOBODY, NO_ROOM };

static bool has_room(const struct dkv_door *door)
{
    return door->n_guests + door->calls.n_inside(door->calls.owner) < door->config.max_connections;
}

static enum accepted accept_one(struct dkv_door *door)
{
    if (!has_room(door)) {
        door->calls.make_room(door->calls.owner);
        return NO_ROOM;
    }
    struct guest *guest = calloc(1, sizeof(*guest));
    if (guest == NULL)
        return NO_ROOM;
    guest->address_bytes = sizeof(guest->address);
    guest->fd = accept4(door->listen_fd, (struct sockaddr *)&guest->address, &guest->address_bytes,
                        SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (guest->fd < 0) {
        const int why = errno;
        free(guest);
        return why == EMFILE || why == ENFILE || why == ENOBUFS || why == ENOMEM ? NO_ROOM : NOBODY;
    }
    guest->door = door;
    guest->since_ms = dkv_clock_ms();
    guest->next = door->first;
    if (guest->next != NULL)
        guest->next->prev = guest;
    door->first = guest;
    door->n_guests++;
    look(guest);
    return ACCEPTED;
}

static void on_listen(uv_poll_t *poll, int status, int events)
{
    struct dkv_door *door = poll->data;
    enum accepted accepted = ACCEPTED;
    (void)status;
    (void)events;
    for (int i = 0; i < ACCEPTS_PER_WAKE && accepted == ACCEPTED; i++)
        accepted = accept_one(door);
    if (accepted == NO_ROOM) {
        uv_poll_stop(&door->poll);
        door->listening = false;
        start_timer(door);
    }
}

void dkv_door_room(struct dkv_door *door)
{
    if (door->listening || !has_room(door))
        return;
    door->listening = true;
    uv_poll_start(&door->poll, UV_READABLE, on_listen);
}

static void on_timer(uv_timer_t *timer)
{
    struct dkv_door *door = timer->data;
    const uint64_t now_ms = dkv_clock_ms();
    for (struct guest *guest = door->first, *next; guest != NULL; guest = next) {
        next = guest->next;
        if (now_ms - guest->since_ms > door->config.header_timeout_ms)
            send_away(guest, 408, DKV_REFUSAL_HEADER_TIME, "the header arrived too slowly");
    }
    /* Whoever made us stop is waiting still; what was busy then may be idle now. */
    if (!door->listening && !has_room(door))
        door->calls.make_room(door->calls.owner);
    dkv_door_room(door);
    if (door->first == NULL && door->listening)
        uv_timer_stop(timer);
}

struct dkv_door *dkv_door_open(uv_loop_t *loop, int listen_fd, const struct dkv_door_config *config,
                               const struct dkv_door_calls *calls)
{
    struct dkv_door *door = calloc(1, sizeof(*door));
    if (door == NULL || uv_poll_init(loop, &door->poll, listen_fd) != 0) {
        free(door);
        return NULL;
    }
    uv_timer_init(loop, &door->timer);
    door->poll.data = door;
    door->timer.data = door;
    door->n_open = 2;
    door->loop = loop;
    door->listen_fd = listen_fd;
    door->config = *config;
    door->calls = *calls;
    dkv_door_room(door);
    return door;
}

static void free_door(uv_handle_t *handle)
{
    struct dkv_door *door = handle->data;
    if (--door->n_open > 0)
        return;
    close(door->listen_fd);
    free(door);
}

void dkv_door_configure(struct dkv_door *door, const struct dkv_door_config *config)
{
    door->config = *config;
    dkv_door_room(door);
}

void dkv_door_close(struct dkv_door *door)
{
    if (door == NULL)
        return;
    while (door->first != NULL)
        close(dismiss(door->first));
    dkv_linger_close_all(&door->lingering);
    uv_close((uv_handle_t *)&door->poll, free_door);
    uv_close((uv_handle_t *)&door->timer, free_door);
}
