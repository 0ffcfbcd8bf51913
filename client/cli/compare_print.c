/* The comparison as a table and as JSON. */
#include "client/cli/compare.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>

static double relative(const struct dkv_output_error *e)
{
    return e->relative / (double)e->n;
}

static double squared(const struct dkv_output_error *e)
{
    return e->squared / (double)e->n;
}

static void print_header(const struct dkv_comparison_table *table, const char *first, FILE *stream)
{
    fprintf(stream, "%-24s", first);
    for (size_t r = 0; r < table->n_ratios; r++)
        fprintf(stream, "  %8.3g%% kept       ", 100 * table->ratios[r]);
    fputc('\n', stream);
}

static void print_row(const struct dkv_comparison_table *table, size_t policy, const char *name,
                      size_t layer, FILE *stream)
{
    fprintf(stream, "%-24.24s", name);
    for (size_t r = 0; r < table->n_ratios; r++) {
        const struct dkv_compared *cell = dkv_compared_at(table, policy, r);
        const struct dkv_output_error *e = layer == SIZE_MAX ? &cell->all : &cell->layers[layer];
        fprintf(stream, "  %9.4f %10.4g ", relative(e), squared(e));
    }
    fputc('\n', stream);
}

static void print_overlaps(const struct dkv_comparison_table *table, FILE *stream)
{
    fprintf(stream, "\nshare of a row's tokens that the column keeps too, at %.3g%%\n%-12s",
            100 * table->ratios[0], "");
    for (size_t b = 0; b < table->n_policies; b++)
        fprintf(stream, " %10.10s", table->policies[b]);
    fputc('\n', stream);
    for (size_t a = 0; a < table->n_policies; a++) {
        fprintf(stream, "%-12s", table->policies[a]);
        for (size_t b = 0; b < table->n_policies; b++)
            fprintf(stream, " %10.3f", dkv_compare_overlap(table, a, b, 0));
        fputc('\n', stream);
    }
}

static void print_cone(const struct dkv_comparison_table *table, const char *name,
                       const struct dkv_promise *promise, FILE *stream)
{
    fprintf(stream, "%-24.24s", name);
    for (size_t r = 0; r < table->n_ratios; r++) {
        const struct dkv_cone *cone = &promise->cones[r];
        if (cone->n == 0)
            fprintf(stream, "  %9s %10s ", "-", "-");
        else
            fprintf(stream, "  %9.4f %9.1f%% ", cone->cosine / (double)cone->n,
                    100 * cone->along / (double)cone->n);
    }
    fputc('\n', stream);
}

static void print_promise(const struct dkv_comparison_table *table, bool by_layer, FILE *stream)
{
    const struct dkv_optimum *optimum = &table->promise.optimum;
    fputc('\n', stream);
    print_cone(table, "cone of dropkv", &table->promise, stream);
    for (size_t l = 0; by_layer && l < table->blocks->n_blocks; l++) {
        char name[64];
        snprintf(name, sizeof(name), "  %.60s", table->blocks->blocks[l].name);
        print_cone(table, name, &table->promises[l], stream);
    }
    fprintf(stream, "left: |sum of the dropped tokens' changes| / sum of |change|, right: tokens "
                    "that change along the sum\n");
    if (optimum->n > 0)
        fprintf(stream,
                "%u of %u tokens dropped by score change outputs %.4f times as much as by the best "
                "choice of all\n(at most %.4f), and are it in %" PRIu64 " of %" PRIu64
                " subsets (docs/policies.md, \"What the theory promises\")\n",
                DKV_SUBSET_TOKENS / 2, DKV_SUBSET_TOKENS, optimum->ratio / (double)optimum->n,
                optimum->worst, optimum->n_best, optimum->n);
}

void dkv_compare_print(const struct dkv_comparison_table *table, bool by_layer, FILE *stream)
{
    print_header(table, "policy", stream);
    for (size_t p = 0; p < table->n_policies; p++) {
        print_row(table, p, table->policies[p], SIZE_MAX, stream);
        for (size_t l = 0; by_layer && l < table->blocks->n_blocks; l++) {
            char name[64];
            snprintf(name, sizeof(name), "  %.60s", table->blocks->blocks[l].name);
            print_row(table, p, name, l, stream);
        }
    }
    if (table->n_policies > 1)
        print_overlaps(table, stream);
    print_promise(table, by_layer, stream);
    fprintf(stream,
            "\nleft: mean of |a(kept) - a(all)| / |a(all)|, right: mean of |a(kept) - a(all)|^2, "
            "over layers, query\nheads and their last %" PRIu32
            " rows, by really dropping tokens; %.1f s by %s\n"
            "These rows are what most policies choose by. How well later queries find what they "
            "need is another\nmeasure, which a dump cannot tell.\n",
            table->rows, table->elapsed_s, table->endpoint);
}

/* ---- JSON ---- */

static json_t *error_json(const struct dkv_output_error *e)
{
    return json_pack("{s:f, s:f}", "relative_error", relative(e), "squared_error", squared(e));
}

static json_t *cell_json(const struct dkv_comparison_table *table, size_t p, size_t r)
{
    const struct dkv_compared *cell = dkv_compared_at(table, p, r);
    json_t *json = error_json(&cell->all), *layers = json_array(), *overlap = json_object();
    for (size_t l = 0; l < table->blocks->n_blocks; l++) {
        json_t *layer = error_json(&cell->layers[l]);
        json_object_set_new(layer, "name", json_string(table->blocks->blocks[l].name));
        json_array_append_new(layers, layer);
    }
    for (size_t other = 0; other < table->n_policies; other++)
        if (other != p)
            json_object_set_new(overlap, table->policies[other],
                                json_real(dkv_compare_overlap(table, p, other, r)));
    json_object_set_new(json, "policy", json_string(table->policies[p]));
    json_object_set_new(json, "keep_ratio", json_real(table->ratios[r]));
    json_object_set_new(json, "kept", json_integer((json_int_t)cell->n_kept));
    json_object_set_new(json, "layers", layers);
    json_object_set_new(json, "overlap", overlap);
    return json;
}

/* JSON has no infinity: null, as for what does not exist. */
static json_t *real_json(double value, bool exists)
{
    return exists && isfinite(value) ? json_real(value) : json_null();
}

static json_t *promise_json(const struct dkv_comparison_table *table,
                            const struct dkv_promise *promise)
{
    const struct dkv_optimum *optimum = &promise->optimum;
    json_t *json = json_object(), *cones = json_array();
    for (size_t r = 0; r < table->n_ratios; r++) {
        const struct dkv_cone *cone = &promise->cones[r];
        const double n = (double)cone->n;
        json_array_append_new(cones,
                              json_pack("{s:f, s:o, s:o, s:o}", "keep_ratio", table->ratios[r],
                                        "cosine", real_json(cone->cosine / n, cone->n > 0),
                                        "lowest_cosine", real_json(cone->lowest, cone->n > 0),
                                        "along", real_json(cone->along / n, cone->n > 0)));
    }
    json_object_set_new(json, "cones", cones);
    json_object_set_new(json, "subsets", json_integer((json_int_t)optimum->n));
    json_object_set_new(json, "optimal", json_integer((json_int_t)optimum->n_best));
    json_object_set_new(json, "ratio",
                        real_json(optimum->ratio / (double)optimum->n, optimum->n > 0));
    json_object_set_new(json, "worst_ratio", real_json(optimum->worst, optimum->n > 0));
    return json;
}

static json_t *theory_json(const struct dkv_comparison_table *table)
{
    json_t *json = promise_json(table, &table->promise), *layers = json_array();
    for (size_t l = 0; l < table->blocks->n_blocks; l++) {
        json_t *layer = promise_json(table, &table->promises[l]);
        json_object_set_new(layer, "name", json_string(table->blocks->blocks[l].name));
        json_array_append_new(layers, layer);
    }
    json_object_set_new(json, "subset_tokens", json_integer(DKV_SUBSET_TOKENS));
    json_object_set_new(json, "layers", layers);
    return json;
}

enum dkv_status dkv_compare_json(const struct dkv_comparison_table *table, FILE *stream,
                                 struct dkv_error *err)
{
    json_t *results = json_array();
    for (size_t p = 0; p < table->n_policies; p++)
        for (size_t r = 0; r < table->n_ratios; r++)
            json_array_append_new(results, cell_json(table, p, r));
    json_t *root = json_pack("{s:s, s:i, s:o, s:o}", "endpoint", table->endpoint, "rows",
                             (int)table->rows, "results", results, "theory", theory_json(table));
    const bool written = root != NULL &&
                         json_dumpf(root, stream, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) == 0 &&
                         fputc('\n', stream) != EOF;
    json_decref(root);
    return written ? DKV_OK : dkv_error_set(err, DKV_E_IO, "could not write the answer");
}
