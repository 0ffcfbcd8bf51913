/* The host side of the CUDA engine: what engine.c, wave.c, stage.c and answer.c share.
 *
 *   open.c     opens and closes a device: all memory, streams and events
 *   engine.c   submits batches and waits for them
 *   context.c  the context they are in
 *   describe.c what a block looks like to the device
 *   place.c    puts a unit's inputs where the device reads them
 *   wave.c     packs units into waves and launches them
 *   choice.c   blocks whose heads are selected together, and requests whose layers are
 *   stage.c    which host tensors go where on the device
 *   ring.c     takes them there through pinned chunks
 *   answer.c   copies results to the callers; turns reports into sentences
 *   direct.c   has the device send large ones to callers whose memory is pinned
 *   import.c   maps memory of other processes
 *   unroll.c   copies query rows that lie around the end of a ring
 *
 * Everything is allocated at open. A slot is one batch in flight. Its `io` is one stretch of memory
 * that exists twice, pinned on the host and on the device, at equal offsets; waves take spans of it
 * one after the other: [uploaded: blocks, units, small arrays, scorers' work lists | reports |
 * results]. One copy brings the first part up, one brings reports and results down.
 *
 * Thread  the engine's one thread.
 */
#ifndef DKV_KERNELS_CUDA_HOST_H
#define DKV_KERNELS_CUDA_HOST_H

#include <pthread.h>

#include "kernels/cuda/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_CU_SLOTS       2u
#define DKV_CU_CHUNK_BYTES ((size_t)256 << 10)
#define DKV_CU_CHUNKS      128u
#define DKV_CU_RUN         16u  /* chunks in one copy */
#define DKV_CU_COPIES      64u  /* under way */
#define DKV_CU_JOBS        256u /* chunks' worth of copying in one flush */
#define DKV_CU_THREADS     12u  /* that stage, unless the configuration says otherwise */
#define DKV_CU_IO_BYTES    ((size_t)40 << 20)
#define DKV_CU_EXTRA_BYTES ((size_t)8 << 20) /* of io: kept free for the scorers' work lists */
#define DKV_CU_SCRATCH     ((size_t)96 << 20)
#define DKV_CU_STAGE_BYTES ((size_t)256 << 20) /* default of config.max_batch_bytes */
#define DKV_CU_UNITS_MAX   16384u              /* of a slot, between two synchronises */
#define DKV_CU_SCORERS_MAX 8u
#define DKV_CU_SMALL_TABLE ((size_t)256 << 10) /* larger page tables are staged like tensors */
#define DKV_CU_SMALL_QUERY ((size_t)1 << 20)   /* a unit's larger queries are, too */

/* Moments of a wave that benchmarks ask for. */
enum dkv_cu_mark {
    DKV_CU_MARK_START,
    DKV_CU_MARK_UPLOADED,
    DKV_CU_MARK_SCORED,
    DKV_CU_MARK_SELECTED,
    DKV_CU_MARK_DOWNLOADED,
    DKV_CU_MARKS,
};

/* A wave of host tensors is launched once it has this much, so that copies and kernels overlap. */
#define DKV_CU_STAGE_WAVE ((size_t)32 << 20)

/* A stretch of memory that is handed out from the front and emptied as a whole. */
struct dkv_cu_arena {
    unsigned char *base;
    size_t bytes;
    size_t used;
};

static inline size_t dkv_cu_align(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

/* NULL if it does not fit; aligned to 256 bytes. */
static inline void *dkv_cu_take(struct dkv_cu_arena *arena, size_t bytes)
{
    const size_t need = dkv_cu_align(bytes);
    if (need > arena->bytes - arena->used)
        return NULL;
    void *at = arena->base + arena->used;
    arena->used += need;
    return at;
}

/* A unit that was launched and not yet answered. Offsets are into the slot's io. */
struct dkv_cu_pending {
    uint32_t item;
    uint32_t head;
    size_t report;
    size_t keep;   /* 0: the block is chosen */
    size_t scores; /* 0: not wanted, or chosen */
    bool direct;   /* the device has sent both to the caller */
};

/* The same of a choice. */
struct dkv_cu_pending_choice {
    uint32_t item;
    size_t counts; /* [kv_heads], then the indices */
    size_t keep;
    size_t scores; /* 0: not wanted */
    bool ends;     /* counts are added up, head by head */
};

struct dkv_cu_slot {
    struct dkv_cu_arena rows; /* device: rings of query rows, unrolled */
    struct dkv_cu_arena io;   /* pinned */
    unsigned char *io_device;
    struct dkv_cu_pending *pending; /* [DKV_CU_UNITS_MAX] */
    uint32_t n_pending;
    struct dkv_cu_pending_choice *pending_choices; /* [max_items] */
    uint32_t n_pending_choices;
    struct dkv_item *items; /* of the batch in flight; NULL: free */
    size_t n_items;
    unsigned char *retry; /* [max_items]: this block goes to the general scorer */
    cudaEvent_t done;     /* recorded after each wave */
};

/* A copy to the device that was begun. */
struct dkv_cu_copy {
    cudaEvent_t done;
    uint64_t upto; /* number of the first chunk that is not in it */
};

/* Chunks in flight, in the order of their numbers: number i is at memory + i % DKV_CU_CHUNKS
 * chunks. Those from free_upto to sent are being copied. */
struct dkv_cu_ring {
    unsigned char *memory; /* pinned */
    struct dkv_cu_copy copies[DKV_CU_COPIES];
    uint64_t copies_begun, copies_done; /* the sender's */
    uint64_t first;                     /* number of the flush's first job */
    uint64_t sent;
    bool is_open;
    pthread_mutex_t lock;
    pthread_cond_t filled, freed;
    /* under lock */
    uint64_t free_upto;
    cudaError_t failure;
};

/* Rows of host tensors: one head's, through a table or not. */
struct dkv_cu_source {
    const struct dkv_view *view;
    const struct dkv_page_table *table; /* NULL: not paged, or no table */
    const char *name;                   /* "key", "value" */
    uint32_t page_tokens;
    uint32_t dims;
    uint64_t entry_limit;
    uint64_t first_token;
    uint64_t n_tokens; /* the last one + 1 */
};

/* One chunk's worth of copying. */
struct dkv_cu_stage_job {
    struct dkv_cu_source source; /* view NULL: plain bytes */
    struct dkv_item *item;
    const unsigned char *from; /* the head's token 0, or the bytes */
    unsigned char *to_device;
    size_t bytes;
    bool filled; /* under the ring's lock */
    struct dkv_error error;
};

/* The wave that is being put together. */
struct dkv_cu_builder {
    struct dkv_cu_block *blocks; /* [max_items] */
    struct dkv_cu_unit *units;   /* [DKV_CU_UNITS_MAX]: in the order of items */
    struct dkv_cu_pending *pending;
    unsigned char *scorer;         /* [max_items], of each block */
    struct dkv_cu_choice *choices; /* [max_items] */
    uint32_t *choice_items;        /* of each */
    uint32_t n_choices;
    uint32_t n_blocks;
    uint32_t n_units;
    size_t io_begin;     /* of the wave's span */
    size_t result_bytes; /* of all units so far */
    size_t staged_bytes;
};

/* Half of the device memory that host tensors are staged in; waves use the halves in turn. */
struct dkv_cu_half {
    struct dkv_cu_arena arena;
    cudaEvent_t filled;
    cudaEvent_t consumed;
    bool busy;  /* `consumed` was recorded and may not have happened */
    bool dirty; /* copies were queued for the wave that is being built */
};

/* What a layer's share is found from. */
struct dkv_cu_layer {
    double entropy, variance; /* sums over its heads */
    double preference;
    uint64_t share;
};

struct dkv_cu_engine {
    struct dkv_cu_device device;
    uint8_t uuid[DKV_UUID_BYTES];
    struct CUctx_st *context; /* NULL: not opened yet */
    bool retained;            /* it is the device's primary one, and released at the end */
    cudaStream_t stream;      /* kernels and results, in order */
    cudaStream_t copies;      /* host tensors to the device */
    cudaStream_t tidings;     /* calls on_done behind each batch; NULL: nobody wants to know */
    void (*on_done)(void *arg);
    void *on_done_arg;
    bool owns_stream;
    bool lost; /* a sticky error was seen: nothing works any more */
    bool general_only;
    struct dkv_cu_arena scratch; /* device; reused by wave after wave */
    size_t held;                 /* of scratch: a block whose heads come in several waves */
    struct dkv_cu_layer *layers; /* [max_items]: layers=cake */
    unsigned char *shared;       /* device; see dkv_cu_scorer.shared_bytes */
    size_t shared_bytes;
    size_t wave_scratch; /* what the last wave used of both */
    size_t wave_scratch_peak;
    struct dkv_cu_half halves[2];
    unsigned half;
    struct dkv_cu_ring ring;
    struct dkv_cu_stage_job jobs[DKV_CU_JOBS];
    unsigned n_jobs;
    struct dkv_threads *crew; /* stages host tensors */
    struct dkv_cu_slot slots[DKV_CU_SLOTS];
    unsigned oldest;
    unsigned n_in_flight;
    size_t max_items;
    struct dkv_cu_builder *builder;
    bool timed, split;
    cudaEvent_t marks[DKV_CU_MARKS]; /* of the last wave, if timed */
};

/* The one wrapper of CUDA calls: DKV_OK, or the call's failure as a status with a sentence that
 * names `what`. A sticky error marks the engine lost and is DKV_E_DEVICE; out of memory is
 * DKV_E_NOMEM; anything else is our mistake, DKV_E_INTERNAL. */
enum dkv_status dkv_cu_check(struct dkv_cu_engine *engine, cudaError_t error, const char *what,
                             struct dkv_error *err);

/* For benchmarks, which find them with dlsym(): time the stages of every wave from now on, or no
 * more; how long those of the last wave took, after its wait(): upload, scoring, selection,
 * download. An event between scoring and selection keeps the one from being launched during the
 * other; unless they are split there is none, and selection's time is 0 and within scoring's. */
enum dkv_cuda_timing { DKV_CUDA_UNTIMED = 0, DKV_CUDA_TIMED, DKV_CUDA_TIMED_SPLIT };
enum dkv_status dkv_cuda_time_stages(struct dkv_engine *engine, enum dkv_cuda_timing timing,
                                     struct dkv_error *err);
enum dkv_status dkv_cuda_stage_times(struct dkv_engine *engine, float us_out[4],
                                     struct dkv_error *err);

/* ---- context.c ---- */

/* Finds the context of the caller's stream, or without one the primary context of engine->device,
 * which close() gives back; nothing is current afterwards. UNSUPPORTED, INVALID if the stream is
 * another device's, NOMEM. */
enum dkv_status dkv_cu_context_open(struct dkv_cu_engine *engine, void *callers_stream,
                                    struct dkv_error *err);
void dkv_cu_context_close(struct dkv_cu_engine *engine);

/* Makes the engine's context current on this thread, until leave() puts back what was. DEVICE. */
enum dkv_status dkv_cu_enter(struct dkv_cu_engine *engine, struct dkv_error *err);
void dkv_cu_leave(void);

/* This thread's current context; NULL: it has none. The runtime may make the primary one current
 * where there is none, so whoever calls it outside of enter() and leave() puts back what was. */
struct CUctx_st *dkv_cu_current(void);
void dkv_cu_set_current(struct CUctx_st *context);

/* ---- describe.c ---- */

static inline bool dkv_cu_on_host(const struct dkv_view *view)
{
    return view->place == DKV_PLACE_HOST;
}

/* The page table of a block's keys or values; NULL: none. Bytes of it that are read. */
const struct dkv_page_table *dkv_cu_table_of(const struct dkv_block *block, bool of_values);
size_t dkv_cu_table_bytes(const struct dkv_block *block, const struct dkv_page_table *table);

/* True if the table is on the host and its tensor is not: kernels read it from a copy. */
bool dkv_cu_is_uploaded(const struct dkv_view *view, const struct dkv_page_table *table);

static inline bool dkv_cu_reads_keys(const struct dkv_cu_block *desc)
{
    return desc->source <= DKV_SOURCE_KEY_ANGLE;
}

/* Everything but the table pointers. */
void dkv_cu_describe(const struct dkv_item *item, struct dkv_cu_block *out);

/* Bytes that one unit takes of each memory, its block's page tables included. */
struct dkv_cu_need {
    size_t scratch;
    size_t io_up;
    size_t io_down;
    size_t staged;
};

struct dkv_cu_need dkv_cu_need_of(const struct dkv_cu_engine *engine, const struct dkv_item *item,
                                  const struct dkv_cu_block *desc,
                                  const struct dkv_cu_scorer *scorer);

/* The same for the whole of a chosen block, beside its units. */
struct dkv_cu_need dkv_cu_choice_need_of(const struct dkv_item *item);

/* ---- place.c ---- */

/* Room in the staging memory of the wave that is being built. */
void *dkv_cu_stage_take(struct dkv_cu_engine *engine, size_t bytes);

/* Device address of what is at `at` in the slot's pinned io. */
static inline void *dkv_cu_twin(const struct dkv_cu_slot *slot, const void *at)
{
    return slot->io_device + ((const unsigned char *)at - slot->io.base);
}

/* Adds the item's block, then units of it, to the wave that is being built; `choice` has the memory
 * of a chosen block's heads, or is NULL. Errors are the device's; a bad page table entry of a host
 * tensor fails the item. */
enum dkv_status dkv_cu_add_block(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 struct dkv_item *item, const struct dkv_cu_block *desc,
                                 unsigned char scorer, struct dkv_error *err);
enum dkv_status dkv_cu_add_unit(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                uint32_t item_index, uint32_t head, const struct dkv_cu_need *need,
                                const struct dkv_cu_choice *choice, struct dkv_error *err);

/* ---- direct.c ---- */

/* True if the item's results are large and the memory they go to is pinned. */
bool dkv_cu_goes_direct(const struct dkv_item *item);

/* Queues the copies of those of the wave that was laid out last, its units the slot's next ones. */
enum dkv_status dkv_cu_send_direct(struct dkv_cu_engine *engine, const struct dkv_cu_slot *slot,
                                   uint32_t n_units, struct dkv_error *err);

/* ---- the others ---- */

/* wave.c: launches the slot's items, or those with only[i] != 0. Errors of an item are in the item;
 * only a failure of the whole batch is returned. */
enum dkv_status dkv_cu_run_items(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 const unsigned char *only, struct dkv_error *err);

/* Launches the wave that is being built, and begins the next one. */
enum dkv_status dkv_cu_launch_wave(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                   struct dkv_error *err);
void dkv_cu_begin_wave(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot);

/* Which scorer answers a block. */
unsigned char dkv_cu_choose_scorer(const struct dkv_cu_engine *engine,
                                   const struct dkv_cu_block *block);

/* True if there is room in the wave for `n_units` more that need so much together. */
bool dkv_cu_fits(const struct dkv_cu_engine *engine, const struct dkv_cu_slot *slot,
                 const struct dkv_cu_need *need, uint32_t n_units);

/* Makes room for so much: launches what there is, then waits for it if io is the shortage. */
enum dkv_status dkv_cu_make_room(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 const struct dkv_cu_need *need, bool *fits_out,
                                 struct dkv_error *err);

/* Adds all units of an item's block, in as many waves as they take. */
enum dkv_status dkv_cu_run_heads(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                 uint32_t index, const struct dkv_cu_block *desc,
                                 const struct dkv_cu_choice *choice, struct dkv_error *err);

/* choice.c: a chosen block, of which each head keeps `keep` tokens on average. */
enum dkv_status dkv_cu_run_chosen(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                  uint32_t index, uint64_t keep, struct dkv_error *err);

/* layers=cake: the items of one request from `index` on. *n_out is how many that were. */
enum dkv_status dkv_cu_run_layers(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                                  uint32_t index, uint32_t *n_out, struct dkv_error *err);

/* stage.c: queues the copy of tokens first_token.. of one head of a host view, dense, to
 * `to_device`, or of plain bytes. Jobs run in groups, the last ones at dkv_cu_stage_flush(); a bad
 * page table entry then fails the item. An error here is the device's. */
enum dkv_status dkv_cu_stage_head(struct dkv_cu_engine *engine, struct dkv_item *item,
                                  const struct dkv_cu_source *source, uint32_t head,
                                  unsigned char *to_device, struct dkv_error *err);
enum dkv_status dkv_cu_stage_bytes(struct dkv_cu_engine *engine, struct dkv_item *item,
                                   const void *from, size_t bytes, void *to_device,
                                   struct dkv_error *err);
enum dkv_status dkv_cu_stage_flush(struct dkv_cu_engine *engine, struct dkv_error *err);

/* Gathers the job's bytes, on any thread that reads no table in device memory. */
enum dkv_status dkv_cu_stage_fill(struct dkv_cu_engine *engine, const struct dkv_cu_stage_job *job,
                                  unsigned char *to, struct dkv_error *err);

/* ring.c: fills a chunk for each of the engine's jobs and sends it; a job's own failure is in its
 * `error`. Returns before the copies are through. */
enum dkv_status dkv_cu_ring_open(struct dkv_cu_engine *engine, struct dkv_error *err);
void dkv_cu_ring_close(struct dkv_cu_engine *engine);
cudaError_t dkv_cu_ring_run(struct dkv_cu_engine *engine, bool by_threads);

/* answer.c: waits for everything launched from the slot, checks it, writes the items' outputs and
 * empties the slot's io. Items that a scorer gave up on are marked in slot->retry. */
enum dkv_status dkv_cu_drain(struct dkv_cu_engine *engine, struct dkv_cu_slot *slot,
                             struct dkv_error *err);

/* Sets an item's error, the first one wins. */
void dkv_cu_fail_item(struct dkv_item *item, const struct dkv_error *err);

/* The sentence for a bad entry of a page table, with what is stored there. */
enum dkv_status dkv_cu_bad_entry(const struct dkv_page_table *table, const char *tensor,
                                 uint64_t index, int64_t stored, uint64_t limit,
                                 struct dkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
