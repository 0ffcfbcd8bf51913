/* The merge of a stream scorer, a kernel between its passes. */
#ifndef DKV_KERNELS_CUDA_STREAM_MERGE_CUH
#define DKV_KERNELS_CUDA_STREAM_MERGE_CUH

#include "kernels/cuda/fast_merge.cuh"

namespace dkv_fast
{

/* Merges a slice of a row group: `slices` for each of its chunks, a thread block each.
 * partials_of(job): where the row group's partials are. `sides`: row groups of an item, which have
 * thread blocks of their own. */
template <class S, int slices, int sides = 1, class where>
__device__ __forceinline__ void merge_part(const dkv_stream_args &args, where partials_of)
{
    griddepcontrol_launch();
    __shared__ job work;
    __shared__ merge_room room;
    dkv_fast_item item = args.items[blockIdx.x / (slices * sides)];
    const int slice = item.chunk * slices + blockIdx.x % slices;
    if (sides > 1)
        item.row_group = item.row_group * sides + blockIdx.x / slices % sides;
    if (threadIdx.x < 32) {
        copy_words(work.unit, args.units + item.unit, threadIdx.x);
        copy_words(work.block, args.blocks + item.block, threadIdx.x);
        if (threadIdx.x == 0)
            work.item = item;
    }
    __syncthreads();
    if (threadIdx.x == 0 && slice == 0)
        *work.unit.exponent = DKV_CU_EXPONENT;
    griddepcontrol_wait();
    merge_slice<S>(room, work, partials_of(work), slice, item.chunks * slices, threadIdx.x);
}

} // namespace dkv_fast

#endif
