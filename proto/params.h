/* Scoring parameters: the same names in the Open Inference Protocol, the C API, the command line
 * and the configuration file. numerics in docs/numerics.md.
 *
 * A parameter has a value only once it was set or resolved: the setters record which fields the
 * caller named, dkv_params_resolve() fills the others from the profile, so the order of the
 * caller's fields never matters. Setters judge types and names; ranges are judged by
 * dkv_request_validate() alone.
 *
 * Thread  any; no shared state.
 */
#ifndef DKV_PROTO_PARAMS_H
#define DKV_PROTO_PARAMS_H

#include "proto/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Limits that hold everywhere. */
#define DKV_HEADS_MAX       1024u    /* query heads of one block */
#define DKV_HEAD_DIM_MAX    512u     /* D and D_v */
#define DKV_TOKENS_MAX      2097152u /* n of one block */
#define DKV_WINDOW_MAX      512u
#define DKV_ROWS_MAX        512u   /* (Hq / Hkv) * window */
#define DKV_ALL_ROWS_MAX    65536u /* the same where a policy takes every row given */
#define DKV_KERNEL_MAX      511u   /* pooling kernel, odd */
#define DKV_BLOCKS_MAX      4096u  /* blocks of one request */
#define DKV_PAGE_TOKENS_MAX 65536u
#define DKV_STREAM_NAME_MAX 64u
#define DKV_LIST_TEXT_MAX   1536u /* bytes of per_layer and per_head */

enum dkv_profile { DKV_PROFILE_PAPER = 0, DKV_PROFILE_AUTHOR, DKV_PROFILE_KVPRESS };
/* proto/policy.h says what each needs, kernels/policies/ what it computes. */
enum dkv_policy {
    DKV_POLICY_DROPKV = 0,
    DKV_POLICY_SNAPKV,
    DKV_POLICY_TOVA,
    DKV_POLICY_H2O,
    DKV_POLICY_CAKE,
    DKV_POLICY_ANDPRO,
    DKV_POLICY_CRITICALKV,
    DKV_POLICY_RESTKV,
    DKV_POLICY_KVZIP,
    DKV_POLICY_KEYDIFF,
    DKV_POLICY_KNORM,
    DKV_POLICY_STREAMING,
    DKV_POLICY_RANDOM,
    DKV_POLICY_EXTERNAL,
    DKV_POLICY_COUNT,
};
enum dkv_pool { DKV_POOL_NONE = 0, DKV_POOL_MAX, DKV_POOL_AVG };
enum dkv_pool_scope { DKV_POOL_SCOPE_ALL = 0, DKV_POOL_SCOPE_PREFIX };
enum dkv_p_round { DKV_P_ROUND_NONE = 0, DKV_P_ROUND_INPUT };
enum dkv_gqa { DKV_GQA_MEAN = 0, DKV_GQA_MAX, DKV_GQA_SUM, DKV_GQA_LAYER };
enum dkv_on_conflict { DKV_CONFLICT_PROTECT = 0, DKV_CONFLICT_BUDGET, DKV_CONFLICT_ERROR };
enum dkv_on_overload { DKV_OVERLOAD_REFUSE = 0, DKV_OVERLOAD_RECENCY };
enum dkv_nonfinite { DKV_NONFINITE_ERROR = 0, DKV_NONFINITE_MASK };
enum dkv_reduce {
    DKV_REDUCE_SUM = 0,
    DKV_REDUCE_MEAN,      /* over the window's rows */
    DKV_REDUCE_MEAN_SEEN, /* over those of them that see the token */
    DKV_REDUCE_MAX,
    DKV_REDUCE_EMA,       /* of the rows' terms, the newest row with weight ema_alpha */
    DKV_REDUCE_EMA_FIRST, /* of the rows' probabilities, before anything else is done to them */
};
enum dkv_heads {
    DKV_HEADS_UNIFORM = 0,
    DKV_HEADS_ADAKV_MIX,
    DKV_HEADS_ADAKV_FLOOR,
    DKV_HEADS_GLOBAL
};
enum dkv_layers { DKV_LAYERS_UNIFORM = 0, DKV_LAYERS_PYRAMID, DKV_LAYERS_CAKE, DKV_LAYERS_FIXED };
enum dkv_anchor { DKV_ANCHOR_NORMALISED = 0, DKV_ANCHOR_PLAIN };

/* Bits of dkv_params.set, one per field below. */
enum dkv_param_id {
    DKV_PARAM_PROFILE = 0,
    DKV_PARAM_POLICY,
    DKV_PARAM_WINDOW,
    DKV_PARAM_POOL,
    DKV_PARAM_KERNEL,
    DKV_PARAM_POOL_SCOPE,
    DKV_PARAM_EPS,
    DKV_PARAM_P_ROUND,
    DKV_PARAM_GQA,
    DKV_PARAM_SINKS,
    DKV_PARAM_RECENT,
    DKV_PARAM_KEEP_RATIO,
    DKV_PARAM_COMPRESSION_RATIO,
    DKV_PARAM_KEEP_TOKENS,
    DKV_PARAM_TOTAL_TOKENS,
    DKV_PARAM_MAX_KEEP_TOKENS,
    DKV_PARAM_ON_CONFLICT,
    DKV_PARAM_SCALE,
    DKV_PARAM_LOGIT_SOFTCAP,
    DKV_PARAM_NONFINITE,
    DKV_PARAM_LAYER,
    DKV_PARAM_STREAM,
    DKV_PARAM_PRIORITY,
    DKV_PARAM_TIMEOUT,
    DKV_PARAM_ON_OVERLOAD,
    DKV_PARAM_REDUCE,
    DKV_PARAM_EMA_ALPHA,
    DKV_PARAM_GAMMA,
    DKV_PARAM_ANCHOR,
    DKV_PARAM_SEED,
    DKV_PARAM_HEADS,
    DKV_PARAM_ALPHA,
    DKV_PARAM_LAYERS,
    DKV_PARAM_BETA,
    DKV_PARAM_TAU1,
    DKV_PARAM_TAU2,
    DKV_PARAM_N_LAYERS,
    DKV_PARAM_PER_LAYER,
    DKV_PARAM_PER_HEAD,
    DKV_PARAM_MIN_KEEP,
    DKV_PARAM_COUNTS_PROTECTED,
    DKV_PARAM_GRANULARITY,
    DKV_PARAM_TRACEPARENT,
    DKV_PARAM_COUNT,
};

struct dkv_params {
    uint64_t set; /* bit i: the caller named parameter i (enum dkv_param_id) */
    enum dkv_profile profile;
    enum dkv_policy policy;
    int64_t window; /* 0: every row given, the default of h2o and kvzip */
    enum dkv_pool pool;
    int64_t kernel;
    enum dkv_pool_scope pool_scope;
    double eps; /* in p / (1 - p + eps); 0: the exact leave-one-out form */
    enum dkv_p_round p_round;
    enum dkv_gqa gqa;
    int64_t sinks;
    int64_t recent;    /* default: the policy's, mostly window */
    double keep_ratio; /* exactly one of these three budgets; default keep_ratio 0.1 */
    double compression_ratio;
    int64_t keep_tokens;
    int64_t total_tokens;    /* base of keep_ratio when chunks were evicted before; unset: n */
    int64_t max_keep_tokens; /* cap on k; unset: none */
    enum dkv_on_conflict on_conflict;
    double scale;         /* of logits; unset: 1/sqrt(head_dim) */
    double logit_softcap; /* 0: none */
    enum dkv_nonfinite nonfinite;
    int64_t layer;
    int64_t priority; /* 0: default level; 1: highest */
    int64_t timeout;  /* microseconds; 0: the server's */
    char stream[DKV_STREAM_NAME_MAX + 1];
    char traceparent[DKV_STREAM_NAME_MAX + 1]; /* of W3C Trace Context: for the daemon's log */
    enum dkv_on_overload on_overload;
    enum dkv_reduce reduce; /* over the window's rows */
    double ema_alpha;       /* weight of the newest row */
    double gamma;           /* weight of the variance (cake) */
    enum dkv_anchor anchor; /* keydiff: the mean of normalised keys or of the keys as they are */
    int64_t seed;           /* random */

    enum dkv_heads heads;      /* how a layer's budget is dealt to its KV heads */
    double alpha;              /* adakv: share that every head has in any case */
    enum dkv_layers layers;    /* how a request's budget is dealt to its blocks, which are layers */
    double beta;               /* pyramid: the last layer has 1/beta of the mean */
    double tau1, tau2;         /* cake: exponents 1/tau of entropy and variance */
    int64_t n_layers;          /* of the model, where a request has only some; unset: its blocks */
    int64_t min_keep;          /* of each head, protected tokens counted */
    unsigned counts_protected; /* 1: the budget holds the protected tokens too */
    int64_t granularity;       /* whole chunks of so many tokens are kept */

    /* Last, since they are long and rarely there: see dkv_params_copy(). */
    char per_layer[DKV_LIST_TEXT_MAX + 1]; /* fixed: "512,256,..." tokens */
    char per_head[DKV_LIST_TEXT_MAX + 1];
};

/* Nothing set. */
void dkv_params_init(struct dkv_params *params);

enum dkv_value_kind { DKV_VALUE_INT, DKV_VALUE_REAL, DKV_VALUE_BOOL, DKV_VALUE_STRING };

/* A value as a front end read it. An integer is accepted where a real is expected. */
struct dkv_value {
    enum dkv_value_kind kind;
    int64_t integer;
    double real;
    bool boolean;
    const char *string; /* borrowed */
};

/* One row per parameter, in enum order: what help texts, metadata and docs are made from. */
struct dkv_param_info {
    enum dkv_param_id id;
    const char *name;
    enum dkv_value_kind kind; /* STRING for enumerations, `stream`, `traceparent` */
    const char *range;        /* "1..512", "paper | author | kvpress", ... */
    const char *unit;         /* "tokens", "us", "" */
    const char *help;         /* one sentence */
};

const struct dkv_param_info *dkv_param_info(enum dkv_param_id id);
bool dkv_param_find(const char *name, enum dkv_param_id *id_out);

/* Sets a parameter by name. INVALID for an unknown name, a wrong type, an unknown enumeration
 * value or a name set twice; the text names what would have been accepted. */
enum dkv_status dkv_params_set(struct dkv_params *params, const char *name, struct dkv_value value,
                               struct dkv_error *err);

/* The same from text (command line, environment): "8", "0.05", "max". */
enum dkv_status dkv_params_set_text(struct dkv_params *params, const char *name, const char *text,
                                    struct dkv_error *err);

/* The value of a parameter, as dkv_params_set() takes it; `string` points into `params`. */
struct dkv_value dkv_params_get(const struct dkv_params *params, enum dkv_param_id id);

/* The numbers of a list "512,256,...": counts them, each 0..2^31-1, and writes up to `max`. False
 * for any other text; an empty one has none. */
bool dkv_params_list(const char *text, uint32_t *numbers_out, size_t max, size_t *count_out);

/* True if the caller named this parameter. */
static inline bool dkv_params_has(const struct dkv_params *params, enum dkv_param_id id)
{
    return (params->set >> id) & 1u;
}

/* Fills every field that was not set from the profile and the defaults. Idempotent, cannot fail;
 * `set` keeps telling what the caller named. */
void dkv_params_resolve(struct dkv_params *params);

/* Copies without what is behind the ends of the lists, most of the struct. */
void dkv_params_copy(struct dkv_params *to, const struct dkv_params *from);

/* Judges the range of every field of resolved parameters, and that at most one budget was given.
 * This is the gate's work: call dkv_request_validate(), or this for a configuration file. */
enum dkv_status dkv_params_check(const struct dkv_params *params, struct dkv_error *err);

/* "max", "author", ...: the word for an enumeration's value, as dkv_params_set() takes it. */
const char *dkv_profile_name(enum dkv_profile profile);
const char *dkv_policy_name(enum dkv_policy policy);
const char *dkv_pool_name(enum dkv_pool pool);

#ifdef __cplusplus
}
#endif
#endif
