/* Blocks in GPU memory of this process, for a daemon that it is lent to and for the engine here. */
#include "tests/bench/gpu_ipc.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/cli/bench_cuda.h"
#include "tests/bench/bench_kernels.h"

void bench_block_make(struct bench_block *b, bool vmm, uint64_t tokens, uint32_t seed)
{
    struct dkv_error err;
    b->q_bytes = (uint64_t)BENCH_Q_HEADS * BENCH_WINDOW * BENCH_DIM * 2;
    b->kv_bytes = (uint64_t)BENCH_KV_HEADS * tokens * BENCH_DIM * 2;
    if (dkv_bench_cuda_new(vmm, b->q_bytes + 2 * b->kv_bytes, &b->memory, &b->buffer, &err) !=
        DKV_OK)
        bench_die("memory", err.text);
    b->query = dropkv_buffer_data(b->buffer);
    b->key = b->query + b->q_bytes;
    b->value = b->key + b->kv_bytes;
    if (bench_fill(b->query, (b->q_bytes + 2 * b->kv_bytes) / 2, DKV_BF16, seed) != cudaSuccess ||
        cudaDeviceSynchronize() != cudaSuccess)
        bench_die("memory", "it cannot be filled");
}

const struct dropkv_param bench_params[BENCH_N_PARAMS] = {
    {"keep_ratio", DROPKV_PARAM_REAL, 0, 0.05, NULL},
    {"window", DROPKV_PARAM_INT, BENCH_WINDOW, 0, NULL},
};

struct dropkv_request bench_request_of(const struct bench_block *b, uint64_t tokens)
{
    struct dropkv_request r = DROPKV_REQUEST_INIT;
    r.batch = 1;
    r.q_heads = BENCH_Q_HEADS;
    r.kv_heads = BENCH_KV_HEADS;
    r.head_dim = BENCH_DIM;
    r.q_rows = BENCH_WINDOW;
    r.n_tokens = tokens;
    r.query = (struct dropkv_tensor){.data = b->query, .dtype = DROPKV_BF16};
    r.key = (struct dropkv_tensor){.data = b->key, .dtype = DROPKV_BF16};
    r.value = (struct dropkv_tensor){.data = b->value, .dtype = DROPKV_BF16};
    r.params = bench_params;
    r.n_params = BENCH_N_PARAMS;
    return r;
}

struct dropkv_client *bench_connect(const struct bench_daemon *server, uint32_t busy_poll_us)
{
    struct dropkv_client *client = NULL;
    struct dropkv_error error;
    const struct dropkv_client_options options = {
        .struct_size = sizeof(options), .max_retries = -1, .busy_poll_us = busy_poll_us};
    if (dropkv_client_open(server->endpoint, &options, &client, &error) != DROPKV_OK)
        bench_die("client", error.text);
    return client;
}

void bench_engine_open(struct bench_engine *e)
{
    struct dkv_engine_config config = {0};
    struct dkv_error err;
    if (dkv_engine_find("cuda:0", &e->ops, &config.device, &err) != DKV_OK ||
        e->ops->open(&config, &e->engine, &err) != DKV_OK) {
        printf("skipped: %s\n", err.text);
        exit(77);
    }
    Dl_info where;
    void *module = dladdr(e->ops, &where) != 0 ? dlopen(where.dli_fname, RTLD_NOW | RTLD_NOLOAD)
                                               : NULL;
    if (module != NULL) {
        *(void **)&e->time_stages = dlsym(module, "dkv_cuda_time_stages");
        *(void **)&e->stage_times = dlsym(module, "dkv_cuda_stage_times");
    }
    if (e->time_stages == NULL || e->stage_times == NULL)
        bench_die("engine", "it has no clock");
    dkv_params_init(&e->params);
    dkv_params_set_text(&e->params, "window", "8", &err);
    dkv_params_set_text(&e->params, "keep_ratio", "0.05", &err);
    dkv_params_resolve(&e->params);
}

void bench_item_make(struct bench_engine *e, struct bench_item *to, const struct bench_block *b,
                     uint64_t tokens)
{
    struct dkv_error err;
    to->block = (struct dkv_block){
        .q_heads = BENCH_Q_HEADS,
        .kv_heads = BENCH_KV_HEADS,
        .head_dim = BENCH_DIM,
        .q_rows = BENCH_WINDOW,
        .n_tokens = tokens,
        .query = dkv_view_dense(b->query, b->q_bytes, DKV_BF16, BENCH_WINDOW, BENCH_DIM),
        .key = dkv_view_dense(b->key, b->kv_bytes, DKV_BF16, tokens, BENCH_DIM),
        .value = dkv_view_dense(b->value, b->kv_bytes, DKV_BF16, tokens, BENCH_DIM),
    };
    to->block.query.place = to->block.key.place = to->block.value.place = DKV_PLACE_DEVICE;
    const struct dkv_request request = {.params = e->params, .blocks = &to->block, .n_blocks = 1};
    if (dkv_request_validate(&request, &to->plan, &err) != DKV_OK)
        bench_die("block", err.text);
    to->item = (struct dkv_item){
        .block = &to->block,
        .params = &e->params,
        .plan = &to->plan,
        .keep_out = malloc(sizeof(int32_t) * BENCH_KV_HEADS * to->plan.keep_tokens),
    };
}

void bench_engine_run(struct bench_engine *e, struct bench_item *item)
{
    struct dkv_error err;
    if (dkv_engine_run(e->ops, e->engine, &item->item, 1, &err) != DKV_OK)
        bench_die("engine", err.text);
    if (item->item.status != DKV_OK)
        bench_die("block", item->item.error.text);
}

void bench_engine_time(struct bench_engine *e, struct bench_item *items, unsigned n,
                       double *wall_out, double *device_out)
{
    static struct bench_times wall, device;
    struct dkv_error err;
    float us[4];
    wall.n = device.n = 0;
    for (unsigned i = 0; i < 400; i++) {
        const double began = bench_now_us();
        bench_engine_run(e, &items[i % n]);
        if (i >= 50)
            wall.us[wall.n++] = bench_now_us() - began;
    }
    if (e->time_stages(e->engine, DKV_CUDA_TIMED, &err) != DKV_OK)
        bench_die("engine", err.text);
    for (unsigned i = 0; i < 400; i++) {
        bench_engine_run(e, &items[i % n]);
        if (i >= 50 && e->stage_times(e->engine, us, &err) == DKV_OK)
            device.us[device.n++] = us[0] + us[1] + us[2] + us[3];
    }
    (void)e->time_stages(e->engine, DKV_CUDA_UNTIMED, &err);
    *wall_out = bench_quantile(&wall, 0.5);
    *device_out = bench_quantile(&device, 0.5);
}
