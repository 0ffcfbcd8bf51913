/* The subcommands. Each gets the arguments from its own name on and returns an exit code. */
#ifndef DKV_CLIENT_CLI_COMMANDS_H
#define DKV_CLIENT_CLI_COMMANDS_H

int dkv_cmd_score(int argc, const char **argv);
int dkv_cmd_compare(int argc, const char **argv);
int dkv_cmd_bench(int argc, const char **argv);
int dkv_cmd_info(int argc, const char **argv);
int dkv_cmd_health(int argc, const char **argv);

#endif
