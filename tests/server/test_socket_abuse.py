"""Clients of the local socket that mean harm: each is told so, or closed, and others go on.

usage: test_socket_abuse.py DROPKVD
"""
import fcntl
import os
import signal
import socket
import struct
import unittest

import wire
from socket_case import CACHE_BYTES, PARAMS, QUERY_BYTES, SocketDaemon, http_answer, inline_block, tensors
from wire import Client, Memory


class Abuse(unittest.TestCase):
    """Every one of these leaves the daemon with the descriptors and mappings it had, and answers
    the next client."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = SocketDaemon()
        cls.n_fds = cls.daemon.n_fds()
        cls.expected = http_answer(cls.daemon)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def tearDown(self):
        with Client(self.daemon.path) as client:
            answer = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS), tensors())
            self.assertEqual(answer.keep(), [self.expected])
        self.daemon.wait_until_clean(self.n_fds)

    def assert_closes(self, client, status=wire.MALFORMED):
        answer = client.receive()
        self.assertEqual(answer.error()[0], status)
        self.assertTrue(client.is_closed())

    def test_what_comes_before_hello_is_refused(self):
        for kind, payload in ((wire.PING, bytes(8)), (wire.SCORE_BLOCKS, wire.score_blocks([inline_block()]))):
            with Client(self.daemon.path, hello=False) as client:
                client.send(kind, payload)
                self.assert_closes(client)
        with Client(self.daemon.path, hello=False) as client:
            client.send_raw(wire.header(wire.HELLO, 1, bytes(16), version=9))
            self.assert_closes(client, wire.UNSUPPORTED)
        with Client(self.daemon.path) as client:
            client.send(wire.HELLO, struct.pack("<IHHII", wire.MAGIC, 1, 1, 0, 0))
            self.assert_closes(client)

    def test_descriptors_that_were_not_announced_break_the_connection(self):
        memory = Memory(4096)
        for claimed, n in ((0, 1), (1, 0), (1, 2), (2, 1), (1, 128), (128, 1), (1, 253)):
            with Client(self.daemon.path) as client:
                client.send(wire.REGION_ADD, wire.region(4096), fds=[memory.fd] * n, claimed_fds=claimed)
                client.socket.shutdown(socket.SHUT_WR)
                self.assertTrue(client.is_closed(), (claimed, n))
        memory.__exit__()

    def test_vectors_outside_the_bulk_are_errors_of_the_request(self):
        memory = Memory(len(tensors()))
        memory.map[:] = tensors()
        with Client(self.daemon.path) as client:
            number = client.add_memfd(memory.fd, len(tensors()))

            def ask(bulk, sink_floats=0, floats=0):
                views = [wire.view(number, 0, 32, 256, floats=floats)] + [
                    wire.view(number, QUERY_BYTES + i * CACHE_BYTES, 32, CACHE_BYTES) for i in range(2)]
                block = wire.block(views, tokens=96, sink_floats=sink_floats)
                return client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], PARAMS), bulk=bulk)

            sinks = struct.pack("<3f", 9.0, 1.0, 1.0)
            self.assertEqual(ask(sinks, 2).kind, wire.RESULT)
            for bulk, place in ((b"", 1), (sinks, 3), (sinks, 4), (sinks, 2**32 - 1), (b"\0" * 7, 1)):
                status, text = ask(bulk, place).error()
                self.assertEqual(status, wire.INVALID, text)
                self.assertIn("sink_logits", text)
                self.assertIn("query", ask(bulk, 0, place).error()[1])
        memory.__exit__()

    def test_what_policies_take_must_lie_in_the_bulk(self):
        """Each of the four whole, cut by a byte, and without an end; and given to a policy that takes none."""
        memory = Memory(len(tensors()))
        memory.map[:] = tensors()
        with Client(self.daemon.path) as client:
            number = client.add_memfd(memory.fd, len(tensors()))
            views = [wire.view(number, 0, 32, 256)] + [
                wire.view(number, QUERY_BYTES + i * CACHE_BYTES, 32, CACHE_BYTES) for i in range(2)]

            def ask(policy, which, place, bulk, **block):
                extras = [place if i == which else 0 for i in range(4)]
                params = PARAMS + wire.text(wire.POLICY, policy)
                return client.ask(wire.SCORE_BLOCKS, wire.score_blocks(
                    [wire.block(views, tokens=96, extras=extras, **block)], params), bulk=bulk)

            for which, (name, policy, n) in enumerate((("token_weight", "criticalkv", 96), ("carry_in", "h2o", 96),
                                                       ("external_scores", "external", 96),
                                                       ("value_metric", "restkv", 2 * 8 * 8))):
                whole = bytes(4) + struct.pack("<%df" % n, *range(n))
                self.assertEqual(ask(policy, which, 2, whole).kind, wire.RESULT, name)
                for place, bulk in ((2, whole[:-1]), (3, whole), (2**32 - 1, whole), (1, b"")):
                    status, text = ask(policy, which, place, bulk).error()
                    self.assertEqual(status, wire.INVALID, text)
                    self.assertIn(name, text)
                status, text = ask("dropkv", which, 2, whole).error()
                self.assertEqual(status, wire.INVALID, text)
                self.assertIn(name + ": policy dropkv does not take it", text)
            for sizes in ({"kv_heads": 2**32 - 1, "tokens": 2**32 - 1}, {"q_heads": 2**32 - 1, "dim": 2**32 - 1}):
                block = wire.block(views, **sizes, extras=(0, 0, 1, 1)) if "tokens" in sizes else wire.block(
                    views, tokens=96, **sizes, extras=(0, 0, 0, 1))
                status, text = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], PARAMS), bulk=bytes(64)).error()
                self.assertEqual(status, wire.INVALID, text)
        memory.__exit__()

    def test_descriptors_of_other_kinds_are_refused(self):
        reading, writing = os.pipe()
        here, there = socket.socketpair()
        with Client(self.daemon.path) as client:
            folder = os.open("/", os.O_RDONLY)
            path_only = os.open("/dev/shm", os.O_PATH)
            fds = [reading, writing, here.fileno(), client.socket.fileno(), folder, path_only,
                   os.open("/dev/zero", os.O_RDWR), os.eventfd(0) if hasattr(os, "eventfd") else os.dup(folder)]
            for fd in fds:
                self.assertEqual(client.ask(wire.REGION_ADD, wire.region(4096), fds=[fd]).error()[0], wire.INVALID)
        for fd in (*fds[:2], *fds[4:]):
            os.close(fd)
        here.close()
        there.close()

    def test_the_quota_of_regions_holds(self):
        memory = Memory(4096)
        with Client(self.daemon.path) as client:
            for _ in range(256):
                client.add_memfd(memory.fd, 4096)
            self.assertEqual(client.ask(wire.REGION_ADD, wire.region(4096), fds=[memory.fd]).error()[0], wire.BUSY)
        memory.__exit__()

    def test_truncated_memory_is_an_error_of_the_request(self):
        data = tensors()
        fd = wire.new_memfd(data, sealed=False)
        with Client(self.daemon.path) as client:
            self.assertEqual(client.ask(wire.REGION_ADD, wire.region(len(data) + 1), fds=[fd]).error()[0], wire.INVALID)
            number = client.add_memfd(fd, len(data))
            message = wire.score_blocks([inline_block(0, number)], PARAMS)
            self.assertEqual(client.ask(wire.SCORE_BLOCKS, message).keep(), [self.expected])
            os.ftruncate(fd, 100)
            status, text = client.ask(wire.SCORE_BLOCKS, message).error()
            self.assertEqual(status, wire.INVALID)
            self.assertIn("ends at", text)
            os.ftruncate(fd, 0)
            for _ in range(200):  # while it is read
                ask = client.send(wire.SCORE_BLOCKS, message)
                os.ftruncate(fd, len(data))
                os.pwrite(fd, data, 0)
                os.ftruncate(fd, 0)
                answer = client.receive()
                self.assertEqual(answer.number, ask)
                self.assertIn(answer.kind, (wire.RESULT, wire.ERROR))
        os.close(fd)

    def test_a_terabyte_of_holes_costs_nothing(self):
        before_kib = self.daemon.total_rss_kib()
        for sealed in (True, False):
            fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, 1 << 40)
            if sealed:
                fcntl.fcntl(fd, wire.F_ADD_SEALS, wire.F_SEAL_SHRINK | wire.F_SEAL_GROW)
            with Client(self.daemon.path) as client:
                number = client.add_memfd(fd, 1 << 40)
                far = wire.block([wire.view(number, 0, 32, 256), wire.view(number, 0, 1 << 32, 32),
                                  wire.view(number, 0, 1 << 32, 32)], tokens=96)
                client.ask(wire.SCORE_BLOCKS, wire.score_blocks([far], PARAMS)).keep()
                huge = wire.block([wire.view(number, 0, 2048, 2048)] + [wire.view(number, 0, 2048, 2048 << 21)] * 2,
                                  q_heads=4, kv_heads=4, dim=512, tokens=1 << 21)
                self.assertEqual(client.ask(wire.SCORE_BLOCKS, wire.score_blocks([huge], PARAMS)).error()[0], wire.TOO_LARGE)
                near = wire.block([wire.view(number, (1 << 40) - 4096 * 2, 32, 256)] +
                                  [wire.view(number, (1 << 40) - 4096, 32, 32)] * 2, tokens=96)
                client.ask(wire.SCORE_BLOCKS, wire.score_blocks([near], PARAMS)).keep()
            self.assertEqual(os.fstat(fd).st_blocks, 0)
            os.close(fd)
        self.assertLess(self.daemon.total_rss_kib() - before_kib, 16 * 1024)

    def test_addresses_are_bounded(self):
        """Holes cost their owner nothing; the addresses that stand for them are the daemon's."""
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 40)
        with Client(self.daemon.path) as client:
            regions = [client.add_memfd(fd, 1 << 40) for _ in range(8)]
            status, text = client.ask(wire.REGION_ADD, wire.region(1), fds=[fd]).error()
            self.assertEqual((status, "8796093022208" in text), (wire.BUSY, True))
            with Client(self.daemon.path) as other:  # its own business
                other.add_memfd(fd, 1 << 40)
            client.ask(wire.REGION_DROP, struct.pack("<II", regions[0], 0)).object()
            client.add_memfd(fd, 1 << 40)
        os.close(fd)

    def test_numbers_that_name_nothing_are_errors_of_the_request(self):
        with Client(self.daemon.path) as client:
            self.assertEqual(client.ask(wire.SCORE, wire.score(1, 1, 96)).error()[0], wire.NOT_FOUND)
            for kind in (wire.REGION_DROP, wire.REGION_DETACH, wire.CACHE_DROP, wire.STASH_DROP):
                for number in (0, 1, 257, 2**32 - 1):
                    self.assertEqual(client.ask(kind, struct.pack("<II", number, 0)).error()[0], wire.NOT_FOUND)
            message = wire.score_blocks([inline_block(0, 5)], PARAMS)
            self.assertEqual(client.ask(wire.SCORE_BLOCKS, message).error()[0], wire.NOT_FOUND)

    def test_offsets_near_every_limit_stay_inside(self):
        memory = Memory(len(tensors()))
        memory.map[:] = tensors()
        edges = [0, 1, 4095, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
        with Client(self.daemon.path) as client:
            for offset in edges:
                for n_bytes in edges[1:]:
                    answer = client.ask(wire.REGION_ADD, wire.region(n_bytes, offset=offset), fds=[memory.fd]) \
                        if offset + n_bytes < 2**64 else None
                    if answer is None:
                        continue
                    fits = offset + n_bytes <= len(tensors())
                    self.assertEqual(answer.kind, wire.DONE if fits else wire.ERROR, (offset, n_bytes))
            number = client.add_memfd(memory.fd, len(tensors()))
            for offset in edges[1:]:
                bad = wire.block([wire.view(number, offset, 32, 256)] + [wire.view(number, 0, 32, 32)] * 2, tokens=96)
                answer = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([bad], PARAMS))
                self.assertEqual(answer.kind, wire.RESULT if offset + QUERY_BYTES <= len(tensors()) else wire.ERROR, offset)
                message = wire.score_blocks([inline_block(0, number)], PARAMS, fence=(number, offset & ~7, 2**64 - 1))
                if offset & ~7 > len(tensors()) - 8:
                    self.assertEqual(client.ask(wire.SCORE_BLOCKS, message).error()[0], wire.INVALID)
        memory.__exit__()

    def test_a_client_that_does_not_read_is_not_read_from(self):
        with Client(self.daemon.path) as client:
            ping = wire.header(wire.PING, 1, bytes(8)) * 512
            client.socket.settimeout(0.5)
            sent = 0
            try:
                while sent < 64 << 20:
                    sent += client.socket.send(ping)
            except TimeoutError:
                pass
            self.assertLess(sent, 64 << 20)

    def test_random_bytes_close_one_connection_only(self):
        with Client(self.daemon.path) as bystander:
            for seed in range(200):
                with Client(self.daemon.path) as client:
                    junk = bytes((seed * 131 + i * i * 7 + (i >> 3)) & 0xFF for i in range(300))
                    client.send_raw(wire.header(1 + seed % 13, 1, junk[: 8 + seed]))
                    client.socket.shutdown(socket.SHUT_WR)
                    client.is_closed()
            self.assertEqual(bystander.ask(wire.PING, bytes(8)).kind, wire.PONG)

    def test_clients_killed_at_any_moment_leave_nothing(self):
        for i in range(300):
            pid = os.fork()
            if pid == 0:
                self.doomed(i)
            os.waitpid(pid, 0)
            if i % 20 == 19:
                self.daemon.wait_until_clean(self.n_fds)

    def doomed(self, i):
        """A client in a process of its own that dies after its i-th step."""
        steps = i % 10
        try:
            client = Client(self.daemon.path, hello=steps > 0)
            memory = Memory(1 << 16, sealed=i % 3 != 0)
            memory.map[: len(tensors())] = tensors()
            for step in range(steps):
                if step == 1:
                    number = client.add_memfd(memory.fd, 1 << 16)
                elif step == 2:
                    client.send_raw(wire.header(wire.REGION_ADD, 50, wire.region(4096), n_fds=1)[: 20 + i % 100], [memory.fd])
                    break
                elif step in (4, 5):
                    client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block(0, number)], PARAMS, fence=(number, 0, 2**64 - 1)))
                elif step > 5:
                    client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block(0, number)] * 8, PARAMS))
        finally:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    unittest.main()
