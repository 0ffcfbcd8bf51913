/* The command line of dropkvd.
 *
 * Thread  main, before others exist.
 */
#ifndef DKV_SERVER_CLI_H
#define DKV_SERVER_CLI_H

#include "server/config.h"

enum dkv_cli_action {
    DKV_CLI_RUN,
    DKV_CLI_CHECK,         /* --check-config */
    DKV_CLI_PRINT,         /* --print-config */
    DKV_CLI_PRINT_SOURCES, /* --print-sources */
    DKV_CLI_VERSION,
};

/* Reads file, environment and arguments into `state` (initialised), in that order of rising
 * authority. INVALID with a sentence for the user otherwise. */
enum dkv_status dkv_cli_read(int argc, const char **argv, struct dkv_config_state *state,
                             enum dkv_cli_action *action_out, struct dkv_error *err);

#endif
