/* Dumps are opened for as long as the input is: blocks and sources point into them. */
#include "client/cli/input.h"

#include "client/cli/options.h"
#include "client/npy.h"

#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

bool dkv_names_npy(const char *text)
{
    const size_t n = strlen(text);
    return n > 4 && strcmp(text + n - 4, ".npy") == 0;
}

static bool is_npy(const struct dkv_tensor_file *file)
{
    return file->bytes >= DKV_NPY_MAGIC_BYTES &&
           memcmp(file->map, DKV_NPY_MAGIC, DKV_NPY_MAGIC_BYTES) == 0;
}

/* An .npy file cannot name bfloat16 or fp8: --dtype does. */
static int name_raw_elements(struct dkv_tensor_file *file, const char *raw_dtype)
{
    struct dkv_error error;
    struct dkv_tensor *tensor = &file->index.tensors[0];
    if (!is_npy(file) || tensor->dtype != DKV_DTYPE_NONE)
        return EX_OK;
    if (raw_dtype == NULL) {
        dkv_complain("%s: elements of type '%s'; if they are bf16 or fp8, say so with --dtype",
                     file->path, tensor->type_name);
        return EX_DATAERR;
    }
    const enum dkv_dtype dtype = dkv_dtype_parse(raw_dtype);
    if (dtype == DKV_DTYPE_NONE) {
        dkv_complain("--dtype: '%s' is not one of bf16, f8_e4m3, f8_e5m2", raw_dtype);
        return EX_USAGE;
    }
    return dkv_npy_set_dtype(tensor, dtype, &error) == DKV_OK ? EX_OK
                                                              : dkv_fail(file->path, &error);
}

/* --query, --key and --value name three .npy files, which are one block. */
static int open_npy_block(struct dkv_input *input)
{
    const char *const paths[3] = {input->query, input->key, input->value};
    int code = dkv_dumps_init(&input->dumps, 3);
    if (code != EX_OK)
        return code;
    input->blocks.blocks = calloc(1, sizeof(input->blocks.blocks[0]));
    if (input->blocks.blocks == NULL)
        return dkv_fail_memory();
    struct dkv_tensor_file *files = input->dumps.files;
    for (unsigned i = 0; code == EX_OK && i < 3; i++) {
        code = dkv_dumps_add(&input->dumps, paths[i]);
        if (code == EX_OK && !is_npy(&files[i])) {
            dkv_complain("%s: not an npy file", paths[i]);
            code = EX_DATAERR;
        }
        if (code == EX_OK)
            code = name_raw_elements(&files[i], input->raw_dtype);
    }
    if (code != EX_OK)
        return code;
    input->blocks.n_blocks = 1;
    input->blocks.blocks[0] = (struct dkv_named_block){
        .name = strdup("block"),
        .query = &files[0].index.tensors[0],
        .key = &files[1].index.tensors[0],
        .value = &files[2].index.tensors[0],
    };
    return input->blocks.blocks[0].name == NULL ? dkv_fail_memory() : EX_OK;
}

/* What policies take: a tensor of the dumps by its name, or the one of a file. */
static int open_extras(struct dkv_input *input)
{
    int code = dkv_dumps_init(&input->extra_files, DKV_EXTRA_ROLES);
    input->sources.files = input->dumps.files;
    input->sources.n_files = input->dumps.n_files;
    for (unsigned i = 0; code == EX_OK && i < DKV_EXTRA_ROLES; i++) {
        const char *name = input->extras[i];
        if (name == NULL || !dkv_names_npy(name)) {
            input->sources.names[i] = name;
            continue;
        }
        const struct dkv_tensor_file *file = &input->extra_files.files[input->extra_files.n_files];
        code = dkv_dumps_add(&input->extra_files, name);
        if (code == EX_OK && (input->blocks.n_blocks != 1 || !is_npy(file))) {
            dkv_complain(is_npy(file) ? "%s: one array, and these are several blocks"
                                      : "%s: not an npy file",
                         name);
            code = is_npy(file) ? EX_USAGE : EX_DATAERR;
        }
        if (code == EX_OK)
            input->sources.tensors[i] = &file->index.tensors[0];
    }
    return code;
}

static int check_names(const struct dkv_input *input, const char **paths)
{
    const unsigned n = (input->query != NULL) + (input->key != NULL) + (input->value != NULL);
    if (n != 0 && n != 3) {
        dkv_complain("--query, --key and --value belong together: %u of 3 given", n);
        return EX_USAGE;
    }
    if (n == 3 && dkv_names_npy(input->query) && paths != NULL && paths[0] != NULL) {
        dkv_complain("--query %s names a file, so no dump may be named beside it", input->query);
        return EX_USAGE;
    }
    return EX_OK;
}

int dkv_input_open(struct dkv_input *input, const char **paths)
{
    const struct dkv_block_patterns patterns = {input->query, input->key, input->value};
    int code = check_names(input, paths);
    if (code != EX_OK)
        return code;
    code = input->query != NULL && dkv_names_npy(input->query)
               ? open_npy_block(input)
               : dkv_dumps_open(&input->dumps, "score", paths, &patterns, &input->blocks);
    return code == EX_OK ? open_extras(input) : code;
}

void dkv_input_fini(struct dkv_input *input)
{
    dkv_block_list_fini(&input->blocks);
    dkv_dumps_fini(&input->dumps);
    dkv_dumps_fini(&input->extra_files);
    free(input->query);
    free(input->key);
    free(input->value);
    for (unsigned i = 0; i < DKV_EXTRA_ROLES; i++)
        free(input->extras[i]);
    free(input->raw_dtype);
}
