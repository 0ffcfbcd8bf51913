/* What `score` prints: one answer for each block, in one of four forms.
 *
 * table        for people: a row per block (or per KV head), with a strip that shows where the kept
 *              tokens lie
 * json         {"endpoint", "backend", "blocks": [{"name", "batch", "q_heads", "kv_heads",
 *              "tokens", "keep_tokens", "keep_indices": [batch][kv_head][k], "scores"?}]}
 * safetensors  BLOCK.keep_indices I32 [batch, kv_heads, k], BLOCK.scores F32
 * npy          keep_indices of the one block
 *
 * Owner   borrows everything for the call.
 * Errors  IO, NOMEM, INVALID (a name that JSON cannot hold); the stream may then hold a part of
 *         the report.
 */
#ifndef DKV_CLIENT_CLI_REPORT_H
#define DKV_CLIENT_CLI_REPORT_H

#include "client/dropkv.h"
#include "proto/types.h"

#include <stdio.h>

struct dkv_outcome {
    const char *name;
    uint32_t q_heads;
    uint64_t sinks;  /* tokens that the table counts as sinks, at the start */
    uint64_t recent; /* protected last tokens */
    const struct dropkv_result *result;
};

struct dkv_report {
    const char *endpoint;
    const struct dkv_outcome *outcomes;
    size_t n_outcomes;
    uint64_t elapsed_ns; /* of all blocks together */
    bool per_head;       /* table: a row per KV head */
};

/* IO if the stream fails. */
typedef enum dkv_status (*dkv_report_fn)(const struct dkv_report *report, FILE *stream,
                                         struct dkv_error *err);

enum dkv_status dkv_report_table(const struct dkv_report *report, FILE *stream,
                                 struct dkv_error *err);
enum dkv_status dkv_report_json(const struct dkv_report *report, FILE *stream,
                                struct dkv_error *err);
enum dkv_status dkv_report_safetensors(const struct dkv_report *report, FILE *stream,
                                       struct dkv_error *err);
enum dkv_status dkv_report_npy(const struct dkv_report *report, FILE *stream,
                               struct dkv_error *err);

/* The scores of the one block, for --format npy --scores. */
enum dkv_status dkv_report_npy_scores(const struct dkv_report *report, FILE *stream,
                                      struct dkv_error *err);

#endif
