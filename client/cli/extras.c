/* One table row for each tensor says whose it is and which pointer of a request it becomes. */
#include "client/cli/extras.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN_NAME 96u

static const struct role {
    const char *name;
    unsigned bit;   /* of what a policy takes */
    size_t request; /* the request's pointer */
} roles[DKV_EXTRA_ROLES] = {
    [DKV_ROLE_TOKEN_WEIGHT] = {"token_weight", DKV_EXTRA_TOKEN_WEIGHT,
                               offsetof(struct dropkv_request, token_weight)},
    [DKV_ROLE_CARRY_IN] = {"carry_in", DKV_EXTRA_CARRY_IN,
                           offsetof(struct dropkv_request, carry_in)},
    [DKV_ROLE_EXTERNAL_SCORES] = {"external_scores", DKV_EXTRA_EXTERNAL,
                                  offsetof(struct dropkv_request, external_scores)},
    [DKV_ROLE_VALUE_METRIC] = {"value_metric", DKV_EXTRA_VALUE_METRIC,
                               offsetof(struct dropkv_request, value_metric)},
};

const char *dkv_extra_name(enum dkv_extra_role role)
{
    return roles[role].name;
}

/* ---- finding ---- */

static unsigned taken_by(const char *policy)
{
    struct dkv_params params;
    dkv_params_init(&params);
    if (policy != NULL)
        (void)dkv_params_set_text(&params, "policy", policy, NULL);
    return dkv_policy_info(params.policy)->extras;
}

/* NAME with the block's text for `{}`, or PREFIXrole. NULL: no memory. */
static char *tensor_name(const char *pattern, const struct dkv_named_block *block, const char *role)
{
    char *name = NULL;
    const char *braces = pattern != NULL ? strstr(pattern, "{}") : NULL;
    int length;
    if (pattern == NULL)
        length = asprintf(&name, "%.*s%s", (int)block->prefix_length, block->prefix, role);
    else if (braces == NULL)
        length = asprintf(&name, "%s", pattern);
    else
        length = asprintf(&name, "%.*s%.*s%s", (int)(braces - pattern), pattern,
                          (int)block->text_length, block->prefix, braces + 2);
    return length < 0 ? NULL : name;
}

/* In the block's own file first. */
static const struct dkv_tensor *find_tensor(const struct dkv_extra_sources *sources,
                                            const struct dkv_named_block *block, const char *name)
{
    const struct dkv_tensor *tensor = NULL;
    if (block->file != NULL)
        tensor = dkv_tensor_index_find(&block->file->index, name);
    for (size_t i = 0; tensor == NULL && i < sources->n_files; i++)
        tensor = dkv_tensor_index_find(&sources->files[i].index, name);
    return tensor;
}

/* *tensor_out is NULL if there is none and none was named. */
static enum dkv_status find_role(const struct dkv_extra_sources *sources,
                                 const struct dkv_named_block *block, unsigned taken,
                                 enum dkv_extra_role role, const struct dkv_tensor **tensor_out,
                                 struct dkv_error *err)
{
    char shown[SHOWN_NAME];
    const char *pattern = sources->names[role];
    enum dkv_status status = DKV_OK;
    *tensor_out = sources->tensors[role];
    if (*tensor_out != NULL || (pattern == NULL && !(taken & roles[role].bit)))
        return DKV_OK;
    char *name = tensor_name(pattern, block, roles[role].name);
    if (name == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "no memory for a name");
    *tensor_out = find_tensor(sources, block, name);
    if (*tensor_out == NULL && pattern != NULL)
        status = dkv_error_set(err, DKV_E_INVALID, "%s: there is no tensor %s", roles[role].name,
                               dkv_printable(name, shown, sizeof(shown)));
    free(name);
    return status;
}

/* ---- shapes ---- */

static enum dkv_status check_shape(const struct dkv_tensor *tensor, enum dkv_extra_role role,
                                   const struct dropkv_request *r, struct dkv_error *err)
{
    const bool metric = role == DKV_ROLE_VALUE_METRIC;
    const uint64_t needed[3] = {metric ? r->q_heads : r->batch, metric ? r->v_dim : r->kv_heads,
                                metric ? r->v_dim : r->n_tokens};
    const unsigned skipped = !metric && r->batch == 1 && tensor->n_dims == 2 ? 1 : 0;
    const char *name = roles[role].name;
    if (tensor->dtype != DKV_FP32)
        return dkv_error_set(err, DKV_E_UNSUPPORTED, "%s: elements of type %s, F32 is needed", name,
                             tensor->type_name);
    if (tensor->n_dims + skipped != 3)
        return dkv_error_set(err, DKV_E_INVALID, "%s: %u dimensions; %s are expected", name,
                             tensor->n_dims,
                             metric ? "q_heads, v_dim, v_dim" : "[batch,] kv_heads, tokens");
    for (unsigned i = 0; i < tensor->n_dims; i++)
        if (tensor->shape[i] != needed[i + skipped])
            return dkv_error_set(err, DKV_E_INVALID, "%s: shape[%u] is %llu, the block needs %llu",
                                 name, i, (unsigned long long)tensor->shape[i],
                                 (unsigned long long)needed[i + skipped]);
    return DKV_OK;
}

/* The tensor where it lies, or a copy that floats can be read from. */
static const float *aligned(const struct dkv_tensor *tensor, float **copy_out)
{
    if ((uintptr_t)tensor->data % _Alignof(float) == 0)
        return (const float *)(const void *)tensor->data;
    *copy_out = malloc(tensor->bytes > 0 ? tensor->bytes : 1);
    return *copy_out != NULL ? memcpy(*copy_out, tensor->data, tensor->bytes) : NULL;
}

enum dkv_status dkv_extras_add(const struct dkv_extra_sources *sources,
                               const struct dkv_named_block *block, const char *policy,
                               struct dropkv_request *request, struct dkv_extras *extras_out,
                               struct dkv_error *err)
{
    struct dkv_extras extras = {0};
    enum dkv_status status = DKV_OK;
    const unsigned taken = taken_by(policy);
    for (unsigned i = 0; status == DKV_OK && i < DKV_EXTRA_ROLES; i++) {
        const enum dkv_extra_role role = (enum dkv_extra_role)i;
        const struct dkv_tensor *tensor;
        status = find_role(sources, block, taken, role, &tensor, err);
        if (status == DKV_OK && tensor != NULL)
            status = check_shape(tensor, role, request, err);
        if (status != DKV_OK || tensor == NULL)
            continue;
        const float *floats = aligned(tensor, &extras.copies[i]);
        memcpy((char *)request + roles[i].request, &floats, sizeof(floats));
        if (floats == NULL)
            status = dkv_error_set(err, DKV_E_NOMEM, "no memory for %s", roles[i].name);
    }
    if (status != DKV_OK) {
        dkv_extras_fini(&extras);
        return status;
    }
    *extras_out = extras;
    return DKV_OK;
}

void dkv_extras_fini(struct dkv_extras *extras)
{
    for (unsigned i = 0; i < DKV_EXTRA_ROLES; i++)
        free(extras->copies[i]);
    *extras = (struct dkv_extras){0};
}
