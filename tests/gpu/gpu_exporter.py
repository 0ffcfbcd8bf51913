"""A process that exports GPU memory, with a context of its own, and dies when it is told to.

It does what it is told, line by line: {"do": ..., ...} in, a line of JSON out, descriptors beside it.
Tests use Exporter; the process runs this file.
"""
import ctypes
import json
import mmap
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time

from gpu_blocks import big_message, message, numbers

import cuda
import wire
from cuda import MIB, Vmm
from wire import Client


class Exporter:
    def __init__(self):
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.process = subprocess.Popen([sys.executable, "-B", os.path.abspath(__file__), str(theirs.fileno())],
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


class Orders:
    """What the other process can be told. One that is told to be clients never touches CUDA."""

    def __init__(self, fd):
        self.link = socket.socket(fileno=fd)
        self.lines = self.link.makefile("rb")
        self.gpu, self.pointer, self.held = None, None, []

    def obey(self):
        for line in self.lines:
            order = json.loads(line)
            if order["do"] != "clients" and self.gpu is None:
                self.gpu = cuda.open_gpu()
            reply, fds = getattr(self, "do_" + order["do"])(order) or ({}, [])
            socket.send_fds(self.link, [json.dumps(reply).encode() + b"\n"], fds)

    def borrow_fds(self):
        """Says that it is ready for descriptors, and takes them."""
        self.link.sendall(b"{}\n")
        _, fds, _, _ = socket.recv_fds(self.link, 1, 100)
        return fds

    def do_legacy(self, order):
        self.pointer = self.gpu.alloc(order["bytes"])
        return {"handle": self.gpu.legacy_handle(self.pointer).hex()}, []

    def do_vmm(self, order):
        vmm = Vmm(self.gpu, [tuple(chunk) for chunk in order["chunks"]])
        self.pointer = vmm.pointer
        return {}, vmm.fds

    def do_write(self, order):
        self.gpu.write(self.pointer, numbers(order["seed"]), order["offset"])
        self.gpu.synchronize()

    def do_free(self, order):
        self.gpu.free(self.pointer)

    def do_fence(self, order):
        """Late, as a producer is: then the data, then the slot, in one stream."""
        slot = mmap.mmap(self.borrow_fds()[0], 4096)
        device = self.gpu.register_host(ctypes.addressof(ctypes.c_char.from_buffer(slot)), 4096)
        self.held.append(slot)
        time.sleep(order["late_s"])
        if order["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.gpu.write(self.pointer, numbers(order["seed"]), order["offset"])
        self.gpu.stream_write(device + order["at"], order["value"])
        self.gpu.synchronize()

    def do_hammer(self, order):
        """A client of its own, with long requests in flight all the time, until it is killed."""
        client = Client(order["path"])
        _, n_bytes = big_message(1, order["tokens"])
        pointer = self.gpu.alloc(n_bytes)
        self.gpu.call("cuMemsetD16_v2", ctypes.c_uint64(pointer), 0x3C00, ctypes.c_size_t(n_bytes // 2))
        self.gpu.synchronize()
        lent = wire.region(n_bytes, kind=2, uuid=self.gpu.uuid, handle=self.gpu.legacy_handle(pointer))
        long, _ = big_message(client.ask(wire.REGION_ADD, lent).object()[0], order["tokens"])
        for _ in range(8):
            client.send(wire.SCORE_BLOCKS, long)
        client.receive().keep()
        self.link.sendall(b"{}\n")
        while True:
            client.send(wire.SCORE_BLOCKS, long)
            client.receive().keep()

    def do_clients(self, order):
        make_clients(self.link, self.lines, order, self.borrow_fds())


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


if __name__ == "__main__":
    Orders(int(sys.argv[1])).obey()
