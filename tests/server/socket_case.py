"""What tests of the local socket ask about, and the same over HTTP, which says what is right. Programs that
import it are called with the daemon's path first."""
import sys

import socket_daemon
import wire
from daemon import infer_body, infer_request, keep_indices

DROPKVD = sys.argv.pop(1)
SHAPE = {"tokens": 96, "q_heads": 2, "kv_heads": 1, "dim": 8, "rows": 8}
QUERY_BYTES, CACHE_BYTES = 2 * 8 * 8 * 4, 96 * 8 * 4
PARAMS = wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, 24)
HTTP_PARAMS = {"window": 8, "keep_tokens": 24}


class SocketDaemon(socket_daemon.SocketDaemon):
    def __init__(self, *options):
        super().__init__(DROPKVD, *options)


def tensors(seed=1, **changes):
    """query, key and value, as the HTTP tests make them."""
    return infer_body(seed=seed, **{**SHAPE, **changes})[1]


def http_answer(daemon, seed=1, **changes):
    reply = daemon.ask(infer_request(seed=seed, parameters=HTTP_PARAMS, **{**SHAPE, **changes}))
    assert reply.status == 200, reply.body
    return keep_indices(reply)


def inline_block(offset=0, region=0, tokens=96):
    """A block whose tensors lie one behind the other."""
    n = tokens * 32
    return wire.block([wire.view(region, offset, 32, 8 * 32),
                       wire.view(region, offset + QUERY_BYTES, 32, n),
                       wire.view(region, offset + QUERY_BYTES + n, 32, n)], tokens=tokens)
