/* dropkvd: reads its configuration and serves. Exit statuses follow sysexits.h. */
#include "proto/oip.h"
#include "server/cli.h"
#include "server/server.h"

#include <string.h>
#include <sysexits.h>
#include <unistd.h>

static enum dkv_log_level log_level(const char *name)
{
    static const char *const names[] = {"error", "warn", "info", "debug", "trace"};
    for (int i = 0; i < 5; i++)
        if (strcmp(name, names[i]) == 0)
            return (enum dkv_log_level)i;
    return DKV_LOG_INFO;
}

static int act(const struct dkv_config_state *state, enum dkv_cli_action action)
{
    const struct dkv_config *config = &state->config;
    switch (action) {
    case DKV_CLI_CHECK: puts("dropkvd: the configuration is good"); return EX_OK;
    case DKV_CLI_PRINT: dkv_config_print(state, false, stdout); return EX_OK;
    case DKV_CLI_PRINT_SOURCES: dkv_config_print(state, true, stdout); return EX_OK;
    case DKV_CLI_VERSION: puts("dropkvd " DKV_VERSION); return EX_OK;
    case DKV_CLI_RUN: break;
    }
    dkv_log_init(strcmp(config->log_format, "json") == 0 ? DKV_LOG_JSON : DKV_LOG_TEXT,
                 log_level(config->log_level), STDERR_FILENO);
    return dkv_server_run(config);
}

int main(int argc, char **argv)
{
    struct dkv_config_state state;
    struct dkv_error err = {0};
    enum dkv_cli_action action;
    dkv_oip_init();
    dkv_config_init(&state);
    int exit_status = EX_CONFIG;
    if (dkv_cli_read(argc, (const char **)argv, &state, &action, &err) == DKV_OK)
        exit_status = act(&state, action);
    else
        fprintf(stderr, "dropkvd: %s\n", err.text);
    dkv_config_fini(&state);
    return exit_status;
}
