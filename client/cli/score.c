/* dropkv-client score: which tokens of dumped blocks to keep.
 *
 * Files are mapped, their blocks found, and every block becomes one request whose tensors are the
 * mapping itself. Several are in flight at a time, so that a server's queue is never empty while
 * there is work left; answers are collected by block and printed in order at the end. The first
 * failure ends the command: half a report would be taken for a whole one.
 */
#include "client/cli/commands.h"
#include "client/cli/input.h"
#include "client/cli/layers.h"
#include "client/cli/options.h"
#include "client/cli/report.h"
#include "client/cli/terminal.h"
#include "client/transport.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>
#include <unistd.h>

/* Requests in flight: enough to overlap transfer and scoring. */
#define IN_FLIGHT 8u

/* What the table counts as sinks where --sinks protects fewer. */
#define TABLE_SINKS 4u

static const struct format {
    const char *name;
    dkv_report_fn report;
    bool binary;
    bool one_block;
} formats[] = {
    {"table", dkv_report_table, false, false},
    {"json", dkv_report_json, false, false},
    {"safetensors", dkv_report_safetensors, true, false},
    {"npy", dkv_report_npy, true, true},
};

/* Everything the command line says. */
struct options {
    char *endpoint;
    char *format_name;
    char *output;
    int want_scores;
    int by_head;
    const struct format *format;
    struct dkv_param_options params;
};

struct command {
    struct options o;
    struct dkv_input input;
    struct dkv_extras *extras;   /* [input.blocks.n_blocks] */
    struct dkv_layer_set layers; /* all blocks in one request, or empty */
    struct dkv_outcome *outcomes;
    struct dropkv_client *client;
    const char *endpoint; /* the one that is used */
    int64_t start_ns;
};

/* ---- the command line ---- */

static const struct format *find_format(const char *name)
{
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++)
        if (strcmp(formats[i].name, name) == 0)
            return &formats[i];
    return NULL;
}

static int check_options(struct options *o)
{
    o->format = find_format(o->format_name != NULL ? o->format_name : "table");
    if (o->format == NULL) {
        dkv_complain("--format: '%s' is not one of table, json, safetensors, npy", o->format_name);
        return EX_USAGE;
    }
    if (o->format->binary && o->output == NULL && isatty(STDOUT_FILENO)) {
        dkv_complain("--format %s is not for a terminal: name a file with --output",
                     o->format->name);
        return EX_USAGE;
    }
    if (o->format->one_block && o->want_scores && o->output == NULL) {
        dkv_complain("--format npy --scores makes two files: name the first with --output");
        return EX_USAGE;
    }
    return EX_OK;
}

/* The arguments that are left are files; popt owns them until the context is freed. */
static int read_command_line(struct command *c, poptContext context)
{
    int val;
    int code = EX_OK;
    while (code == EX_OK && (val = poptGetNextOpt(context)) >= 0)
        if (val >= DKV_OPTION_PARAM)
            code = dkv_option_param(&c->o.params, val, poptGetOptArg(context)) ? EX_OK : EX_USAGE;
    if (code == EX_OK && val < -1)
        code = dkv_fail_usage(context, val);
    return code == EX_OK ? check_options(&c->o) : code;
}

/* ---- scoring ---- */

/* What the gate makes of this request: it fills in defaults, which the table shows. */
static void note_classes(struct dkv_outcome *outcome, const struct dropkv_request *request)
{
    struct dkv_call call = {0};
    if (dkv_call_init(&call, request, NULL) == DKV_OK) { /* else submission says what is wrong */
        const uint64_t n = request->n_tokens;
        const uint64_t sinks = call.plans[0].sinks > TABLE_SINKS ? call.plans[0].sinks
                                                                 : TABLE_SINKS;
        outcome->recent = call.plans[0].recent;
        outcome->sinks = sinks < n ? sinks : n;
    }
    dkv_call_fini(&call);
}

static const char *given(const struct command *c, const char *name)
{
    for (size_t i = 0; i < c->o.params.n_params; i++)
        if (strcmp(c->o.params.params[i].name, name) == 0)
            return c->o.params.params[i].text;
    return NULL;
}

static bool one_request(const struct command *c)
{
    const char *layers = given(c, "layers");
    return layers != NULL && strcmp(layers, "cake") == 0 && c->input.blocks.n_blocks > 1;
}

/* Blocks that are requests of their own are told which layer each is, for budgets by layer. */
static size_t name_layer(const struct command *c, size_t i, struct dropkv_param *params)
{
    const char *layers = given(c, "layers");
    const size_t n = c->o.params.n_params;
    memcpy(params, c->o.params.params, n * sizeof(*params));
    if (layers == NULL || strcmp(layers, "uniform") == 0 || given(c, "layer") != NULL ||
        given(c, "n_layers") != NULL || c->input.blocks.n_blocks == 1)
        return n;
    params[n] = dropkv_int("layer", (int64_t)i);
    params[n + 1] = dropkv_int("n_layers", (int64_t)c->input.blocks.n_blocks);
    return n + 2;
}

/* What a request has beside its tensors. */
static void note_request(struct command *c, size_t i, const struct dropkv_request *request)
{
    c->outcomes[i].name = c->input.blocks.blocks[i].name;
    c->outcomes[i].q_heads = request->q_heads;
    note_classes(&c->outcomes[i], request);
}

/* All blocks as the layers of one request, waited for. */
static int score_layers(struct command *c)
{
    struct dkv_error error;
    struct dropkv_result *result = NULL;
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    request.params = c->o.params.params;
    request.n_params = c->o.params.n_params;
    request.want_scores = c->o.want_scores;
    enum dkv_status status = dkv_layers_request(&c->input.blocks, &request, &c->layers, &error);
    if (status == DKV_OK) /* those of the first show what the policy does not take */
        status = dkv_extras_add(&c->input.sources, &c->input.blocks.blocks[0], given(c, "policy"),
                                &request, &c->extras[0], &error);
    if (status == DKV_OK)
        status = (enum dkv_status)dropkv_score(c->client, &request, &result,
                                               (struct dropkv_error *)&error);
    if (status == DKV_OK)
        status = dkv_layers_divide(&c->layers, result, &error);
    if (status != DKV_OK)
        return dkv_fail(NULL, &error);
    for (size_t i = 0; i < c->input.blocks.n_blocks; i++) {
        note_request(c, i, &request);
        c->outcomes[i].result = &c->layers.parts[i];
    }
    return EX_OK;
}

static int submit_block(struct command *c, size_t i)
{
    struct dropkv_param params[DKV_PARAM_COUNT + 2];
    struct dkv_error error;
    const struct dkv_named_block *block = &c->input.blocks.blocks[i];
    struct dropkv_request request = DROPKV_REQUEST_INIT;
    request.params = params;
    request.n_params = name_layer(c, i, params);
    request.want_scores = c->o.want_scores;
    request.user = &c->outcomes[i];
    if (dkv_block_request(block, &request, &error) != DKV_OK ||
        dkv_extras_add(&c->input.sources, block, given(c, "policy"), &request, &c->extras[i],
                       &error) != DKV_OK)
        return dkv_fail(block->name, &error);
    note_request(c, i, &request);
    if (dropkv_submit(c->client, &request, NULL, (struct dropkv_error *)&error) != DROPKV_OK)
        return dkv_fail(block->name, &error);
    return EX_OK;
}

static int take_answer(struct dropkv_result *result)
{
    struct dkv_outcome *outcome = result->user;
    if (result->status != DROPKV_OK) {
        dkv_complain("%s: %s", outcome->name, result->error_text);
        const int code = (int)dkv_status_info((enum dkv_status)result->status)->exit_code;
        dropkv_result_free(result);
        return code;
    }
    outcome->result = result;
    return EX_OK;
}

/* Waits until something is finished and takes everything that is. */
static int collect(struct command *c, size_t *n_done)
{
    struct dkv_error error;
    struct dropkv_result *result;
    int code = EX_OK;
    if (dropkv_dispatch(c->client, 100000, (struct dropkv_error *)&error) != DROPKV_OK)
        return dkv_fail(NULL, &error);
    while (code == EX_OK && (result = dropkv_next_result(c->client)) != NULL) {
        code = take_answer(result);
        *n_done += 1;
    }
    return code;
}

static int score_all(struct command *c)
{
    struct dkv_progress progress;
    const size_t n = c->input.blocks.n_blocks;
    size_t n_sent = 0;
    size_t n_done = 0;
    int code = EX_OK;
    dkv_progress_init(&progress, c->start_ns);
    while (code == EX_OK && n_done < n) {
        while (code == EX_OK && n_sent < n && n_sent - n_done < IN_FLIGHT)
            code = submit_block(c, n_sent++);
        if (code == EX_OK)
            code = collect(c, &n_done);
        dkv_progress_show(&progress, n_done, n, dkv_now_ns());
    }
    dkv_progress_fini(&progress);
    return code;
}

/* ---- printing ---- */

static int write_report(const struct dkv_report *report, dkv_report_fn write_to, const char *path)
{
    struct dkv_error error;
    FILE *stream = path == NULL ? stdout : fopen(path, "wbe");
    if (stream == NULL) {
        dkv_complain("%s: could not create: %s", path, strerror(errno));
        return EX_CANTCREAT;
    }
    enum dkv_status status = write_to(report, stream, &error);
    if (path != NULL && fclose(stream) != 0 && status == DKV_OK)
        status = dkv_error_set(&error, DKV_E_IO, "could not write: %s", strerror(errno));
    return status == DKV_OK ? EX_OK : dkv_fail(path, &error);
}

/* keep.npy -> keep.scores.npy */
static int write_npy_scores(const struct dkv_report *report, const char *path)
{
    char *scores_path = NULL;
    const size_t n = strlen(path);
    const int stem = dkv_names_npy(path) ? (int)n - 4 : (int)n;
    if (asprintf(&scores_path, "%.*s.scores.npy", stem, path) < 0)
        return dkv_fail_memory();
    const int code = write_report(report, dkv_report_npy_scores, scores_path);
    free(scores_path);
    return code;
}

static int print_all(const struct command *c)
{
    const struct dkv_report report = {
        .endpoint = c->endpoint,
        .outcomes = c->outcomes,
        .n_outcomes = c->input.blocks.n_blocks,
        .elapsed_ns = (uint64_t)(dkv_now_ns() - c->start_ns),
        .per_head = c->o.by_head != 0,
    };
    int code = write_report(&report, c->o.format->report, c->o.output);
    if (code == EX_OK && c->o.format->one_block && c->o.want_scores)
        code = write_npy_scores(&report, c->o.output);
    return code;
}

/* ---- the command ---- */

static int run(struct command *c, const char **paths)
{
    struct dkv_error error;
    int code = dkv_input_open(&c->input, paths);
    const size_t n = c->input.blocks.n_blocks;
    if (code != EX_OK)
        return code;
    if (c->o.format->one_block && n != 1) {
        dkv_complain("--format npy holds one block, these are %zu; use safetensors", n);
        return EX_USAGE;
    }
    c->outcomes = calloc(n, sizeof(c->outcomes[0]));
    c->extras = calloc(n, sizeof(c->extras[0]));
    if (c->outcomes == NULL || c->extras == NULL)
        return dkv_fail_memory();
    if (dkv_open_endpoint(c->o.endpoint, NULL, &c->client, &c->endpoint, &error) != DKV_OK)
        return dkv_fail(c->o.endpoint, &error);
    c->start_ns = dkv_now_ns();
    code = one_request(c) ? score_layers(c) : score_all(c);
    return code == EX_OK ? print_all(c) : code;
}

static void command_fini(struct command *c)
{
    dropkv_client_close(c->client);
    for (size_t i = 0;
         c->outcomes != NULL && i < c->input.blocks.n_blocks && c->layers.parts == NULL; i++)
        dropkv_result_free((struct dropkv_result *)(uintptr_t)c->outcomes[i].result);
    dkv_layers_fini(&c->layers);
    free(c->outcomes);
    for (size_t i = 0; c->extras != NULL && i < c->input.blocks.n_blocks; i++)
        dkv_extras_fini(&c->extras[i]);
    free(c->extras);
    dkv_input_fini(&c->input);
    dkv_param_options_fini(&c->o.params);
    free(c->o.endpoint);
    free(c->o.format_name);
    free(c->o.output);
}

int dkv_cmd_score(int argc, const char **argv)
{
    struct command c = {0};
    struct options *o = &c.o;
    struct dkv_input *from = &c.input;
    // clang-format off
    struct poptOption input[] = {
        {"query", 0, POPT_ARG_STRING, &from->query, 0, "Name of the query tensors; {} stands for the layer. Or a .npy file", "NAME"},
        {"key", 0, POPT_ARG_STRING, &from->key, 0, "The same for the keys", "NAME"},
        {"value", 0, POPT_ARG_STRING, &from->value, 0, "The same for the values", "NAME"},
        {"token-weight", 0, POPT_ARG_STRING, &from->extras[DKV_ROLE_TOKEN_WEIGHT], 0, "What criticalkv takes, F32 [B,Hkv,n]; likewise a name or a .npy file [PREFIXtoken_weight]", "NAME"},
        {"carry-in", 0, POPT_ARG_STRING, &from->extras[DKV_ROLE_CARRY_IN], 0, "What h2o and kvzip take, F32 [B,Hkv,n]: the scores of the call before [PREFIXcarry_in]", "NAME"},
        {"external-scores", 0, POPT_ARG_STRING, &from->extras[DKV_ROLE_EXTERNAL_SCORES], 0, "What external selects by, F32 [B,Hkv,n] [PREFIXexternal_scores]", "NAME"},
        {"value-metric", 0, POPT_ARG_STRING, &from->extras[DKV_ROLE_VALUE_METRIC], 0, "What restkv takes, F32 [Hq,Dv,Dv] [PREFIXvalue_metric]", "NAME"},
        {"dtype", 0, POPT_ARG_STRING, &from->raw_dtype, 0, "What raw .npy elements are: bf16, f8_e4m3 or f8_e5m2", "TYPE"},
        POPT_TABLEEND,
    };
    struct poptOption output[] = {
        {"format", 'f', POPT_ARG_STRING, &o->format_name, 0, "table, json, safetensors or npy", "FORMAT"},
        {"output", 'o', POPT_ARG_STRING, &o->output, 0, "Write there instead of standard output", "FILE"},
        {"scores", 's', POPT_ARG_NONE, &o->want_scores, 0, "Report every token's raw score too", NULL},
        {"by-head", 0, POPT_ARG_NONE, &o->by_head, 0, "Table: one row for each KV head", NULL},
        POPT_TABLEEND,
    };
    struct poptOption table[] = {
        {"endpoint", 'e', POPT_ARG_STRING, &o->endpoint, 0, "unix:///PATH, http://HOST:PORT, or embedded: for the engine in this program", "URL"},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, input, 0, "Input:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, output, 0, "Output:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, dkv_param_option_table(), 0, "Scoring parameters:", NULL},
        POPT_AUTOHELP
        POPT_TABLEEND,
    };
    // clang-format on
    poptContext context = poptGetContext("dropkv-client score", argc, argv, table, 0);
    poptSetOtherOptionHelp(context, "DUMP.safetensors... [OPTION...]");
    int code = read_command_line(&c, context);
    if (code == EX_OK)
        code = run(&c, poptGetArgs(context));
    command_fini(&c);
    poptFreeContext(context);
    return code;
}
