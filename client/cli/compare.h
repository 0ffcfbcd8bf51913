/* dropkv-client compare, between the files that run it, print it and draw it. */
#ifndef DKV_CLIENT_CLI_COMPARE_H
#define DKV_CLIENT_CLI_COMPARE_H

#include "client/cli/blocks.h"
#include "client/cli/compare_theory.h"

#include <stdio.h>

#define DKV_COMPARE_RATIOS_MAX 16u

/* One policy at one budget. */
struct dkv_compared {
    struct dkv_output_error *layers; /* [n_blocks] */
    struct dkv_output_error all;
    uint64_t n_kept;                /* of all blocks' heads */
    struct dropkv_result **results; /* [n_blocks] */
};

/* What the theory promises for the KV heads of one block, or of all. */
struct dkv_promise {
    struct dkv_cone cones[DKV_COMPARE_RATIOS_MAX];
    struct dkv_optimum optimum;
};

struct dkv_comparison_table {
    const char *endpoint;
    const struct dkv_block_list *blocks;
    const char *policies[DKV_POLICY_COUNT];
    size_t n_policies;
    double ratios[DKV_COMPARE_RATIOS_MAX];
    size_t n_ratios;
    struct dkv_compared *cells;   /* [n_policies][n_ratios] */
    struct dkv_promise *promises; /* [n_blocks] */
    struct dkv_promise promise;   /* of all blocks */
    uint32_t rows; /* the outputs that are compared: the last query rows of each head */
    double elapsed_s;
};

static inline const struct dkv_compared *dkv_compared_at(const struct dkv_comparison_table *table,
                                                         size_t policy, size_t ratio)
{
    return &table->cells[policy * table->n_ratios + ratio];
}

/* What a head kept; of all blocks' heads the head-th of a result. */
const int32_t *dkv_compare_kept(const struct dropkv_result *result, uint64_t head,
                                uint64_t *count_out);

/* Mean share of what policy a keeps that policy b keeps too. */
double dkv_compare_overlap(const struct dkv_comparison_table *table, size_t a, size_t b,
                           size_t ratio);

void dkv_compare_print(const struct dkv_comparison_table *table, bool by_layer, FILE *stream);
enum dkv_status dkv_compare_json(const struct dkv_comparison_table *table, FILE *stream,
                                 struct dkv_error *err);

/* Error against budget, and which positions each policy keeps: .svg or .png by the name's end. */
enum dkv_status dkv_compare_plot(const struct dkv_comparison_table *table, const char *path,
                                 struct dkv_error *err);

#endif
