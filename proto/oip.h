/* The Open Inference Protocol (KServe v2) over HTTP: JSON heads and binary tensors, both ends.
 *
 * The server parses infer requests and encodes replies, errors, metadata, configuration and
 * statistics; the client library encodes requests and parses what comes back. HTTP itself (routes,
 * headers, bodies) is theirs. Only proto/oip*.c sees the JSON library.
 *
 *   POST /v2/models/dropkv/infer
 *     query [B,Hq,Lq,D]  key [B,Hkv,n,D]  value [B,Hkv,n,Dv]     BF16, FP16, FP32
 *     optional: sink_logits FP32 [Hq]; key and value in F8_E4M3 or F8_E5M2 (names of ours, the
 *     protocol has none) with input parameter `scale`, or with inputs key_scale, value_scale
 *     FP32 [Hkv]; what some policies take: token_weight, carry_in, external_scores FP32 [B,Hkv,n],
 *     value_metric FP32 [Hq,Dv,Dv]
 *   ->  keep_indices INT32 [B,Hkv,k]; scores FP32 [B,Hkv,n]; both unless the request names some.
 *       Heads or layers of unequal budgets: keep_indices [total] and keep_offsets INT32 [B*Hkv+1]
 *
 * Every policy is also a model: /v2/models/snapkv/infer is a request with policy=snapkv.
 *
 * Scoring parameters are request parameters under the names of proto/params.h.
 *
 * Owner   every struct here that has a _fini() is filled by one call and freed by it; zeroed
 *         structs are fine for _fini(). Bytes handed in are borrowed for the call only, unless
 *         said.
 * Thread  any, one at a time per object.
 * Errors  MALFORMED (not JSON, or not the protocol's), INVALID, UNSUPPORTED, TOO_LARGE, NOMEM.
 *         Texts hold fixed words, numbers and names made fit by dkv_show_name(); outputs are
 *         written only on success.
 */
#ifndef DKV_PROTO_OIP_H
#define DKV_PROTO_OIP_H

#include "proto/request.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_OIP_MODEL         "dropkv"
#define DKV_OIP_MODEL_VERSION "1"
#define DKV_OIP_PLATFORM      "dropkvd"
#define DKV_OIP_HEADER        "Inference-Header-Content-Length"

#define DKV_OIP_HEAD_BYTES_MAX   65536u               /* JSON in front of binary tensors */
#define DKV_OIP_JSON_BYTES_MAX   (UINT64_C(16) << 20) /* a body that is JSON alone */
#define DKV_OIP_JSON_VALUES_MAX  2097152u             /* values in it: what bounds parsing memory */
#define DKV_OIP_JSON_MEMBERS_MAX 4096u /* of all its objects: what bounds parsing time */
#define DKV_OIP_JSON_DEPTH_MAX   16u   /* brackets inside brackets */
#define DKV_OIP_ID_BYTES_MAX     256u
#define DKV_OIP_REGION_BYTES_MAX 128u  /* name of a shared memory region */
#define DKV_OIP_ERROR_BYTES      1024u /* buffer that holds any error body */

/* Call once at the start of a program, before its threads: seeds the hash of JSON objects. */
void dkv_oip_init(void);

/* A document made by an encoder. */
struct dkv_oip_text {
    char *bytes; /* also 0-terminated */
    size_t n_bytes;
};
void dkv_oip_text_fini(struct dkv_oip_text *text);

/* ---- Server: an infer request ---------------------------------------------------------------- */

enum dkv_oip_input {
    DKV_OIP_QUERY = 0,
    DKV_OIP_KEY,
    DKV_OIP_VALUE,
    DKV_OIP_SINK_LOGITS,
    DKV_OIP_KEY_SCALE,
    DKV_OIP_VALUE_SCALE,
    DKV_OIP_TOKEN_WEIGHT,
    DKV_OIP_CARRY_IN,
    DKV_OIP_EXTERNAL_SCORES,
    DKV_OIP_VALUE_METRIC,
    DKV_OIP_INPUTS,
};

enum dkv_oip_output {
    DKV_OIP_KEEP_INDICES = 0,
    DKV_OIP_SCORES,
    DKV_OIP_KEEP_OFFSETS, /* of ragged answers, or where it is asked for by name */
    DKV_OIP_OUTPUTS
};

/* The tensor's name in requests and answers. Static. */
const char *dkv_oip_input_name(enum dkv_oip_input input);
const char *dkv_oip_output_name(enum dkv_oip_output output);

enum dkv_oip_source {
    DKV_OIP_ABSENT = 0, /* an optional input that was not given */
    DKV_OIP_BINARY,     /* in the binary section */
    DKV_OIP_JSON,       /* numbers in the JSON part: FP32 only */
    DKV_OIP_SHM,        /* in a shared memory region registered before */
};

struct dkv_oip_tensor {
    enum dkv_oip_source source;
    enum dkv_dtype dtype;
    unsigned n_dims;
    uint64_t shape[4];
    uint64_t bytes;  /* what shape and dtype make */
    uint64_t offset; /* BINARY: in the binary section; SHM: in the region */
    float scale;     /* fp8 key and value; 0: none given */
    char region[DKV_OIP_REGION_BYTES_MAX + 1]; /* SHM */
};

struct dkv_oip_wanted {
    bool wanted;
    bool binary;                               /* else JSON numbers */
    char region[DKV_OIP_REGION_BYTES_MAX + 1]; /* "" or the region the output goes into */
    uint64_t region_offset;
    uint64_t region_bytes;
};

/* A request as far as its JSON part tells. */
struct dkv_oip_infer {
    char id[DKV_OIP_ID_BYTES_MAX + 1]; /* "" if none: then it is not echoed */
    char model[DKV_SHOWN_NAME_BYTES];  /* dkv_oip_infer_set_model(); "" is dropkv */
    struct dkv_params params;          /* resolved; `set` tells what the client named */
    struct dkv_oip_tensor inputs[DKV_OIP_INPUTS];
    struct dkv_oip_wanted outputs[DKV_OIP_OUTPUTS];
    bool all_outputs;      /* the request names none */
    uint32_t n_blocks;     /* B: 1..DKV_BLOCKS_MAX */
    uint64_t binary_bytes; /* size of the binary section, as given to the parser */
    uint64_t side_bytes;   /* memory that bind needs beside the binary section; often 0 */
    bool uses_shm;         /* some input or output names a shared memory region */
    void *document;        /* private: parsed JSON numbers until settle or bind */
    void *numbers;         /* private: they as floats, from settle until bind */
};

/* Reads the JSON part of an infer body. Can be called before the binary section has arrived: all
 * that can be wrong with the request's form is found here, so that a bad one costs no transfer.
 *
 * json, json_bytes   the first `Inference-Header-Content-Length` bytes, or the whole body without
 *                    that header. 0 bytes (a "raw binary request") is refused: the model has three
 *                    inputs.
 * binary_bytes       bytes of the body behind them; must be what the inputs add up to.
 *
 * Cost    a head with binary tensors: microseconds. Tensors as JSON numbers: some 30 ms and 5 MB of
 *         memory until bind for each megabyte of text, so a loop thread should hand large ones on.
 */
enum dkv_status dkv_oip_infer_parse(const char *json, size_t json_bytes, uint64_t binary_bytes,
                                    struct dkv_oip_infer *infer_out, struct dkv_error *err);

/* The model that the request's path names: dropkv, or a policy, which is then the request's.
 * NOT_FOUND for other names; INVALID if the request names another policy itself. Call it after
 * parse. */
enum dkv_status dkv_oip_infer_set_model(struct dkv_oip_infer *infer, const char *model,
                                        struct dkv_error *err);

/* True if a model has that name; its policy. */
bool dkv_oip_find_model(const char *name, enum dkv_policy *policy_out);

/* Turns the parsed JSON numbers into floats and frees the document: what bind costs most, ahead of
 * it, for a thread that has time. Optional; call it at most once, before bind. NOMEM. */
enum dkv_status dkv_oip_infer_settle(struct dkv_oip_infer *infer, struct dkv_error *err);

/* Where the bytes of a request are. */
struct dkv_oip_memory {
    const void *binary; /* [infer->binary_bytes], any alignment (aligned to 64 is faster) */
    void *side;         /* [infer->side_bytes], aligned to 64: JSON numbers and small vectors are
                           written here */
    struct {
        const void *base; /* of the region that inputs[i] names; NULL if it does not */
        uint64_t bytes;
    } regions[DKV_OIP_INPUTS];
};

/* Makes the request for the gate. Blocks and request borrow `memory` and blocks_out
 * [infer->n_blocks]. Frees the parsed document; call it once. INVALID only if a region is too small
 * for the tensor said to be in it. */
enum dkv_status dkv_oip_infer_bind(struct dkv_oip_infer *infer, const struct dkv_oip_memory *memory,
                                   struct dkv_block *blocks_out, struct dkv_request *request_out,
                                   struct dkv_error *err);

void dkv_oip_infer_fini(struct dkv_oip_infer *infer);

/* ---- Server: the reply ----------------------------------------------------------------------- */

/* An answer. All blocks of one request have the same shape, hence the same k. */
struct dkv_oip_result {
    uint32_t n_blocks;    /* B */
    uint32_t kv_heads;    /* Hkv */
    uint64_t keep_tokens; /* k */
    uint64_t n_tokens;    /* n */
    const int32_t *keep;  /* [B][Hkv][k], or ragged [offsets[B*Hkv]] */
    bool ragged;
    const int32_t *offsets; /* [B*Hkv+1], head after head; NULL if it is not asked for */
    const float *scores;    /* [B][Hkv][n], or NULL if not asked for */
    const char *backend;    /* reply parameters: "cpu/avx512", ... */
    uint32_t window;
    bool degraded; /* answered by recency because of overload */
};

struct dkv_oip_segment {
    const void *bytes; /* borrowed from the result */
    uint64_t n_bytes;
};

/* The body: the head, then the segments in order. */
struct dkv_oip_reply {
    struct dkv_oip_text head;
    struct dkv_oip_segment segments[DKV_OIP_OUTPUTS];
    unsigned n_segments;
    uint64_t binary_bytes; /* of all segments. 0: send application/json without DKV_OIP_HEADER;
                              else application/octet-stream and the header with head.n_bytes */
};

/* NOMEM, or TOO_LARGE if the body would pass 2 GiB (clients count it in 32 bits). */
enum dkv_status dkv_oip_reply_encode(const struct dkv_oip_infer *infer,
                                     const struct dkv_oip_result *result,
                                     struct dkv_oip_reply *reply_out, struct dkv_error *err);
void dkv_oip_reply_fini(struct dkv_oip_reply *reply);

/* Writes {"error": text}, 0-terminated; returns its length. Never fails. */
size_t dkv_oip_error_encode(const char *text, char body_out[DKV_OIP_ERROR_BYTES]);

/* ---- Server: metadata, configuration, statistics --------------------------------------------- */

/* What the server tells about itself. */
struct dkv_oip_facts {
    const char *version;  /* of the program */
    const char *backend;  /* "cpu/avx512", "cuda/sm_90a" */
    const char *device;   /* "NVIDIA H200" */
    enum dkv_dtype dtype; /* the one datatype that metadata can name; FP32 suits generic clients */
    uint32_t max_blocks;  /* B of one request */
    enum dkv_policy policy; /* model metadata and configuration: of this model */
    bool shm;               /* client shared memory is allowed: listed among the extensions */
};

struct dkv_oip_duration {
    uint64_t count;
    uint64_t ns;
};

struct dkv_oip_batch_stats {
    uint64_t batch_size;
    struct dkv_oip_duration compute_input, compute_infer, compute_output;
};

/* Working memory of one device. */
struct dkv_oip_memory_use {
    const char *type; /* "CPU", "GPU" */
    uint64_t id;
    uint64_t bytes;
};

struct dkv_oip_stats {
    uint64_t last_inference_ms; /* since the epoch; 0: none yet */
    uint64_t inference_count;   /* blocks */
    uint64_t execution_count;   /* batches */
    struct dkv_oip_duration success, fail, queue, compute_input, compute_infer, compute_output;
    const struct dkv_oip_batch_stats *batches; /* [n_batches], borrowed; may be empty */
    size_t n_batches;
    const struct dkv_oip_memory_use *memory; /* [n_memory], likewise */
    size_t n_memory;
};

/* GET /v2 */
enum dkv_status dkv_oip_server_metadata(const struct dkv_oip_facts *facts,
                                        struct dkv_oip_text *out);
/* GET /v2/models/dropkv */
enum dkv_status dkv_oip_model_metadata(const struct dkv_oip_facts *facts, struct dkv_oip_text *out);
/* GET /v2/models/dropkv/config; its `parameters` list every scoring parameter and its range */
enum dkv_status dkv_oip_model_config(const struct dkv_oip_facts *facts, struct dkv_oip_text *out);
/* GET /v2/models/stats, /v2/models/dropkv/stats */
enum dkv_status dkv_oip_model_stats(const struct dkv_oip_stats *stats, struct dkv_oip_text *out);

/* ---- Server: shared memory of clients -------------------------------------------------------- */

#define DKV_OIP_KEY_BYTES_MAX 255u /* of a POSIX shared memory object's name */
#define DKV_OIP_HANDLE_BYTES  64u  /* a cudaIpcMemHandle_t */

/* What a client registers under a name. */
struct dkv_oip_region {
    char name[DKV_OIP_REGION_BYTES_MAX + 1]; /* from the path; the parser leaves it alone */
    bool cuda;
    char key[DKV_OIP_KEY_BYTES_MAX + 1]; /* system: as it was given */
    uint64_t offset;                     /* system: of the region in the object */
    uint64_t bytes;                      /* not 0 */
    uint64_t device;                     /* CUDA: its ordinal */
    uint8_t handle[DKV_OIP_HANDLE_BYTES];
};

/* The body of a register request: {"key", "offset", "byte_size"}, or {"raw_handle": {"b64"},
 * "device_id", "byte_size"}, whose base64 may hold line breaks. MALFORMED, INVALID. */
enum dkv_status dkv_oip_region_parse(const char *json, size_t json_bytes, bool cuda,
                                     struct dkv_oip_region *region_out, struct dkv_error *err);

/* The list that a status request asks for. */
enum dkv_status dkv_oip_region_list(const struct dkv_oip_region *const *regions, size_t n_regions,
                                    struct dkv_oip_text *out);

/* ---- Client ---------------------------------------------------------------------------------- */

/* An infer request to send: the head, then binary_bytes bytes that dkv_oip_call_read() produces
 * straight from the caller's tensors, whatever their strides. */
struct dkv_oip_call {
    struct dkv_oip_text head;
    uint64_t binary_bytes;
    const struct dkv_request *request; /* borrowed until the call is done */
};

/* `request` must have passed the gate. Outputs are asked for in binary form; only parameters in
 * request->params.set are sent. `id` is printable ASCII of up to DKV_OIP_ID_BYTES_MAX, or NULL.
 *
 * UNSUPPORTED  what has no form in the protocol: blocks of unequal shapes, types, scales or
 *              sink_logits; pages; valid_from above 0; device memory. */
enum dkv_status dkv_oip_call_encode(const struct dkv_request *request, const char *id,
                                    struct dkv_oip_call *call_out, struct dkv_error *err);

/* Copies bytes [offset, offset + n_bytes) of the binary section, less at its end; returns how many.
 * For CURLOPT_READFUNCTION and its like: any chunks in any order. */
size_t dkv_oip_call_read(const struct dkv_oip_call *call, uint64_t offset, void *to,
                         size_t n_bytes);
void dkv_oip_call_fini(struct dkv_oip_call *call);

/* A 200 answer to such a call. */
struct dkv_oip_answer {
    char id[DKV_OIP_ID_BYTES_MAX + 1];
    char backend[64];
    uint32_t n_blocks;
    uint32_t kv_heads;
    uint64_t keep_tokens;
    uint64_t keep_offset; /* in the binary section: int32 [B][Hkv][k], any alignment */
    bool ragged;          /* n_keep indices instead, heads as the offsets say; n_blocks, kv_heads
                             and keep_tokens are 0 */
    uint64_t n_keep;
    uint64_t n_offsets;      /* B*Hkv+1 */
    uint64_t offsets_offset; /* int32 [n_offsets] */
    bool has_scores;
    uint64_t n_tokens;      /* of scores */
    uint64_t scores_offset; /* float32 [B][Hkv][n] */
    bool degraded;
};

/* `json` is the head (DKV_OIP_HEADER bytes), binary_bytes what follows. Offsets and sizes in the
 * answer have been checked against binary_bytes; the index values have not. */
enum dkv_status dkv_oip_answer_parse(const char *json, size_t json_bytes, uint64_t binary_bytes,
                                     struct dkv_oip_answer *answer_out, struct dkv_error *err);

/* Turns a reply of another HTTP status into status and text: the server's sentence if the body is
 * {"error": text}, else the status in words. Never DKV_OK. */
enum dkv_status dkv_oip_error_parse(unsigned http_status, const char *body, size_t body_bytes,
                                    struct dkv_error *err);

/* Server and model metadata, as far as a client shows them; fields the server left out are "". */
struct dkv_oip_info {
    char server[64];
    char version[64];
    char platform[64];
    char backend[64];
    char device[96];
};

/* Each call fills its part of `info`: GET /v2, and GET /v2/models/dropkv. */
enum dkv_status dkv_oip_server_metadata_parse(const char *json, size_t json_bytes,
                                              struct dkv_oip_info *info, struct dkv_error *err);
enum dkv_status dkv_oip_model_metadata_parse(const char *json, size_t json_bytes,
                                             struct dkv_oip_info *info, struct dkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
