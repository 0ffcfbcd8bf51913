/* The messages of the local socket (PROTOCOL.md draws every byte).
 *
 * A message is a header of 24 bytes, a payload whose fixed part is laid out by its type, and bulk:
 * as many bytes as the header says (tensors, tables, answers), which whoever reads it puts where
 * they belong without copying them through a buffer of ours. File descriptors travel beside it.
 *
 * Everything is little-endian, every size exact, every reserved byte zero; nothing is a pointer.
 * Decoding checks that a message is what it claims to be: sizes, counts, enumerations, ranges
 * that must not overlap. Whether its numbers make sense is judged where they are used: shapes and
 * strides by dkv_request_validate(), object numbers by their owner.
 *
 * Owner   decoded messages borrow the payload they came from.
 * Thread  any; no state, no allocation.
 * Errors  MALFORMED closes the connection: the stream cannot be trusted any more. UNSUPPORTED and
 *         INVALID are answered by an error message and concern one request alone.
 */
#ifndef DKV_PROTO_WIRE_H
#define DKV_PROTO_WIRE_H

#include "proto/params.h"

#define DKV_WIRE_VERSION      1u          /* byte 0 of every message */
#define DKV_WIRE_MAGIC        0x31564b44u /* "DKV1", in hello and welcome */
#define DKV_WIRE_HEADER_BYTES 24u
#define DKV_WIRE_PAYLOAD_MAX  1048576u
#define DKV_WIRE_FDS_MAX      128u /* of one message; the kernel's limit is 253 */
#define DKV_WIRE_LAYERS_MAX   1024u
#define DKV_WIRE_BLOCKS_MAX   4096u
#define DKV_WIRE_DEVICES_MAX  64u
#define DKV_WIRE_PARAMS_MAX   4096u /* bytes */
#define DKV_WIRE_TEXT_MAX     247u  /* bytes of an error's sentence */
#define DKV_WIRE_ABOUT_MAX    512u  /* bytes of what welcome tells about the daemon */
#define DKV_WIRE_UUID_BYTES   16u
#define DKV_WIRE_HANDLE_BYTES 64u

/* Numbers are never reused. From the client: 1..63; from the daemon: 64..127. */
enum dkv_wire_type {
    DKV_WIRE_HELLO = 1,
    DKV_WIRE_REGION_ADD = 2,
    DKV_WIRE_REGION_DROP = 3,
    DKV_WIRE_REGION_DETACH = 4, /* the owner wants to free or remap it: unmap, keep the number */
    DKV_WIRE_REGION_ATTACH = 5, /* its memory is back, as a new generation */
    DKV_WIRE_CACHE_ADD = 6,
    DKV_WIRE_CACHE_DROP = 7,
    DKV_WIRE_STASH_ADD = 8,
    DKV_WIRE_STASH_DROP = 9,
    DKV_WIRE_SCORE = 10,        /* layers of a registered cache */
    DKV_WIRE_SCORE_BLOCKS = 11, /* blocks that the message describes itself */
    DKV_WIRE_CANCEL = 12,
    DKV_WIRE_PING = 13,

    DKV_WIRE_WELCOME = 64,
    DKV_WIRE_DONE = 65, /* answers everything that adds, drops, detaches or attaches */
    DKV_WIRE_RESULT = 66,
    DKV_WIRE_ERROR = 67,
    DKV_WIRE_PONG = 68,
};

enum dkv_wire_sender { DKV_WIRE_FROM_CLIENT, DKV_WIRE_FROM_DAEMON };

struct dkv_wire_header {
    uint8_t version;
    uint8_t type;
    uint16_t n_fds;
    uint32_t payload_bytes;
    uint64_t id;         /* the sender's number for a request, not 0; an answer repeats it */
    uint64_t bulk_bytes; /* that follow the payload */
};

/* What a program offers in hello and takes in welcome. */
enum dkv_wire_feature {
    DKV_WIRE_FEATURE_MEMFD = 1u << 0,
    DKV_WIRE_FEATURE_CUDA_LEGACY = 1u << 1,
    DKV_WIRE_FEATURE_CUDA_VMM = 1u << 2,
    DKV_WIRE_FEATURE_OUTPUT = 1u << 3, /* results into a region */
    DKV_WIRE_FEATURE_FENCE = 1u << 4,
    DKV_WIRE_FEATURE_SHM_NAMES = 1u << 5, /* regions by name */
};

struct dkv_wire_hello {
    uint32_t magic;
    uint16_t version_min; /* range of versions the client speaks */
    uint16_t version_max;
    uint32_t features;
};

struct dkv_wire_welcome {
    uint32_t magic;
    uint16_t version; /* chosen */
    uint16_t n_devices;
    uint32_t features;
    uint16_t about_bytes; /* after the devices: texts for people */
    uint64_t instance;    /* of the daemon's process: another one has none of your objects */
    uint32_t max_regions;
    uint32_t max_caches;
    uint32_t max_in_flight;
    uint32_t max_fds; /* of all regions of this connection */
    uint64_t max_bulk_bytes;
};

/* What a welcome tells people, after its devices: printable ASCII, each text ended by a zero byte.
 */
enum dkv_wire_about {
    DKV_WIRE_ABOUT_VERSION,  /* of the daemon */
    DKV_WIRE_ABOUT_PLATFORM, /* of the model, as in the metadata over HTTP */
    DKV_WIRE_ABOUT_BACKEND,  /* of the first device: "cpu/avx512" */
    DKV_WIRE_ABOUT_DEVICE,   /* "NVIDIA H200" */
    DKV_WIRE_ABOUT_SHM,      /* what this connection's shared memory names begin with; "": none may
                                be named */
    DKV_WIRE_ABOUT_TEXTS
};

enum dkv_wire_device_kind { DKV_WIRE_DEVICE_CPU = 0, DKV_WIRE_DEVICE_CUDA = 1 };

struct dkv_wire_device {
    uint8_t uuid[DKV_WIRE_UUID_BYTES]; /* zero for the CPU */
    uint8_t kind;
};

enum dkv_wire_region_kind {
    DKV_WIRE_REGION_MEMFD = 1,       /* one fd */
    DKV_WIRE_REGION_CUDA_LEGACY = 2, /* a 64-byte handle, no fd */
    DKV_WIRE_REGION_CUDA_VMM = 3,    /* one fd per chunk */
    DKV_WIRE_REGION_SHM_NAME = 4,    /* the end of a name, in `handle`, no fd */
};

/* REGION_ADD and REGION_ATTACH. The region is [offset, offset + bytes) of what is passed; offsets
 * in later messages count from its start. */
struct dkv_wire_region {
    uint32_t region;     /* ATTACH: which; ADD: 0 */
    uint32_t generation; /* larger with every ATTACH */
    uint8_t kind;
    uint8_t writable;  /* 1: results may be written there */
    uint16_t n_chunks; /* CUDA_VMM: 1.., in the payload after the fixed part; else 0 */
    uint64_t offset;
    uint64_t bytes;
    uint8_t device_uuid[DKV_WIRE_UUID_BYTES]; /* zero for host memory */
    uint8_t handle[DKV_WIRE_HANDLE_BYTES];    /* CUDA_LEGACY, SHM_NAME; else zero */
    const uint8_t *chunks;                    /* [n_chunks], not on the wire as such */
};

/* One committed allocation: mapped at `offset` of the reservation, exactly `bytes` long. Ascending,
 * without overlap; what lies between two is not mapped and not readable. */
struct dkv_wire_chunk {
    uint64_t offset;
    uint64_t bytes;
};

/* REGION_DROP, REGION_DETACH, CACHE_DROP, STASH_DROP; and DONE, which names the object. */
struct dkv_wire_object {
    uint32_t object;
    uint32_t generation; /* of a region; else 0 */
};

/* A view as in proto/block.h, of a region; region 0 is the message's bulk. */
struct dkv_wire_view {
    uint32_t region;
    uint8_t dtype;
    float scale;     /* 0 means 1 */
    uint32_t floats; /* of a block: where its float32 scales per head begin in the bulk, in floats,
                        plus 1; 0: none. Of a cache: 0 */
    uint64_t offset;
    int64_t page_stride;
    int64_t token_stride;
    int64_t head_stride;
};

enum dkv_wire_scales { DKV_WIRE_SCALES_VIEW = 0, DKV_WIRE_SCALES_HEAD = 1 };

/* CACHE_ADD: layers that share a geometry. After the fixed part n_layers times a key view and a
 * value view. Bulk, float32: with SCALES_HEAD [n_layers][key, value][kv_heads], then with sinks
 * [n_layers][q_heads]. */
struct dkv_wire_cache {
    uint32_t q_heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t v_dim;
    uint32_t page_tokens; /* per table entry; 0: not paged */
    uint16_t n_layers;    /* 1.. */
    uint8_t scales;
    uint8_t has_sinks;
    double scale;         /* of logits; 0: 1/sqrt(head_dim) */
    double logit_softcap; /* 0: none */
    const uint8_t *layers;
};

/* STASH_ADD: a ring of query rows that the producer writes and requests name. */
struct dkv_wire_stash {
    uint32_t region;
    uint32_t n_slots;
    uint32_t n_rows; /* of the ring of one slot */
    uint16_t n_layers;
    uint8_t dtype;
    float scale;
    uint64_t offset;
    int64_t layer_stride;
    int64_t slot_stride;
    int64_t row_stride;
    int64_t head_stride;
};

enum dkv_wire_table_kind { DKV_WIRE_TABLE_NONE = 0, DKV_WIRE_TABLE_BULK, DKV_WIRE_TABLE_REGION };

enum dkv_wire_score_flag {
    DKV_WIRE_WANT_SCORES = 1u << 0,
    DKV_WIRE_NULL_ENTRY = 1u << 1,      /* null_entry is meant */
    DKV_WIRE_RECENCY_IF_BUSY = 1u << 2, /* on_overload=recency */
};

/* What some policies take (proto/block.h). In a SCORE's bulk behind the table, in this order:
 * float32 [n_layers][kv_heads][n_tokens], the last [n_layers][q_heads][v_dim][v_dim]. */
enum dkv_wire_extra {
    DKV_WIRE_TOKEN_WEIGHT = 1u << 0,
    DKV_WIRE_CARRY_IN = 1u << 1,
    DKV_WIRE_EXTERNAL_SCORES = 1u << 2,
    DKV_WIRE_VALUE_METRIC = 1u << 3,
};

/* Wait until the 8-byte slot at `offset` of a memfd region holds `value` or more, as unsigned. */
struct dkv_wire_fence {
    uint32_t region; /* 0: none */
    uint64_t offset; /* multiple of 8 */
    uint64_t value;
};

/* Where the answer goes. */
struct dkv_wire_output {
    uint32_t region; /* 0: the result's bulk */
    uint64_t offset;
    uint64_t bytes;
};

/* SCORE: layers [first_layer, first_layer + n_layers) of one sequence. After the fixed part
 * params_bytes of parameters; the bulk is the page table, if table_kind says so, and the extras. */
struct dkv_wire_score {
    uint32_t cache;
    uint32_t stash;
    uint32_t slot;
    uint32_t newest_row; /* of the slot's ring: the query of token n_tokens - 1 */
    uint32_t q_rows;     /* valid ones, up to newest_row */
    uint16_t first_layer;
    uint16_t n_layers;
    uint32_t n_tokens;
    uint32_t valid_from;
    uint32_t table_region;
    uint32_t table_entries;
    uint64_t table_offset;
    uint64_t table_mask; /* 0: all bits */
    int64_t null_entry;
    uint8_t table_kind;
    uint8_t entry_bytes; /* 4 or 8 with a table, else 0 */
    uint8_t flags;
    uint8_t extras; /* bits of enum dkv_wire_extra */
    uint16_t params_bytes;
    struct dkv_wire_fence fence;
    struct dkv_wire_output output;
    const uint8_t *params;
};

/* SCORE_BLOCKS. After the fixed part params_bytes of parameters, then n_blocks blocks. */
struct dkv_wire_blocks {
    uint32_t n_blocks;
    uint16_t params_bytes;
    uint8_t flags;
    struct dkv_wire_fence fence;
    struct dkv_wire_output output;
    const uint8_t *params;
    const uint8_t *blocks;
};

struct dkv_wire_block {
    uint32_t q_heads;
    uint32_t kv_heads;
    uint32_t head_dim;
    uint32_t v_dim;
    uint32_t q_rows;
    uint32_t n_tokens;
    uint32_t valid_from;
    uint32_t page_tokens;
    uint32_t table_region;
    uint32_t table_entries;
    uint64_t table_offset;
    uint64_t table_mask;
    int64_t null_entry;
    uint8_t table_kind; /* BULK: at table_offset of the bulk */
    uint8_t entry_bytes;
    uint8_t flags;        /* NULL_ENTRY */
    uint32_t sink_floats; /* sink logits [q_heads], as view.floats */
    struct dkv_wire_view query;
    struct dkv_wire_view key;
    struct dkv_wire_view value;

    /* What some policies take beside the tensors, in the bulk, as view.floats. */
    uint32_t token_weight; /* [kv_heads][n_tokens] */
    uint32_t carry_in;
    uint32_t external_scores;
    uint32_t value_metric; /* [q_heads][v_dim][v_dim] */
};

/* RESULT: after the fixed part one record per block; the numbers are in the bulk or in the output
 * region: per block int32 keep indices [kv_heads][keep_tokens], then float32 scores
 * [kv_heads][n_tokens] if they were asked for. */
struct dkv_wire_result {
    uint32_t n_blocks;
    uint8_t degraded;  /* answered by recency */
    uint8_t in_region; /* the output region holds the numbers, the bulk is empty */
    uint64_t queue_us;
    uint64_t run_us;
    const uint8_t *blocks;
};

#define DKV_WIRE_NO_SCORES UINT64_MAX

struct dkv_wire_result_block {
    uint32_t kv_heads;
    uint32_t keep_tokens;
    uint32_t n_tokens;
    uint32_t n_ragged; /* not 0: heads keep different numbers of tokens, so many together; the
                          offsets of all heads of the answer, int32 [heads+1], end its numbers */
    uint64_t keep_offset;
    uint64_t scores_offset; /* or NO_SCORES */
};

struct dkv_wire_error {
    uint32_t status;     /* enum dkv_status, not OK */
    uint32_t retry_us;   /* 0: no advice */
    uint32_t block;      /* UINT32_MAX: the request as a whole */
    uint16_t text_bytes; /* after the fixed part: printable ASCII, for people */
    const uint8_t *text;
};

struct dkv_wire_cancel {
    uint64_t target; /* the id of the request that is no longer wanted */
};

struct dkv_wire_ping { /* and pong */
    uint64_t cookie;
};

/* --- headers --- */

void dkv_wire_put_header(uint8_t out[DKV_WIRE_HEADER_BYTES], const struct dkv_wire_header *header);

/* Judges a header from `sender` before anything else of the message is read: version, type, sizes,
 * number of fds. UNSUPPORTED for another version, MALFORMED for everything else. */
enum dkv_status dkv_wire_get_header(const uint8_t in[DKV_WIRE_HEADER_BYTES],
                                    enum dkv_wire_sender sender, struct dkv_wire_header *header_out,
                                    struct dkv_error *err);

/* "score"; NULL for a number that is no type. */
const char *dkv_wire_type_name(unsigned type);

/* --- payloads ---
 *
 * put: writes the fixed part and returns its size; the caller appends what follows it.
 * get: takes the whole payload, checks it and fills *_out, which borrows it.
 */
#define DKV_WIRE_DECLARE(name)                                                    \
    size_t dkv_wire_put_##name(uint8_t *out, const struct dkv_wire_##name *name); \
    enum dkv_status dkv_wire_get_##name(const uint8_t *in, size_t bytes,          \
                                        struct dkv_wire_##name *name##_out, struct dkv_error *err)

DKV_WIRE_DECLARE(hello);
DKV_WIRE_DECLARE(welcome);
DKV_WIRE_DECLARE(region);
DKV_WIRE_DECLARE(object);
DKV_WIRE_DECLARE(cache);
DKV_WIRE_DECLARE(stash);
DKV_WIRE_DECLARE(score);
DKV_WIRE_DECLARE(blocks);
DKV_WIRE_DECLARE(result);
DKV_WIRE_DECLARE(error);
DKV_WIRE_DECLARE(cancel);
DKV_WIRE_DECLARE(ping);

/* Records that follow a fixed part: `at` counts records. get cannot fail: the message's own get has
 * judged every record. */
#define DKV_WIRE_DECLARE_RECORD(name)                                             \
    size_t dkv_wire_put_##name(uint8_t *out, const struct dkv_wire_##name *name); \
    void dkv_wire_get_##name(const uint8_t *records, size_t at, struct dkv_wire_##name *name##_out)

DKV_WIRE_DECLARE_RECORD(device);
DKV_WIRE_DECLARE_RECORD(chunk);
DKV_WIRE_DECLARE_RECORD(view);
DKV_WIRE_DECLARE_RECORD(block);
DKV_WIRE_DECLARE_RECORD(result_block);

/* The devices of a welcome message: after its fixed part. */
const uint8_t *dkv_wire_welcome_devices(const uint8_t *payload);

/* Its texts: put writes them, at most ABOUT_MAX bytes, cutting each so that all fit, and returns
 * about_bytes; get finds one in a payload that dkv_wire_get_welcome() has judged. */
size_t dkv_wire_put_about(uint8_t *out, const char *const texts[DKV_WIRE_ABOUT_TEXTS]);
const char *dkv_wire_get_about(const uint8_t *payload, const struct dkv_wire_welcome *welcome,
                               enum dkv_wire_about which);

/* Sizes of the fixed parts and records. */
size_t dkv_wire_fixed_bytes(unsigned type);
#define DKV_WIRE_DEVICE_BYTES       24u
#define DKV_WIRE_CHUNK_BYTES        16u
#define DKV_WIRE_VIEW_BYTES         48u
#define DKV_WIRE_BLOCK_BYTES        232u
#define DKV_WIRE_RESULT_BLOCK_BYTES 32u

/* The bulk that a decoded message must have, exactly; of a SCORE the table alone, before extras,
 * whose size the cache tells. SCORE_BLOCKS may have any: its views say where in it they lie. */
uint64_t dkv_wire_cache_bulk_bytes(const struct dkv_wire_cache *cache);
uint64_t dkv_wire_score_bulk_bytes(const struct dkv_wire_score *score);

/* Does what came with a region fit its kind? `n_fds` is what the header said and conn counted. */
enum dkv_status dkv_wire_check_region_fds(const struct dkv_wire_region *region, uint32_t n_fds,
                                          struct dkv_error *err);

/* --- parameters ---
 *
 * A list of records: number (enum dkv_param_id: these numbers travel, so new ones go to the end),
 * kind, length, value padded to 8 bytes. Words travel as words ("max"), not as numbers. */

/* Writes every parameter the caller named; returns the bytes, at most PARAMS_MAX. */
size_t dkv_wire_put_params(uint8_t *out, const struct dkv_params *params);

/* Reads them into initialised parameters (dkv_params_init). MALFORMED for broken bytes; INVALID,
 * naming the parameter, for what dkv_params_set() refuses. */
enum dkv_status dkv_wire_get_params(const uint8_t *in, size_t bytes, struct dkv_params *params,
                                    struct dkv_error *err);

#endif
