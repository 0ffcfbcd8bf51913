"""Deadlines of a real daemon: of requests whose work runs, of connections that are slow.

usage: test_deadlines.py DROPKVD
"""
import struct
import sys
import time
import unittest

import wire
from daemon import INFER, Daemon, infer_body, infer_request, is_closed, read_reply, read_to_end, request
from socket_daemon import SocketDaemon

DROPKVD = sys.argv.pop(1)
SLOW_ENGINE = ("--threads", "1", "--cpu-mask", "0")
LONG = {"tokens": 32768, "q_heads": 8, "kv_heads": 1, "dim": 128, "rows": 64}  # nearly a second
LONG_PARAMS = {"window": 64, "keep_tokens": 64}
RUNNING = "dropkv_running_requests"


class Work(unittest.TestCase):
    """A deadline that passes while the engine computes: the caller hears of it then, and what the
    engine reads stays charged until it is done."""

    def check_end(self, daemon):
        daemon.wait_for_metric(RUNNING, lambda v: v == 0)
        metrics = daemon.metrics()
        self.assertEqual(metrics['dropkv_requests_total{outcome="timeout"}'], 1)
        self.assertEqual(metrics["dropkv_body_bytes"], 0)

    def test_over_http_it_is_told_when_it_passes(self):
        with Daemon(DROPKVD, *SLOW_ENGINE, "--max-queue-requests", "1") as daemon, daemon.connect() as connection:
            connection.sendall(infer_request(parameters={**LONG_PARAMS, "timeout": 100000}, **LONG))
            reply = read_reply(connection)
            metrics = daemon.metrics()
            self.assertEqual(reply.status, 503, reply.body)
            self.assertEqual(reply.error(), "the deadline passed while the work ran")
            self.assertEqual(metrics[RUNNING], 1, "told when the work was over, or it was too quick")
            self.assertGreater(metrics["dropkv_body_bytes"], 0, "its memory is being read")
            full = daemon.ask(infer_request())
            self.assertEqual(full.status, 503, "its place in the queue is taken still")
            self.check_end(daemon)
            connection.sendall(infer_request())
            self.assertEqual(read_reply(connection).status, 200, "no second reply, and the connection goes on")

    def test_the_server_limits_the_time_too(self):
        with Daemon(DROPKVD, *SLOW_ENGINE, "--request-timeout-ms", "100", "--worker-stuck-ms", "60000") as daemon:
            reply = daemon.ask(infer_request(parameters=LONG_PARAMS, **LONG))
            self.assertEqual(reply.status, 503)
            self.assertIn("deadline", reply.error())
            self.assertEqual(daemon.metrics()[RUNNING], 1)
            self.check_end(daemon)

    def test_a_caller_that_leaves_after_it_was_told_does_no_harm(self):
        with Daemon(DROPKVD, *SLOW_ENGINE) as daemon:
            reply = daemon.ask(infer_request(parameters={**LONG_PARAMS, "timeout": 100000}, **LONG))
            self.assertEqual(reply.status, 503)
            self.check_end(daemon)
            self.assertEqual(daemon.metrics()['dropkv_requests_total{outcome="cancelled"}'], 0)

    def test_on_the_socket_it_is_told_and_detaching_waits_for_the_work(self):
        tensors = infer_body(**LONG)[1]
        query, cache = 8 * 64 * 128 * 4, 32768 * 128 * 4
        with SocketDaemon(DROPKVD, *SLOW_ENGINE) as daemon, wire.Client(daemon.path) as client, \
                wire.Memory(len(tensors)) as memory:
            memory.map[:] = tensors
            number = client.add_memfd(memory.fd, len(tensors))
            block = wire.block([wire.view(number, 0, 512, 64 * 512), wire.view(number, query, 512, cache),
                                wire.view(number, query + cache, 512, cache)],
                               q_heads=8, dim=128, rows=64, tokens=32768)
            params = wire.integer(wire.WINDOW, 64) + wire.integer(wire.KEEP_TOKENS, 64)
            late = params + wire.integer(wire.TIMEOUT_PARAM, 100000)
            status, text = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], late)).error()
            self.assertEqual((status, text), (wire.TIMEOUT, "the deadline passed while the work ran"))
            self.assertEqual(daemon.metrics()[RUNNING], 1, "told when the work was over, or it was too quick")
            detach = client.send(wire.REGION_DETACH, struct.pack("<II", number, 0))
            self.assertEqual(client.ask(wire.PING, struct.pack("<Q", 7)).kind, wire.PONG)
            answer = client.receive()
            self.assertEqual((answer.number, answer.object()), (detach, (number, 0)))
            self.check_end(daemon)
            self.assertEqual(client.ask(wire.PING, struct.pack("<Q", 8)).kind, wire.PONG, "no second answer")

    def test_what_is_written_to_the_callers_memory_is_answered_after_the_last_write(self):
        tensors = infer_body(**LONG)[1]
        query, cache = 8 * 64 * 128 * 4, 32768 * 128 * 4
        with SocketDaemon(DROPKVD, *SLOW_ENGINE) as daemon, wire.Client(daemon.path) as client, \
                wire.Memory(len(tensors)) as memory, wire.Memory(4096) as place:
            memory.map[:] = tensors
            number = client.add_memfd(memory.fd, len(tensors))
            output = client.add_memfd(place.fd, 4096, writable=1)
            block = wire.block([wire.view(number, 0, 512, 64 * 512), wire.view(number, query, 512, cache),
                                wire.view(number, query + cache, 512, cache)],
                               q_heads=8, dim=128, rows=64, tokens=32768)
            params = (wire.integer(wire.WINDOW, 64) + wire.integer(wire.KEEP_TOKENS, 64) +
                      wire.integer(wire.TIMEOUT_PARAM, 100000))
            message = wire.score_blocks([block], params, output=(output, 0, 4096))
            status, text = client.ask(wire.SCORE_BLOCKS, message).error()
            self.assertEqual(status, wire.TIMEOUT, text)
            self.assertEqual(daemon.metrics()[RUNNING], 0, "told while a worker may write")
            self.check_end(daemon)

    def test_a_session_that_ends_after_it_was_told_gives_everything_back(self):
        tensors = infer_body(**LONG)[1]
        query, cache = 8 * 64 * 128 * 4, 32768 * 128 * 4
        with SocketDaemon(DROPKVD, *SLOW_ENGINE) as daemon:
            n_fds = daemon.n_fds()
            with wire.Client(daemon.path) as client:
                block = wire.block([wire.view(0, 0, 512, 64 * 512), wire.view(0, query, 512, cache),
                                    wire.view(0, query + cache, 512, cache)],
                                   q_heads=8, dim=128, rows=64, tokens=32768)
                params = wire.integer(wire.WINDOW, 64) + wire.integer(wire.TIMEOUT_PARAM, 100000)
                message = wire.score_blocks([block], params + wire.integer(wire.KEEP_TOKENS, 64))
                self.assertEqual(client.ask(wire.SCORE_BLOCKS, message, tensors).error()[0], wire.TIMEOUT)
            self.check_end(daemon)
            daemon.wait_until_clean(n_fds)


class Connections(unittest.TestCase):
    def drip(self, connection, piece, limit_s):
        """Sends `piece` again and again; the seconds until the daemon closes."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            try:
                connection.sendall(piece)
            except (BrokenPipeError, ConnectionResetError):
                return time.monotonic() - began
            if is_closed(connection, 0.02):
                return time.monotonic() - began
        self.fail("still open")

    def test_a_header_has_an_absolute_deadline(self):
        with Daemon(DROPKVD, "--header-timeout-ms", "300") as daemon:
            for start, piece in ((b"", b"G"), (b"GET /v2 HTTP/1.1\r\n", b"X: y\r\n"), (b"", b"")):
                with self.subTest(start), daemon.connect() as connection:
                    connection.sendall(start)
                    took = self.drip(connection, piece, 5)
                    self.assertGreater(took, 0.2)
            with self.subTest("a second request"), daemon.connect() as connection:
                connection.sendall(request("GET", "/v2/health/live"))
                self.assertEqual(read_reply(connection).status, 200)
                connection.sendall(b"GET /v2 HTTP/1.1\r\n")
                self.drip(connection, b"X: y\r\n", 5)
            self.assertEqual(daemon.metrics()['dropkv_http_refused_total{reason="header_time"}'], 4)

    def test_an_idle_connection_is_closed(self):
        with Daemon(DROPKVD, "--keepalive-timeout-ms", "200") as daemon:
            with daemon.connect() as connection:
                connection.sendall(request("GET", "/v2/health/live"))
                self.assertEqual(read_reply(connection).status, 200)
                self.assertTrue(is_closed(connection, 5))

    def test_a_body_has_a_least_rate(self):
        with Daemon(DROPKVD, "--body-grace-ms", "200") as daemon:
            for field, piece in (("Content-Length: 1000000", b"x"), ("Transfer-Encoding: chunked", b"1\r\nx\r\n")):
                with self.subTest(field), daemon.connect() as connection:
                    connection.sendall(request("POST", INFER, [field]))
                    self.drip(connection, piece, 5)
            metrics = daemon.metrics()
            self.assertEqual(metrics['dropkv_http_refused_total{reason="body_time"}'], 2)
            self.assertEqual(metrics["dropkv_body_bytes"], 0)

    def test_a_slow_body_hears_408(self):
        with Daemon(DROPKVD, "--body-grace-ms", "100") as daemon:
            with daemon.connect() as connection:
                connection.sendall(request("POST", INFER, ["Content-Length: 1000000"]))
                self.assertTrue(read_to_end(connection).startswith(b"HTTP/1.1 408 "))

    def test_a_reply_must_be_read(self):
        with Daemon(DROPKVD, "--body-grace-ms", "300", "--body-min-bytes-per-s", "1GiB") as daemon:
            raw = infer_request(tokens=1 << 19, dim=8, q_heads=1, rows=1, binary_output=False,
                                parameters={"keep_ratio": 1.0, "window": 1})
            with daemon.connect(receive_bytes=4096) as connection:
                connection.sendall(raw)
                daemon.wait_for_metric('dropkv_http_refused_total{reason="reply_time"}', lambda v: v == 1)

    def test_many_dripping_connections_leave_others_alone(self):
        with Daemon(DROPKVD, "--header-timeout-ms", "2000", "--max-connections", "512") as daemon:
            held = [daemon.connect() for _ in range(300)]
            for connection in held:
                connection.sendall(b"GET /v2 HTTP/1.1\r\nX: ")
            times = []
            for _ in range(50):
                began = time.monotonic()
                self.assertEqual(daemon.ask(infer_request()).status, 200)
                times.append(time.monotonic() - began)
            self.assertLess(sorted(times)[len(times) // 2], 0.5)
            for connection in held:
                self.assertTrue(is_closed(connection, 10))
                connection.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
