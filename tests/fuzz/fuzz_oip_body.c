/* A whole infer body through parse, bind and gate, then back to a client.
 *
 * The input is the JSON part, a NUL byte (no JSON text has one), and the binary section. What the
 * gate accepts is read to the last byte through the address rule of proto/block.h, answered, and
 * sent again by the client's encoder: the bytes must be the same.
 */
#include "proto/oip.h"
#include "tests/fuzz/fuzz.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define SIDE_MAX   (1u << 20) /* more than inputs of a fuzzer's size ask for */
#define ANSWER_MAX (1u << 22)

static volatile unsigned sink;

static void read_view(const struct dkv_view *v, uint64_t heads, uint64_t tokens, uint64_t dim)
{
    const uint64_t row_bytes = dim * dkv_dtype_bytes(v->dtype);

    for (uint64_t h = 0; h < heads; h++)
        for (uint64_t t = 0; t < tokens; t++) {
            const unsigned char *row = (const unsigned char *)v->base + v->offset +
                                       h * (uint64_t)v->head_stride + t * (uint64_t)v->token_stride;
            for (uint64_t i = 0; i < row_bytes; i++)
                sink += row[i];
        }
}

static void read_blocks(const struct dkv_request *request, const struct dkv_plan *plans)
{
    for (uint32_t i = 0; i < request->n_blocks; i++) {
        const struct dkv_block *b = &request->blocks[i];
        const struct dkv_plan *plan = &plans[i];
        read_view(&b->query, b->q_heads, b->q_rows, b->head_dim);
        read_view(&b->key, b->kv_heads, b->n_tokens, b->head_dim);
        read_view(&b->value, b->kv_heads, b->n_tokens, plan->v_dim);
        assert(plan->window >= 1 && plan->window + plan->first_row == b->q_rows);
        assert(plan->keep_tokens >= 1 && plan->keep_tokens <= plan->n_valid);
        assert(plan->sinks + plan->recent <= plan->keep_tokens);
        assert(plan->keep_all == (plan->keep_tokens == plan->n_valid));
    }
}

static void answer(const struct dkv_oip_infer *infer, const struct dkv_request *request,
                   const struct dkv_plan *plan)
{
    const struct dkv_block *b = &request->blocks[0];
    const uint64_t rows = (uint64_t)request->n_blocks * b->kv_heads;
    struct dkv_oip_result result = {.n_blocks = request->n_blocks,
                                    .kv_heads = b->kv_heads,
                                    .keep_tokens = plan->keep_tokens,
                                    .n_tokens = b->n_tokens,
                                    .backend = "cpu/fuzz",
                                    .window = plan->window};
    struct dkv_oip_answer read_back;
    struct dkv_oip_reply reply;
    struct dkv_error err;

    if (rows * b->n_tokens > ANSWER_MAX)
        return;
    int32_t *keep = calloc(rows * plan->keep_tokens, sizeof(*keep));
    float *scores = calloc(rows * b->n_tokens, sizeof(*scores));
    result.keep = keep;
    result.scores = scores;
    assert(dkv_oip_reply_encode(infer, &result, &reply, &err) == DKV_OK);
    const enum dkv_status status = dkv_oip_answer_parse(reply.head.bytes, reply.head.n_bytes,
                                                        reply.binary_bytes, &read_back, &err);
    const struct dkv_oip_wanted *want = infer->outputs;
    if (want[DKV_OIP_KEEP_INDICES].wanted && want[DKV_OIP_KEEP_INDICES].binary &&
        want[DKV_OIP_KEEP_INDICES].region[0] == '\0' &&
        (!want[DKV_OIP_SCORES].wanted ||
         (want[DKV_OIP_SCORES].binary && want[DKV_OIP_SCORES].region[0] == '\0'))) {
        assert(status == DKV_OK && strcmp(read_back.id, infer->id) == 0);
        assert(read_back.keep_tokens == plan->keep_tokens);
    }
    dkv_oip_reply_fini(&reply);
    free(keep);
    free(scores);
}

/* Encodes the bound request as a client would and binds it once more. */
static void send_again(const struct dkv_request *request)
{
    struct dkv_oip_call call;
    struct dkv_oip_infer again;
    struct dkv_error err;

    if (dkv_oip_call_encode(request, NULL, &call, &err) != DKV_OK)
        return; /* one scale per query head and the like have no form */
    unsigned char *body = malloc(call.binary_bytes + 1);
    assert(dkv_oip_call_read(&call, 0, body, call.binary_bytes + 1) == call.binary_bytes);
    assert(dkv_oip_infer_parse(call.head.bytes, call.head.n_bytes, call.binary_bytes, &again,
                               &err) == DKV_OK);
    assert(memcmp(&again.params, &request->params, sizeof(again.params)) == 0);
    const struct dkv_block *b = &request->blocks[0];
    const size_t row_bytes = b->head_dim * dkv_dtype_bytes(b->query.dtype);
    assert(memcmp(body, (const char *)b->query.base + b->query.offset, row_bytes) == 0);
    dkv_oip_infer_fini(&again);
    dkv_oip_call_fini(&call);
    free(body);
}

static void judge(struct dkv_oip_infer *infer, const struct dkv_oip_memory *memory)
{
    struct dkv_block *blocks = calloc(infer->n_blocks, sizeof(*blocks));
    struct dkv_plan *plans = calloc(infer->n_blocks, sizeof(*plans));
    struct dkv_request request;
    struct dkv_error err;

    assert(dkv_oip_infer_bind(infer, memory, blocks, &request, &err) == DKV_OK);
    if (dkv_request_validate(&request, plans, &err) == DKV_OK) {
        read_blocks(&request, plans);
        answer(infer, &request, &plans[0]);
        send_again(&request);
    }
    free(blocks);
    free(plans);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *nul = memchr(data, 0, size);
    const size_t json_bytes = nul != NULL ? (size_t)(nul - data) : size;
    const size_t binary_bytes = nul != NULL ? size - json_bytes - 1 : 0;
    struct dkv_oip_infer infer;
    struct dkv_error err;

    if (dkv_oip_infer_parse((const char *)data, json_bytes, binary_bytes, &infer, &err) != DKV_OK)
        return 0;
    if (!infer.uses_shm && infer.side_bytes <= SIDE_MAX) {
        struct dkv_oip_memory memory = {.binary = nul != NULL ? nul + 1 : NULL};
        memory.side = infer.side_bytes > 0 ? aligned_alloc(64, infer.side_bytes) : NULL;
        judge(&infer, &memory);
        free(memory.side);
    }
    dkv_oip_infer_fini(&infer);
    return 0;
}
