/* The life of the daemon: open everything, run the loop, drain, close in reverse order.
 *
 *   running --SIGTERM/SIGINT--> leaving --drain_delay_ms or a signal--> draining
 *   draining --last accepted request answered--> stop, exit 0
 *            --second signal or drain_timeout_ms--> exit 1 at once
 *   SIGHUP opens the log anew and reads tokens and limits again (reload.h).
 *
 * While leaving, everything is as before but readiness, which says no: load balancers look at that
 * every second or so and send nothing more, so that draining has nobody to refuse.
 *
 * While draining, connections are still accepted, so that their requests get a definite answer (503
 * and Connection: close) rather than a refused connection. "At once" means _exit(): a
 * worker may be in the middle of a batch that nobody may wait for, and ends with this process.
 */
#include "server/errand.h"
#include "server/group_limits.h"
#include "server/http.h"
#include "server/notify.h"
#include "server/reload.h"
#include "server/server.h"
#include "server/session.h"
#include "server/shm.h"

#include "server/clock.h"

#include <assert.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DRAIN_CHECK_MS 5
#define SCRUB_BYTES    (UINT64_C(1) << 20) /* of a turn: up to a millisecond */
#define EXIT_LOST      1                   /* accepted requests were not answered */
#define EXIT_START     69                  /* EX_UNAVAILABLE: could not start to serve */

struct life {
    struct dkv_server server;
    uv_loop_t loop;
    uv_signal_t sigterm, sigint, sighup;
    uv_timer_t drain_timer;
    uv_prepare_t prepare;   /* before the loop waits: gives memory back, a piece in each turn, */
    uv_idle_t more;         /* and does not let it wait while there is more */
    uv_timer_t alive_timer; /* signs of life for the service manager's watchdog */
    uint64_t drain_end_ms;
    struct dkv_notify notify;
    bool mute; /* the watchdog is not fed, and the log has said why */
};

static void stop_at_once(struct life *life, const char *why)
{
    dkv_log(DKV_LOG_WARN, "%s: stopping at once, %u requests are not answered", why,
            life->server.n_accepted);
    if (*life->server.config->port_file != '\0')
        unlink(life->server.config->port_file);
    _exit(EXIT_LOST);
}

/* Who asked has the answer, and no thread works on memory that goes. */
static bool is_quiet(const struct dkv_server *server)
{
    return server->n_accepted == 0 && server->n_working == 0 &&
           !dkv_backend_is_writing(server->backend) &&
           (server->http == NULL || dkv_http_is_quiet(server->http)) &&
           dkv_sessions_are_quiet(server->sessions);
}

static void on_drain_timer(uv_timer_t *timer)
{
    struct life *life = timer->data;
    if (is_quiet(&life->server))
        uv_stop(&life->loop);
    else if (dkv_clock_ms() >= life->drain_end_ms)
        stop_at_once(life, "drain_timeout_ms is over");
}

static void drain(struct life *life)
{
    struct dkv_server *server = &life->server;
    server->draining = true;
    life->drain_end_ms = dkv_clock_ms() + server->config->drain_timeout_ms;
    dkv_log(DKV_LOG_INFO, "draining, %u requests are being answered", server->n_accepted);
    if (server->http != NULL)
        dkv_http_drain(server->http);
    uv_timer_start(&life->drain_timer, on_drain_timer, 0, DRAIN_CHECK_MS);
}

static void on_delay_over(uv_timer_t *timer)
{
    drain(timer->data);
}

static void on_stop_signal(uv_signal_t *handle, int number)
{
    struct life *life = handle->data;
    struct dkv_server *server = &life->server;
    const uint64_t delay_ms = server->config->drain_delay_ms;
    if (server->draining)
        stop_at_once(life, "a second signal");
    if (server->leaving) {
        drain(life); /* whoever signals again does not want to wait for the delay */
        return;
    }
    server->leaving = true;
    dkv_log(DKV_LOG_INFO, "%s: leaving", number == SIGTERM ? "SIGTERM" : "SIGINT");
    dkv_notify_send(&life->notify, "STOPPING=1\nSTATUS=draining");
    if (delay_ms > 0)
        uv_timer_start(&life->drain_timer, on_delay_over, delay_ms, 0);
    else
        drain(life);
}

static void on_hangup(uv_signal_t *handle, int number)
{
    struct life *life = handle->data;
    (void)number;
    dkv_notify_reloading(&life->notify);
    dkv_reload(&life->server);
    dkv_notify_send(&life->notify, "READY=1");
}

/* `first` is what else the message says. */
static void say_serving(const struct life *life, const char *first)
{
    dkv_notify_send(&life->notify, "%s\nSTATUS=serving with engine %s on %s", first,
                    life->server.engine_info.backend, life->server.engine_info.device);
}

/* The loop turns, or this would not run; queue and workers have to show that they do. */
static void on_alive_timer(uv_timer_t *timer)
{
    struct life *life = timer->data;
    const char *why = NULL;
    const bool alive = dkv_backend_pulse(life->server.backend, &why);
    if (alive && life->mute && !life->server.leaving)
        say_serving(life, "WATCHDOG=1");
    else if (alive)
        dkv_notify_send(&life->notify, "WATCHDOG=1");
    if (!alive && !life->mute) {
        dkv_log(DKV_LOG_WARN, "the watchdog gets no sign of life: %s", why);
        dkv_notify_send(&life->notify, "STATUS=in trouble: %s", why);
    }
    life->mute = !alive;
}

/* Four signs of life in the time the manager waits for one: what has just been set going at one of
 * them may answer by the next. */
static void keep_alive(struct life *life)
{
    const uint64_t period_ms = life->notify.watchdog_us / 4000;
    if (life->notify.watchdog_us == 0)
        return;
    uv_timer_start(&life->alive_timer, on_alive_timer, 0, period_ms > 0 ? period_ms : 1);
}

static void on_more(uv_idle_t *idle)
{
    (void)idle;
}

static void on_prepare(uv_prepare_t *prepare)
{
    struct life *life = prepare->data;
    if (dkv_arena_scrub(&life->server.arena, SCRUB_BYTES))
        uv_idle_start(&life->more, on_more);
    else
        uv_idle_stop(&life->more);
}

static void add_signal(struct life *life, uv_signal_t *handle, uv_signal_cb callback, int number)
{
    uv_signal_init(&life->loop, handle);
    handle->data = life;
    uv_signal_start(handle, callback, number);
}

/* Written under another name and renamed, so that a reader never sees half a number. */
static enum dkv_status write_port_file(const char *path, unsigned port, struct dkv_error *err)
{
    char temporary[4096];
    if (*path == '\0')
        return DKV_OK;
    if (snprintf(temporary, sizeof(temporary), "%s.new", path) >= (int)sizeof(temporary))
        return dkv_error_set(err, DKV_E_INVALID, "port_file: the name is too long");
    FILE *file = fopen(temporary, "we");
    if (file == NULL)
        return dkv_error_set(err, DKV_E_IO, "port_file: cannot write %.120s: %s", temporary,
                             strerror(errno));
    bool written = fprintf(file, "%u\n", port) > 0;
    written = fclose(file) == 0 && written;
    if (written && rename(temporary, path) == 0)
        return DKV_OK;
    dkv_error_set(err, DKV_E_IO, "port_file: cannot write %.120s: %s", path, strerror(errno));
    unlink(temporary);
    return DKV_E_IO;
}

/* What max_queue_bytes says, or half of the memory that machine and control group leave us. */
static uint64_t body_limit(const struct dkv_config *config)
{
    if (config->max_queue_bytes != 0)
        return config->max_queue_bytes;
    uint64_t least = uv_get_total_memory();
    const uint64_t groups[] = {uv_get_constrained_memory(), /* version 1; 0: unknown */
                               dkv_memory_limit("/proc/self/cgroup", "/sys/fs/cgroup")};
    for (unsigned i = 0; i < 2; i++)
        least = groups[i] != 0 && groups[i] < least ? groups[i] : least;
    return least / 2;
}

/* Room for all bodies and answers twice over, and for a chunked upload on every connection, each of
 * which may become as large as any: these are addresses, not memory. */
static enum dkv_status open_memory(struct dkv_server *server, struct dkv_error *err)
{
    const struct dkv_config *config = server->config;
    const uint64_t limit = body_limit(config);
    const uint64_t most = UINT64_C(1) << 42;
    const uint64_t share = dkv_config_client_bytes(config, limit);
    const uint64_t max_body = config->max_body_bytes < share ? config->max_body_bytes : share;
    uint64_t bytes;
    if (!dkv_mul_u64(max_body, config->max_connections, &bytes) ||
        !dkv_add_u64(bytes, 2 * limit, &bytes) || bytes > most)
        bytes = most > 2 * limit ? most : 2 * limit;
    enum dkv_status status = dkv_arena_open(&server->arena, bytes, limit, err);
    dkv_body_pool_init(&server->bodies, &server->arena, limit, share);
    server->max_body_bytes = max_body;
    return status;
}

static void learn_engine(struct dkv_server *server)
{
    struct dkv_backend_info info;
    dkv_backend_info(server->backend, &info);
    server->engine_info = info.engine;
    server->facts = (struct dkv_oip_facts){
        .version = DKV_VERSION,
        .backend = server->engine_info.backend,
        .device = server->engine_info.device,
        .dtype = DKV_FP32,
        .max_blocks = DKV_BLOCKS_MAX,
        .shm = server->shm != NULL,
    };
    dkv_metrics_init(&server->metrics, server->engine_info.backend);
    dkv_log(DKV_LOG_INFO, "engine %s on %s", server->engine_info.backend,
            server->engine_info.device);
}

static enum dkv_status start(struct life *life, struct dkv_error *err)
{
    struct dkv_server *server = &life->server;
    const struct dkv_config *config = server->config;
    enum dkv_status status = dkv_inherited_take(&server->inherited, err);
    if (status == DKV_OK)
        status = dkv_auth_load(&server->auth, config->token_file, err);
    if (status == DKV_OK)
        status = dkv_trace_open(&server->traces, config->trace_file, config->trace_every, err);
    if (status == DKV_OK)
        status = dkv_streams_open(&server->streams, (uint32_t)config->max_streams,
                                  config->show_keep_sets, err);
    if (status == DKV_OK)
        status = open_memory(server, err);
    if (status == DKV_OK)
        status = dkv_backend_open(config, &life->loop, &server->arena, &server->backend, err);
    if (status != DKV_OK)
        return status;
    if (config->allow_client_shm && (server->shm = dkv_shm_open(server)) == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for shared memory regions");
    learn_engine(server);
    status = dkv_sessions_open(server, &server->sessions, err);
    if (status == DKV_OK && (strcmp(config->http, "off") != 0 || server->inherited.http_fd >= 0))
        status = dkv_http_open(server, err);
    if (status == DKV_OK && server->http != NULL)
        status = write_port_file(config->port_file, dkv_http_port(server->http), err);
    if (status != DKV_OK)
        return status;
    dkv_reload_begin(server);
    server->begun_ns = dkv_clock_ns();
    if (server->sessions != NULL)
        dkv_log(DKV_LOG_INFO, "listening at %.108s", dkv_sessions_path(server->sessions));
    if (server->http != NULL)
        dkv_log(DKV_LOG_INFO, "listening on %.64s, port %u",
                server->inherited.http_fd >= 0 ? "a socket of the service manager" : config->http,
                dkv_http_port(server->http));
    return DKV_OK;
}

static void close_handle(uv_handle_t *handle, void *argument)
{
    (void)argument;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void stop(struct life *life)
{
    struct dkv_server *server = &life->server;
    /* Their regions, and their jobs, are the backend's: the drain has waited for them. */
    assert(server->n_working == 0 && !dkv_backend_is_writing(server->backend));
    dkv_backend_close(server->backend);
    dkv_sessions_close(server->sessions);
    dkv_http_close(server->http);
    dkv_shm_close(server->shm);
    uv_walk(&life->loop, close_handle, NULL);
    uv_run(&life->loop, UV_RUN_DEFAULT);
    uv_loop_close(&life->loop);
    dkv_sessions_free_asks(server);
    dkv_body_pool_fini(&server->bodies);
    dkv_arena_close(&server->arena);
    dkv_auth_fini(&server->auth);
    dkv_notify_close(&life->notify);
    dkv_streams_close(&server->streams);
    dkv_trace_close(&server->traces);
}

int dkv_server_run(struct dkv_config_state *state, int argc, const char **argv)
{
    const struct dkv_config *config = &state->config;
    struct life life = {.server = {.config = config,
                                   .state = state,
                                   .argc = argc,
                                   .argv = argv,
                                   .request_log = {.burst = DKV_REQUEST_LINES_PER_S,
                                                   .per_s = DKV_REQUEST_LINES_PER_S}}};
    struct dkv_error err = {0};
    signal(SIGPIPE, SIG_IGN);
    if (*config->cpu_mask != '\0')
        setenv("DKV_CPU_MASK", config->cpu_mask, 1);
    dkv_list_init(&life.server.idle_asks);
    dkv_notify_open(&life.notify);
    dkv_errand_init();
    uv_loop_init(&life.loop);
    life.server.loop = &life.loop;
    uv_timer_init(&life.loop, &life.drain_timer);
    uv_timer_init(&life.loop, &life.alive_timer);
    uv_prepare_init(&life.loop, &life.prepare);
    uv_idle_init(&life.loop, &life.more);
    life.prepare.data = &life;
    uv_prepare_start(&life.prepare, on_prepare);
    uv_unref((uv_handle_t *)&life.prepare);
    life.drain_timer.data = &life;
    life.alive_timer.data = &life;
    add_signal(&life, &life.sigterm, on_stop_signal, SIGTERM);
    add_signal(&life, &life.sigint, on_stop_signal, SIGINT);
    add_signal(&life, &life.sighup, on_hangup, SIGHUP);

    int exit_status = 0;
    if (start(&life, &err) == DKV_OK) {
        say_serving(&life, "READY=1");
        keep_alive(&life);
        uv_run(&life.loop, UV_RUN_DEFAULT);
        if (*config->port_file != '\0')
            unlink(config->port_file);
        dkv_log(DKV_LOG_INFO, "stopped");
    } else {
        dkv_log(DKV_LOG_ERROR, "cannot start: %s", err.text);
        dkv_notify_send(&life.notify, "STATUS=cannot start: %s", err.text);
        exit_status = EXIT_START;
    }
    stop(&life);
    return exit_status;
}
