/* The dump files that a command names.
 *
 * Owner   the caller's storage, all zeros at first; dkv_dumps_fini() closes what was opened, also
 *         after a failure. Blocks found in them point into them.
 * Thread  the main thread (client/cli/guard.h watches the mappings).
 * Errors  an exit code, EX_OK if none; whoever fails has said why on stderr.
 */
#ifndef DKV_CLIENT_CLI_DUMPS_H
#define DKV_CLIENT_CLI_DUMPS_H

#include "client/cli/blocks.h"

struct dkv_dumps {
    struct dkv_tensor_file *files; /* these do not move */
    size_t n_files;
};

/* Room for n files. */
int dkv_dumps_init(struct dkv_dumps *dumps, size_t n);

/* Opens one more. EX_NOINPUT if it does not exist. */
int dkv_dumps_add(struct dkv_dumps *dumps, const char *path);

/* Opens all of `paths`, which ends with NULL or is NULL, and finds their blocks. EX_USAGE, with
 * `command` to look up, if there is none. */
int dkv_dumps_open(struct dkv_dumps *dumps, const char *command, const char **paths,
                   const struct dkv_block_patterns *patterns, struct dkv_block_list *blocks_out);

void dkv_dumps_fini(struct dkv_dumps *dumps);

#endif
