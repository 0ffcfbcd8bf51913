/* Large answers that a worker of the daemon writes to memory of ours, without anybody between them
 * copying: requests that name no output buffer get one of a few that are kept for it.
 *
 * A buffer is shared with the daemon when a first answer of its size is asked for, and used from
 * the next one on: registering takes longer than it saves. It belongs to one answer at a time,
 * until the result is freed. The daemon writes no more once it has said how a request ended; a
 * buffer of which it has not (a request that was given up, a connection that broke) may be written
 * at any time, so it is not used again.
 */
#include "client/ipc_priv.h"

#include <stdlib.h>

/* Smaller ones come with the reply as soon. */
#define ANSWER_BYTES_MIN (UINT64_C(4) << 10)
#define ANSWER_BYTES_MAX (UINT64_C(64) << 20)
#define BUFFER_BYTES_MIN (UINT64_C(256) << 10)

static struct dkv_ipc_answer *as_answer(struct dkv_held *held)
{
    return (struct dkv_ipc_answer *)(void *)held; /* its first member */
}

static void free_answer(struct dkv_held *held)
{
    dropkv_buffer_free(as_answer(held)->buffer);
    free(held);
}

/* Of all blocks; 0 if the answer's length is not known. */
static uint64_t bytes_of(const struct dkv_call *call)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < call->request.n_blocks; i++) {
        const struct dkv_block *block = &call->blocks[i];
        if (call->plans[i].ragged)
            return 0;
        bytes += block->kv_heads * call->plans[i].keep_tokens * sizeof(int32_t);
        bytes += call->request.want_scores ? block->kv_heads * block->n_tokens * sizeof(float) : 0;
    }
    return bytes;
}

/* The smallest that is large enough and free. */
static struct dkv_ipc_answer *find(const struct dkv_transport *t, uint64_t bytes)
{
    struct dkv_ipc_answer *best = NULL;
    uint64_t offset;
    for (struct dkv_ipc_answer *a = t->answers; a != NULL; a = a->next)
        if (a->buffer->bytes >= bytes && atomic_load(&a->held.n_refs) == 1 &&
            dkv_ipc_region_find(t, a->buffer->base, bytes, &offset) != NULL &&
            (best == NULL || a->buffer->bytes < best->buffer->bytes))
            best = a;
    return best;
}

/* For answers to come. Without memory, or where the daemon refuses it, they come with the reply. */
static void make(struct dkv_transport *t, uint64_t bytes)
{
    struct dkv_ipc_answer *a;
    uint64_t room = BUFFER_BYTES_MIN;
    if (t->n_answers == DKV_IPC_ANSWERS_MAX || (a = calloc(1, sizeof(*a))) == NULL)
        return;
    while (room < bytes)
        room *= 2;
    if (dropkv_buffer_new(room, &a->buffer, NULL) != DROPKV_OK) {
        free(a);
        return;
    }
    atomic_init(&a->held.n_refs, 1);
    a->held.free = free_answer;
    if (dkv_ipc_add_buffer(t, a->buffer, true, NULL) != DKV_OK) {
        free_answer(&a->held);
        return;
    }
    a->next = t->answers;
    t->answers = a;
    t->n_answers++;
}

void dkv_ipc_answer_place(struct dkv_transport *t, struct dkv_ipc_carrier *c)
{
    struct dkv_call *call = &c->job->call;
    dkv_ipc_answer_release(c); /* of an attempt that was not sent */
    if (call->is_prompt || call->output.buffer != NULL ||
        (t->welcome.features & DKV_WIRE_FEATURE_OUTPUT) == 0)
        return;
    const uint64_t bytes = bytes_of(call);
    if (bytes < ANSWER_BYTES_MIN || bytes > ANSWER_BYTES_MAX)
        return;
    struct dkv_ipc_answer *a = find(t, bytes);
    if (a == NULL) {
        make(t, bytes);
        return;
    }
    atomic_fetch_add(&a->held.n_refs, 1);
    c->answer = a;
    call->output = (struct dkv_call_output){a->buffer, 0, bytes};
}

void dkv_ipc_answer_release(struct dkv_ipc_carrier *c)
{
    if (c->answer == NULL)
        return;
    c->job->call.output = (struct dkv_call_output){0};
    dkv_held_unref(&c->answer->held);
    c->answer = NULL;
}

void dkv_ipc_answer_hold(struct dkv_ipc_carrier *c)
{
    if (c->answer != NULL)
        dkv_result_hold(c->job->result, &c->answer->held); /* with our reference */
    c->answer = NULL;
}

static void forget(struct dkv_transport *t, struct dkv_ipc_answer *answer)
{
    struct dkv_ipc_answer **at = &t->answers;
    while (*at != answer)
        at = &(*at)->next;
    *at = answer->next;
    t->n_answers--;
    dkv_ipc_remove_buffer(t, answer->buffer);
    dkv_held_unref(&answer->held);
}

void dkv_ipc_answer_give_up(struct dkv_transport *t, struct dkv_ipc_carrier *c)
{
    struct dkv_ipc_answer *answer = c->answer;
    if (answer == NULL)
        return;
    dkv_ipc_answer_release(c);
    if (c->id != 0) /* else it was never sent */
        forget(t, answer);
}

void dkv_ipc_answers_fini(struct dkv_transport *t)
{
    while (t->answers != NULL)
        forget(t, t->answers);
}
