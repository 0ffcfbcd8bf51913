/* Checks the scorers that use the tensor cores against float64 on the device, then times them
 * beside a plain read of the same bytes.
 *
 *   bench_fast [check|time|all] [substring of a case's name] [launches that a check compares, 2]
 *              [scorer]
 *
 * check_fast_shaken is the same with a scorer whose threads are now and then late on purpose
 * (may_be_late() in kernels/cuda/fast_ptx.cuh): it finds hand-overs that rely on being quick.
 *
 * It drives a scorer through the table the engine uses (kernels/cuda/plan.h): the first that takes
 * the case, or the one that is named, which skips what it does not take. Each case has fresh random
 * data, outputs poisoned before each check, and buffers that rotate through more than the L2 cache.
 * Times are medians of event-timed launches, microseconds. Exit: 0 good, 1 wrong, 77 no device.
 */
#include <string.h>

#include "tests/bench/bench_fast.cuh"

using namespace bench_fast;

namespace
{

/* Reads every byte once, nothing else. */
__global__ void read_once(const uint4 *from, size_t n, unsigned *out)
{
    unsigned sum = 0;
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
         i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int u = 0; u < 8; u++)
            v[u] = i + u * stride < n ? __ldcs(from + i + u * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < 8; u++)
            sum ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    if (sum == 0x12345678u)
        *out = sum;
}

template <class F> float median_us(F work)
{
    cudaEvent_t start;
    cudaEvent_t stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < 25; i++) {
        const float us = work(i, start, stop);
        if (i >= 4)
            times.push_back(us);
    }
    std::sort(times.begin(), times.end());
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    return times[times.size() / 2];
}

float elapsed_us(cudaEvent_t start, cudaEvent_t stop)
{
    float ms;
    CHECK(cudaEventSynchronize(stop));
    CHECK(cudaEventElapsedTime(&ms, start, stop));
    return 1000.0f * ms;
}

void time_case(const shape_case &c, const struct dkv_cu_device *device,
               const struct dkv_cu_scorer *scorer)
{
    const size_t bytes = static_cast<size_t>(c.n) * c.kv_heads * c.dim * 2 * cache_bytes(c) *
                         c.blocks;
    const int sets = static_cast<int>(std::min<size_t>(16, std::max<size_t>(3, 400000000 / bytes)));
    std::vector<batch> batches(sets);
    for (int i = 0; i < sets; i++)
        make_batch(c, device, scorer, 1000 * i, &batches[i]);
    unsigned *out = batches[0].alloc<unsigned>(1);
    const float once = median_us([&](int i, cudaEvent_t start, cudaEvent_t stop) {
        const batch &b = batches[i % sets];
        CHECK(cudaEventRecord(start));
        read_once<<<132 * 8, 256>>>(reinterpret_cast<const uint4 *>(b.kv), b.kv_bytes / 16, out);
        CHECK(cudaEventRecord(stop));
        return elapsed_us(start, stop);
    });
    const float ours = median_us([&](int i, cudaEvent_t start, cudaEvent_t stop) {
        batch &b = batches[i % sets];
        upload_extra(&b);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaEventRecord(start));
        launch(device, &b);
        CHECK(cudaEventRecord(stop));
        return elapsed_us(start, stop);
    });
    printf("%-18s %-6s scores %7.1f us   read once %7.1f us   ratio %.2f\n", c.name, scorer->name,
           ours, once, ours / once);
    fflush(stdout);
}

} // namespace

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "all";
    const char *filter = argc > 2 ? argv[2] : "";
    const int launches = argc > 3 ? atoi(argv[3]) : 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
        printf("no CUDA device\n");
        return 77;
    }
    struct dkv_cu_device device;
    memset(&device, 0, sizeof(device));
    device.major = properties.major;
    device.minor = properties.minor;
    device.multiprocessors = properties.multiProcessorCount;
    device.shared_bytes_max = static_cast<int>(properties.sharedMemPerBlockOptin);
    CHECK(prepare_scorers(&device));
    const char *name = argc > 4 ? argv[4] : nullptr;
    bool good = true;
    for (const shape_case *each = cases; each < cases + n_cases; each++) {
        const shape_case &c = *each;
        const struct dkv_cu_scorer *scorer = scorer_of(c, &device, name);
        if (scorer && strstr(c.name, filter) && strcmp(what, "time") != 0)
            good &= check(c, &device, scorer, launches);
    }
    for (const shape_case *each = cases; each < cases + n_cases; each++) {
        const shape_case &c = *each;
        const struct dkv_cu_scorer *scorer = scorer_of(c, &device, name);
        if (scorer && strstr(c.name, filter) && c.timed && strcmp(what, "check") != 0)
            time_case(c, &device, scorer);
    }
    printf(good ? "all good\n" : "WRONG\n");
    return good ? 0 : 1;
}
