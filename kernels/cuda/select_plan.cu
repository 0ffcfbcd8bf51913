/* Host side of selection: how many thread blocks each unit gets, the seats, the launch.
 *
 * A unit is spread over as many blocks as keeps their shares near a number of tokens that is the
 * smallest for which all blocks of long units run at once; short ones come after them. So the
 * longest unit of a mixed batch does not hold up the rest, and a lone one has the device to itself.
 *
 * Units of chosen blocks (plan.h) have no seats. A simple choice is like so many units, one a head,
 * or like one if its heads are selected together.
 */
#include "kernels/cuda/select_tasks.cuh"

namespace
{

/* There are two kernels, one for tasks of each kind; what is selected by one is a launch. */
enum kind { kind_plain, kind_any, n_kinds };

size_t task_bytes(kind k)
{
    return k == kind_plain ? sizeof(select_task) : sizeof(select_any_task);
}

constexpr uint32_t alone_tokens = 4096; /* up to which a second block would only cost time */
constexpr uint32_t least_share = 2048;
constexpr uint32_t most_share = 16384;  /* above it more blocks than run at once are better */
constexpr uint32_t crowd_tokens = 2048; /* up to which few threads do, if units are many */
constexpr uint32_t least_pool = 2048;   /* as many as a turn of all threads takes */
constexpr uint32_t most_pool = 8192;
constexpr uint32_t most_listed = 1024;

struct shape {
    kind of;
    uint32_t share;   /* tokens a block, at most where crews can be large enough */
    uint32_t cluster; /* the largest crew */
    bool alike;       /* every unit has such a crew: there is no list of seats */
    uint32_t n_tasks;
    uint32_t n_seats;
    uint32_t threads;
    uint32_t pool_tokens;
    uint32_t listed;
    bool apart; /* each block has a multiprocessor to itself */
    size_t shared_bytes;
};

size_t shared_bytes_of(kind k, uint32_t cluster, uint32_t pool_tokens, uint32_t listed,
                       uint32_t key_tokens)
{
    const size_t state = k == kind_plain ? sizeof(select_state<select_task>)
                                         : sizeof(select_state<select_any_task>);
    const size_t pool = k == kind_plain ? (pool_tokens + DKV_KERNEL_MAX + 1) * sizeof(float) : 0;
    return state + (cluster > 1 ? select_exchange_bytes(listed) : 0) + pool +
           key_tokens * sizeof(uint32_t);
}

/* Keys that fit into one block's shared memory. */
uint32_t shared_tokens(const dkv_cu_device *device)
{
    const size_t fixed = shared_bytes_of(kind_plain, select_crew_max, least_pool, most_listed, 0);
    return static_cast<uint32_t>((device->shared_bytes_max - fixed) / sizeof(uint32_t)) & ~31u;
}

const dkv_cu_block &block_of(const dkv_cu_wave *wave, const dkv_cu_unit &unit)
{
    return wave->blocks_host[unit.block];
}

/* Calls visit(subject) for all of a kind in the wave, in the order of their tasks. */
template <class function> void for_each_subject(const dkv_cu_wave *wave, kind k, function visit)
{
    for (uint32_t u = 0; k == kind_plain && u < wave->n_units; u++) {
        const dkv_cu_unit &unit = wave->units_host[u];
        const dkv_cu_block &block = block_of(wave, unit);
        if (!block.chosen)
            visit(subject{&unit, nullptr, 0, block.n_valid, unit.keys != nullptr});
    }
    for (uint32_t c = 0; c < wave->n_choices; c++) {
        const dkv_cu_choice &choice = wave->choices_host[c];
        const bool one = choice.one_set || is_joint(choice);
        if (choice.simple == DKV_CU_SIMPLE_PLAIN && k == kind_plain)
            for (uint32_t h = 0; h < (one ? 1 : choice.heads); h++)
                visit(subject{nullptr, &choice, h, choice.n, false});
        if (choice.simple == DKV_CU_SIMPLE_ANY && k == kind_any)
            for (uint32_t h = 0; h < (one ? 1 : choice.heads); h++)
                visit(subject{nullptr, &choice, h, row_of(choice) * (one ? choice.heads : 1),
                              choice.pooled != nullptr});
    }
}

/* A power of two, so that crews fit together in clusters. */
uint32_t crew_size(uint32_t n, uint32_t share, uint32_t largest)
{
    uint32_t size = 1;
    while (n > alone_tokens && size < largest && select_share(n, log2_of(size)) > share)
        size *= 2;
    return size;
}

/* Seats of all, whole clusters of them. */
struct seat_count {
    uint32_t subjects;
    uint32_t cluster; /* the largest crew */
    uint32_t seats;
    uint32_t seats_of_long; /* of those that can be spread */
};

seat_count count_seats(const dkv_cu_device *device, const dkv_cu_wave *wave, kind k, uint32_t share)
{
    seat_count count = {0, 1, 0, 0};
    for_each_subject(wave, k, [&](const subject &x) {
        const uint32_t size = crew_size(x.n, share, device->cluster_max);
        count.subjects++;
        count.cluster = size > count.cluster ? size : count.cluster;
        count.seats += size;
        count.seats_of_long += x.n > alone_tokens ? size : 0;
    });
    count.seats = (count.seats + count.cluster - 1) / count.cluster * count.cluster;
    return count;
}

/* Whether all blocks can run at once, each on a multiprocessor of its own. Two that share one take
 * nearly twice as long, since what bounds them is the fetching of instructions. */
bool fits_apart(const dkv_cu_device *device, const seat_count &count)
{
    return count.seats / count.cluster <= device->clusters_apart[log2_of(count.cluster)];
}

shape shape_of(const dkv_cu_device *device, const dkv_cu_wave *wave, kind k)
{
    shape s = {};
    s.of = k;
    s.share = least_share;
    s.threads = select_threads;
    s.pool_tokens = least_pool;
    s.listed = most_listed;
    const uint32_t at_once = 2 * static_cast<uint32_t>(device->multiprocessors);
    seat_count count = count_seats(device, wave, k, s.share);
    while (s.share < most_share && count.seats_of_long > at_once && count.seats > count.subjects) {
        s.share *= 2;
        count = count_seats(device, wave, k, s.share);
    }
    if (s.share == least_share && !fits_apart(device, count)) {
        const seat_count fewer = count_seats(device, wave, k, 2 * least_share);
        if (fits_apart(device, fewer)) {
            s.share = 2 * least_share;
            count = fewer;
        }
    }
    s.apart = fits_apart(device, count);
    s.n_tasks = count.subjects;
    s.n_seats = count.seats;
    s.cluster = count.cluster;
    uint32_t longest = 0; /* subject */
    uint32_t tokens = 0;  /* of a block */
    uint32_t keys = 0;
    uint32_t crews = 0; /* of the largest size */
    for_each_subject(wave, k, [&](const subject &x) {
        const uint32_t size = crew_size(x.n, s.share, device->cluster_max);
        const uint32_t share = select_share(x.n, log2_of(size));
        crews += size == s.cluster;
        longest = x.n > longest ? x.n : longest;
        tokens = share > tokens ? share : tokens;
        if (share > keys && !(x.has_keys && (k == kind_plain || share > shared_tokens(device))))
            keys = share;
    });
    /* Two blocks should fit: a cluster then needs fewer multiprocessors to fall free. */
    const size_t half = static_cast<size_t>(device->shared_bytes_max / 2 - 1024);
    if (shared_bytes_of(k, s.cluster, least_pool, s.listed, keys) > half)
        s.listed = select_least_listed;
    while (s.pool_tokens < tokens && s.pool_tokens < most_pool &&
           shared_bytes_of(k, s.cluster, s.pool_tokens + least_pool, s.listed, keys) <= half)
        s.pool_tokens += least_pool;
    s.alike = crews == s.n_tasks;
    if (k == kind_plain && s.cluster == 1 && longest <= crowd_tokens && s.n_tasks > at_once)
        s.threads = select_crowd_threads;
    s.shared_bytes = shared_bytes_of(k, s.cluster, s.pool_tokens, s.listed, keys);
    if (s.apart && s.shared_bytes <= half) /* so that no two fit */
        s.shared_bytes = half + 2048;
    return s;
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
    const void *any_with_crews = select_any_kernel(true);
    cudaError_t error = cudaSuccess;
    for (const void *kernel :
         {select_kernel(select_crowd_threads, false), select_kernel(select_threads, false),
          select_any_kernel(false), any_with_crews, with_crews})
        if (error == cudaSuccess)
            error = prepare_kernel(device, kernel, &attributes);
    device->cluster_max = 1;
    for (uint32_t &clusters : device->clusters_apart)
        clusters = 0;
    if (error != cudaSuccess || attributes.ptxVersion < 90) /* code without clusters */
        return error;
    device->waits_for_scores = true;
    for (const void *kernel : {with_crews, any_with_crews})
        if (error == cudaSuccess)
            error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    device->clusters_apart[0] = static_cast<uint32_t>(device->multiprocessors);
    static_assert(select_crew_max == 1 << (DKV_CU_CLUSTER_SIZES - 1), "room for all sizes");
    for (uint32_t size = select_crew_max; error == cudaSuccess && size > 1; size /= 2) {
        int fit = 0;
        shape largest = {}; /* has a multiprocessor to itself, too */
        largest.cluster = largest.n_seats = size;
        largest.threads = select_threads;
        largest.shared_bytes = static_cast<size_t>(device->shared_bytes_max);
        cudaLaunchAttribute room[2];
        const cudaLaunchConfig_t config = launch_config(largest, false, room);
        if (cudaOccupancyMaxActiveClusters(&fit, with_crews, &config) == cudaSuccess && fit > 0) {
            device->cluster_max = size > device->cluster_max ? size : device->cluster_max;
            device->clusters_apart[log2_of(size)] = static_cast<uint32_t>(fit);
        } else
            (void)cudaGetLastError(); /* this size is not for this device */
    }
    return error;
}

extern "C" bool dkv_cu_select_needs_keys(const struct dkv_cu_device *device, uint32_t n_valid)
{
    return select_share(n_valid, log2_of(device->cluster_max)) > shared_tokens(device);
}

namespace
{

/* Bytes of a kind's tasks and seats, whole sixteens. */
size_t extra_bytes_of(const shape &s)
{
    const size_t bytes = task_bytes(s.of) * s.n_tasks +
                         sizeof(select_seat) * (s.alike ? 0 : s.n_seats);
    return (bytes + 15) & ~size_t{15};
}

/* Where the seats are behind the tasks. */
template <class byte> byte *seats_of(const shape &s, byte *tasks)
{
    return tasks + task_bytes(s.of) * s.n_tasks;
}

/* The largest crews first: each then begins at a multiple of its size, and short units fill up. */
void fill_seats(const dkv_cu_device *device, const dkv_cu_wave *wave, const shape &s,
                select_seat *seats)
{
    uint32_t at = 0;
    for (uint32_t size = s.cluster; size > 0; size /= 2) {
        uint32_t task = 0;
        for_each_subject(wave, s.of, [&](const subject &x) {
            const bool now = crew_size(x.n, s.share, device->cluster_max) == size;
            for (uint32_t rank = 0; now && rank < size; rank++)
                seats[at++] = {task, static_cast<uint16_t>(rank), static_cast<uint16_t>(size)};
            task++;
        });
    }
    while (at < s.n_seats)
        seats[at++] = {0, 0, 0};
}

/* The task of a simple choice that is selected with any scores, which may lie in scratch. */
select_any_task any_task_for(const dkv_cu_device *device, const shape &s, const subject &x)
{
    select_any_task t = any_task_of(*x.choice, x.head);
    const uint32_t size = crew_size(x.n, s.share, device->cluster_max);
    if (x.has_keys && select_share(x.n, log2_of(size)) > shared_tokens(device))
        t.keys = reinterpret_cast<uint32_t *>(x.choice->pooled) +
                 static_cast<size_t>(x.head) * x.choice->stride;
    return t;
}

} // namespace

extern "C" size_t dkv_cu_select_extra_bytes(const struct dkv_cu_device *device,
                                            const struct dkv_cu_wave *wave)
{
    return extra_bytes_of(shape_of(device, wave, kind_plain)) +
           extra_bytes_of(shape_of(device, wave, kind_any));
}

/* Tasks, then seats, of each kind. */
extern "C" void dkv_cu_select_fill(const struct dkv_cu_device *device,
                                   const struct dkv_cu_wave *wave, void *extra)
{
    unsigned char *bytes = static_cast<unsigned char *>(extra);
    for (kind k : {kind_plain, kind_any}) {
        const shape s = shape_of(device, wave, k);
        uint32_t at = 0;
        for_each_subject(wave, k, [&](const subject &x) {
            if (k == kind_any)
                reinterpret_cast<select_any_task *>(bytes)[at++] = any_task_for(device, s, x);
            else
                reinterpret_cast<select_task *>(bytes)[at++] =
                    x.unit ? task_of(block_of(wave, *x.unit), *x.unit) : task_of(*x.choice, x.head);
        });
        if (!s.alike)
            fill_seats(device, wave, s, reinterpret_cast<select_seat *>(seats_of(s, bytes)));
        bytes += extra_bytes_of(s);
    }
}

extern "C" cudaError_t dkv_cu_select_launch(const struct dkv_cu_device *device,
                                            const struct dkv_cu_wave *wave, const void *,
                                            const void *extra_device, cudaStream_t stream)
{
    const unsigned char *tasks = static_cast<const unsigned char *>(extra_device);
    cudaError_t error = cudaSuccess;
    for (kind k : {kind_plain, kind_any}) {
        shape s = shape_of(device, wave, k);
        const unsigned char *seats = s.alike ? nullptr : seats_of(s, tasks);
        cudaLaunchAttribute attributes[2];
        cudaLaunchConfig_t config = launch_config(s, device->waits_for_scores, attributes);
        config.stream = stream;
        void *arguments[] = {&tasks, &seats, &s.cluster, &s.pool_tokens, &s.listed};
        if (error == cudaSuccess && s.n_seats > 0)
            error = cudaLaunchKernelExC(&config,
                                        k == kind_any ? select_any_kernel(s.cluster > 1)
                                                      : select_kernel(s.threads, s.cluster > 1),
                                        arguments);
        tasks += extra_bytes_of(s);
    }
    return error;
}
