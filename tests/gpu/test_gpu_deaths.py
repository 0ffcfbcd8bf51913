"""GPU memory lent to a daemon, when producers are late and when exporters, clients and workers die. Needs
one GPU and nobody else on it.

usage: test_gpu_deaths.py DROPKVD [unittest arguments]
"""
import os
import random
import signal
import socket
import time

from gpu_blocks import PARAMS, message, numbers
from gpu_case import Case, main
from gpu_exporter import Exporter

import wire
from cuda import MIB, Vmm, within
from wire import Client, Memory


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
                with Client(self.world.daemon.path) as second:
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
                other.ask(do="hammer", path=self.world.daemon.path, tokens=131072)
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
            other.tell(do="clients", seed=9, path=self.world.daemon.path, chunks=vmm.chunks, handle=handle.hex(), uuid=self.gpu.uuid.hex())
            other.answer()
            socket.send_fds(other.socket, [b"."], vmm.fds)
            n_fds = self.world.daemon.n_fds()
            for i in range(300):
                child, _ = other.ask()
                time.sleep(source.random() * 0.012)  # the random moment
                os.kill(child, signal.SIGKILL)
                took = within(1.0, lambda: self.world.daemon.n_fds() <= n_fds)
                self.assertIsNotNone(took, "%d descriptors, %d before" % (self.world.daemon.n_fds(), n_fds))
                slowest = max(slowest, took)
                if i % 20 == 0:
                    self.assert_inline()
        self.assertEqual(self.world.daemon.metrics()['dropkv_regions{kind="device"}'], 0)
        print("  300 clients killed: descriptors back after at most %.0f ms" % (1e3 * slowest))
        vmm.free()
        self.gpu.free(pointer)
        self.assert_memory_is_back()


class Restarts(Case):
    may_restart = True

    def kill_worker(self):
        pid = self.world.worker()
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
            self.assertEqual(answer.bulk, self.world.answer(self.client, 1))
            self.assert_answer(b, seed=2)
            self.assertNotEqual(self.world.worker(), pid)
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
        fds = self.world.daemon.n_fds()
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
        self.assertEqual(self.world.daemon.n_fds(), fds)
        print("  1,000 attachments: %.2f ms each, GPU memory as before" % (1e3 * took / 1000))
        vmm.free()
        self.gpu.free(pointer)

    def test_a_busy_device_lets_go_in_time(self):
        pointer = self.gpu.alloc(4 * MIB)
        self.gpu.write(pointer, numbers(1))
        handle = self.gpu.legacy_handle(pointer)
        with Exporter() as other:
            other.ask(do="hammer", path=self.world.daemon.path, tokens=32768)
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
        with Exporter() as other, Memory(4096) as memory, Client(self.world.daemon.path) as second:
            region, slot = self.lent(other), self.client.add_memfd(memory.fd, 4096)
            self.world.answer(self.client, 2)
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
            self.assertEqual(answer.bulk, self.world.answer(self.client, 2))  # the late numbers
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
            with Client(self.world.daemon.path) as second:
                second.ask(wire.SCORE_BLOCKS, message(0), numbers(1)).keep()
            self.assertLess(time.monotonic() - start, 0.5)
            answer = self.client.receive()
            self.assertEqual(answer.number, number)
            status, text = answer.error()
            self.assertEqual(status, wire.TIMEOUT, text)
            self.assertLess(abs(time.monotonic() - start - 0.5), 0.1)
            self.assert_answer(region)  # its memory is still there
            self.drop(region)


if __name__ == "__main__":
    main()
