/* What the subcommands' command lines have in common.
 *
 * Scoring parameters become options by their table in proto/params.h, so an option, its range and
 * its help exist the moment the parameter does.
 *
 * Thread  the program's only one: tables of options are static.
 * Errors  what is wrong with the command line is told on standard error at once, and the caller
 *         gets false or an exit code.
 */
#ifndef DKV_CLIENT_CLI_OPTIONS_H
#define DKV_CLIENT_CLI_OPTIONS_H

#include "client/dropkv.h"
#include "proto/params.h"

#include <popt.h>

/* popt's `val` of parameter i is this plus i; a subcommand's own options stay below. */
#define DKV_OPTION_PARAM 1000

/* Values of the parameters that were given, as text. Zero is empty. */
struct dkv_param_options {
    struct dropkv_param params[DKV_PARAM_COUNT];
    size_t n_params;
    char *texts[DKV_PARAM_COUNT]; /* what params[i].text points to */
};

/* popt's table of all scoring parameters; static memory. */
struct poptOption *dkv_param_option_table(void);

/* Takes option `val` (from DKV_OPTION_PARAM on) and its argument, which it owns from now on. False,
 * with a complaint, if it was given before or its text cannot be that parameter's. */
bool dkv_option_param(struct dkv_param_options *options, int val, char *argument);
void dkv_param_options_fini(struct dkv_param_options *options);

/* Where and how to connect. */
struct dkv_endpoint_options {
    char *endpoint;
    int64_t timeout_us; /* 0: the library's */
};

/* Opens a client for --endpoint, "embedded:" included. Without --endpoint: the daemon's default
 * socket or address if one is ready, else the embedded engine; `chosen_out` (static or the option's
 * memory) names which, and standard error says so when nobody chose. */
enum dkv_status dkv_open_endpoint(const char *endpoint, const struct dropkv_client_options *options,
                                  struct dropkv_client **client_out, const char **chosen_out,
                                  struct dkv_error *err);

/* Whole numbers and reals of an option's argument, within a range; usage errors name the option. */
bool dkv_option_int(const char *name, const char *text, int64_t low, int64_t high, int64_t *out);
bool dkv_option_real(const char *name, const char *text, double low, double high, double *out);

/* Prints "dropkv-client: ..." on standard error. */
void dkv_complain(const char *format, ...) DKV_PRINTF(1, 2);

/* Complains about an error and gives its exit code. `subject` (may be NULL) names what failed. */
int dkv_fail(const char *subject, const struct dkv_error *err);

/* Complains about memory that could not be had, and gives exit code 71. */
int dkv_fail_memory(void);

/* Complains about a usage error that popt found, and gives exit code 64. */
int dkv_fail_usage(poptContext context, int popt_error);

#endif
