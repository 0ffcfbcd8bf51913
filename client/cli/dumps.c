/* Opening dumps, each watched as long as it is open. */
#include "client/cli/dumps.h"

#include "client/cli/guard.h"
#include "client/cli/options.h"

#include <stdlib.h>
#include <sysexits.h>

int dkv_dumps_init(struct dkv_dumps *dumps, size_t n)
{
    dumps->files = calloc(n, sizeof(dumps->files[0]));
    return dumps->files == NULL ? dkv_fail_memory() : EX_OK;
}

int dkv_dumps_add(struct dkv_dumps *dumps, const char *path)
{
    struct dkv_error error;
    struct dkv_tensor_file *file = &dumps->files[dumps->n_files];
    if (dkv_tensor_file_open(path, file, &error) != DKV_OK) {
        const int code = dkv_fail(path, &error);
        return error.status == DKV_E_NOT_FOUND ? EX_NOINPUT : code;
    }
    dkv_guard_add(file);
    dumps->n_files++;
    return EX_OK;
}

int dkv_dumps_open(struct dkv_dumps *dumps, const char *command, const char **paths,
                   const struct dkv_block_patterns *patterns, struct dkv_block_list *blocks_out)
{
    struct dkv_error error;
    size_t n = 0;
    while (paths != NULL && paths[n] != NULL)
        n++;
    if (n == 0) {
        dkv_complain("no dump was named; see dropkv-client %s --help", command);
        return EX_USAGE;
    }
    int code = dkv_dumps_init(dumps, n);
    for (size_t i = 0; code == EX_OK && i < n; i++)
        code = dkv_dumps_add(dumps, paths[i]);
    if (code == EX_OK &&
        dkv_blocks_find(dumps->files, dumps->n_files, patterns, blocks_out, &error) != DKV_OK)
        code = dkv_fail(n == 1 ? paths[0] : NULL, &error);
    return code;
}

void dkv_dumps_fini(struct dkv_dumps *dumps)
{
    for (size_t i = 0; i < dumps->n_files; i++) {
        dkv_guard_remove(&dumps->files[i]);
        dkv_tensor_file_close(&dumps->files[i]);
    }
    free(dumps->files);
}
