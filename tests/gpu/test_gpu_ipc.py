"""GPU memory lent to a daemon by other processes: where it is read, what is refused, and what happens
when somebody dies. Needs one GPU and nobody else on it.

usage: test_gpu_ipc.py DROPKVD [unittest arguments]

What is right is what the same daemon answers to the same numbers sent inline.
"""
import array
import ctypes
import functools
import json
import mmap
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "server")]

import cuda
import wire
from cuda import MIB, CudaError, Vmm, within
from wire import Client, Memory

ROLE = sys.argv.pop(1) if sys.argv[1:2] == ["--exporter"] else None
DROPKVD = sys.argv.pop(1) if ROLE is None else None

Q_HEADS, KV_HEADS, DIM, ROWS, TOKENS, KEEP = 4, 2, 64, 8, 600, 50
Q_BYTES, KV_BYTES = 4 * Q_HEADS * ROWS * DIM, 4 * KV_HEADS * TOKENS * DIM
ALL_BYTES = Q_BYTES + 2 * KV_BYTES
PARAMS = wire.integer(wire.WINDOW, ROWS) + wire.integer(wire.KEEP_TOKENS, KEEP)
UP = r"the worker of device \S+ is up: process (\d+)"
PATIENCE_S = 60


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


# ---- a process that exports ----
#
# It has a context of its own and does what it is told, line by line: {"do": ..., ...} in, a line of
# JSON out, descriptors beside it.


class Exporter:
    def __init__(self):
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.process = subprocess.Popen([sys.executable, "-B", os.path.abspath(__file__), "--exporter", str(theirs.fileno())],
                                        pass_fds=[theirs.fileno()])
        theirs.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.kill()

    def tell(self, **order):
        self.socket.sendall(json.dumps(order).encode() + b"\n")

    def answer(self):
        data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 200)
        assert data, "the exporter ended"
        return json.loads(data), fds

    def ask(self, **order):
        self.tell(**order)
        return self.answer()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.socket.close()


def exporter(fd):
    """The other process. One that is told to be clients never touches CUDA."""
    link = socket.socket(fileno=fd)
    gpu, held, lines = None, {}, link.makefile("rb")
    for line in lines:
        order = json.loads(line)
        reply, fds = {}, []
        if order["do"] == "clients":
            link.sendall(b"{}\n")
            _, fds, _, _ = socket.recv_fds(link, 1, 100)
            make_clients(link, lines, order, fds)
        gpu = gpu or cuda.open_gpu()
        if order["do"] == "legacy":
            pointer = gpu.alloc(order["bytes"])
            held["pointer"] = pointer
            reply["handle"] = gpu.legacy_handle(pointer).hex()
        elif order["do"] == "vmm":
            held["vmm"] = Vmm(gpu, [tuple(chunk) for chunk in order["chunks"]])
            held["pointer"], fds = held["vmm"].pointer, held["vmm"].fds
        elif order["do"] == "write":
            gpu.write(held["pointer"], numbers(order["seed"]), order["offset"])
            gpu.synchronize()
        elif order["do"] == "free":
            gpu.free(held["pointer"])
        elif order["do"] == "fence":  # late, as a producer is: then the data, then the slot, in one stream
            link.sendall(b"{}\n")
            _, slot_fds, _, _ = socket.recv_fds(link, 1, 1)
            slot = mmap.mmap(slot_fds[0], 4096)
            device = gpu.register_host(ctypes.addressof(ctypes.c_char.from_buffer(slot)), 4096)
            held["slot"] = slot
            time.sleep(order["late_s"])
            if order["die"]:
                os.kill(os.getpid(), signal.SIGKILL)
            gpu.write(held["pointer"], numbers(order["seed"]), order["offset"])
            gpu.stream_write(device + order["at"], order["value"])
            gpu.synchronize()
        elif order["do"] == "hammer":  # a client of its own, with long requests in flight all the time
            client = Client(order["path"])
            long, n_bytes = big_message(1, order["tokens"])
            pointer = gpu.alloc(n_bytes)
            gpu.call("cuMemsetD16_v2", cuda._u64(pointer), 0x3C00, cuda._size(n_bytes // 2))
            gpu.synchronize()
            number = client.ask(wire.REGION_ADD, wire.region(n_bytes, kind=2, uuid=gpu.uuid, handle=gpu.legacy_handle(pointer))).object()[0]
            long = big_message(number, order["tokens"])[0]
            for _ in range(8):
                client.send(wire.SCORE_BLOCKS, long)
            client.receive().keep()
            link.sendall(b"{}\n")
            while True:
                client.send(wire.SCORE_BLOCKS, long)
                client.receive().keep()
        socket.send_fds(link, [json.dumps(reply).encode() + b"\n"], fds)


def make_clients(link, lines, order, fds):
    """A new process for every line, which is a client until it is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    source = random.Random(order["seed"])
    for _ in lines:
        seed, child = source.getrandbits(32), os.fork()
        if child == 0:
            try:
                be_a_client(order, fds, random.Random(seed))
            finally:
                os._exit(1)
        link.sendall(json.dumps(child).encode() + b"\n")


def be_a_client(order, fds, source):
    """Regions of both kinds, requests over them, some of which it waits for."""
    with Client(order["path"]) as client:
        def add(fds, **region):
            number = client.send(wire.REGION_ADD, wire.region(4 * MIB, uuid=bytes.fromhex(order["uuid"]), **region), fds=fds)
            while True:  # answers come as work ends
                answer = client.receive()
                if answer.number == number:
                    return answer.object()[0]

        while True:
            regions = [add(fds, kind=3, chunks=order["chunks"]), add((), kind=2, handle=bytes.fromhex(order["handle"]))]
            for _ in range(source.randrange(4)):
                client.send(wire.SCORE_BLOCKS, message(source.choice(regions)))
            client.send(wire.REGION_DROP, struct.pack("<II", regions[0], 0))


# ---- the tests ----


class World:
    """One daemon for all tests, and what it answers to the numbers of a seed."""

    def __init__(self):
        import socket_daemon
        self.gpu = cuda.open_gpu()
        self.daemon = socket_daemon.SocketDaemon(DROPKVD, "--device", "cuda:0")
        self.expected = {}

    def worker(self):
        """The pid of the worker that is up."""
        return int([found.group(1) for found in (re.search(UP, line) for line in list(self.daemon.log)) if found][-1])

    def restarts(self):
        return next(v for k, v in self.daemon.metrics().items() if k.startswith("dropkv_worker_restarts_total"))

    def answer(self, client, seed):
        if seed not in self.expected:
            answer = client.ask(wire.SCORE_BLOCKS, message(0), numbers(seed))
            answer.keep()
            self.expected[seed] = answer.bulk
        return self.expected[seed]


world = None


class Case(unittest.TestCase):
    """Every test ends with the worker that it began with, unless it says otherwise, and gives all
    GPU memory back."""

    may_restart = False

    def setUp(self):
        self.gpu = world.gpu
        self.client = Client(world.daemon.path)
        world.answer(self.client, 1)
        self.restarts = world.restarts()
        self.free_before = self.gpu.free_bytes()

    def tearDown(self):
        self.client.socket.close()
        self.assert_memory_is_back()
        if not self.may_restart:
            self.assertEqual(world.restarts(), self.restarts)

    def assert_memory_is_back(self, seconds=1.0):
        # Less than the smallest memory that is lent: the driver keeps some for itself as it goes.
        took = within(seconds, lambda: self.gpu.free_bytes() > self.free_before - MIB)
        self.assertIsNotNone(took, "%d bytes of GPU memory are missing" % (self.free_before - self.gpu.free_bytes()))
        return took

    def add(self, fds=(), client=None, **region):
        """The region's number."""
        client = client or self.client
        region.setdefault("uuid", self.gpu.uuid)
        return client.ask(wire.REGION_ADD, wire.region(**region), fds=fds).object()[0]

    def refuse(self, status, *words, fds=(), **region):
        region.setdefault("uuid", self.gpu.uuid)
        got, text = self.client.ask(wire.REGION_ADD, wire.region(**region), fds=fds).error()
        self.assertEqual(got, status, text)
        for word in words:
            self.assertIn(word, text)
        self.assert_inline()

    def assert_inline(self):
        """The daemon goes on as before."""
        answer = self.client.ask(wire.SCORE_BLOCKS, message(0), numbers(1))
        answer.keep()
        self.assertEqual(answer.bulk, world.answer(self.client, 1))

    def assert_answer(self, region, offset=0, seed=1, client=None):
        client = client or self.client
        answer = client.ask(wire.SCORE_BLOCKS, message(region, offset))
        answer.keep()
        self.assertEqual(answer.bulk, world.answer(client, seed))

    def drop(self, region, client=None):
        (client or self.client).ask(wire.REGION_DROP, struct.pack("<II", region, 0)).object()


class Chunks(Case):
    def vmm(self, chunks, **options):
        vmm = Vmm(self.gpu, chunks, **options)
        self.addCleanup(lambda: vmm.free() if vmm.pointer else None)
        return vmm

    def tearDown(self):
        self.client.socket.close()
        self.doCleanups()
        super().tearDown()

    def test_one_chunk(self):
        vmm = self.vmm([(0, 2 * MIB)])
        self.gpu.write(vmm.pointer, numbers(1), 4096)
        self.assert_answer(self.add(vmm.fds, n_bytes=2 * MIB, kind=3, chunks=vmm.chunks), 4096)

    def test_chunks_side_by_side_are_one_stretch(self):
        vmm = self.vmm([(0, 2 * MIB), (2 * MIB, 4 * MIB), (6 * MIB, 6 * MIB)])
        for at in (2 * MIB - 4096, 6 * MIB - Q_BYTES - 256, 12 * MIB - ALL_BYTES):
            self.gpu.write(vmm.pointer, numbers(1), at)
            region = self.add(vmm.fds, n_bytes=12 * MIB - 256, offset=256, kind=3, chunks=vmm.chunks)
            self.assert_answer(region, at - 256)
            self.drop(region)

    def test_what_lies_between_chunks_is_not_read(self):
        vmm = self.vmm([(0, 2 * MIB), (4 * MIB, 2 * MIB)])
        self.gpu.write(vmm.pointer, numbers(1), 4 * MIB)
        region = self.add(vmm.fds, n_bytes=6 * MIB, kind=3, chunks=vmm.chunks)
        self.assert_answer(region, 4 * MIB)
        for at in (2 * MIB - 4096, 2 * MIB, 3 * MIB, 6 * MIB - 4096, 6 * MIB, 1 << 62):
            status, text = self.client.ask(wire.SCORE_BLOCKS, message(region, at)).error()
            self.assertEqual(status, wire.INVALID, text)
        self.assert_answer(region, 4 * MIB)

    def test_lengths_must_be_the_real_ones(self):
        vmm = self.vmm([(0, 4 * MIB)])
        for n_bytes in (2 * MIB, 6 * MIB, 1 << 30):
            self.refuse(wire.INVALID, "chunk 0", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=[(0, n_bytes)])
        self.refuse(wire.INVALID, "chunk 0", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=[(0, 4 * MIB - 1)])
        self.refuse(wire.INVALID, "chunk 0", fds=vmm.fds, n_bytes=MIB, offset=4096, kind=3, chunks=[(4096, 4 * MIB)])
        far = [(0, 4 * MIB), (1 << 41, 4 * MIB)]
        self.refuse(wire.INVALID, "chunk 1", "outside", fds=vmm.fds * 2, n_bytes=MIB, kind=3, chunks=far)
        self.refuse(wire.TOO_LARGE, "span", fds=vmm.fds * 2, n_bytes=(1 << 41) + MIB, kind=3, chunks=far)

    def test_descriptors_of_other_things(self):
        ends = os.pipe()
        fds = [*ends, os.open("/dev/null", os.O_RDWR), wire.new_memfd(bytes(4096)), os.open(os.path.abspath(__file__), os.O_RDONLY)]
        try:
            for fd in fds:
                self.refuse(wire.INVALID, "chunk 0", "cuMemExportToShareableHandle", fds=[fd], n_bytes=MIB, kind=3,
                            chunks=[(0, 2 * MIB)])
        finally:
            for fd in fds:
                os.close(fd)

    def test_host_memory_of_the_driver(self):
        try:
            vmm = self.vmm([(0, 2 * MIB)], location=cuda.HOST_NUMA_LOCATION)
        except CudaError as error:
            self.skipTest("no such memory here: %s" % error)
        self.refuse(wire.INVALID, "not memory of a GPU", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=vmm.chunks)

    def test_another_gpu_and_writable_regions(self):
        vmm = self.vmm([(0, 2 * MIB)])
        self.refuse(wire.UNSUPPORTED, "GPU-01010101-0101", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=vmm.chunks, uuid=b"\1" * 16)
        self.refuse(wire.UNSUPPORTED, "memfd", fds=vmm.fds, n_bytes=MIB, kind=3, chunks=vmm.chunks, writable=1)

    def test_fences_and_outputs_are_host_memory(self):
        vmm = self.vmm([(0, 2 * MIB)])
        self.gpu.write(vmm.pointer, numbers(1))
        region = self.add(vmm.fds, n_bytes=2 * MIB, kind=3, chunks=vmm.chunks)
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region, fence=(region, 0, 1))).error()
        self.assertEqual((status, "not a memfd" in text), (wire.INVALID, True))
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region, output=(region, 0, 4096))).error()
        self.assertEqual((status, "not a memfd" in text), (wire.INVALID, True))
        with Memory(ALL_BYTES) as memory:  # with a memfd it works
            fence = self.client.add_memfd(memory.fd, ALL_BYTES, writable=1)
            memory.map[0:8] = struct.pack("<Q", 5)
            answer = self.client.ask(wire.SCORE_BLOCKS, message(region, flags=0, fence=(fence, 0, 5), output=(fence, 64, 4096)))
            kept = answer.keep(memory.map[64:4160])
            self.assertEqual(len(kept[0]), KV_HEADS * KEEP)

    def test_a_cache_and_its_stash_on_the_gpu(self):
        vmm = self.vmm([(0, 2 * MIB)])
        data, row = numbers(1), 4 * DIM
        self.gpu.write(vmm.pointer, data)
        region = self.add(vmm.fds, n_bytes=2 * MIB, kind=3, chunks=vmm.chunks)
        stash = self.client.ask(wire.STASH_ADD, wire.stash(region, ROWS, row, row * ROWS)).object()[0]
        views = [wire.view(region, Q_BYTES, row, row * TOKENS), wire.view(region, Q_BYTES + KV_BYTES, row, row * TOKENS)]
        cache = self.client.ask(wire.CACHE_ADD, wire.cache(views, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM)).object()[0]
        answer = self.client.ask(wire.SCORE, wire.score(cache, stash, TOKENS, newest=ROWS - 1, rows=ROWS, params=PARAMS, flags=1))
        answer.keep()
        self.assertEqual(answer.bulk, world.answer(self.client, 1))

    def test_rows_around_the_end_of_a_ring_on_the_gpu(self):
        """Both orders of heads and rows; the ring is longer than what is used of it."""
        data, row, ring = numbers(1), 4 * DIM, ROWS + 3
        vmm = self.vmm([(0, 2 * MIB)])
        self.gpu.write(vmm.pointer, data[Q_BYTES:])
        region = self.add(vmm.fds, n_bytes=2 * MIB, kind=3, chunks=vmm.chunks)
        views = [wire.view(region, 0, row, row * TOKENS), wire.view(region, KV_BYTES, row, row * TOKENS)]
        cache = self.client.ask(wire.CACHE_ADD, wire.cache(views, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM)).object()[0]
        for row_stride, head_stride in ((row, row * (ring + 2)), (row * (Q_HEADS + 1), row)):
            stash = self.client.ask(wire.STASH_ADD, wire.stash(region, ring, row_stride, head_stride, offset=MIB)).object()[0]
            for newest in (0, 3, ROWS - 2, ROWS - 1, ring - 1):
                rows = bytearray(64 * 1024)
                for head in range(Q_HEADS):
                    for i in range(ROWS):
                        at = (newest + 1 - ROWS + i) % ring * row_stride + head * head_stride
                        source = (head * ROWS + i) * row
                        rows[at : at + row] = data[source : source + row]
                self.gpu.write(vmm.pointer, rows, MIB)
                answer = self.client.ask(wire.SCORE, wire.score(cache, stash, TOKENS, newest=newest, rows=ROWS, params=PARAMS, flags=1))
                answer.keep()
                self.assertEqual(answer.bulk, world.answer(self.client, 1), (row_stride, newest))
        stash = self.client.ask(wire.STASH_ADD, wire.stash(region, ring, row * (Q_HEADS + 1), row + 4, offset=MIB)).object()[0]
        status, text = self.client.ask(wire.SCORE, wire.score(cache, stash, TOKENS, newest=0, rows=ROWS, params=PARAMS)).error()
        self.assertEqual((status, "side by side" in text), (wire.UNSUPPORTED, True))

    def test_page_tables_and_pages_on_the_gpu(self):
        page, row = 20, 4 * DIM
        n_pages = TOKENS // page
        vmm = self.vmm([(0, 4 * MIB)])
        data = numbers(1)
        order = random.Random(3).sample(range(1, 2 * n_pages), n_pages)
        page_bytes = KV_HEADS * page * row
        pages = bytearray(2 * n_pages * page_bytes)
        for side in (0, 1):  # [page][head][token]: keys in one half of the region, values in the other
            for i, p in enumerate(order):
                for head in range(KV_HEADS):
                    source = Q_BYTES + side * KV_BYTES + head * row * TOKENS + i * page * row
                    at = p * page_bytes + head * page * row
                    pages[at : at + page * row] = data[source : source + page * row]
            self.gpu.write(vmm.pointer, pages, MIB + side * (3 * MIB // 2))
        self.gpu.write(vmm.pointer, data[:Q_BYTES])
        self.gpu.write(vmm.pointer, struct.pack("<%di" % n_pages, *order), 512 * 1024)
        region = self.add(vmm.fds, n_bytes=4 * MIB, kind=3, chunks=vmm.chunks)
        views = [wire.view(region, 0, row, row * ROWS), wire.view(region, MIB, row, page * row, page_bytes),
                 wire.view(region, MIB + 3 * MIB // 2, row, page * row, page_bytes)]
        block = wire.block(views, q_heads=Q_HEADS, kv_heads=KV_HEADS, dim=DIM, rows=ROWS, tokens=TOKENS, page_tokens=page,
                           table=(region, n_pages, 2, 4, 512 * 1024))
        answer = self.client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], PARAMS, 1))
        answer.keep()
        self.assertEqual(answer.bulk, world.answer(self.client, 1))
        # An entry that points outside is found where it is read, and costs that block alone.
        self.gpu.write(vmm.pointer, struct.pack("<i", 1 << 20), 512 * 1024 + 8)
        status, text = self.client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], PARAMS, 1)).error()
        self.assertEqual(status, wire.INVALID, text)

    def test_memory_comes_back_as_another_generation(self):
        first = Vmm(self.gpu, [(0, 2 * MIB)])
        self.gpu.write(first.pointer, numbers(1))
        region = self.add(first.fds, n_bytes=2 * MIB, kind=3, chunks=first.chunks)
        self.assert_answer(region)
        self.client.ask(wire.REGION_DETACH, struct.pack("<II", region, 0)).object()
        first.free()
        self.assert_memory_is_back()  # at once: the daemon said so
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region)).error()
        self.assertEqual((status, "detached" in text), (wire.NOT_FOUND, True))
        second = self.vmm([(0, 4 * MIB)])
        self.gpu.write(second.pointer, numbers(2))
        again = wire.region(4 * MIB, kind=3, number=region, generation=0, uuid=self.gpu.uuid, chunks=second.chunks)
        status, text = self.client.ask(wire.REGION_ATTACH, again, fds=second.fds).error()
        self.assertEqual((status, "generation" in text), (wire.INVALID, True))
        again = wire.region(4 * MIB, kind=3, number=region, generation=1, uuid=self.gpu.uuid, chunks=second.chunks)
        self.client.ask(wire.REGION_ATTACH, again, fds=second.fds).object()
        self.assert_answer(region, seed=2)


class Legacy(Case):
    def test_interior_pointers_share_one_mapping(self):
        pointer = self.gpu.alloc(16 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.assertEqual(handle, self.gpu.legacy_handle(pointer + 5 * MIB))
        self.gpu.write(pointer, numbers(1), 5 * MIB)
        self.gpu.write(pointer, numbers(2), 16 * MIB - ALL_BYTES)
        a = self.add(n_bytes=2 * MIB, offset=5 * MIB, kind=2, handle=handle)
        b = self.add(n_bytes=16 * MIB, kind=2, handle=handle)
        self.assert_answer(a)
        self.assert_answer(b, 16 * MIB - ALL_BYTES, seed=2)
        self.drop(a)
        self.assert_answer(b, 5 * MIB)
        self.drop(b)
        self.gpu.free(pointer)
        self.assert_memory_is_back()

    def test_bounds_are_those_of_the_allocation(self):
        pointer = self.gpu.alloc(4 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.refuse(wire.INVALID, "4194304", n_bytes=4 * MIB + 1, kind=2, handle=handle)
        self.refuse(wire.INVALID, "4194304", n_bytes=1, offset=4 * MIB, kind=2, handle=handle)
        self.refuse(wire.INVALID, "4194304", n_bytes=1, offset=1 << 62, kind=2, handle=handle)
        region = self.add(n_bytes=ALL_BYTES - 4, kind=2, handle=handle)
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region)).error()
        self.assertEqual(status, wire.INVALID, text)
        self.drop(region)
        self.gpu.free(pointer)

    def test_bytes_that_are_no_handle(self):
        for seed in range(20):
            self.refuse(wire.INVALID, "export the allocation again", n_bytes=MIB, kind=2, handle=random.Random(seed).randbytes(64))

    def test_memory_that_was_freed(self):
        pointer = self.gpu.alloc(4 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.gpu.free(pointer)
        self.refuse(wire.INVALID, "freed", n_bytes=MIB, kind=2, handle=handle)

    def test_a_process_that_has_ended(self):
        with Exporter() as other:
            handle = bytes.fromhex(other.ask(do="legacy", bytes=4 * MIB)[0]["handle"])
        self.refuse(wire.INVALID, "ended", n_bytes=MIB, kind=2, handle=handle)

    def test_two_connections_do_not_share(self):
        pointer = self.gpu.alloc(4 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.gpu.write(pointer, numbers(1))
        region = self.add(n_bytes=4 * MIB, kind=2, handle=handle)
        with Client(world.daemon.path) as second:
            other = self.add(client=second, n_bytes=4 * MIB, kind=2, handle=handle)
            self.assert_answer(other, client=second)
        self.assert_answer(region)
        self.drop(region)
        self.gpu.free(pointer)


class Deaths(Case):
    """Of exporters and clients."""

    def lend(self, other, kind, seed=1):
        if kind == 2:
            handle = bytes.fromhex(other.ask(do="legacy", bytes=64 * MIB)[0]["handle"])
            region = self.add(n_bytes=64 * MIB, kind=2, handle=handle)
        else:
            chunks = [(0, 16 * MIB), (16 * MIB, 48 * MIB)]
            _, fds = other.ask(do="vmm", chunks=chunks)
            region = self.add(fds, n_bytes=64 * MIB, kind=3, chunks=chunks)
            for fd in fds:
                os.close(fd)
        other.ask(do="write", seed=seed, offset=16 * MIB - 4096)
        return region

    def test_an_exporter_that_is_killed_leaves_its_memory_readable(self):
        for kind in (2, 3):
            with Exporter() as other:
                region = self.lend(other, kind)
                self.assert_answer(region, 16 * MIB - 4096)
            self.assert_answer(region, 16 * MIB - 4096)
            self.assertLess(self.gpu.free_bytes(), self.free_before)  # until we let go
            self.drop(region)
            print("  kind %d: the memory of a dead exporter is back %.0f ms after it was dropped" % (kind, 1e3 * self.assert_memory_is_back()))

    def test_an_exporter_that_frees_harms_nobody(self):
        with Exporter() as other:
            region = self.lend(other, 2)
            other.ask(do="free")
            answer = self.client.ask(wire.SCORE_BLOCKS, message(region, 16 * MIB - 4096))
            self.assertIn(answer.kind, (wire.RESULT, wire.ERROR))  # stale and pinned, as was seen
            self.assert_inline()
            self.drop(region)

    def test_a_connection_that_ends_gives_back_at_once(self):
        """... also when no request was ever sent."""
        for kind in (2, 3):
            with Exporter() as other:
                with Client(world.daemon.path) as second:
                    mine, self.client = self.client, second
                    try:
                        self.lend(other, kind)
                    finally:
                        self.client = mine
            took = self.assert_memory_is_back()
            self.assertLess(took, 1.0)

    def test_exporters_killed_while_kernels_read_their_memory(self):
        pointer = self.gpu.alloc(4 * MIB)
        self.gpu.write(pointer, numbers(1))
        region = self.add(n_bytes=4 * MIB, kind=2, handle=self.gpu.legacy_handle(pointer))
        before, slowest = self.gpu.free_bytes(), 0.0
        source = random.Random(5)
        for _ in range(5):
            with Exporter() as other:
                other.ask(do="hammer", path=world.daemon.path, tokens=131072)
                for _ in range(source.randrange(1, 6)):
                    self.assert_answer(region)
            took = within(1.0, lambda: self.gpu.free_bytes() > before - MIB)
            self.assertIsNotNone(took, "%d bytes are missing" % (before - self.gpu.free_bytes()))
            slowest = max(slowest, took)
            self.assert_answer(region)
        print("  5 exporters killed under the kernel: memory back after at most %.0f ms" % (1e3 * slowest))
        self.drop(region)
        self.gpu.free(pointer)

    def test_300_clients_killed_at_random_moments(self):
        vmm = Vmm(self.gpu, [(0, 2 * MIB), (2 * MIB, 2 * MIB)])
        pointer = self.gpu.alloc(4 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.gpu.write(vmm.pointer, numbers(1))
        self.gpu.write(pointer, numbers(1))
        source, slowest = random.Random(9), 0.0
        with Exporter() as other:
            other.tell(do="clients", seed=9, path=world.daemon.path, chunks=vmm.chunks, handle=handle.hex(), uuid=self.gpu.uuid.hex())
            other.answer()
            socket.send_fds(other.socket, [b"."], vmm.fds)
            n_fds = world.daemon.n_fds()
            for i in range(300):
                child, _ = other.ask()
                time.sleep(source.random() * 0.012)  # the random moment
                os.kill(child, signal.SIGKILL)
                took = within(1.0, lambda: world.daemon.n_fds() <= n_fds)
                self.assertIsNotNone(took, "%d descriptors, %d before" % (world.daemon.n_fds(), n_fds))
                slowest = max(slowest, took)
                if i % 20 == 0:
                    self.assert_inline()
        self.assertEqual(world.daemon.metrics()['dropkv_regions{kind="device"}'], 0)
        print("  300 clients killed: descriptors back after at most %.0f ms" % (1e3 * slowest))
        vmm.free()
        self.gpu.free(pointer)
        self.assert_memory_is_back()


class Cycles(Case):
    def test_1000_attachments_leave_no_trace(self):
        vmm = Vmm(self.gpu, [(0, 2 * MIB), (2 * MIB, 2 * MIB)])
        pointer = self.gpu.alloc(4 * MIB)
        handle = self.gpu.legacy_handle(pointer)
        self.gpu.write(vmm.pointer, numbers(1))
        self.gpu.write(pointer, numbers(1))
        self.drop(self.add(vmm.fds, n_bytes=4 * MIB, kind=3, chunks=vmm.chunks))  # what is made once
        self.drop(self.add(n_bytes=4 * MIB, kind=2, handle=handle))
        before, start = self.gpu.free_bytes(), time.monotonic()
        fds = world.daemon.n_fds()
        for i in range(500):
            a = self.add(vmm.fds, n_bytes=4 * MIB, kind=3, chunks=vmm.chunks)
            b = self.add(n_bytes=4 * MIB, kind=2, handle=handle)
            if i % 25 == 0:
                self.assert_answer(a)
                self.assert_answer(b)
            self.drop(a)
            self.drop(b)
        took = time.monotonic() - start
        self.assertEqual(self.gpu.free_bytes(), before)
        self.assertEqual(world.daemon.n_fds(), fds)
        print("  1,000 attachments: %.2f ms each, GPU memory as before" % (1e3 * took / 1000))
        vmm.free()
        self.gpu.free(pointer)

    def test_a_busy_device_lets_go_in_time(self):
        pointer = self.gpu.alloc(4 * MIB)
        self.gpu.write(pointer, numbers(1))
        handle = self.gpu.legacy_handle(pointer)
        with Exporter() as other:
            other.ask(do="hammer", path=world.daemon.path, tokens=32768)
            slowest = 0.0
            for _ in range(5):
                region = self.add(n_bytes=4 * MIB, kind=2, handle=handle)
                self.assert_answer(region)
                start = time.monotonic()
                self.drop(region)
                slowest = max(slowest, time.monotonic() - start)
        print("  beside a client that keeps the device busy: dropped within %.0f ms" % (1e3 * slowest))
        self.assertLess(slowest, 1.0)
        self.gpu.free(pointer)


class Fences(Case):
    def producer(self, other, memory, **order):
        other.tell(do="fence", **order)
        self.assertEqual(other.answer()[0], {})
        socket.send_fds(other.socket, [b"."], [memory.fd])

    def lent(self, other):
        handle = bytes.fromhex(other.ask(do="legacy", bytes=4 * MIB)[0]["handle"])
        other.ask(do="write", seed=1, offset=0)
        return self.add(n_bytes=4 * MIB, kind=2, handle=handle)

    def test_a_producer_that_is_200_ms_late(self):
        with Exporter() as other, Memory(4096) as memory, Client(world.daemon.path) as second:
            region, slot = self.lent(other), self.client.add_memfd(memory.fd, 4096)
            world.answer(self.client, 2)
            start = time.monotonic()
            number = self.client.send(wire.SCORE_BLOCKS, message(region, fence=(slot, 64, 7)))
            self.producer(other, memory, late_s=0.2, die=False, seed=2, offset=0, at=64, value=7)
            others = 0
            while time.monotonic() < start + 0.15:  # nobody waits for it
                answer = second.ask(wire.SCORE_BLOCKS, message(0), numbers(1))
                answer.keep()
                others += 1
            answer = self.client.receive()
            took = time.monotonic() - start
            self.assertEqual(answer.number, number)
            answer.keep()
            self.assertEqual(answer.bulk, world.answer(self.client, 2))  # the late numbers
            self.assertGreater(took, 0.2)
            self.assertGreater(others, 10)
            other.answer()
            print("  a producer 200 ms late: answered after %.0f ms; %d others meanwhile" % (1e3 * took, others))
            self.drop(region)

    def test_a_producer_that_dies_before_its_fence(self):
        with Exporter() as other, Memory(4096) as memory:
            region, slot = self.lent(other), self.client.add_memfd(memory.fd, 4096)
            start = time.monotonic()
            params = PARAMS + wire.integer(wire.TIMEOUT_PARAM, 500000)
            number = self.client.send(wire.SCORE_BLOCKS, message(region, fence=(slot, 0, 1), params=params))
            self.producer(other, memory, late_s=0.05, die=True, seed=2, offset=0, at=0, value=1)
            other.process.wait()
            with Client(world.daemon.path) as second:
                second.ask(wire.SCORE_BLOCKS, message(0), numbers(1)).keep()
            self.assertLess(time.monotonic() - start, 0.5)
            answer = self.client.receive()
            self.assertEqual(answer.number, number)
            status, text = answer.error()
            self.assertEqual(status, wire.TIMEOUT, text)
            self.assertLess(abs(time.monotonic() - start - 0.5), 0.1)
            self.assert_answer(region)  # its memory is still there
            self.drop(region)


class Restarts(Case):
    may_restart = True

    def kill_worker(self):
        pid = world.worker()
        os.kill(pid, signal.SIGKILL)
        return pid

    def test_a_new_worker_has_the_clients_memory(self):
        vmm = Vmm(self.gpu, [(0, 2 * MIB), (2 * MIB, 2 * MIB)])
        pointer = self.gpu.alloc(4 * MIB)
        self.gpu.write(vmm.pointer, numbers(1))
        self.gpu.write(pointer, numbers(2))
        large = Vmm(self.gpu, [(i << 30, 1 << 30) for i in range(8)])
        a = self.add(vmm.fds, n_bytes=4 * MIB, kind=3, chunks=vmm.chunks)
        b = self.add(n_bytes=4 * MIB, kind=2, handle=self.gpu.legacy_handle(pointer))
        c = self.add(large.fds, n_bytes=8 << 30, kind=3, chunks=large.chunks)
        times = []
        for _ in range(5):
            pid, start = self.kill_worker(), time.monotonic()
            while True:
                answer = self.client.ask(wire.SCORE_BLOCKS, message(a))
                if answer.kind == wire.RESULT:
                    break
                self.assertEqual(answer.error()[0], wire.UNAVAILABLE, answer.error()[1])
            times.append(time.monotonic() - start)
            self.assertEqual(answer.bulk, world.answer(self.client, 1))
            self.assert_answer(b, seed=2)
            self.assertNotEqual(world.worker(), pid)
        print("  workers killed with 8 GiB of memory lent: right answers again after %s ms" % ", ".join("%.0f" % (1e3 * t) for t in times))
        for region in (a, b, c):
            self.drop(region)
        large.free()
        vmm.free()
        self.gpu.free(pointer)

    def test_memory_that_a_new_worker_cannot_have(self):
        with Exporter() as other:
            handle = bytes.fromhex(other.ask(do="legacy", bytes=4 * MIB)[0]["handle"])
            other.ask(do="write", seed=1, offset=0)
            region = self.add(n_bytes=4 * MIB, kind=2, handle=handle)
        self.assert_answer(region)
        self.kill_worker()
        while True:
            status, text = self.client.ask(wire.SCORE_BLOCKS, message(region)).error()
            if status != wire.UNAVAILABLE:
                break
        self.assertIn(status, (wire.NOT_FOUND, wire.INVALID), text)
        status, text = self.client.ask(wire.SCORE_BLOCKS, message(region)).error()
        self.assertEqual((status, "registered anew" in text), (wire.NOT_FOUND, True), text)
        self.assert_inline()
        self.drop(region)


class TwoGpus(unittest.TestCase):
    """A daemon with two: each block goes to the one that holds its memory."""

    def test_blocks_go_where_their_memory_is(self):
        if world.gpu.n_gpus < 2:
            self.skipTest("one GPU is here")
        import socket_daemon
        gpus = [world.gpu, cuda.Gpu(1)]
        lent = []
        for i, gpu in enumerate(gpus):
            gpu.enter()
            vmm = Vmm(gpu, [(0, 2 * MIB)])
            gpu.write(vmm.pointer, numbers(i + 1))
            pointer = gpu.alloc(4 * MIB)
            gpu.write(pointer, numbers(i + 1))
            lent.append((vmm, pointer, gpu.legacy_handle(pointer)))
        with socket_daemon.SocketDaemon(DROPKVD, "--device", "cuda:0", "--device", "cuda:1") as daemon, Client(daemon.path) as client:
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
            ups = [int(found.group(1)) for found in (re.search(UP, line) for line in list(daemon.log)) if found]
            os.kill(ups[1], signal.SIGKILL)
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


def main():
    global world
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    world = World()
    with world.daemon:
        started = time.monotonic()
        program = unittest.main(exit=False, verbosity=2)
        print("%.1f s" % (time.monotonic() - started))
    sys.exit(not program.result.wasSuccessful())


if ROLE is not None:
    exporter(int(sys.argv[1]))
elif __name__ == "__main__":
    main()
