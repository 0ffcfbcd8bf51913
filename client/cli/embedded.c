/* A transport that carries calls no further than the engine in this process.
 *
 * Submitted jobs wait in a queue. Each dispatch takes blocks from its front, as many as one batch
 * holds, runs them through the engine and hands back the jobs whose last block is done: the same
 * batching as the daemon's, so that many short blocks fill all threads. An eventfd is readable
 * while the queue is not empty, so an event loop keeps coming back.
 */
#include "client/cli/embedded.h"

#include "kernels/engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Blocks of one engine batch. */
#define BATCH_MAX 128u

/* A job's place in the queue. */
struct carrier {
    struct dkv_job *job;
    struct carrier *next;
    uint32_t n_started; /* blocks given to the engine so far */
    uint32_t n_waiting; /* blocks without an answer */
    enum dkv_status status;
    char error_text[sizeof(((struct dkv_error *)NULL)->text)];
};

struct dkv_transport {
    const struct dkv_engine_ops *ops;
    struct dkv_engine *engine;
    int event_fd;
    struct carrier *first;
    struct carrier *last;
};

/* ---- opening ---- */

/* Splits "embedded:cuda:1?threads=4". */
static enum dkv_status read_address(const char *address, char *device, size_t device_bytes,
                                    struct dkv_engine_config *config, struct dkv_error *err)
{
    const char *start = address + strlen("embedded:");
    const char *question = strchr(start, '?');
    const size_t length = question == NULL ? strlen(start) : (size_t)(question - start);
    if (length >= device_bytes)
        return dkv_error_set(err, DKV_E_INVALID, "endpoint: the device's name is too long");
    memcpy(device, start, length);
    device[length] = '\0';
    if (length == 0)
        strcpy(device, "cpu");
    if (question == NULL)
        return DKV_OK;
    char *end, shown[DKV_SHOWN_NAME_BYTES];
    const char *number = question + strlen("?threads=");
    if (strncmp(question, "?threads=", 9) != 0)
        return dkv_error_set(err, DKV_E_INVALID, "endpoint: only ?threads=N may follow the device");
    const unsigned long threads = strtoul(number, &end, 10);
    if (end == number || *end != '\0' || threads < 1 || threads > 1024)
        return dkv_error_set(err, DKV_E_INVALID, "endpoint: threads '%s' not in 1..1024",
                             dkv_show_name(shown, number));
    config->threads = (unsigned)threads;
    return DKV_OK;
}

static enum dkv_status open_engine(const struct dkv_transport_config *config,
                                   struct dkv_transport *t, struct dkv_error *err)
{
    char device[32];
    struct dkv_engine_config engine_config = {.max_batch_items = BATCH_MAX};
    enum dkv_status status = read_address(config->address, device, sizeof(device), &engine_config,
                                          err);
    if (status == DKV_OK)
        status = dkv_engine_find(device, &t->ops, &engine_config.device, err);
    if (status == DKV_OK)
        status = t->ops->open(&engine_config, &t->engine, err);
    return status;
}

static void embedded_close(struct dkv_transport *t)
{
    if (t == NULL)
        return;
    if (t->engine != NULL)
        t->ops->close(t->engine);
    if (t->event_fd >= 0)
        close(t->event_fd);
    free(t);
}

static enum dkv_status embedded_open(const struct dkv_transport_config *config,
                                     struct dkv_transport **transport_out, struct dkv_error *err)
{
    struct dkv_transport *t = calloc(1, sizeof(*t));
    if (t == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for the engine");
    enum dkv_status status = DKV_OK;
    t->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (t->event_fd < 0)
        status = dkv_error_set(err, DKV_E_IO, "could not make an eventfd: %s", strerror(errno));
    if (status == DKV_OK)
        status = open_engine(config, t, err);
    if (status != DKV_OK) {
        embedded_close(t);
        return status;
    }
    *transport_out = t;
    return DKV_OK;
}

/* ---- the queue ---- */

static int embedded_fd(const struct dkv_transport *t)
{
    return t->event_fd;
}

/* Makes the descriptor readable or not. An eventfd cannot refuse either. */
static void show_waiting(struct dkv_transport *t)
{
    uint64_t count = 1;
    const ssize_t done = t->first != NULL ? write(t->event_fd, &count, sizeof(count))
                                          : read(t->event_fd, &count, sizeof(count));
    (void)done;
}

static enum dkv_status embedded_submit(struct dkv_transport *t, struct dkv_job *job,
                                       struct dkv_error *err)
{
    struct carrier *c = calloc(1, sizeof(*c));
    if (c == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    const struct dkv_call *call = &job->call;
    uint64_t n_keep = 0;
    for (uint32_t i = 0; i < call->request.n_blocks; i++)
        n_keep += call->plans[i].keep_capacity;
    enum dkv_status status =
        call->plans[0].ragged
            ? dkv_result_reserve_ragged(job->result, call->request.n_blocks,
                                        call->blocks[0].kv_heads, call->blocks[0].n_tokens, n_keep,
                                        call->request.want_scores, err)
            : dkv_result_reserve(job->result, call->request.n_blocks, call->blocks[0].kv_heads,
                                 call->blocks[0].n_tokens, call->plans[0].keep_tokens,
                                 call->request.want_scores, err);
    if (status != DKV_OK) {
        free(c);
        return status;
    }
    c->job = job;
    c->n_waiting = call->request.n_blocks;
    job->carrier = c;
    if (t->last != NULL)
        t->last->next = c;
    else
        t->first = c;
    t->last = c;
    show_waiting(t);
    return DKV_OK;
}

static void unlink_carrier(struct dkv_transport *t, struct carrier *c)
{
    struct carrier *before = NULL;
    for (struct carrier *at = t->first; at != c; at = at->next)
        before = at;
    if (before != NULL)
        before->next = c->next;
    else
        t->first = c->next;
    if (t->last == c)
        t->last = before;
    free(c);
}

static void embedded_cancel(struct dkv_transport *t, struct dkv_job *job)
{
    unlink_carrier(t, job->carrier);
    job->carrier = NULL;
    show_waiting(t);
}

/* ---- computing ---- */

static void fail(struct carrier *c, enum dkv_status status, const char *text)
{
    if (c->status != DKV_OK)
        return; /* the first cause is the one to tell */
    c->status = status;
    snprintf(c->error_text, sizeof(c->error_text), "%s", text);
}

static struct dkv_item make_item(const struct dkv_job *job, uint32_t i)
{
    const struct dkv_call *call = &job->call;
    const struct dkv_block *block = &call->blocks[i];
    struct dropkv_result *result = job->result;
    uint64_t keep_at = 0;
    for (uint32_t before = 0; before < i; before++)
        keep_at += call->plans[before].keep_capacity;
    return (struct dkv_item){
        .block = block,
        .params = &call->request.params,
        .plan = &call->plans[i],
        .keep_out = dkv_result_keep(result) + keep_at,
        .counts_out = result->keep_offsets == NULL
                          ? NULL
                          : (uint32_t *)dkv_result_offsets(result) + 1 + i * block->kv_heads,
        .scores_out = result->scores == NULL
                          ? NULL
                          : dkv_result_scores(result) + i * block->kv_heads * block->n_tokens,
    };
}

/* Takes blocks from the front of the queue. A job whose deadline passed gives none. */
static unsigned fill_batch(struct dkv_transport *t, struct dkv_item *items, struct carrier **owners)
{
    unsigned n = 0;
    const int64_t now_ns = dkv_now_ns();
    for (struct carrier *c = t->first; c != NULL && n < BATCH_MAX; c = c->next) {
        if (now_ns >= c->job->deadline_ns) {
            fail(c, DKV_E_TIMEOUT, "the deadline passed before it was computed");
            c->n_waiting = 0;
        }
        const uint32_t n_blocks = c->job->call.request.n_blocks;
        const bool together = c->job->call.request.params.layers == DKV_LAYERS_CAKE;
        if (together && c->n_waiting > 0 && n_blocks > BATCH_MAX - n) {
            if (n > 0)
                break; /* the next batch is its own */
            fail(c, DKV_E_TOO_LARGE,
                 "layers=cake: more blocks than one batch of this engine takes");
            c->n_waiting = 0;
        }
        for (; c->n_waiting > 0 && c->n_started < n_blocks && n < BATCH_MAX; n++) {
            items[n] = make_item(c->job, c->n_started++);
            owners[n] = c;
        }
    }
    return n;
}

static void run_batch(struct dkv_transport *t, struct dkv_item *items, struct carrier **owners,
                      unsigned n)
{
    struct dkv_error error = {0};
    const int64_t start_ns = dkv_now_ns();
    const enum dkv_status status = dkv_engine_run(t->ops, t->engine, items, n, &error);
    const uint64_t spent_ns = (uint64_t)(dkv_now_ns() - start_ns);
    for (unsigned i = 0; i < n; i++) {
        struct carrier *c = owners[i];
        if (status != DKV_OK)
            fail(c, status, error.text);
        else if (items[i].status != DKV_OK)
            fail(c, items[i].status, items[i].error.text);
        if (i == 0 || owners[i - 1] != c)
            c->job->result->compute_ns += spent_ns;
        c->n_waiting--;
    }
}

/* The heads' counts become offsets, and the gaps between blocks close. */
static void close_ranks(struct dkv_job *job)
{
    const struct dkv_call *call = &job->call;
    int32_t *offsets = dkv_result_offsets(job->result), *keep = dkv_result_keep(job->result);
    const int32_t *from = keep;
    uint64_t head = 0;
    offsets[0] = 0;
    for (uint32_t i = 0; i < call->request.n_blocks; i++) {
        const int32_t begin = offsets[head];
        for (uint32_t h = 0; h < call->blocks[i].kv_heads; h++, head++)
            offsets[head + 1] += offsets[head];
        memmove(keep + begin, from, (size_t)(offsets[head] - begin) * sizeof(*keep));
        from += call->plans[i].keep_capacity;
    }
    job->result->keep_tokens = (uint64_t)offsets[head] / head;
}

static void hand_back_finished(struct dkv_transport *t)
{
    struct dkv_engine_info info;
    struct carrier *next;
    t->ops->info(t->engine, &info);
    for (struct carrier *c = t->first; c != NULL; c = next) {
        next = c->next;
        if (c->n_waiting > 0)
            continue;
        struct dkv_job *job = c->job;
        struct carrier done = *c;
        unlink_carrier(t, c);
        if (done.status == DKV_OK && dkv_now_ns() >= job->deadline_ns)
            fail(&done, DKV_E_TIMEOUT, "the deadline passed while it was computed");
        if (done.status == DKV_OK && job->result->keep_offsets != NULL)
            close_ranks(job);
        dkv_result_set_backend(job->result, info.backend);
        job->result->n_attempts = 1;
        dkv_job_done(job, done.status, done.error_text);
    }
}

static enum dkv_status embedded_dispatch(struct dkv_transport *t, struct dkv_error *err)
{
    struct dkv_item items[BATCH_MAX];
    struct carrier *owners[BATCH_MAX];
    (void)err;
    if (t->first == NULL)
        return DKV_OK;
    const unsigned n = fill_batch(t, items, owners);
    if (n > 0)
        run_batch(t, items, owners, n);
    hand_back_finished(t);
    show_waiting(t);
    return DKV_OK;
}

/* ---- about itself ---- */

static enum dkv_status embedded_health(struct dkv_transport *t, int64_t deadline_ns,
                                       struct dkv_error *err)
{
    (void)t; /* an engine that could be opened is ready */
    (void)deadline_ns;
    (void)err;
    return DKV_OK;
}

static enum dkv_status embedded_info(struct dkv_transport *t, int64_t deadline_ns,
                                     struct dkv_oip_info *info_out, struct dkv_error *err)
{
    struct dkv_engine_info info;
    (void)deadline_ns;
    (void)err;
    t->ops->info(t->engine, &info);
    *info_out = (struct dkv_oip_info){.server = "dropkv-client (embedded)"};
    snprintf(info_out->version, sizeof(info_out->version), "%s", dropkv_version());
    snprintf(info_out->platform, sizeof(info_out->platform), "%s", t->ops->name);
    snprintf(info_out->backend, sizeof(info_out->backend), "%s", info.backend);
    snprintf(info_out->device, sizeof(info_out->device), "%s", info.device);
    return DKV_OK;
}

const struct dkv_transport_ops dkv_transport_embedded = {
    .open = embedded_open,
    .close = embedded_close,
    .submit = embedded_submit,
    .cancel = embedded_cancel,
    .fd = embedded_fd,
    .dispatch = embedded_dispatch,
    .health = embedded_health,
    .info = embedded_info,
};
