/* Which tensors of which files belong together.
 *
 * Without patterns, any tensors of one file that share a prefix and end in query, key and value (or
 * in q, k and v behind a separator) are one block, named by the prefix; tensors that belong to no
 * block are ignored. With patterns, `{}` stands for whatever text makes all three names exist, and
 * is the block's name.
 *
 * Order   by file as given, then natural: layers.2 before layers.10.
 * Owner   the list owns its names; tensors belong to the files, which must outlive it.
 */
#ifndef DKV_CLIENT_CLI_BLOCKS_H
#define DKV_CLIENT_CLI_BLOCKS_H

#include "client/dropkv.h"
#include "client/tensor_file.h"

struct dkv_named_block {
    char *name; /* printable */
    const struct dkv_tensor *query;
    const struct dkv_tensor *key;
    const struct dkv_tensor *value;

    /* Where it is from; NULL and empty if it was not found by name. */
    const struct dkv_tensor_file *file;
    const char *prefix;   /* start of the tensors' names, or what `{}` stands for; not ended */
    size_t prefix_length; /* with the separator at its end */
    size_t text_length;   /* without it */
};

/* Zero is an empty list. */
struct dkv_block_list {
    struct dkv_named_block *blocks;
    size_t n_blocks;
};

/* Names or patterns given by the caller: all three, or all NULL. */
struct dkv_block_patterns {
    const char *query;
    const char *key;
    const char *value;
};

/* Errors  INVALID if there is no block, if two of a block's three tensors are there and the third
 *         is not, or if a pattern matches nothing; the text names them. */
enum dkv_status dkv_blocks_find(const struct dkv_tensor_file *files, size_t n_files,
                                const struct dkv_block_patterns *patterns,
                                struct dkv_block_list *list_out, struct dkv_error *err);
void dkv_block_list_fini(struct dkv_block_list *list);

/* Shapes and pointers of a request that scores this block: [batch][heads][tokens][dim], or without
 * the batch. Parameters are left alone. INVALID or UNSUPPORTED naming the tensor. */
enum dkv_status dkv_block_request(const struct dkv_named_block *block,
                                  struct dropkv_request *request_out, struct dkv_error *err);

/* Compares names as people count: runs of digits by their value, everything else by byte. */
int dkv_natural_order(const char *a, size_t a_length, const char *b, size_t b_length);

#endif
