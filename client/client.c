/* The client: opening and closing, what is registered with a daemon, what it says of itself.
 * Requests are in jobs.c. */
#include "client/buffer.h"
#include "client/client_priv.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define BUSY_POLL_US_MAX        1000000
#define DEFAULT_TIMEOUT_US      (30 * INT64_C(1000000))
#define DEFAULT_MAX_IN_FLIGHT   256u
#define MAX_IN_FLIGHT_MAX       65536u
#define DEFAULT_MAX_CONNECTIONS 16u
#define MAX_CONNECTIONS_MAX     1024u
#define DEFAULT_MAX_RETRIES     2u
#define MAX_RETRIES_MAX         100

/* ---- opening and closing ---- */

static enum dkv_status take_options(const struct dropkv_client_options *from,
                                    struct dropkv_client_options *to, struct dkv_error *err)
{
    *to = (struct dropkv_client_options)DROPKV_CLIENT_OPTIONS_INIT;
    if (from != NULL) {
        if (from->struct_size < sizeof(size_t) + sizeof(char *) || from->struct_size > 4096)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "options: struct_size %zu was not set by "
                                 "DROPKV_CLIENT_OPTIONS_INIT",
                                 from->struct_size);
        memcpy(to, from, from->struct_size < sizeof(*to) ? from->struct_size : sizeof(*to));
    }
    if (to->timeout_us < 0 || to->timeout_us > DKV_TIMEOUT_US_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: timeout_us %lld not in 0..%lld",
                             (long long)to->timeout_us, (long long)DKV_TIMEOUT_US_MAX);
    if (to->max_in_flight > MAX_IN_FLIGHT_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: max_in_flight %u not in 0..%u",
                             to->max_in_flight, MAX_IN_FLIGHT_MAX);
    if (to->max_connections > MAX_CONNECTIONS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: max_connections %u not in 0..%u",
                             to->max_connections, MAX_CONNECTIONS_MAX);
    if (to->max_retries > MAX_RETRIES_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: max_retries %d above %d",
                             (int)to->max_retries, MAX_RETRIES_MAX);
    if (to->busy_poll_us > BUSY_POLL_US_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: busy_poll_us %u not in 0..%u",
                             to->busy_poll_us, BUSY_POLL_US_MAX);
    if (to->token == NULL)
        to->token = getenv("DROPKV_TOKEN");
    if (to->token != NULL && to->token[0] == '\0')
        to->token = NULL;
    for (const char *c = to->token; c != NULL && *c != '\0'; c++)
        if (*c <= 0x20 || *c >= 0x7f)
            return dkv_error_set(err, DKV_E_INVALID,
                                 "options: the token holds a space or a character outside ASCII");
    return DKV_OK;
}

static int count_processors(void)
{
    cpu_set_t mine;
    return sched_getaffinity(0, sizeof(mine), &mine) == 0 ? CPU_COUNT(&mine) : 1;
}

/* Without other word it finds out whether looking for answers pays, if there is a processor for the
 * daemon's front, which may look as well, and one for the caller. Long waits look at their ends
 * only where worker and others have one, too. */
static void begin_learning(struct dropkv_client *client)
{
    const int n = count_processors();
    client->learns = client->ops->learns && client->busy_poll_ns == 0 && n >= 2;
    client->look = DKV_LOOK_INIT;
    client->look.naps = n >= 4;
}

enum dkv_status dkv_client_open(const char *endpoint, const struct dropkv_client_options *options,
                                const struct dkv_transport_ops *ops,
                                struct dropkv_client **client_out, struct dkv_error *err)
{
    struct dropkv_client_options o;
    enum dkv_status status = take_options(options, &o, err);
    if (status != DKV_OK)
        return status;
    struct dropkv_client *client = calloc(1, sizeof(*client));
    if (client == NULL || (client->results = dkv_results_new()) == NULL) {
        free(client);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a client");
    }
    client->ops = ops;
    client->process = getpid();
    client->timeout_us = o.timeout_us != 0 ? o.timeout_us : DEFAULT_TIMEOUT_US;
    client->busy_poll_ns = (int64_t)o.busy_poll_us * 1000;
    begin_learning(client);
    client->max_in_flight = o.max_in_flight != 0 ? o.max_in_flight : DEFAULT_MAX_IN_FLIGHT;
    const struct dkv_transport_config config = {
        .address = endpoint,
        .token = o.token,
        .cuda_stream = o.cuda_stream,
        .max_connections = o.max_connections != 0 ? o.max_connections : DEFAULT_MAX_CONNECTIONS,
        .max_retries = o.max_retries < 0    ? 0
                       : o.max_retries == 0 ? DEFAULT_MAX_RETRIES
                                            : (uint32_t)o.max_retries,
    };
    if (o.cuda_stream != NULL && ops != &dkv_transport_embedded)
        status = dkv_error_set(err, DKV_E_INVALID,
                               "options: cuda_stream is for endpoints embedded:cuda:N");
    else
        status = ops->open(&config, &client->transport, err);
    if (status != DKV_OK) {
        dkv_results_close(client->results);
        free(client);
        return status;
    }
    *client_out = client;
    return DKV_OK;
}

enum dropkv_status dropkv_client_open(const char *endpoint,
                                      const struct dropkv_client_options *options,
                                      struct dropkv_client **client_out, struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    enum dkv_status status;
    if (endpoint == NULL || client_out == NULL)
        status = dkv_error_set(err, DKV_E_INVALID, "%s is null",
                               endpoint == NULL ? "endpoint" : "client_out");
    else if (strncasecmp(endpoint, "http://", 7) == 0 || strncasecmp(endpoint, "https://", 8) == 0)
        status = dkv_client_open(endpoint, options, &dkv_transport_http, client_out, err);
    else if (strncmp(endpoint, "unix:", 5) == 0)
        status = dkv_client_open(endpoint, options, &dkv_transport_ipc, client_out, err);
    else if (strncmp(endpoint, "embedded:", 9) == 0)
        status = dkv_client_open(endpoint, options, &dkv_transport_embedded, client_out, err);
    else
        status = dkv_error_set(err, DKV_E_INVALID,
                               "endpoint is not of the form unix:///PATH, http://HOST:PORT, "
                               "https://HOST:PORT or embedded:[DEVICE]");
    return (enum dropkv_status)status;
}

void dropkv_client_close(struct dropkv_client *client)
{
    if (client == NULL || client->process != getpid())
        return;
    dkv_jobs_drop(client);
    client->ops->close(client->transport);
    dkv_results_close(client->results);
    free(client);
}

/* ---- what is registered ---- */

static int64_t deadline(const struct dropkv_client *client, int64_t timeout_us)
{
    const int64_t us = timeout_us > 0 && timeout_us <= DKV_TIMEOUT_US_MAX ? timeout_us
                                                                          : client->timeout_us;
    return dkv_now_ns() + us * 1000;
}

static enum dropkv_status add_buffer(struct dropkv_client *client,
                                     const struct dropkv_buffer *buffer, bool writable,
                                     struct dropkv_error *error)
{
    if (client->ops->add_buffer == NULL && buffer->on_gpu)
        return (enum dropkv_status)dkv_error_set(
            (struct dkv_error *)error, DKV_E_UNSUPPORTED,
            "buffer: only a daemon at unix:/// or an embedded engine can read GPU memory");
    if (client->ops->add_buffer == NULL)
        return DROPKV_OK;
    return (enum dropkv_status)client->ops->add_buffer(client->transport, buffer, writable,
                                                       (struct dkv_error *)error);
}

enum dropkv_status dropkv_client_add_buffer(struct dropkv_client *client,
                                            const struct dropkv_buffer *buffer,
                                            struct dropkv_error *error)
{
    return add_buffer(client, buffer, false, error);
}

enum dropkv_status dropkv_client_add_output(struct dropkv_client *client,
                                            const struct dropkv_buffer *buffer,
                                            struct dropkv_error *error)
{
    return add_buffer(client, buffer, true, error);
}

void dropkv_client_remove_buffer(struct dropkv_client *client, const struct dropkv_buffer *buffer)
{
    if (client->ops->remove_buffer != NULL)
        client->ops->remove_buffer(client->transport, buffer);
}

/* UNSUPPORTED unless the transport has objects of a daemon's. */
static enum dkv_status needs_objects(const struct dropkv_client *client, struct dkv_error *err)
{
    return client->ops->objects != NULL
               ? DKV_OK
               : dkv_error_set(err, DKV_E_UNSUPPORTED,
                               "only a daemon at unix:///PATH and an embedded engine know "
                               "caches, stashes and detached buffers");
}

enum dropkv_status dropkv_client_detach_buffer(struct dropkv_client *client,
                                               const struct dropkv_buffer *buffer,
                                               int64_t timeout_us, struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    enum dkv_status status = needs_objects(client, err);
    if (status == DKV_OK)
        status = client->ops->objects->detach(client->transport, buffer,
                                              deadline(client, timeout_us), err);
    return (enum dropkv_status)status;
}

enum dropkv_status dropkv_client_attach_buffer(struct dropkv_client *client,
                                               const struct dropkv_buffer *buffer,
                                               struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    enum dkv_status status = needs_objects(client, err);
    if (status == DKV_OK)
        status = client->ops->objects->attach(client->transport, buffer, err);
    return (enum dropkv_status)status;
}

enum dropkv_status dropkv_cache_add(struct dropkv_client *client,
                                    const struct dropkv_cache_layout *layout,
                                    struct dropkv_cache **cache_out, struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    struct dropkv_cache_layout known;
    enum dkv_status status = needs_objects(client, err);
    if (status == DKV_OK)
        status = dkv_take_struct(layout, sizeof(known), &known, sizeof(known), "layout",
                                 "CACHE_LAYOUT", err);
    if (status == DKV_OK)
        status = client->ops->objects->add_cache(client->transport, &known, cache_out, err);
    return (enum dropkv_status)status;
}

enum dropkv_status dropkv_stash_add(struct dropkv_client *client,
                                    const struct dropkv_stash_layout *layout,
                                    struct dropkv_stash **stash_out, struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    struct dropkv_stash_layout known;
    enum dkv_status status = needs_objects(client, err);
    if (status == DKV_OK)
        status = dkv_take_struct(layout, sizeof(known), &known, sizeof(known), "layout",
                                 "STASH_LAYOUT", err);
    if (status == DKV_OK)
        status = client->ops->objects->add_stash(client->transport, &known, stash_out, err);
    return (enum dropkv_status)status;
}

enum dropkv_status dropkv_cache_remove(struct dropkv_client *client, struct dropkv_cache *cache)
{
    const struct dkv_transport_objects *objects = client->ops->objects;
    if (cache == NULL || (objects != NULL && objects->remove_cache(client->transport, cache)))
        return DROPKV_OK;
    return DROPKV_E_INVALID;
}

enum dropkv_status dropkv_stash_remove(struct dropkv_client *client, struct dropkv_stash *stash)
{
    const struct dkv_transport_objects *objects = client->ops->objects;
    if (stash == NULL || (objects != NULL && objects->remove_stash(client->transport, stash)))
        return DROPKV_OK;
    return DROPKV_E_INVALID;
}

/* ---- the server ---- */

enum dropkv_status dropkv_health(struct dropkv_client *client, int64_t timeout_us,
                                 struct dropkv_error *error)
{
    return (enum dropkv_status)client->ops->health(client->transport, deadline(client, timeout_us),
                                                   (struct dkv_error *)error);
}

/* The public struct and the texts it points to, in one allocation. */
struct info {
    struct dropkv_info public;
    struct dkv_oip_info texts;
};

enum dropkv_status dropkv_client_info(struct dropkv_client *client, int64_t timeout_us,
                                      struct dropkv_info **info_out, struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    struct info *info = calloc(1, sizeof(*info));
    if (info == NULL)
        return (enum dropkv_status)dkv_error_set(err, DKV_E_NOMEM, "no memory for a description");
    const enum dkv_status status = client->ops->info(
        client->transport, deadline(client, timeout_us), &info->texts, err);
    if (status != DKV_OK) {
        free(info);
        return (enum dropkv_status)status;
    }
    info->public = (struct dropkv_info){
        .server = info->texts.server,
        .version = info->texts.version,
        .platform = info->texts.platform,
        .backend = info->texts.backend,
        .device = info->texts.device,
    };
    *info_out = &info->public;
    return DROPKV_OK;
}

void dropkv_info_free(struct dropkv_info *info)
{
    free(info);
}
