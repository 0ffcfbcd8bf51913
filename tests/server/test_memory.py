"""Memory of a real daemon: what all requests may hold, what one client may, and what counts.

usage: test_memory.py DROPKVD
"""
import contextlib
import os
import struct
import sys
import tempfile
import unittest

import wire
from daemon import INFER, Daemon, infer_body, infer_request, read_reply, request
from socket_daemon import SocketDaemon

DROPKVD = sys.argv.pop(1)
SLOW_ENGINE = ("--threads", "1", "--cpu-mask", "0")
LONG = {"tokens": 32768, "q_heads": 8, "kv_heads": 1, "dim": 128, "rows": 64}  # nearly a second
LONG_PARAMS = {"window": 64, "keep_tokens": 64}
HELD = "dropkv_body_bytes"


def announce(n_bytes, *fields):
    """The header of a request whose body of that length does not come."""
    return request("POST", INFER, ["Inference-Header-Content-Length: 64", "Content-Length: %d" % n_bytes,
                                   "Expect: 100-continue", *fields])


class Everybody(unittest.TestCase):
    def test_bodies_together_are_bounded(self):
        with Daemon(DROPKVD, "--max-queue-bytes", "24MiB", "--max-client-bytes", "16MiB", "--max-body-bytes",
                    "16MiB") as daemon, daemon.connect() as first:
            first.sendall(announce(16 << 20))
            self.assertEqual(read_reply(first).status, 100)
            reply = daemon.ask(announce(16 << 20))
            self.assertEqual(reply.status, 503, reply.body)
            self.assertIn("bodies and answers hold 16777216 of 25165824 bytes", reply.error())
            self.assertEqual(reply.fields["retry-after"], "1")

    def test_answers_count_until_they_are_sent(self):
        body = b"".join(infer_body(parameters=LONG_PARAMS, output_names=("keep_indices", "scores"), **LONG))
        answer = 4 * 64 + 4 * LONG["tokens"]
        with Daemon(DROPKVD, *SLOW_ENGINE) as daemon, daemon.connect() as connection:
            connection.sendall(infer_request(parameters=LONG_PARAMS, output_names=("keep_indices", "scores"), **LONG))
            daemon.wait_for_metric("dropkv_running_requests", lambda v: v == 1)
            self.assertEqual(daemon.metrics()[HELD], len(body) + answer)
            self.assertEqual(read_reply(connection).status, 200)
            daemon.wait_for_metric(HELD, lambda v: v == 0)

    def test_answers_as_text_count_too(self):
        with Daemon(DROPKVD, *SLOW_ENGINE) as daemon, daemon.connect() as connection:
            shape = {**LONG, "output_names": ("scores",), "binary_output": False, "parameters": LONG_PARAMS}
            connection.sendall(infer_request(**shape))
            daemon.wait_for_metric("dropkv_running_requests", lambda v: v == 1)
            body = len(b"".join(infer_body(**shape)))
            self.assertEqual(daemon.metrics()[HELD], body + 4 * 64 + (4 + 16) * LONG["tokens"])


class Shares(unittest.TestCase):
    def tokens(self, names):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = os.path.join(folder.name, "tokens")
        with open(path, "w", encoding="ascii") as file:
            file.writelines("%s %s\n" % (name, name[0] * 40) for name in names)
        os.chmod(path, 0o600)
        return path, ["Authorization: Bearer " + name[0] * 40 for name in names]

    def test_a_token_has_a_share_over_all_its_connections(self):
        path, (greedy, polite) = self.tokens(("greedy", "polite"))
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(Daemon(DROPKVD, "--token-file", path, "--max-queue-bytes", "64MiB",
                                                "--max-body-bytes", "32MiB"))
            first, second, third = (stack.enter_context(daemon.connect()) for _ in range(3))
            first.sendall(announce(20 << 20, greedy))
            self.assertEqual(read_reply(first).status, 100)
            refused = daemon.ask(announce(20 << 20, greedy))
            self.assertEqual(refused.status, 429, refused.body)
            self.assertIn("this client's share of memory", refused.error())
            self.assertIn("hold 20971520 of 33554432 bytes, 20971520 more", refused.error())
            self.assertEqual(refused.fields["retry-after"], "1")
            second.sendall(announce(20 << 20, polite))
            self.assertEqual(read_reply(second).status, 100, "others have their own")
            third.sendall(announce(12 << 20, greedy))
            self.assertEqual(read_reply(third).status, 100, "up to its share")

    def test_a_chunked_body_beyond_the_share_hears_429(self):
        path, (greedy,) = self.tokens(("greedy",))
        with Daemon(DROPKVD, "--token-file", path, "--max-queue-bytes", "8MiB", "--max-body-bytes", "4MiB",
                    "--max-json-bytes", "4MiB") as daemon:
            with daemon.connect() as first, daemon.connect() as second:
                first.sendall(announce(3 << 20, greedy))
                self.assertEqual(read_reply(first).status, 100)
                second.sendall(request("POST", INFER, ["Transfer-Encoding: chunked", greedy]))
                chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    for _ in range(32):
                        second.sendall(chunk)
                reply = read_reply(second)
                self.assertEqual(reply.status, 429, reply.body)
                self.assertIn("share of memory", reply.error())

    def test_a_body_above_the_share_is_too_large_and_never_worth_a_retry(self):
        with Daemon(DROPKVD, "--max-client-bytes", "1MiB", "--max-body-bytes", "1MiB", "--max-json-bytes",
                    "1MiB") as daemon:
            self.assertEqual(daemon.ask(announce((1 << 20) + 1)).status, 413)
            raw = infer_request(tokens=8192, dim=8, rows=1, q_heads=1, parameters={"keep_tokens": 1, "window": 1})
            self.assertLess(len(raw), 1 << 20)
            self.assertEqual(daemon.ask(raw).status, 200)
            scores = infer_request(tokens=8192, dim=8, rows=1, q_heads=1, parameters={"keep_tokens": 1, "window": 1},
                                   output_names=("scores",))
            self.assertEqual(daemon.ask(scores).status, 200)
            text = infer_request(tokens=16000, dim=8, rows=1, q_heads=1, binary_output=False, output_names=("scores",),
                                 parameters={"keep_tokens": 1, "window": 1})
            reply = daemon.ask(text)
            self.assertEqual(reply.status, 413, "body and text together are above it")


class Socket(unittest.TestCase):
    """Lent memory is not the daemon's, answers are."""

    def test_answers_to_lent_memory_count(self):
        tokens = 10000
        query, cache = 8 * 8 * 4, tokens * 8 * 4
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(SocketDaemon(
                DROPKVD, "--max-client-bytes", "64KiB", "--max-body-bytes", "64KiB", "--max-json-bytes", "64KiB"))
            client = stack.enter_context(wire.Client(daemon.path))
            memory = stack.enter_context(wire.Memory(query + 2 * cache))
            slot = stack.enter_context(wire.Memory(64))
            number = client.add_memfd(memory.fd, query + 2 * cache)
            fence = client.add_memfd(slot.fd, 64)

            def ask(n_tokens, **options):
                block = wire.block([wire.view(number, 0, 32, 256), wire.view(number, query, 32, cache),
                                    wire.view(number, query + cache, 32, cache)], q_heads=1, tokens=n_tokens)
                params = wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, 16)
                return wire.score_blocks([block], params, flags=1, **options)  # 1: scores, too

            held = client.send(wire.SCORE_BLOCKS, ask(tokens, fence=(fence, 0, 1)))
            status, text = client.ask(wire.SCORE_BLOCKS, ask(tokens)).error()
            self.assertEqual(status, wire.BUSY)
            self.assertIn("share of memory", text)
            self.assertEqual(daemon.metrics()[HELD], 4 * tokens + 4 * 16)
            with wire.Client(daemon.path) as other:
                region = other.add_memfd(memory.fd, query + 2 * cache)
                self.assertEqual(region, number)
                self.assertEqual(other.ask(wire.SCORE_BLOCKS, ask(tokens)).kind, wire.RESULT)
            slot.map[0:8] = struct.pack("<Q", 1)
            answer = client.receive()
            self.assertEqual((answer.number, answer.kind), (held, wire.RESULT))
            daemon.wait_for_metric(HELD, lambda v: v == 0)
            self.assertEqual(client.ask(wire.SCORE_BLOCKS, ask(tokens)).kind, wire.RESULT)

    def test_an_answer_above_the_share_is_too_large_but_not_in_the_clients_own_memory(self):
        query, cache = 8 * 8 * 4, 20000 * 8 * 4
        with SocketDaemon(DROPKVD, "--max-client-bytes", "64KiB", "--max-body-bytes", "64KiB", "--max-json-bytes",
                          "64KiB") as daemon, wire.Client(daemon.path) as client, \
                wire.Memory(query + 2 * cache) as memory, wire.Memory(80064) as place:
            number = client.add_memfd(memory.fd, query + 2 * cache)
            output = client.add_memfd(place.fd, 80064, writable=1)
            block = wire.block([wire.view(number, 0, 32, 256), wire.view(number, query, 32, cache),
                                wire.view(number, query + cache, 32, cache)], q_heads=1, tokens=20000)
            params = wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, 16)
            status, text = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], params, flags=1)).error()
            self.assertEqual((status, text), (
                wire.TOO_LARGE, "request: body, copies and answer take 80064 bytes, one client may hold 65536"))
            there = wire.score_blocks([block], params, flags=1, output=(output, 0, 80064))
            self.assertEqual(client.ask(wire.SCORE_BLOCKS, there).kind, wire.RESULT)

    def test_copied_query_rows_count_beside_the_answer(self):
        """Rows of 256 bytes, in rings of 129 that they lie around the end of; answers of 4 bytes a token."""
        keys, rows = 10000 * 256, 129 * 256
        with SocketDaemon(DROPKVD, "--max-client-bytes", "64KiB", "--max-body-bytes", "64KiB", "--max-json-bytes",
                          "64KiB") as daemon, wire.Client(daemon.path) as client, \
                wire.Memory(2 * keys) as memory, wire.Memory(4 * rows) as rings:
            number = client.add_memfd(memory.fd, 2 * keys)
            ring = client.add_memfd(rings.fd, 4 * rows)
            views = [wire.view(number, 0, 256, keys), wire.view(number, keys, 256, keys)]
            caches = {heads: client.ask(wire.CACHE_ADD, wire.cache(views, q_heads=heads, dim=64)).object()[0]
                      for heads in (1, 4)}
            stash = client.ask(wire.STASH_ADD, wire.stash(ring, 129, 256, rows)).object()[0]
            params = wire.integer(wire.WINDOW, 128) + wire.integer(wire.KEEP_TOKENS, 128)

            def ask(heads, tokens):
                message = wire.score(caches[heads], stash, tokens, newest=3, rows=128, params=params, flags=1)
                return client.ask(wire.SCORE, message)

            self.assertEqual(ask(1, 4000).kind, wire.RESULT)
            for heads, tokens, held in ((4, 4000, 4 * 32768), (1, 10000, 32768 + 4 * 128 + 4 * 10000)):
                text = "request: body, copies and answer take %d bytes, one client may hold 65536" % held
                self.assertEqual(ask(heads, tokens).error(), (wire.TOO_LARGE, text))
            daemon.wait_for_metric(HELD, lambda v: v == 0)


if __name__ == "__main__":
    unittest.main(verbosity=1)
