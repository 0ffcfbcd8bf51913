"""The block that the tests of lent GPU memory ask about, and requests for it: 4-byte numbers, queries
first, keys and values behind them. Standard library only."""
import array
import functools
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(1, os.path.join(HERE, "..", "server"))  # in a bundle all lie in one folder

import wire

Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS, KEEP = 4, 2, 64, 8, 600, 50
Q_BYTES, KV_BYTES = 4 * Q_HEADS * ROWS * DIM, 4 * KV_HEADS * TOKENS * DIM
ALL_BYTES = Q_BYTES + 2 * KV_BYTES
PARAMS = wire.integer(wire.WINDOW, ROWS) + wire.integer(wire.KEEP_TOKENS, KEEP)


@functools.lru_cache
def numbers(seed):
    """One block's query, keys and values, one behind the other."""
    source = random.Random(seed)
    return array.array("f", [source.gauss(0, 1) for _ in range(ALL_BYTES // 4)]).tobytes()


def block_of(region, offset=0):
    """A block that lies at `offset` of a region; region 0: in the bulk."""
    row = 4 * DIM
    views = [wire.view(region, offset, row, row * ROWS), wire.view(region, offset + Q_BYTES, row, row * TOKENS),
             wire.view(region, offset + Q_BYTES + KV_BYTES, row, row * TOKENS)]
    return wire.block(views, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM, rows=ROWS, tokens=TOKENS)


def message(region, offset=0, flags=1, fence=(0, 0, 0), params=PARAMS, output=(0, 0, 0)):
    """A request for one such block."""
    return wire.score_blocks([block_of(region, offset)], params, flags, fence, output)


def big_message(region, tokens, heads=8, dim=128):
    """A long block: bf16, queries first, keys and values behind them."""
    row, q_bytes, kv_bytes = 2 * dim, 2 * 4 * heads * ROWS * dim, 2 * heads * tokens * dim
    views = [wire.view(region, 0, row, row * ROWS, dtype=wire.BF16), wire.view(region, q_bytes, row, row * tokens, dtype=wire.BF16),
             wire.view(region, q_bytes + kv_bytes, row, row * tokens, dtype=wire.BF16)]
    block = wire.block(views, q_heads=4 * heads, kv_heads=heads, dim=dim, rows=ROWS, tokens=tokens)
    return wire.score_blocks([block], PARAMS), q_bytes + 2 * kv_bytes
