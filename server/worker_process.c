/* One process of a worker: started, watched, ended.
 *
 * It is watched while it owes something: a batch has worker_stuck_ms, a start
 * DKV_WORKER_START_MS. One that lives and does not answer in time is killed, and what it had is
 * treated like that of any other dead worker.
 */
#include "server/worker_priv.h"

#include "server/clock.h"
#include "server/log.h"
#include "server/spin.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* ---- the watch ---- */

unsigned dkv_worker_n_in_flight(const struct dkv_worker *worker)
{
    unsigned n = 0;
    for (unsigned i = 0; i < DKV_ADMISSION_FLIGHT_MAX; i++)
        n += worker->runs[i].batch != NULL;
    return n;
}

uint64_t dkv_worker_patience_ms(const struct dkv_worker *worker)
{
    const struct dkv_config *config = worker->config;
    if (!worker->up)
        return DKV_WORKER_START_MS;
    return config->worker_stuck_ms != 0 ? config->worker_stuck_ms : 2 * config->request_timeout_ms;
}

static void on_watch(uv_timer_t *timer)
{
    struct dkv_worker *worker = timer->data;
    if (worker->link == NULL || (worker->up && dkv_worker_n_in_flight(worker) == 0))
        return;
    if (dkv_clock_ms() - worker->since_ms < dkv_worker_patience_ms(worker)) {
        dkv_worker_watch(worker);
        return;
    }
    dkv_log(DKV_LOG_ERROR, "the worker of device %s has not answered for %llu ms: it is killed",
            worker->device, (unsigned long long)dkv_worker_patience_ms(worker));
    kill(worker->pid, SIGKILL); /* the link ends, and dkv_worker_on_link() goes on from there */
}

void dkv_worker_watch(struct dkv_worker *worker)
{
    const uint64_t end_ms = worker->since_ms + dkv_worker_patience_ms(worker),
                   now_ms = dkv_clock_ms();
    uv_timer_start(&worker->watch, on_watch, end_ms > now_ms ? end_ms - now_ms : 0, 0);
}

/* ---- its beginning and its end ---- */

void dkv_worker_reap(struct dkv_worker *worker, bool wait)
{
    for (unsigned i = 0; i < DKV_WORKER_ZOMBIES_MAX; i++)
        if (worker->zombies[i] != 0 && waitpid(worker->zombies[i], NULL, wait ? 0 : WNOHANG) != 0)
            worker->zombies[i] = 0;
}

/* Ends the process, if it has not ended already, and remembers to reap it. */
static void bury(struct dkv_worker *worker)
{
    if (worker->pid == 0)
        return;
    kill(worker->pid, SIGKILL);
    for (unsigned i = 0; i < DKV_WORKER_ZOMBIES_MAX; i++)
        if (worker->zombies[i] == 0) {
            worker->zombies[i] = worker->pid;
            worker->pid = 0;
            break;
        }
    if (worker->pid != 0)
        waitpid(worker->pid, NULL, 0);
    worker->pid = 0;
    dkv_worker_reap(worker, false);
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
        .learns = dkv_spin_worker_learns(config),
        .test_hooks = config->test_hooks && !worker->fallback,
    };
    snprintf(msg->start.log_format, sizeof(msg->start.log_format), "%s", config->log_format);
    snprintf(msg->start.log_file, sizeof(msg->start.log_file), "%s", config->log_file);
    snprintf(msg->start.log_level, sizeof(msg->start.log_level), "%s", config->log_level);
    snprintf(msg->start.device, sizeof(msg->start.device), "%s", worker->device);
}

static void free_link(uv_handle_t *handle)
{
    free(handle->data);
}

enum dkv_status dkv_worker_start(struct dkv_worker *worker, struct dkv_error *err)
{
    int ends[2];
    struct dkv_link_msg start;
    /* Our end alone does not block. */
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0 ||
        fcntl(ends[0], F_SETFL, O_NONBLOCK) != 0)
        return dkv_error_set(err, DKV_E_NOMEM, "worker: no socket: %s", strerror(errno));
    struct dkv_worker_link *link = calloc(1, sizeof(*link));
    if (link == NULL || uv_poll_init(worker->loop, &link->poll, ends[0]) != 0) {
        free(link);
        close(ends[0]);
        close(ends[1]);
        return dkv_error_set(err, DKV_E_NOMEM, "worker: no memory for its link");
    }
    link->worker = worker;
    link->fd = ends[0];
    link->poll.data = link;
    const int why = spawn(worker->device, ends[1], &worker->pid);
    close(ends[1]);
    if (why != 0) {
        worker->pid = 0;
        close(link->fd);
        uv_close((uv_handle_t *)&link->poll, free_link);
        return dkv_error_set(err, DKV_E_NOMEM, "worker: cannot start: %s", strerror(why));
    }
    uv_poll_start(&link->poll, UV_READABLE, dkv_worker_on_link);
    worker->link = link;
    fill_start(worker, &start);
    dkv_link_send(link->fd, &start, worker->arena->fd);
    worker->since_ms = dkv_clock_ms();
    dkv_worker_watch(worker);
    return DKV_OK;
}

void dkv_worker_drop(struct dkv_worker *worker)
{
    struct dkv_worker_link *link = worker->link;
    worker->up = false;
    worker->link = NULL;
    dkv_worker_drop_outgoing(worker);
    uv_timer_stop(&worker->watch);
    if (link != NULL) {
        uv_poll_stop(&link->poll);
        close(link->fd);
        uv_close((uv_handle_t *)&link->poll, free_link);
    }
    bury(worker);
}
