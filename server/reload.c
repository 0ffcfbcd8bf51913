/* Three things, each of which goes on as it was if its new form cannot be had: files, tokens,
 * configuration. */
#include "server/reload.h"

#include "server/cli.h"
#include "server/http.h"

#include <errno.h>
#include <string.h>

/* One a line; the others are read once, at start. */
/* clang-format off */
static const char *const live_fields[] = {
    "log_level",
    "nv_metrics",
    "show_keep_sets",
    "max_body_bytes",
    "max_json_bytes",
    "max_connections",
    "max_queue_requests",
    "max_queue_bytes",
    "max_queue_read_bytes",
    "max_client_bytes",
    "max_client_requests",
    "max_client_read_bytes",
    "aging_batches",
    "max_batch_items",
    "max_batch_tokens",
    "max_batch_bytes",
    "max_queue_delay_us",
    "worker_deaths",
    "worker_stuck_ms",
    "header_timeout_ms",
    "keepalive_timeout_ms",
    "body_grace_ms",
    "body_min_bytes_per_s",
    "request_timeout_ms",
    "drain_delay_ms",
    "drain_timeout_ms",
    "trace_every",
};
/* clang-format on */

bool dkv_reload_takes(const char *field)
{
    for (size_t i = 0; i < sizeof(live_fields) / sizeof(live_fields[0]); i++)
        if (strcmp(live_fields[i], field) == 0)
            return true;
    return false;
}

void dkv_reload_begin(struct dkv_server *server)
{
    const struct dkv_config *config = server->config;
    server->ceilings = (struct dkv_ceilings){
        .body_bytes = server->max_body_bytes,
        .queue_bytes = server->bodies.quota.limit_bytes,
        .queue_requests = config->max_queue_requests,
        .connections = config->max_connections,
        .batch_items = config->max_batch_items,
    };
}

/* ---- the configuration ---- */

static enum dkv_status below(const char *name, uint64_t value, uint64_t ceiling,
                             struct dkv_error *err)
{
    if (value <= ceiling)
        return DKV_OK;
    return dkv_error_set(err, DKV_E_INVALID,
                         "%s: %llu is above %llu, what it was at start: that needs a restart", name,
                         (unsigned long long)value, (unsigned long long)ceiling);
}

static enum dkv_status check_ceilings(const struct dkv_server *server,
                                      const struct dkv_config *fresh, struct dkv_error *err)
{
    const struct dkv_config *now = server->config;
    const struct dkv_ceilings *most = &server->ceilings;
    enum dkv_status status = DKV_OK;
    /* A value that stays may be above what came of it at start. */
    if (fresh->max_body_bytes != now->max_body_bytes)
        status = below("max_body_bytes", fresh->max_body_bytes, most->body_bytes, err);
    if (status == DKV_OK && fresh->max_queue_bytes != now->max_queue_bytes)
        status = below("max_queue_bytes", fresh->max_queue_bytes, most->queue_bytes, err);
    if (status == DKV_OK)
        status = below("max_queue_requests", fresh->max_queue_requests, most->queue_requests, err);
    if (status == DKV_OK)
        status = below("max_connections", fresh->max_connections, most->connections, err);
    if (status == DKV_OK)
        status = below("max_batch_items", fresh->max_batch_items, most->batch_items, err);
    return status;
}

static bool same(const struct dkv_config *a, const struct dkv_config *b,
                 const struct dkv_config_field *field)
{
    const char *x = (const char *)a + field->offset, *y = (const char *)b + field->offset;
    switch (field->kind) {
    case DKV_CONFIG_TEXT:
        return strcmp(*(char *const *)(const void *)x, *(char *const *)(const void *)y) == 0;
    case DKV_CONFIG_BOOL: return *(const bool *)x == *(const bool *)y;
    default: return *(const uint64_t *)(const void *)x == *(const uint64_t *)(const void *)y;
    }
}

/* Swapped, so that each state frees what it has. */
static void swap(struct dkv_config_state *a, struct dkv_config_state *b, int i)
{
    const struct dkv_config_field *field = &dkv_config_fields[i];
    const size_t n = field->kind == DKV_CONFIG_TEXT   ? sizeof(char *)
                     : field->kind == DKV_CONFIG_BOOL ? sizeof(bool)
                                                      : sizeof(uint64_t);
    char kept[sizeof(uint64_t)];
    char *x = (char *)&a->config + field->offset, *y = (char *)&b->config + field->offset;
    memcpy(kept, x, n);
    memcpy(x, y, n);
    memcpy(y, kept, n);
    const enum dkv_config_source source = a->sources[i];
    a->sources[i] = b->sources[i];
    b->sources[i] = source;
}

static void take_over(struct dkv_server *server, struct dkv_config_state *fresh)
{
    unsigned n_taken = 0;
    for (int i = 0; i < DKV_CONFIG_FIELDS; i++) {
        const struct dkv_config_field *field = &dkv_config_fields[i];
        if (same(server->config, &fresh->config, field))
            continue;
        if (dkv_reload_takes(field->name)) {
            swap(server->state, fresh, i);
            n_taken++;
        } else {
            dkv_log(DKV_LOG_WARN, "SIGHUP: %s has changed; that needs a restart", field->name);
        }
    }
    dkv_log(DKV_LOG_INFO, "SIGHUP: %u fields of the configuration have changed", n_taken);
}

/* Where values live on beside the configuration itself. */
static void apply(struct dkv_server *server)
{
    const struct dkv_config *config = server->config;
    const struct dkv_ceilings *most = &server->ceilings;
    dkv_log_set_level(dkv_log_level_of(config->log_level));
    server->traces.every = config->trace_every;
    dkv_streams_set_strips(&server->streams, config->show_keep_sets);
    struct dkv_quota *quota = &server->bodies.quota;
    quota->limit_bytes = config->max_queue_bytes != 0 ? config->max_queue_bytes : most->queue_bytes;
    quota->client_bytes = dkv_config_client_bytes(config, quota->limit_bytes);
    server->max_body_bytes = config->max_body_bytes < most->body_bytes ? config->max_body_bytes
                                                                       : most->body_bytes;
    if (server->max_body_bytes > quota->client_bytes)
        server->max_body_bytes = quota->client_bytes;
    if (server->http != NULL)
        dkv_http_relimit(server->http);
}

static enum dkv_status reload_config(struct dkv_server *server, struct dkv_error *err)
{
    struct dkv_config_state fresh;
    enum dkv_cli_action action;
    dkv_config_init(&fresh);
    enum dkv_status status = dkv_cli_read(server->argc, server->argv, &fresh, &action, err);
    if (status == DKV_OK)
        status = check_ceilings(server, &fresh.config, err);
    if (status == DKV_OK)
        status = dkv_backend_relimit(server->backend, &fresh.config, err);
    if (status == DKV_OK) {
        take_over(server, &fresh);
        apply(server);
    }
    dkv_config_fini(&fresh);
    return status;
}

/* ---- files and tokens ---- */

static bool reopen_files(struct dkv_server *server)
{
    struct dkv_error err = {0};
    const bool log = dkv_log_reopen();
    if (!log)
        dkv_log(DKV_LOG_ERROR, "SIGHUP: log_file: cannot open %.120s: %s; the old one stays",
                server->config->log_file, strerror(errno));
    const bool traces = dkv_trace_reopen(&server->traces, &err) == DKV_OK;
    if (!traces)
        dkv_log(DKV_LOG_ERROR, "SIGHUP: %s; the old one stays", err.text);
    dkv_backend_hangup(server->backend);
    return log && traces;
}

static bool reload_tokens(struct dkv_server *server)
{
    struct dkv_error err = {0};
    if (*server->config->token_file == '\0')
        return true;
    const bool ok = dkv_auth_load(&server->auth, server->config->token_file, &err) == DKV_OK;
    if (ok)
        dkv_log(DKV_LOG_INFO, "SIGHUP: %u tokens in force", server->auth.n_tokens);
    else
        dkv_log(DKV_LOG_ERROR, "SIGHUP: %s; the tokens in force stay", err.text);
    return ok;
}

bool dkv_reload(struct dkv_server *server)
{
    struct dkv_error err = {0};
    const bool files = reopen_files(server);
    const bool tokens = reload_tokens(server);
    const bool config = reload_config(server, &err) == DKV_OK;
    if (!config)
        dkv_log(DKV_LOG_ERROR, "SIGHUP: %s; the configuration in force stays", err.text);
    const bool ok = files && tokens && config;
    server->metrics.reloads[ok ? DKV_RELOAD_OK : DKV_RELOAD_FAILED]++;
    return ok;
}
