/* Host side of selection: how many thread blocks each unit gets, the seats, the launch.
 *
 * A unit is spread over as many blocks as keeps their shares near a number of tokens that is the
 * smallest for which all blocks of the wave run at once. So the longest unit of a mixed batch does
 * not hold up the rest, and a lone one has the device to itself. Units of chosen blocks (plan.h)
 * have no seats.
 */
#include "kernels/cuda/select_plan.cuh"

namespace
{

constexpr uint32_t alone_tokens = 4096; /* up to which a second block would only cost time */
constexpr uint32_t least_share = 2048;
constexpr uint32_t most_share = 16384;  /* above it more blocks than run at once are better */
constexpr uint32_t crowd_tokens = 2048; /* up to which few threads do, if units are many */
constexpr uint32_t least_pool = 1024;
constexpr uint32_t most_pool = 8192;

struct shape {
    uint32_t share;   /* tokens a block, at most where crews can be large enough */
    uint32_t cluster; /* the largest crew */
    uint32_t n_seats;
    uint32_t threads;
    uint32_t pool_tokens;
    size_t shared_bytes;
};

size_t shared_bytes_of(uint32_t cluster, uint32_t pool_tokens, uint32_t key_tokens)
{
    return sizeof(select_state) + (cluster > 1 ? sizeof(select_exchange) : 0) +
           (pool_tokens + DKV_KERNEL_MAX + 1) * sizeof(float) + key_tokens * sizeof(uint32_t);
}

/* Keys that fit into one block's shared memory. */
uint32_t shared_tokens(const dkv_cu_device *device)
{
    const size_t fixed = shared_bytes_of(select_crew_max, least_pool, 0);
    return static_cast<uint32_t>((device->shared_bytes_max - fixed) / sizeof(uint32_t)) & ~31u;
}

const dkv_cu_block &block_of(const dkv_cu_wave *wave, uint32_t unit)
{
    return wave->blocks_host[wave->units_host[unit].block];
}

bool is_chosen(const dkv_cu_wave *wave, uint32_t unit)
{
    return block_of(wave, unit).chosen != 0;
}

uint32_t log2_of(uint32_t size)
{
    uint32_t log_size = 0;
    while (size >> (log_size + 1))
        log_size++;
    return log_size;
}

/* A power of two, so that crews fit together in clusters. */
uint32_t crew_size(uint32_t n, uint32_t share, uint32_t largest)
{
    uint32_t size = 1;
    while (n > alone_tokens && size < largest && select_share(n, log2_of(size)) > share)
        size *= 2;
    return size;
}

/* Seats of all units, whole clusters of them. */
uint32_t count_seats(const dkv_cu_device *device, const dkv_cu_wave *wave, uint32_t share,
                     uint32_t *cluster_out)
{
    uint32_t seats = 0;
    uint32_t cluster = 1;
    for (uint32_t u = 0; u < wave->n_units; u++) {
        if (is_chosen(wave, u))
            continue;
        const uint32_t size = crew_size(block_of(wave, u).n_valid, share, device->cluster_max);
        cluster = size > cluster ? size : cluster;
        seats += size;
    }
    *cluster_out = cluster;
    return (seats + cluster - 1) / cluster * cluster;
}

shape shape_of(const dkv_cu_device *device, const dkv_cu_wave *wave)
{
    shape s = {least_share, 1, 0, select_threads, least_pool, 0};
    const uint32_t at_once = 2 * static_cast<uint32_t>(device->multiprocessors);
    s.n_seats = count_seats(device, wave, s.share, &s.cluster);
    while (s.share < most_share && s.n_seats > at_once && s.n_seats > wave->n_units) {
        s.share *= 2;
        s.n_seats = count_seats(device, wave, s.share, &s.cluster);
    }
    uint32_t longest = 0; /* unit */
    uint32_t tokens = 0;  /* of a block */
    uint32_t keys = 0;
    for (uint32_t u = 0; u < wave->n_units; u++) {
        if (is_chosen(wave, u))
            continue;
        const uint32_t n = block_of(wave, u).n_valid;
        const uint32_t share = select_share(n, log2_of(crew_size(n, s.share, device->cluster_max)));
        longest = n > longest ? n : longest;
        tokens = share > tokens ? share : tokens;
        if (!wave->units_host[u].keys && share > keys)
            keys = share;
    }
    while (s.pool_tokens < tokens && s.pool_tokens < most_pool &&
           shared_bytes_of(s.cluster, 2 * s.pool_tokens, keys) <=
               static_cast<size_t>(device->shared_bytes_max / 2 - 1024)) /* two fit */
        s.pool_tokens *= 2;
    if (s.cluster == 1 && longest <= crowd_tokens && wave->n_units > at_once)
        s.threads = select_crowd_threads;
    s.shared_bytes = shared_bytes_of(s.cluster, s.pool_tokens, keys);
    return s;
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
    t.plain_begin = t.scope_begin > t.protected_end ? t.scope_begin : t.protected_end;
    const bool plain = !t.average && t.kernel == 11 && !t.mask && !t.scores_out &&
                       t.lone_key == ~0u;
    t.plain_end = !plain ? 0 : t.scope_end < t.protected_begin ? t.scope_end : t.protected_begin;
    return t;
}

/* `attributes` has room for two. */
cudaLaunchConfig_t launch_config(const shape &s, bool may_start_early,
                                 cudaLaunchAttribute *attributes)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(s.n_seats);
    config.blockDim = dim3(s.threads);
    config.dynamicSmemBytes = s.shared_bytes;
    config.attrs = attributes;
    if (s.cluster > 1) {
        cudaLaunchAttribute &cluster = attributes[config.numAttrs++];
        cluster = {};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {s.cluster, 1, 1};
    }
    if (may_start_early) {
        cudaLaunchAttribute &early = attributes[config.numAttrs++];
        early = {};
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
    }
    return config;
}

/* Raises a kernel's limits. */
cudaError_t prepare_kernel(const dkv_cu_device *device, const void *kernel,
                           cudaFuncAttributes *attributes)
{
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device->shared_bytes_max);
    return error == cudaSuccess ? cudaFuncGetAttributes(attributes, kernel) : error;
}

} // namespace

extern "C" cudaError_t dkv_cu_select_prepare(struct dkv_cu_device *device)
{
    cudaFuncAttributes attributes = {};
    const void *with_crews = select_kernel(select_threads, true);
    cudaError_t error = prepare_kernel(device, select_kernel(select_crowd_threads, false),
                                       &attributes);
    if (error == cudaSuccess)
        error = prepare_kernel(device, select_kernel(select_threads, false), &attributes);
    if (error == cudaSuccess)
        error = prepare_kernel(device, with_crews, &attributes);
    device->cluster_max = 1;
    if (error != cudaSuccess || attributes.ptxVersion < 90) /* code without clusters */
        return error;
    device->waits_for_scores = true;
    error = cudaFuncSetAttribute(with_crews, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    for (uint32_t size = select_crew_max; error == cudaSuccess && size > 1; size /= 2) {
        int fit = 0;
        const shape largest = {0,          size,
                               size,       select_threads,
                               least_pool, static_cast<size_t>(device->shared_bytes_max)};
        cudaLaunchAttribute room[2];
        const cudaLaunchConfig_t config = launch_config(largest, false, room);
        if (cudaOccupancyMaxActiveClusters(&fit, with_crews, &config) == cudaSuccess && fit > 0) {
            device->cluster_max = size;
            break;
        }
        (void)cudaGetLastError(); /* this size is not for this device */
    }
    return error;
}

extern "C" bool dkv_cu_select_needs_keys(const struct dkv_cu_device *device, uint32_t n_valid)
{
    return select_share(n_valid, log2_of(device->cluster_max)) > shared_tokens(device);
}

extern "C" size_t dkv_cu_select_extra_bytes(const struct dkv_cu_device *device,
                                            const struct dkv_cu_wave *wave)
{
    return sizeof(select_task) * wave->n_units +
           sizeof(select_seat) * shape_of(device, wave).n_seats;
}

/* Tasks, then seats. The largest crews first: each then begins at a multiple of its size, and short
 * units fill up. */
extern "C" void dkv_cu_select_fill(const struct dkv_cu_device *device,
                                   const struct dkv_cu_wave *wave, void *extra)
{
    const shape s = shape_of(device, wave);
    select_task *tasks = static_cast<select_task *>(extra);
    select_seat *seats = reinterpret_cast<select_seat *>(tasks + wave->n_units);
    uint32_t at = 0;
    for (uint32_t u = 0; u < wave->n_units; u++)
        tasks[u] = task_of(block_of(wave, u), wave->units_host[u]);
    for (uint32_t size = s.cluster; size > 0; size /= 2)
        for (uint32_t u = 0; u < wave->n_units; u++) {
            if (is_chosen(wave, u) ||
                crew_size(block_of(wave, u).n_valid, s.share, device->cluster_max) != size)
                continue;
            for (uint32_t rank = 0; rank < size; rank++)
                seats[at++] = {u, static_cast<uint16_t>(rank), static_cast<uint16_t>(size)};
        }
    while (at < s.n_seats)
        seats[at++] = {0, 0, 0};
}

extern "C" cudaError_t dkv_cu_select_launch(const struct dkv_cu_device *device,
                                            const struct dkv_cu_wave *wave, const void *,
                                            const void *extra_device, cudaStream_t stream)
{
    shape s = shape_of(device, wave);
    if (s.n_seats == 0)
        return cudaSuccess;
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = launch_config(s, device->waits_for_scores, attributes);
    config.stream = stream;
    const select_task *tasks = static_cast<const select_task *>(extra_device);
    const select_seat *seats = reinterpret_cast<const select_seat *>(tasks + wave->n_units);
    void *arguments[] = {&tasks, &seats, &s.cluster, &s.pool_tokens};
    return cudaLaunchKernelExC(&config, select_kernel(s.threads, s.cluster > 1), arguments);
}
