/* Hand-overs through shared memory, each alone in a kernel: what racecheck can and cannot see.
 *
 * The scorers hand tiles, logits and descriptors from warp to warp by mbarriers, copies and
 * counters. racecheck reports some orders as races that are none. Here each kind stands by itself,
 * made of the same functions, between two warps (or two thread blocks of a cluster) that do nothing
 * else: a kind that is reported here is reported in a scorer, too, and says nothing there.
 * `no_order` is a race; if that is not reported, the tool did not look.
 *
 * usage: race_patterns [PATTERN | names]; runs every pattern, or one, and compares what arrives;
 * names lists them. racecheck tells no kernels apart, so give it one pattern at a time. Exit 77
 * without a device of compute capability 9.0.
 */
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/fast_ptx.cuh"

using namespace dkv_fast;

namespace
{

constexpr int WORDS = 128; /* handed over in a turn: four for each lane */
constexpr int TURNS = 64;
constexpr int BLOCKS = 8;

struct hand_over {
    __align__(16) uint32_t words[WORDS];
    unsigned long long full;
    unsigned long long empty;
    unsigned long long relay;
};

struct pattern_args {
    const uint32_t *from; /* [TURNS][WORDS] */
    unsigned *counters; /* [BLOCKS] of words that were written, [BLOCKS] of words that were read */
    unsigned *wrong;    /* words that were not what the turn's should be */
};

__device__ void begin(hand_over &at, uint32_t full, uint32_t empty)
{
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&at.full), full);
        mbarrier_init(shared_address(&at.empty), empty);
        mbarrier_init(shared_address(&at.relay), 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

/* What a lane writes in a turn, and what it checks: another lane's. */
__device__ uint32_t word_of(const pattern_args &args, int turn, int word)
{
    return args.from[turn * WORDS + word];
}

__device__ void write_words(hand_over &at, const pattern_args &args, int turn, int lane)
{
    for (int i = lane; i < WORDS; i += 32)
        at.words[i] = word_of(args, turn, i);
}

__device__ void check_words(const hand_over &at, const pattern_args &args, int turn, int lane)
{
    for (int i = WORDS - 1 - lane; i >= 0; i -= 32) {
        if (at.words[i] != word_of(args, turn, i))
            atomicAdd(args.wrong, 1);
    }
}

__device__ void give_back_by_all(hand_over &at)
{
    mbarrier_arrive(shared_address(&at.empty));
}

__device__ void await(unsigned long long &barrier, int turn)
{
    mbarrier_wait(shared_address(&barrier), turn & 1);
}

/* ---- one kernel for each kind; warp 0 writes, warp 1 reads ---- */

/* How the writer says that a turn's words are there. */
struct every_lane {
    static constexpr uint32_t ARRIVALS = 32;
    static __device__ void arrive(unsigned long long &barrier, int)
    {
        mbarrier_arrive(shared_address(&barrier));
    }
};
struct one_lane {
    static constexpr uint32_t ARRIVALS = 1;
    static __device__ void arrive(unsigned long long &barrier, int lane)
    {
        __syncwarp();
        if (lane == 0)
            mbarrier_arrive(shared_address(&barrier));
    }
};

/* What the writer does in a turn, up to its arrival. */
template <class arrival> struct stores {
    static constexpr uint32_t ARRIVALS = arrival::ARRIVALS;
    static __device__ void write(hand_over &at, const pattern_args &args, int turn, int lane)
    {
        write_words(at, args, turn, lane);
        arrival::arrive(at.full, lane);
    }
};
struct copies {
    static constexpr uint32_t ARRIVALS = 32;
    static __device__ void write(hand_over &at, const pattern_args &args, int turn, int lane)
    {
        /* Through an instruction that the compiler leaves alone: see begin() of warp_copies. */
        const uint32_t to = __shfl_sync(~0u, shared_address(&at.words[4 * lane]), lane);
        copy_16(to, args.from + turn * WORDS + 4 * lane, true, policy_normal());
        mbarrier_arrive_after_copies(shared_address(&at.full));
    }
};
struct a_bulk_copy {
    static constexpr uint32_t ARRIVALS = 1;
    static __device__ void write(hand_over &at, const pattern_args &args, int turn, int lane)
    {
        if (lane == 0) {
            mbarrier_arrive_expecting(shared_address(&at.full), sizeof(at.words));
            copy_bulk(shared_address(at.words), args.from + turn * WORDS, sizeof(at.words),
                      shared_address(&at.full));
        }
        __syncwarp();
    }
};

/* From one warp to another and back: `there` writes and says so, `back` says that all is read. */
template <class there, class back> __global__ void from_warp_to_warp(const pattern_args args)
{
    __shared__ hand_over at;
    begin(at, there::ARRIVALS, back::ARRIVALS);
    const int lane = threadIdx.x & 31;
    for (int turn = 0; turn < TURNS; turn++) {
        if (threadIdx.x < 32) {
            await(at.empty, turn + 1);
            there::write(at, args, turn, lane);
        } else if (threadIdx.x < 64) {
            await(at.full, turn);
            check_words(at, args, turn, lane);
            back::arrive(at.empty, lane);
        }
    }
}

/* The reader learns from a third warp, which has waited for the writer. */
__global__ void a_third_warp_relays(const pattern_args args)
{
    __shared__ hand_over at;
    begin(at, 32, 32);
    const int lane = threadIdx.x & 31;
    for (int turn = 0; turn < TURNS; turn++) {
        if (threadIdx.x < 32) {
            await(at.empty, turn + 1);
            write_words(at, args, turn, lane);
            mbarrier_arrive(shared_address(&at.full));
        } else if (threadIdx.x < 64) {
            await(at.relay, turn);
            check_words(at, args, turn, lane);
            give_back_by_all(at);
        } else {
            await(at.full, turn);
            if (lane == 0)
                mbarrier_arrive(shared_address(&at.relay));
        }
    }
}

/* A barrier of some of the block's warps. */
__global__ void a_named_barrier(const pattern_args args)
{
    __shared__ hand_over at;
    begin(at, 1, 1);
    const int lane = threadIdx.x & 31;
    if (threadIdx.x >= 64)
        return;
    for (int turn = 0; turn < TURNS; turn++) {
        if (threadIdx.x < 32)
            write_words(at, args, turn, lane);
        asm volatile("bar.sync 1, 64;" ::: "memory");
        if (threadIdx.x >= 32)
            check_words(at, args, turn, lane);
        asm volatile("bar.sync 1, 64;" ::: "memory");
    }
}

__device__ void count(unsigned *counter)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        __threadfence();
        atomicAdd(counter, 1);
    }
}

__device__ void await_count(const unsigned *counter, unsigned n)
{
    while (*static_cast<const volatile unsigned *>(counter) < n)
        __nanosleep(20);
    __threadfence();
    __syncwarp();
}

/* Counters in global memory. */
__global__ void a_global_counter(const pattern_args args)
{
    __shared__ hand_over at;
    begin(at, 1, 1);
    const int lane = threadIdx.x & 31;
    unsigned *written = args.counters + blockIdx.x;
    unsigned *read = args.counters + BLOCKS + blockIdx.x;
    for (int turn = 0; turn < TURNS; turn++) {
        if (threadIdx.x < 32) {
            await_count(read, turn);
            write_words(at, args, turn, lane);
            count(written);
        } else if (threadIdx.x < 64) {
            await_count(written, turn + 1);
            check_words(at, args, turn, lane);
            count(read);
        }
    }
}

__device__ uint32_t address_in(uint32_t rank, uint32_t address)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

/* Stores to another thread block of the cluster, counted by its barrier; the other one answers by
 * the same way, which is what gives the place back. */
__global__ void __cluster_dims__(2, 1, 1) stores_to_another_block(const pattern_args args)
{
    __shared__ hand_over at;
    begin(at, 1, 1);
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    const int lane = threadIdx.x & 31;
    const uint32_t other = (blockIdx.x & 1) ^ 1;
    for (int turn = 0; turn < TURNS && threadIdx.x < 32; turn++) {
        if (lane == 0)
            mbarrier_arrive_expecting(shared_address(&at.full), sizeof(at.words));
        __syncwarp();
        for (int i = lane; i < WORDS; i += 32)
            asm volatile(
                "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                    address_in(other, shared_address(&at.words[i]))),
                "r"(word_of(args, turn, i)), "r"(address_in(other, shared_address(&at.full)))
                : "memory");
        await(at.full, turn);
        check_words(at, args, turn, lane);
        /* Both have read before either writes again. */
        asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
    }
    for (int turn = 0; turn < TURNS && threadIdx.x >= 32; turn++)
        asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/* Nothing orders the writer and the reader: the race that has to be reported. What arrives is not
 * compared. */
__global__ void no_order(const pattern_args args)
{
    __shared__ hand_over at;
    begin(at, 1, 1);
    const int lane = threadIdx.x & 31;
    if (threadIdx.x < 32)
        write_words(at, args, 0, lane);
    else if (at.words[WORDS - 1 - lane] == args.from[0])
        args.counters[0] = 1;
}

struct pattern {
    const char *name;
    void (*kernel)(pattern_args);
};

const pattern patterns[] = {
    {"every_lane_arrives", from_warp_to_warp<stores<every_lane>, every_lane>},
    {"one_lane_arrives", from_warp_to_warp<stores<one_lane>, every_lane>},
    {"one_lane_gives_back", from_warp_to_warp<stores<every_lane>, one_lane>},
    {"copies_arrive", from_warp_to_warp<copies, every_lane>},
    {"a_bulk_copy_arrives", from_warp_to_warp<a_bulk_copy, every_lane>},
    {"a_third_warp_relays", a_third_warp_relays},
    {"a_named_barrier", a_named_barrier},
    {"a_global_counter", a_global_counter},
    {"stores_to_another_block", stores_to_another_block},
    {"no_order", no_order},
};

bool failed(cudaError_t error, const char *what)
{
    if (error != cudaSuccess)
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    return error != cudaSuccess;
}

/* Words that were wrong, or -1. */
long run(const pattern &which, pattern_args args)
{
    unsigned wrong = 0;
    if (failed(cudaMemset(args.counters, 0, (2 * BLOCKS + 1) * sizeof(unsigned)), "memset"))
        return -1;
    which.kernel<<<BLOCKS, 96>>>(args);
    if (failed(cudaGetLastError(), which.name) || failed(cudaDeviceSynchronize(), which.name) ||
        failed(cudaMemcpy(&wrong, args.wrong, sizeof(wrong), cudaMemcpyDeviceToHost), which.name))
        return -1;
    return wrong;
}

} // namespace

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "names") == 0) {
        for (const pattern &which : patterns)
            puts(which.name);
        return 0;
    }
    cudaDeviceProp device;
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9)
        return 77;
    static uint32_t words[TURNS * WORDS];
    for (uint32_t i = 0; i < TURNS * WORDS; i++)
        words[i] = i * 2654435761u + 1;
    uint32_t *from = nullptr;
    pattern_args args = {};
    if (failed(cudaMalloc(&from, sizeof(words)), "malloc") ||
        failed(cudaMemcpy(from, words, sizeof(words), cudaMemcpyHostToDevice), "copy") ||
        failed(cudaMalloc(&args.counters, (2 * BLOCKS + 1) * sizeof(unsigned)), "malloc"))
        return 1;
    args.from = from;
    args.wrong = args.counters + 2 * BLOCKS;
    int result = argc > 1 ? 64 : 0; /* no such pattern */
    for (const pattern &which : patterns) {
        if (argc > 1 && strcmp(argv[1], which.name) != 0)
            continue;
        const long wrong = run(which, args);
        printf("%s: %ld wrong\n", which.name, wrong);
        if (wrong != 0)
            result = 1;
        else if (result == 64)
            result = 0;
    }
    return result;
}
