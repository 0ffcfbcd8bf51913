/* What a worker is told.
 *
 * Sending never blocks: a worker that does not read must not stop the front. What does not fit
 * into the socket waits in a list.
 */
#include "server/worker_priv.h"

#include "server/clock.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

void dkv_worker_drop_outgoing(struct dkv_worker *worker)
{
    while (worker->first != NULL) {
        struct dkv_worker_outgoing *out = worker->first;
        worker->first = out->next;
        if (out->fd >= 0)
            close(out->fd);
        free(out);
    }
    worker->last = &worker->first;
}

/* A send failed because the worker has to read first: its socket is full, or as many descriptors
 * are on their way as this user may have open. */
static bool lacks_room(void)
{
    return errno == EAGAIN || errno == ETOOMANYREFS;
}

void dkv_worker_flush(struct dkv_worker *worker)
{
    while (worker->first != NULL) {
        struct dkv_worker_outgoing *out = worker->first;
        if (!dkv_link_send(worker->link->fd, &out->msg, out->fd) && lacks_room())
            break;
        worker->first = out->next;
        if (worker->first == NULL)
            worker->last = &worker->first;
        if (out->fd >= 0)
            close(out->fd);
        free(out);
    }
    uv_poll_start(&worker->link->poll, UV_READABLE | (worker->first != NULL ? UV_WRITABLE : 0),
                  dkv_worker_on_link);
}

/* An error other than lack of room is the end of the link, which dkv_worker_on_link() will see. */
static void send_message(struct dkv_worker *worker, const struct dkv_link_msg *msg, int fd)
{
    assert(worker->up);
    if (worker->first == NULL && (dkv_link_send(worker->link->fd, msg, fd) || !lacks_room()))
        return;
    struct dkv_worker_outgoing *out = malloc(sizeof(*out));
    const int own = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (out == NULL || (fd >= 0 && own < 0)) {
        free(out);
        kill(worker->pid, SIGKILL); /* it would wait for ever: start again with an empty link */
        return;
    }
    *out = (struct dkv_worker_outgoing){NULL, *msg, own};
    *worker->last = out;
    worker->last = &out->next;
    dkv_worker_flush(worker);
}

void dkv_worker_launch(struct dkv_worker *worker, struct dkv_run *run)
{
    const unsigned slot = (unsigned)(run - worker->runs);
    if (dkv_worker_n_in_flight(worker) == 1) /* this one */
        worker->since_ms = dkv_clock_ms();
    if (!uv_is_active((uv_handle_t *)&worker->watch))
        dkv_worker_watch(worker);
    struct dkv_link_msg msg = {.type = DKV_LINK_RUN};
    for (unsigned i = 0; i < run->n_parts; i++)
        worker->tables[slot][i] = dkv_arena_offset(worker->arena, run->parts[i].descriptor);
    msg.run = (struct dkv_link_run){
        .slot = slot,
        .n_jobs = run->n_parts,
        .jobs = dkv_arena_offset(worker->arena, worker->tables[slot]),
        .more = run->batch->backlog,
    };
    send_message(worker, &msg, -1);
}

void dkv_worker_attach(struct dkv_worker *worker, const struct dkv_loan *loan)
{
    struct dkv_link_msg msg = {.type = DKV_LINK_ATTACH, .number = loan->number};
    msg.loan = (struct dkv_link_loan){
        .offset = loan->offset,
        .bytes = loan->bytes,
        .memory = loan->memory,
        .loose = loan->loose,
        .writable = loan->writable,
        .n_chunks = loan->n_chunks,
        .key = loan->key,
    };
    send_message(worker, &msg, loan->fd);
    for (uint32_t i = 0; i < loan->n_chunks; i++) {
        msg = (struct dkv_link_msg){.type = DKV_LINK_CHUNK, .number = loan->number};
        msg.chunk = (struct dkv_link_chunk){loan->chunks[i].offset, loan->chunks[i].bytes};
        send_message(worker, &msg, loan->chunks[i].fd);
    }
}

void dkv_worker_detach(struct dkv_worker *worker, const struct dkv_loan *loan)
{
    const struct dkv_link_msg msg = {.type = DKV_LINK_DETACH, .number = loan->number};
    send_message(worker, &msg, -1);
}

bool dkv_worker_pulse(struct dkv_worker *worker)
{
    const struct dkv_link_msg ping = {.type = DKV_LINK_PING};
    const bool busy = dkv_worker_n_in_flight(worker) > 0;
    const bool moved = worker->heard ||
                       (busy && dkv_clock_ms() - worker->since_ms < dkv_worker_patience_ms(worker));
    worker->heard = false;
    if (!busy)
        send_message(worker, &ping, -1);
    return moved;
}

void dkv_worker_hangup(const struct dkv_worker *worker)
{
    if (worker->up)
        kill(worker->pid, SIGHUP);
}
