/* Choices of bench_select that are selected with scores of any sign, in chunks, and of the best of
 * all heads: made at random, and what they keep, by the words of plan.h and kernels/choose.h.
 * Included by bench_select.cu. */
#ifndef DKV_TESTS_BENCH_SELECT_ANY_CUH
#define DKV_TESTS_BENCH_SELECT_ANY_CUH

#include "tests/bench/bench_select_cases.cuh"

namespace
{

/* Rounds what is protected up to whole chunks, as proto/request_budget.c does. */
void protect_chunks(struct dkv_cu_choice &choice)
{
    const uint32_t first = choice.first_index, end = first + choice.n;
    const uint32_t chunk = choice.chunk;
    const uint32_t sinks_end = std::min((first + choice.sinks + chunk - 1) / chunk * chunk, end);
    const uint32_t recent_begin = std::max((end - choice.recent) / chunk * chunk, sinks_end);
    choice.sinks = sinks_end - first;
    choice.recent = end - recent_begin;
}

float random_signed(unsigned kind)
{
    const float sign = random_below(3) ? -1.0f : 1.0f;
    switch (kind) {
    case 14: return sign * static_cast<float>(random_below(100)) * 0x1p-149f;
    case 15: return -11.3f - 0.7f * static_cast<float>(random_unit());
    case 16: return sign * static_cast<float>(random_unit());
    case 17: return sign * 0x1p100f * static_cast<float>(1 + random_below(3));
    default: return sign * std::min(random_score(kind, 0x1p-100f), 1e30f);
    }
}

choice_case random_any(uint32_t longest)
{
    static const uint32_t chunks[] = {1, 1, 1, 4, 4, 16, 0};
    choice_case c = {};
    struct dkv_cu_choice &choice = c.choice;
    const unsigned kind = random_below(18);
    choice.simple = DKV_CU_SIMPLE_ANY;
    choice.heads = 1 + random_below(9);
    choice.n = 20 + random_below(longest);
    choice.stride = (choice.n + 3) & ~3u;
    choice.chunk = chunks[random_below(7)];
    choice.chunk = choice.chunk ? choice.chunk : 1 + random_below(9);
    choice.first_index = random_below(2) ? 4 * random_below(30) : random_below(100);
    choice.recent = random_below(2) ? random_below(20) : 0;
    choice.sinks = random_below(choice.n - choice.recent < 8 ? 1 : 8);
    if (choice.chunk > 1)
        protect_chunks(choice);
    choice.mode = choice.sinks + choice.recent > 0 && random_below(2) ? DKV_HEADS_GLOBAL
                                                                      : DKV_HEADS_UNIFORM;
    choice.keep = choice.sinks + choice.recent + choice.chunk +
                  random_below(random_below(3) ? choice.n / 10 : choice.n);
    choice.keep = std::min(choice.keep, choice.n);
    choice.pool = random_below(2) ? DKV_POOL_MAX : DKV_POOL_NONE;
    choice.kernel = random_below(2) ? 5 + 2 * random_below(4) : 1 + 2 * random_below(20);
    const bool prefix = random_below(2) != 0;
    choice.scope_begin = prefix ? choice.sinks : 0;
    choice.scope_end = prefix ? choice.n - choice.recent : choice.n;
    choice.range = random_below(4);
    choice.no_factor = random_below(2);
    choice.capacity = choice.heads * choice.n;
    c.raw.resize(static_cast<size_t>(choice.heads) * choice.stride);
    for (float &x : c.raw)
        x = random_signed(kind);
    for (uint32_t h = 0; h < choice.heads; h++)
        c.exponents.push_back(choice.no_factor ? 0 : static_cast<int>(random_below(4)));
    return c;
}

/* A head's units in no order; `index` is that of a unit, `head` is added by the caller. */
std::vector<place> units_of(const choice_case &c, uint32_t head, int exponent)
{
    const struct dkv_cu_choice &choice = c.choice;
    const float *from = c.raw.data() + static_cast<size_t>(head) * choice.stride;
    const float factor = ldexpf(1.0f, exponent - c.exponents[head]);
    std::vector<place> units;
    std::vector<double> sums, raw_sums;
    const uint32_t begin = choice.scope_begin, end = choice.scope_end;
    for (uint32_t i = 0; i < choice.n; i++) {
        const uint32_t unit = (choice.first_index + i) / choice.chunk -
                              choice.first_index / choice.chunk;
        const uint32_t half = choice.kernel / 2;
        float pooled = from[i];
        if (choice.pool == DKV_POOL_MAX && i >= begin && i < end)
            for (uint32_t at = i > begin + half ? i - half : begin;
                 at < std::min(i + half + 1, end); at++)
                pooled = std::max(pooled, from[at]);
        if (unit == units.size()) {
            units.push_back({1, 0, 0, unit});
            sums.push_back(0);
            raw_sums.push_back(0);
        }
        if (i < choice.sinks || i >= choice.n - choice.recent)
            units[unit].token_class = 2;
        sums[unit] += pooled * factor * factor;
        raw_sums[unit] += from[i] * factor * factor;
    }
    for (size_t u = 0; u < units.size(); u++) {
        units[u].pooled = static_cast<float>(sums[u]);
        units[u].raw = static_cast<float>(raw_sums[u]);
    }
    return units;
}

/* What each head keeps. */
std::vector<std::vector<int32_t>> expected_of_heads(const choice_case &c)
{
    const struct dkv_cu_choice &choice = c.choice;
    const bool joint = choice.mode == DKV_HEADS_GLOBAL;
    const uint32_t protect = choice.sinks + choice.recent;
    std::vector<std::vector<int32_t>> kept(choice.heads);
    const int least = *std::min_element(c.exponents.begin(), c.exponents.end());
    for (uint32_t first = 0; first < choice.heads; first += joint ? choice.heads : 1) {
        const uint32_t heads = joint ? choice.heads : 1;
        std::vector<place> all;
        size_t count = 0, safe = 0;
        for (uint32_t h = 0; h < heads; h++) {
            const std::vector<place> units = units_of(c, first + h,
                                                      joint ? least : c.exponents[first + h]);
            count = units.size();
            safe = 0;
            for (place u : units) {
                safe += u.token_class == 2;
                u.index = u.index * heads + h;
                all.push_back(u);
            }
        }
        const size_t each = choice.keep >= choice.n ? count
                                                    : safe + (choice.keep - protect) / choice.chunk;
        std::sort(all.begin(), all.end(), comes_first);
        all.resize(each * heads);
        for (const place &u : all) {
            const uint32_t chunk = choice.first_index / choice.chunk + u.index / heads;
            const uint32_t begin = std::max(chunk * choice.chunk, choice.first_index);
            const uint32_t end = std::min((chunk + 1) * choice.chunk,
                                          choice.first_index + choice.n);
            for (uint32_t i = begin; i < end; i++)
                kept[first + u.index % heads].push_back(static_cast<int32_t>(i));
        }
    }
    for (std::vector<int32_t> &of_head : kept)
        std::sort(of_head.begin(), of_head.end());
    return kept;
}

/* One layer whose heads are selected together, or scored with signs. */
choice_case layer_of(uint32_t n, uint32_t chunk, bool joint, enum dkv_cu_range range)
{
    choice_case c = {};
    struct dkv_cu_choice &choice = c.choice;
    choice.simple = DKV_CU_SIMPLE_ANY;
    choice.heads = 8;
    choice.n = choice.stride = choice.scope_end = n;
    choice.chunk = chunk;
    choice.recent = 8;
    choice.keep = n / 20;
    choice.mode = joint ? DKV_HEADS_GLOBAL : DKV_HEADS_UNIFORM;
    choice.pool = range == DKV_CU_RANGE_POSITIVE ? DKV_POOL_MAX : DKV_POOL_NONE;
    choice.kernel = 11;
    choice.range = range;
    choice.capacity = choice.heads * n;
    c.raw.resize(static_cast<size_t>(choice.heads) * n);
    for (float &x : c.raw) {
        const float normal = static_cast<float>(sqrt(-2 * log(random_unit() + 1e-18)) *
                                                cos(6.2831853 * random_unit()));
        x = range == DKV_CU_RANGE_NORM     ? -11.3f - 0.7f * normal
            : range == DKV_CU_RANGE_ANGLE  ? 0.09f * normal
            : range == DKV_CU_RANGE_SIGNED ? 0.01f * normal
                                           : 0x1p50f * expf(normal);
    }
    c.exponents.assign(choice.heads, range == DKV_CU_RANGE_POSITIVE ? 40 : 0);
    return c;
}

} // namespace

#endif
