/* What `score` reads: dumps, or three .npy files, and what policies take beside them.
 *
 * Owner   zero but for the options is a closed input; fini() closes it and frees the options'
 * texts. Errors  an exit code, EX_OK if none; whoever fails has said why on stderr.
 */
#ifndef DKV_CLIENT_CLI_INPUT_H
#define DKV_CLIENT_CLI_INPUT_H

#include "client/cli/dumps.h"
#include "client/cli/extras.h"

struct dkv_input {
    /* The options, as popt allocates them; NULL: not given. */
    char *query, *key, *value; /* names, with {} for the layer, or .npy files */
    char *extras[DKV_EXTRA_ROLES];
    char *raw_dtype; /* of .npy elements that have no type */

    struct dkv_dumps dumps;
    struct dkv_dumps extra_files; /* .npy */
    struct dkv_block_list blocks;
    struct dkv_extra_sources sources;
};

/* `paths` are the arguments that name dumps; ends with NULL, or is NULL. */
int dkv_input_open(struct dkv_input *input, const char **paths);
void dkv_input_fini(struct dkv_input *input);

/* Whether a name is that of an .npy file. */
bool dkv_names_npy(const char *text);

#endif
