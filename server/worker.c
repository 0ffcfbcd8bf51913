/* The life of a worker process, seen from the front.
 *
 *   spawn --START--> starting --UP--> up --end of link--> pause --timer--> spawn ...
 *
 * The end of the link is the end of the worker: the kernel closes it however the process ended, and
 * much sooner than a driver has cleaned up behind it, which is why the next one is started without
 * waiting for the old one to be reaped. A worker that still lives when its link has failed is
 * killed, so that no two ever write to one arena.
 */
#include "server/worker_priv.h"

#include "server/clock.h"
#include "server/log.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- how processes end and begin again ---- */

static void on_restart(uv_timer_t *timer);

static bool can_fall_back(const struct dkv_worker *worker)
{
    return worker->config->fallback_cpu && strcmp(worker->device, "cpu") != 0;
}

static void fall_back(struct dkv_worker *worker, const char *why)
{
    dkv_log(DKV_LOG_ERROR,
            "device %s is given up (%s): the CPU computes in its place, far more slowly",
            worker->device, why);
    snprintf(worker->device, sizeof(worker->device), "cpu");
    worker->fallback = true;
    worker->n_deaths = 0;
}

/* The pause before the next start. */
static uint64_t pause_ms(const struct dkv_worker *worker)
{
    static const unsigned short pauses[] = {0, 0, 50, 200, 500, 1000};
    const unsigned last = sizeof(pauses) / sizeof(pauses[0]) - 1;
    if (worker->given_up)
        return DKV_WORKER_RETRY_MS;
    return pauses[worker->n_deaths < last ? worker->n_deaths : last];
}

static void lose(struct dkv_worker *worker, const char *why)
{
    const bool was_given_up = worker->given_up;
    worker->n_deaths++;
    if (worker->n_deaths >= worker->config->worker_deaths && can_fall_back(worker))
        fall_back(worker, "its worker ended again and again");
    worker->given_up = worker->n_deaths >= worker->config->worker_deaths;
    const uint64_t wait_ms = pause_ms(worker);
    dkv_log(worker->given_up ? DKV_LOG_ERROR : DKV_LOG_WARN,
            "the worker of device %s %s%s; another one starts in %llu ms", worker->device, why,
            worker->given_up && !was_given_up ? " again and again: the device is given up" : "",
            (unsigned long long)wait_ms);
    dkv_worker_drop(worker);
    uv_timer_start(&worker->timer, on_restart, wait_ms, 0);
    worker->calls.lost(worker->calls.owner, worker->index, worker->given_up);
}

static void on_restart(uv_timer_t *timer)
{
    struct dkv_worker *worker = timer->data;
    struct dkv_error err = {0};
    worker->n_restarts++;
    if (dkv_worker_start(worker, &err) != DKV_OK)
        lose(worker, err.text);
}

/* ---- receiving ---- */

static void on_up(struct dkv_worker *worker, const struct dkv_engine_info *info)
{
    dkv_log(DKV_LOG_INFO, "the worker of device %s is up: process %d", worker->device,
            (int)worker->pid);
    worker->up = true;
    worker->heard = true;
    worker->given_up = false;
    worker->since_ms = dkv_clock_ms();
    uv_timer_stop(&worker->watch);
    worker->calls.up(worker->calls.owner, worker->index, info);
}

static void on_done(struct dkv_worker *worker, const struct dkv_link_done *done)
{
    assert(done->slot < DKV_ADMISSION_FLIGHT_MAX);
    struct dkv_run *run = &worker->runs[done->slot];
    worker->n_deaths = 0;
    worker->since_ms = dkv_clock_ms();
    run->started_ns = done->started_ns;
    run->finished_ns = done->finished_ns;
    worker->calls.done(worker->calls.owner, worker->index, run, done->scratch_bytes);
}

static void take(struct dkv_worker *worker, const struct dkv_link_msg *msg)
{
    const struct dkv_worker_calls *calls = &worker->calls;
    worker->heard = true;
    switch (msg->type) {
    case DKV_LINK_UP: on_up(worker, &msg->up); break;
    case DKV_LINK_DONE: on_done(worker, &msg->done); break;
    case DKV_LINK_ATTACHED:
        calls->attached(calls->owner, worker->index, msg->number, &msg->error);
        break;
    case DKV_LINK_DETACHED: calls->detached(calls->owner, worker->index, msg->number); break;
    case DKV_LINK_PONG: break;
    case DKV_LINK_FAILED: /* the end of the link follows */
        dkv_log(DKV_LOG_ERROR, "device %s: %s", worker->device, msg->error.text);
        break;
    default: assert(false);
    }
}

void dkv_worker_on_link(uv_poll_t *poll, int status, int events)
{
    struct dkv_worker_link *link = poll->data;
    struct dkv_worker *worker = link->worker;
    (void)status;
    if (events & UV_WRITABLE)
        dkv_worker_flush(worker);
    while (worker->link == link) {
        struct dkv_link_msg msg;
        int fd;
        const int got = dkv_link_receive(link->fd, false, &msg, &fd);
        if (got < 0)
            return; /* nothing now */
        if (got == 0) {
            lose(worker, "has ended");
            return;
        }
        if (fd >= 0)
            close(fd);
        take(worker, &msg);
        if (msg.type == DKV_LINK_DONE && dkv_worker_n_in_flight(worker) == 0)
            return; /* nothing is due: what comes all the same wakes us */
    }
}

/* ---- open and close ---- */

static void on_child_signal(uv_signal_t *handle, int number)
{
    (void)number;
    dkv_worker_reap(handle->data, false);
}

static void free_worker(uv_handle_t *handle)
{
    struct dkv_worker *worker = handle->data;
    if (--worker->n_open_handles > 0)
        return;
    for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++)
        dkv_arena_free(worker->arena, worker->tables[i], worker->table_bytes, worker->table_bytes);
    free(worker);
}

void dkv_worker_close(struct dkv_worker *worker)
{
    if (worker == NULL)
        return;
    dkv_worker_drop(worker);
    dkv_worker_reap(worker, true);
    uv_close((uv_handle_t *)&worker->timer, free_worker);
    uv_close((uv_handle_t *)&worker->watch, free_worker);
    uv_close((uv_handle_t *)&worker->child_signal, free_worker);
}

/* Waits for the answer to START, while nothing else runs. */
static enum dkv_status wait_until_up(struct dkv_worker *worker, struct dkv_error *err)
{
    struct pollfd ready = {.fd = worker->link->fd, .events = POLLIN};
    struct dkv_link_msg msg;
    int fd, got = 0, n;
    do
        n = poll(&ready, 1, DKV_WORKER_START_MS);
    while (n < 0 && errno == EINTR);
    if (n > 0)
        got = dkv_link_receive(worker->link->fd, false, &msg, &fd);
    if (got > 0 && msg.type == DKV_LINK_UP) {
        on_up(worker, &msg.up);
        return DKV_OK;
    }
    if (got > 0 && msg.type == DKV_LINK_FAILED) {
        *err = msg.error;
        return msg.status;
    }
    return dkv_error_set(err, DKV_E_UNSUPPORTED, "device %.40s: its worker %s", worker->device,
                         n > 0 ? "ended while it started" : "did not start in time");
}

static enum dkv_status start_and_wait(struct dkv_worker *worker, struct dkv_error *err)
{
    enum dkv_status status = dkv_worker_start(worker, err);
    if (status == DKV_OK)
        status = wait_until_up(worker, err);
    if (status != DKV_OK)
        dkv_worker_drop(worker);
    return status;
}

static bool make_tables(struct dkv_worker *worker)
{
    worker->table_bytes = worker->config->max_batch_items * sizeof(uint64_t);
    for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++) {
        worker->tables[i] = dkv_arena_alloc(worker->arena, worker->table_bytes);
        if (worker->tables[i] == NULL)
            return false;
    }
    return true;
}

enum dkv_status dkv_worker_open(const struct dkv_config *config, const char *device, unsigned index,
                                uv_loop_t *loop, struct dkv_arena *arena, struct dkv_run *runs,
                                const struct dkv_worker_calls *calls,
                                struct dkv_worker **worker_out, struct dkv_error *err)
{
    struct dkv_error why = {0};
    struct dkv_worker *worker = calloc(1, sizeof(*worker));
    if (worker == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a worker");
    worker->config = config;
    worker->calls = *calls;
    worker->index = index;
    worker->loop = loop;
    worker->arena = arena;
    worker->runs = runs;
    worker->last = &worker->first;
    snprintf(worker->device, sizeof(worker->device), "%s", device);
    uv_timer_init(loop, &worker->timer);
    uv_signal_init(loop, &worker->child_signal);
    uv_timer_init(loop, &worker->watch);
    worker->timer.data = worker;
    worker->watch.data = worker;
    worker->child_signal.data = worker;
    worker->n_open_handles = 3;
    uv_signal_start(&worker->child_signal, on_child_signal, SIGCHLD);

    enum dkv_status status = make_tables(worker)
                                 ? start_and_wait(worker, &why)
                                 : dkv_error_set(&why, DKV_E_NOMEM, "no memory for a worker");
    if (status != DKV_OK && can_fall_back(worker)) {
        fall_back(worker, why.text);
        status = start_and_wait(worker, &why);
    }
    if (status == DKV_OK) {
        *worker_out = worker;
        return DKV_OK;
    }
    if (err != NULL)
        *err = why;
    dkv_worker_close(worker);
    return status;
}

void dkv_worker_facts(const struct dkv_worker *worker, struct dkv_worker_facts *facts_out)
{
    *facts_out = (struct dkv_worker_facts){
        .device = worker->device,
        .fallback = worker->fallback,
        .given_up = worker->given_up,
        .restarts = worker->n_restarts,
        .pid = worker->pid,
    };
}
