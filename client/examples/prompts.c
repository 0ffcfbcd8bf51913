/* An engine's KV cache, registered once and scored prompt by prompt, by a daemon that reads it in
 * place:
 *
 *     cc prompts.c -o prompts $(pkg-config --cflags --libs dropkv)
 *     ./prompts unix:///run/dropkv/dropkvd.sock
 *
 * The cache is paged, as in vLLM: a pool of pages for each layer, keys and values of a page side by
 * side, and for each sequence a table of the pages it has. The last query rows of each sequence go
 * into a ring while it is prefilled. A request then is the sequence's page table and a few numbers;
 * the answer for all layers comes back in one message. Tokens 100 to 103 of each sequence are what
 * the last rows look for. */
#include <dropkv.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 4, Q_HEADS = 8, KV_HEADS = 2, DIM = 64, PAGE = 16, POOL = 256 };
enum { SEQUENCES = 3, RING = 32, WINDOW = 8, NEEDLE = 100 };

/* Token t of a page, KV head h. */
struct page {
    float key[PAGE][KV_HEADS][DIM];
    float value[PAGE][KV_HEADS][DIM];
};

struct pool {
    struct page page[LAYERS][POOL];
};

struct stash {
    float row[LAYERS][SEQUENCES][RING][Q_HEADS][DIM];
};

struct sequence {
    uint32_t slot;
    uint32_t n_tokens;
    uint32_t newest_row;
    int32_t table[POOL];
};

/* What is there for the program's whole life. */
struct engine {
    struct dropkv_client *client;
    struct dropkv_buffer *pool;
    struct dropkv_buffer *stash;
    struct dropkv_cache *cache_handle;
    struct dropkv_stash *stash_handle;
    int32_t n_used_pages;
};

static float noise(void)
{
    return (float)rand() / (float)RAND_MAX - 0.5f;
}

static enum dropkv_status register_cache(struct engine *e, struct dropkv_error *error)
{
    struct dropkv_layer layers[LAYERS];
    struct dropkv_cache_layout layout = DROPKV_CACHE_LAYOUT_INIT;
    int l;
    memset(layers, 0, sizeof(layers));
    for (l = 0; l < LAYERS; l++) {
        struct dropkv_view *key = &layers[l].key;
        key->buffer = e->pool;
        key->offset = offsetof(struct pool, page) + (size_t)l * POOL * sizeof(struct page);
        key->dtype = DROPKV_FP32;
        key->page_stride = sizeof(struct page);
        key->token_stride = KV_HEADS * DIM * sizeof(float);
        key->head_stride = DIM * sizeof(float);
        layers[l].value = *key;
        layers[l].value.offset += offsetof(struct page, value);
    }
    layout.q_heads = Q_HEADS;
    layout.kv_heads = KV_HEADS;
    layout.head_dim = DIM;
    layout.page_tokens = PAGE;
    layout.n_layers = LAYERS;
    layout.layers = layers;
    return dropkv_cache_add(e->client, &layout, &e->cache_handle, error);
}

static enum dropkv_status register_stash(struct engine *e, struct dropkv_error *error)
{
    struct dropkv_stash_layout layout = DROPKV_STASH_LAYOUT_INIT;
    layout.buffer = e->stash;
    layout.dtype = DROPKV_FP32;
    layout.n_layers = LAYERS;
    layout.n_slots = SEQUENCES;
    layout.n_rows = RING;
    layout.head_stride = DIM * sizeof(float);
    layout.row_stride = Q_HEADS * layout.head_stride;
    layout.slot_stride = RING * layout.row_stride;
    layout.layer_stride = SEQUENCES * layout.slot_stride;
    return dropkv_stash_add(e->client, &layout, &e->stash_handle, error);
}

static enum dropkv_status set_up(struct engine *e, const char *endpoint, struct dropkv_error *error)
{
    enum dropkv_status status = dropkv_client_open(endpoint, NULL, &e->client, error);
    if (status == DROPKV_OK)
        status = dropkv_buffer_new(sizeof(struct pool), &e->pool, error);
    if (status == DROPKV_OK)
        status = dropkv_buffer_new(sizeof(struct stash), &e->stash, error);
    if (status == DROPKV_OK)
        status = dropkv_client_add_buffer(e->client, e->pool, error);
    if (status == DROPKV_OK)
        status = dropkv_client_add_buffer(e->client, e->stash, error);
    if (status == DROPKV_OK)
        status = register_cache(e, error);
    return status == DROPKV_OK ? register_stash(e, error) : status;
}

/* Stands for a forward pass: pages are taken from the pool and written, and query rows with them.
 */
static void prefill(struct engine *e, struct sequence *s)
{
    struct pool *pool = dropkv_buffer_data(e->pool);
    struct stash *stash = dropkv_buffer_data(e->stash);
    const uint32_t n_pages = (s->n_tokens + PAGE - 1) / PAGE;
    uint32_t i;
    int l, h, d;
    for (i = 0; i < n_pages; i++)
        s->table[i] = e->n_used_pages++;
    for (l = 0; l < LAYERS; l++) {
        for (i = 0; i < s->n_tokens; i++)
            for (h = 0; h < Q_HEADS; h++)
                for (d = 0; d < DIM; d++)
                    stash->row[l][s->slot][i % RING][h][d] = noise();
        for (i = 0; i < s->n_tokens; i++) {
            struct page *page = &pool->page[l][s->table[i / PAGE]];
            for (h = 0; h < KV_HEADS; h++)
                for (d = 0; d < DIM; d++) {
                    const float *rows = stash->row[l][s->slot][(s->n_tokens - 1) % RING][h * 4];
                    page->key[i % PAGE][h][d] = i / 4 == NEEDLE / 4 ? 4 * rows[d] : noise();
                    page->value[i % PAGE][h][d] = noise();
                }
        }
    }
    s->newest_row = (s->n_tokens - 1) % RING;
}

static enum dropkv_status score(struct engine *e, const struct sequence *s,
                                struct dropkv_result **result, struct dropkv_error *error)
{
    struct dropkv_param params[2];
    struct dropkv_prompt prompt = DROPKV_PROMPT_INIT;
    params[0] = dropkv_int("keep_tokens", 24);
    params[1] = dropkv_int("window", WINDOW);
    prompt.cache = e->cache_handle;
    prompt.stash = e->stash_handle;
    prompt.slot = s->slot;
    prompt.newest_row = s->newest_row;
    prompt.q_rows = RING;
    prompt.n_tokens = s->n_tokens;
    prompt.table = s->table;
    prompt.table_entries = (s->n_tokens + PAGE - 1) / PAGE;
    prompt.table_entry_bytes = sizeof(s->table[0]);
    prompt.params = params;
    prompt.n_params = 2;
    return dropkv_score_prompt(e->client, &prompt, result, error);
}

static void print(const struct sequence *s, const struct dropkv_result *result)
{
    const uint64_t per_layer = result->kv_heads * result->keep_tokens;
    uint64_t i, l;
    printf("sequence %u, %u tokens, answered in %.3f ms\n", s->slot, s->n_tokens,
           (double)result->elapsed_ns / 1e6);
    for (l = 0; l < result->batch; l++) {
        printf("  layer %d, KV head 0 keeps", (int)l);
        for (i = 0; i < result->keep_tokens; i++)
            printf(" %d", (int)result->keep_indices[l * per_layer + i]);
        printf("\n");
    }
}

static enum dropkv_status run(struct engine *e, struct dropkv_error *error)
{
    uint32_t i;
    for (i = 0; i < SEQUENCES; i++) {
        struct sequence s;
        struct dropkv_result *result;
        enum dropkv_status status;
        memset(&s, 0, sizeof(s));
        s.slot = i;
        s.n_tokens = 500 + 300 * i;
        prefill(e, &s);
        status = score(e, &s, &result, error);
        if (status != DROPKV_OK)
            return status;
        print(&s, result);
        dropkv_result_free(result); /* used again for the next prompt */
    }
    return DROPKV_OK;
}

int main(int argc, char **argv)
{
    const char *endpoint = argc > 1 ? argv[1] : "unix:///run/dropkv/dropkvd.sock";
    struct engine e;
    struct dropkv_error error;
    enum dropkv_status status;
    memset(&e, 0, sizeof(e));
    status = set_up(&e, endpoint, &error);
    if (status == DROPKV_OK)
        status = run(&e, &error);
    if (status != DROPKV_OK)
        fprintf(stderr, "%s: %s\n", endpoint, error.text);
    dropkv_client_close(e.client); /* before the buffers that it borrows */
    dropkv_buffer_free(e.pool);
    dropkv_buffer_free(e.stash);
    return status != DROPKV_OK;
}
