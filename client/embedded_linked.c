/* The engines of a program that links them: dropkv-client and tests. */
#include "client/embedded.h"

enum dkv_status dkv_embedded_find(const char *device, const struct dkv_engine_ops **ops_out,
                                  int *ordinal_out, struct dkv_error *err)
{
    return dkv_engine_find(device, ops_out, ordinal_out, err);
}
