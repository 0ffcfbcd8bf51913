"""The local socket's bounds: descriptors, time, turns, places, and how a daemon begins and ends on it.

usage: test_socket_limits.py DROPKVD
"""
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest

import wire
from daemon import Daemon
from socket_case import DROPKVD, PARAMS, QUERY_BYTES, SocketDaemon, http_answer, inline_block, tensors
from wire import Client, Memory


class Limits(unittest.TestCase):
    def test_few_descriptors_turn_clients_away_and_nothing_else(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            daemon = SocketDaemon()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with daemon:
            n_fds = daemon.n_fds()
            memory = Memory(4096)
            with Client(daemon.path) as client:
                client.send(wire.REGION_ADD, wire.region(4096), fds=[memory.fd] * 128, claimed_fds=1)
                client.socket.shutdown(socket.SHUT_WR)
                self.assertTrue(client.is_closed())
            daemon.wait_until_clean(n_fds)
            crowd = []
            for _ in range(100):
                crowd.append(Client(daemon.path, hello=False))
            daemon.wait_for_log("no file descriptors are left")
            for client in crowd:
                client.socket.close()
            daemon.wait_until_clean(n_fds)
            with Client(daemon.path) as client:
                self.assertEqual(client.ask(wire.PING, bytes(8)).kind, wire.PONG)
            memory.__exit__()

    def test_a_place_that_a_new_worker_may_not_write_is_not_written(self):
        restarts, up = ('dropkv_worker_%s{worker="0",device="cpu"}' % name for name in ("restarts_total", "up"))
        with SocketDaemon() as daemon, Client(daemon.path) as client, Memory(1 << 16) as place:
            output = client.add_memfd(place.fd, 1 << 16, writable=1)
            fcntl.fcntl(place.fd, wire.F_ADD_SEALS, wire.F_SEAL_FUTURE_WRITE)
            os.kill(daemon.processes()[1], signal.SIGKILL)
            daemon.wait_for_metric(restarts, lambda v: v == 1)
            daemon.wait_for_metric(up, lambda v: v == 1)
            for offset in (0, 1 << 12):
                message = wire.score_blocks([inline_block()], PARAMS, output=(output, offset, 96))
                status, text = client.ask(wire.SCORE_BLOCKS, message, tensors()).error()
                self.assertEqual((status, "registered anew" in text), (wire.NOT_FOUND, True), text)
            self.assertEqual(daemon.metrics()[restarts], 1, "the worker died of it")

    def test_requests_that_wait_for_fences_leave_the_queue_to_others(self):
        """As many as the queue has places wait for a producer that never comes."""
        with SocketDaemon() as daemon, Client(daemon.path) as client, Memory(16 + len(tensors())) as memory:
            expected = http_answer(daemon)
            memory.map[16:] = tensors()
            number = client.add_memfd(memory.fd, 16 + len(tensors()))
            for _ in range(256):
                client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block(16, number)], PARAMS, fence=(number, 0, 1)))
            client.send(wire.PING, bytes(8))
            self.assertEqual(client.receive().kind, wire.PONG)  # all of them are taken
            self.assertEqual(http_answer(daemon), expected)
            memory.map[0:8] = struct.pack("<Q", 1)
            answers = [client.receive() for _ in range(256)]
            self.assertIn(wire.RESULT, {answer.kind for answer in answers})
            self.assertLessEqual({answer.error()[0] for answer in answers if answer.kind == wire.ERROR}, {wire.BUSY})
            self.assertEqual(http_answer(daemon), expected)

    def test_requests_of_many_layers_hold_no_more_than_a_share(self):
        """250 messages of 150 bytes and 1,024 layers each, with and without sinks, wait for a producer that never comes."""
        n_requests, n_layers, row, share = 250, 1024, 8 * 4, 64 << 20
        params = wire.integer(wire.WINDOW, 1) + wire.integer(wire.KEEP_TOKENS, 24)
        with SocketDaemon("--max-client-bytes", str(share), "--max-body-bytes", str(share)) as daemon, Memory(1 << 20) as memory:
            expected = http_answer(daemon)
            before_kib = daemon.total_rss_kib()
            for kv_heads, has_sinks in ((1, 0), (1, 0), (2, 1)):  # what one held is had again by the next
                with Client(daemon.path) as client:
                    region = client.add_memfd(memory.fd, 1 << 20)
                    view = wire.view(region, 0, row, 96 * row)
                    q_heads = 512 * kv_heads
                    layout = bytearray(wire.cache([view] * (2 * n_layers), q_heads=q_heads, kv_heads=kv_heads))
                    layout[23] = has_sinks
                    cache = client.ask(wire.CACHE_ADD, bytes(layout), bytes(has_sinks * n_layers * q_heads * 4)).object()[0]
                    stash = client.ask(wire.STASH_ADD, wire.stash(region, 8, row, 8 * row, n_layers=n_layers)).object()[0]
                    message = wire.score(cache, stash, 96, layers=(0, n_layers), params=params, fence=(region, 0, 1))
                    for _ in range(n_requests):
                        client.send(wire.SCORE, message)
                    last = client.send(wire.PING, bytes(8))
                    refused = []
                    while (answer := client.receive()).number != last:
                        refused.append(answer.error())
                    self.assertEqual({status for status, _ in refused}, {wire.BUSY}, refused[:1])
                    self.assertIn("this client's share of memory", refused[0][1])
                    self.assertLess(len(refused), n_requests - 5)
                    self.assertLess(daemon.total_rss_kib() - before_kib, 2 * share >> 10)
                self.assertEqual(http_answer(daemon), expected)

    def test_what_is_copied_is_bounded_and_what_is_only_written_or_waited_for_is_not(self):
        with SocketDaemon("--max-body-bytes", "4096", "--max-json-bytes", "4096") as daemon, Client(daemon.path) as client:
            data = tensors()
            for sealed in (True, False):
                with Memory(len(data)) as memory, Memory(4096, sealed=False) as place:
                    loose = wire.new_memfd(data, sealed=False)
                    memory.map[:] = data
                    place.map[:8] = struct.pack("<Q", 1)
                    number = client.add_memfd(memory.fd if sealed else loose, len(data))
                    output = client.add_memfd(place.fd, 4096, writable=1)
                    message = wire.score_blocks([inline_block(0, number)], PARAMS, fence=(output, 0, 1), output=(output, 128, 96))
                    answer = client.ask(wire.SCORE_BLOCKS, message)
                    if sealed:
                        self.assertEqual(len(answer.keep(place.map[128 : 128 + 96])[0]), 24)
                    else:
                        self.assertEqual(answer.error()[0], wire.TOO_LARGE)
                        self.assertIn("would have to be copied", answer.error()[1])
                    os.close(loose)

    def test_a_large_message_costs_no_memory_when_it_is_answered(self):
        message = wire.score_blocks([inline_block()] * 4000, PARAMS)  # 900 KB, refused for its bulk
        with SocketDaemon("--max-body-bytes", "16384", "--max-json-bytes", "4096") as daemon:
            def rss_kib():
                with open("/proc/%d/status" % daemon.process.pid, encoding="ascii") as file:
                    return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
            crowd = [Client(daemon.path) for _ in range(40)]
            before_kib = rss_kib()
            for client in crowd:
                self.addCleanup(client.socket.close)
                self.assertEqual(client.ask(wire.SCORE_BLOCKS, message, bytes(16385)).error()[0], wire.TOO_LARGE)
            deadline = time.monotonic() + 20
            while rss_kib() - before_kib > 10000 and time.monotonic() < deadline:
                self.assertEqual(crowd[0].ask(wire.PING, bytes(8)).kind, wire.PONG)
            self.assertLess(rss_kib() - before_kib, 10000)
            for client in crowd:
                answer = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS), tensors())
                self.assertEqual(len(answer.keep()[0]), 24)

    def lend_layers(self, client, memory, n_layers, n_heads):
        """A cache of layers that all lie in the same place, and a stash."""
        row, n_bytes = 8 * 4, len(memory.map)
        region = client.add_memfd(memory.fd, n_bytes)
        view = wire.view(region, 0, row, 0)
        cache = client.ask(wire.CACHE_ADD, wire.cache([view] * (2 * n_layers), n_heads, n_heads)).object()[0]
        return cache, client.ask(wire.STASH_ADD, wire.stash(region, 8, row, 0, n_layers=n_layers)).object()[0]

    def test_large_answers_by_recency_are_a_threads_work(self):
        n_layers, n_heads, tokens, k = 64, 8, 2000, 1000
        params = wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, k)
        with SocketDaemon("--max-queue-requests", "2", "--max-client-requests", "1") as daemon, Memory(1 << 16) as memory:
            def n_threads():
                return len(os.listdir("/proc/%d/task" % daemon.process.pid))
            before, crowd = n_threads(), [Client(daemon.path) for _ in range(5)]
            for client in crowd:
                self.addCleanup(client.socket.close)
                cache, stash = self.lend_layers(client, memory, n_layers, n_heads)

            def message(n):
                return wire.score(cache, stash, tokens, layers=(0, n), params=params, flags=4)
            worker = daemon.processes()[1]
            os.kill(worker, signal.SIGSTOP)
            try:
                crowd[0].send(wire.SCORE, message(1))  # has the client's only place
                for n, more in ((1, False), (n_layers, True)):
                    answer = crowd[0].ask(wire.SCORE, message(n))
                    self.assertEqual((answer.kind, answer.payload[4]), (wire.RESULT, 1))
                    heads = answer.keep()
                    self.assertEqual((len(heads), len(heads[-1])), (n, n_heads * k))
                    self.assertEqual(heads[-1][-k:][-996:], list(range(tokens - 996, tokens)))
                    self.assertEqual(n_threads() > before, more)
                for client in crowd[1:]:  # who leaves meanwhile
                    client.send(wire.SCORE, message(n_layers))
                    client.send(wire.SCORE, message(n_layers))
                    client.socket.close()
            finally:
                os.kill(worker, signal.SIGCONT)
            daemon.wait_for_metric("dropkv_body_bytes", lambda n: n == 0)

    def test_answers_by_recency_that_nobody_waits_for_are_not_written(self):
        """Forty of 16 MiB: those that no thread has begun when they are called off end like others that wait."""
        n_layers, n_heads, tokens, k, numbers = 256, 8, 2048, 2000, range(100, 140)
        params = wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, k)
        with SocketDaemon("--max-queue-requests", "2", "--max-client-requests", "1") as daemon, Memory(1 << 16) as memory, \
                Client(daemon.path) as client:
            cache, stash = self.lend_layers(client, memory, n_layers, n_heads)

            def message(n):
                return wire.score(cache, stash, tokens, layers=(0, n), params=params, flags=4)
            worker = daemon.processes()[1]
            os.kill(worker, signal.SIGSTOP)
            try:
                client.send(wire.SCORE, message(1))  # has the client's only place
                client.send_raw(b"".join(wire.header(wire.SCORE, n, message(n_layers)) for n in numbers) + b"".join(
                    wire.header(wire.CANCEL, 200 + n, struct.pack("<Q", n)) for n in numbers))
                answers = {a.number: a for a in (client.receive() for _ in numbers)}
            finally:
                os.kill(worker, signal.SIGCONT)
            self.assertEqual(sorted(answers), list(numbers))
            written = [a for a in answers.values() if a.kind == wire.RESULT]
            self.assertTrue(all(a.payload[4] == 1 for a in written))
            self.assertTrue(all(a.error()[0] == wire.CANCELLED for a in answers.values() if a.kind != wire.RESULT))
            self.assertLess(len(written), 30)
            daemon.wait_for_metric("dropkv_body_bytes", lambda n: n == 0)

    def test_a_daemon_that_nobody_waits_for_stops_at_once(self):
        """What a worker still has of a client that left is no request that is not answered."""
        with SocketDaemon("--drain-timeout-ms", "10000") as daemon:
            os.kill(daemon.processes()[1], signal.SIGSTOP)
            with Client(daemon.path) as client:
                client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS), tensors())
                daemon.wait_for_metric("dropkv_running_requests", lambda n: n == 1)
            daemon.wait_for_metric('dropkv_connections{transport="socket"}', lambda n: n == 0)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_log("draining, 0 requests")
            self.assertEqual(daemon.wait(), 0)

    def test_a_turn_of_long_requests_is_short(self):
        """A ping does not wait for all that others sent before: 64 messages each, of 150 bytes and 1,024 layers."""
        n_clients, n_requests, n_layers = 4, 64, 1024
        row = 8 * 4
        with SocketDaemon() as daemon, Memory(1 << 16) as memory, Client(daemon.path) as other:
            crowd = []
            for _ in range(n_clients):
                client = Client(daemon.path)
                self.addCleanup(client.socket.close)
                region = client.add_memfd(memory.fd, 1 << 16, writable=1)
                view = wire.view(region, 0, row, 96 * row)
                cache = client.ask(wire.CACHE_ADD, wire.cache([view] * (2 * n_layers))).object()[0]
                stash = client.ask(wire.STASH_ADD, wire.stash(region, 8, row, 8 * row, n_layers=n_layers)).object()[0]
                message = wire.score(cache, stash, 96, layers=(0, n_layers), params=PARAMS, output=(region, 0, 4))  # no room
                crowd.append((client, message))
            os.kill(daemon.process.pid, signal.SIGSTOP)
            os.waitpid(daemon.process.pid, os.WUNTRACED)
            for client, message in crowd:
                client.send_raw(b"".join(wire.header(wire.SCORE, 100 + i, message) for i in range(n_requests)))
            other.send(wire.PING, bytes(8))  # the last to come
            started = time.monotonic()
            os.kill(daemon.process.pid, signal.SIGCONT)
            self.assertEqual(other.receive().kind, wire.PONG)
            waited = time.monotonic() - started
            for client, _ in crowd:
                for _ in range(n_requests):
                    self.assertEqual(client.receive().error()[0], wire.INVALID)
            self.assertLess(waited, (time.monotonic() - started) / 2)

    def test_query_rows_that_are_copied_hold_nobody_up(self):
        """A message has the front copy 64 MiB; a ping behind it does not wait for that. Who leaves or cancels
        meanwhile does no harm."""
        q_heads, dim, rows, n_layers = 32, 128, 64, 64
        row = 4 * dim
        params = wire.integer(wire.WINDOW, rows) + wire.integer(wire.KEEP_TOKENS, 96)  # all of them
        with SocketDaemon() as daemon, Memory(96 * q_heads * row) as memory, Client(daemon.path) as other:
            crowd = []
            for _ in range(3):
                client = Client(daemon.path)
                self.addCleanup(client.socket.close)
                region = client.add_memfd(memory.fd, len(memory.map))
                view = wire.view(region, 0, row, 0)
                cache = client.ask(wire.CACHE_ADD, wire.cache([view] * (2 * n_layers), q_heads, 8, dim)).object()[0]
                stash = client.ask(wire.STASH_ADD, wire.stash(region, 96, q_heads * row, row, n_layers=n_layers)).object()[0]
                crowd.append((client, [wire.score(cache, stash, 96, newest=10, rows=rows, layers=(0, n), params=params)
                                       for n in (16, n_layers)]))
            asker, (_, message) = crowd[0]
            os.kill(daemon.process.pid, signal.SIGSTOP)
            os.waitpid(daemon.process.pid, os.WUNTRACED)
            asker.send(wire.SCORE, message)
            other.send(wire.PING, bytes(8))
            started = time.monotonic()
            os.kill(daemon.process.pid, signal.SIGCONT)
            self.assertEqual(other.receive().kind, wire.PONG)
            waited = time.monotonic() - started
            self.assertEqual(asker.receive().keep()[0][:96], list(range(96)))
            self.assertLess(waited, (time.monotonic() - started) / 2)
            for client, (message, _) in crowd[1:]:
                client.send_raw(b"".join(wire.header(wire.SCORE, 100 + i, message) for i in range(8)))
            crowd[1][0].socket.close()
            leaver = crowd[2][0]
            leaver.send_raw(b"".join(wire.header(wire.CANCEL, 200 + i, struct.pack("<Q", 100 + i)) for i in range(8)))
            kinds = [a.kind if a.kind == wire.RESULT else a.error()[0] for a in (leaver.receive() for _ in range(8))]
            self.assertTrue(set(kinds) <= {wire.RESULT, wire.CANCELLED}, kinds)
            self.assertIn(wire.CANCELLED, kinds)
            daemon.wait_for_metric("dropkv_body_bytes", lambda n: n == 0)

    def test_silent_and_stalled_clients_are_closed(self):
        with SocketDaemon("--header-timeout-ms", "200") as daemon:
            with Client(daemon.path, hello=False) as client:
                self.assertEqual(client.receive().error()[0], wire.TIMEOUT)
                self.assertTrue(client.is_closed())
            with Client(daemon.path) as client:
                message = wire.score_blocks([inline_block()], PARAMS)
                client.send_raw(wire.header(wire.SCORE_BLOCKS, 2, message, len(tensors())) + tensors()[:100])
                self.assertEqual(client.receive().error()[0], wire.TIMEOUT)
                self.assertTrue(client.is_closed())

            ping = wire.header(wire.PING, 2, bytes(8))
            for n in (1, 23, 24, len(ping) - 1):  # of a header, of a payload
                with Client(daemon.path) as client:
                    client.send_raw(wire.header(wire.PING, 1, bytes(8)) + ping[:n])
                    self.assertEqual(client.receive().kind, wire.PONG)
                    status, text = client.receive().error()
                    self.assertEqual((status, "rest of a message" in text), (wire.TIMEOUT, True), text)
                    self.assertTrue(client.is_closed())

    def test_who_does_not_read_is_closed_whatever_it_sends_meanwhile(self):
        tokens = 150000  # scores of 600 KB, eight times: more than the connection holds
        block, params = inline_block(tokens=tokens), wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, 24)
        data = bytes(QUERY_BYTES + 2 * 32 * tokens)
        with SocketDaemon("--request-timeout-ms", "4000", "--header-timeout-ms", "60000") as daemon:
            with Client(daemon.path) as client:
                client.send(wire.SCORE_BLOCKS, wire.score_blocks([block] * 8, params, flags=1), data)
                daemon.wait_for_metric('dropkv_requests_total{outcome="ok"}', lambda v: v == 1)
                client.send_raw(wire.header(wire.SCORE_BLOCKS, 2, wire.score_blocks([block], params), len(data)))
                started = time.monotonic()
                with self.assertRaises((BrokenPipeError, ConnectionResetError)):
                    while time.monotonic() < started + 20:  # a byte at a time of what it promised
                        client.socket.send(b"x")
                        select.select([], [], [], 0.02)
                self.assertLess(time.monotonic() - started, 10)

    def test_a_stale_socket_is_replaced_and_a_living_one_is_not(self):
        with SocketDaemon() as daemon:
            second = subprocess.run([DROPKVD, "--http", "off", "--socket", daemon.path], stderr=subprocess.PIPE, check=False,
                                    timeout=60)
            self.assertNotEqual(second.returncode, 0)
            self.assertIn(b"a daemon is listening", second.stderr)
            daemon.allowed_codes = (-signal.SIGKILL,)
            daemon.process.kill()
            daemon.wait()
            self.assertTrue(os.path.exists(daemon.path))
            third = Daemon(DROPKVD, "--socket", daemon.path)
            with third, Client(daemon.path) as client:
                self.assertEqual(client.ask(wire.PING, bytes(8)).kind, wire.PONG)
            self.assertFalse(os.path.exists(daemon.path))

    def test_a_directory_of_others_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            failed = subprocess.run([DROPKVD, "--http", "off", "--socket", folder + "/s"], stderr=subprocess.PIPE, check=False,
                                    timeout=60)
            self.assertNotEqual(failed.returncode, 0)
            self.assertIn(b"writable by nobody else", failed.stderr)

    def test_accepted_requests_are_answered_before_the_daemon_stops(self):
        with SocketDaemon() as daemon, Client(daemon.path) as client:
            memory = Memory(64)
            fence = client.add_memfd(memory.fd, 64)
            client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS, fence=(fence, 0, 1)), tensors())
            self.assertEqual(client.ask(wire.PING, bytes(8)).kind, wire.PONG)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_log("draining, 1 requests")
            refused = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS), tensors())
            self.assertEqual(refused.error()[0], wire.DRAINING)
            memory.map[:8] = struct.pack("<Q", 1)
            self.assertEqual(len(client.receive().keep()[0]), 24)
            self.assertEqual(daemon.wait(), 0)
            memory.__exit__()


if __name__ == "__main__":
    unittest.main()
