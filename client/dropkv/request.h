/* libdropkv: a request for one layer, tensor by tensor. Part of dropkv.h. */
#ifndef DROPKV_REQUEST_H
#define DROPKV_REQUEST_H

#include "base.h"
#include "buffer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A tensor [batch][heads][tokens][dim] in the caller's memory. Element (b, h, t, d) lies at
 * data + b * batch_stride + h * head_stride + t * token_stride + d * element size. Strides are in
 * bytes, in any order ([tokens][heads][dim] is only numbers); those of heads and tokens are not
 * negative; a stride of 0 means that of a dense row-major tensor. Any alignment. This struct never
 * changes. */
struct dropkv_tensor {
    const void *data;
    enum dropkv_dtype dtype;
    float scale;              /* element value = stored * scale; fp8 only; 0 means 1 */
    const float *head_scales; /* [heads], instead of scale; NULL: one scale */
    int64_t batch_stride;
    int64_t head_stride;
    int64_t token_stride;
};

enum dropkv_param_kind { DROPKV_PARAM_INT = 0, DROPKV_PARAM_REAL = 1, DROPKV_PARAM_TEXT = 2 };

/* A scoring parameter by name; dropkv-client(1) lists names, ranges and defaults. This struct never
 * changes. */
struct dropkv_param {
    const char *name;
    enum dropkv_param_kind kind;
    int64_t integer;
    double real;
    const char *text;
};

static inline struct dropkv_param dropkv_int(const char *name, int64_t value)
{
    struct dropkv_param param = {name, DROPKV_PARAM_INT, value, 0.0, NULL};
    return param;
}

static inline struct dropkv_param dropkv_real(const char *name, double value)
{
    struct dropkv_param param = {name, DROPKV_PARAM_REAL, 0, value, NULL};
    return param;
}

/* The text of any kind of value: dropkv_text("pool", "max"), dropkv_text("window", "8"). */
static inline struct dropkv_param dropkv_text(const char *name, const char *value)
{
    struct dropkv_param param = {name, DROPKV_PARAM_TEXT, 0, 0.0, value};
    return param;
}

struct dropkv_request {
    size_t struct_size;

    uint32_t batch;   /* sequences; >= 1 */
    uint32_t q_heads; /* a multiple of kv_heads; query heads h*g .. h*g+g-1 belong to KV head h */
    uint32_t kv_heads;
    uint32_t head_dim; /* of queries and keys: a multiple of 8, at most 512 */
    uint32_t v_dim;    /* of values; 0: head_dim */
    uint64_t q_rows;   /* query rows per head, the last of which belongs to the last token; the last
                          `window` of them are used */
    uint64_t n_tokens; /* cached tokens */

    struct dropkv_tensor query; /* [batch][q_heads][q_rows][head_dim] */
    struct dropkv_tensor key;   /* [batch][kv_heads][n_tokens][head_dim] */
    struct dropkv_tensor value; /* [batch][kv_heads][n_tokens][v_dim] */

    /* [q_heads]: learned sink logits, one more softmax term per query head whose value is the zero
     * vector (gpt-oss); NULL: none. Copied. */
    const float *sink_logits;

    const struct dropkv_param *params; /* [n_params]; names not given have their defaults */
    size_t n_params;

    int want_scores;    /* not 0: return every token's raw score too */
    int64_t timeout_us; /* deadline, counted from submission; 0: the parameter `timeout` if it is
                           given, else the client's */
    void *user;         /* comes back in the result; never looked at */

    /* Over unix:/// (output also embedded), and as in dropkv_prompt: nothing is read before
     * the number at fence_offset is fence_value or more, and the answer goes to output. With a
     * fence all three tensors lie in buffers, since what is sent is read at once. NULL: neither. */
    const struct dropkv_buffer *fence;
    size_t fence_offset;
    uint64_t fence_value;
    const struct dropkv_buffer *output;
    size_t output_offset;
    size_t output_bytes;

    /* What some policies take beside the tensors (dropkv-client(1), --policy), dense; a policy that
     * does not take one refuses it. Borrowed as the tensors are, and always sent. NULL: none.
     * Scores that a call reported are the carry_in of the next. */
    const float *token_weight;    /* [batch][kv_heads][n_tokens], >= 0: criticalkv */
    const float *carry_in;        /* [batch][kv_heads][n_tokens], >= 0: h2o, kvzip */
    const float *external_scores; /* [batch][kv_heads][n_tokens]: external, which needs them */
    const float *value_metric;    /* [q_heads][v_dim][v_dim]: restkv */
};

/* clang-format off */
#ifdef __cplusplus /* which has no designated initialisers before C++20 */
static inline struct dropkv_request dropkv_request_make(void)
{
    struct dropkv_request request = {};
    request.struct_size = sizeof(request);
    return request;
}
#define DROPKV_REQUEST_INIT dropkv_request_make()
#else
#define DROPKV_REQUEST_INIT {.struct_size = sizeof(struct dropkv_request)}
#endif
/* clang-format on */

#ifdef __cplusplus
}
#endif
#endif
