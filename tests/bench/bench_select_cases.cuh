/* Units and choices of bench_select, made at random, and what they keep. Included by
 * bench_select.cu. */
#ifndef DKV_TESTS_BENCH_SELECT_CASES_CUH
#define DKV_TESTS_BENCH_SELECT_CASES_CUH

#include <algorithm>
#include <math.h>
#include <stdlib.h>
#include <vector>

#include "kernels/cuda/plan.h"
#include "kernels/select.h"

namespace
{

uint64_t state = 1;

uint32_t random_below(uint32_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((state >> 33) % n);
}

double random_unit(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state >> 11) * 0x1p-53;
}

/* What a unit's block asks for, and its scores. */
struct unit_case {
    struct dkv_cu_block block;
    std::vector<float> scores;
    std::vector<unsigned> mask; /* empty: none */
    int exponent;
    bool wants_scores;
};

float random_score(unsigned kind, float high)
{
    const double u = random_unit();
    switch (kind) {
    case 0: return static_cast<float>(u);
    case 1: return static_cast<float>(exp(170 * u - 85));
    case 2: return static_cast<float>(random_below(3));
    case 3: return 0;
    case 4: return random_below(50) == 0 ? 0x1p60f : static_cast<float>(u) * 0x1p-60f;
    case 5: return random_below(2) ? -0.0f : 0.0f;
    case 6: return static_cast<float>(1 + 1e-6 * u);
    case 7: return static_cast<float>(1 + random_below(40)) * high;
    default: /* close to what scorers write */
        return static_cast<float>(exp(sqrt(-2 * log(u + 1e-18)) * cos(6.2831853 * random_unit())));
    }
}

unit_case random_case(uint32_t longest)
{
    unit_case c = {};
    dkv_cu_block &b = c.block;
    const unsigned kind = random_below(14);
    const uint32_t n = 1 + random_below(random_below(3) ? longest : 300);
    b.n_valid = n;
    b.valid_from = random_below(2) ? random_below(1000) : 0;
    b.window = std::min(n, 1 + random_below(16));
    b.recent = random_below(5) ? b.window : random_below(n + 1);
    b.sinks = random_below(2) ? 0 : random_below(std::min(n - b.recent, 40u) + 1);
    b.pool = random_below(4) ? DKV_POOL_MAX : random_below(2) ? DKV_POOL_AVG : DKV_POOL_NONE;
    b.kernel = random_below(2) ? 11
                               : 1 + 2 * random_below(random_below(4) ? 8 : DKV_KERNEL_MAX / 2);
    b.pool_prefix = random_below(3) == 0;
    b.keep = 1 + (random_below(3) ? n / 20 : random_below(n));
    b.keep = std::min(b.keep, n);
    c.scores.resize(n);
    for (float &x : c.scores)
        x = random_score(kind, 0x1p-100f);
    c.exponent = static_cast<int>(random_below(80)) - 40;
    c.wants_scores = random_below(8) == 0;
    if (random_below(8) == 0) {
        c.mask.resize((n + 31) / 32);
        for (uint32_t i = 0; i < n; i++)
            if (random_below(random_below(2) ? 2 : 100) == 0) {
                c.mask[i / 32] |= 1u << (i % 32);
                c.scores[i] = 0;
            }
    }
    return c;
}

/* The key that is the only one some row sees, or n. */
uint32_t lone_key(const unit_case &c)
{
    const uint32_t n = c.block.n_valid;
    uint32_t first = n;
    for (uint32_t i = 0; i < n; i++) {
        if (!c.mask.empty() && (c.mask[i / 32] >> (i % 32) & 1))
            continue;
        if (first != n)
            return i > n - c.block.window ? first : n;
        first = i;
    }
    return first;
}

std::vector<int32_t> expected(const unit_case &c)
{
    const dkv_cu_block &b = c.block;
    struct dkv_select_spec spec = {};
    spec.pool = static_cast<enum dkv_pool>(b.pool);
    spec.scope = b.pool_prefix ? DKV_POOL_SCOPE_PREFIX : DKV_POOL_SCOPE_ALL;
    spec.kernel = b.kernel;
    spec.n = b.n_valid;
    spec.sinks = b.sinks;
    spec.recent = b.recent;
    spec.keep = b.keep;
    spec.first_index = static_cast<int32_t>(b.valid_from);
    std::vector<uint8_t> flags(b.n_valid);
    for (uint32_t i = 0; i < b.n_valid; i++)
        if (!c.mask.empty() && (c.mask[i / 32] >> (i % 32) & 1))
            flags[i] = DKV_TOKEN_LOWEST;
    const uint32_t lone = lone_key(c);
    if (lone < b.n_valid)
        flags[lone] |= DKV_TOKEN_PROTECTED;
    std::vector<int32_t> keep(b.keep);
    void *scratch = aligned_alloc(64, (dkv_select_scratch_bytes() + 63) / 64 * 64);
    dkv_select(&spec, c.scores.data(), flags.data(), scratch, keep.data());
    free(scratch);
    return keep;
}

/* A simple choice (plan.h): the mean of all heads, or two stages, or each head as it is. */
struct choice_case {
    struct dkv_cu_choice choice; /* pointers are filled in by build() */
    std::vector<float> raw;      /* [heads][stride] */
    std::vector<float> weight;   /* [heads][n], or empty */
    std::vector<int> exponents;  /* [heads] */
};

choice_case random_choice(uint32_t longest)
{
    choice_case c = {};
    struct dkv_cu_choice &choice = c.choice;
    const unsigned kind = random_below(14);
    const unsigned form = random_below(3);
    choice.simple = DKV_CU_SIMPLE_PLAIN;
    choice.chunk = 1;
    choice.heads = 1 + random_below(9);
    choice.n = 20 + random_below(longest);
    choice.stride = (choice.n + 3) & ~3u;
    choice.first_index = random_below(100);
    choice.recent = random_below(20);
    choice.sinks = random_below(choice.n - choice.recent < 8 ? 1 : 8);
    choice.keep = 1 + random_below(random_below(3) ? choice.n / 10 : choice.n);
    choice.one_set = form == 0;
    choice.two_stages = form == 1;
    choice.pool = random_below(2) ? DKV_POOL_MAX : DKV_POOL_NONE;
    choice.kernel = random_below(2) ? 7 : 1 + 2 * random_below(8);
    const bool prefix = random_below(2) != 0;
    choice.scope_begin = prefix ? choice.sinks : 0;
    choice.scope_end = prefix ? choice.n - choice.recent : choice.n;
    c.raw.resize(static_cast<size_t>(choice.heads) * choice.stride);
    for (float &x : c.raw)
        x = std::min(random_score(kind, 0x1p-100f), 1e30f);
    if (choice.two_stages && random_below(2)) {
        c.weight.resize(static_cast<size_t>(choice.heads) * choice.n);
        for (float &x : c.weight)
            x = random_below(9) ? static_cast<float>(random_unit()) : 0.0f;
    }
    for (uint32_t h = 0; h < choice.heads; h++)
        c.exponents.push_back(choice.one_set ? static_cast<int>(random_below(4)) : 0);
    return c;
}

/* A token's place in a stage. */
struct place {
    unsigned token_class;
    float pooled, raw;
    uint32_t index;
};

bool comes_first(const place &a, const place &b)
{
    if (a.token_class != b.token_class)
        return a.token_class > b.token_class;
    if (a.pooled != b.pooled)
        return a.pooled > b.pooled;
    return a.raw != b.raw ? a.raw > b.raw : a.index < b.index;
}

/* What a head keeps, by the words of plan.h and kernels/choose.h. */
std::vector<int32_t> expected(const choice_case &c, uint32_t head)
{
    const struct dkv_cu_choice &choice = c.choice;
    const uint32_t n = choice.n, protect = choice.sinks + choice.recent;
    const uint32_t keep = choice.keep >= n ? n : std::max(choice.keep, protect);
    std::vector<float> raw(c.raw.begin() + static_cast<size_t>(head) * choice.stride,
                           c.raw.begin() + static_cast<size_t>(head) * choice.stride + n);
    if (choice.one_set) {
        const int least = *std::min_element(c.exponents.begin(), c.exponents.end());
        for (uint32_t i = 0; i < n; i++) {
            double sum = 0;
            for (uint32_t h = 0; h < choice.heads; h++) {
                const float factor = ldexpf(1.0f, least - c.exponents[h]);
                sum += c.raw[static_cast<size_t>(h) * choice.stride + i] * factor * factor;
            }
            raw[i] = static_cast<float>(sum / choice.heads);
        }
    }
    std::vector<place> tokens;
    const int half = static_cast<int>(choice.kernel / 2);
    for (int i = 0; i < static_cast<int>(n); i++) {
        const int begin = static_cast<int>(choice.scope_begin),
                  end = static_cast<int>(choice.scope_end);
        float pooled = raw[i];
        if (choice.pool == DKV_POOL_MAX && i >= begin && i < end)
            for (int at = std::max(begin, i - half); at < std::min(end, i + half + 1); at++)
                pooled = std::max(pooled, raw[at]);
        const bool safe = i < static_cast<int>(choice.sinks) ||
                          i >= static_cast<int>(n - choice.recent);
        tokens.push_back({safe ? 2u : 1u, pooled, raw[i], static_cast<uint32_t>(i)});
    }
    std::sort(tokens.begin(), tokens.end(), comes_first);
    if (choice.two_stages) {
        for (uint32_t i = 0; i < keep / 2; i++)
            tokens[i].token_class = 2;
        for (place &t : tokens) {
            const float weight = c.weight.empty()
                                     ? 1.0f
                                     : c.weight[static_cast<size_t>(head) * n + t.index];
            t.pooled = t.raw = (t.pooled + 1e-4f) * weight;
        }
        std::sort(tokens.begin(), tokens.end(), comes_first);
    }
    std::vector<int32_t> kept;
    for (uint32_t i = 0; i < keep; i++)
        kept.push_back(static_cast<int32_t>(tokens[i].index + choice.first_index));
    std::sort(kept.begin(), kept.end());
    return kept;
}

} // namespace

#endif
