/* A worker: one process, one thread, one engine.
 *
 *   wait for a message --> map, unmap, or submit a batch --> take what else has come
 *        ^                                                         |
 *        '---- DONE <---- wait for the oldest batch <--------------'
 *
 * As many batches are in flight as the engine takes. When the front says that one more follows at
 * once, a moment is spent waiting for it, so that its copies overlap the work before it.
 *
 * Answers are written where the descriptors say; DONE is sent after the engine's wait() returned
 * without an error, never before. After a device error there is nothing to save: the process ends,
 * and the front sees the end of the link. It also ends when the front does.
 *
 * Tests make a worker die at a named point: DROPKVD_DIE_AT=POINT:N (the Nth time it passes there,
 * in each worker's life), honoured only with --test-hooks.
 */
#include "server/worker.h"

#include "proto/look.h"
#include "server/clock.h"
#include "server/log.h"
#include "server/worker_memory.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sysexits.h>
#include <unistd.h>

#define MORE_WAIT_US 100

struct batch {
    uint32_t slot;
    uint32_t n_jobs;
    const uint64_t *jobs;
    struct dkv_item *items; /* [max_items] */
    struct dkv_block *blocks;
    size_t n_items;
    uint64_t started_ns;
};

struct worker {
    struct dkv_link_start start;
    struct dkv_worker_memory memory;
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    struct batch batches[DKV_ADMISSION_FLIGHT_MAX]; /* a ring */
    unsigned oldest;
    unsigned n_in_flight;
    struct dkv_look look;
    uint64_t idle_since_ns; /* 0: a batch is in flight, or there was none yet */
    uint64_t look_until_ns; /* a message is likely to come before */
    const char *die_at;     /* or NULL */
    unsigned die_in;        /* times to pass there */
};

static void quit(const char *why, int status)
{
    dkv_log(DKV_LOG_ERROR, "worker: %s", why);
    _exit(status);
}

static void hook(struct worker *worker, const char *point)
{
    if (worker->die_at == NULL || strcmp(worker->die_at, point) != 0 || --worker->die_in > 0)
        return;
    raise(SIGKILL);
}

static void read_hooks(struct worker *worker)
{
    static char point[32];
    unsigned n = 0;
    const char *text = worker->start.test_hooks ? getenv("DROPKVD_DIE_AT") : NULL;
    if (text == NULL || sscanf(text, "%31[a-z_]:%u", point, &n) != 2 || n == 0)
        return;
    worker->die_at = point;
    worker->die_in = n;
}

static void say(const struct dkv_link_msg *msg)
{
    if (!dkv_link_send(DKV_LINK_FD, msg, -1))
        _exit(EX_OK); /* the front is gone */
}

/* ---- batches ---- */

static struct dkv_link_job *job_at(const struct worker *worker, const struct batch *batch,
                                   uint32_t i)
{
    return (struct dkv_link_job *)(void *)(worker->memory.arena + batch->jobs[i]);
}

static void *output(const struct worker *worker, const struct dkv_link_addr *addr)
{
    return dkv_worker_memory_output(&worker->memory, addr);
}

/* Query rows around the end of a ring on the device. */
static enum dkv_status unroll(struct worker *worker, const struct dkv_ring *ring,
                              struct dkv_block *block, struct dkv_error *err)
{
    if (worker->ops->unroll == NULL)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "stash: the %s engine cannot read GPU memory",
                             worker->ops->name);
    const enum dkv_status status = worker->ops->unroll(worker->engine, ring, block, err);
    if (status == DKV_E_DEVICE)
        quit(err->text, EX_UNAVAILABLE);
    return status;
}

/* Makes the items of a job. A block whose memory cannot be had has its status now and no item. */
static void add_items(struct worker *worker, struct batch *batch, struct dkv_link_job *job)
{
    for (uint32_t i = 0; i < job->n_blocks; i++) {
        struct dkv_link_block *packed = &job->blocks[i];
        struct dkv_block *block = &batch->blocks[batch->n_items];
        packed->status = DKV_OK;
        packed->nonfinite = false;
        if (!dkv_link_unpack(packed, dkv_worker_memory_find, &worker->memory, block) ||
            output(worker, &packed->keep) == NULL)
            packed->status = dkv_error_set(&packed->error, DKV_E_NOT_FOUND,
                                           "a region of this request was lost with its worker and "
                                           "must be registered anew");
        else
            packed->status = dkv_worker_memory_stage(&worker->memory, packed, block,
                                                     &packed->error);
        if (packed->status == DKV_OK && packed->ring.n_rows != 0)
            packed->status = unroll(worker, &packed->ring, block, &packed->error);
        if (packed->status != DKV_OK)
            continue;
        batch->items[batch->n_items++] = (struct dkv_item){
            .block = block,
            .params = &job->params,
            .plan = &packed->plan,
            .keep_out = output(worker, &packed->keep),
            .counts_out = output(worker, &packed->counts),
            .scores_out = output(worker, &packed->scores),
        };
    }
}

/* Statuses go back to the blocks that had an item, in the same order. */
static void report(const struct worker *worker, const struct batch *batch)
{
    size_t at = 0;
    for (uint32_t j = 0; j < batch->n_jobs; j++) {
        struct dkv_link_job *job = job_at(worker, batch, j);
        for (uint32_t i = 0; i < job->n_blocks; i++) {
            struct dkv_link_block *packed = &job->blocks[i];
            if (packed->status != DKV_OK)
                continue;
            const struct dkv_item *item = &batch->items[at++];
            assert(item->plan == &packed->plan);
            packed->status = item->status;
            if (item->status != DKV_OK)
                packed->error = item->error;
            packed->nonfinite = item->nonfinite;
        }
    }
}

/* Nothing to do: shall we look for the next message, or sleep? */
static void begin_idle(struct worker *worker)
{
    const uint64_t look_ns = worker->start.learns && worker->look.looks ? DKV_LOOK_NS
                                                                        : worker->start.patience_ns;
    worker->idle_since_ns = dkv_clock_ns();
    worker->look_until_ns = worker->idle_since_ns + look_ns;
}

static void end_idle(struct worker *worker, uint64_t now_ns)
{
    if (worker->idle_since_ns != 0 && worker->start.learns)
        dkv_look_learn(&worker->look, now_ns - worker->idle_since_ns);
    worker->idle_since_ns = 0;
}

static void finish_oldest(struct worker *worker)
{
    struct batch *batch = &worker->batches[worker->oldest];
    struct dkv_error err = {0};
    struct dkv_engine_info info = {0};
    if (batch->n_items > 0 && worker->ops->wait(worker->engine, &err) != DKV_OK)
        quit(err.text, EX_UNAVAILABLE);
    report(worker, batch);
    worker->oldest = (worker->oldest + 1) % DKV_ADMISSION_FLIGHT_MAX;
    worker->n_in_flight--;
    if (worker->n_in_flight == 0)
        dkv_worker_memory_idle(&worker->memory);
    worker->ops->info(worker->engine, &info);
    const struct dkv_link_msg done = {
        .type = DKV_LINK_DONE,
        .done = {.slot = batch->slot,
                 .started_ns = batch->started_ns,
                 .finished_ns = dkv_clock_ns(),
                 .scratch_bytes = info.scratch_bytes},
    };
    hook(worker, "before_done");
    say(&done);
    if (worker->n_in_flight == 0)
        begin_idle(worker);
    hook(worker, "after_done");
}

/* Nothing was started: every item has failed for the same reason. */
static void fail_items(struct batch *batch, enum dkv_status status, const struct dkv_error *err)
{
    for (size_t i = 0; i < batch->n_items; i++) {
        batch->items[i].status = status;
        batch->items[i].error = *err;
    }
}

static void run(struct worker *worker, const struct dkv_link_run *message)
{
    const unsigned at = (worker->oldest + worker->n_in_flight) % DKV_ADMISSION_FLIGHT_MAX;
    struct batch *batch = &worker->batches[at];
    struct dkv_error err = {0};
    hook(worker, "run");
    batch->slot = message->slot;
    batch->n_jobs = message->n_jobs;
    batch->jobs = (const uint64_t *)(const void *)(worker->memory.arena + message->jobs);
    batch->n_items = 0;
    batch->started_ns = dkv_clock_ns();
    end_idle(worker, batch->started_ns);
    for (uint32_t j = 0; j < batch->n_jobs; j++)
        add_items(worker, batch, job_at(worker, batch, j));
    hook(worker, "before_submit");
    enum dkv_status status = DKV_OK;
    if (batch->n_items > 0)
        status = worker->ops->submit(worker->engine, batch->items, batch->n_items, &err);
    if (status == DKV_E_DEVICE)
        quit(err.text, EX_UNAVAILABLE);
    if (status != DKV_OK) {
        while (worker->n_in_flight > 0)
            finish_oldest(worker);
        fail_items(batch, status, &err);
        report(worker, batch);
        batch->n_jobs = 0;
        batch->n_items = 0;
    }
    worker->n_in_flight++;
    hook(worker, "after_submit");
}

/* ---- messages ---- */

/* ATTACH, or the next CHUNK of one. */
static void attach(struct worker *worker, const struct dkv_link_msg *msg, int fd)
{
    struct dkv_link_msg answer = {.type = DKV_LINK_ATTACHED, .number = msg->number};
    bool more = false;
    if (msg->type == DKV_LINK_ATTACH)
        answer.status = dkv_worker_memory_attach(&worker->memory, msg->number, fd, &msg->loan,
                                                 &more, &answer.error);
    else
        answer.status = dkv_worker_memory_chunk(&worker->memory, msg->number, fd, &msg->chunk,
                                                &more, &answer.error);
    if (answer.status == DKV_E_DEVICE)
        quit(answer.error.text, EX_UNAVAILABLE);
    answer.error.status = answer.status;
    if (!more)
        say(&answer);
}

static void say_detached(uint32_t number)
{
    const struct dkv_link_msg answer = {.type = DKV_LINK_DETACHED, .number = number};
    say(&answer);
}

static void detach(struct worker *worker, const struct dkv_link_msg *msg)
{
    if (dkv_worker_memory_detach(&worker->memory, msg->number))
        say_detached(msg->number);
}

/* Unmaps the GPU memory that waits longest for it. Nothing is in flight. */
static void release_one(struct worker *worker)
{
    uint32_t number;
    struct dkv_error err = {0};
    if (dkv_imports_release(&worker->memory.imports, &number, &err) != DKV_OK)
        quit(err.text, EX_UNAVAILABLE);
    if (number != 0)
        say_detached(number);
}

/* Waits for a message, at most `wait_us` unless that is negative. */
static bool message_within(long wait_us)
{
    struct pollfd ready = {.fd = DKV_LINK_FD, .events = POLLIN};
    const struct timespec limit = {0, wait_us * 1000};
    int n;
    do
        n = ppoll(&ready, 1, wait_us < 0 ? NULL : &limit, NULL);
    while (n < 0 && errno == EINTR);
    return n > 0;
}

/* Takes one message, if there is one or after waiting for it. False: none. *more_out: a next batch
 * is said to follow. *open becomes false if the link ended. */
static bool take(struct worker *worker, bool wait, bool *more_out, bool *open)
{
    struct dkv_link_msg msg;
    int fd;
    const int got = dkv_link_receive(DKV_LINK_FD, wait, &msg, &fd);
    *more_out = false;
    if (got <= 0) {
        *open = got < 0 && errno == EAGAIN;
        return false;
    }
    switch (msg.type) {
    case DKV_LINK_ATTACH:
    case DKV_LINK_CHUNK: attach(worker, &msg, fd); break;
    case DKV_LINK_DETACH: detach(worker, &msg); break;
    case DKV_LINK_PING: say(&(struct dkv_link_msg){.type = DKV_LINK_PONG}); break;
    case DKV_LINK_RUN:
        run(worker, &msg.run);
        *more_out = msg.run.more;
        break;
    default: quit("a message that is none", EX_SOFTWARE);
    }
    return true;
}

/* Nothing is in flight: looks for a message as long as that is worth it, then waits for one. */
static void take_next(struct worker *worker, bool *more_out, bool *open)
{
    bool took = false;
    while (!took && *open && dkv_clock_ns() < worker->look_until_ns)
        took = take(worker, false, more_out, open);
    if (!took && *open)
        (void)take(worker, true, more_out, open);
}

/* GPU memory that clients have given up is unmapped between batches, when none is in flight and no
 * message waits; a device that is never idle is let run empty for it before long. */
static void serve(struct worker *worker)
{
    unsigned room = worker->ops->max_in_flight;
    bool more = false, open = true;
    room = room < DKV_ADMISSION_FLIGHT_MAX ? room : DKV_ADMISSION_FLIGHT_MAX;
    while (open) {
        const uint64_t due_ns = dkv_imports_due_ns(&worker->memory.imports);
        const bool overdue = due_ns != UINT64_MAX && dkv_clock_ns() >= due_ns;
        if (worker->n_in_flight == 0) {
            if (overdue || (due_ns != UINT64_MAX && !message_within(0))) {
                release_one(worker);
                continue;
            }
            take_next(worker, &more, &open);
        } else if (worker->n_in_flight < room && !overdue &&
                   message_within(more ? MORE_WAIT_US : 0)) {
            (void)take(worker, true, &more, &open);
        } else {
            finish_oldest(worker);
        }
    }
}

/* ---- start ---- */

static bool make_batches(struct worker *worker)
{
    for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++) {
        struct batch *batch = &worker->batches[i];
        batch->items = calloc(worker->start.max_items, sizeof(*batch->items));
        batch->blocks = calloc(worker->start.max_items, sizeof(*batch->blocks));
        if (batch->items == NULL || batch->blocks == NULL)
            return false;
    }
    return true;
}

static enum dkv_status open_engine(struct worker *worker, struct dkv_error *err)
{
    struct dkv_engine_config config = {
        .threads = worker->start.threads,
        .max_batch_items = worker->start.max_items,
    };
    enum dkv_status status = dkv_engine_find(worker->start.device, &worker->ops, &config.device,
                                             err);
    if (status == DKV_OK)
        status = worker->ops->open(&config, &worker->engine, err);
    if (status == DKV_OK)
        dkv_imports_init(&worker->memory.imports, worker->ops, worker->engine);
    if (status == DKV_OK && !make_batches(worker))
        status = dkv_error_set(err, DKV_E_NOMEM, "worker: out of memory");
    return status;
}

/* The first message, and the arena with it. */
static enum dkv_status begin(struct worker *worker, struct dkv_error *err)
{
    struct dkv_link_msg msg;
    int fd;
    if (!message_within(-1) || dkv_link_receive(DKV_LINK_FD, true, &msg, &fd) <= 0 ||
        msg.type != DKV_LINK_START || fd < 0)
        return dkv_error_set(err, DKV_E_INTERNAL, "worker: started by something else");
    worker->start = msg.start;
    worker->look = DKV_LOOK_INIT;
    /* Where the log cannot be had, standard error serves; the front has said so. */
    (void)dkv_log_open(dkv_log_format_of(worker->start.log_format),
                       dkv_log_level_of(worker->start.log_level), worker->start.log_file, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != worker->start.front_pid)
        _exit(EX_OK); /* it was too late for the signal */
    read_hooks(worker);
    enum dkv_status status = dkv_worker_memory_open(&worker->memory, fd, worker->start.arena_bytes,
                                                    err);
    close(fd);
    if (status == DKV_OK)
        status = open_engine(worker, err);
    return status;
}

static void end(struct worker *worker)
{
    struct dkv_error ignored;
    for (; worker->n_in_flight > 0; worker->n_in_flight--)
        (void)worker->ops->wait(worker->engine, &ignored);
    dkv_worker_memory_close(&worker->memory); /* which releases what the engine mapped */
    if (worker->engine != NULL)
        worker->ops->close(worker->engine);
    for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++) {
        free(worker->batches[i].items);
        free(worker->batches[i].blocks);
    }
}

static void on_hangup(int number)
{
    (void)number;
    (void)dkv_log_reopen(); /* the old file stays if there is no new one */
}

int dkv_worker_main(void)
{
    static struct worker worker;
    struct dkv_link_msg msg = {.type = DKV_LINK_UP};
    struct stat info;
    /* Signals to the group and to the unit are the front's: it ends this process when the last
     * request has been answered. */
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, on_hangup);
    if (fstat(DKV_LINK_FD, &info) != 0 || !S_ISSOCK(info.st_mode)) {
        fputs("dropkvd: --worker is how dropkvd starts itself\n", stderr);
        return EX_USAGE;
    }
    prctl(PR_SET_NAME, "dropkvd-worker");
    msg.status = begin(&worker, &msg.error);
    if (msg.status == DKV_OK) {
        worker.ops->info(worker.engine, &msg.up);
        hook(&worker, "up");
    } else {
        msg.type = DKV_LINK_FAILED;
    }
    say(&msg);
    if (msg.status == DKV_OK)
        serve(&worker);
    end(&worker);
    return msg.status == DKV_OK ? EX_OK : EX_UNAVAILABLE;
}
