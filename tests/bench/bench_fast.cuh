/* What the parts of bench_fast share: cases, and a batch of a case in device memory. */
#ifndef DKV_TESTS_BENCH_BENCH_FAST_CUH
#define DKV_TESTS_BENCH_BENCH_FAST_CUH

#include <algorithm>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#include "kernels/cuda/device.cuh"

#define CHECK(call)                                                                \
    do {                                                                           \
        const cudaError_t error_ = (call);                                         \
        if (error_ != cudaSuccess) {                                               \
            printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
            fflush(stdout);                                                        \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

namespace bench_fast
{

enum layout { DENSE, PAGE16, PAGE1 };
enum pattern { FLAT, PEAKED, OFFSET, SINK, SAME_VALUES };

/* What is computed of rows. */
enum rule { DROPKV, RESTKV, RESTKV_MEAN, RESTKV_EMA, ANDPRO, ANDPRO_MEAN };

struct shape_case {
    const char *name;
    uint32_t n, q_heads, kv_heads, window, dim, blocks, dtype;
    enum layout layout;
    enum pattern pattern;
    float softcap;
    bool sink_logits;
    bool timed;
    enum rule rule;
};

extern const shape_case cases[];
extern const size_t n_cases;

/* One set of inputs and everything a launch of it needs. */
struct batch {
    const struct dkv_cu_scorer *scorer;
    struct dkv_cu_wave wave;
    std::vector<dkv_cu_block> blocks;
    std::vector<dkv_cu_unit> units;
    unsigned char *kv;
    size_t kv_bytes;
    uint16_t *q;
    unsigned char *extra;
    std::vector<unsigned char> extra_host;
    std::vector<void *> allocations;

    template <class T> T *alloc(size_t n)
    {
        void *p;
        CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
        allocations.push_back(p);
        return static_cast<T *>(p);
    }
    template <class T> T *upload(const std::vector<T> &from)
    {
        T *p = alloc<T>(from.size());
        CHECK(cudaMemcpy(p, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
        return p;
    }
    ~batch()
    {
        for (void *p : allocations)
            cudaFree(p);
    }
};

/* The first scorer that takes a case, or nullptr; by this name, if there is one. */
const struct dkv_cu_scorer *scorer_of(const shape_case &c, const struct dkv_cu_device *device,
                                      const char *name);
cudaError_t prepare_scorers(const struct dkv_cu_device *device);

uint32_t align_up(uint32_t x, uint32_t to);
uint32_t cache_bytes(const shape_case &c); /* of an element */

void make_batch(const shape_case &c, const struct dkv_cu_device *device,
                const struct dkv_cu_scorer *scorer, uint32_t seed, batch *b);
void upload_extra(batch *b);
void launch(const struct dkv_cu_device *device, batch *b);

/* Whether every score is what float64 makes of the same numbers, as near as docs/numerics.md wants
 * it, and the same in each of so many launches. */
bool check(const shape_case &c, const struct dkv_cu_device *device,
           const struct dkv_cu_scorer *scorer, int launches);

} // namespace bench_fast

#endif
