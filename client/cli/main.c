/* dropkv-client: the command line of DropKV. This file only finds the subcommand; each lives in a
 * file of its name. Exit codes follow sysexits.h. */
#include "client/cli/commands.h"
#include "client/cli/options.h"
#include "proto/oip.h"

#include <locale.h>
#include <stdio.h>
#include <string.h>
#include <sysexits.h>

static const struct {
    const char *name;
    int (*run)(int argc, const char **argv);
    const char *help;
} commands[] = {
    {"score", dkv_cmd_score, "say which tokens of dumped Q/K/V blocks to keep"},
    {"compare", dkv_cmd_compare, "say what each policy's choice does to the outputs of a dump"},
    {"bench", dkv_cmd_bench, "drive an endpoint with synthetic blocks and time it"},
    {"info", dkv_cmd_info, "describe an endpoint: version, backend, device"},
    {"health", dkv_cmd_health, "exit 0 if an endpoint is ready for requests"},
};
#define N_COMMANDS (sizeof(commands) / sizeof(commands[0]))

static void print_help(FILE *stream)
{
    fputs("usage: dropkv-client COMMAND [OPTION...]\n\n", stream);
    for (size_t i = 0; i < N_COMMANDS; i++)
        fprintf(stream, "  %-8s %s\n", commands[i].name, commands[i].help);
    fputs("\n"
          "dropkv-client COMMAND --help lists the options of a command.\n"
          "\n"
          "  dropkv-client score dump.safetensors --keep-ratio 0.1\n"
          "  dropkv-client score dump.safetensors --format json --scores > kept.json\n"
          "  dropkv-client bench --endpoint embedded: --tokens 32768 --dtype bf16\n"
          "\n"
          "An endpoint is unix:///PATH, http://HOST:PORT, or embedded: for the engine inside this "
          "program.\nWhere none is named, the daemon's default socket or http://127.0.0.1:8480 is "
          "used if one is\nready, else embedded:.\n",
          stream);
}

/* popt shows the first argument as the program's name. */
static int run_command(size_t i, int argc, const char **argv)
{
    char name[64];
    snprintf(name, sizeof(name), "dropkv-client %s", commands[i].name);
    argv[0] = name;
    return commands[i].run(argc, argv);
}

int main(int argc, const char **argv)
{
    setlocale(LC_CTYPE, ""); /* for the terminal's encoding; numbers stay as in C */
    dkv_oip_init();
    if (argc < 2) {
        print_help(stderr);
        return EX_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-?") == 0 ||
        strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
        print_help(stdout);
        return EX_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("dropkv-client %s\n", dropkv_version());
        return EX_OK;
    }
    for (size_t i = 0; i < N_COMMANDS; i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return run_command(i, argc - 1, argv + 1);
    dkv_complain("'%s' is not one of score, compare, bench, info, health", argv[1]);
    return EX_USAGE;
}
