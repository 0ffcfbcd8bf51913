/* The layers of a dump as one request, for budgets that are dealt to layers by what is in them
 * (layers=cake), and its answer as one answer for each layer.
 *
 * Owner   zero is empty; fini() frees copies, the answer and the layers' shares of it.
 * Errors  INVALID naming what differs between layers; NOMEM.
 */
#ifndef DKV_CLIENT_CLI_LAYERS_H
#define DKV_CLIENT_CLI_LAYERS_H

#include "client/cli/blocks.h"

struct dkv_layer_set {
    void *copies[3];              /* of query, key and value; NULL: read where they lie */
    struct dropkv_result *result; /* of all */
    struct dropkv_result *parts;  /* [blocks], pointing into it */
    int32_t *offsets;             /* of the parts */
};

/* Shapes and pointers of a request that scores all blocks, in their order. Tensors that lie at
 * equal distances, as a writer that sorts names leaves up to ten layers, are read where they lie;
 * others are copied. The blocks are of one sequence, one shape and one type each. Parameters are
 * left alone. */
enum dkv_status dkv_layers_request(const struct dkv_block_list *blocks,
                                   struct dropkv_request *request_out,
                                   struct dkv_layer_set *layers_out, struct dkv_error *err);

/* Takes the answer and divides it. */
enum dkv_status dkv_layers_divide(struct dkv_layer_set *layers, struct dropkv_result *take_result,
                                  struct dkv_error *err);

void dkv_layers_fini(struct dkv_layer_set *layers);

#endif
