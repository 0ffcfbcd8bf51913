/* From the public request to blocks.
 *
 * The public tensors have no size of their own: the memory that bounds a view is worked out from
 * its shape and strides, in checked arithmetic, so that everything behind the gate sees views like
 * those of any other front end.
 */
#include "client/call.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The numbers are the same on both sides of the public header. */
_Static_assert((int)DROPKV_E_INTERNAL == (int)DKV_E_INTERNAL, "status numbers");
_Static_assert((int)DROPKV_E_UNAVAILABLE == (int)DKV_E_UNAVAILABLE, "status numbers");
_Static_assert((int)DROPKV_E_TOO_LARGE == (int)DKV_E_TOO_LARGE, "status numbers");
_Static_assert((int)DROPKV_BF16 == (int)DKV_BF16, "type numbers");
_Static_assert((int)DROPKV_F8_E5M2 == (int)DKV_F8_E5M2, "type numbers");
_Static_assert(sizeof(struct dropkv_error) == sizeof(struct dkv_error), "error layout");

#define KEPT_BYTES_MAX (1u << 20) /* an array above that is not kept */

enum dkv_status dkv_take_struct(const void *from, size_t least, void *to, size_t bytes,
                                const char *name, const char *macro, struct dkv_error *err)
{
    size_t theirs;
    memcpy(&theirs, from, sizeof(theirs)); /* struct_size comes first */
    if (theirs < least || theirs > 4096)
        return dkv_error_set(err, DKV_E_INVALID,
                             "%s: struct_size %zu was not set by DROPKV_%s_INIT", name, theirs,
                             macro);
    const uint8_t *unknown = (const uint8_t *)from;
    for (size_t i = bytes; i < theirs; i++)
        if (unknown[i] != 0)
            return dkv_error_set(err, DKV_E_UNSUPPORTED,
                                 "%s: uses a field that library version %s does not know", name,
                                 dropkv_version());
    memset(to, 0, bytes);
    memcpy(to, from, theirs < bytes ? theirs : bytes);
    return DKV_OK;
}

static enum dkv_status take_param(struct dkv_params *params, const struct dropkv_param *param,
                                  struct dkv_error *err)
{
    struct dkv_value value = {0};
    if (param->name == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "params: a name is null");
    switch (param->kind) {
    case DROPKV_PARAM_INT:
        value.kind = DKV_VALUE_INT;
        value.integer = param->integer;
        return dkv_params_set(params, param->name, value, err);
    case DROPKV_PARAM_REAL:
        value.kind = DKV_VALUE_REAL;
        value.real = param->real;
        return dkv_params_set(params, param->name, value, err);
    case DROPKV_PARAM_TEXT:
        if (param->text == NULL)
            return dkv_error_set(err, DKV_E_INVALID, "%.40s: the text is null", param->name);
        return dkv_params_set_text(params, param->name, param->text, err);
    }
    return dkv_error_set(err, DKV_E_INVALID, "%.40s: kind %d not in 0..2", param->name,
                         (int)param->kind);
}

static enum dkv_status take_params(struct dkv_params *params, const struct dropkv_param *from,
                                   size_t n, struct dkv_error *err)
{
    dkv_params_init(params);
    if (n > 0 && from == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "params: null, n_params is %zu", n);
    for (size_t i = 0; i < n; i++) {
        enum dkv_status status = take_param(params, &from[i], err);
        if (status != DKV_OK)
            return status;
    }
    dkv_params_resolve(params);
    return DKV_OK;
}

/* One of the three tensors, with the dimensions that the request gives it. */
struct tensor_shape {
    const char *name;
    const struct dropkv_tensor *tensor;
    uint64_t heads;
    uint64_t tokens;
    uint64_t dim;
};

/* Adds the way from the first of `count` steps to the last. */
static bool stretch(int64_t *reach, int64_t stride, uint64_t count)
{
    int64_t way;
    return count <= (uint64_t)INT64_MAX &&
           !__builtin_mul_overflow(stride, count == 0 ? 0 : (int64_t)count - 1, &way) &&
           !__builtin_add_overflow(*reach, way, reach);
}

static enum dkv_status take_view(const struct tensor_shape *shape, struct dkv_view *view_out,
                                 int64_t *batch_stride_out, uint32_t batch, struct dkv_error *err)
{
    const struct dropkv_tensor *t = shape->tensor;
    const uint64_t element = dkv_dtype_bytes((enum dkv_dtype)t->dtype);
    uint64_t token;
    uint64_t head;
    uint64_t sequence;
    if (t->data == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "%s: data is null", shape->name);
    if (element == 0)
        return dkv_error_set(err, DKV_E_UNSUPPORTED,
                             "%s: dtype %d is not one of BF16, FP16, FP32, F8_E4M3, F8_E5M2",
                             shape->name, (int)t->dtype);
    if (!dkv_mul_u64(shape->dim, element, &token) || !dkv_mul_u64(token, shape->tokens, &head) ||
        !dkv_mul_u64(head, shape->heads, &sequence) || sequence > (uint64_t)INT64_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "%s: the size of its shape overflows",
                             shape->name);

    const int64_t token_stride = t->token_stride != 0 ? t->token_stride : (int64_t)token;
    const int64_t head_stride = t->head_stride != 0 ? t->head_stride : (int64_t)head;
    const int64_t batch_stride = t->batch_stride != 0 ? t->batch_stride : (int64_t)sequence;
    int64_t reach = (int64_t)token; /* bytes that one sequence spans */
    int64_t whole = 0;
    if (!stretch(&reach, token_stride, shape->tokens) ||
        !stretch(&reach, head_stride, shape->heads) || !stretch(&whole, batch_stride, batch))
        return dkv_error_set(err, DKV_E_INVALID, "%s: its strides overflow", shape->name);

    *batch_stride_out = batch_stride;
    *view_out = (struct dkv_view){
        .base = t->data,
        .bytes = reach < 0 ? 0 : (uint64_t)reach, /* below 0: the gate refuses such strides */
        .token_stride = token_stride,
        .head_stride = head_stride,
        .dtype = (enum dkv_dtype)t->dtype,
        .place = DKV_PLACE_HOST,
        .scale = t->scale,
    };
    return DKV_OK;
}

/* Copies the small vectors, because a submitted request borrows nothing but the tensors. */
static const float *take_floats(float **next, const float *from, uint32_t n)
{
    if (from == NULL)
        return NULL;
    float *copy = memcpy(*next, from, n * sizeof(float));
    *next += n;
    return copy;
}

/* Sequence i of a [batch][kv_heads][n_tokens] tensor. */
static const float *of_sequence(const struct dropkv_request *r, const float *from, uint32_t i)
{
    return from == NULL ? NULL : from + (size_t)i * r->kv_heads * r->n_tokens;
}

static void next_sequence(struct dkv_view *view, int64_t batch_stride, uint32_t i)
{
    view->base = (const uint8_t *)view->base + batch_stride * (int64_t)i;
}

static enum dkv_status fill_blocks(struct dkv_call *call, const struct dropkv_request *r,
                                   struct dkv_error *err)
{
    const uint64_t v_dim = r->v_dim != 0 ? r->v_dim : r->head_dim;
    const struct tensor_shape query = {"query", &r->query, r->q_heads, r->q_rows, r->head_dim};
    const struct tensor_shape key = {"key", &r->key, r->kv_heads, r->n_tokens, r->head_dim};
    const struct tensor_shape value = {"value", &r->value, r->kv_heads, r->n_tokens, v_dim};
    struct dkv_block first = {
        .q_heads = r->q_heads,
        .kv_heads = r->kv_heads,
        .head_dim = r->head_dim,
        .v_dim = (uint32_t)v_dim,
        .q_rows = r->q_rows,
        .n_tokens = r->n_tokens,
    };
    int64_t q_step;
    int64_t k_step;
    int64_t v_step;
    enum dkv_status status = take_view(&query, &first.query, &q_step, r->batch, err);
    if (status == DKV_OK)
        status = take_view(&key, &first.key, &k_step, r->batch, err);
    if (status == DKV_OK)
        status = take_view(&value, &first.value, &v_step, r->batch, err);
    if (status != DKV_OK)
        return status;
    float *next = call->floats;
    first.query.head_scales = take_floats(&next, r->query.head_scales, r->q_heads);
    first.key.head_scales = take_floats(&next, r->key.head_scales, r->kv_heads);
    first.value.head_scales = take_floats(&next, r->value.head_scales, r->kv_heads);
    first.sink_logits = take_floats(&next, r->sink_logits, r->q_heads);
    first.value_metric = r->value_metric;
    for (uint32_t i = 0; i < r->batch; i++) {
        call->blocks[i] = first;
        next_sequence(&call->blocks[i].query, q_step, i);
        next_sequence(&call->blocks[i].key, k_step, i);
        next_sequence(&call->blocks[i].value, v_step, i);
        call->blocks[i].token_weight = of_sequence(r, r->token_weight, i);
        call->blocks[i].carry_in = of_sequence(r, r->carry_in, i);
        call->blocks[i].external_scores = of_sequence(r, r->external_scores, i);
    }
    return DKV_OK;
}

/* What sizes the allocations below; everything else is the gate's to judge. */
static enum dkv_status check_counts(const struct dropkv_request *r, struct dkv_error *err)
{
    if (r->batch == 0 || r->batch > DKV_BLOCKS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "batch %u not in 1..%u", r->batch, DKV_BLOCKS_MAX);
    if (r->kv_heads == 0 || r->kv_heads > DKV_HEADS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "kv_heads %u not in 1..%u", r->kv_heads,
                             DKV_HEADS_MAX);
    if (r->q_heads == 0 || r->q_heads > DKV_HEADS_MAX)
        return dkv_error_set(err, DKV_E_INVALID, "q_heads %u not in 1..%u", r->q_heads,
                             DKV_HEADS_MAX);
    return DKV_OK;
}

/* ---- memory ---- */

static bool reserve_blocks(struct dkv_call *call, uint32_t n)
{
    if (n <= call->blocks_room)
        return true;
    free(call->blocks);
    free(call->plans);
    call->blocks = malloc(n * sizeof(call->blocks[0]));
    call->plans = malloc(n * sizeof(call->plans[0]));
    call->blocks_room = call->blocks != NULL && call->plans != NULL ? n : 0;
    return call->blocks_room == n;
}

static bool reserve_floats(struct dkv_call *call, uint32_t n)
{
    if (n <= call->floats_room)
        return true;
    free(call->floats);
    call->floats = malloc(n * sizeof(call->floats[0]));
    call->floats_room = call->floats != NULL ? n : 0;
    return call->floats != NULL;
}

static bool reserve_table(struct dkv_call *call, size_t bytes)
{
    if (bytes <= call->table_room)
        return true;
    free(call->table);
    call->table = malloc(bytes);
    call->table_room = call->table != NULL ? bytes : 0;
    return call->table != NULL;
}

bool dkv_call_reserve(struct dkv_call *call, uint32_t n_blocks, uint32_t n_floats)
{
    return reserve_blocks(call, n_blocks) && reserve_floats(call, n_floats);
}

void dkv_call_fini(struct dkv_call *call)
{
    free(call->blocks);
    free(call->plans);
    free(call->floats);
    free(call->table);
    *call = (struct dkv_call){0};
}

void dkv_call_trim(struct dkv_call *call)
{
    if (call->blocks_room * (sizeof(call->blocks[0]) + sizeof(call->plans[0])) > KEPT_BYTES_MAX ||
        call->table_room > KEPT_BYTES_MAX)
        dkv_call_fini(call);
}

/* ---- what both have ---- */

static enum dkv_status check_places(const struct dkv_call *call, struct dkv_error *err)
{
    if (call->fence.buffer != NULL && call->fence.offset % 8 != 0)
        return dkv_error_set(err, DKV_E_INVALID, "fence_offset %zu is not a multiple of 8",
                             call->fence.offset);
    if (call->output.buffer != NULL && call->output.offset % 4 != 0)
        return dkv_error_set(err, DKV_E_INVALID, "output_offset %zu is not a multiple of 4",
                             call->output.offset);
    return DKV_OK;
}

/* ---- a request ---- */

enum dkv_status dkv_call_init(struct dkv_call *call, const struct dropkv_request *request,
                              struct dkv_error *err)
{
    struct dropkv_request r = {0};
    enum dkv_status status = dkv_take_struct(request, offsetof(struct dropkv_request, want_scores),
                                             &r, sizeof(r), "request", "REQUEST", err);
    if (status == DKV_OK)
        status = check_counts(&r, err);
    if (status == DKV_OK)
        status = take_params(&call->request.params, r.params, r.n_params, err);
    call->fence = (struct dkv_call_fence){r.fence, r.fence_offset, r.fence_value};
    call->output = (struct dkv_call_output){r.output, r.output_offset, r.output_bytes};
    if (status == DKV_OK)
        status = check_places(call, err);
    if (status != DKV_OK)
        return status;
    if (!dkv_call_reserve(call, r.batch, 2 * (r.kv_heads + r.q_heads)))
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for %u blocks", r.batch);
    call->is_prompt = false;
    call->request.blocks = call->blocks;
    call->request.n_blocks = r.batch;
    call->request.want_scores = r.want_scores != 0;
    memset(call->plans, 0, r.batch * sizeof(call->plans[0]));
    status = fill_blocks(call, &r, err);
    return status == DKV_OK ? dkv_request_validate(&call->request, call->plans, err) : status;
}

/* ---- a prompt ---- */

static enum dkv_status check_table(const struct dropkv_prompt *prompt, struct dkv_error *err)
{
    const bool any = prompt->table != NULL || prompt->table_buffer != NULL;
    if (prompt->table != NULL && prompt->table_buffer != NULL)
        return dkv_error_set(err, DKV_E_INVALID, "table and table_buffer exclude each other");
    if (any && prompt->table_entry_bytes != 4 && prompt->table_entry_bytes != 8)
        return dkv_error_set(err, DKV_E_INVALID, "table_entry_bytes %u is not 4 or 8",
                             prompt->table_entry_bytes);
    if (any != (prompt->table_entries > 0))
        return dkv_error_set(err, DKV_E_INVALID, "table_entries %u %s a page table",
                             prompt->table_entries, any ? "with" : "without");
    return DKV_OK;
}

static enum dkv_status check_prompt(const struct dropkv_prompt *prompt, struct dkv_error *err)
{
    if (prompt->cache == NULL || prompt->stash == NULL)
        return dkv_error_set(err, DKV_E_INVALID, "%s is null",
                             prompt->cache == NULL ? "cache" : "stash");
    return check_table(prompt, err);
}

enum dkv_status dkv_call_init_prompt(struct dkv_call *call, const struct dropkv_prompt *prompt,
                                     struct dkv_error *err)
{
    struct dropkv_prompt *p = &call->prompt;
    enum dkv_status status = dkv_take_struct(prompt, offsetof(struct dropkv_prompt, user), p,
                                             sizeof(*p), "prompt", "PROMPT", err);
    if (status != DKV_OK)
        return status;
    call->fence = (struct dkv_call_fence){p->fence, p->fence_offset, p->fence_value};
    call->output = (struct dkv_call_output){p->output, p->output_offset, p->output_bytes};
    status = check_prompt(p, err);
    if (status == DKV_OK)
        status = check_places(call, err);
    if (status == DKV_OK)
        status = take_params(&call->request.params, p->params, p->n_params, err);
    if (status != DKV_OK)
        return status;
    if (p->table != NULL) {
        const size_t bytes = (size_t)p->table_entries * p->table_entry_bytes;
        if (!reserve_table(call, bytes))
            return dkv_error_set(err, DKV_E_NOMEM, "no memory for %u table entries",
                                 p->table_entries);
        p->table = memcpy(call->table, p->table, bytes);
    }
    p->params = NULL;
    call->is_prompt = true;
    call->request.blocks = NULL;
    call->request.n_blocks = 0;
    call->request.want_scores = p->want_scores != 0;
    return DKV_OK;
}
