/* Requests: jobs in flight, finished results, and the two ways of waiting for them.
 *
 * dropkv_score() is submission and dispatch in a loop until its own job is finished; other jobs
 * that finish meanwhile stay where the caller of dropkv_next_result() finds them. Jobs and results
 * are used again, with their memory, so that a request like earlier ones allocates nothing.
 */
#include "client/client_priv.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int64_t dkv_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- lists ---- */

static void list_append(struct dkv_job_list *list, struct dkv_job *job)
{
    job->prev = list->last;
    job->next = NULL;
    if (list->last != NULL)
        list->last->next = job;
    else
        list->first = job;
    list->last = job;
}

static void list_remove(struct dkv_job_list *list, struct dkv_job *job)
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

static struct dkv_job *list_find(const struct dkv_job_list *list, uint64_t id)
{
    struct dkv_job *job = list->first;
    while (job != NULL && job->result->id != id)
        job = job->next;
    return job;
}

/* A job that is in no list any more. */
static void job_put(struct dropkv_client *client, struct dkv_job *job)
{
    dropkv_result_free(job->result);
    job->result = NULL;
    dkv_call_trim(&job->call);
    job->next = client->idle;
    client->idle = job;
}

static void drop_list(struct dropkv_client *client, struct dkv_job_list *list)
{
    while (list->first != NULL) {
        struct dkv_job *job = list->first;
        list_remove(list, job);
        job_put(client, job);
    }
}

void dkv_jobs_drop(struct dropkv_client *client)
{
    /* The newest first: what waits would be begun in the place of what was before it. */
    for (struct dkv_job *job = client->in_flight.last; job != NULL; job = job->prev)
        client->ops->cancel(client->transport, job);
    drop_list(client, &client->in_flight);
    drop_list(client, &client->finished);
    while (client->idle != NULL) {
        struct dkv_job *job = client->idle;
        client->idle = job->next;
        dkv_call_fini(&job->call);
        free(job);
    }
}

void dkv_job_done(struct dkv_job *job, enum dkv_status status, const char *text)
{
    struct dropkv_client *client = job->client;
    assert(!job->done);
    job->done = true;
    job->carrier = NULL;
    job->result->elapsed_ns = (uint64_t)(dkv_now_ns() - job->submitted_ns);
    dkv_result_set_error(job->result, status, status == DKV_OK ? "" : text);
    list_remove(&client->in_flight, job);
    client->n_in_flight--;
    list_append(&client->finished, job);
}

/* ---- submitting and taking ---- */

/* What the two public structs have in common. `timeout_us` and `user` are 0 where the caller's
 * version has no such field. */
struct wish {
    int64_t timeout_us;
    void *user;
};

/* Whether the caller was compiled against a header that has this field. */
#define KNOWS(request, field) \
    ((request)->struct_size >= offsetof(struct dropkv_request, field) + sizeof((request)->field))

static struct dkv_job *job_get(struct dropkv_client *client)
{
    struct dkv_job *job = client->idle;
    if (job != NULL)
        client->idle = job->next;
    else
        job = calloc(1, sizeof(*job));
    if (job == NULL)
        return NULL;
    const struct dkv_call call = job->call; /* its memory */
    *job = (struct dkv_job){.call = call, .client = client};
    job->result = dkv_result_new(client->results);
    if (job->result != NULL)
        return job;
    job_put(client, job);
    return NULL;
}

static enum dkv_status set_deadline(const struct dropkv_client *client, struct dkv_job *job,
                                    int64_t timeout_us, struct dkv_error *err)
{
    const struct dkv_params *params = &job->call.request.params;
    if (timeout_us == 0)
        timeout_us = dkv_params_has(params, DKV_PARAM_TIMEOUT) && params->timeout > 0
                         ? params->timeout
                         : client->timeout_us;
    if (timeout_us < 0 || timeout_us > DKV_TIMEOUT_US_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "timeout_us %lld not in 0..%lld",
                             (long long)timeout_us, (long long)DKV_TIMEOUT_US_MAX);
    job->submitted_ns = dkv_now_ns();
    job->deadline_ns = job->submitted_ns + timeout_us * 1000;
    return DKV_OK;
}

/* Hands a job whose call was initialised (`status`) to the transport; it goes back to the idle ones
 * if anything is wrong. */
static enum dkv_status start(struct dropkv_client *client, struct dkv_job *job,
                             enum dkv_status status, const struct wish *wish, struct dkv_error *err)
{
    if (status == DKV_OK)
        status = set_deadline(client, job, wish->timeout_us, err);
    if (status != DKV_OK) {
        job_put(client, job);
        return status;
    }
    job->result->user = wish->user;
    job->result->id = ++client->last_id;
    list_append(&client->in_flight, job);
    client->n_in_flight++;
    status = client->ops->submit(client->transport, job, err);
    if (status != DKV_OK) {
        list_remove(&client->in_flight, job);
        client->n_in_flight--;
        job_put(client, job);
    }
    return status;
}

static enum dkv_status get_free_job(struct dropkv_client *client, const void *request,
                                    struct dkv_job **job_out, struct dkv_error *err)
{
    if (request == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "request is null");
    if (client->n_in_flight >= client->max_in_flight)
        return dkv_error_set(err, DKV_E_BUSY, "%u requests are in flight, the most allowed",
                             client->n_in_flight);
    *job_out = job_get(client);
    return *job_out != NULL ? DKV_OK : dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
}

static enum dkv_status submit(struct dropkv_client *client, const struct dropkv_request *request,
                              struct dkv_job **job_out, struct dkv_error *err)
{
    enum dkv_status status = get_free_job(client, request, job_out, err);
    if (status != DKV_OK)
        return status;
    const struct wish wish = {
        KNOWS(request, timeout_us) ? request->timeout_us : 0,
        KNOWS(request, user) ? request->user : NULL,
    };
    const struct dkv_call *call = &(*job_out)->call;
    status = dkv_call_init(&(*job_out)->call, request, err);
    if (status == DKV_OK && client->ops->objects == NULL &&
        (call->fence.buffer != NULL || call->output.buffer != NULL))
        status = dkv_error_set(err, DKV_E_UNSUPPORTED,
                               "%s: only a daemon at unix:///PATH and an embedded engine have "
                               "buffers",
                               call->fence.buffer != NULL ? "fence" : "output");
    return start(client, *job_out, status, &wish, err);
}

static enum dkv_status submit_prompt(struct dropkv_client *client,
                                     const struct dropkv_prompt *prompt, struct dkv_job **job_out,
                                     struct dkv_error *err)
{
    if (client->ops->objects == NULL)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "only a daemon at unix:///PATH and an embedded engine know caches");
    enum dkv_status status = get_free_job(client, prompt, job_out, err);
    if (status != DKV_OK)
        return status;
    struct dkv_call *call = &(*job_out)->call;
    status = dkv_call_init_prompt(call, prompt, err);
    const struct wish wish = {call->prompt.timeout_us, call->prompt.user};
    return start(client, *job_out, status, &wish, err);
}

enum dropkv_status dropkv_submit(struct dropkv_client *client, const struct dropkv_request *request,
                                 uint64_t *id_out, struct dropkv_error *error)
{
    struct dkv_job *job = NULL;
    const enum dkv_status status = submit(client, request, &job, (struct dkv_error *)error);
    if (status == DKV_OK && id_out != NULL)
        *id_out = job->result->id;
    return (enum dropkv_status)status;
}

enum dropkv_status dropkv_submit_prompt(struct dropkv_client *client,
                                        const struct dropkv_prompt *prompt, uint64_t *id_out,
                                        struct dropkv_error *error)
{
    struct dkv_job *job = NULL;
    const enum dkv_status status = submit_prompt(client, prompt, &job, (struct dkv_error *)error);
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
    job_put(client, job);
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
        job_put(client, job);
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

/* The earlier of two times; a negative `until_ns` is never. */
static int64_t sooner(int64_t at_ns, int64_t until_ns)
{
    return until_ns < 0 || at_ns < until_ns ? at_ns : until_ns;
}

/* As ppoll(): 1 if the descriptor is readable, 0 if the time came first. */
static int sleep_until(struct dropkv_client *client, int64_t until_ns)
{
    struct pollfd pollfd = {.fd = dropkv_fd(client), .events = POLLIN};
    const int64_t ns = until_ns - dkv_now_ns();
    const struct timespec left = {.tv_sec = ns > 0 ? ns / 1000000000 : 0,
                                  .tv_nsec = ns > 0 ? ns % 1000000000 : 0};
    return ppoll(&pollfd, 1, until_ns < 0 ? NULL : &left, NULL);
}

/* Looks whether the descriptor is readable, for as long as it was told to, then sleeps until it is
 * or `until_ns` (negative: without end). Where nothing was told, as was found to pay. */
static enum dkv_status wait_readable(struct dropkv_client *client, int64_t until_ns,
                                     struct dkv_error *err)
{
    const bool looks = client->learns && client->look.looks;
    const int64_t look_ns = looks ? (int64_t)DKV_LOOK_NS : client->busy_poll_ns;
    const int64_t began_ns = dkv_now_ns();
    const int64_t nap_end_ns = began_ns + (looks ? (int64_t)client->look.nap_ns : 0);
    const int64_t look_end_ns = sooner(nap_end_ns + look_ns, until_ns);
    int ready = 0;
    if (nap_end_ns > began_ns)
        ready = sleep_until(client, sooner(nap_end_ns, until_ns));
    while (ready == 0 && look_ns > 0 && dkv_now_ns() < look_end_ns)
        ready = client->ops->ready != NULL ? client->ops->ready(client->transport)
                                           : sleep_until(client, 0);
    if (ready == 0)
        ready = sleep_until(client, until_ns);
    if (ready < 0 && errno != EINTR)
        return dkv_error_set(err, DKV_E_IO, "could not poll: %s", strerror(errno));
    if (ready > 0 && client->learns)
        dkv_look_learn(&client->look, (uint64_t)(dkv_now_ns() - began_ns));
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
    const int64_t until_ns = timeout_us < 0 ? -1
                             : timeout_us > DKV_TIMEOUT_US_MAX
                                 ? dkv_now_ns() + DKV_TIMEOUT_US_MAX * 1000
                                 : dkv_now_ns() + timeout_us * 1000;
    do {
        status = wait_readable(client, until_ns, err);
        if (status == DKV_OK)
            status = client->ops->dispatch(client->transport, err);
    } while (status == DKV_OK && client->finished.first == NULL && client->n_in_flight > 0 &&
             (until_ns < 0 || dkv_now_ns() < until_ns));
    return (enum dropkv_status)status;
}

/* Waits for one job and takes its result. */
static enum dkv_status wait_for(struct dropkv_client *client, struct dkv_job *job,
                                struct dropkv_result **result_out, struct dkv_error *err)
{
    enum dkv_status status = DKV_OK;
    while (status == DKV_OK && !job->done) {
        status = wait_readable(client, -1, err);
        if (status == DKV_OK)
            status = client->ops->dispatch(client->transport, err);
    }
    if (status != DKV_OK) {
        (void)dropkv_cancel(client, job->result->id);
        return status;
    }
    struct dropkv_result *result = take_result(client, job);
    if (result->status != DROPKV_OK) {
        status = dkv_error_set(err, (enum dkv_status)result->status, "%s", result->error_text);
        dropkv_result_free(result);
        return status;
    }
    *result_out = result;
    return DKV_OK;
}

enum dropkv_status dropkv_score(struct dropkv_client *client, const struct dropkv_request *request,
                                struct dropkv_result **result_out, struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    struct dkv_job *job = NULL;
    *result_out = NULL;
    enum dkv_status status = submit(client, request, &job, err);
    if (status == DKV_OK)
        status = wait_for(client, job, result_out, err);
    return (enum dropkv_status)status;
}

enum dropkv_status dropkv_score_prompt(struct dropkv_client *client,
                                       const struct dropkv_prompt *prompt,
                                       struct dropkv_result **result_out,
                                       struct dropkv_error *error)
{
    struct dkv_error *err = (struct dkv_error *)error;
    struct dkv_job *job = NULL;
    *result_out = NULL;
    enum dkv_status status = submit_prompt(client, prompt, &job, err);
    if (status == DKV_OK)
        status = wait_for(client, job, result_out, err);
    return (enum dropkv_status)status;
}
