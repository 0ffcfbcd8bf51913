/* What the host tells the device about a batch: the meeting point of planning (wave.c), scoring
 * (the table of scorers) and selection.
 *
 * A batch runs as waves. A wave is a list of units, one per (block, KV head), that fit into the
 * scratch together; everything the device needs to know about it is one upload. Each kernel of a
 * wave is launched once for all its units, whatever their blocks' sizes.
 *
 *   unit = (block, KV head)          rows of a unit: r = head_in_group * window + t, R = g * window
 *   key index i = token - valid_from in 0..n_valid-1; row t sees keys i <= n_valid - window + t
 *
 * Scoring hands over to selection in `unit.scores`: float32 [n_valid], the raw score times
 * 2^(2 * *unit.exponent), before pooling, 0 for masked tokens. The factor keeps small scores apart
 * (docs/numerics.md, Range); selection needs only the order and descales what it reports.
 *
 * Blocks with plan->general are not selected head by head: the scores of all their heads stay where
 * they are, in whatever waves those were scored, and a choice, in the wave of the last one, makes
 * an answer of them (choose.cu).
 *
 * What is scored is the policy's rule (kernels/rule.h): its forms are compiled into kernels, and
 * the block says which of them to launch.
 *
 * Adding a scorer: one row in dkv_cu_scorers (scorers.c), fastest first; the general one, last,
 * takes everything that has query rows. A scorer that meets something it cannot answer (a
 * non-finite number, a value out of its range) sets DKV_CU_RETRY in the unit's report: the block is
 * then run again by the general scorer, which finds the place or the answer.
 *
 * Seen by C and CUDA C++.
 */
#ifndef DKV_KERNELS_CUDA_PLAN_H
#define DKV_KERNELS_CUDA_PLAN_H

#include <cuda_runtime_api.h>

#include "kernels/engine.h"
#include "kernels/rule.h"

#ifdef __cplusplus
extern "C" {
#endif

static inline bool dkv_cu_is_fp8(uint32_t dtype)
{
    return dtype == DKV_F8_E4M3 || dtype == DKV_F8_E5M2;
}

/* The exponent of the range factor that scorers use unless large values force a smaller one: p is
 * accumulated as p * 2^40. */
#define DKV_CU_EXPONENT 40

/* Rows of keys or values of one unit: row of token t is
 *   unit.k + entry(t / page_tokens) * page_stride + (t % page_tokens) * token_stride
 * with the head's offset already in unit.k. Read entries through dkv_cu_row() (device.cuh), which
 * checks them; nothing is read through a bad one. */
struct dkv_cu_rows {
    int64_t page_stride;
    int64_t token_stride;
    const void *table;    /* device, aligned to entry_bytes; NULL: entry(i) = i */
    uint64_t entry_limit; /* an entry e is good if 0 <= e < entry_limit */
    int64_t mask;         /* never 0 */
    int64_t null_entry;
    uint32_t page_tokens; /* 0: not paged */
    uint32_t page_shift;  /* log2(page_tokens) if that is a power of two, else 0 */
    uint32_t entry_bytes; /* 4 or 8 */
    uint32_t has_null_entry;
    uint32_t dtype; /* enum dkv_dtype */
    uint32_t align; /* every row starts at a multiple of this: 1, 2, 4, 8 or 16 */
};

/* The forms that rules take in kernels. */
enum dkv_cu_form {
    DKV_CU_FORM_DROPKV,  /* odds^2 * distance^2, summed */
    DKV_CU_FORM_P,       /* p */
    DKV_CU_FORM_PROJ,    /* p * (a . v) */
    DKV_CU_FORM_DIST,    /* odds * distance */
    DKV_CU_FORM_AVERAGE, /* rows become one; then odds * distance */
    DKV_CU_FORM_UNSEEN,  /* no query rows: block.source says what */
};

struct dkv_cu_block {
    struct dkv_cu_rows k;
    struct dkv_cu_rows v;
    int64_t q_row_stride;  /* bytes from one row of a query head to the next */
    int64_t q_head_stride; /* bytes from one query head to the next */
    uint32_t q_dtype;
    uint32_t q_align;
    uint32_t heads;  /* KV heads of the block: as many units */
    uint32_t group;  /* g */
    uint32_t window; /* w */
    uint32_t head_dim;
    uint32_t v_dim; /* 0: the rule does not read values */
    uint32_t n_valid;
    uint32_t valid_from;
    float scale;          /* of logits */
    float q_scale;        /* of fp8 queries if their heads have one; 0: see unit.q_scales */
    float softcap;        /* 0: none */
    float eps;            /* 0: the exact form */
    uint32_t p_round;     /* p rounded to q_dtype before use */
    uint32_t gqa;         /* enum dkv_gqa */
    uint32_t nonfinite;   /* enum dkv_nonfinite */
    uint32_t pool;        /* enum dkv_pool */
    uint32_t pool_prefix; /* pool_scope is prefix */
    uint32_t kernel;
    uint32_t sinks;
    uint32_t recent;
    uint32_t keep;     /* k */
    uint32_t chosen;   /* selected with the other heads, by a choice */
    uint32_t form;     /* enum dkv_cu_form */
    uint32_t source;   /* enum dkv_source */
    uint32_t reduce;   /* enum dkv_reduce, over the window's rows */
    uint32_t variance; /* of the rule: gamma times the rows' variance is added */
    uint32_t spread;   /* layers=cake: the report gets entropy and variance */
    uint32_t metric;   /* distances are |M (a - v)| */
    uint32_t plain_anchor;
    float gamma;
    float ema_alpha;
    uint64_t hash; /* of seed and layer */
};

/* What kernels found wrong with a unit, all bits set where nothing was. Written with atomicMin (so
 * the lowest place wins in every run) and atomicAnd/atomicOr. */
struct dkv_cu_report {
    unsigned long long bad_k_entry; /* index in the table of the first bad entry, or ~0 */
    unsigned long long bad_v_entry;
    unsigned long long nonfinite; /* packed place (DKV_CU_PLACE), or ~0 */
    unsigned flags;               /* enum dkv_cu_flag, 0 at the start */
    int exponent;                 /* what unit.exponent points at */
    double entropy, variance;     /* block.spread: sums over query heads, rows and prefix */
};

enum dkv_cu_flag {
    DKV_CU_RETRY = 1,    /* this scorer cannot answer: run the block on the general one */
    DKV_CU_OVERFLOW = 2, /* finite inputs whose logits, outputs or scores leave float32 */
};

/* Where a non-finite element is: tensor (0 query, 1 key, 2 value), query head or KV head, row or
 * token, element; ordered as a reader of the tensors would meet it. */
#define DKV_CU_PLACE(tensor, head, token, element)                           \
    ((unsigned long long)(tensor) << 44 | (unsigned long long)(head) << 33 | \
     (unsigned long long)(token) << 10 | (unsigned long long)(element))

struct dkv_cu_unit {
    const unsigned char *q; /* row 0 of the unit: first used row of query head h * g */
    const unsigned char *k; /* token 0 (or page entry 0) of head h, see dkv_cu_rows */
    const unsigned char *v;
    const float *q_scales;    /* device, [g]: of fp8 queries; NULL: 1 */
    const float *sink_logits; /* device, [g] of this unit; NULL: none */
    const float *metric;      /* device, [g][v_dim][v_dim]; NULL: none */
    const float *given;       /* device, external_scores [n_valid]; NULL: none */
    float *scores;            /* [n_valid], aligned to 16 bytes; see the top comment */
    int *exponent;            /* written by the scorer; of chosen blocks not in the report */
    unsigned *mask;           /* nonfinite=mask: bit i set: key i is masked; else NULL */
    unsigned char *work;      /* the scorer's scratch, dkv_cu_work_bytes() of it, aligned to 256 */
    uint32_t *keys;           /* selection's scratch, [n_valid], or NULL: it uses shared memory */
    int32_t *keep_out;        /* [keep] */
    float *scores_out;        /* [n_valid], descaled; NULL if not wanted */
    struct dkv_cu_report *report;
    float k_scale; /* of fp8, 1 otherwise */
    float v_scale;
    uint32_t block; /* index in wave.blocks */
    uint32_t head;  /* KV head */
};

/* The selection of a block whose heads are looked at together; arrays are [heads][stride] and those
 * of chunks, where these are what is kept, begin with each head's first. kernels/choose.h has what
 * it computes; here scores are float32 all along. */
struct dkv_cu_choice {
    float *raw;           /* in: as scorers leave them, each with its head's factor */
    const int *exponents; /* [heads] of that factor */
    float *pooled;
    float *chunk_raw;     /* NULL: chunk is 1 */
    uint8_t *token_class; /* of tokens */
    uint8_t *chunk_class; /* of chunks; of tokens too where chunk is 1 */
    unsigned *mask;       /* [heads][mask_words], as in dkv_cu_unit; NULL: none */
    unsigned *bins;       /* scratch, DKV_CU_CHOICE_BINS of them */
    const float *weight;  /* [heads][n]: of criticalkv; NULL: 1 */
    const float *carry;   /* [heads][n]: scores of earlier calls; NULL: none */
    const uint32_t *each; /* [heads] tokens of each head; NULL: `keep` */
    uint32_t *counts_out; /* [heads]; of several heads that are joined in selection: the ends */
    int32_t *keep_out;    /* [capacity], head after head */
    float *scores_out;    /* [heads][n], as reported; NULL if not wanted */
    uint32_t capacity;
    uint32_t heads;
    uint32_t n;
    uint32_t stride; /* n, rounded up to a multiple of 4 */
    uint32_t mask_words;
    uint32_t window; /* a row that sees one key protects that; 0: no rows */
    uint32_t first_index;
    uint32_t sinks;
    uint32_t recent;
    uint32_t keep;
    uint32_t min_keep;
    uint32_t chunk;
    uint32_t pool; /* enum dkv_pool */
    uint32_t kernel;
    uint32_t scope_begin; /* of pooling */
    uint32_t scope_end;
    uint32_t mode; /* enum dkv_heads */
    uint32_t one_set;
    uint32_t two_stages;
    uint32_t carry_largest; /* a maximum goes on, not a sum */
    uint32_t simple;        /* enum dkv_cu_simple */
    uint32_t range;         /* enum dkv_cu_range */
    uint32_t no_factor;     /* all exponents are 0 */
    double alpha;
};

/* Choices that selection does. */
enum dkv_cu_simple {
    DKV_CU_SIMPLE_NOT = 0,
    DKV_CU_SIMPLE_PLAIN, /* as units: head by head, or by the mean of all; scores are not negative
                          */
    DKV_CU_SIMPLE_ANY,   /* scores of any sign, chunks, the best of all heads: select_any.cu */
};

/* Where a block's scores are, as a rule: what the search for the cut tells apart first. */
enum dkv_cu_range {
    DKV_CU_RANGE_POSITIVE = 0,
    DKV_CU_RANGE_SIGNED,
    DKV_CU_RANGE_NORM,  /* below 0, within a few octaves */
    DKV_CU_RANGE_ANGLE, /* -1 to 1 */
};

#define DKV_CU_CHOICE_BINS (3u * 2048u + 16u)

/* One wave. `*_host` are the same structs in pinned memory (device pointers inside). */
struct dkv_cu_wave {
    const struct dkv_cu_block *blocks; /* device */
    const struct dkv_cu_unit *units;   /* device, sorted by scorer */
    const struct dkv_cu_block *blocks_host;
    const struct dkv_cu_unit *units_host;
    const struct dkv_cu_choice *choices; /* device */
    const struct dkv_cu_choice *choices_host;
    uint32_t n_blocks;
    uint32_t n_units;
    uint32_t n_choices;
    unsigned char *shared; /* device, aligned to 256: the largest shared_bytes() of all scorers */
};

#define DKV_CU_CLUSTER_SIZES 5 /* 1, 2, 4, 8, 16 */

struct dkv_cu_device {
    int ordinal;
    int major;
    int minor;
    int multiprocessors;
    int shared_bytes_max; /* per thread block, opt-in */
    int l2_bytes;
    uint32_t cluster_max; /* thread blocks of a selection cluster; 1: none */
    /* Clusters of 1 << i blocks of selection that run at once, each block on a multiprocessor of
     * its own; 0: none so large. */
    uint32_t clusters_apart[DKV_CU_CLUSTER_SIZES];
    uint32_t choice_cluster; /* thread blocks of a choice, at most */
    bool waits_for_scores;   /* selection may be launched before scoring ends */
    char name[96];
};

struct dkv_cu_scorer {
    const char *name;
    /* Once at open, on the right device: raise limits, load kernels. */
    cudaError_t (*prepare)(const struct dkv_cu_device *device);
    /* True if this scorer answers this block on this device. Pure, and blind to batch neighbours,
     * so that an answer does not depend on them. The block's strides, alignment and dtypes are
     * final; pointers are not filled in yet. */
    bool (*takes)(const struct dkv_cu_device *device, const struct dkv_cu_block *block);
    /* Bytes of `unit.work` for one unit of this block. */
    size_t (*unit_bytes)(const struct dkv_cu_block *block);
    /* Bytes of scratch that a launch needs whatever its units, in wave.shared; NULL: none. The
     * launches of an engine follow each other on one stream and share it, so it is allocated once,
     * at open; nobody clears it. A ring of partial results lives here, so that scratch does not
     * grow with the batch. */
    size_t (*shared_bytes)(const struct dkv_cu_device *device);
    /* Bytes of host-made data per launch for `n` units (work lists); 0 for none. It is private to
     * this launch and writable by kernels, so counters that must start at 0 belong here too. */
    size_t (*extra_bytes)(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                          uint32_t first, uint32_t n);
    /* Writes that data for units first..first+n-1, before the wave is uploaded. */
    void (*fill)(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave, uint32_t first,
                 uint32_t n, void *extra);
    /* Launches the units' kernels on `stream`; `extra_device` is the uploaded data. Does not wait.
     */
    cudaError_t (*launch)(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                          uint32_t first, uint32_t n, const void *extra_host,
                          const void *extra_device, cudaStream_t stream);
    /* takes() heeds the block's form; otherwise it is asked for DropKV's alone. */
    bool knows_rules;
    /* Where in `unit.work` the unit's scores may lie, bytes from its start, a multiple of 16: by
     * the time that the first score is written nothing from there on is read any more. NULL: they
     * have a place of their own. */
    size_t (*scores_at)(const struct dkv_cu_block *block);
};

/* Whether the scores of this block's units lie in their work. Those of chosen blocks do not: they
 * may be needed longer than their wave's work. */
static inline bool dkv_cu_scores_in_work(const struct dkv_cu_scorer *scorer,
                                         const struct dkv_cu_block *block)
{
    return scorer->scores_at != NULL && !block->chosen;
}

/* Bytes of `unit.work` for one unit of this block, its scores included if they lie there. */
static inline size_t dkv_cu_work_bytes(const struct dkv_cu_scorer *scorer,
                                       const struct dkv_cu_block *block)
{
    const size_t own = scorer->unit_bytes(block);
    if (!dkv_cu_scores_in_work(scorer, block))
        return own;
    const size_t end = scorer->scores_at(block) + block->n_valid * sizeof(float);
    return end > own ? end : own;
}

/* Fastest first; the last one, the general scorer, takes every block that the others leave. Ends
 * with NULL. */
extern const struct dkv_cu_scorer *const dkv_cu_scorers[];

/* Copies a multiple of 16 bytes from pinned host memory to the device; up to DKV_CU_UPLOAD_MAX this
 * is sooner done than a copy. */
#define DKV_CU_UPLOAD_MAX ((size_t)256 << 10)
cudaError_t dkv_cu_upload_launch(void *to, const void *from, size_t bytes, cudaStream_t stream);

/* nonfinite=mask: writes unit.mask of every unit that has one, before any scorer runs. */
cudaError_t dkv_cu_mask_prepare(void);
cudaError_t dkv_cu_mask_launch(const struct dkv_cu_wave *wave, cudaStream_t stream);

/* Selection over all units but those of chosen blocks, and over simple choices: pools, selects,
 * writes keep_out, counts_out and scores_out. */
cudaError_t dkv_cu_select_prepare(struct dkv_cu_device *device); /* sets the three fields above */
/* Tokens of all heads that are selected from by DKV_CU_SIMPLE_ANY, at most. */
#define DKV_CU_SELECT_ANY_MAX 0x3fffffu
/* True if a unit of n tokens needs unit.keys. */
bool dkv_cu_select_needs_keys(const struct dkv_cu_device *device, uint32_t n_valid);
size_t dkv_cu_select_extra_bytes(const struct dkv_cu_device *device,
                                 const struct dkv_cu_wave *wave);
void dkv_cu_select_fill(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                        void *extra);
cudaError_t dkv_cu_select_launch(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                                 const void *extra_host, const void *extra_device,
                                 cudaStream_t stream);

/* The wave's other choices, after everything else. */
cudaError_t dkv_cu_choose_prepare(struct dkv_cu_device *device);
cudaError_t dkv_cu_choose_launch(const struct dkv_cu_device *device, const struct dkv_cu_wave *wave,
                                 cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
