/* What the CPU engine's two files share: batches (engine_cpu.c) and the heads they are cut into
 * (engine_heads.c). Nobody else includes this.
 *
 * Thread  the engine's caller, but for what runs on the crew.
 */
#ifndef DKV_KERNELS_CPU_ENGINE_PRIV_H
#define DKV_KERNELS_CPU_ENGINE_PRIV_H

#include "kernels/cpu/general.h"
#include "kernels/cpu/head.h"
#include "kernels/cpu/threads.h"

#define DKV_CPU_TASKS_MAX 1024u

/* Memory that only grows. */
struct dkv_cpu_buffer {
    void *bytes;
    size_t size;
};

/* A head that one thread runs. */
struct dkv_cpu_task {
    struct dkv_item *item;
    uint32_t head;
    unsigned faults; /* enum dkv_fault, what became of it */
    bool masked;     /* some token was */
};

struct dkv_engine {
    const struct dkv_cpu_ops *ops;
    struct dkv_threads *crew;
    unsigned threads;
    char model[64];               /* asked once: under a hypervisor each CPUID costs microseconds */
    struct dkv_cpu_buffer shared; /* a head */
    struct dkv_cpu_buffer *wholes; /* [threads] a head each */
    struct dkv_cpu_buffer *tiles;  /* [threads] tile and selection scratch */
    struct dkv_cpu_buffer general; /* of the block with plan->general that is being answered */
    struct dkv_choice_work general_work; /* in it */
    double *entropy, *variance; /* layers=cake: [kv_heads] of the block at work; else NULL */
    double preferences[DKV_BLOCKS_MAX];
    uint64_t shares[DKV_BLOCKS_MAX];
    uint64_t scratch_bytes, scratch_peak_bytes;
    struct dkv_cpu_task tasks[DKV_CPU_TASKS_MAX];
};

/* A slice of the batch's heads, DKV_CPU_TASKS_MAX at most. */
struct dkv_cpu_slice {
    const struct dkv_engine *engine;
    struct dkv_cpu_task *tasks;
    size_t n_tasks;
};

/* Scores a head in `memory`, on this thread or on all of them, and selects unless that is left to
 * the block's end. Its faults. */
unsigned dkv_cpu_run_head(const struct dkv_engine *engine, struct dkv_head *head, void *memory,
                          unsigned thread, bool all_threads);

/* Runs the slice's heads, a thread each, explains what failed, and empties it. */
void dkv_cpu_run_slice(struct dkv_cpu_slice *slice);

#endif
