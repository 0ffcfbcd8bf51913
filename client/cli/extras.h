/* What some policies take beside query, key and value: token_weight, carry_in, external_scores and
 * value_metric, float32 tensors of a dump or of files of their own.
 *
 * Without a name of the caller's, PREFIXtoken_weight and so on belong to the block of that prefix,
 * and are looked for if the policy takes them: in the block's file, then in the others, so that a
 * dump can be completed by a second file. A caller's name is a tensor's, in which `{}` stands for
 * the block, or that of a .npy file where there is one block; what it names must exist.
 *
 * Owner   zero is none; fini() frees copies of tensors that lie unaligned in their file, so not
 *         before the request's answer.
 * Errors  INVALID and UNSUPPORTED naming the tensor, NOMEM.
 */
#ifndef DKV_CLIENT_CLI_EXTRAS_H
#define DKV_CLIENT_CLI_EXTRAS_H

#include "client/cli/blocks.h"
#include "proto/policy.h"

enum dkv_extra_role {
    DKV_ROLE_TOKEN_WEIGHT,
    DKV_ROLE_CARRY_IN,
    DKV_ROLE_EXTERNAL_SCORES,
    DKV_ROLE_VALUE_METRIC,
    DKV_EXTRA_ROLES
};

struct dkv_extras {
    float *copies[DKV_EXTRA_ROLES];
};

struct dkv_extra_sources {
    const struct dkv_tensor_file *files; /* where tensors are looked for by name */
    size_t n_files;
    const char *names[DKV_EXTRA_ROLES];                /* the caller's; NULL: PREFIXrole */
    const struct dkv_tensor *tensors[DKV_EXTRA_ROLES]; /* of .npy files, instead of names */
};

/* "token_weight" */
const char *dkv_extra_name(enum dkv_extra_role role);

/* Adds to a request that dkv_block_request() has made what there is for its block. `policy` is as
 * the caller says it; NULL: the default. An unknown one is the gate's to refuse. */
enum dkv_status dkv_extras_add(const struct dkv_extra_sources *sources,
                               const struct dkv_named_block *block, const char *policy,
                               struct dropkv_request *request, struct dkv_extras *extras_out,
                               struct dkv_error *err);
void dkv_extras_fini(struct dkv_extras *extras);

#endif
