/* Work lists of the stream scorers, which are made on the host: random waves through the tables
 * that the engine uses, without a device.
 *
 * Whatever is in a wave, every tile of every unit is in pass A and in pass B exactly once for each
 * of its row groups; a row group follows the one before it on the same taker, since they add up
 * scores; pass A's chunks are those that the block has alone; and all fits into the bytes that were
 * said to be needed, of the lists and of unit.work.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <map>
#include <vector>

extern "C" {
#include <cmocka.h>
}

#include "kernels/cuda/stream_lists.cuh"
#include "tests/support/random.h"

extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream;
extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream_16bit_any;
extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream_256;
extern "C" const struct dkv_cu_scorer dkv_cu_scorer_stream_fp8;

namespace
{

using dkv_stream_lists::ceil_div;
using dkv_stream_lists::launch_list;

/* What a scorer's kernels are made for, as the comments of its shape say. */
struct family {
    const struct dkv_cu_scorer *scorer;
    std::vector<uint32_t> dtypes;
    std::vector<uint32_t> dims;
    uint32_t rows_min, rows_max; /* of a block */
    uint32_t rows[2];            /* of a row group: of blocks that fit into the first, of others */
    uint32_t step;               /* keys of a tile of pass B */
};

const family families[] = {
    {&dkv_cu_scorer_stream, {DKV_BF16, DKV_FP16}, {64, 128}, 65, 512, {128, 128}, 128},
    {&dkv_cu_scorer_stream_16bit_any, {DKV_BF16, DKV_FP16}, {64, 128}, 1, 64, {32, 64}, 64},
    {&dkv_cu_scorer_stream_256, {DKV_BF16, DKV_FP16}, {256}, 1, 512, {32, 64}, 64},
    {&dkv_cu_scorer_stream_fp8, {DKV_F8_E4M3, DKV_F8_E5M2}, {64, 128}, 1, 512, {32, 64}, 64},
};

uint32_t rows_of(const dkv_cu_block &block)
{
    return block.group * block.window;
}

uint32_t group_rows(const family &f, const dkv_cu_block &block)
{
    return f.rows[rows_of(block) > f.rows[0]];
}

uint32_t row_groups(const family &f, const dkv_cu_block &block)
{
    return ceil_div(rows_of(block), group_rows(f, block));
}

dkv_cu_block random_block(const family &f, struct dkv_random *random)
{
    static const uint64_t lengths[] = {64, 600, 5000, 40000, 200000, DKV_TOKENS_MAX};
    dkv_cu_block block = {};
    const uint64_t rows = dkv_random_range(random, f.rows_min, f.rows_max);
    block.heads = static_cast<uint32_t>(dkv_random_range(random, 1, 8));
    block.window = static_cast<uint32_t>(dkv_random_range(random, 1, 64));
    block.group = static_cast<uint32_t>((rows + block.window - 1) / block.window);
    if (rows_of(block) > f.rows_max)
        block.window = block.window > f.rows_max ? f.rows_max : block.window,
        block.group = f.rows_max / block.window;
    while (rows_of(block) < f.rows_min)
        block.group++;
    block.head_dim = block.v_dim = f.dims[dkv_random_range(random, 0, f.dims.size() - 1)];
    block.k.dtype = f.dtypes[dkv_random_range(random, 0, f.dtypes.size() - 1)];
    block.v.dtype = f.dtypes[dkv_random_range(random, 0, f.dtypes.size() - 1)];
    if (!dkv_cu_is_fp8(block.k.dtype))
        block.v.dtype = block.k.dtype;
    block.n_valid = static_cast<uint32_t>(dkv_random_range(
        random, block.window, block.window + lengths[dkv_random_range(random, 0, 5)]));
    if (block.n_valid > DKV_TOKENS_MAX)
        block.n_valid = DKV_TOKENS_MAX;
    return block;
}

/* Blocks whose heads are all units, and the lists of some of them that follow each other. */
struct wave {
    std::vector<dkv_cu_block> blocks;
    std::vector<dkv_cu_unit> units;
    struct dkv_cu_wave told = {};
    uint32_t first = 0;
    uint32_t n = 0;
    std::vector<unsigned char> extra;

    void add(const dkv_cu_block &block)
    {
        for (uint32_t h = 0; h < block.heads; h++) {
            dkv_cu_unit unit = {};
            unit.block = static_cast<uint32_t>(blocks.size());
            unit.head = h;
            units.push_back(unit);
        }
        blocks.push_back(block);
    }

    void make_lists(const family &f, const dkv_cu_device &device)
    {
        told.blocks_host = blocks.data();
        told.units_host = units.data();
        told.n_blocks = static_cast<uint32_t>(blocks.size());
        told.n_units = static_cast<uint32_t>(units.size());
        const size_t bytes = f.scorer->extra_bytes(&device, &told, first, n);
        extra.assign(bytes + 4096, 0xa5);
        f.scorer->fill(&device, &told, first, n, extra.data());
        extra.resize(bytes + 4096);
        for (size_t i = bytes; i < extra.size(); i++)
            if (extra[i] != 0xa5)
                fail_msg("byte %zu of %zu is written", i, bytes);
        extra.resize(bytes);
    }

    /* One list for each variant; the first one's items begin behind them. */
    uint32_t n_lists() const
    {
        return list(0).a_at / sizeof(launch_list);
    }
    const launch_list &list(uint32_t i) const
    {
        return reinterpret_cast<const launch_list *>(extra.data())[i];
    }
    const dkv_fast_item *items(uint32_t at, size_t count) const
    {
        assert_true(at + count * sizeof(dkv_fast_item) <= extra.size());
        return reinterpret_cast<const dkv_fast_item *>(extra.data() + at);
    }
    const dkv_cu_block &block_of(const dkv_fast_item &item) const
    {
        assert_in_range(item.unit, first, first + n - 1);
        assert_int_equal(item.block, units[item.unit].block);
        return blocks[item.block];
    }
};

/* Takers of a list's items: how many columns a turn has, from where the next list begins. */
uint32_t width_of(const launch_list &list)
{
    return list.a_turns == 0 ? 0
                             : static_cast<uint32_t>((list.b_at - list.a_at) /
                                                     (list.a_turns * sizeof(dkv_fast_item)));
}

/* How a unit's row group was cut in pass A. */
struct cut {
    uint32_t keys;
    uint32_t chunks;
    std::vector<bool> seen;
};

using cuts = std::map<std::pair<uint32_t, uint32_t>, cut>; /* by unit and row group */

cuts chunks_of(const wave &w)
{
    cuts found;
    for (uint32_t i = 0; i < w.n_lists(); i++) {
        const launch_list &list = w.list(i);
        const uint32_t width = width_of(list);
        const dkv_fast_item *items = w.items(list.a_at, static_cast<size_t>(list.a_turns) * width);
        for (uint32_t at = 0; at < list.a_turns * width; at++) {
            const dkv_fast_item &item = items[at];
            assert_int_equal(item.chunks != 0, at < list.items); /* no gaps: the merge has a thread
                                                                  * block for each */
            if (item.chunks == 0)
                continue;
            w.block_of(item);
            cut &c = found[{item.unit, item.row_group}];
            if (c.seen.empty())
                c = {item.chunk_keys, item.chunks, std::vector<bool>(item.chunks)};
            assert_int_equal(item.chunk_keys, c.keys);
            assert_int_equal(item.chunks, c.chunks);
            assert_in_range(item.chunk, 0, c.chunks - 1);
            assert_false(c.seen[item.chunk]);
            c.seen[item.chunk] = true;
        }
    }
    return found;
}

void check_chunks(const family &f, const dkv_cu_device &device, const wave &w)
{
    const cuts all = chunks_of(w);
    size_t expected = 0;
    for (uint32_t u = w.first; u < w.first + w.n; u++)
        expected += row_groups(f, w.blocks[w.units[u].block]);
    assert_int_equal(all.size(), expected);
    for (const auto &entry : all) {
        const dkv_cu_block &block = w.blocks[w.units[entry.first.first].block];
        const cut &c = entry.second;
        assert_true(entry.first.second < row_groups(f, block));
        assert_int_equal(c.keys % dkv_fast::TILE, 0);
        assert_true(static_cast<uint64_t>(c.keys) * c.chunks >= block.n_valid);
        assert_true(static_cast<uint64_t>(c.keys) * (c.chunks - 1) < block.n_valid);
        for (bool seen : c.seen)
            assert_true(seen);
    }
    /* A block alone. */
    const uint32_t unit = w.first + w.n / 2;
    const dkv_cu_block &block = w.blocks[w.units[unit].block];
    wave alone;
    alone.add(block);
    alone.n = block.heads;
    alone.make_lists(f, device);
    for (const auto &entry : chunks_of(alone)) {
        const auto same = all.find({unit, entry.first.second});
        assert_true(same != all.end());
        assert_int_equal(same->second.keys, entry.second.keys);
        assert_int_equal(same->second.chunks, entry.second.chunks);
    }
    /* Partials lie behind what pass B needs, scores may lie in their place. */
    const uint32_t rows = group_rows(f, block);
    const size_t partials = row_groups(f, block) * all.at({unit, 0}).chunks * rows *
                            static_cast<size_t>(16 + 4 * block.head_dim);
    const size_t scores_at = f.scorer->scores_at(&block);
    const size_t bytes = f.scorer->unit_bytes(&block);
    assert_int_equal(scores_at % 16, 0);
    assert_in_range(scores_at, bytes - partials, bytes - partials + 255);
    assert_true(dkv_cu_work_bytes(f.scorer, &block) >= bytes);
    assert_true(dkv_cu_work_bytes(f.scorer, &block) >= scores_at + block.n_valid * sizeof(float));
}

void check_ranges(const family &f, const wave &w)
{
    std::map<std::pair<uint32_t, uint32_t>, std::vector<bool>> seen;
    for (uint32_t i = 0; i < w.n_lists(); i++) {
        const launch_list &list = w.list(i);
        const uint32_t width = width_of(list);
        const dkv_fast_item *items = w.items(list.b_at, static_cast<size_t>(list.b_turns) * width);
        for (uint32_t at = 0; at < list.b_turns * width; at++) {
            const dkv_fast_item &item = items[at];
            if (item.chunks == 0)
                continue;
            const dkv_cu_block &block = w.block_of(item);
            const uint32_t tiles = ceil_div(block.n_valid, f.step);
            assert_int_equal(item.chunk_keys, f.step);
            assert_true(item.row_group < row_groups(f, block));
            assert_true(static_cast<uint32_t>(item.chunk) + item.chunks <= tiles);
            std::vector<bool> &mine = seen[{item.unit, item.row_group}];
            mine.resize(tiles);
            for (uint32_t t = item.chunk; t < static_cast<uint32_t>(item.chunk) + item.chunks;
                 t++) {
                assert_false(mine[t]);
                mine[t] = true;
            }
            if (item.row_group == 0)
                continue;
            assert_true(at >= width);
            const dkv_fast_item &before = items[at - width];
            assert_int_equal(before.unit, item.unit);
            assert_int_equal(before.row_group, item.row_group - 1);
            assert_int_equal(before.chunk, item.chunk);
            assert_int_equal(before.chunks, item.chunks);
        }
    }
    for (uint32_t u = w.first; u < w.first + w.n; u++) {
        const dkv_cu_block &block = w.blocks[w.units[u].block];
        for (uint32_t g = 0; g < row_groups(f, block); g++) {
            const std::vector<bool> &mine = seen[{u, g}];
            assert_int_equal(mine.size(), ceil_div(block.n_valid, f.step));
            for (bool tile : mine)
                assert_true(tile);
        }
    }
}

/* Nobody has more than a tile above an equal share, of each row group. */
void check_shares(const wave &w)
{
    for (uint32_t i = 0; i < w.n_lists(); i++) {
        const launch_list &list = w.list(i);
        const uint32_t width = width_of(list);
        const dkv_fast_item *items = w.items(list.b_at, static_cast<size_t>(list.b_turns) * width);
        std::vector<uint64_t> tiles(width);
        uint64_t all = 0;
        uint64_t groups = 1;
        for (uint32_t at = 0; at < list.b_turns * width; at++) {
            tiles[at % width] += items[at].chunks;
            all += items[at].chunks;
            groups = items[at].chunks && items[at].row_group + 1 > groups ? items[at].row_group + 1
                                                                          : groups;
        }
        for (uint64_t mine : tiles)
            assert_true(mine <= all / width + 1 + groups);
    }
}

void every_tile_is_worked_on_once(void **)
{
    static const int sizes[] = {132, 132, 132, 114, 78, 1};
    for (const family &f : families)
        for (uint64_t seed = 1; seed <= 250; seed++) {
            struct dkv_random random = {seed};
            dkv_cu_device device = {};
            wave w;
            device.major = 9;
            device.multiprocessors = sizes[seed % 6];
            const uint64_t blocks = dkv_random_range(&random, 1, seed % 4 == 0 ? 40 : 5);
            for (uint64_t i = 0; i < blocks; i++)
                w.add(random_block(f, &random));
            const uint64_t last = w.units.size() - 1;
            w.first = static_cast<uint32_t>(
                dkv_random_once_in(&random, 3) ? dkv_random_range(&random, 0, last) : 0);
            w.n = static_cast<uint32_t>(dkv_random_once_in(&random, 3)
                                            ? dkv_random_range(&random, 1, last + 1 - w.first)
                                            : last + 1 - w.first);
            w.make_lists(f, device);
            check_chunks(f, device, w);
            check_ranges(f, w);
            check_shares(w);
        }
}

} // namespace

int main()
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tile_is_worked_on_once),
    };
    return cmocka_run_group_tests_name("stream lists", tests, nullptr, nullptr);
}
