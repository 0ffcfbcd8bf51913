/* Crews of selection: the thread blocks that work on one unit, and how they tell each other.
 *
 * A crew is 1, 2, 4, 8 or 16 adjacent blocks of a cluster; a cluster can hold several. Its blocks
 * never wait at a barrier of the cluster, but for bytes: each sends what the others need straight
 * into their shared memory (st.async), and the bytes that arrive complete a phase of an mbarrier
 * there. That is one trip where a barrier and a remote read are three, and it needs no fence.
 *
 * Nothing is overwritten that somebody still reads: a block sends its part of round r + 1 only
 * after it has everything of round r, which the others sent after they had read what they got
 * before. The list of candidates takes the place of the slices: who sends candidates has all
 * totals, and so all blocks have read their slices. A block has waited for everything that is sent
 * to it before it exits.
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

/* Which phase of each barrier of the mailbox is the next. */
struct select_parity {
    uint32_t totals, list, here;
};

/* A candidate, as it travels between blocks. Key and raw score are one number of 64 bits. */
struct alignas(16) select_listing {
    unsigned raw;
    unsigned key;
    unsigned index;
    unsigned unused;
};

struct alignas(16) select_mailbox {
    unsigned long long slices_full, totals_full, list_full, here_full; /* mbarriers */
    unsigned here[select_crew_max];
};

/* What the other blocks write to, where crews have several. The list goes on behind it, as far as
 * the launch has room. */
struct alignas(16) select_exchange {
    unsigned totals[select_bins]; /* the crew's histogram */
    unsigned before[select_bins]; /* of it, what ranks before this one have */
    union {
        unsigned slices[select_bins + 4 * select_crew_max]; /* this block's bins, of every rank */
        select_listing list[1];                             /* of the whole crew */
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
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
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
        for (const unsigned long long *full :
             {&box.slices_full, &box.totals_full, &box.list_full, &box.here_full})
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(select_address(full))
                         : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        select_expect(&box.slices_full, select_bins * sizeof(unsigned));
        select_expect(&box.totals_full, 2 * select_bins * sizeof(unsigned));
        select_expect(&box.here_full, crew.size * sizeof(unsigned));
    }
    __syncwarp();
    /* Relaxed: the fence above is for the mailbox, and there is nothing else to see. */
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/* Then, before the first exchange, and before there are scores: everybody's mailbox is open. It
 * invalidates the first cache, where spilled registers are. */
__device__ inline void crew_meet(void)
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* Adds up the crew's histograms, of which each thread gives four bins, from 4 * mine_at on: first
 * each block its slice of the bins, then everybody all slices. Afterwards exchange.totals is there,
 * and exchange.before. What a warp sends at once goes to one place: 16 bytes here and there take
 * several times as long. `outbox` has room for all bins; it is cleared. */
__device__ inline void crew_add_histograms(const select_crew &crew, select_mailbox &box,
                                           select_exchange &exchange, const uint4 &mine,
                                           uint32_t mine_at, uint4 *outbox, uint32_t parity)
{
    const uint32_t fours = select_threads >> crew.log_size; /* of a slice */
    const uint32_t stride = 4 * fours + 4; /* so that ranks differ in their banks */
    const uint32_t owner = mine_at << crew.log_size >> select_log_threads;
    select_send(crew, owner, exchange.slices + crew.rank * stride + (mine_at & (fours - 1)) * 4,
                mine, &box.slices_full);

    uint32_t four = threadIdx.x >> crew.log_size;
    uint32_t rank = threadIdx.x & (crew.size - 1);
    select_await(&box.slices_full, parity);
    const uint4 own = *reinterpret_cast<const uint4 *>(exchange.slices + rank * stride + four * 4);
    if (threadIdx.x == 0)
        select_expect(&box.slices_full, select_bins * sizeof(unsigned)); /* of the next round */
    uint4 upto = own; /* of ranks up to this one */
#pragma unroll 1
    for (uint32_t step = 1; step < crew.size; step *= 2) {
        const bool more = rank >= step;
        const unsigned x = __shfl_up_sync(~0u, upto.x, step, crew.size);
        const unsigned y = __shfl_up_sync(~0u, upto.y, step, crew.size);
        const unsigned z = __shfl_up_sync(~0u, upto.z, step, crew.size);
        const unsigned w = __shfl_up_sync(~0u, upto.w, step, crew.size);
        upto.x += more ? x : 0;
        upto.y += more ? y : 0;
        upto.z += more ? z : 0;
        upto.w += more ? w : 0;
    }
    uint4 *totals = reinterpret_cast<uint4 *>(exchange.totals) + crew.rank * fours;
    uint4 *before = reinterpret_cast<uint4 *>(exchange.before) + crew.rank * fours;
    __syncthreads(); /* the outbox is no histogram any more */
    if (rank == crew.size - 1)
        totals[four] = upto;
    outbox[rank * fours + (four ^ (rank & (fours - 1)))] = {upto.x - own.x, upto.y - own.y,
                                                            upto.z - own.z, upto.w - own.w};
    __syncthreads();
    rank = threadIdx.x >> (select_log_threads - crew.log_size); /* whole warps to each */
    four = threadIdx.x & (fours - 1);
    uint4 *out = outbox + rank * fours + (four ^ (rank & (fours - 1)));
    select_send(crew, rank, totals + four, totals[four], &box.totals_full);
    select_send(crew, rank, before + four, *out, &box.totals_full);
    *out = {0, 0, 0, 0};
    select_await(&box.totals_full, parity);
    if (threadIdx.x == 0)
        select_expect(&box.totals_full, 2 * select_bins * sizeof(unsigned));
}

/* Brings listings first .. first + n - 1 of the list, which are this block's, to every block of the
 * crew; together they have `all`. */
__device__ inline void crew_share_list(const select_crew &crew, select_mailbox &box,
                                       const select_listing *list, unsigned first, unsigned n,
                                       unsigned all, uint32_t parity)
{
    const unsigned each = select_threads >> crew.log_size; /* threads for a rank: whole warps */
    const unsigned rank = threadIdx.x >> (select_log_threads - crew.log_size);
    if (threadIdx.x == 0)
        select_expect(&box.list_full, (all - n) * sizeof(select_listing));
    if (rank != crew.rank)
        for (unsigned i = threadIdx.x & (each - 1); i < n; i += each)
            select_send(crew, rank, list + first + i,
                        *reinterpret_cast<const uint4 *>(list + first + i), &box.list_full);
    select_await(&box.list_full, parity);
}

/* Every block of the crew has read what it got. */
__device__ __noinline__ static void crew_wait_for_all(const select_crew &crew, select_mailbox &box,
                                                      uint32_t parity)
{
    __syncthreads();
    if (threadIdx.x < crew.size)
        select_send(crew, threadIdx.x, box.here + crew.rank, 1, &box.here_full);
    select_await(&box.here_full, parity);
    if (threadIdx.x == 0)
        select_expect(&box.here_full, crew.size * sizeof(unsigned));
}

#endif

#endif
