"""Shared memory that is named, not passed: the Open Inference Protocol's extensions over HTTP
(--allow-client-shm), and POSIX objects of the local socket's clients (--allow-shm-names).

usage: test_shm.py DROPKVD
"""
import base64
import json
import mmap
import os
import secrets
import signal
import struct
import sys
import tempfile
import time
import unittest

import wire
from daemon import Daemon, INFER, infer_body, infer_request, keep_indices, read_reply, request
from socket_daemon import SocketDaemon

DROPKVD = sys.argv.pop(1)
SHAPE = {"tokens": 96, "q_heads": 2, "kv_heads": 1, "dim": 8, "rows": 8}
PARAMETERS = {"window": 8, "keep_tokens": 24}
SIZES = {"query": 2 * 8 * 8 * 4, "key": 96 * 8 * 4, "value": 96 * 8 * 4}
SHAPES = {"query": [1, 2, 8, 8], "key": [1, 1, 96, 8], "value": [1, 1, 96, 8]}
KEEP_BYTES, SCORES_BYTES = 24 * 4, 96 * 4
SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"


def tensors(seed=1):
    """query, key and value, one behind the other."""
    return infer_body(seed=seed, **SHAPE)[1]


class Object:
    """A POSIX shared memory object."""

    def __init__(self, n_bytes, name=None, mode=0o600):
        self.name = name or "test-" + secrets.token_hex(8)
        self.path = "/dev/shm/" + self.name
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        os.fchmod(fd, mode)
        os.ftruncate(fd, n_bytes)
        self.map = mmap.mmap(fd, n_bytes)
        os.close(fd)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.map.close()
        if os.path.exists(self.path):
            os.unlink(self.path)


class Http(unittest.TestCase):
    OPTIONS = ("--allow-client-shm", "true")

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(DROPKVD, *cls.OPTIONS, "--test-hooks", "true").__enter__()
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)

    def tearDown(self):
        for kind in (SYSTEM, CUDA):
            self.post(kind + "/unregister")
            self.assertEqual(self.daemon.get(kind + "/status").json(), [])

    def post(self, path, body=None, fields=()):
        return self.daemon.ask(request("POST", path, fields, json.dumps(body).encode() if body is not None else b""))

    def register(self, name, key, n_bytes, offset=0, fields=()):
        return self.post("%s/region/%s/register" % (SYSTEM, name), {"key": key, "offset": offset, "byte_size": n_bytes},
                         fields)

    def registered(self, *arguments, **options):
        reply = self.register(*arguments, **options)
        self.assertEqual((reply.status, reply.body), (200, b""), reply.body)

    def refused(self, reply, status, *words):
        self.assertEqual(reply.status, status, reply.body)
        for word in words:
            self.assertIn(word, reply.error())

    def infer(self, region="region", offset=0, outputs=None, fields=(), sizes=None, extra=()):
        """All three tensors one behind the other in a region."""
        inputs = []
        for name, n_bytes in (sizes or SIZES).items():
            inputs.append({"name": name, "datatype": "FP32", "shape": SHAPES[name], "parameters": {
                "shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": n_bytes}})
            offset += SIZES[name]
        body = {"parameters": PARAMETERS, "inputs": inputs + list(extra),
                "outputs": outputs or [{"name": "keep_indices"}]}
        return self.post(INFER, body, fields)

    def expected(self, seed=1, names=("keep_indices",)):
        reply = self.daemon.ask(infer_request(seed=seed, parameters=PARAMETERS, output_names=names, **SHAPE))
        self.assertEqual(reply.status, 200, reply.body)
        return reply

    def test_tensors_in_a_region_have_the_answer_of_tensors_in_the_body(self):
        """Offsets count once: that of the registration and that of the tensor, neither on a page."""
        with Object(100 + 36 + len(tensors())) as memory:
            memory.map[136:] = tensors()
            self.registered("region", "/" + memory.name, 36 + len(tensors()), offset=100)
            self.assertEqual(keep_indices(self.infer(offset=36)), keep_indices(self.expected()))
            self.assertNotEqual(keep_indices(self.expected()), keep_indices(self.expected(seed=2)))
            memory.map[136:] = tensors(2)
            self.assertEqual(keep_indices(self.infer(offset=36)), keep_indices(self.expected(seed=2)))

    def test_a_name_is_looked_up_once_and_the_object_held(self):
        """Like a mapping: unlinked it goes on, and a new object of that name is another one."""
        with Object(len(tensors())) as memory:
            memory.map[:] = tensors()
            n_fds = self.daemon.n_fds()
            self.registered("region", memory.name, len(tensors()))
            os.unlink(memory.path)
            self.assertEqual(keep_indices(self.infer()), keep_indices(self.expected()))
            self.refused(self.register("again", memory.name, 64), 404)
            memory.map[:] = tensors(2)  # its owner writes there still
            self.assertEqual(keep_indices(self.infer()), keep_indices(self.expected(seed=2)))
            with Object(len(tensors()), memory.name) as successor:
                successor.map[:] = tensors(3)
                self.assertEqual(keep_indices(self.infer()), keep_indices(self.expected(seed=2)))
                self.registered("next", successor.name, len(tensors()))
                self.assertEqual(keep_indices(self.infer("next")), keep_indices(self.expected(seed=3)))
            for name in ("region", "next"):
                self.assertEqual(self.post("%s/region/%s/unregister" % (SYSTEM, name)).status, 200)
                self.refused(self.infer(name), 404)
            deadline = time.monotonic() + 20
            while self.daemon.n_fds() > n_fds:  # a connection may still be closing
                self.assertLess(time.monotonic(), deadline, "the daemon still holds an object")

    def test_keys_may_begin_with_any_number_of_slashes(self):
        with Object(4096) as memory:
            for i, key in enumerate((memory.name, "/" + memory.name, "//" + memory.name, "///" + memory.name)):
                self.registered("r%d" % i, key, 4096)
            listed = self.daemon.get(SYSTEM + "/status").json()
            self.assertEqual([r["key"].lstrip("/") for r in listed], [memory.name] * 4)
            self.assertEqual(listed[1], {"name": "r1", "key": "/" + memory.name, "offset": 0, "byte_size": 4096})
            self.assertEqual(self.daemon.get(SYSTEM + "/region/r1/status").json(), [listed[1]])
            self.assertEqual(self.daemon.get(CUDA + "/status").json(), [])
            self.assertEqual(self.daemon.get(CUDA + "/region/r1/status").status, 404)
            self.assertEqual(self.daemon.get(SYSTEM + "/region/r9/status").status, 404)

    def test_region_names_are_printable(self):
        with Object(4096) as memory:
            for name in ("%ff", "%c3%28", "a%0d%0ab", "%7f", "%c3%a9"):
                with self.subTest(name):
                    self.refused(self.register(name, memory.name, 64), 400)
            self.registered("a%20b", memory.name, 64)
            self.assertEqual([r["name"] for r in self.daemon.get(SYSTEM + "/status").json()], ["a b"])

    def test_names_that_may_not_be_used_all_have_the_same_answer(self):
        """Nothing is learnt about objects that are not for this."""
        secret = "test-" + secrets.token_hex(8)
        with Object(4096) as good, Object(4096, mode=0o644), tempfile.TemporaryDirectory() as folder:
            paths = {name: "/dev/shm/%s-%s" % (secret, name) for name in ("link", "hard", "folder", "fifo")}
            os.symlink(good.path, paths["link"])
            os.mkdir(paths["folder"])
            os.mkfifo(paths["fifo"])
            reserved = Object(4096, "triton_python_backend_shm_region_" + secrets.token_hex(4))
            own = Object(4096, "dropkv-%d-%s-x" % (os.getuid(), secrets.token_hex(16)))
            outside = os.path.join(folder, "file")
            with open(outside, "wb") as file:
                file.write(bytes(4096))
            try:
                with reserved, own, Object(4096, mode=0o660) as open_to_group:
                    keys = ["/", "//", "///", "nobody", "../shm/" + good.name, "a/../" + good.name, ".", "..",
                            "x" * 255, open_to_group.name, reserved.name, "//" + reserved.name, own.name,
                            "/../.." + outside, *(os.path.basename(p) for p in paths.values())]
                    texts = {self.register("r", key, 64).status: self.register("r", key, 64).error() for key in keys}
                    for key in keys:
                        self.refused(self.register("r", key, 64), 404)
                    self.assertEqual(len(set(texts.values())), 1, texts)
                    os.link(good.path, paths["hard"])
                    self.refused(self.register("r", good.name, 64), 404)
                    os.unlink(paths["hard"])
                    self.registered("r", good.name, 64)
            finally:
                for path in paths.values():
                    if os.path.isdir(path):
                        os.rmdir(path)
                    elif os.path.lexists(path):
                        os.unlink(path)

    def test_sizes_and_offsets_are_checked_at_both_ends(self):
        edges = [0, 1, 4095, 4096, 4097, 2**31, 2**32, 2**63 - 1]
        with Object(4096) as memory:
            for offset in edges:
                for n_bytes in edges:
                    fits = n_bytes > 0 and offset + n_bytes <= 4096
                    reply = self.register("r", memory.name, n_bytes, offset=offset)
                    self.assertEqual(reply.status, 200 if fits else 400, (offset, n_bytes, reply.body))
                    if fits:
                        self.post(SYSTEM + "/region/r/unregister")
            for body in (None, {}, {"key": memory.name}, {"byte_size": 1}, {"key": 3, "byte_size": 1}, [],
                         {"key": memory.name, "byte_size": -1}, {"key": memory.name, "byte_size": 1.0},
                         {"key": memory.name, "byte_size": 1, "offset": "0"},
                         {"key": memory.name, "byte_size": 1, "mode": 7}, {"key": memory.name, "byte_size": 2**64}):
                self.assertEqual(self.post(SYSTEM + "/region/r/register", body).status, 400, body)
        with Object(len(tensors())) as memory:
            memory.map[:] = tensors()
            self.registered("region", memory.name, len(tensors()))
            for offset in edges[1:]:
                self.refused(self.infer(offset=offset), 400)
            self.refused(self.infer("other"), 404, "query")
            self.refused(self.infer(sizes={**SIZES, "key": SIZES["key"] - 4}), 400, "key")

    def test_answers_go_into_a_region(self):
        both = self.expected(names=("keep_indices", "scores"))
        length = int(both.fields["inference-header-content-length"])
        wanted = both.body[length:]
        with Object(len(tensors()) + 8 + KEEP_BYTES + SCORES_BYTES) as memory:
            memory.map[: len(tensors())] = tensors()
            self.registered("region", memory.name, len(memory.map))
            at = len(tensors()) + 4

            def outputs(keep_bytes=KEEP_BYTES, keep_at=at, region="region"):
                return [{"name": name, "parameters": {
                    "shared_memory_region": region, "shared_memory_byte_size": n_bytes, "shared_memory_offset": offset}}
                    for name, n_bytes, offset in (("keep_indices", keep_bytes, keep_at),
                                                  ("scores", SCORES_BYTES, at + KEEP_BYTES))]
            reply = self.infer(outputs=outputs())
            self.assertEqual(reply.status, 200, reply.body)
            self.assertEqual(memory.map[at : at + KEEP_BYTES + SCORES_BYTES], wanted)
            self.assertEqual(memory.map[at + KEEP_BYTES + SCORES_BYTES :], bytes(4))
            for output in reply.json()["outputs"]:
                self.assertNotIn("data", output)
                self.assertNotIn("parameters", output) # the C++ client wants binary_data_size in them
            self.refused(self.infer(outputs=outputs(KEEP_BYTES - 4)), 400, "keep_indices", "at least %d" % KEEP_BYTES)
            self.refused(self.infer(outputs=outputs(keep_at=len(memory.map) - 4)), 400, "keep_indices")
            self.refused(self.infer(outputs=outputs(region="nobody")), 404, "keep_indices")

    def test_large_answers_for_a_region_are_a_threads_work(self):
        tokens = 100000
        shape = {**SHAPE, "tokens": tokens}
        both = self.daemon.ask(infer_request(parameters=PARAMETERS, output_names=("keep_indices", "scores"), **shape))
        wanted = both.body[int(both.fields["inference-header-content-length"]):]
        head, data = infer_body(parameters=PARAMETERS, **shape)
        with Daemon(DROPKVD, *self.OPTIONS) as daemon, Object(len(wanted) + 8) as memory:
            self.assertEqual(daemon.ask(request("POST", SYSTEM + "/region/out/register", (), json.dumps(
                {"key": memory.name, "offset": 0, "byte_size": len(memory.map)}).encode())).status, 200)
            keep_bytes = len(wanted) - 4 * tokens * SHAPE["kv_heads"]

            def ask(n_scores, leave=False):
                outputs = [{"name": "keep_indices", "parameters": {"shared_memory_region": "out",
                            "shared_memory_byte_size": keep_bytes, "shared_memory_offset": 4}}]
                outputs += [{"name": "scores", "parameters": {"shared_memory_region": "out", "shared_memory_offset": 4 + keep_bytes,
                             "shared_memory_byte_size": len(wanted) - keep_bytes}}] * n_scores
                text = json.dumps({**json.loads(head), "outputs": outputs}).encode()
                raw = request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(text)], text + data)
                if not leave:
                    return daemon.ask(raw)
                with daemon.connect() as connection:
                    connection.sendall(raw)

            def n_threads():
                return len(os.listdir("/proc/%d/task" % daemon.process.pid))
            self.assertEqual(ask(0).status, 200)
            before = n_threads()
            reply = ask(1)
            self.assertEqual(reply.status, 200, reply.body)
            self.assertGreater(n_threads(), before)  # the loop's alone until then
            self.assertEqual(memory.map[4:-4], wanted)
            self.assertEqual((memory.map[:4], memory.map[-4:]), (bytes(4), bytes(4)))
            for _ in range(4):  # who leaves meanwhile, and the daemon's end
                ask(1, leave=True)

    def test_what_cannot_be_written_is_for_reading(self):
        with Object(len(tensors()) + KEEP_BYTES, mode=0o400) as memory:
            if os.geteuid() == 0:
                self.skipTest("root may write everything")
            memory.map[: len(tensors())] = tensors()
            self.registered("region", memory.name, len(memory.map))
            self.assertEqual(keep_indices(self.infer()), keep_indices(self.expected()))
            self.refused(self.infer(outputs=[{"name": "keep_indices", "parameters": {
                "shared_memory_region": "region", "shared_memory_byte_size": KEEP_BYTES,
                "shared_memory_offset": len(tensors())}}]), 400, "keep_indices")

    def test_small_vectors_may_lie_in_a_region_too(self):
        sinks = struct.pack("<2f", 9.0, -3.0)
        head, data = infer_body(parameters=PARAMETERS, **SHAPE)
        head = json.loads(head)
        head["inputs"].append({"name": "sink_logits", "datatype": "FP32", "shape": [2],
                               "parameters": {"binary_data_size": 8}})
        head = json.dumps(head).encode()
        wanted = self.daemon.ask(request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head)],
                                         head + data + sinks))
        self.assertEqual(wanted.status, 200, wanted.body)
        with Object(len(tensors()) + 3 + 8) as memory:
            memory.map[:] = tensors() + bytes(3) + sinks
            self.registered("region", memory.name, len(memory.map))
            extra = {"name": "sink_logits", "datatype": "FP32", "shape": [2], "parameters": {
                "shared_memory_region": "region", "shared_memory_byte_size": 8,
                "shared_memory_offset": len(tensors()) + 3}}
            self.assertEqual(keep_indices(self.infer(extra=[extra])), keep_indices(wanted))
            extra["parameters"]["shared_memory_offset"] += 1
            self.refused(self.infer(extra=[extra]), 400, "sink_logits")

    def test_a_name_is_taken_until_it_is_unregistered(self):
        with Object(4096) as memory:
            self.registered("r", memory.name, 64)
            self.refused(self.register("r", memory.name, 64), 400, "already")
            self.refused(self.post(CUDA + "/region/r/register", cuda_body()), 400, "already")
            self.assertEqual(self.post(CUDA + "/region/r/unregister").status, 200) # of the other kind: nothing
            self.assertEqual(len(self.daemon.get(SYSTEM + "/status").json()), 1)
            self.assertEqual(self.post(SYSTEM + "/region/r/unregister").status, 200)
            self.assertEqual(self.post(SYSTEM + "/region/r/unregister").status, 200)
            self.registered("r", memory.name, 64)

    def test_an_object_that_shrinks_fails_its_own_requests_only(self):
        with Object(len(tensors())) as memory, Object(len(tensors())) as other:
            memory.map[:] = other.map[:] = tensors()
            self.registered("region", memory.name, len(tensors()))
            self.registered("other", other.name, len(tensors()))
            os.truncate(memory.path, 100)
            self.refused(self.infer(), 400)
            self.assertEqual(keep_indices(self.infer("other")), keep_indices(self.expected()))

    def test_unregistering_while_requests_are_in_flight_lets_them_end(self):
        """The worker is stopped, so the request is in flight for sure when its region goes."""
        worker = worker_of(self.daemon)
        with Object(len(tensors())) as memory:
            memory.map[:] = tensors()
            self.registered("region", memory.name, len(tensors()))
            wanted = keep_indices(self.expected())
            os.kill(worker, signal.SIGSTOP)
            try:
                with self.daemon.connect() as connection:
                    body = {"parameters": PARAMETERS, "outputs": [{"name": "keep_indices"}], "inputs": []}
                    offset = 0
                    for name, n_bytes in SIZES.items():
                        body["inputs"].append({"name": name, "datatype": "FP32", "shape": SHAPES[name], "parameters": {
                            "shared_memory_region": "region", "shared_memory_offset": offset,
                            "shared_memory_byte_size": n_bytes}})
                        offset += n_bytes
                    connection.sendall(request("POST", INFER, (), json.dumps(body).encode()))
                    self.daemon.wait_for_metric("dropkv_running_requests", lambda n: n == 1)
                    self.assertEqual(self.post(SYSTEM + "/unregister").status, 200) # another client, of all
                    self.assertEqual(self.daemon.get(SYSTEM + "/status").json(), [])
                    self.refused(self.infer(), 404)
                    os.kill(worker, signal.SIGCONT)
                    reply = read_reply(connection)
                    self.assertEqual(reply.status, 200, reply.body)
                    self.assertEqual(keep_indices(reply), wanted)
            finally:
                os.kill(worker, signal.SIGCONT)
        self.daemon.wait_for_metric('dropkv_regions{kind="loose"}', lambda n: n == 0)

    def test_cuda_handles_are_read_with_line_breaks_and_refused_without_a_gpu(self):
        reply = self.post(CUDA + "/region/gpu/register", cuda_body())
        self.refused(reply, 501, "device_id 0")
        for n_bytes in (63, 65, 0):
            self.refused(self.post(CUDA + "/region/gpu/register", cuda_body(n_bytes)), 400, "64 bytes")
        for text in ("*" * 88, "A" * 87, "A" * 88 + "=", base64.b64encode(bytes(64)).decode()[:-2] + "B=", 7, None):
            body = cuda_body()
            body["raw_handle"]["b64"] = text
            self.refused(self.post(CUDA + "/region/gpu/register", body), 400)
        for change in ({"raw_handle": None}, {"byte_size": 0}, {"device_id": -1}, {"offset": 0}):
            self.refused(self.post(CUDA + "/region/gpu/register", {**cuda_body(), **change}), 400)
        self.refused(self.post(CUDA + "/region/gpu/register", {**cuda_body(), "device_id": 7}), 501, "device_id 7")


def cuda_body(n_bytes=64):
    """As the C++ client writes it: a line break after 72 characters and one at the end."""
    text = base64.b64encode(bytes(range(n_bytes))).decode()
    return {"raw_handle": {"b64": text[:72] + "\n" + text[72:] + "\n"}, "device_id": 0, "byte_size": 4096}


def worker_of(daemon):
    pid = daemon.process.pid
    with open("/proc/%d/task/%d/children" % (pid, pid), encoding="ascii") as file:
        return int(file.read().split()[0])


class TwoClients(unittest.TestCase):
    """What one client unregisters must not be another one's, where they can be told apart."""

    ALICE, BOB = "a" * 32, "b" * 32

    def test_the_holder_of_another_token_neither_sees_nor_uses_nor_drops(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tokens")
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write("alice %s\nbob %s\n" % (self.ALICE, self.BOB))
            with Daemon(DROPKVD, "--allow-client-shm", "true", "--token-file", path) as daemon, \
                    Object(len(tensors())) as memory, Object(len(tensors())) as other:
                memory.map[:], other.map[:] = tensors(), tensors(2)
                body = {m.name: json.dumps({"key": m.name, "byte_size": len(tensors())}).encode() for m in (memory, other)}

                def ask(token, method, path, body=b""):
                    return daemon.ask(request(method, path, ["Authorization: Bearer " + token], body))

                def infer(token):
                    offset, inputs = 0, []
                    for name, n_bytes in SIZES.items():
                        inputs.append({"name": name, "datatype": "FP32", "shape": SHAPES[name], "parameters": {
                            "shared_memory_region": "region", "shared_memory_offset": offset,
                            "shared_memory_byte_size": n_bytes}})
                        offset += n_bytes
                    return ask(token, "POST", INFER, json.dumps(
                        {"parameters": PARAMETERS, "inputs": inputs, "outputs": [{"name": "keep_indices"}]}).encode())
                self.assertEqual(ask(self.ALICE, "POST", SYSTEM + "/region/region/register", body[memory.name]).status, 200)
                self.assertEqual(infer(self.BOB).status, 404)
                self.assertEqual(ask(self.BOB, "GET", SYSTEM + "/status").json(), [])
                self.assertEqual(ask(self.BOB, "GET", SYSTEM + "/region/region/status").status, 404)
                self.assertEqual(ask(self.BOB, "POST", SYSTEM + "/unregister").status, 200)
                self.assertEqual(ask(self.BOB, "POST", SYSTEM + "/region/region/unregister").status, 200)
                mine = infer(self.ALICE)
                self.assertEqual(mine.status, 200, mine.body)
                # the same name is another region of another client's
                self.assertEqual(ask(self.BOB, "POST", SYSTEM + "/region/region/register", body[other.name]).status, 200)
                self.assertNotEqual(keep_indices(infer(self.BOB)), keep_indices(mine))
                self.assertEqual(ask(self.BOB, "POST", SYSTEM + "/unregister").status, 200)
                self.assertEqual(keep_indices(infer(self.ALICE)), keep_indices(mine))


def block(number, offset=0):
    query, n = offset + SIZES["query"], SIZES["key"]
    return wire.score_blocks([wire.block([wire.view(number, offset, 32, 8 * 32), wire.view(number, query, 32, n),
                                          wire.view(number, query + n, 32, n)], tokens=96)],
                             wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, 24))


def named(client, suffix, n_bytes, **options):
    handle = suffix.encode().ljust(64, b"\0")
    return client.ask(wire.REGION_ADD, wire.region(n_bytes, kind=4, handle=handle, **options))


class Names(unittest.TestCase):
    """The local socket: names that the daemon gave to this connection, and nothing else."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = SocketDaemon(DROPKVD, "--allow-shm-names", "true").__enter__()
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)

    def prefix(self, client):
        prefix = wire.about(client.welcome)[4]
        self.assertRegex(prefix, "^dropkv-%d-[0-9a-f]{32}-$" % os.getuid())
        return prefix

    def test_a_named_object_has_the_answer_of_a_passed_one(self):
        with wire.Client(self.daemon.path) as client:
            with Object(64 + len(tensors()), self.prefix(client) + "kv0") as memory:
                memory.map[64:] = tensors()
                number = named(client, "kv0", len(tensors()) + 32, offset=32).object()[0]
                kept = client.ask(wire.SCORE_BLOCKS, block(number, 32)).keep()
                fd = wire.new_memfd(tensors())
                passed = client.ask(wire.SCORE_BLOCKS, block(client.add_memfd(fd, len(tensors())))).keep()
                os.close(fd)
                self.assertEqual(kept, passed)
                os.unlink(memory.path) # what is registered stays
                self.assertEqual(client.ask(wire.SCORE_BLOCKS, block(number, 32)).keep(), passed)
                os.close(os.open(memory.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))

    def test_answers_can_be_written_there(self):
        with wire.Client(self.daemon.path) as client:
            with Object(len(tensors()) + KEEP_BYTES, self.prefix(client) + "out") as memory:
                memory.map[: len(tensors())] = tensors()
                number = named(client, "out", len(memory.map), writable=1).object()[0]
                query = SIZES["query"]
                message = wire.score_blocks(
                    [wire.block([wire.view(number, 0, 32, 256), wire.view(number, query, 32, SIZES["key"]),
                                 wire.view(number, query + SIZES["key"], 32, SIZES["key"])], tokens=96)],
                    wire.integer(wire.WINDOW, 8) + wire.integer(wire.KEEP_TOKENS, 24),
                    output=(number, len(tensors()), KEEP_BYTES))
                answer = client.ask(wire.SCORE_BLOCKS, message)
                self.assertEqual(answer.keep(memory.map[len(tensors()) :]),
                                 client.ask(wire.SCORE_BLOCKS, block(number)).keep())

    def test_everything_else_has_the_same_answer(self):
        with wire.Client(self.daemon.path) as client, wire.Client(self.daemon.path) as other:
            prefix = self.prefix(client)
            self.assertNotEqual(prefix, self.prefix(other))
            told = set()
            with Object(4096, self.prefix(other) + "mine"), Object(4096) as plain, \
                    Object(4096, prefix + "open", mode=0o644), Object(4096, prefix + "good") as good:
                link, folder, fifo = ("/dev/shm/" + prefix + word for word in ("link", "folder", "fifo"))
                os.symlink(good.path, link)
                os.mkdir(folder)
                os.mkfifo(fifo)
                try:
                    for suffix in ("mine", plain.name, "open", "link", "folder", "fifo", "nobody", "../" + plain.name, ".",
                                   "a" * 33, "Good", "go-od", "/good", "good/", "good\0x", "\x80"):
                        status, text = named(client, suffix, 64).error()
                        self.assertEqual(status, wire.NOT_FOUND, suffix)
                        told.add(text)
                    os.link(good.path, "/dev/shm/" + prefix + "hard")
                    told.add(named(client, "good", 64).error()[1])
                    os.unlink("/dev/shm/" + prefix + "hard")
                finally:
                    os.unlink(link)
                    os.rmdir(folder)
                    os.unlink(fifo)
                self.assertEqual(len(told), 1, told)
                self.assertEqual(named(client, "good", 4097).error()[0], wire.INVALID)
                self.assertEqual(named(client, "good", 4096).kind, wire.DONE)

    def test_names_are_not_taken_unless_that_is_allowed(self):
        with SocketDaemon(DROPKVD) as daemon, wire.Client(daemon.path) as client:
            self.assertEqual(wire.about(client.welcome)[4], "")
            self.assertEqual(named(client, "good", 64).error()[0], wire.UNSUPPORTED)

    def test_the_daemon_has_no_named_memory_of_its_own(self):
        for pid in self.daemon.processes():
            with open("/proc/%d/maps" % pid, encoding="ascii") as file:
                self.assertNotIn("/dev/shm/", file.read())


class Off(unittest.TestCase):
    def test_nothing_is_accepted_unless_it_is_allowed(self):
        with Daemon(DROPKVD) as daemon, Object(4096) as memory:
            body = json.dumps({"key": memory.name, "byte_size": 64}).encode()
            self.assertEqual(daemon.ask(request("POST", SYSTEM + "/region/r/register", (), body)).status, 403)
            self.assertEqual(daemon.ask(request("POST", CUDA + "/region/r/register", (),
                                                json.dumps(cuda_body()).encode())).status, 403)
            self.assertEqual(daemon.get(SYSTEM + "/status").json(), [])
            self.assertNotIn("system_shared_memory", daemon.get("/v2").json()["extensions"])


if __name__ == "__main__":
    unittest.main(verbosity=1)
