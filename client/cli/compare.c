/* dropkv-client compare: what each policy's choice does to the outputs of dumped blocks.
 *
 * Every policy is asked for what it keeps at every budget, through the same endpoint as any other
 * request, and the outputs without the rest are computed here in float64 (compare_error.c).
 */
#include "client/cli/compare.h"

#include "client/call.h"
#include "client/cli/commands.h"
#include "client/cli/dumps.h"
#include "client/cli/extras.h"
#include "client/cli/options.h"
#include "client/transport.h"
#include "proto/params.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#define DEFAULT_POLICIES "dropkv,snapkv,keydiff,streaming,random"
#define DEFAULT_RATIOS   "0.05,0.1"
#define DEFAULT_ROWS     8

struct command {
    char *endpoint;
    char *policies_text;
    char *ratios_text;
    char *rows_text;
    char *format;
    char *plot;
    int by_layer;
    struct dkv_param_options params;
    struct dkv_dumps dumps;
    struct dkv_block_list blocks;
    struct dropkv_client *client;
    struct dkv_comparison_table table;
};

/* ---- the command line ---- */

static int take_policy(struct command *c, const char *name)
{
    struct dkv_params params;
    struct dkv_error error;
    dkv_params_init(&params);
    if (dkv_params_set_text(&params, "policy", name, &error) != DKV_OK) {
        dkv_complain("--policies: %s", error.text);
        return EX_USAGE;
    }
    if (params.policy == DKV_POLICY_EXTERNAL) {
        dkv_complain("--policies: external needs scores of its own, which a dump does not hold");
        return EX_USAGE;
    }
    const char *known = dkv_policy_name(params.policy);
    for (size_t i = 0; i < c->table.n_policies; i++)
        if (c->table.policies[i] == known)
            return EX_OK;
    c->table.policies[c->table.n_policies++] = known;
    return EX_OK;
}

static int read_policies(struct command *c)
{
    char *text = strdup(c->policies_text != NULL ? c->policies_text : DEFAULT_POLICIES);
    int code = EX_OK;
    if (text == NULL)
        return dkv_fail_memory();
    if (strcmp(text, "all") == 0) {
        for (unsigned i = 0; code == EX_OK && i < DKV_POLICY_EXTERNAL; i++)
            code = take_policy(c, dkv_policy_name((enum dkv_policy)i));
    } else {
        char *rest = text;
        for (char *name; code == EX_OK && (name = strsep(&rest, ",")) != NULL;)
            code = take_policy(c, name);
    }
    free(text);
    return code;
}

static int read_ratios(struct command *c)
{
    char *text = strdup(c->ratios_text != NULL ? c->ratios_text : DEFAULT_RATIOS), *rest = text;
    int code = EX_OK;
    if (text == NULL)
        return dkv_fail_memory();
    for (char *one; code == EX_OK && (one = strsep(&rest, ",")) != NULL;) {
        if (c->table.n_ratios == DKV_COMPARE_RATIOS_MAX) {
            dkv_complain("--keep-ratio: more than %u", DKV_COMPARE_RATIOS_MAX);
            code = EX_USAGE;
        } else if (!dkv_option_real("keep-ratio", one, 0, 1,
                                    &c->table.ratios[c->table.n_ratios++])) {
            code = EX_USAGE;
        }
    }
    free(text);
    return code;
}

static int take_option(struct command *c, int val, char *argument)
{
    const int param = val - DKV_OPTION_PARAM;
    if (param == DKV_PARAM_KEEP_RATIO) {
        free(c->ratios_text);
        c->ratios_text = argument;
        return EX_OK;
    }
    if (param == DKV_PARAM_POLICY || param == DKV_PARAM_COMPRESSION_RATIO ||
        param == DKV_PARAM_KEEP_TOKENS || param == DKV_PARAM_LAYERS) {
        dkv_complain("--%s: compare takes --policies and --keep-ratio",
                     dkv_param_info((enum dkv_param_id)param)->name);
        free(argument);
        return EX_USAGE;
    }
    return dkv_option_param(&c->params, val, argument) ? EX_OK : EX_USAGE;
}

static int read_command_line(struct command *c, poptContext context)
{
    int64_t rows = DEFAULT_ROWS;
    int val, code = EX_OK;
    while (code == EX_OK && (val = poptGetNextOpt(context)) >= 0)
        if (val >= DKV_OPTION_PARAM)
            code = take_option(c, val, poptGetOptArg(context));
    if (code == EX_OK && val < -1)
        code = dkv_fail_usage(context, val);
    if (code == EX_OK)
        code = read_policies(c);
    if (code == EX_OK)
        code = read_ratios(c);
    if (code == EX_OK && c->rows_text != NULL &&
        !dkv_option_int("rows", c->rows_text, 1, DKV_WINDOW_MAX, &rows))
        code = EX_USAGE;
    if (code == EX_OK && c->format != NULL && strcmp(c->format, "table") != 0 &&
        strcmp(c->format, "json") != 0) {
        dkv_complain("--format: '%s' is not one of table, json", c->format);
        code = EX_USAGE;
    }
    c->table.rows = (uint32_t)rows;
    return code;
}

/* ---- comparing ---- */

const int32_t *dkv_compare_kept(const struct dropkv_result *result, uint64_t head,
                                uint64_t *count_out)
{
    *count_out = result->keep_tokens;
    if (result->keep_offsets == NULL)
        return result->keep_indices + head * result->keep_tokens;
    *count_out = (uint64_t)(result->keep_offsets[head + 1] - result->keep_offsets[head]);
    return result->keep_indices + result->keep_offsets[head];
}

static uint64_t count_common(const int32_t *a, uint64_t n_a, const int32_t *b, uint64_t n_b)
{
    uint64_t i = 0, j = 0, common = 0;
    while (i < n_a && j < n_b) {
        common += a[i] == b[j];
        const int32_t low = a[i] < b[j] ? a[i] : b[j];
        i += a[i] == low;
        j += b[j] == low;
    }
    return common;
}

double dkv_compare_overlap(const struct dkv_comparison_table *table, size_t a, size_t b,
                           size_t ratio)
{
    uint64_t common = 0, total = 0;
    for (size_t i = 0; i < table->blocks->n_blocks; i++) {
        const struct dropkv_result *one = dkv_compared_at(table, a, ratio)->results[i];
        const struct dropkv_result *other = dkv_compared_at(table, b, ratio)->results[i];
        for (uint64_t h = 0; h < (uint64_t)one->batch * one->kv_heads; h++) {
            uint64_t n_one, n_other;
            const int32_t *kept = dkv_compare_kept(one, h, &n_one);
            const int32_t *others = dkv_compare_kept(other, h, &n_other);
            common += count_common(kept, n_one, others, n_other);
            total += n_one;
        }
    }
    return (double)common / (double)total;
}

static int ask(struct command *c, const struct dkv_named_block *block, const char *policy,
               double ratio, size_t layer, struct dropkv_result **result_out)
{
    struct dropkv_param params[DKV_PARAM_COUNT + 3];
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    struct dkv_error error;
    size_t n = c->params.n_params;
    bool names_layer = false;
    for (size_t i = 0; i < n; i++) {
        params[i] = c->params.params[i];
        names_layer = names_layer || strcmp(params[i].name, "layer") == 0;
    }
    params[n++] = dropkv_text("policy", policy);
    params[n++] = dropkv_real("keep_ratio", ratio);
    if (!names_layer) /* so that random orders differ */
        params[n++] = dropkv_int("layer", (int64_t)layer);
    request.params = params;
    request.n_params = n;
    const struct dkv_extra_sources sources = {.files = c->dumps.files, .n_files = c->dumps.n_files};
    struct dkv_extras extras = {0};
    enum dkv_status status = dkv_block_request(block, &request, &error);
    if (status == DKV_OK)
        status = dkv_extras_add(&sources, block, policy, &request, &extras, &error);
    if (status == DKV_OK)
        status = (enum dkv_status)dropkv_score(c->client, &request, result_out,
                                               (struct dropkv_error *)&error);
    dkv_extras_fini(&extras);
    if (status == DKV_OK)
        return EX_OK;
    char subject[128];
    snprintf(subject, sizeof(subject), "%.80s, %s", block->name, policy);
    return dkv_fail(subject, &error);
}

static int measure(struct dkv_outputs *const *outputs, const struct dropkv_result *result,
                   struct dkv_compared *cell, size_t layer)
{
    struct dkv_error error;
    for (uint32_t b = 0; b < result->batch; b++)
        for (uint32_t h = 0; h < result->kv_heads; h++) {
            uint64_t count;
            const int32_t *kept = dkv_compare_kept(result, (uint64_t)b * result->kv_heads + h,
                                                   &count);
            if (dkv_outputs_error(outputs[b], h, kept, count, &cell->layers[layer], &error) !=
                DKV_OK)
                return dkv_fail(NULL, &error);
            cell->n_kept += count;
        }
    cell->all.squared += cell->layers[layer].squared;
    cell->all.relative += cell->layers[layer].relative;
    cell->all.n += cell->layers[layer].n;
    return EX_OK;
}

static int compare_all(struct command *c, size_t layer, struct dkv_outputs *const *outputs)
{
    struct dkv_comparison_table *table = &c->table;
    int code = EX_OK;
    for (size_t p = 0; code == EX_OK && p < table->n_policies; p++)
        for (size_t r = 0; code == EX_OK && r < table->n_ratios; r++) {
            struct dkv_compared *cell = &table->cells[p * table->n_ratios + r];
            code = ask(c, &c->blocks.blocks[layer], table->policies[p], table->ratios[r], layer,
                       &cell->results[layer]);
            if (code == EX_OK)
                code = measure(outputs, cell->results[layer], cell, layer);
        }
    return code;
}

static void add_promise(struct dkv_promise *sum, const struct dkv_promise *one, size_t n_ratios)
{
    for (size_t r = 0; r < n_ratios; r++)
        dkv_cone_add(&sum->cones[r], &one->cones[r]);
    dkv_optimum_add(&sum->optimum, &one->optimum);
}

/* What the plain scores of one KV head promise at each budget. */
static int promise_head(struct command *c, size_t layer, const struct dkv_outputs *outputs,
                        uint32_t kv_head)
{
    struct dkv_comparison_table *table = &c->table;
    struct dkv_theory *theory = NULL;
    struct dkv_promise promise = {0};
    struct dkv_error error;
    enum dkv_status status = dkv_theory_new(outputs, kv_head, &theory, &error);
    const double n = (double)(outputs->n - outputs->first);
    for (size_t r = 0; status == DKV_OK && r < table->n_ratios; r++)
        status = dkv_theory_cone(theory, (uint64_t)(table->ratios[r] * n), &promise.cones[r],
                                 &error);
    if (status == DKV_OK)
        status = dkv_theory_optimum(theory, &promise.optimum, &error);
    dkv_theory_free(theory);
    if (status != DKV_OK)
        return dkv_fail(NULL, &error);
    add_promise(&table->promises[layer], &promise, table->n_ratios);
    add_promise(&table->promise, &promise, table->n_ratios);
    return EX_OK;
}

/* What of the caller's parameters the outputs depend on. */
static size_t attention_params(const struct command *c, struct dropkv_param *params)
{
    size_t n = 0;
    params[n++] = dropkv_int("window", c->table.rows);
    for (size_t i = 0; i < c->params.n_params; i++)
        if (strcmp(c->params.params[i].name, "scale") == 0 ||
            strcmp(c->params.params[i].name, "logit_softcap") == 0)
            params[n++] = c->params.params[i];
    return n;
}

/* The block's outputs, computed once for all policies. */
static int compare_block(struct command *c, size_t layer)
{
    const struct dkv_named_block *block = &c->blocks.blocks[layer];
    struct dropkv_param params[DKV_PARAM_COUNT + 1];
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    struct dkv_call call = {0};
    struct dkv_error error;
    int code = EX_OK;
    request.params = params;
    request.n_params = attention_params(c, params);
    if (dkv_block_request(block, &request, &error) != DKV_OK ||
        dkv_call_init(&call, &request, &error) != DKV_OK) {
        code = dkv_fail(block->name, &error);
        dkv_call_fini(&call);
        return code;
    }
    struct dkv_outputs **outputs = calloc(call.request.n_blocks, sizeof(*outputs));
    if (outputs == NULL)
        code = dkv_fail_memory();
    for (uint32_t b = 0; code == EX_OK && b < call.request.n_blocks; b++)
        if (dkv_outputs_new(&call.blocks[b], &call.plans[b], call.request.params.logit_softcap,
                            &outputs[b], &error) != DKV_OK)
            code = dkv_fail(block->name, &error);
    if (code == EX_OK)
        code = compare_all(c, layer, outputs);
    for (uint32_t b = 0; code == EX_OK && b < call.request.n_blocks; b++)
        for (uint32_t h = 0; code == EX_OK && h < call.blocks[b].kv_heads; h++)
            code = promise_head(c, layer, outputs[b], h);
    for (uint32_t b = 0; outputs != NULL && b < call.request.n_blocks; b++)
        dkv_outputs_free(outputs[b]);
    free(outputs);
    dkv_call_fini(&call);
    return code;
}

static bool make_cells(struct command *c)
{
    const size_t n = c->table.n_policies * c->table.n_ratios;
    bool ok = (c->table.cells = calloc(n, sizeof(*c->table.cells))) != NULL &&
              (c->table.promises = calloc(c->blocks.n_blocks, sizeof(struct dkv_promise))) != NULL;
    for (size_t i = 0; ok && i < n; i++) {
        struct dkv_compared *cell = &c->table.cells[i];
        cell->layers = calloc(c->blocks.n_blocks, sizeof(*cell->layers));
        cell->results = calloc(c->blocks.n_blocks, sizeof(struct dropkv_result *));
        ok = cell->layers != NULL && cell->results != NULL;
    }
    return ok;
}

static int run(struct command *c, const char **paths)
{
    struct dkv_error error;
    const struct dkv_block_patterns patterns = {0};
    int code = dkv_dumps_open(&c->dumps, "compare", paths, &patterns, &c->blocks);
    if (code == EX_OK && !make_cells(c))
        code = dkv_fail_memory();
    if (code != EX_OK)
        return code;
    c->table.blocks = &c->blocks;
    if (dkv_open_endpoint(c->endpoint, NULL, &c->client, &c->table.endpoint, &error) != DKV_OK)
        return dkv_fail(c->endpoint, &error);
    const int64_t start_ns = dkv_now_ns();
    for (size_t layer = 0; code == EX_OK && layer < c->blocks.n_blocks; layer++)
        code = compare_block(c, layer);
    if (code != EX_OK)
        return code;
    c->table.elapsed_s = (double)(dkv_now_ns() - start_ns) / 1e9;
#ifdef DKV_HAVE_PLOT
    if (c->plot != NULL && dkv_compare_plot(&c->table, c->plot, &error) != DKV_OK)
        return dkv_fail(c->plot, &error);
#endif
    if (c->format == NULL || strcmp(c->format, "table") == 0)
        dkv_compare_print(&c->table, c->by_layer != 0, stdout);
    else if (dkv_compare_json(&c->table, stdout, &error) != DKV_OK)
        return dkv_fail(NULL, &error);
    return fflush(stdout) == 0 ? EX_OK : EX_IOERR;
}

static void command_fini(struct command *c)
{
    for (size_t i = 0; c->table.cells != NULL && i < c->table.n_policies * c->table.n_ratios; i++) {
        struct dkv_compared *cell = &c->table.cells[i];
        for (size_t l = 0; cell->results != NULL && l < c->blocks.n_blocks; l++)
            dropkv_result_free(cell->results[l]);
        free(cell->results);
        free(cell->layers);
    }
    free(c->table.cells);
    free(c->table.promises);
    dropkv_client_close(c->client);
    dkv_block_list_fini(&c->blocks);
    dkv_dumps_fini(&c->dumps);
    dkv_param_options_fini(&c->params);
    free(c->endpoint);
    free(c->policies_text);
    free(c->ratios_text);
    free(c->rows_text);
    free(c->format);
    free(c->plot);
}

int dkv_cmd_compare(int argc, const char **argv)
{
    struct command c = {0};
    // clang-format off
    struct poptOption options[] = {
        {"endpoint", 'e', POPT_ARG_STRING, &c.endpoint, 0, "unix:///PATH, http://HOST:PORT or embedded:", "URL"},
        {"policies", 'p', POPT_ARG_STRING, &c.policies_text, 0, "Policies with commas between, or all [" DEFAULT_POLICIES "]", "LIST"},
        {"rows", 0, POPT_ARG_STRING, &c.rows_text, 0, "Last query rows whose outputs are compared [8]", "N"},
        {"format", 'f', POPT_ARG_STRING, &c.format, 0, "table or json", "FORMAT"},
        {"by-layer", 0, POPT_ARG_NONE, &c.by_layer, 0, "Table: one row for each layer", NULL},
#ifdef DKV_HAVE_PLOT
        {"plot", 0, POPT_ARG_STRING, &c.plot, 0, "Also draw error against budget and what is kept, into FILE.svg or FILE.png", "FILE"},
#endif
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, dkv_param_option_table(), 0, "Scoring parameters, for all policies (--keep-ratio takes a list):", NULL},
        POPT_AUTOHELP
        POPT_TABLEEND,
    };
    // clang-format on
    poptContext context = poptGetContext(NULL, argc, argv, options, 0);
    poptSetOtherOptionHelp(context, "[OPTION...] DUMP.safetensors...");
    int code = read_command_line(&c, context);
    if (code == EX_OK)
        code = run(&c, poptGetArgs(context));
    command_fini(&c);
    poptFreeContext(context);
    return code;
}
