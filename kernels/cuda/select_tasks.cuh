/* Tasks of selection, made by the host: what is selected by one crew, and what its kernel is told.
 * Included by select_plan.cu. */
#ifndef DKV_KERNELS_CUDA_SELECT_TASKS_CUH
#define DKV_KERNELS_CUDA_SELECT_TASKS_CUH

#include "kernels/cuda/select_any.cuh"
#include "kernels/cuda/select_plan.cuh"

namespace
{

/* What is selected by one crew. */
struct subject {
    const dkv_cu_unit *unit;     /* or NULL, and then */
    const dkv_cu_choice *choice; /* its head, or all of them */
    uint32_t head;
    uint32_t n;    /* tokens, or chunks of all heads */
    bool has_keys; /* that need no shared memory */
};

/* Chunks before token t of a head, but for those before the head's first token. */
uint32_t unit_of(const dkv_cu_choice &choice, uint32_t t)
{
    return choice.chunk == 1
               ? t
               : (choice.first_index + t) / choice.chunk - choice.first_index / choice.chunk;
}

/* Chunks of a head, in whole fours. */
uint32_t row_of(const dkv_cu_choice &choice)
{
    return (unit_of(choice, choice.n - 1) + 4) & ~3u;
}

bool is_joint(const dkv_cu_choice &choice)
{
    return choice.mode == DKV_HEADS_GLOBAL;
}

uint32_t log2_of(uint32_t size)
{
    uint32_t log_size = 0;
    while (size >> (log_size + 1))
        log_size++;
    return log_size;
}

/* Tasks whose keys select_plain_keys() makes. */
void find_plain(select_task &t)
{
    t.plain = select_not_plain;
    t.has_edges = t.keeps_protected = 0;
    if (t.mask || t.scores_out || t.lone_key != ~0u)
        return;
    switch (t.kernel) {
    case 1: t.plain = t.average ? select_not_plain : select_unpooled; break;
    case 5: t.plain = t.average ? select_mean_of_5 : select_max_of_5; break;
    case 7: t.plain = t.average ? select_mean_of_7 : select_max_of_7; break;
    case 11: t.plain = t.average ? select_mean_of_11 : select_max_of_11; break;
    default: break;
    }
    if (t.plain == select_not_plain)
        return;
    if (t.scope_begin > t.protected_end || t.scope_end < t.protected_begin)
        return;
    const uint32_t is_protected = t.protected_end + (t.n - t.protected_begin);
    const uint32_t behind = t.n - t.scope_end;
    t.has_edges = t.scope_begin + behind > 0 && t.scope_begin <= select_outside &&
                  behind <= select_outside;
    t.keeps_protected = (t.two_stages ? t.keep / 2 : t.keep) >= is_protected;
}

select_task task_of(const dkv_cu_block &block, const dkv_cu_unit &unit)
{
    select_task t = {};
    t.scores = unit.scores;
    t.mask = unit.mask;
    t.exponent = unit.exponent;
    t.scores_out = unit.scores_out;
    t.keep_out = unit.keep_out;
    t.keys = unit.keys;
    t.heads = 1;
    t.n = block.n_valid;
    t.window = block.window;
    t.keep = block.keep;
    t.first_index = block.valid_from;
    t.protected_end = block.sinks;
    t.protected_begin = block.n_valid - block.recent;
    t.lone_key = block.window == block.n_valid ? 0 : ~0u;
    t.scope_begin = block.pool_prefix ? block.sinks : 0;
    t.scope_end = block.pool_prefix ? t.protected_begin : t.n;
    t.kernel = block.pool == DKV_POOL_NONE ? 1 : block.kernel;
    t.average = block.pool == DKV_POOL_AVG;
    find_plain(t);
    return t;
}

select_task task_of(const dkv_cu_choice &choice, uint32_t head)
{
    const size_t row = static_cast<size_t>(head) * choice.stride;
    const uint32_t protect = choice.sinks + choice.recent;
    select_task t = {};
    t.scores = choice.raw + row;
    t.exponent = choice.exponents + head;
    t.heads = choice.one_set ? choice.heads : 1;
    if (choice.one_set) {
        t.rows = choice.raw;
        t.stride = choice.stride;
        t.scores = choice.pool == DKV_POOL_NONE ? choice.raw : choice.pooled;
    }
    t.weight = choice.weight ? choice.weight + static_cast<size_t>(head) * choice.n : nullptr;
    t.two_stages = choice.two_stages;
    t.keep = choice.keep >= choice.n ? choice.n : choice.keep > protect ? choice.keep : protect;
    t.counts_out = choice.counts_out + head;
    t.keep_out = choice.keep_out + static_cast<size_t>(head) * t.keep;
    t.n = choice.n;
    t.window = choice.window;
    t.first_index = choice.first_index;
    t.protected_end = choice.sinks;
    t.protected_begin = choice.n - choice.recent;
    t.lone_key = ~0u;
    t.scope_begin = choice.scope_begin;
    t.scope_end = choice.scope_end;
    t.kernel = choice.pool == DKV_POOL_NONE ? 1 : choice.kernel;
    t.average = choice.pool == DKV_POOL_AVG;
    find_plain(t);
    return t;
}

/* The plain units of a task: select_any_four() has their form, and their windows are whole. */
void find_plain(const dkv_cu_choice &choice, select_any_task &t)
{
    const uint32_t half = t.kernel / 2;
    uint32_t begin = t.protected_end;
    uint32_t end = t.protected_begin;
    bool has = choice.chunk == 1 &&
               (t.kernel == 1 || t.kernel == 5 || t.kernel == 7 || t.kernel == 11);
    if (choice.chunk == 4 && t.kernel == 1 && choice.first_index % 4 == 0) {
        has = true;
        end = end < t.n / 4 ? end : t.n / 4;
    } else if (t.kernel > 1) {
        begin = begin > t.scope_begin + half ? begin : t.scope_begin + half;
        end = end + half < t.scope_end ? end : t.scope_end > half ? t.scope_end - half : 0;
    }
    begin = (begin + 3) & ~3u;
    end &= ~3u;
    t.plain_begin = has && begin < end ? begin : 0;
    t.plain_end = has && begin < end ? end : 0;
}

/* The first digit: how finely it tells scores apart, and where it begins, if that is known before
 * there are scores. Sums of a chunk are larger by its size. */
void find_window(const dkv_cu_choice &choice, select_any_task &t)
{
    switch (choice.range) {
    case DKV_CU_RANGE_POSITIVE: t.shift = 0, t.below = 0, t.base = 0; break;
    case DKV_CU_RANGE_NORM: t.shift = 16, t.below = select_bins, t.base = -3; break;
    case DKV_CU_RANGE_ANGLE: t.shift = 17, t.below = select_bins / 2, t.base = -15; break;
    default: t.shift = 19, t.below = select_bins / 2, t.base = -44; break;
    }
    t.base += static_cast<int>(log2_of(choice.chunk));
}

select_any_task any_task_of(const dkv_cu_choice &choice, uint32_t head)
{
    const uint32_t protect = choice.sinks + choice.recent;
    const uint32_t more = choice.keep > protect ? (choice.keep - protect) / choice.chunk : 0;
    const bool all = choice.keep >= choice.n;
    const uint32_t tokens = all ? choice.n : protect + more * choice.chunk; /* kept of a head */
    select_any_task t = {};
    t.scores = choice.raw + static_cast<size_t>(head) * choice.stride;
    t.exponents = choice.no_factor ? nullptr : choice.exponents + head;
    t.keep_out = choice.keep_out + static_cast<size_t>(head) * tokens;
    t.ends_out = choice.counts_out + head;
    t.heads = is_joint(choice) ? choice.heads : 1;
    t.stride = choice.stride;
    t.n = choice.n;
    t.chunk = choice.chunk;
    t.units = unit_of(choice, choice.n - 1) + 1;
    t.row = row_of(choice);
    t.protected_end = choice.sinks > 0 ? unit_of(choice, choice.sinks - 1) + 1 : 0;
    t.protected_begin = choice.recent > 0 ? unit_of(choice, choice.n - choice.recent) : t.units;
    t.keep = t.heads * (all ? t.units : t.protected_end + (t.units - t.protected_begin) + more);
    t.capacity = is_joint(choice) ? choice.capacity : tokens;
    t.first_index = choice.first_index;
    t.scope_begin = choice.scope_begin;
    t.scope_end = choice.scope_end;
    t.kernel = choice.pool == DKV_POOL_NONE ? 1 : choice.kernel;
    find_plain(choice, t);
    find_window(choice, t);
    return t;
}

} // namespace

#endif
