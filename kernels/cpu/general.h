/* Blocks whose selection needs more than dkv_select() sees: plan->general.
 *
 * Heads are scored as always, by any threads, but their scores go into arrays of the whole block,
 * in double precision and in the unit they are reported in. When all heads are there, one thread
 * adds what the caller gave, and all choose.
 *
 * Owner   memory is the caller's, dkv_general_bytes() of it, aligned to 64.
 */
#ifndef DKV_KERNELS_CPU_GENERAL_H
#define DKV_KERNELS_CPU_GENERAL_H

#include "kernels/choose.h"
#include "kernels/cpu/head.h"
#include "kernels/cpu/threads.h"

size_t dkv_general_bytes(const struct dkv_item *item);
void dkv_general_place(struct dkv_choice_work *work, const struct dkv_item *item, void *memory);

/* Takes a head's scores and flags, once its passes are done. */
void dkv_general_take(const struct dkv_choice_work *work, const struct dkv_head *head);

/* Scores a head whose rule needs no passes; its flags are the block's. Faults as dkv_head_begin().
 */
unsigned dkv_general_score(const struct dkv_choice_work *work, const struct dkv_head *head,
                           const struct dkv_tile *tile);

/* All heads are scored: adds carry_in, averages the layer. An error names the first bad element of
 * an optional tensor. */
enum dkv_status dkv_general_settle(const struct dkv_choice_work *work, struct dkv_item *item,
                                   struct dkv_error *err);

/* The end of a block, on all threads: writes keep_out, counts_out and scores_out. */
void dkv_general_choose(const struct dkv_choice_work *work, struct dkv_item *item,
                        uint64_t keep_tokens, struct dkv_threads *crew);

#endif
