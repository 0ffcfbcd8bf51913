/* Golden files as cases. */
#include "tests/support/golden.h"

#include "tests/support/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const dkv_golden_names[] = {
    "batch_bf16", "head80_fp32",          "head96_fp32",    "llama_like_bf16", "mha_fp16",
    "short_fp32", "n_equals_window_fp32", "qwen_like_bf16", "window32_fp16",   NULL,
};

static const char *data_folder(void)
{
    const char *folder = getenv("DKV_TEST_DATA");
    return folder != NULL ? folder : "tests/data";
}

static struct dkv_tensor need(const struct dkv_golden *golden, const char *name)
{
    struct dkv_tensor tensor;
    if (!dkv_tensors_find(golden->tensors, name, &tensor)) {
        fprintf(stderr, "golden: no tensor %s\n", name);
        abort();
    }
    return tensor;
}

/* "max11.r0.05" into its parts. */
static void split_name(struct dkv_golden_keep *keep)
{
    if (sscanf(keep->name, "%7[a-z]%7[0-9].r%15s", keep->pool, keep->kernel, keep->ratio) != 3) {
        fprintf(stderr, "golden: odd name %s\n", keep->name);
        abort();
    }
}

static void list_keeps(struct dkv_golden *golden)
{
    const char prefix[] = "expected.keep.";
    const char *name;
    for (size_t i = 0; (name = dkv_tensors_name(golden->tensors, i)) != NULL; i++) {
        struct dkv_golden_keep *keep = &golden->keeps[golden->n_keeps];
        if (strncmp(name, prefix, sizeof(prefix) - 1) != 0)
            continue;
        snprintf(keep->name, sizeof(keep->name), "%s", name + sizeof(prefix) - 1);
        keep->k = need(golden, name).shape[2];
        split_name(keep);
        golden->n_keeps++;
    }
}

struct dkv_golden *dkv_golden_open(const char *name)
{
    char path[512];
    struct dkv_golden *golden = calloc(1, sizeof(*golden));
    snprintf(path, sizeof(path), "%s/golden/%s.safetensors", data_folder(), name);
    if (golden == NULL || (golden->tensors = dkv_tensors_open(path)) == NULL)
        abort();
    const struct dkv_tensor query = need(golden, "query"), key = need(golden, "key");
    golden->batch = query.shape[0];
    golden->q_heads = query.shape[1];
    golden->q_rows = query.shape[2];
    golden->head_dim = query.shape[3];
    golden->kv_heads = key.shape[1];
    golden->n_tokens = key.shape[2];
    golden->dtype = dkv_dtype_parse(query.dtype);
    list_keeps(golden);
    return golden;
}

void dkv_golden_close(struct dkv_golden *golden)
{
    dkv_tensors_close(golden->tensors);
    free(golden);
}

void dkv_golden_case(const struct dkv_golden *golden, uint64_t batch, struct dkv_case *c)
{
    const char *names[] = {"query", "key", "value"};
    char window[32];
    dkv_case_init(c, (struct dkv_shape){.q_heads = (uint32_t)golden->q_heads,
                                        .kv_heads = (uint32_t)golden->kv_heads,
                                        .head_dim = (uint32_t)golden->head_dim,
                                        .q_rows = golden->q_rows,
                                        .n_tokens = golden->n_tokens,
                                        .q_dtype = golden->dtype});
    for (int side = DKV_QUERY; side <= DKV_VALUE; side++) {
        const struct dkv_tensor tensor = need(golden, names[side]);
        const uint64_t bytes = tensor.bytes / golden->batch;
        memcpy(c->memory[side], (const char *)tensor.data + batch * bytes, bytes);
    }
    snprintf(window, sizeof(window), "%llu", (unsigned long long)golden->q_rows);
    dkv_case_param(c, "window", window);
}

void dkv_golden_budget(struct dkv_case *c, const struct dkv_golden_keep *keep)
{
    dkv_case_param(c, "pool", keep->pool);
    dkv_case_param(c, "kernel", keep->kernel);
    dkv_case_param(c, "keep_ratio", keep->ratio);
}

/* One batch member of a tensor, by bytes. */
static const void *member(const struct dkv_golden *golden, const char *name, uint64_t batch)
{
    const struct dkv_tensor tensor = need(golden, name);
    return (const char *)tensor.data + batch * (tensor.bytes / golden->batch);
}

const double *dkv_golden_score(const struct dkv_golden *golden, uint64_t batch)
{
    return member(golden, "expected.score", batch);
}

const float *dkv_golden_peer_score(const struct dkv_golden *golden, uint64_t batch)
{
    return member(golden, "peer.reference_score", batch);
}

const int32_t *dkv_golden_keep(const struct dkv_golden *golden, size_t keep, uint64_t batch)
{
    char name[64];
    snprintf(name, sizeof(name), "expected.keep.%s", golden->keeps[keep].name);
    return member(golden, name, batch);
}
