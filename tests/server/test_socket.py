"""The local socket of a real daemon: answers, shared memory, fences.

usage: test_socket.py DROPKVD

What is right is what the same daemon answers over HTTP.
"""
import fcntl
import os
import stat
import struct
import subprocess
import sys
import tempfile
import unittest

import wire
from socket_case import CACHE_BYTES, PARAMS, QUERY_BYTES, SocketDaemon, http_answer, inline_block, tensors
from wire import Client, Memory


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

    def test_results_make_no_pages_in_a_clients_file(self):
        client = self.client()
        for sealed in (True, False):
            with self.subTest(sealed=sealed):
                place = self.memory(b"\xee" * 8192, sealed=sealed)
                output = client.add_memfd(place.fd, 8192, writable=1)
                message = wire.score_blocks([inline_block()], PARAMS, output=(output, 128, 96))
                client.ask(wire.SCORE_BLOCKS, message, tensors()).keep(place.map[128 : 128 + 96])
                wire.punch(place.fd, 4096, 4096)
                status, text = client.ask(wire.SCORE_BLOCKS, message, tensors()).error()
                self.assertEqual((status, os.fstat(place.fd).st_blocks), (wire.INVALID, 8))
                self.assertIn("has holes", text)
                refused = client.ask(wire.REGION_ADD, wire.region(8192, writable=1), fds=[place.fd]).error()
                self.assertEqual(refused, (wire.INVALID, text))
                client.add_memfd(place.fd, 8192)  # reading is another matter

    def test_large_results_that_no_worker_writes_are_a_threads_work(self):
        tokens = 100000
        data = tensors() + bytes(2 * 32 * tokens)
        params = wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, 24)
        block = inline_block(tokens=tokens)
        with SocketDaemon("--request-timeout-ms", "60000") as daemon, Client(daemon.path) as client:
            def n_threads():
                return len(os.listdir("/proc/%d/task" % daemon.process.pid))
            wanted = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([block], params, flags=1), data[: QUERY_BYTES + 2 * 32 * tokens])
            size = 96 + 4 * tokens
            place = self.memory(b"\xee" * (size + 256), sealed=False)
            output = client.add_memfd(place.fd, size + 256, writable=1)
            small = wire.score_blocks([inline_block()], PARAMS, output=(output, 128, 96))
            client.ask(wire.SCORE_BLOCKS, small, tensors()).keep(place.map[128 : 128 + 96])
            before = n_threads()
            message = wire.score_blocks([block], params, flags=1, output=(output, 128, size))
            answer = client.ask(wire.SCORE_BLOCKS, message, data[: QUERY_BYTES + 2 * 32 * tokens])
            self.assertGreater(n_threads(), before)  # the loop's alone until then
            self.assertEqual(answer.kind, wire.RESULT)
            self.assertEqual(place.map[128 : 128 + size], wanted.bulk)
            self.assertEqual((place.map[:128], place.map[128 + size :]), (b"\xee" * 128, b"\xee" * 128))
            for _ in range(4):  # who leaves meanwhile, and the daemon's end
                with Client(daemon.path) as other:
                    number = other.add_memfd(place.fd, size + 256, writable=1)
                    other.send(wire.SCORE_BLOCKS, wire.score_blocks([block], params, flags=1, output=(number, 0, size)),
                               data[: QUERY_BYTES + 2 * 32 * tokens])
            client.send(wire.SCORE_BLOCKS, message, data[: QUERY_BYTES + 2 * 32 * tokens])

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


if __name__ == "__main__":
    unittest.main()
