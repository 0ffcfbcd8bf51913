/* The comparison as a table and as JSON. */
#include "client/cli/compare.h"

#include <inttypes.h>
#include <jansson.h>
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

enum dkv_status dkv_compare_json(const struct dkv_comparison_table *table, FILE *stream,
                                 struct dkv_error *err)
{
    json_t *results = json_array();
    for (size_t p = 0; p < table->n_policies; p++)
        for (size_t r = 0; r < table->n_ratios; r++)
            json_array_append_new(results, cell_json(table, p, r));
    json_t *root = json_pack("{s:s, s:i, s:o}", "endpoint", table->endpoint, "rows",
                             (int)table->rows, "results", results);
    const bool written = root != NULL &&
                         json_dumpf(root, stream, JSON_INDENT(1) | JSON_REAL_PRECISION(9)) == 0 &&
                         fputc('\n', stream) != EOF;
    json_decref(root);
    return written ? DKV_OK : dkv_error_set(err, DKV_E_IO, "could not write the answer");
}
