/* The engine's contract: a batch of validated blocks in, kept token indices out.
 *
 * An engine is a table of functions. The CPU engine is linked in; the CUDA engine is a module
 * opened with dlopen() that exports the same table (kernels/cuda). The answer for a block does not
 * depend on its neighbours in the batch, the number of threads, or the run: bit for bit.
 *
 * Thread  an engine belongs to one thread: all calls on one `dkv_engine` from that thread.
 */
#ifndef DKV_KERNELS_ENGINE_H
#define DKV_KERNELS_ENGINE_H

#include "proto/request.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DKV_ENGINE_ABI 5u

/* One block of a batch.
 *
 * block, params, plan   what dkv_request_validate() accepted; borrowed until the batch is done.
 * keep_out    host int32 [kv_heads][plan->keep_tokens], ascending; indices are stored ordinals,
 *             valid_from .. n_tokens-1. With plan->ragged [plan->keep_capacity]: head after head.
 * counts_out  host uint32 [kv_heads], for plan->ragged: how many indices each head has.
 * scores_out  host float32 [kv_heads][n_tokens] or NULL: raw scores before pooling, descaled;
 *             0 before valid_from.
 * status, error   written by the engine. On anything but DKV_OK the outputs are undefined and only
 *                 this item failed; its neighbours are answered. Who does not want an item's answer
 *                 any more may set its status to DKV_E_CANCELLED between submit() and wait():
 *                 then nothing is written to its outputs, unless they are pinned.
 * nonfinite   false from the caller; true from the engine if it met NaN or infinity, be it that it
 *             refused the block for it (nonfinite=error) or that it masked tokens (nonfinite=mask,
 *             of which the CUDA engine does not tell).
 */
struct dkv_item {
    const struct dkv_block *block;
    const struct dkv_params *params;
    const struct dkv_plan *plan;
    int32_t *keep_out;
    uint32_t *counts_out;
    float *scores_out;
    enum dkv_status status;
    struct dkv_error error;
    bool nonfinite;
};

struct dkv_engine_config {
    unsigned threads; /* CPU engine: worker threads, the caller's included; 0: one per CPU this
                         process may use */
    int device;       /* CUDA engine: device ordinal */
    size_t max_batch_bytes;   /* host bytes of one batch that staging is sized for; 0: default */
    unsigned max_batch_items; /* 0: default */
    void *stream; /* CUDA engine: a stream of the caller's, on which everything is done, in its
                     context; NULL: one of its own in the device's primary context. The thread's
                     current context is the same after each call as before it. */

    /* Called when a batch is through, in order, on a thread of the driver's; it must not call the
     * engine or CUDA, nor take long. NULL: not. Engines without ready() never call it. */
    void (*on_done)(void *arg);
    void *on_done_arg;
};

/* Answers of one batch up to this never make submit() wait for its own beginning. */
#define DKV_BATCH_ANSWER_BYTES ((size_t)24 << 20)

#define DKV_UUID_BYTES 16u

struct dkv_engine_info {
    char backend[64]; /* "cpu/avx512bf16", "cuda/sm_90a": what logs, metrics and replies name */
    char device[96];  /* "Intel(R) Xeon(R) ..., 2 threads", "NVIDIA H200" */
    unsigned threads;
    /* Working memory beyond inputs and outputs: what the CPU engine holds now; what the kernels of
     * the CUDA engine's last wave used of the memory that it allocates at open, once and for all.
     */
    uint64_t scratch_bytes;
    uint64_t scratch_peak_bytes;  /* the most so far */
    uint8_t uuid[DKV_UUID_BYTES]; /* of the GPU; zero for the CPU */
};

/* Memory of another process that lies on the engine's device, as it was passed: a handle of
 * cuIpcGetMemHandle(), or descriptors of cuMemExportToShareableHandle(). Or host memory that this
 * process has mapped, and the device shall write answers to by itself. */
struct dkv_import_chunk {
    uint64_t offset; /* in the importer's reservation */
    uint64_t bytes;  /* exactly as allocated */
    int fd;          /* borrowed; may be closed after import() */
};

struct dkv_import {
    const unsigned char *handle;           /* [DKV_IMPORT_HANDLE_BYTES]; NULL: chunks */
    const struct dkv_import_chunk *chunks; /* [n_chunks], ascending, without overlap */
    uint32_t n_chunks;
    void *host; /* NULL: it is not host memory */
    uint64_t host_bytes;
};

#define DKV_IMPORT_HANDLE_BYTES 64u
#define DKV_IMPORT_SPAN_MAX     (UINT64_C(1) << 40) /* of the chunks of one import */

/* What was imported: [first, first + bytes) of it lies at `base` on the device. `first` is the
 * first chunk's offset, or 0. Between chunks nothing is mapped. Host memory stays where it is. */
struct dkv_mapping {
    const void *base;
    uint64_t first;
    uint64_t bytes;
};

/* Query rows that lie around the end of a ring of `n_rows` rows: the oldest is row `first`. */
struct dkv_ring {
    uint64_t first;
    uint64_t n_rows; /* 0: the rows do not lie around its end */
};

#define DKV_RING_BYTES_MAX (UINT64_C(32) << 20) /* that are unrolled for one batch */

struct dkv_engine;

struct dkv_engine_ops {
    uint32_t abi;     /* DKV_ENGINE_ABI: a module of another number is refused */
    const char *name; /* "cpu", "cuda" */

    /* Opens a device, makes threads, streams and scratch. UNSUPPORTED if this machine cannot run
     * this engine, with the reason. `config` may be NULL. */
    enum dkv_status (*open)(const struct dkv_engine_config *config, struct dkv_engine **engine_out,
                            struct dkv_error *err);
    void (*close)(struct dkv_engine *engine); /* NULL is fine */
    void (*info)(const struct dkv_engine *engine, struct dkv_engine_info *info_out);

    /* Starts a batch; items must stay where they are until wait() returned. An engine may do all
     * the work here. At most max_in_flight batches at a time, answered in order. An error means
     * that nothing was started. */
    enum dkv_status (*submit)(struct dkv_engine *engine, struct dkv_item *items, size_t n_items,
                              struct dkv_error *err);

    /* Blocks until the oldest batch is done and its items' outputs are written and checked. Only
     * DKV_E_DEVICE is returned (the device is lost, no item of the batch has an answer);
     * everything else is in the items. */
    enum dkv_status (*wait)(struct dkv_engine *engine, struct dkv_error *err);
    unsigned max_in_flight;

    /* True if wait() would not have to wait for the oldest batch. Never blocks. NULL: submit() does
     * all the work. */
    bool (*ready)(struct dkv_engine *engine);

    /* Where the memory at an address of this process is. INVALID: on a device that the engine
     * cannot read; the text continues the name of what lies there. NULL: everything is the host's.
     */
    enum dkv_status (*place)(struct dkv_engine *engine, const void *at, enum dkv_place *place_out,
                             struct dkv_error *err);

    /* Maps memory of another process; NULL where the engine has no such memory. A mapping belongs
     * to the engine until release(). Reading past what was allocated does not fault: who uses a
     * mapping checks bounds against `bytes`.
     *
     * INVALID, DENIED or UNSUPPORTED say what is wrong with what was passed and what to pass
     * instead; NOMEM; DEVICE: the device is lost. */
    enum dkv_status (*import)(struct dkv_engine *engine, const struct dkv_import *from,
                              struct dkv_mapping **mapping_out, struct dkv_error *err);

    /* Unmaps it and gives the memory back. No batch in flight may read it; best called when none is
     * in flight at all, since it may wait for those. Only DEVICE is returned. */
    enum dkv_status (*release)(struct dkv_engine *engine, struct dkv_mapping *mapping,
                               struct dkv_error *err);

    /* For the batch that is submitted next: makes block->query, a view of a ring's row 0 in device
     * memory, that of a copy of the q_rows rows from ring->first on, in order. Heads or rows are
     * adjacent there, and no stride is 2 GiB or more. NULL where the engine has no such memory.
     * BUSY: the batch has DKV_RING_BYTES_MAX of them already; DEVICE. */
    enum dkv_status (*unroll)(struct dkv_engine *engine, const struct dkv_ring *ring,
                              struct dkv_block *block, struct dkv_error *err);
};

/* The CPU engine: always there. */
extern const struct dkv_engine_ops dkv_engine_cpu;

/* Which instruction sets CPU engines opened from now on may use, instead of the environment's
 * DKV_CPU_MASK: bit 0 AVX2 with FMA and F16C, bit 1 AVX-512, bit 2 AVX512-BF16, bit 3 NEON; 0:
 * portable code only; bit 30 also what the processor has but slowly. Bits of what it lacks do
 * nothing. */
void dkv_engine_cpu_mask(uint32_t mask);

/* submit() and wait() in one. */
static inline enum dkv_status dkv_engine_run(const struct dkv_engine_ops *ops,
                                             struct dkv_engine *engine, struct dkv_item *items,
                                             size_t n_items, struct dkv_error *err)
{
    enum dkv_status status = ops->submit(engine, items, n_items, err);
    return status == DKV_OK ? ops->wait(engine, err) : status;
}

/* Finds the engine for a device name: "cpu", "cuda" or "cuda:N"; *device_out gets N. The CUDA
 * module is looked for beside the program, then in the library directory; UNSUPPORTED says why it
 * could not be opened. Never unloaded. Thread: any. */
enum dkv_status dkv_engine_find(const char *device_name, const struct dkv_engine_ops **ops_out,
                                int *device_out, struct dkv_error *err);

/* What the module dkv-engine.so exports by the name "dkv_engine_module" (kernels/module.c). */
struct dkv_engine_module {
    uint32_t abi; /* DKV_ENGINE_ABI */
    enum dkv_status (*find)(const char *device_name, const struct dkv_engine_ops **ops_out,
                            int *device_out, struct dkv_error *err);
};

#ifdef __cplusplus
}
#endif
#endif
