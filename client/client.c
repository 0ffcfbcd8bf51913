/* The client: jobs in flight, finished results, and the two ways of waiting for them.
 *
 * A job is in exactly one of two lists: `in_flight`, while a transport carries it, or `finished`,
 * from dkv_job_done() until its result is taken. dropkv_score() is submission and dispatch in a
 * loop until its own job is finished; other jobs that finish meanwhile stay where the caller of
 * dropkv_next_result() finds them.
 */
#include "client/buffer.h"
#include "client/transport.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define DEFAULT_TIMEOUT_US      (30 * INT64_C(1000000))
#define TIMEOUT_US_MAX          (86400 * INT64_C(1000000))
#define DEFAULT_MAX_IN_FLIGHT   256u
#define MAX_IN_FLIGHT_MAX       65536u
#define DEFAULT_MAX_CONNECTIONS 16u
#define MAX_CONNECTIONS_MAX     1024u
#define DEFAULT_MAX_RETRIES     2u
#define MAX_RETRIES_MAX         100

struct job_list {
    struct dkv_job *first;
    struct dkv_job *last;
};

struct dropkv_client {
    const struct dkv_transport_ops *ops;
    struct dkv_transport *transport;
    struct job_list in_flight;
    struct job_list finished; /* oldest first */
    uint32_t n_in_flight;
    uint32_t max_in_flight;
    int64_t timeout_us;
    uint64_t last_id;
};

int64_t dkv_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- lists ---- */

static void list_append(struct job_list *list, struct dkv_job *job)
{
    job->prev = list->last;
    job->next = NULL;
    if (list->last != NULL)
        list->last->next = job;
    else
        list->first = job;
    list->last = job;
}

static void list_remove(struct job_list *list, struct dkv_job *job)
{
    if (job->prev != NULL)
        job->prev->next = job->next;
    else
        list->first = job->next;
    if (job->next != NULL)
        job->next->prev = job->prev;
    else
        list->last = job->prev;
}

static struct dkv_job *list_find(const struct job_list *list, uint64_t id)
{
    struct dkv_job *job = list->first;
    while (job != NULL && job->result->id != id)
        job = job->next;
    return job;
}

static void job_free(struct dkv_job *job)
{
    if (job == NULL)
        return;
    dkv_call_fini(&job->call);
    dropkv_result_free(job->result);
    free(job);
}

void dkv_job_done(struct dkv_job *job, enum dkv_status status, const char *text)
{
    struct dropkv_client *client = job->client;
    assert(!job->done);
    job->done = true;
    job->carrier = NULL;
    job->result->elapsed_ns = (uint64_t)(dkv_now_ns() - job->submitted_ns);
    dkv_result_set_error(job->result, status, status == DKV_OK ? "" : text);
    dkv_call_fini(&job->call);
    list_remove(&client->in_flight, job);
    client->n_in_flight--;
    list_append(&client->finished, job);
}

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
    if (to->timeout_us < 0 || to->timeout_us > TIMEOUT_US_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: timeout_us %lld not in 0..%lld",
                             (long long)to->timeout_us, (long long)TIMEOUT_US_MAX);
    if (to->max_in_flight > MAX_IN_FLIGHT_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: max_in_flight %u not in 0..%u",
                             to->max_in_flight, MAX_IN_FLIGHT_MAX);
    if (to->max_connections > MAX_CONNECTIONS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: max_connections %u not in 0..%u",
                             to->max_connections, MAX_CONNECTIONS_MAX);
    if (to->max_retries > MAX_RETRIES_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "options: max_retries %d above %d",
                             (int)to->max_retries, MAX_RETRIES_MAX);
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

enum dkv_status dkv_client_open(const char *endpoint, const struct dropkv_client_options *options,
                                const struct dkv_transport_ops *ops,
                                struct dropkv_client **client_out, struct dkv_error *err)
{
    struct dropkv_client_options o;
    enum dkv_status status = take_options(options, &o, err);
    if (status != DKV_OK)
        return status;
    struct dropkv_client *client = calloc(1, sizeof(*client));
    if (client == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a client");
    client->ops = ops;
    client->timeout_us = o.timeout_us != 0 ? o.timeout_us : DEFAULT_TIMEOUT_US;
    client->max_in_flight = o.max_in_flight != 0 ? o.max_in_flight : DEFAULT_MAX_IN_FLIGHT;
    const struct dkv_transport_config config = {
        .address = endpoint,
        .token = o.token,
        .max_connections = o.max_connections != 0 ? o.max_connections : DEFAULT_MAX_CONNECTIONS,
        .max_retries = o.max_retries < 0    ? 0
                       : o.max_retries == 0 ? DEFAULT_MAX_RETRIES
                                            : (uint32_t)o.max_retries,
    };
    status = ops->open(&config, &client->transport, err);
    if (status != DKV_OK) {
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
        status = dkv_error_set(err, DKV_E_UNSUPPORTED,
                               "endpoint embedded: needs the engine, which libdropkv does not "
                               "contain; dropkv-client does");
    else
        status = dkv_error_set(
            err, DKV_E_INVALID,
            "endpoint is not of the form unix:///PATH, http://HOST:PORT or https://HOST:PORT");
    return (enum dropkv_status)status;
}

static void drop_jobs(struct job_list *list)
{
    while (list->first != NULL) {
        struct dkv_job *job = list->first;
        list_remove(list, job);
        job_free(job);
    }
}

void dropkv_client_close(struct dropkv_client *client)
{
    if (client == NULL)
        return;
    for (struct dkv_job *job = client->in_flight.first; job != NULL; job = job->next)
        client->ops->cancel(client->transport, job);
    drop_jobs(&client->in_flight);
    drop_jobs(&client->finished);
    client->ops->close(client->transport);
    free(client);
}

/* ---- buffers ---- */

enum dropkv_status dropkv_client_add_buffer(struct dropkv_client *client,
                                            const struct dropkv_buffer *buffer,
                                            struct dropkv_error *error)
{
    if (client->ops->add_buffer == NULL && buffer->on_gpu)
        return (enum dropkv_status)dkv_error_set(
            (struct dkv_error *)error, DKV_E_UNSUPPORTED,
            "buffer: only a daemon at unix:/// can read GPU memory of this process");
    if (client->ops->add_buffer == NULL)
        return DROPKV_OK;
    return (enum dropkv_status)client->ops->add_buffer(client->transport, buffer,
                                                       (struct dkv_error *)error);
}

void dropkv_client_remove_buffer(struct dropkv_client *client, const struct dropkv_buffer *buffer)
{
    if (client->ops->remove_buffer != NULL)
        client->ops->remove_buffer(client->transport, buffer);
}

/* ---- submitting and taking ---- */

/* Whether the caller was compiled against a header that has this field. */
#define KNOWS(request, field) \
    ((request)->struct_size >= offsetof(struct dropkv_request, field) + sizeof((request)->field))

static int64_t request_timeout_us(const struct dropkv_client *client,
                                  const struct dropkv_request *request,
                                  const struct dkv_params *params)
{
    if (KNOWS(request, timeout_us) && request->timeout_us != 0)
        return request->timeout_us;
    if (dkv_params_has(params, DKV_PARAM_TIMEOUT) && params->timeout > 0)
        return params->timeout;
    return client->timeout_us;
}

static enum dkv_status job_new(struct dropkv_client *client, const struct dropkv_request *request,
                               struct dkv_job **job_out, struct dkv_error *err)
{
    struct dkv_job *job = calloc(1, sizeof(*job));
    if (job == NULL || (job->result = dkv_result_new()) == NULL) {
        free(job);
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    }
    enum dkv_status status = dkv_call_init(&job->call, request, err);
    if (status != DKV_OK) {
        job_free(job);
        return status;
    }
    const int64_t timeout_us = request_timeout_us(client, request, &job->call.request.params);
    if (timeout_us < 0 || timeout_us > TIMEOUT_US_MAX) {
        job_free(job);
        return dkv_error_set(err, DKV_E_INVALID, "timeout_us %lld not in 0..%lld",
                             (long long)timeout_us, (long long)TIMEOUT_US_MAX);
    }
    job->client = client;
    job->submitted_ns = dkv_now_ns();
    job->deadline_ns = job->submitted_ns + timeout_us * 1000;
    job->result->user = KNOWS(request, user) ? request->user : NULL;
    *job_out = job;
    return DKV_OK;
}

static enum dkv_status submit(struct dropkv_client *client, const struct dropkv_request *request,
                              struct dkv_job **job_out, struct dkv_error *err)
{
    struct dkv_job *job = NULL;
    if (request == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "request is null");
    if (client->n_in_flight >= client->max_in_flight)
        return dkv_error_set(err, DKV_E_BUSY, "%u requests are in flight, the most allowed",
                             client->n_in_flight);
    enum dkv_status status = job_new(client, request, &job, err);
    if (status != DKV_OK)
        return status;
    job->result->id = ++client->last_id;
    list_append(&client->in_flight, job);
    client->n_in_flight++;
    status = client->ops->submit(client->transport, job, err);
    if (status != DKV_OK) {
        list_remove(&client->in_flight, job);
        client->n_in_flight--;
        job_free(job);
        return status;
    }
    *job_out = job;
    return DKV_OK;
}

enum dropkv_status dropkv_submit(struct dropkv_client *client, const struct dropkv_request *request,
                                 uint64_t *id_out, struct dropkv_error *error)
{
    struct dkv_job *job = NULL;
    enum dkv_status status = submit(client, request, &job, (struct dkv_error *)error);
    if (status == DKV_OK && id_out != NULL)
        *id_out = job->result->id;
    return (enum dropkv_status)status;
}

/* Takes a finished job's result and forgets the job. */
static struct dropkv_result *take_result(struct dropkv_client *client, struct dkv_job *job)
{
    struct dropkv_result *result = job->result;
    job->result = NULL;
    list_remove(&client->finished, job);
    job_free(job);
    return result;
}

struct dropkv_result *dropkv_next_result(struct dropkv_client *client)
{
    struct dkv_job *job = client->finished.first;
    return job == NULL ? NULL : take_result(client, job);
}

enum dropkv_status dropkv_cancel(struct dropkv_client *client, uint64_t id)
{
    struct dkv_job *job = list_find(&client->in_flight, id);
    if (job != NULL) {
        client->ops->cancel(client->transport, job);
        list_remove(&client->in_flight, job);
        client->n_in_flight--;
        job_free(job);
        return DROPKV_OK;
    }
    job = list_find(&client->finished, id);
    if (job == NULL)
        return DROPKV_E_NOT_FOUND;
    dropkv_result_free(take_result(client, job));
    return DROPKV_OK;
}

uint32_t dropkv_in_flight(const struct dropkv_client *client)
{
    return client->n_in_flight;
}

int dropkv_fd(const struct dropkv_client *client)
{
    return client->ops->fd(client->transport);
}

/* ---- waiting ---- */

/* Sleeps until the descriptor is readable or `until_ns` (negative: without end). */
static enum dkv_status wait_readable(struct dropkv_client *client, int64_t until_ns,
                                     struct dkv_error *err)
{
    struct pollfd pollfd = {.fd = dropkv_fd(client), .events = POLLIN};
    struct timespec left = {0};
    if (until_ns >= 0) {
        const int64_t ns = until_ns - dkv_now_ns();
        if (ns > 0)
            left = (struct timespec){.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    }
    if (ppoll(&pollfd, 1, until_ns < 0 ? NULL : &left, NULL) < 0 && errno != EINTR)
        return dkv_error_set(err, DKV_E_IO, "could not poll: %s", strerror(errno));
    return DKV_OK;
}

/* What a submission could not do at once makes the descriptor readable, so a wait may come first: a
 * dispatch before it would find nothing, for one system call more. */
enum dropkv_status dropkv_dispatch(struct dropkv_client *client, int64_t timeout_us,
                                   struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    if (timeout_us == 0 || client->finished.first != NULL || client->n_in_flight == 0)
        return (enum dropkv_status)client->ops->dispatch(client->transport, err);
    enum dkv_status status = DKV_OK;
    const int64_t until_ns = timeout_us < 0                ? -1
                             : timeout_us > TIMEOUT_US_MAX ? dkv_now_ns() + TIMEOUT_US_MAX * 1000
                                                           : dkv_now_ns() + timeout_us * 1000;
    do {
        status = wait_readable(client, until_ns, err);
        if (status == DKV_OK)
            status = client->ops->dispatch(client->transport, err);
    } while (status == DKV_OK && client->finished.first == NULL && client->n_in_flight > 0 &&
             (until_ns < 0 || dkv_now_ns() < until_ns));
    return (enum dropkv_status)status;
}

enum dropkv_status dropkv_score(struct dropkv_client *client, const struct dropkv_request *request,
                                struct dropkv_result **result_out, struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    struct dkv_job *job = NULL;
    *result_out = NULL;
    enum dkv_status status = submit(client, request, &job, err);
    if (status != DKV_OK)
        return (enum dropkv_status)status;
    while (status == DKV_OK && !job->done) {
        status = wait_readable(client, -1, err);
        if (status == DKV_OK)
            status = client->ops->dispatch(client->transport, err);
    }
    if (status != DKV_OK) {
        (void)dropkv_cancel(client, job->result->id);
        return (enum dropkv_status)status;
    }
    struct dropkv_result *result = take_result(client, job);
    if (result->status != DROPKV_OK) {
        status = dkv_error_set(err, (enum dkv_status)result->status, "%s", result->error_text);
        dropkv_result_free(result);
        return (enum dropkv_status)status;
    }
    *result_out = result;
    return DROPKV_OK;
}

/* ---- the server ---- */

static int64_t deadline(const struct dropkv_client *client, int64_t timeout_us)
{
    const int64_t us = timeout_us > 0 && timeout_us <= TIMEOUT_US_MAX ? timeout_us
                                                                      : client->timeout_us;
    return dkv_now_ns() + us * 1000;
}

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
