/* Builds, fills and runs cases. */
#include "tests/support/case.h"

#include "kernels/convert.h"

#include <stdio.h>
#include <stdlib.h>

static void *must(void *memory)
{
    if (memory == NULL) {
        fputs("tests: out of memory\n", stderr);
        abort();
    }
    return memory;
}

static struct dkv_view *view_of(struct dkv_case *c, enum dkv_side side)
{
    struct dkv_view *views[] = {&c->block.query, &c->block.key, &c->block.value};
    return views[side];
}

static uint32_t dim_of(const struct dkv_case *c, enum dkv_side side)
{
    return side == DKV_VALUE && c->block.v_dim != 0 ? c->block.v_dim : c->block.head_dim;
}

static uint32_t heads_of(const struct dkv_case *c, enum dkv_side side)
{
    return side == DKV_QUERY ? c->block.q_heads : c->block.kv_heads;
}

static uint64_t rows_of(const struct dkv_case *c, enum dkv_side side)
{
    return side == DKV_QUERY ? c->block.q_rows : c->block.n_tokens;
}

void dkv_case_init(struct dkv_case *c, struct dkv_shape shape)
{
    *c = (struct dkv_case){0};
    c->block.q_heads = shape.q_heads;
    c->block.kv_heads = shape.kv_heads;
    c->block.head_dim = shape.head_dim;
    c->block.v_dim = shape.v_dim;
    c->block.q_rows = shape.q_rows;
    c->block.n_tokens = shape.n_tokens;
    for (int side = DKV_QUERY; side <= DKV_VALUE; side++) {
        const enum dkv_dtype dtype = side == DKV_QUERY || shape.kv_dtype == DKV_DTYPE_NONE
                                         ? shape.q_dtype
                                         : shape.kv_dtype;
        const uint64_t bytes = (uint64_t)heads_of(c, side) * rows_of(c, side) * dim_of(c, side) *
                               dkv_dtype_bytes(dtype);
        c->memory[side] = must(calloc(1, bytes));
        *view_of(c, side) = dkv_view_dense(c->memory[side], bytes, dtype, rows_of(c, side),
                                           dim_of(c, side));
    }
    dkv_params_init(&c->params);
}

void dkv_case_fini(struct dkv_case *c)
{
    for (int side = DKV_QUERY; side <= DKV_VALUE; side++)
        free(c->memory[side]);
    *c = (struct dkv_case){0};
}

void dkv_case_copy(struct dkv_case *copy_out, const struct dkv_case *c)
{
    *copy_out = *c;
    for (int side = DKV_QUERY; side <= DKV_VALUE; side++) {
        struct dkv_view *view = view_of(copy_out, side);
        copy_out->memory[side] = must(malloc(view->bytes));
        memcpy(copy_out->memory[side], c->memory[side], view->bytes);
        view->base = copy_out->memory[side];
    }
    if (c->block.sink_logits == c->sink_logits)
        copy_out->block.sink_logits = copy_out->sink_logits;
}

void *dkv_case_at(const struct dkv_case *c, enum dkv_side side, uint64_t head, uint64_t row,
                  uint64_t element)
{
    const struct dkv_view *view = view_of((struct dkv_case *)c, side);
    const uint64_t at = (head * rows_of(c, side) + row) * dim_of(c, side) + element;
    return (char *)c->memory[side] + at * dkv_dtype_bytes(view->dtype);
}

/* The code of the nearest finite value; fp8 has few enough to try all. */
static uint8_t nearest_fp8(double value, enum dkv_dtype dtype)
{
    if (isnan(value))
        return 0x7f; /* NaN in both */
    uint8_t best = 0;
    double best_distance = INFINITY;
    for (unsigned code = 0; code < 256; code++) {
        const uint8_t byte = (uint8_t)code;
        const float decoded = dtype == DKV_F8_E4M3 ? dkv_e4m3_to_f32(byte) : dkv_e5m2_to_f32(byte);
        const double distance = fabs((double)decoded - value);
        if (distance < best_distance) {
            best_distance = distance;
            best = byte;
        }
    }
    return best;
}

void dkv_case_set(struct dkv_case *c, enum dkv_side side, uint64_t head, uint64_t row,
                  uint64_t element, double value)
{
    const enum dkv_dtype dtype = view_of(c, side)->dtype;
    void *at = dkv_case_at(c, side, head, row, element);
    const float single = (float)value;
    uint16_t half;
    switch (dtype) {
    case DKV_BF16:
        half = dkv_f32_to_bf16(single);
        memcpy(at, &half, sizeof(half));
        break;
    case DKV_FP16:
        half = dkv_f32_to_fp16(single);
        memcpy(at, &half, sizeof(half));
        break;
    case DKV_FP32: memcpy(at, &single, sizeof(single)); break;
    default: *(uint8_t *)at = nearest_fp8(value, dtype); break;
    }
}

double dkv_case_get(const struct dkv_case *c, enum dkv_side side, uint64_t head, uint64_t row,
                    uint64_t element)
{
    return (double)dkv_element_to_f32(dkv_case_at(c, side, head, row, element),
                                      view_of((struct dkv_case *)c, side)->dtype);
}

void dkv_case_fill(struct dkv_case *c, enum dkv_side side, struct dkv_random *random, double size)
{
    /* Trying all codes of fp8 for each element is slow; a table of normal draws is as good. */
    const enum dkv_dtype dtype = view_of(c, side)->dtype;
    const bool fp8 = dtype == DKV_F8_E4M3 || dtype == DKV_F8_E5M2;
    uint8_t codes[1024];
    for (size_t i = 0; i < sizeof(codes) && fp8; i++)
        codes[i] = nearest_fp8(size * dkv_random_normal(random), dtype);
    for (uint64_t h = 0; h < heads_of(c, side); h++)
        for (uint64_t t = 0; t < rows_of(c, side); t++)
            for (uint64_t e = 0; e < dim_of(c, side); e++)
                if (fp8)
                    *(uint8_t *)dkv_case_at(c, side, h, t,
                                            e) = codes[dkv_random_u64(random) % sizeof(codes)];
                else
                    dkv_case_set(c, side, h, t, e, size * dkv_random_normal(random));
}

void dkv_case_param(struct dkv_case *c, const char *name, const char *text)
{
    struct dkv_error err;
    if (dkv_params_set_text(&c->params, name, text, &err) != DKV_OK) {
        fprintf(stderr, "tests: %s=%s: %s\n", name, text, err.text);
        abort();
    }
}

enum dkv_status dkv_case_try_plan(struct dkv_case *c, struct dkv_error *err)
{
    dkv_params_resolve(&c->params);
    const struct dkv_request request = {
        .params = c->params, .blocks = &c->block, .n_blocks = 1, .want_scores = true};
    return dkv_request_validate(&request, &c->plan, err);
}

void dkv_case_plan(struct dkv_case *c)
{
    struct dkv_error err;
    if (dkv_case_try_plan(c, &err) != DKV_OK) {
        fprintf(stderr, "tests: the gate refused the case: %s\n", err.text);
        abort();
    }
}

static void run_reference(const struct dkv_case *c, struct dkv_case_answer *answer)
{
    struct dkv_ref_answer ref;
    answer->status = dkv_ref_run(&c->block, &c->params, &c->plan, &ref, &answer->error);
    if (answer->status != DKV_OK)
        return;
    const size_t heads = c->block.kv_heads;
    memcpy(answer->raw, ref.raw, heads * c->block.n_tokens * sizeof(*answer->raw));
    memcpy(answer->keep, ref.keep, heads * c->plan.keep_tokens * sizeof(*answer->keep));
    dkv_ref_answer_fini(&ref);
}

static void run_engine(const struct dkv_case *c, const struct dkv_scorer *scorer,
                       struct dkv_case_answer *answer)
{
    const size_t n_scores = (size_t)c->block.kv_heads * c->block.n_tokens;
    float *scores = must(malloc(n_scores * sizeof(*scores)));
    memset(scores, 0xff, n_scores * sizeof(*scores)); /* NaN where the engine forgets to write */
    struct dkv_item item = {.block = &c->block,
                            .params = &c->params,
                            .plan = &c->plan,
                            .keep_out = answer->keep,
                            .counts_out = answer->counts,
                            .scores_out = scores};
    const enum dkv_status status = dkv_engine_run(scorer->ops, scorer->engine, &item, 1,
                                                  &answer->error);
    answer->status = status != DKV_OK ? status : item.status;
    if (status == DKV_OK)
        answer->error = item.error;
    for (size_t i = 0; i < n_scores; i++)
        answer->raw[i] = (double)scores[i];
    free(scores);
}

void dkv_case_run(const struct dkv_case *c, const struct dkv_scorer *scorer,
                  struct dkv_case_answer *answer_out)
{
    const size_t heads = c->block.kv_heads;
    *answer_out = (struct dkv_case_answer){
        .raw = must(calloc(heads * c->block.n_tokens, sizeof(double))),
        .keep = must(malloc(c->plan.keep_capacity * sizeof(int32_t))),
        .counts = must(calloc(heads, sizeof(uint32_t))),
    };
    memset(answer_out->keep, 0xff, c->plan.keep_capacity * sizeof(int32_t));
    if (scorer->ops == NULL)
        run_reference(c, answer_out);
    else
        run_engine(c, scorer, answer_out);
}

void dkv_case_answer_fini(struct dkv_case_answer *answer)
{
    free(answer->raw);
    free(answer->keep);
    free(answer->counts);
    *answer = (struct dkv_case_answer){0};
}
