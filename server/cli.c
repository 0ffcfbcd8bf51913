/* Arguments by popt. The options of configuration fields are made from the table of config.c, so
 * that a field cannot lack its option, its help line or its default there.
 *
 * Arguments win over the environment and the file, but --config is itself an argument: a first pass
 * over the arguments finds it, a second one applies the fields.
 */
#include "server/cli.h"

#include <popt.h>
#include <stdlib.h>
#include <string.h>

enum {
    OPTION_FIELD = 1000, /* + index of the field */
    OPTION_CONFIG = 1,
    OPTION_CHECK,
    OPTION_PRINT,
    OPTION_PRINT_SOURCES,
    OPTION_VERSION,
};

#define N_OWN 5

struct options {
    struct poptOption table[DKV_CONFIG_FIELDS + N_OWN + 2];
    char names[DKV_CONFIG_FIELDS][48];
    char helps[DKV_CONFIG_FIELDS][200];
};

static void field_option(struct options *options, int i)
{
    const struct dkv_config_field *field = &dkv_config_fields[i];
    snprintf(options->names[i], sizeof(options->names[i]), "%s", field->name);
    for (char *c = options->names[i]; *c != '\0'; c++)
        *c = *c == '_' ? '-' : *c;
    snprintf(options->helps[i], sizeof(options->helps[i]), "%s (default %s)", field->help,
             *field->default_text != '\0' ? field->default_text : "none");
    options->table[i] = (struct poptOption){
        .longName = options->names[i],
        .argInfo = (unsigned)POPT_ARG_STRING |
                   (field->kind == DKV_CONFIG_BOOL ? (unsigned)POPT_ARGFLAG_OPTIONAL : 0u),
        .val = OPTION_FIELD + i,
        .descrip = options->helps[i],
        .argDescrip = field->kind == DKV_CONFIG_BOOL  ? "true|false"
                      : *field->unit != '\0'          ? field->unit
                      : field->kind == DKV_CONFIG_U64 ? "N"
                                                      : "TEXT",
    };
}

static void build_options(struct options *options)
{
    static const struct poptOption own[N_OWN] = {
        {"config", '\0', POPT_ARG_STRING, NULL, OPTION_CONFIG,
         "Read fields from a JSON file (default $DROPKVD_CONFIG)", "FILE"},
        {"check-config", '\0', POPT_ARG_NONE, NULL, OPTION_CHECK,
         "Judge the configuration and exit: 0 if it is good, 78 if not", NULL},
        {"print-config", '\0', POPT_ARG_NONE, NULL, OPTION_PRINT,
         "Print the configuration in force as a file for --config, and exit", NULL},
        {"print-sources", '\0', POPT_ARG_NONE, NULL, OPTION_PRINT_SOURCES,
         "The same, with where each value came from", NULL},
        {"version", '\0', POPT_ARG_NONE, NULL, OPTION_VERSION, "Print the version and exit", NULL},
    };
    memset(options, 0, sizeof(*options));
    for (int i = 0; i < DKV_CONFIG_FIELDS; i++)
        field_option(options, i);
    memcpy(&options->table[DKV_CONFIG_FIELDS], own, sizeof(own));
    options->table[DKV_CONFIG_FIELDS + N_OWN] = (struct poptOption){
        NULL, '\0', POPT_ARG_INCLUDE_TABLE, poptHelpOptions, 0, "Help options:", NULL};
}

/* One option that popt has read. */
static enum dkv_status take_option(poptContext context, int option, struct dkv_config_state *state,
                                   enum dkv_cli_action *action, struct dkv_error *err)
{
    switch (option) {
    case OPTION_CONFIG: return DKV_OK; /* the first pass had it */
    case OPTION_CHECK: *action = DKV_CLI_CHECK; return DKV_OK;
    case OPTION_PRINT: *action = DKV_CLI_PRINT; return DKV_OK;
    case OPTION_PRINT_SOURCES: *action = DKV_CLI_PRINT_SOURCES; return DKV_OK;
    case OPTION_VERSION: *action = DKV_CLI_VERSION; return DKV_OK;
    default: break;
    }
    const int field = option - OPTION_FIELD;
    char origin[64];
    char *text = poptGetOptArg(context);
    snprintf(origin, sizeof(origin), "--%s", dkv_config_fields[field].name);
    for (char *c = origin; *c != '\0'; c++)
        *c = *c == '_' ? '-' : *c;
    enum dkv_status status = dkv_config_set(state, field, text != NULL ? text : "true",
                                            DKV_SOURCE_ARG, origin, err);
    free(text);
    return status;
}

static enum dkv_status bad_argument(poptContext context, int code, struct dkv_error *err)
{
    return dkv_error_set(err, DKV_E_INVALID, "%.80s: %s",
                         poptBadOption(context, POPT_BADOPTION_NOALIAS), poptStrerror(code));
}

/* The file that --config or the environment names; NULL for none. To be freed. */
static enum dkv_status find_config_file(poptContext context, char **path_out, struct dkv_error *err)
{
    int option;
    const char *from_env = getenv("DROPKVD_CONFIG");
    *path_out = from_env != NULL && *from_env != '\0' ? strdup(from_env) : NULL;
    while ((option = poptGetNextOpt(context)) > 0)
        if (option == OPTION_CONFIG) {
            free(*path_out);
            *path_out = poptGetOptArg(context);
        }
    if (option < -1)
        return bad_argument(context, option, err);
    if (poptPeekArg(context) != NULL)
        return dkv_error_set(err, DKV_E_INVALID, "'%.80s': no argument is expected here",
                             poptPeekArg(context));
    return DKV_OK;
}

static enum dkv_status apply_arguments(poptContext context, struct dkv_config_state *state,
                                       enum dkv_cli_action *action, struct dkv_error *err)
{
    int option;
    enum dkv_status status = DKV_OK;
    poptResetContext(context);
    while (status == DKV_OK && (option = poptGetNextOpt(context)) > 0)
        status = take_option(context, option, state, action, err);
    return status;
}

enum dkv_status dkv_cli_read(int argc, const char **argv, struct dkv_config_state *state,
                             enum dkv_cli_action *action_out, struct dkv_error *err)
{
    struct options options;
    char *path = NULL;
    *action_out = DKV_CLI_RUN;
    build_options(&options);
    poptContext context = poptGetContext("dropkvd", argc, argv, options.table, 0);
    if (context == NULL)
        return dkv_error_set(err, DKV_E_NOMEM, "out of memory");
    enum dkv_status status = find_config_file(context, &path, err);
    if (status == DKV_OK && path != NULL)
        status = dkv_config_load_file(state, path, err);
    if (status == DKV_OK)
        status = dkv_config_load_env(state, err);
    if (status == DKV_OK)
        status = apply_arguments(context, state, action_out, err);
    if (status == DKV_OK)
        status = dkv_config_check(&state->config, err);
    free(path);
    poptFreeContext(context);
    return status;
}
