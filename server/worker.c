/* The life of a worker process, seen from the front.
 *
 *   spawn --START--> starting --UP--> up --end of link--> pause --timer--> spawn ...
 *
 * The end of the link is the end of the worker: the kernel closes it however the process ended, and
 * much sooner than a driver has cleaned up behind it, which is why the next one is started without
 * waiting for the old one to be reaped. A worker that still lives when its link has failed is
 * killed, so that no two ever write to one arena.
 *
 * A worker that lives and does not answer is killed too: a batch has worker_stuck_ms, a start
 * START_MS. What it had is treated like that of any other dead worker.
 *
 * Sending never blocks: a worker that does not read must not stop the front. What does not fit
 * into the socket waits in a list.
 */
#include "server/worker.h"

#include "server/clock.h"
#include "server/log.h"
#include "server/spin.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define START_MS    60000
#define ZOMBIES_MAX 8u

extern char **environ;

/* The socket of one process; it is closed with its handle. */
struct link {
    uv_poll_t poll;
    struct dkv_worker *worker;
    int fd;
};

struct outgoing {
    struct outgoing *next;
    struct dkv_link_msg msg;
    int fd; /* our own, or -1 */
};

struct dkv_worker {
    const struct dkv_config *config;
    struct dkv_worker_calls calls;
    uv_loop_t *loop;
    struct dkv_arena *arena;
    struct dkv_run *runs;
    char device[64];
    unsigned index;
    bool fallback;
    bool given_up;

    struct link *link; /* NULL: no process */
    pid_t pid;
    bool up;
    struct outgoing *first, **last; /* messages that wait for room */
    pid_t zombies[ZOMBIES_MAX];
    uv_timer_t timer;  /* until the next start */
    uv_timer_t watch;  /* while an answer is awaited */
    uint64_t since_ms; /* when the oldest batch, or the start, began */
    bool heard;        /* since the last pulse */
    uv_signal_t child_signal;
    unsigned n_open_handles;
    unsigned n_deaths; /* since the last answered batch */
    uint64_t n_restarts;

    uint64_t *tables[DKV_ADMISSION_FLIGHT_MAX]; /* in the arena: what RUN points at */
    uint64_t table_bytes;
};

/* ---- the watch ---- */

static unsigned n_in_flight(const struct dkv_worker *worker)
{
    unsigned n = 0;
    for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++)
        n += worker->runs[i].batch != NULL;
    return n;
}

static uint64_t patience_ms(const struct dkv_worker *worker)
{
    const struct dkv_config *config = worker->config;
    if (!worker->up)
        return START_MS;
    return config->worker_stuck_ms != 0 ? config->worker_stuck_ms : 2 * config->request_timeout_ms;
}

static void watch(struct dkv_worker *worker);

static void on_watch(uv_timer_t *timer)
{
    struct dkv_worker *worker = timer->data;
    if (worker->link == NULL || (worker->up && n_in_flight(worker) == 0))
        return;
    if (dkv_clock_ms() - worker->since_ms < patience_ms(worker)) {
        watch(worker);
        return;
    }
    dkv_log(DKV_LOG_ERROR, "the worker of device %s has not answered for %llu ms: it is killed",
            worker->device, (unsigned long long)patience_ms(worker));
    kill(worker->pid, SIGKILL); /* the link ends, and on_link() goes on from there */
}

/* Looks again when the patience with what is awaited now is over. */
static void watch(struct dkv_worker *worker)
{
    const uint64_t end_ms = worker->since_ms + patience_ms(worker), now_ms = dkv_clock_ms();
    uv_timer_start(&worker->watch, on_watch, end_ms > now_ms ? end_ms - now_ms : 0, 0);
}

/* ---- processes ---- */

static void reap(struct dkv_worker *worker, bool wait)
{
    for (unsigned i = 0; i < ZOMBIES_MAX; i++)
        if (worker->zombies[i] != 0 && waitpid(worker->zombies[i], NULL, wait ? 0 : WNOHANG) != 0)
            worker->zombies[i] = 0;
}

static void on_child_signal(uv_signal_t *handle, int number)
{
    (void)number;
    reap(handle->data, false);
}

/* Ends the process, if it has not ended already, and remembers to reap it. */
static void bury(struct dkv_worker *worker)
{
    if (worker->pid == 0)
        return;
    kill(worker->pid, SIGKILL);
    for (unsigned i = 0; i < ZOMBIES_MAX; i++)
        if (worker->zombies[i] == 0) {
            worker->zombies[i] = worker->pid;
            worker->pid = 0;
            break;
        }
    if (worker->pid != 0)
        waitpid(worker->pid, NULL, 0);
    worker->pid = 0;
    reap(worker, false);
}

static int spawn(const char *device, int link_fd, pid_t *pid_out)
{
    char *const arguments[] = {(char *)"dropkvd", (char *)"--worker", (char *)(uintptr_t)device,
                               NULL};
    posix_spawn_file_actions_t actions;
    int result = posix_spawn_file_actions_init(&actions);
    if (result != 0)
        return result;
    result = posix_spawn_file_actions_adddup2(&actions, link_fd, DKV_LINK_FD);
    if (result == 0)
        result = posix_spawn_file_actions_addclosefrom_np(&actions, DKV_LINK_FD + 1);
    if (result == 0)
        result = posix_spawn(pid_out, "/proc/self/exe", &actions, NULL, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    return result;
}

static void fill_start(const struct dkv_worker *worker, struct dkv_link_msg *msg)
{
    const struct dkv_config *config = worker->config;
    *msg = (struct dkv_link_msg){.type = DKV_LINK_START};
    msg->start = (struct dkv_link_start){
        .arena_bytes = worker->arena->bytes,
        .front_pid = getpid(),
        .threads = (uint32_t)config->threads,
        .max_items = config->max_batch_items > DKV_BLOCKS_MAX ? (uint32_t)config->max_batch_items
                                                              : DKV_BLOCKS_MAX,
        .max_batch_bytes = config->max_batch_bytes,
        .patience_ns = dkv_spin_patience_ns(config),
        .test_hooks = config->test_hooks && !worker->fallback,
    };
    snprintf(msg->start.log_format, sizeof(msg->start.log_format), "%s", config->log_format);
    snprintf(msg->start.log_file, sizeof(msg->start.log_file), "%s", config->log_file);
    snprintf(msg->start.log_level, sizeof(msg->start.log_level), "%s", config->log_level);
    snprintf(msg->start.device, sizeof(msg->start.device), "%s", worker->device);
}

static void on_link(uv_poll_t *poll, int status, int events);

static enum dkv_status start_process(struct dkv_worker *worker, struct dkv_error *err)
{
    int ends[2];
    struct dkv_link_msg start;
    /* Our end alone does not block. */
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0 ||
        fcntl(ends[0], F_SETFL, O_NONBLOCK) != 0)
        return dkv_error_set(err, DKV_E_NOMEM, "worker: no socket: %s", strerror(errno));
    struct link *link = calloc(1, sizeof(*link));
    int why = link == NULL ? ENOMEM : spawn(worker->device, ends[1], &worker->pid);
    close(ends[1]);
    if (why != 0) {
        worker->pid = 0;
        close(ends[0]);
        free(link);
        return dkv_error_set(err, DKV_E_NOMEM, "worker: cannot start: %s", strerror(why));
    }
    *link = (struct link){.worker = worker, .fd = ends[0]};
    uv_poll_init(worker->loop, &link->poll, link->fd);
    link->poll.data = link;
    uv_poll_start(&link->poll, UV_READABLE, on_link);
    worker->link = link;
    fill_start(worker, &start);
    dkv_link_send(link->fd, &start, worker->arena->fd);
    worker->since_ms = dkv_clock_ms();
    watch(worker);
    return DKV_OK;
}

/* ---- sending ---- */

static void drop_outgoing(struct dkv_worker *worker)
{
    while (worker->first != NULL) {
        struct outgoing *out = worker->first;
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

static void flush(struct dkv_worker *worker)
{
    while (worker->first != NULL) {
        struct outgoing *out = worker->first;
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
                  on_link);
}

/* An error other than lack of room is the end of the link, which on_link() will see. */
static void send_message(struct dkv_worker *worker, const struct dkv_link_msg *msg, int fd)
{
    assert(worker->up);
    if (worker->first == NULL && (dkv_link_send(worker->link->fd, msg, fd) || !lacks_room()))
        return;
    struct outgoing *out = malloc(sizeof(*out));
    const int own = fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (out == NULL || (fd >= 0 && own < 0)) {
        free(out);
        kill(worker->pid, SIGKILL); /* it would wait for ever: start again with an empty link */
        return;
    }
    *out = (struct outgoing){NULL, *msg, own};
    *worker->last = out;
    worker->last = &out->next;
    flush(worker);
}

void dkv_worker_launch(struct dkv_worker *worker, struct dkv_run *run)
{
    const unsigned slot = (unsigned)(run - worker->runs);
    if (n_in_flight(worker) == 1) /* this one */
        worker->since_ms = dkv_clock_ms();
    if (!uv_is_active((uv_handle_t *)&worker->watch))
        watch(worker);
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
    const bool busy = n_in_flight(worker) > 0;
    const bool moved = worker->heard ||
                       (busy && dkv_clock_ms() - worker->since_ms < patience_ms(worker));
    worker->heard = false;
    if (!busy)
        send_message(worker, &ping, -1);
    return moved;
}

/* ---- how processes end and begin again ---- */

static void free_link(uv_handle_t *handle)
{
    free(handle->data);
}

static void drop_process(struct dkv_worker *worker)
{
    struct link *link = worker->link;
    worker->up = false;
    worker->link = NULL;
    drop_outgoing(worker);
    uv_timer_stop(&worker->watch);
    if (link != NULL) {
        uv_poll_stop(&link->poll);
        close(link->fd);
        uv_close((uv_handle_t *)&link->poll, free_link);
    }
    bury(worker);
}

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
    drop_process(worker);
    uv_timer_start(&worker->timer, on_restart, wait_ms, 0);
    worker->calls.lost(worker->calls.owner, worker->index, worker->given_up);
}

static void on_restart(uv_timer_t *timer)
{
    struct dkv_worker *worker = timer->data;
    struct dkv_error err = {0};
    worker->n_restarts++;
    if (start_process(worker, &err) != DKV_OK)
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

static void on_link(uv_poll_t *poll, int status, int events)
{
    struct link *link = poll->data;
    struct dkv_worker *worker = link->worker;
    (void)status;
    if (events & UV_WRITABLE)
        flush(worker);
    while (worker->link == link) {
        struct dkv_link_msg msg;
        int fd;
        const int got = dkv_link_receive(link->fd, &msg, &fd);
        if (got < 0)
            return; /* nothing now */
        if (got == 0) {
            lose(worker, "has ended");
            return;
        }
        if (fd >= 0)
            close(fd);
        take(worker, &msg);
        if (msg.type == DKV_LINK_DONE && n_in_flight(worker) == 0)
            return; /* nothing is due: what comes all the same wakes us */
    }
}

/* ---- open and close ---- */

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
    drop_process(worker);
    reap(worker, true);
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
        n = poll(&ready, 1, START_MS);
    while (n < 0 && errno == EINTR);
    if (n > 0)
        got = dkv_link_receive(worker->link->fd, &msg, &fd);
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
    enum dkv_status status = start_process(worker, err);
    if (status == DKV_OK)
        status = wait_until_up(worker, err);
    if (status != DKV_OK)
        drop_process(worker);
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

void dkv_worker_hangup(const struct dkv_worker *worker)
{
    if (worker->up)
        kill(worker->pid, SIGHUP);
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
