/* Crews of selection: the thread blocks that work on one unit, and how they tell each other.
 *
 * A crew is 1, 2, 4, 8 or 16 adjacent blocks of a cluster; a cluster can hold several. Its blocks
 * never wait at a barrier of the cluster, but for bytes: each sends what the others need straight
 * into their shared memory (st.async), and the bytes that arrive complete a phase of an mbarrier
 * there. That is one trip where a barrier and a remote read are three, and it needs no fence.
 *
 * Nothing is overwritten that somebody still reads: a block sends its part of round r + 1 only
 * after it has everything of round r, which the others sent after they had read what they got
 * before. After the last exchange (crew_prefix) nothing is under way to a block that has returned
 * from it, so it may exit.
 *
 * Devices without clusters have crews of one, and none of this.
 */
#ifndef DKV_KERNELS_CUDA_SELECT_CREW_CUH
#define DKV_KERNELS_CUDA_SELECT_CREW_CUH

#include <stdint.h>

constexpr int select_log_threads = 9;
constexpr int select_threads = 1 << select_log_threads; /* of a block in a crew of several */
constexpr int select_bins = 4 * select_threads;
constexpr int select_ranked = 128; /* candidates that are ranked against each other */
constexpr int select_crew_max = 16;

struct select_crew {
    uint32_t size;
    uint32_t log_size; /* divisions by size are shifts */
    uint32_t rank;
    uint32_t first; /* rank of the crew's first block in the cluster */
};

/* A token in full, as it travels between blocks. */
struct alignas(16) select_candidate {
    unsigned long long second;
    unsigned key;
    unsigned raw;
    unsigned index;
    unsigned unused[3];
};

/* What the other blocks write to. */
struct alignas(16) select_mailbox {
    select_candidate ranked[select_ranked]; /* of the whole crew, in any order */
    unsigned n_ranked;                      /* of rank 0: room in `ranked` taken */
    unsigned counts[select_crew_max];
    unsigned long long slices_full, total_full, ranked_full, counts_full; /* mbarriers */
};

/* The same, where crews have several blocks. */
struct alignas(16) select_exchange {
    unsigned slices[select_bins + 4 * select_crew_max]; /* this block's bins, from every rank */
    union {
        unsigned total[select_bins];          /* the crew's histogram; after the last round */
        select_candidate mine[select_ranked]; /* this block's candidates */
    };
};

#if __CUDA_ARCH__ >= 900

__device__ inline uint32_t select_address(const void *shared)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

/* The same place in the block of another rank of the crew. */
__device__ inline uint32_t select_address_in(const select_crew &crew, uint32_t rank,
                                             const void *shared)
{
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(there)
        : "r"(select_address(shared)), "r"(crew.first + rank));
    return there;
}

__device__ inline void select_send(const select_crew &crew, uint32_t rank, const void *to,
                                   const uint4 &x, const unsigned long long *full)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(select_address_in(crew, rank, to)),
                 "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(select_address_in(crew, rank, full))
                 : "memory");
}

__device__ inline void select_send(const select_crew &crew, uint32_t rank, const void *to,
                                   unsigned x, const unsigned long long *full)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     select_address_in(crew, rank, to)),
                 "r"(x), "r"(select_address_in(crew, rank, full))
                 : "memory");
}

/* Says how many bytes complete the barrier's current phase; once a phase, by one thread. Bytes may
 * arrive before: the phase lasts until both are there. */
__device__ inline void select_expect(const unsigned long long *full, uint32_t bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(select_address(full)),
        "r"(bytes)
        : "memory");
}

__device__ inline void select_await(const unsigned long long *full, uint32_t parity)
{
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done;\n}"
                     : "=r"(done)
                     : "r"(select_address(full)), "r"(parity)
                     : "memory");
    } while (!done);
}

/* Once, before anything else, by every thread of a cluster that has more than one block. */
__device__ inline void crew_open(const select_crew &crew, select_mailbox &box)
{
    if (threadIdx.x == 0) {
        box.n_ranked = 0;
        for (const unsigned long long *full :
             {&box.slices_full, &box.total_full, &box.ranked_full, &box.counts_full})
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(select_address(full))
                         : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        select_expect(&box.slices_full, select_bins * sizeof(unsigned));
        select_expect(&box.total_full, select_bins * sizeof(unsigned));
        select_expect(&box.counts_full, crew.size * sizeof(unsigned));
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/* Then, before the first exchange: everybody's mailbox is open. */
__device__ inline void crew_meet(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Adds up the crew's histograms, of which each thread gives four bins, from 4 * mine_at on: first
 * each block its slice of the bins, then everybody all slices. Afterwards exchange.total is there.
 */
__device__ inline void crew_add_histograms(const select_crew &crew, select_mailbox &box,
                                           select_exchange &exchange, const uint4 &mine,
                                           uint32_t mine_at, uint32_t parity)
{
    const uint32_t fours = select_threads >> crew.log_size; /* of a slice */
    const uint32_t stride = 4 * fours + 4; /* so that ranks differ in their banks */
    const uint32_t owner = mine_at << crew.log_size >> select_log_threads;
    select_send(crew, owner, exchange.slices + crew.rank * stride + (mine_at & (fours - 1)) * 4,
                mine, &box.slices_full);

    const uint32_t four = threadIdx.x >> crew.log_size;
    const uint32_t rank = threadIdx.x & (crew.size - 1);
    select_await(&box.slices_full, parity);
    uint4 sum = *reinterpret_cast<const uint4 *>(exchange.slices + rank * stride + four * 4);
    if (threadIdx.x == 0)
        select_expect(&box.slices_full, select_bins * sizeof(unsigned)); /* of the next round */
    for (uint32_t step = 1; step < crew.size; step *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, step);
        sum.y += __shfl_xor_sync(~0u, sum.y, step);
        sum.z += __shfl_xor_sync(~0u, sum.z, step);
        sum.w += __shfl_xor_sync(~0u, sum.w, step);
    }
    select_send(crew, rank, exchange.total + (crew.rank * fours + four) * 4, sum, &box.total_full);
    select_await(&box.total_full, parity);
    if (threadIdx.x == 0)
        select_expect(&box.total_full, select_bins * sizeof(unsigned));
}

/* Brings `n` candidates of this block to every block of the crew, which together have `all`. */
__device__ inline void crew_share_candidates(const select_crew &crew, select_mailbox &box,
                                             const select_candidate *mine, unsigned n, unsigned all,
                                             unsigned *place)
{
    if (threadIdx.x == 0) {
        select_expect(&box.ranked_full, all * sizeof(select_candidate));
        unsigned at;
        asm volatile("atom.relaxed.cluster.shared::cluster.add.u32 %0, [%1], %2;"
                     : "=r"(at)
                     : "r"(select_address_in(crew, 0, &box.n_ranked)), "r"(n)
                     : "memory");
        *place = at;
    }
    __syncthreads();
    const unsigned first = *place;
    for (unsigned i = threadIdx.x; i < n << crew.log_size; i += select_threads) {
        const unsigned which = i >> crew.log_size;
        const unsigned rank = i & (crew.size - 1);
        const uint4 *words = reinterpret_cast<const uint4 *>(mine + which);
        const uint4 *to = reinterpret_cast<const uint4 *>(box.ranked + first + which);
        select_send(crew, rank, to, words[0], &box.ranked_full);
        select_send(crew, rank, to + 1, words[1], &box.ranked_full);
    }
    select_await(&box.ranked_full, 0);
}

/* Sum of the counts of the blocks before this one; every warp gets it. `count` is warp 0's. */
__device__ inline unsigned crew_prefix(const select_crew &crew, select_mailbox &box, unsigned count)
{
    if (threadIdx.x < crew.size)
        select_send(crew, threadIdx.x, box.counts + crew.rank, count, &box.counts_full);
    select_await(&box.counts_full, 0);
    const uint32_t lane = threadIdx.x % 32;
    return __reduce_add_sync(~0u, lane < crew.rank ? box.counts[lane] : 0);
}

#endif

#endif
