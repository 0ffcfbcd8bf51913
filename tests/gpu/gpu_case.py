"""What tests of lent GPU memory share: one daemon on the GPU for a whole program, and the promise that
every test ends with the worker that it began with and gives all GPU memory back.

What is right is what the same daemon answers to the same numbers sent inline.
"""
import re
import resource
import struct
import sys
import time
import unittest

from gpu_blocks import message, numbers

import cuda
import wire
from cuda import MIB, within
from socket_daemon import SocketDaemon
from wire import Client

UP = r"the worker of device \S+ is up: process (\d+)"


def workers(daemon):
    """The pids of the workers that came up, in that order."""
    return [int(found.group(1)) for found in (re.search(UP, line) for line in list(daemon.log)) if found]


class World:
    """One daemon for all tests, and what it answers to the numbers of a seed."""

    def __init__(self, dropkvd):
        self.gpu = cuda.open_gpu()
        self.daemon = SocketDaemon(dropkvd, "--device", "cuda:0")
        self.expected = {}

    def worker(self):
        """The pid of the worker that is up."""
        return workers(self.daemon)[-1]

    def restarts(self):
        return next(v for k, v in self.daemon.metrics().items() if k.startswith("dropkv_worker_restarts_total"))

    def answer(self, client, seed):
        if seed not in self.expected:
            answer = client.ask(wire.SCORE_BLOCKS, message(0), numbers(seed))
            answer.keep()
            self.expected[seed] = answer.bulk
        return self.expected[seed]


class Case(unittest.TestCase):
    """Every test ends with the worker that it began with, unless it says otherwise, and gives all
    GPU memory back."""

    world = None  # made by main()
    may_restart = False

    def setUp(self):
        self.gpu = self.world.gpu
        self.client = Client(self.world.daemon.path)
        self.world.answer(self.client, 1)
        self.restarts = self.world.restarts()
        self.free_before = self.gpu.free_bytes()

    def tearDown(self):
        self.client.socket.close()
        self.assert_memory_is_back()
        if not self.may_restart:
            self.assertEqual(self.world.restarts(), self.restarts)

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
        self.assertEqual(answer.bulk, self.world.answer(self.client, 1))

    def assert_answer(self, region, offset=0, seed=1, client=None):
        client = client or self.client
        answer = client.ask(wire.SCORE_BLOCKS, message(region, offset))
        answer.keep()
        self.assertEqual(answer.bulk, self.world.answer(client, seed))

    def drop(self, region, client=None):
        (client or self.client).ask(wire.REGION_DROP, struct.pack("<II", region, 0)).object()


def main():
    """Runs the tests of the program that calls it: DROPKVD [unittest arguments]."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Case.world = World(sys.argv.pop(1))
    with Case.world.daemon:
        started = time.monotonic()
        program = unittest.main(exit=False, verbosity=2)
        print("%.1f s" % (time.monotonic() - started))
    sys.exit(not program.result.wasSuccessful())
