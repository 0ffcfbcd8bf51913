/* Options made from the parameter table, the choice of an endpoint, and complaints. */
#include "client/cli/options.h"

#include "client/tensor_file.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#define DEFAULT_ENDPOINT "http://127.0.0.1:8480"

/* How long the default endpoint may take to say that it is ready. */
#define PROBE_TIMEOUT_US 500000

void dkv_complain(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("dropkv-client: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
}

int dkv_fail(const char *subject, const struct dkv_error *err)
{
    if (subject != NULL)
        dkv_complain("%s: %s", subject, err->text);
    else
        dkv_complain("%s", err->text);
    return (int)dkv_status_info(err->status)->exit_code;
}

int dkv_fail_usage(poptContext context, int popt_error)
{
    dkv_complain("%s: %s", poptBadOption(context, POPT_BADOPTION_NOALIAS),
                 poptStrerror(popt_error));
    return EX_USAGE;
}

int dkv_fail_memory(void)
{
    dkv_complain("out of memory");
    return EX_OSERR;
}

/* ---- scoring parameters ---- */

static char option_names[DKV_PARAM_COUNT][32];
static char option_helps[DKV_PARAM_COUNT][256];

/* "tokens" or "1..512 tokens": what stands behind the option's name. */
static void describe_option(const struct dkv_param_info *info, char *help, size_t help_bytes)
{
    const char *unit = info->unit[0] != '\0' ? " " : "";
    snprintf(help, help_bytes, "%s [%s%s%s]", info->help, info->range, unit, info->unit);
}

struct poptOption *dkv_param_option_table(void)
{
    static struct poptOption table[DKV_PARAM_COUNT + 1];
    for (unsigned i = 0; i < DKV_PARAM_COUNT; i++) {
        const struct dkv_param_info *info = dkv_param_info((enum dkv_param_id)i);
        char *name = option_names[i];
        snprintf(name, sizeof(option_names[i]), "%s", info->name);
        for (char *c = name; *c != '\0'; c++)
            if (*c == '_')
                *c = '-';
        describe_option(info, option_helps[i], sizeof(option_helps[i]));
        table[i] = (struct poptOption){
            .longName = name,
            .argInfo = POPT_ARG_STRING,
            .val = DKV_OPTION_PARAM + (int)i,
            .descrip = option_helps[i],
            .argDescrip = info->kind == DKV_VALUE_INT    ? "N"
                          : info->kind == DKV_VALUE_REAL ? "X"
                                                         : "WORD",
        };
    }
    return table;
}

static bool is_given(const struct dkv_param_options *options, const char *name)
{
    for (size_t i = 0; i < options->n_params; i++)
        if (strcmp(options->params[i].name, name) == 0)
            return true;
    return false;
}

/* The sentence of a setter begins with the parameter's name, which the option's name replaces. */
static void complain_about(unsigned i, const char *argument, const struct dkv_error *error)
{
    const char *name = dkv_param_info((enum dkv_param_id)i)->name;
    const size_t length = strlen(name);
    const bool repeats = strncmp(error->text, name, length) == 0 && error->text[length] == ':';
    char shown[64];
    dkv_complain("--%s '%s':%s%s", option_names[i], dkv_printable(argument, shown, sizeof(shown)),
                 repeats ? "" : " ", repeats ? error->text + length + 1 : error->text);
}

bool dkv_option_param(struct dkv_param_options *options, int val, char *argument)
{
    const unsigned i = (unsigned)(val - DKV_OPTION_PARAM);
    const char *name = dkv_param_info((enum dkv_param_id)i)->name;
    struct dkv_params scratch;
    struct dkv_error error;
    enum dkv_status status;
    dkv_params_init(&scratch);
    if (is_given(options, name))
        status = dkv_error_set(&error, DKV_E_INVALID, "given twice");
    else
        status = dkv_params_set_text(&scratch, name, argument, &error);
    if (status != DKV_OK) {
        complain_about(i, argument, &error);
        free(argument);
        return false;
    }
    options->texts[options->n_params] = argument;
    options->params[options->n_params++] = dropkv_text(name, argument);
    return true;
}

void dkv_param_options_fini(struct dkv_param_options *options)
{
    for (size_t i = 0; i < options->n_params; i++)
        free(options->texts[i]);
    *options = (struct dkv_param_options){0};
}

/* ---- numbers ---- */

bool dkv_option_int(const char *name, const char *text, int64_t low, int64_t high, int64_t *out)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || value < low || value > high) {
        dkv_complain("--%s: '%s' is not a whole number in %lld..%lld", name, text, (long long)low,
                     (long long)high);
        return false;
    }
    *out = value;
    return true;
}

bool dkv_option_real(const char *name, const char *text, double low, double high, double *out)
{
    char *end;
    errno = 0;
    const double value = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(value) || value < low || value > high) {
        dkv_complain("--%s: '%s' is not a number in %g..%g", name, text, low, high);
        return false;
    }
    *out = value;
    return true;
}

/* ---- the endpoint ---- */

static enum dkv_status open_named(const char *endpoint, const struct dropkv_client_options *options,
                                  struct dropkv_client **client_out, struct dkv_error *err)
{
    return (enum dkv_status)dropkv_client_open(endpoint, options, client_out,
                                               (struct dropkv_error *)err);
}

/* Opens `endpoint` if its daemon is ready. */
static bool open_if_ready(const char *endpoint, const struct dropkv_client_options *options,
                          struct dropkv_client **client_out)
{
    if (open_named(endpoint, options, client_out, NULL) != DKV_OK)
        return false;
    if (dropkv_health(*client_out, PROBE_TIMEOUT_US, NULL) == DROPKV_OK)
        return true;
    dropkv_client_close(*client_out);
    return false;
}

/* Where dropkvd listens unless it is told otherwise. */
static const char *socket_endpoint(void)
{
    static char endpoint[160];
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    snprintf(endpoint, sizeof(endpoint), "unix://%.120s/dropkv/dropkvd.sock",
             runtime != NULL && *runtime == '/' ? runtime : "/run");
    return endpoint;
}

enum dkv_status dkv_open_endpoint(const char *endpoint, const struct dropkv_client_options *options,
                                  struct dropkv_client **client_out, const char **chosen_out,
                                  struct dkv_error *err)
{
    if (endpoint != NULL) {
        *chosen_out = endpoint;
        return open_named(endpoint, options, client_out, err);
    }
    const char *const daemons[] = {socket_endpoint(), DEFAULT_ENDPOINT};
    for (size_t i = 0; i < sizeof(daemons) / sizeof(daemons[0]); i++)
        if (open_if_ready(daemons[i], options, client_out)) {
            *chosen_out = daemons[i];
            dkv_complain("using the daemon at %s", daemons[i]);
            return DKV_OK;
        }
    *chosen_out = "embedded:";
    const enum dkv_status status = open_named(*chosen_out, options, client_out, err);
    if (status == DKV_OK)
        dkv_complain("no daemon at %s or %s, using the embedded engine", daemons[0], daemons[1]);
    return status;
}
