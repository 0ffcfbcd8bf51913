"""The local socket of a real daemon: answers, shared memory, and clients that mean harm.

usage: test_socket.py DROPKVD

What is right is what the same daemon answers over HTTP.
"""
import fcntl
import os
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import socket_daemon
import wire
from daemon import Daemon, infer_body, infer_request, keep_indices
from wire import Client, Memory

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


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = SocketDaemon()
        cls.expected = http_answer(cls.daemon)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def client(self):
        client = Client(self.daemon.path)
        self.addCleanup(client.socket.close)
        return client

    def memory(self, data, n_bytes=None, sealed=True):
        memory = Memory(n_bytes or max(len(data), 1), sealed)
        self.addCleanup(memory.__exit__)
        memory.map[: len(data)] = data
        return memory

    def test_inline_blocks_have_the_answers_of_http(self):
        client = self.client()
        message = wire.score_blocks([inline_block(), inline_block(QUERY_BYTES + 2 * CACHE_BYTES)], PARAMS)
        answer = client.ask(wire.SCORE_BLOCKS, message, tensors(1) + tensors(2))
        self.assertEqual(answer.keep(), [self.expected, http_answer(self.daemon, seed=2)])

    def test_sealed_memory_is_read_in_place_and_other_memory_by_copying(self):
        client = self.client()
        for sealed in (True, False):
            memory = self.memory(b"\xff" * 64 + tensors(), sealed=sealed)
            number = client.add_memfd(memory.fd, len(tensors()), offset=64)
            self.assertEqual(self.daemon.n_maps() > 0, sealed)
            answer = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([inline_block(0, number)], PARAMS))
            self.assertEqual(answer.keep(), [self.expected])
            self.assertEqual(client.ask(wire.REGION_DROP, struct.pack("<II", number, 0)).object()[0], number)
            self.assertEqual(self.daemon.n_maps(), 0)

    def test_a_request_may_name_many_regions(self):
        client = self.client()
        memory = self.memory(tensors(1) + tensors(2))
        size = len(tensors())
        for n in (1, 4, 5, 9):
            numbers = [client.add_memfd(memory.fd, size, offset=i % 2 * size) for i in range(n)]
            message = wire.score_blocks([inline_block(0, number) for number in numbers], PARAMS)
            expected = [self.expected, http_answer(self.daemon, seed=2)]
            self.assertEqual(client.ask(wire.SCORE_BLOCKS, message).keep(), [expected[i % 2] for i in range(n)])
            for number in numbers:
                self.assertEqual(client.ask(wire.REGION_DROP, struct.pack("<II", number, 0)).object()[0], number)

    def test_tmpfs_files_are_read_and_disk_files_are_refused(self):
        client = self.client()
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(tensors())
            file.flush()
            number = client.add_memfd(file.fileno(), len(tensors()))
            answer = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([inline_block(0, number)], PARAMS))
            self.assertEqual(answer.keep(), [self.expected])
        with tempfile.TemporaryFile(dir="/var/tmp") as file:
            try:
                fcntl.fcntl(file.fileno(), 1034)
                self.skipTest("/var/tmp is memory here")
            except OSError:
                pass
            file.write(tensors())
            file.flush()
            status, text = client.ask(wire.REGION_ADD, wire.region(64), fds=[file.fileno()]).error()
            self.assertEqual(status, wire.INVALID)
            self.assertIn("a file on disk", text)

    def paged_cache(self, client, sealed):
        """A cache of pages of 8 tokens in reverse order, one unused between two, its layer 1 at an
        offset; returns the cache's and the table's region numbers, and the entries."""
        data = tensors()
        key, value = data[QUERY_BYTES:][:CACHE_BYTES], data[QUERY_BYTES + CACHE_BYTES :]
        n_pages, page_bytes = 12, 8 * 32
        pool = bytearray(b"\xff" * (2 * 2 * n_pages * page_bytes))
        entries = [2 * (n_pages - 1 - i) for i in range(n_pages)]
        for i, entry in enumerate(entries):
            for at, rows in ((entry * page_bytes, key), ((2 * n_pages + entry) * page_bytes, value)):
                pool[at : at + page_bytes] = rows[i * page_bytes :][:page_bytes]
        memory = self.memory(bytes(pool), sealed=sealed)
        number = client.add_memfd(memory.fd, len(pool))
        views = [wire.view(number, 0, 32, page_bytes, page_bytes),
                 wire.view(number, 2 * n_pages * page_bytes, 32, page_bytes, page_bytes)]
        return client.ask(wire.CACHE_ADD, wire.cache(views * 2, page_tokens=8)).object()[0], entries

    def test_caches_of_a_connection_have_a_bound(self):
        """The largest there is, with scales and sinks of all heads, is taken once; dropped, it is forgotten."""
        layers, heads = 1024, 1024
        payload = bytearray(wire.cache([wire.view(1, 0, 32, 32)] * 2 * layers, q_heads=heads, kv_heads=heads))
        payload[22:24] = b"\1\1"  # scales by head, sinks
        bulk = bytes(layers * 3 * heads * 4)
        with wire.Client(self.daemon.path) as client:
            for _ in range(2):
                number = client.ask(wire.CACHE_ADD, bytes(payload), bulk).object()[0]
                status, text = client.ask(wire.CACHE_ADD, bytes(payload), bulk).error()
                self.assertEqual((status, "16777216" in text), (wire.BUSY, True), text)
                client.ask(wire.CACHE_DROP, struct.pack("<II", number, 0)).object()

    def test_registered_caches_tables_and_query_rings_have_the_same_answers(self):
        query = tensors()[:QUERY_BYTES]
        for sealed in (True, False):
            client = self.client()
            cache, entries = self.paged_cache(client, sealed)
            table = struct.pack("<12i", *entries)
            table_number = client.add_memfd(self.memory(bytes(16) + table, sealed=sealed).fd, 16 + len(table))
            for newest, n_rows in ((7, 8), (7, 11), (9, 11), (3, 11)):
                # Two heads of a ring of n_rows rows; the newest row is the last query.
                ring = bytearray(b"\xff" * (2 * n_rows * 32))
                for head in range(2):
                    for row in range(8):
                        at = (head * n_rows + (newest - 7 + row) % n_rows) * 32
                        ring[at : at + 32] = query[(head * 8 + row) * 32 :][:32]
                rows = client.add_memfd(self.memory(bytes(ring), sealed=sealed).fd, len(ring))
                stash = client.ask(wire.STASH_ADD, wire.stash(rows, n_rows, 32, n_rows * 32, n_layers=2)).object()[0]
                both = dict(newest=newest, layers=(0, 2), params=PARAMS)
                inline = client.ask(wire.SCORE, wire.score(cache, stash, 96, table=(0, 12, 1, 4, 0), **both), table)
                named = client.ask(wire.SCORE, wire.score(cache, stash, 96, table=(table_number, 12, 2, 4, 16), **both))
                self.assertEqual(inline.keep(), [self.expected] * 2, (sealed, newest, n_rows))
                self.assertEqual(named.keep(), [self.expected] * 2, (sealed, newest, n_rows))
                client.ask(wire.STASH_DROP, struct.pack("<II", stash, 0)).object()

    def test_what_policies_take_stands_behind_the_table(self):
        """[layers][kv_heads][tokens] of external_scores: the first layer's fall, the second's rise."""
        client = self.client()
        cache, entries = self.paged_cache(client, True)
        rows = client.add_memfd(self.memory(tensors()[:QUERY_BYTES]).fd, QUERY_BYTES)
        stash = client.ask(wire.STASH_ADD, wire.stash(rows, 8, 32, 8 * 32, n_layers=2)).object()[0]
        params = wire.integer(wire.KEEP_TOKENS, 5) + wire.text(wire.POLICY, "external")
        table = struct.pack("<12i", *entries)
        scores = struct.pack("<192f", *range(96, 0, -1), *range(96))

        def ask(bulk, extras=4):
            message = wire.score(cache, stash, 96, layers=(0, 2), table=(0, 12, 1, 4, 0), params=params, extras=extras)
            return client.ask(wire.SCORE, message, bulk)

        self.assertEqual(ask(table + scores).keep(), [list(range(5)), list(range(91, 96))])
        for bulk in (table, table + scores[:-1], table + scores[:-4], table + scores + b"\0"):
            status, text = ask(bulk).error()
            self.assertEqual(status, wire.INVALID, text)
        status, text = ask(table + scores, extras=1).error()
        self.assertEqual((status, text), (wire.INVALID, "block 0: token_weight: policy external does not take it"))
        for bulk, extras in ((table + scores, 0), (table[:-1], 4), (table + scores, 16)):
            with self.client() as other:
                message = wire.score(1, 1, 96, table=(0, 12, 1, 4, 0), extras=extras)
                # at once: the other end closes
                other.send_raw(wire.header(wire.SCORE, 1, message, len(bulk)) + bulk)
                self.assertEqual(other.receive().error()[0], wire.MALFORMED)

    def test_page_table_entries_outside_the_region_are_an_error_of_the_request(self):
        client = self.client()
        for sealed in (True, False):
            cache, entries = self.paged_cache(client, sealed)
            rows = client.add_memfd(self.memory(tensors()[:QUERY_BYTES]).fd, QUERY_BYTES)
            stash = client.ask(wire.STASH_ADD, wire.stash(rows, 8, 32, 8 * 32)).object()[0]
            for bad in (24, 2**31 - 1, -1):
                table = struct.pack("<12i", *entries[:5], bad, *entries[6:])
                answer = client.ask(wire.SCORE, wire.score(cache, stash, 96, table=(0, 12, 1, 4, 0), params=PARAMS), table)
                self.assertEqual(answer.error()[0], wire.INVALID, (sealed, bad))

    def test_results_go_into_a_writable_region(self):
        client = self.client()
        memory = self.memory(tensors())
        number = client.add_memfd(memory.fd, len(tensors()))
        place = self.memory(b"\xee" * 4096)
        output = client.add_memfd(place.fd, 4096, writable=1)
        message = wire.score_blocks([inline_block(0, number)], PARAMS, output=(output, 128, 96))
        self.assertEqual(client.ask(wire.SCORE_BLOCKS, message).keep(place.map[128 : 128 + 96]), [self.expected])
        self.assertEqual((place.map[:128], place.map[224:]), (b"\xee" * 128, b"\xee" * (4096 - 224)))
        for region, offset, room, status in ((output, 128, 95, wire.INVALID), (output, 4001, 96, wire.INVALID),
                                             (number, 0, 96, wire.DENIED), (99, 0, 96, wire.NOT_FOUND)):
            message = wire.score_blocks([inline_block(0, number)], PARAMS, output=(region, offset, room))
            self.assertEqual(client.ask(wire.SCORE_BLOCKS, message).error()[0], status)

    def worker_maps(self):
        """What a worker may do with each mapping of a client's memory."""
        with open("/proc/%d/maps" % self.daemon.processes()[1], encoding="ascii") as file:
            return [line.split()[1] for line in file if "memfd:test" in line]

    def test_workers_write_results_where_they_may_and_nowhere_else(self):
        client = self.client()
        number = client.add_memfd(self.memory(tensors()).fd, len(tensors()))
        self.assertEqual(self.worker_maps(), ["r--s"])
        for sealed, offset in ((True, 128), (True, 129), (False, 128)):
            place = self.memory(b"\xee" * 4096, sealed=sealed)
            output = client.add_memfd(place.fd, 4096, writable=1)
            self.assertEqual(sorted(self.worker_maps()), ["r--s", "rw-s"] if sealed else ["r--s"])
            message = wire.score_blocks([inline_block(0, number)], PARAMS, output=(output, offset, 96))
            answer = client.ask(wire.SCORE_BLOCKS, message)
            self.assertEqual(answer.keep(place.map[offset : offset + 96]), [self.expected], (sealed, offset))
            self.assertEqual(place.map[:offset] + place.map[offset + 96 :], b"\xee" * 4000)
            client.ask(wire.REGION_DROP, struct.pack("<II", output, 0)).object()

    def test_a_request_waits_for_its_fence_and_not_beyond_its_deadline(self):
        client = self.client()
        memory = self.memory(bytes(len(tensors())))
        number = client.add_memfd(memory.fd, len(tensors()))
        slot = self.memory(bytes(64))
        fence = client.add_memfd(slot.fd, 64)
        held = client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block(0, number)], PARAMS, fence=(fence, 8, 5)))
        for value in (0, 4):
            slot.map[8:16] = struct.pack("<Q", value)
            self.assertEqual(client.ask(wire.PING, struct.pack("<Q", 7)).kind, wire.PONG)
        memory.map[:] = tensors()  # the producer is late
        slot.map[8:16] = struct.pack("<Q", 6)
        answer = client.receive()
        self.assertEqual((answer.number, answer.keep()), (held, [self.expected]))
        late = PARAMS + wire.integer(wire.TIMEOUT_PARAM, 20000)
        message = wire.score_blocks([inline_block(0, number)], late, fence=(fence, 8, 2**64 - 1))
        status, text = client.ask(wire.SCORE_BLOCKS, message).error()
        self.assertEqual(status, wire.TIMEOUT)
        self.assertIn("fence", text)

    def test_a_cancelled_request_has_one_answer(self):
        client = self.client()
        slot = self.memory(bytes(64))
        fence = client.add_memfd(slot.fd, 64)
        held = client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS, fence=(fence, 0, 1)), tensors())
        client.send(wire.CANCEL, struct.pack("<Q", held))
        answer = client.receive()
        self.assertEqual((answer.number, answer.error()[0]), (held, wire.CANCELLED))
        client.send(wire.CANCEL, struct.pack("<Q", held))
        self.assertEqual(client.ask(wire.PING, struct.pack("<Q", 9)).payload, struct.pack("<Q", 9))

    def test_a_detached_region_comes_back_as_a_larger_generation(self):
        client = self.client()
        memory = self.memory(tensors())
        number = client.add_memfd(memory.fd, len(tensors()))
        message = wire.score_blocks([inline_block(0, number)], PARAMS)
        slot = self.memory(bytes(64))
        fence = client.add_memfd(slot.fd, 64)
        waiting = wire.score_blocks([inline_block(0, number)], PARAMS, fence=(fence, 0, 1))
        held = client.send(wire.SCORE_BLOCKS, waiting)
        detach = client.send(wire.REGION_DETACH, struct.pack("<II", number, 0))
        self.assertEqual(client.ask(wire.SCORE_BLOCKS, message).error()[0], wire.NOT_FOUND)
        slot.map[0:8] = struct.pack("<Q", 1)
        answers = {a.number: a for a in (client.receive(), client.receive())}
        self.assertEqual(answers[held].keep(), [self.expected])
        self.assertEqual(answers[detach].object(), (number, 0))
        again = dict(number=number, generation=0)
        self.assertEqual(client.ask(wire.REGION_ATTACH, wire.region(len(tensors()), **again), fds=[memory.fd]).error()[0],
                         wire.INVALID)
        again["generation"] = 1
        with open("/dev/null", "rb") as other:
            self.assertEqual(client.ask(wire.REGION_ATTACH, wire.region(64, **again), fds=[other.fileno()]).error()[0],
                             wire.INVALID)
        client.ask(wire.REGION_ATTACH, wire.region(len(tensors()), **again), fds=[memory.fd]).object()
        self.assertEqual(client.ask(wire.SCORE_BLOCKS, message).keep(), [self.expected])

    def test_gpu_memory_is_refused_with_the_reason(self):
        client = self.client()
        legacy = wire.region(64, kind=2, uuid=b"u" * 16, handle=b"h" * 64)
        vmm = wire.region(64, kind=3, uuid=b"u" * 16, chunks=[(0, 64)])
        memory = self.memory(bytes(64))
        for message, fds in ((legacy, ()), (vmm, (memory.fd,))):
            status, text = client.ask(wire.REGION_ADD, message, fds=fds).error()
            self.assertEqual(status, wire.UNSUPPORTED)
            self.assertIn("memfd", text)

    def test_many_clients_may_use_the_same_ids(self):
        clients = [self.client() for _ in range(64)]
        for i, client in enumerate(clients):
            for number in (7, 8):
                client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS), tensors(1 + i % 3), number=number)
        expected = [http_answer(self.daemon, seed=1 + i) for i in range(3)]
        for i, client in enumerate(clients):
            answers = [client.receive(), client.receive()]
            self.assertEqual({a.number for a in answers}, {7, 8})
            self.assertEqual([a.keep() for a in answers], [[expected[i % 3]]] * 2)

    def test_one_bad_request_among_many_good_ones_fails_alone(self):
        client = self.client()
        nan = bytearray(tensors())
        nan[QUERY_BYTES : QUERY_BYTES + 4] = struct.pack("<f", float("nan"))
        numbers = [client.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS),
                               bytes(nan) if i == 31 else tensors()) for i in range(64)]
        answers = {a.number: a for a in (client.receive() for _ in numbers)}
        for i, number in enumerate(numbers):
            if i == 31:
                self.assertEqual(answers[number].error()[0], wire.INVALID)
            else:
                self.assertEqual(answers[number].keep(), [self.expected])

    def test_the_socket_is_the_owners_alone(self):
        self.assertEqual(stat.S_IMODE(os.stat(self.daemon.path).st_mode), 0o600)
        self.assertEqual(stat.S_IMODE(os.stat(os.path.dirname(self.daemon.path)).st_mode), 0o700)
        if os.geteuid() != 0:
            self.skipTest("only root can try as another user")
        os.chmod(self.daemon.folder.name, 0o711)
        os.chmod(os.path.dirname(self.daemon.path), 0o711)
        os.chmod(self.daemon.path, 0o666)
        program = "import os,socket,sys\nos.setuid(65534)\ns=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n" \
                  "sys.exit(len(s.recv(1)))"
        try:
            self.assertEqual(subprocess.run([sys.executable, "-c", program, self.daemon.path], check=False).returncode, 0)
            self.daemon.wait_for_log("user 65534 may not connect")
        finally:
            os.chmod(self.daemon.path, 0o600)


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
