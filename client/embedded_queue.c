/* Requests of the embedded engine, from submission to answer.
 *
 * Submitted jobs wait in a queue. Blocks are taken from its front, as many as one batch holds, so
 * that many short ones fill the engine: the daemon's batching. An engine that works by itself gets
 * a batch as soon as it has room for one, at submission if it can be, and dispatch looks which ones
 * are through; another one computes a batch in each dispatch, and the descriptor is readable while
 * the queue is not empty.
 *
 * Results are written when a batch is waited for, on the client's thread, so what was cancelled or
 * timed out is never written to.
 */
#include "client/buffer.h"
#include "client/embedded_priv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the descriptor ---- */

/* Neither can be refused by an eventfd. */
static void set_readable(struct dkv_transport *t, bool readable)
{
    uint64_t count = 1;
    const ssize_t done = readable ? write(t->event_fd, &count, sizeof(count))
                                  : read(t->event_fd, &count, sizeof(count));
    (void)done;
}

/* Nothing more is computed for it. */
static bool is_finished(const struct dkv_embedded_carrier *c)
{
    return c->n_in_batch == 0 && (c->status != DKV_OK || c->n_started == c->n_blocks);
}

/* After the queue has changed. What goes on by itself tells its end by itself. */
static void show_state(struct dkv_transport *t)
{
    if (!dkv_embedded_is_async(t))
        set_readable(t, t->first != NULL);
    for (const struct dkv_embedded_carrier *c = t->first; c != NULL && dkv_embedded_is_async(t);
         c = c->next)
        if (is_finished(c)) {
            set_readable(t, true);
            return;
        }
}

bool dkv_embedded_ready(struct dkv_transport *t)
{
    return !dkv_embedded_is_async(t) || t->n_in_flight == 0 || t->ops->ready(t->engine);
}

/* ---- carriers ---- */

#define ROWS_KEPT_BYTES_MAX (UINT64_C(1) << 20)

static struct dkv_embedded_carrier *get_carrier(struct dkv_transport *t)
{
    struct dkv_embedded_carrier *c = t->idle;
    if (c == NULL)
        return calloc(1, sizeof(*c));
    t->idle = c->next;
    *c = (struct dkv_embedded_carrier){
        .rings = c->rings, .rings_room = c->rings_room, .rows = c->rows, .rows_room = c->rows_room};
    return c;
}

/* One that is not in the queue. */
static void put_carrier(struct dkv_transport *t, struct dkv_embedded_carrier *c)
{
    dkv_call_fini(&c->call);
    if (c->rows_room > ROWS_KEPT_BYTES_MAX) {
        free(c->rows);
        c->rows = NULL;
        c->rows_room = 0;
    }
    c->next = t->idle;
    t->idle = c;
}

static void remove_carrier(struct dkv_transport *t, struct dkv_embedded_carrier *c)
{
    struct dkv_embedded_carrier **at = &t->first;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    put_carrier(t, c);
}

/* The first cause is the one to tell. */
static void fail(struct dkv_embedded_carrier *c, enum dkv_status status, const char *text)
{
    if (c->status != DKV_OK)
        return;
    c->status = status;
    snprintf(c->error_text, sizeof(c->error_text), "%s", text);
}

/* ---- computing ---- */

static struct dkv_item make_item(const struct dkv_embedded_carrier *c, uint32_t i)
{
    const struct dkv_call *call = &c->job->call;
    const struct dkv_block *block = &call->blocks[i];
    uint64_t keep_at = 0;
    for (uint32_t before = 0; before < i; before++)
        keep_at += call->plans[before].keep_capacity;
    return (struct dkv_item){
        .block = block,
        .params = &c->params,
        .plan = &call->plans[i],
        .keep_out = c->keep + keep_at,
        .counts_out = c->offsets == NULL ? NULL : (uint32_t *)c->offsets + 1 + i * block->kv_heads,
        .scores_out = c->scores == NULL ? NULL : c->scores + i * block->kv_heads * block->n_tokens,
    };
}

static uint64_t answer_bytes(const struct dkv_embedded_carrier *c, uint32_t i)
{
    const struct dkv_call *call = &c->job->call;
    const struct dkv_block *block = &call->blocks[i];
    return call->plans[i].keep_capacity * sizeof(int32_t) +
           (call->request.want_scores ? block->kv_heads * block->n_tokens * sizeof(float) : 0);
}

/* layers=cake deals out one budget to all blocks of a request: they go in one batch. False: not in
 * this one. */
static bool fits_together(struct dkv_embedded_carrier *c, unsigned n)
{
    if (c->params.layers != DKV_LAYERS_CAKE || c->n_blocks <= DKV_EMBEDDED_BATCH_MAX - n)
        return true;
    if (n == 0)
        fail(c, DKV_E_TOO_LARGE, "layers=cake: more blocks than one batch of this engine takes");
    return n == 0;
}

/* Has the device put query rows in order, for the batch that is filled. False: not in this one. */
static bool unroll(struct dkv_transport *t, struct dkv_embedded_carrier *c, unsigned n)
{
    struct dkv_call *call = &c->job->call;
    struct dkv_error error;
    if (!call->is_prompt || c->rings[c->n_started].n_rows == 0)
        return true;
    if (t->ops->unroll == NULL) {
        (void)dkv_error_set(&error, DKV_E_UNSUPPORTED,
                            "stash: the %s engine cannot read GPU memory", t->ops->name);
        fail(c, error.status, error.text);
        return true;
    }
    const struct dkv_ring ring = {c->rings[c->n_started].first, c->rings[c->n_started].n_rows};
    const enum dkv_status status = t->ops->unroll(t->engine, &ring, &call->blocks[c->n_started],
                                                  &error);
    if (status == DKV_E_BUSY && n > 0)
        return false;
    if (status != DKV_OK)
        fail(c, status, error.text);
    return true;
}

/* Takes blocks from the front of the queue. */
static void fill_batch(struct dkv_transport *t, struct dkv_embedded_batch *batch)
{
    uint64_t bytes = 0;
    batch->n = 0;
    for (struct dkv_embedded_carrier *c = t->first; c != NULL; c = c->next) {
        if (c->status == DKV_OK && c->n_started == 0 && !fits_together(c, batch->n))
            return; /* the next batch is its own */
        while (c->status == DKV_OK && c->n_started < c->n_blocks) {
            bytes += answer_bytes(c, c->n_started);
            if (batch->n == DKV_EMBEDDED_BATCH_MAX ||
                (batch->n > 0 && bytes > DKV_BATCH_ANSWER_BYTES &&
                 c->params.layers != DKV_LAYERS_CAKE) ||
                !unroll(t, c, batch->n))
                return;
            if (c->status != DKV_OK)
                break;
            batch->items[batch->n] = make_item(c, c->n_started++);
            batch->owners[batch->n++] = c;
            c->n_in_batch++;
        }
    }
}

/* The batch's owners learn what became of it. */
static void settle(struct dkv_transport *t, struct dkv_embedded_batch *batch,
                   enum dkv_status status, const struct dkv_error *error)
{
    const int64_t now_ns = dkv_now_ns();
    const int64_t begin_ns = batch->start_ns > t->last_done_ns ? batch->start_ns : t->last_done_ns;
    for (unsigned i = 0; i < batch->n; i++) {
        struct dkv_embedded_carrier *c = batch->owners[i];
        const struct dkv_item *item = &batch->items[i];
        if (status != DKV_OK)
            fail(c, status, error->text);
        else if (item->status != DKV_OK)
            fail(c, item->status, item->error.text);
        if (c->job != NULL && (i == 0 || batch->owners[i - 1] != c))
            c->job->result->compute_ns += (uint64_t)(now_ns - begin_ns);
        c->n_in_batch--;
    }
    t->lost = t->lost || status == DKV_E_DEVICE;
    t->last_done_ns = now_ns;
}

/* Gives the engine what it has room for. */
static void start_batches(struct dkv_transport *t)
{
    while (t->n_in_flight < t->depth) {
        struct dkv_embedded_batch *batch =
            &t->batches[(t->oldest + t->n_in_flight) % DKV_EMBEDDED_DEPTH_MAX];
        struct dkv_error error = {0};
        fill_batch(t, batch);
        if (batch->n == 0)
            return;
        batch->start_ns = dkv_now_ns();
        const enum dkv_status status = t->ops->submit(t->engine, batch->items, batch->n, &error);
        if (status == DKV_OK)
            t->n_in_flight++;
        else
            settle(t, batch, status, &error);
    }
}

static void finish_oldest(struct dkv_transport *t)
{
    struct dkv_embedded_batch *batch = &t->batches[t->oldest];
    struct dkv_error error = {0};
    const enum dkv_status status = t->ops->wait(t->engine, &error);
    t->oldest = (t->oldest + 1) % DKV_EMBEDDED_DEPTH_MAX;
    t->n_in_flight--;
    settle(t, batch, status, &error);
}

/* ---- the end of a job ---- */

/* The heads' counts become offsets, and the gaps between blocks close. */
static void close_ranks(const struct dkv_embedded_carrier *c)
{
    struct dkv_job *job = c->job;
    const struct dkv_call *call = &job->call;
    int32_t *offsets = c->offsets, *keep = c->keep;
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

static void hand_back(struct dkv_transport *t, struct dkv_embedded_carrier *c)
{
    struct dkv_engine_info info;
    struct dkv_job *job = c->job;
    if (c->status == DKV_OK && c->offsets != NULL)
        close_ranks(c);
    t->ops->info(t->engine, &info);
    dkv_result_set_backend(job->result, info.backend);
    job->result->n_attempts = 1;
    c->job = NULL;
    dkv_job_done(job, c->status, c->error_text);
}

/* The batches that its blocks are in go on without it. */
static void leave_batches(struct dkv_transport *t, struct dkv_embedded_carrier *c)
{
    for (unsigned i = 0; i < t->n_in_flight; i++) {
        struct dkv_embedded_batch *batch = &t->batches[(t->oldest + i) % DKV_EMBEDDED_DEPTH_MAX];
        for (unsigned j = 0; j < batch->n; j++)
            if (batch->owners[j] == c)
                batch->items[j].status = DKV_E_CANCELLED;
    }
    c->call = c->job->call;
    c->job->call = (struct dkv_call){0};
}

static void expire(struct dkv_transport *t)
{
    const int64_t now_ns = dkv_now_ns();
    for (struct dkv_embedded_carrier *c = t->first; c != NULL; c = c->next) {
        if (c->job == NULL || c->status != DKV_OK || now_ns < c->job->deadline_ns)
            continue;
        fail(c, DKV_E_TIMEOUT,
             c->n_started == 0 ? "the deadline passed before it was computed"
                               : "the deadline passed while it was computed");
        if (c->n_in_batch == 0)
            continue;
        leave_batches(t, c);
        hand_back(t, c);
    }
}

static void hand_back_finished(struct dkv_transport *t)
{
    struct dkv_embedded_carrier *next;
    for (struct dkv_embedded_carrier *c = t->first; c != NULL; c = next) {
        next = c->next;
        if (!is_finished(c))
            continue;
        if (c->job != NULL)
            hand_back(t, c);
        remove_carrier(t, c);
    }
}

/* The alarm goes off for the first deadline of what is left. */
static void set_alarm(struct dkv_transport *t)
{
    const struct dkv_embedded_carrier *c;
    if (t->alarm.set_ns <= dkv_now_ns())
        (void)dkv_alarm_clear(&t->alarm, NULL);
    for (c = t->first; c != NULL; c = c->next)
        if (c->job != NULL)
            dkv_alarm_set(&t->alarm, c->job->deadline_ns);
}

/* ---- the transport's functions ---- */

/* In the caller's memory: indices, scores, then the offsets of heads that differ. */
static enum dkv_status place_result(struct dkv_embedded_carrier *c, uint64_t n_keep,
                                    struct dkv_error *err)
{
    const struct dkv_call *call = &c->job->call;
    const struct dkv_call_output *output = &call->output;
    const struct dkv_block *block = &call->blocks[0];
    const uint64_t n_heads = (uint64_t)call->request.n_blocks * block->kv_heads;
    const uint64_t n_scores = call->request.want_scores ? n_heads * block->n_tokens : 0;
    const bool ragged = call->plans[0].ragged;
    const uint64_t bytes = (n_keep + n_scores + (ragged ? n_heads + 1 : 0)) * sizeof(int32_t);
    if (output->buffer->on_gpu)
        return dkv_error_set(err, DKV_E_INVALID, "output: the buffer is GPU memory, not a memfd");
    if (!dkv_range_fits(output->offset, output->bytes, output->buffer->bytes))
        return dkv_error_set(err, DKV_E_INVALID,
                             "output: %zu bytes at %zu are not within the buffer's %zu",
                             output->bytes, output->offset, output->buffer->bytes);
    if (bytes > output->bytes)
        return dkv_error_set(err, DKV_E_INVALID, "output: %zu bytes of room, the answer needs %llu",
                             output->bytes, (unsigned long long)bytes);
    c->keep = (int32_t *)(void *)((uint8_t *)output->buffer->base + output->offset);
    c->scores = n_scores > 0 ? (float *)(void *)(c->keep + n_keep) : NULL;
    c->offsets = ragged ? c->keep + n_keep + n_scores : NULL;
    dkv_result_borrow(c->job->result, call->request.n_blocks, block->kv_heads, block->n_tokens,
                      call->plans[0].keep_tokens, c->keep, c->scores);
    c->job->result->keep_offsets = c->offsets;
    return DKV_OK;
}

static enum dkv_status reserve_result(struct dkv_embedded_carrier *c, struct dkv_error *err)
{
    struct dkv_job *job = c->job;
    const struct dkv_call *call = &job->call;
    const struct dkv_block *block = &call->blocks[0];
    uint64_t n_keep = 0;
    for (uint32_t i = 0; i < call->request.n_blocks; i++)
        n_keep += call->plans[i].keep_capacity;
    if (call->output.buffer != NULL)
        return place_result(c, n_keep, err);
    const enum dkv_status status =
        call->plans[0].ragged
            ? dkv_result_reserve_ragged(job->result, call->request.n_blocks, block->kv_heads,
                                        block->n_tokens, n_keep, call->request.want_scores, err)
            : dkv_result_reserve(job->result, call->request.n_blocks, block->kv_heads,
                                 block->n_tokens, call->plans[0].keep_tokens,
                                 call->request.want_scores, err);
    c->keep = dkv_result_keep(job->result);
    c->scores = dkv_result_scores(job->result);
    c->offsets = job->result->keep_offsets != NULL ? dkv_result_offsets(job->result) : NULL;
    return status;
}

/* Asks the engine where a tensor is, once for all sequences. */
static enum dkv_status find_places(struct dkv_transport *t, struct dkv_call *call,
                                   struct dkv_error *err)
{
    struct dkv_block *first = &call->blocks[0];
    const struct {
        const char *name;
        struct dkv_view *view;
    } tensors[] = {{"query", &first->query}, {"key", &first->key}, {"value", &first->value}};
    struct dkv_error why;
    if (t->ops->place == NULL)
        return DKV_OK;
    for (unsigned i = 0; i < sizeof(tensors) / sizeof(tensors[0]); i++)
        if (t->ops->place(t->engine, tensors[i].view->base, &tensors[i].view->place, &why) !=
            DKV_OK)
            return dkv_error_set(err, why.status, "%s: %.200s", tensors[i].name, why.text);
    for (uint32_t i = 1; i < call->request.n_blocks; i++) {
        call->blocks[i].query.place = first->query.place;
        call->blocks[i].key.place = first->key.place;
        call->blocks[i].value.place = first->value.place;
    }
    return DKV_OK;
}

static enum dkv_status prepare(struct dkv_transport *t, struct dkv_embedded_carrier *c,
                               struct dkv_error *err)
{
    struct dkv_call *call = &c->job->call;
    if (call->fence.buffer != NULL)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "fence: an embedded engine reads what is there when it is its turn in "
                             "the stream");
    enum dkv_status status = call->is_prompt ? dkv_embedded_build_prompt(t, c, err)
                                             : find_places(t, call, err);
    if (status == DKV_OK)
        status = reserve_result(c, err);
    c->params = call->request.params;
    c->n_blocks = call->request.n_blocks;
    return status;
}

enum dkv_status dkv_embedded_submit(struct dkv_transport *t, struct dkv_job *job,
                                    struct dkv_error *err)
{
    struct dkv_embedded_carrier *c = get_carrier(t), **last = &t->first;
    if (c == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a request");
    c->job = job;
    const enum dkv_status status = prepare(t, c, err);
    if (status != DKV_OK) {
        put_carrier(t, c);
        return status;
    }
    while (*last != NULL)
        last = &(*last)->next;
    *last = c;
    job->carrier = c;
    if (dkv_embedded_is_async(t)) {
        start_batches(t);
        dkv_alarm_set(&t->alarm, job->deadline_ns);
    }
    show_state(t);
    return DKV_OK;
}

/* What the engine reads of it is read to the end, so that the caller's memory is its own again. */
void dkv_embedded_cancel(struct dkv_transport *t, struct dkv_job *job)
{
    struct dkv_embedded_carrier *c = job->carrier;
    while (c->n_in_batch > 0)
        finish_oldest(t);
    remove_carrier(t, c);
    job->carrier = NULL;
    if (dkv_embedded_is_async(t))
        start_batches(t);
    show_state(t);
}

void dkv_embedded_let_go(struct dkv_transport *t)
{
    while (t->n_in_flight > 0)
        finish_oldest(t);
    show_state(t);
}

enum dkv_status dkv_embedded_dispatch(struct dkv_transport *t, struct dkv_error *err)
{
    (void)err;
    if (dkv_embedded_is_async(t)) {
        set_readable(t, false); /* before it is looked which batches are through */
        while (t->n_in_flight > 0 && t->ops->ready(t->engine))
            finish_oldest(t);
    }
    expire(t);
    start_batches(t);
    if (!dkv_embedded_is_async(t) && t->n_in_flight > 0) {
        finish_oldest(t);
        expire(t);
    }
    hand_back_finished(t);
    if (dkv_embedded_is_async(t))
        set_alarm(t);
    show_state(t);
    return DKV_OK;
}

void dkv_embedded_queue_fini(struct dkv_transport *t)
{
    while (t->n_in_flight > 0)
        finish_oldest(t);
    while (t->first != NULL)
        remove_carrier(t, t->first);
    while (t->idle != NULL) {
        struct dkv_embedded_carrier *c = t->idle;
        t->idle = c->next;
        free(c->rings);
        free(c->rows);
        free(c);
    }
}
