/* Keys of selection where scores may have any sign, come in chunks, or are of several heads at
 * once.
 *
 * What is selected is units: tokens, or chunks of them, whose score is the sum of their tokens'
 * pooled ones. Several heads are joined to one row of units, each head's padded to whole fours. A
 * unit's place in the order is three numbers:
 *
 *   key      32 bits: of a candidate its pooled score as an integer that orders alike, for which
 *            finite floats leave enough at both ends: padding is 0, protected units are all ones.
 *            They are kept whatever they score (plan.h: simple), so they may tie.
 *   raw      the raw score, likewise
 *   index    low ones first, and among those of several heads the lower head
 *
 * Outside the scope of pooling there is nothing, as -inf would be: windows end there. Included by
 * select_any.cu and select_plan.cu.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_ANY_CUH
#define DKV_KERNELS_CUDA_SELECT_ANY_CUH

#include "kernels/cuda/select_keys.cuh"

/* Made by the host, as a select_task. */
struct select_any_task {
    const float *scores;  /* [heads][stride], as scorers leave them */
    const int *exponents; /* [heads] of their factors; NULL: all 0 */
    int32_t *keep_out;    /* [capacity] */
    uint32_t *ends_out;   /* [heads]: how many tokens are kept up to the end of each */
    uint32_t *keys;       /* NULL: shared memory */
    uint32_t heads;
    uint32_t stride;
    uint32_t n; /* tokens of a head */
    uint32_t chunk;
    uint32_t units; /* of a head */
    uint32_t row;   /* the same, whole fours */
    uint32_t keep;  /* units, of all heads */
    uint32_t capacity;
    uint32_t first_index;
    uint32_t protected_end;   /* units before it, */
    uint32_t protected_begin; /* or from here on, of each head, are protected */
    uint32_t scope_begin;     /* of pooling, in tokens */
    uint32_t scope_end;
    uint32_t kernel;      /* 1: no pooling */
    uint32_t plain_begin; /* units of which select_any_four() makes keys, whole fours */
    uint32_t plain_end;
    int32_t shift;    /* of the first digit; 0: that and the next two by a sample */
    int32_t below;    /* its bins for scores below 0 */
    int32_t base;     /* its window begins at this power of two; once scores are there, in bins */
    int32_t exponent; /* the unit of all scores, known after scoring */
};

constexpr unsigned select_protected = ~0u;

/* Floats as integers that order alike; -0 is 0. */
__device__ __forceinline__ unsigned select_ordered(float x)
{
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

/* ---- where a unit is ---- */

struct select_unit {
    uint32_t head;
    uint32_t index;
};

__device__ inline select_unit select_unit_at(const select_any_task &t, uint32_t i)
{
    const uint32_t head = t.heads == 1 ? 0 : i / t.row;
    return {head, i - head * t.row};
}

__device__ inline uint32_t select_order(const select_any_task &t, uint32_t i)
{
    const select_unit unit = select_unit_at(t, i);
    return unit.index * t.heads + unit.head;
}

__device__ inline uint32_t select_token_of(const select_any_task &t, uint32_t order)
{
    return t.heads == 1 ? order : order % t.heads * t.row + order / t.heads;
}

/* A unit's tokens, begin .. end-1. */
struct select_tokens_of {
    uint32_t begin;
    uint32_t end;
};

__device__ inline select_tokens_of select_chunk(const select_any_task &t, uint32_t unit)
{
    if (t.chunk == 1)
        return {unit, unit + 1};
    const uint32_t first = t.first_index / t.chunk + unit; /* from stored token 0 */
    return {unit == 0 ? 0 : first * t.chunk - t.first_index,
            min(t.n, (first + 1) * t.chunk - t.first_index)};
}

/* ---- scores ---- */

/* What brings a head's scores to the unit of all, applied twice. */
__device__ inline float select_factor(const select_any_task &t, uint32_t head)
{
    return t.exponents && t.heads > 1 ? ldexpf(1.0f, t.exponent - t.exponents[head]) : 1.0f;
}

__device__ inline float select_pooled(const select_any_task &t, const float *scores, uint32_t token)
{
    float best = scores[token];
    if (t.kernel == 1 || token < t.scope_begin || token >= t.scope_end)
        return best;
    const uint32_t half = t.kernel / 2;
    const uint32_t begin = token > t.scope_begin + half ? token - half : t.scope_begin;
    const uint32_t end = min(token + half + 1, t.scope_end);
    for (uint32_t i = begin; i < end; i++)
        best = fmaxf(best, scores[i]);
    return best;
}

/* A unit's pooled score, or its raw one, as an integer. */
static __device__ __noinline__ unsigned select_score(const select_any_task &t, select_unit unit,
                                                     bool pooled)
{
    const float *scores = t.scores + static_cast<size_t>(unit.head) * t.stride;
    const float factor = select_factor(t, unit.head);
    const select_tokens_of tokens = select_chunk(t, unit.index);
    double sum = 0;
    for (uint32_t i = tokens.begin; i < tokens.end; i++)
        sum += (pooled ? select_pooled(t, scores, i) : scores[i]) * factor * factor;
    return select_ordered(static_cast<float>(sum));
}

__device__ inline unsigned select_raw_of(const select_any_task &t, uint32_t i)
{
    return select_score(t, select_unit_at(t, i), false);
}

__device__ inline unsigned select_listed_raw(const select_any_task &t, const select_part &,
                                             uint32_t i)
{
    return select_raw_of(t, i);
}

__device__ inline constexpr bool select_has_second(const select_any_task &)
{
    return false;
}

__device__ inline constexpr unsigned long long select_second(const select_any_task &, uint32_t)
{
    return 0;
}

/* ---- the first digit ---- */

/* Bins of equal parts of octaves on both sides of 0: those `below` go down from 0, the others up.
 * Next to 0 and at both ends are bins that have what is outside the window. */
__device__ inline int select_first_shift(const select_any_task &t)
{
    return t.shift;
}

__device__ inline unsigned select_window_bin(const select_any_task &t, unsigned key)
{
    const bool is_below = !(key >> 31);
    const unsigned size = (is_below ? ~key : key) & 0x7fffffffu;
    const int most = (is_below ? t.below : select_bins - t.below) - 1;
    const int bin = min(max(static_cast<int>(size >> t.shift) - t.base, 0), most);
    return static_cast<unsigned>(is_below ? t.below - 1 - bin : t.below + bin);
}

__device__ inline bool select_is_end(const select_any_task &t, unsigned bin)
{
    const int at = static_cast<int>(bin);
    return at == 0 || at == select_bins - 1 || at == t.below || at == t.below - 1;
}

__device__ inline unsigned select_lowest_in(const select_any_task &t, unsigned bin)
{
    const int at = static_cast<int>(bin);
    return at < t.below ? 0x80000000u - (static_cast<unsigned>(t.below - at + t.base) << t.shift)
                        : 0x80000000u + (static_cast<unsigned>(at - t.below + t.base) << t.shift);
}

/* ---- keys ---- */

/* The key of any unit. */
__device__ inline unsigned select_any_key(const select_any_task &t, select_unit unit)
{
    if (unit.index >= t.units)
        return 0;
    if (unit.index < t.protected_end || unit.index >= t.protected_begin)
        return select_protected;
    return select_score(t, unit, true);
}

/* What select_any_four() has: kernels of tokens, and chunks of four. */
enum select_any_form { select_by_4 = 4 };

/* Keys of the four units from `unit` on, between plain_begin and plain_end. */
template <int form>
__device__ __forceinline__ uint4 select_any_four(const select_any_task &t, const float *scores,
                                                 uint32_t unit, float factor)
{
    float4 four;
    if constexpr (form == select_by_4) {
        const float4 *from = reinterpret_cast<const float4 *>(scores) + unit;
        const auto sum = [&](const float4 &x) {
            return static_cast<float>(((static_cast<double>(x.x * factor * factor) +
                                        static_cast<double>(x.y * factor * factor)) +
                                       static_cast<double>(x.z * factor * factor)) +
                                      static_cast<double>(x.w * factor * factor));
        };
        four = {sum(from[0]), sum(from[1]), sum(from[2]), sum(from[3])};
    } else {
        four = select_max_of_four<form>(scores + unit - form / 2);
        four = {four.x * factor * factor, four.y * factor * factor, four.z * factor * factor,
                four.w * factor * factor};
    }
    return {select_ordered(four.x), select_ordered(four.y), select_ordered(four.z),
            select_ordered(four.w)};
}

#endif
