"""A daemon with two GPUs: each block goes to the one that holds its memory. Skips where there is one.

usage: test_two_gpus.py DROPKVD [unittest arguments]
"""
import os
import signal
import struct
import sys
import unittest

from gpu_blocks import DIM, KV_HEADS, PARAMS, Q_BYTES, Q_HEADS, ROWS, TOKENS, block_of, message, numbers
from gpu_case import workers

import cuda
import wire
from cuda import MIB, Vmm
from socket_daemon import SocketDaemon
from wire import Client

DROPKVD = sys.argv.pop(1)
FIRST = cuda.open_gpu()


class TwoGpus(unittest.TestCase):
    """A daemon with two: each block goes to the one that holds its memory."""

    def test_blocks_go_where_their_memory_is(self):
        if FIRST.n_gpus < 2:
            self.skipTest("one GPU is here")
        gpus = [FIRST, cuda.Gpu(1)]
        lent = []
        for i, gpu in enumerate(gpus):
            gpu.enter()
            vmm = Vmm(gpu, [(0, 2 * MIB)])
            gpu.write(vmm.pointer, numbers(i + 1))
            pointer = gpu.alloc(4 * MIB)
            gpu.write(pointer, numbers(i + 1))
            lent.append((vmm, pointer, gpu.legacy_handle(pointer)))
        with SocketDaemon(DROPKVD, "--device", "cuda:0", "--device", "cuda:1") as daemon, Client(daemon.path) as client:
            self.assertEqual(struct.unpack_from("<H", client.welcome.payload, 6)[0], 2)
            expected = [client.ask(wire.SCORE_BLOCKS, message(0), numbers(i + 1)) for i in (0, 1)]
            wanted = [answer.keep()[0] for answer in expected]
            regions = []
            for gpu, (vmm, _, handle) in zip(gpus, lent):
                regions.append(client.ask(wire.REGION_ADD, wire.region(2 * MIB, kind=3, uuid=gpu.uuid, chunks=vmm.chunks), fds=vmm.fds).object()[0])
                regions.append(client.ask(wire.REGION_ADD, wire.region(4 * MIB, kind=2, uuid=gpu.uuid, handle=handle)).object()[0])
            # One message, blocks of both GPUs and of the host in turn: answers in the order asked for.
            order = [2, 0, None, 3, 1, None, 0, 2]
            blocks = [block_of(0 if at is None else regions[at]) for at in order]
            for _ in range(20):
                answer = client.ask(wire.SCORE_BLOCKS, wire.score_blocks(blocks, PARAMS), numbers(1))
                self.assertEqual(answer.keep(), [wanted[0 if at is None else at // 2] for at in order])
            mixed = wire.block([wire.view(regions[0], 0, 4 * DIM, 4 * DIM * ROWS), wire.view(regions[0], Q_BYTES, 4 * DIM, 4 * DIM * TOKENS),
                                wire.view(regions[2], Q_BYTES, 4 * DIM, 4 * DIM * TOKENS)],
                               q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM, rows=ROWS, tokens=TOKENS)
            status, text = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([mixed], PARAMS)).error()
            self.assertEqual((status, "two GPUs" in text), (wire.INVALID, True), text)
            # Memory of the one said to lie on the other.
            vmm, _, handle = lent[1]
            status, text = client.ask(wire.REGION_ADD, wire.region(2 * MIB, kind=3, uuid=gpus[0].uuid, chunks=vmm.chunks), fds=vmm.fds).error()
            self.assertEqual((status, "lies on device 1" in text), (wire.INVALID, True), text)
            # A legacy handle does not say whose it is: it may be read through the link between them.
            other = client.ask(wire.REGION_ADD, wire.region(4 * MIB, kind=2, uuid=gpus[0].uuid, handle=handle))
            if other.kind == wire.DONE:
                answer = client.ask(wire.SCORE_BLOCKS, message(other.object()[0], flags=0))
                self.assertEqual(answer.keep()[0], wanted[1])
            print("  a legacy handle of GPU 1, said to be of GPU 0: %s" % ("read there" if other.kind == wire.DONE else other.error()[1]))
            # A GPU whose worker dies answers for its memory again; the other goes on meanwhile.
            os.kill(workers(daemon)[1], signal.SIGKILL)
            for at in (0, 2, 1, 3):
                answer = client.ask(wire.SCORE_BLOCKS, message(regions[at], flags=0))
                while answer.kind == wire.ERROR and answer.error()[0] == wire.UNAVAILABLE:
                    answer = client.ask(wire.SCORE_BLOCKS, message(regions[at], flags=0))
                self.assertEqual(answer.keep()[0], wanted[at // 2])
        for gpu, (vmm, pointer, _) in zip(gpus, lent):
            gpu.enter()
            vmm.free()
            gpu.free(pointer)
        gpus[0].enter()


if __name__ == "__main__":
    unittest.main(verbosity=2)
