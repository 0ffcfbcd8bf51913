/* A compiled set of the stream scorer's kernels, as the host side knows it. Each .cu file that
 * compiles some has a table of them.
 */
#ifndef DKV_KERNELS_CUDA_STREAM_VARIANT_CUH
#define DKV_KERNELS_CUDA_STREAM_VARIANT_CUH

#include <stddef.h>
#include <stdint.h>

struct dkv_stream_variant {
    uint32_t dtype; /* enum dkv_dtype */
    uint32_t head_dim;
    uint32_t rows; /* of a KV head that it takes at a time */
    const void *a;
    const void *merge;
    const void *b;
    size_t a_bytes; /* of shared memory */
    size_t b_bytes;
    size_t partial_bytes;
    size_t merged_bytes;
};

/* For up to 64 rows, fewest first: stream_few.cu. */
extern const struct dkv_stream_variant *const dkv_stream_few_variants;
extern const uint32_t dkv_stream_few_count;

#endif
