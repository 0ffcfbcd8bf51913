/* Selection on the device alone, against kernels/select.c, token by token, then timed.
 *
 *   bench_select check [launches, 200] [seed]
 *   bench_select time [runs, 21]
 *
 * `check`: waves of random units of every pooling, scope, class and distribution of scores, from
 * no ties at all to nothing else, and of the choices that selection does. `time`: behind a kernel
 * that fills the multiprocessors, reads through more than the L2 cache and then writes the scores,
 * as a scorer does; microseconds, medians:
 *
 *   before   that kernel alone       apart    selection, an event between the two
 *   more     what selection adds to `before`, as it is launched in the engine
 *
 * Exit: 0 good, 1 wrong, 77 no device.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <string>

#include "tests/bench/bench_select_any.cuh"

#define CHECK(call)                                                                \
    do {                                                                           \
        const cudaError_t error_ = (call);                                         \
        if (error_ != cudaSuccess) {                                               \
            printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
            fflush(stdout);                                                        \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

namespace
{

/* A wave of them on the device, and what it takes to launch selection. */
struct wave_case {
    std::vector<unit_case> cases;
    std::vector<choice_case> choice_cases;
    std::vector<dkv_cu_choice> choices;
    std::vector<dkv_cu_block> blocks;
    std::vector<dkv_cu_unit> units;
    struct dkv_cu_wave wave;
    std::vector<void *> owned;
    std::vector<unsigned char> extra;
    void *extra_device;
    size_t n_scores; /* of all units, one after the other in `scores` */
    float *scores;
    float *master; /* a copy of them */
};

template <class T> T *on_device(wave_case &w, const T *from, size_t n, size_t room)
{
    T *to;
    CHECK(cudaMalloc(reinterpret_cast<void **>(&to), std::max<size_t>(room, 1) * sizeof(T)));
    if (from)
        CHECK(cudaMemcpy(to, from, n * sizeof(T), cudaMemcpyHostToDevice));
    w.owned.push_back(to);
    return to;
}

void build(const struct dkv_cu_device *device, wave_case &w)
{
    w.n_scores = 0;
    for (const unit_case &c : w.cases)
        w.n_scores += (c.scores.size() + 3) & ~size_t{3};
    w.scores = on_device<float>(w, nullptr, 0, w.n_scores);
    w.master = on_device<float>(w, nullptr, 0, w.n_scores);
    size_t at = 0;
    for (size_t i = 0; i < w.cases.size(); i++) {
        const unit_case &c = w.cases[i];
        const uint32_t n = c.block.n_valid;
        dkv_cu_unit u = {};
        u.block = static_cast<uint32_t>(i);
        u.scores = w.scores + at;
        CHECK(
            cudaMemcpy(w.scores + at, c.scores.data(), n * sizeof(float), cudaMemcpyHostToDevice));
        at += (n + 3) & ~3u;
        if (!c.mask.empty())
            u.mask = on_device(w, c.mask.data(), c.mask.size(), c.mask.size());
        u.exponent = on_device(w, &c.exponent, 1, 1);
        u.keep_out = on_device<int32_t>(w, nullptr, 0, c.block.keep);
        CHECK(cudaMemset(u.keep_out, 0xa5, c.block.keep * sizeof(int32_t)));
        if (c.wants_scores)
            u.scores_out = on_device<float>(w, nullptr, 0, n);
        if (dkv_cu_select_needs_keys(device, n))
            u.keys = on_device<uint32_t>(w, nullptr, 0, n + 4);
        w.units.push_back(u);
        w.blocks.push_back(c.block);
    }
    for (const choice_case &c : w.choice_cases) {
        dkv_cu_choice choice = c.choice;
        choice.raw = on_device(w, c.raw.data(), c.raw.size(), c.raw.size());
        choice.pooled = on_device<float>(w, nullptr, 0, c.raw.size());
        choice.exponents = on_device(w, c.exponents.data(), c.exponents.size(), c.exponents.size());
        if (!c.weight.empty())
            choice.weight = on_device(w, c.weight.data(), c.weight.size(), c.weight.size());
        choice.counts_out = on_device<uint32_t>(w, nullptr, 0, choice.heads);
        choice.keep_out = on_device<int32_t>(w, nullptr, 0,
                                             static_cast<size_t>(choice.heads) * choice.n);
        w.choices.push_back(choice);
    }
    CHECK(cudaMemcpy(w.master, w.scores, w.n_scores * sizeof(float), cudaMemcpyDeviceToDevice));
    w.wave = {};
    w.wave.blocks_host = w.blocks.data();
    w.wave.units_host = w.units.data();
    w.wave.choices_host = w.choices.data();
    w.wave.n_choices = static_cast<uint32_t>(w.choices.size());
    w.wave.n_blocks = w.wave.n_units = static_cast<uint32_t>(w.units.size());
    w.extra.resize(dkv_cu_select_extra_bytes(device, &w.wave));
    dkv_cu_select_fill(device, &w.wave, w.extra.data());
    w.extra_device = on_device(w, w.extra.data(), w.extra.size(), w.extra.size());
}

void drop(wave_case &w)
{
    for (void *at : w.owned)
        CHECK(cudaFree(at));
}

void launch(const struct dkv_cu_device *device, const wave_case &w, cudaStream_t stream)
{
    CHECK(dkv_cu_select_launch(device, &w.wave, w.extra.data(), w.extra_device, stream));
}

/* ---- checking ---- */

unsigned wrong_units(const wave_case &w)
{
    unsigned wrong = 0;
    for (size_t i = 0; i < w.cases.size(); i++) {
        const unit_case &c = w.cases[i];
        const std::vector<int32_t> want = expected(c);
        std::vector<int32_t> got(want.size());
        CHECK(cudaMemcpy(got.data(), w.units[i].keep_out, got.size() * sizeof(int32_t),
                         cudaMemcpyDeviceToHost));
        bool same = want == got;
        if (c.wants_scores) {
            std::vector<float> scores(c.scores.size());
            CHECK(cudaMemcpy(scores.data(), w.units[i].scores_out, scores.size() * sizeof(float),
                             cudaMemcpyDeviceToHost));
            const float factor = ldexpf(1.0f, -c.exponent);
            for (size_t t = 0; t < scores.size(); t++)
                same = same && scores[t] == c.scores[t] * factor * factor;
        }
        if (same)
            continue;
        wrong++;
        size_t t = 0;
        while (t < got.size() && got[t] == want[t])
            t++;
        printf("unit %zu of %zu: n %u k %u pool %u kernel %u prefix %u sinks %u recent %u mask %d: "
               "kept[%zu] is %d, not %d\n",
               i, w.cases.size(), c.block.n_valid, c.block.keep, c.block.pool, c.block.kernel,
               c.block.pool_prefix, c.block.sinks, c.block.recent, !c.mask.empty(), t,
               t < got.size() ? got[t] : -1, t < want.size() ? want[t] : -1);
    }
    return wrong;
}

unsigned wrong_choices(const wave_case &w)
{
    unsigned wrong = 0;
    for (size_t i = 0; i < w.choices.size(); i++) {
        const dkv_cu_choice &choice = w.choices[i];
        const choice_case &c = w.choice_cases[i];
        const bool any = choice.simple == DKV_CU_SIMPLE_ANY;
        const bool joint = choice.mode == DKV_HEADS_GLOBAL;
        const std::vector<std::vector<int32_t>> of_heads =
            any ? expected_of_heads(c) : std::vector<std::vector<int32_t>>();
        size_t at = 0;
        for (uint32_t h = 0; h < choice.heads; h++) {
            const std::vector<int32_t> want = any ? of_heads[h]
                                                  : expected(c, choice.one_set ? 0 : h);
            std::vector<int32_t> got(want.size());
            uint32_t count;
            CHECK(cudaMemcpy(got.data(), choice.keep_out + at, got.size() * sizeof(int32_t),
                             cudaMemcpyDeviceToHost));
            CHECK(cudaMemcpy(&count, choice.counts_out + h, sizeof(count), cudaMemcpyDeviceToHost));
            at += want.size();
            if (got == want && count == (any && joint ? at : want.size()))
                continue;
            wrong++;
            printf("choice %zu head %u of %u: n %u from %u k %u pool %u kernel %u one set %u "
                   "stages %u any %d joint %d chunk %u range %u sinks %u recent %u: count %u, not "
                   "%zu, or its tokens\n",
                   i, h, choice.heads, choice.n, choice.first_index, choice.keep, choice.pool,
                   choice.kernel, choice.one_set, choice.two_stages, any, joint, choice.chunk,
                   choice.range, choice.sinks, choice.recent, count, want.size());
        }
    }
    return wrong;
}

int check(const struct dkv_cu_device *device, unsigned launches)
{
    unsigned wrong = 0, units = 0, choices = 0;
    for (unsigned i = 0; i < launches; i++) {
        wave_case w = {};
        const uint32_t longest = random_below(50) == 0  ? 1500000
                                 : random_below(4) == 0 ? 300000
                                 : random_below(2)      ? 20000
                                                        : 5000;
        const unsigned n = longest > 20000   ? 1 + random_below(8)
                           : random_below(8) ? 1 + random_below(40)
                                             : 300 + random_below(100);
        for (unsigned u = 0; u < n; u++)
            w.cases.push_back(random_case(n >= 300 ? 2000 : longest));
        for (unsigned c = random_below(3); c > 0; c--)
            w.choice_cases.push_back(random_below(3) ? random_any(std::min(longest, 140000u))
                                                     : random_choice(std::min(longest, 140000u)));
        build(device, w);
        launch(device, w, nullptr);
        CHECK(cudaDeviceSynchronize());
        wrong += wrong_units(w) + wrong_choices(w);
        units += n;
        choices += w.wave.n_choices;
        drop(w);
    }
    printf("%u units and %u choices in %u launches, %u wrong\n", units, choices, launches, wrong);
    return wrong > 0;
}

/* ---- timing ---- */

/* Reads `n` words, then writes the scores; a block a multiprocessor. */
__global__ void __launch_bounds__(512)
    pretend(const uint4 *data, size_t n, float4 *to, const float4 *from, size_t n_scores)
{
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    extern __shared__ uint32_t sums[];
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    uint32_t sum = 0;
#pragma unroll 8
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const uint4 x = data[i];
        sum ^= x.x ^ x.y ^ x.z ^ x.w;
    }
    sums[threadIdx.x] = sum;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n_scores; i += step)
        to[i] = from[i];
}

float median(std::vector<float> &x)
{
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

/* From one event to another behind it, with what `between` launches. */
template <class function> float timed(unsigned runs, cudaEvent_t *events, function between)
{
    std::vector<float> times;
    for (unsigned i = 0; i < runs + 2; i++) {
        between();
        CHECK(cudaDeviceSynchronize());
        float ms;
        CHECK(cudaEventElapsedTime(&ms, events[0], events[1]));
        if (i >= 2)
            times.push_back(1000 * ms);
    }
    return median(times);
}

void time_wave(const struct dkv_cu_device *device, const char *name, wave_case &w, unsigned runs);

void time_choice(const struct dkv_cu_device *device, const char *name, const choice_case &c,
                 unsigned runs)
{
    wave_case w = {};
    w.choice_cases.push_back(c);
    build(device, w);
    w.n_scores = c.raw.size();
    w.scores = w.choices[0].raw;
    w.master = on_device(w, c.raw.data(), c.raw.size(), c.raw.size());
    time_wave(device, name, w, runs);
}

/* `narrow`: means instead of maxima, of scores within half an octave, the last tokens not pooled.
 */
void time_case(const struct dkv_cu_device *device, const char *name,
               const std::vector<uint32_t> &lengths, unsigned runs, bool narrow = false)
{
    wave_case w = {};
    for (uint32_t n : lengths) {
        unit_case c = random_case(100);
        c.block.n_valid = n;
        c.block.valid_from = c.block.sinks = 0;
        c.block.pool_prefix = narrow;
        c.block.recent = c.block.window = 8;
        c.block.pool = narrow ? DKV_POOL_AVG : DKV_POOL_MAX;
        c.block.kernel = narrow ? 5 : 11;
        c.block.keep = n / 20;
        c.mask.clear();
        c.wants_scores = false;
        c.scores.resize(n);
        for (float &x : c.scores)
            x = 0x1p50f * (narrow ? 1 + 0.4f * random_score(0, 1) : random_score(8, 1));
        w.cases.push_back(c);
    }
    build(device, w);
    time_wave(device, name, w, runs);
}

void time_wave(const struct dkv_cu_device *device, const char *name, wave_case &w, unsigned runs)
{
    constexpr size_t bytes = size_t{256} << 20;
    constexpr uint32_t shared = 200 << 10;
    uint4 *data = on_device<uint4>(w, nullptr, 0, bytes / sizeof(uint4));
    CHECK(cudaMemset(data, 1, bytes));
    CHECK(cudaFuncSetAttribute(pretend, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    cudaEvent_t events[2];
    for (cudaEvent_t &event : events)
        CHECK(cudaEventCreate(&event));
    const auto before = [&](cudaStream_t stream) {
        pretend<<<128, 512, shared, stream>>>(
            data, bytes / sizeof(uint4), reinterpret_cast<float4 *>(w.scores),
            reinterpret_cast<const float4 *>(w.master), w.n_scores / 4);
    };
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    const float alone = timed(runs, events, [&] {
        CHECK(cudaEventRecord(events[0], stream));
        before(stream);
        CHECK(cudaEventRecord(events[1], stream));
    });
    const float both = timed(runs, events, [&] {
        CHECK(cudaEventRecord(events[0], stream));
        before(stream);
        launch(device, w, stream);
        CHECK(cudaEventRecord(events[1], stream));
    });
    const float apart = timed(runs, events, [&] {
        before(stream);
        CHECK(cudaEventRecord(events[0], stream));
        launch(device, w, stream);
        CHECK(cudaEventRecord(events[1], stream));
    });
    const unsigned wrong = wrong_units(w) + wrong_choices(w);
    printf("%-12s before %6.1f  apart %5.1f  more %5.1f%s\n", name, alone, apart, both - alone,
           wrong ? "  WRONG" : "");
    fflush(stdout);
    drop(w);
}

void time_all(const struct dkv_cu_device *device, unsigned runs)
{
    std::vector<uint32_t> mixed;
    for (uint32_t n : {1024, 2048, 4096, 1024, 8192, 2048, 16384, 4096, 1024, 32768, 8192, 65536})
        mixed.insert(mixed.end(), 16, n);
    time_case(device, "4K", std::vector<uint32_t>(8, 4096), runs);
    time_case(device, "16K", std::vector<uint32_t>(8, 16384), runs);
    time_case(device, "32K", std::vector<uint32_t>(8, 32768), runs);
    time_case(device, "64K", std::vector<uint32_t>(8, 65536), runs);
    time_case(device, "128K", std::vector<uint32_t>(8, 131072), runs);
    time_case(device, "4 x 128K", std::vector<uint32_t>(4, 131072), runs);
    time_case(device, "32 x 4K", std::vector<uint32_t>(256, 4096), runs);
    time_case(device, "128 x 1K", std::vector<uint32_t>(1024, 1024), runs);
    time_case(device, "mixed", mixed, runs);
    time_case(device, "4K narrow", std::vector<uint32_t>(8, 4096), runs, true);
    time_case(device, "32K narrow", std::vector<uint32_t>(8, 32768), runs, true);
    time_case(device, "128K narrow", std::vector<uint32_t>(8, 131072), runs, true);
    for (uint32_t k : {4, 32, 128}) {
        const uint32_t n = 1024 * k;
        const std::string of = std::to_string(k) + "K ";
        const auto time = [&](const char *what, const choice_case &c) {
            time_choice(device, (of + what).c_str(), c, runs);
        };
        time("norms", layer_of(n, 1, false, DKV_CU_RANGE_NORM));
        time("angles", layer_of(n, 1, false, DKV_CU_RANGE_ANGLE));
        time("global", layer_of(n, 1, true, DKV_CU_RANGE_POSITIVE));
        time("by 4, global", layer_of(n, 4, true, DKV_CU_RANGE_SIGNED));
    }
}

} // namespace

int main(int argc, char **argv)
{
    struct cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, 0) != cudaSuccess)
        return 77;
    struct dkv_cu_device device = {};
    device.major = properties.major;
    device.multiprocessors = properties.multiProcessorCount;
    device.shared_bytes_max = static_cast<int>(properties.sharedMemPerBlockOptin);
    CHECK(dkv_cu_select_prepare(&device));
    const int number = argc > 2 ? atoi(argv[2]) : 0;
    state = argc > 3 ? strtoull(argv[3], nullptr, 10) : 1;
    if (argc > 1 && strcmp(argv[1], "time") == 0) {
        time_all(&device, number > 0 ? static_cast<unsigned>(number) : 21);
        return 0;
    }
    return check(&device, number > 0 ? static_cast<unsigned>(number) : 200);
}
