/* Helpers that fill views. */
#include "proto/block.h"

struct dkv_view dkv_view_dense(const void *base, uint64_t bytes, enum dkv_dtype dtype,
                               uint64_t tokens, uint64_t dim)
{
    const uint64_t row_bytes = dim * dkv_dtype_bytes(dtype);
    return (struct dkv_view){
        .base = base,
        .bytes = bytes,
        .token_stride = (int64_t)row_bytes,
        .head_stride = (int64_t)(row_bytes * tokens),
        .dtype = dtype,
    };
}
