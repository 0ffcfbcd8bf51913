/* dropkvd: reads its configuration and serves, or is a worker of a dropkvd that does. Exit statuses
 * follow sysexits.h. */
#include "proto/oip.h"
#include "server/cli.h"
#include "server/server.h"
#include "server/worker.h"

#include <string.h>
#include <sysexits.h>
#include <unistd.h>

static int act(struct dkv_config_state *state, enum dkv_cli_action action, int argc,
               const char **argv)
{
    const struct dkv_config *config = &state->config;
    switch (action) {
    case DKV_CLI_CHECK: puts("dropkvd: the configuration is good"); return EX_OK;
    case DKV_CLI_PRINT: dkv_config_print(state, false, stdout); return EX_OK;
    case DKV_CLI_PRINT_SOURCES: dkv_config_print(state, true, stdout); return EX_OK;
    case DKV_CLI_VERSION: puts("dropkvd " DKV_VERSION); return EX_OK;
    case DKV_CLI_RUN: break;
    }
    struct dkv_error err = {0};
    if (dkv_log_open(dkv_log_format_of(config->log_format), dkv_log_level_of(config->log_level),
                     config->log_file, &err) == DKV_OK)
        return dkv_server_run(state, argc, argv);
    fprintf(stderr, "dropkvd: %s\n", err.text);
    return EX_UNAVAILABLE;
}

int main(int argc, char **argv)
{
    struct dkv_config_state state;
    struct dkv_error err = {0};
    enum dkv_cli_action action;
    if (argc > 1 && strcmp(argv[1], "--worker") == 0)
        return dkv_worker_main();
    dkv_oip_init();
    dkv_config_init(&state);
    int exit_status = EX_CONFIG;
    if (dkv_cli_read(argc, (const char **)argv, &state, &action, &err) == DKV_OK)
        exit_status = act(&state, action, argc, (const char **)argv);
    else
        fprintf(stderr, "dropkvd: %s\n", err.text);
    dkv_config_fini(&state);
    return exit_status;
}
