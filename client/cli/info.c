/* dropkv-client info and health: what an endpoint is, and whether it is ready. */
#include "client/cli/commands.h"
#include "client/cli/options.h"
#include "client/tensor_file.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

struct options {
    char *endpoint;
    char *timeout_text;
    char *format_name;
    int quiet;
    int64_t timeout_us;
};

static void options_fini(struct options *o)
{
    free(o->endpoint);
    free(o->timeout_text);
    free(o->format_name);
}

static int read_command_line(struct options *o, poptContext context)
{
    int val;
    while ((val = poptGetNextOpt(context)) >= 0)
        ;
    if (val < -1)
        return dkv_fail_usage(context, val);
    if (poptPeekArg(context) != NULL) {
        dkv_complain("'%s': no argument was expected", poptPeekArg(context));
        return EX_USAGE;
    }
    if (o->timeout_text != NULL &&
        !dkv_option_int("timeout", o->timeout_text, 1, 86400000000, &o->timeout_us))
        return EX_USAGE;
    if (o->format_name != NULL && strcmp(o->format_name, "table") != 0 &&
        strcmp(o->format_name, "json") != 0) {
        dkv_complain("--format: '%s' is not one of table, json", o->format_name);
        return EX_USAGE;
    }
    return EX_OK;
}

static int open_client(const struct options *o, struct dropkv_client **client_out,
                       const char **chosen_out)
{
    struct dkv_error error;
    const struct dropkv_client_options options = {
        .struct_size = sizeof(options), .timeout_us = o->timeout_us, .max_retries = -1};
    if (dkv_open_endpoint(o->endpoint, &options, client_out, chosen_out, &error) != DKV_OK)
        return dkv_fail(o->endpoint, &error);
    return EX_OK;
}

/* ---- info ---- */

static int print_json(const char *endpoint, const struct dropkv_info *info)
{
    json_t *json = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "endpoint", endpoint, "client",
                             dropkv_version(), "server", info->server, "version", info->version,
                             "platform", info->platform, "backend", info->backend, "device",
                             info->device);
    const int failed = json == NULL || json_dumpf(json, stdout, JSON_INDENT(2)) != 0;
    json_decref(json);
    if (failed || puts("") == EOF) {
        dkv_complain("could not print the description");
        return EX_IOERR;
    }
    return EX_OK;
}

static void print_line(const char *name, const char *text)
{
    char shown[160];
    if (text[0] != '\0')
        printf("%-9s %s\n", name, dkv_printable(text, shown, sizeof(shown)));
}

static int print_table(const char *endpoint, const struct dropkv_info *info)
{
    print_line("endpoint", endpoint);
    print_line("server", info->server);
    print_line("version", info->version);
    print_line("platform", info->platform);
    print_line("backend", info->backend);
    print_line("device", info->device);
    print_line("client", dropkv_version());
    return fflush(stdout) == 0 ? EX_OK : EX_IOERR;
}

static int run_info(const struct options *o)
{
    struct dkv_error error;
    struct dropkv_client *client;
    struct dropkv_info *info;
    const char *endpoint;
    int code = open_client(o, &client, &endpoint);
    if (code != EX_OK)
        return code;
    if (dropkv_client_info(client, 0, &info, (struct dropkv_error *)&error) != DROPKV_OK) {
        code = dkv_fail(endpoint, &error);
    } else {
        const bool json = o->format_name != NULL && strcmp(o->format_name, "json") == 0;
        code = json ? print_json(endpoint, info) : print_table(endpoint, info);
        dropkv_info_free(info);
    }
    dropkv_client_close(client);
    return code;
}

int dkv_cmd_info(int argc, const char **argv)
{
    struct options o = {0};
    // clang-format off
    struct poptOption table[] = {
        {"endpoint", 'e', POPT_ARG_STRING, &o.endpoint, 0, "unix:///PATH, http://HOST:PORT, or embedded:", "URL"},
        {"format", 'f', POPT_ARG_STRING, &o.format_name, 0, "table or json", "FORMAT"},
        {"timeout", 0, POPT_ARG_STRING, &o.timeout_text, 0, "Longest wait for an answer, in microseconds", "US"},
        POPT_AUTOHELP
        POPT_TABLEEND,
    };
    // clang-format on
    poptContext context = poptGetContext("dropkv-client info", argc, argv, table, 0);
    int code = read_command_line(&o, context);
    if (code == EX_OK)
        code = run_info(&o);
    options_fini(&o);
    poptFreeContext(context);
    return code;
}

/* ---- health ---- */

static int run_health(const struct options *o)
{
    struct dkv_error error;
    struct dropkv_client *client;
    const char *endpoint;
    int code = open_client(o, &client, &endpoint);
    if (code != EX_OK)
        return code;
    if (dropkv_health(client, 0, (struct dropkv_error *)&error) != DROPKV_OK)
        code = dkv_fail(endpoint, &error);
    else if (!o->quiet)
        printf("%s is ready\n", endpoint);
    dropkv_client_close(client);
    return code;
}

/* Health is asked of a daemon: no engine stands in for one that does not answer. */
int dkv_cmd_health(int argc, const char **argv)
{
    struct options o = {0};
    // clang-format off
    struct poptOption table[] = {
        {"endpoint", 'e', POPT_ARG_STRING, &o.endpoint, 0, "http://HOST:PORT; by default http://127.0.0.1:8480", "URL"},
        {"timeout", 0, POPT_ARG_STRING, &o.timeout_text, 0, "Longest wait for an answer, in microseconds", "US"},
        {"quiet", 'q', POPT_ARG_NONE, &o.quiet, 0, "Answer by the exit code alone", NULL},
        POPT_AUTOHELP
        POPT_TABLEEND,
    };
    // clang-format on
    poptContext context = poptGetContext("dropkv-client health", argc, argv, table, 0);
    int code = read_command_line(&o, context);
    if (code == EX_OK && o.endpoint == NULL)
        o.endpoint = strdup("http://127.0.0.1:8480");
    if (code == EX_OK)
        code = run_health(&o);
    options_fini(&o);
    poptFreeContext(context);
    return code;
}
