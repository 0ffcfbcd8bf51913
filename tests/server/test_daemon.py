"""What a real daemon does under load, signals and tokens.

usage: test_daemon.py DROPKVD

Where a test needs the engine to be busy it sends a real request that is slow by its size, on one
thread without vector instructions, and sees in the metrics that it runs.
"""
import json
import os
import signal
import stat
import struct
import sys
import tempfile
import threading
import time
import unittest

from daemon import (INFER, Daemon, infer_body, infer_request, is_closed, is_sanitized, keep_indices, read_reply,
                    read_to_end, request)

DROPKVD = sys.argv.pop(1)
SLOW_ENGINE = ("--threads", "1", "--cpu-mask", "0")
OCCUPANT = {"tokens": 16384, "q_heads": 8, "kv_heads": 1, "dim": 128, "rows": 64,
            "parameters": {"window": 64, "keep_tokens": 64}}


def long_json(tokens=100000, dim=8, output="keep_indices"):
    """A request of 1.6 million numbers as JSON."""
    def tensor(name, shape):
        count = shape[1] * shape[2] * shape[3]
        return '{"name":"%s","datatype":"FP32","shape":%s,"data":[%s]}' % (
            name, shape, ",".join(["1", "0.5"] * (count // 2)))

    inputs = [tensor("query", [1, 1, 1, dim]), tensor("key", [1, 1, tokens, dim]), tensor("value", [1, 1, tokens, dim])]
    outputs = '[{"name":"%s","parameters":{"binary_data":true}}]' % output
    return request("POST", INFER, (), ('{"inputs":[%s],"outputs":%s}' % (",".join(inputs), outputs)).encode())


def long_answer():
    """A small request whose answer is a million numbers as JSON."""
    return infer_request(tokens=1000000, q_heads=1, rows=1, binary_output=False, output_names=("scores",))


class Occupied:
    """A daemon whose engine is busy with one long request, sent on its own connection."""

    def __init__(self, *options):
        self.daemon = Daemon(DROPKVD, *SLOW_ENGINE, *options)
        self.connection = self.daemon.connect()
        self.connection.sendall(infer_request(**OCCUPANT))
        self.daemon.wait_for_metric("dropkv_running_requests", lambda v: v == 1)

    def __enter__(self):
        return self.daemon, self.connection

    def __exit__(self, *exc):
        self.connection.close()
        self.daemon.__exit__(*exc)


class Answers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(DROPKVD, "--nv-metrics")

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def test_binary_json_and_chunked_requests_have_equal_answers(self):
        head, data = infer_body(tokens=96)
        binary = self.daemon.ask(request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head)], head + data))
        self.assertEqual(binary.status, 200)
        expected = keep_indices(binary)
        self.assertEqual(len(expected), 24)
        self.assertEqual(expected, sorted(set(expected)))
        self.assertEqual(binary.fields["content-type"], "application/octet-stream")

        document, at = json.loads(head), 0
        for tensor in document["inputs"]:
            n_bytes = tensor.pop("parameters")["binary_data_size"]
            tensor["data"] = list(struct.unpack("<%df" % (n_bytes // 4), data[at : at + n_bytes]))
            at += n_bytes
        document["outputs"][0]["parameters"]["binary_data"] = False
        plain = self.daemon.ask(request("POST", INFER, (), json.dumps(document).encode()))
        self.assertEqual(plain.status, 200, plain.body)
        self.assertEqual(plain.fields["content-type"], "application/json")
        self.assertNotIn("inference-header-content-length", plain.fields)
        self.assertEqual(keep_indices(plain), expected)

        body, chunked = head + data, b""
        for start in range(0, len(body), 777):
            piece = body[start : start + 777]
            chunked += b"%x\r\n" % len(piece) + piece + b"\r\n"
        reply = self.daemon.ask(request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head),
                                                        "Transfer-Encoding: chunked"]) + chunked + b"0\r\n\r\n")
        self.assertEqual(reply.status, 200, reply.body)
        self.assertEqual(keep_indices(reply), expected)
        self.assertEqual(reply.fields["connection"].lower(), "close")

    def test_one_connection_serves_many_requests(self):
        with self.daemon.connect() as connection:
            for seed in range(1, 40):
                connection.sendall(infer_request(seed=seed))
                self.assertEqual(read_reply(connection).status, 200)
                connection.sendall(request("POST", INFER, (), b"{"))
                self.assertEqual(read_reply(connection).status, 400)

    def test_expect_100_continue_is_answered(self):
        head, data = infer_body()
        with self.daemon.connect() as connection:
            connection.sendall(request("POST", INFER, [
                "Inference-Header-Content-Length: %d" % len(head), "Expect: 100-continue",
                "Content-Length: %d" % (len(head) + len(data))]))
            self.assertEqual(read_reply(connection).status, 100)
            connection.sendall(head + data)
            self.assertEqual(read_reply(connection).status, 200)

    def test_wrong_requests_are_told_why(self):
        head, data = infer_body()
        length = "Inference-Header-Content-Length: %d" % len(head)
        rows = {
            "twice the bytes": (request("POST", INFER, [length], head + data + data), 400, ""),
            "half the bytes": (request("POST", INFER, [length], head + data[: len(data) // 2]), 400, ""),
            "no length of the json part": (request("POST", INFER, (), head + data), 400, ""),
            "length 0 of the json part": (
                request("POST", INFER, ["Inference-Header-Content-Length: 0"], head + data), 400, ""),
            "cut json": (request("POST", INFER, ["Inference-Header-Content-Length: %d" % (len(head) - 3)],
                                 head[:-3] + data), 400, ""),
            "empty body": (request("POST", INFER, ()), 400, ""),
            "window 0": (infer_request(parameters={"window": 0}), 400, "window"),
            "unknown parameter": (infer_request(parameters={"wimdow": 8}), 400, "wimdow"),
            "another model": (request("POST", "/v2/models/other/infer", [length], head + data), 404, "unknown model"),
            "another version": (request("POST", "/v2/models/dropkv/versions/2/infer", [length], head + data), 404,
                                "version 1"),
            "head dimension 12": (infer_request(dim=12), 501, "12"),
            "shared memory": (request("POST", "/v2/systemsharedmemory/region/x/register", (), b"{}"), 403, "shared"),
        }
        for name, (raw, status, word) in rows.items():
            with self.subTest(name):
                reply = self.daemon.ask(raw)
                self.assertEqual(reply.status, status, reply.body)
                self.assertEqual(list(reply.json()), ["error"])
                self.assertIn(word, reply.error())
                self.assertLess(len(reply.body), 1024)

    def test_an_answer_has_a_most_of_json_numbers(self):
        tokens = 2097152  # as many scores as are allowed; the kept indices are too much
        inputs = [{"name": "query", "datatype": "FP32", "shape": [1, 1, 1, 8], "parameters": {"binary_data_size": 32}}]
        for name in ("key", "value"):
            inputs.append({"name": name, "datatype": "F8_E4M3", "shape": [1, 1, tokens, 8],
                           "parameters": {"binary_data_size": 8 * tokens, "scale": 1.0}})
        head = json.dumps({"inputs": inputs}).encode()
        reply = self.daemon.ask(request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head)],
                                        head + bytes(32 + 16 * tokens)))
        self.assertEqual(reply.status, 413, reply.body[:200])
        self.assertIn("binary_data", reply.error())

    def test_a_version_may_be_named(self):
        head, data = infer_body()
        length = "Inference-Header-Content-Length: %d" % len(head)
        reply = self.daemon.ask(request("POST", "/v2/models/dropkv/versions/1/infer", [length], head + data))
        self.assertEqual(reply.status, 200, reply.body)

    def test_documents_have_what_clients_read(self):
        stats = self.daemon.get("/v2/models/stats").json()["model_stats"][0]
        self.assertEqual(int(stats["version"]), 1)
        for name in ("success", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"):
            self.assertGreaterEqual(stats["inference_stats"][name]["count"], 0)
        self.assertIn("statistics", self.daemon.get("/v2").json()["extensions"])
        self.assertEqual(self.daemon.get("/v2/models/dropkv/config").json()["name"], "dropkv")
        self.assertEqual(self.daemon.get("/v2/models/dropkv/versions/1").json()["versions"], ["1"])
        self.assertEqual(self.daemon.get("/v2/systemsharedmemory/status").json(), [])
        index = self.daemon.ask(request("POST", "/v2/repository/index", (), b"{}")).json()
        self.assertEqual((index[0]["name"], index[0]["state"]), ("dropkv", "READY"))

    def test_every_path_moves_its_own_counters(self):
        def moved(raw):
            before = self.daemon.metrics()
            self.daemon.ask(raw)
            return {k for k, v in self.daemon.metrics().items() if v > before[k]}

        ok = moved(infer_request())
        for name in ('dropkv_requests_total{outcome="ok"}', "dropkv_blocks_total", "dropkv_batches_total",
                     "dropkv_tokens_in_total", "dropkv_tokens_kept_total", "dropkv_queue_seconds_count",
                     "dropkv_compute_seconds_count", "dropkv_request_seconds_count", 'dropkv_bytes_in_total{transport="http"}',
                     "dropkv_batch_items_count",
                     'nv_inference_request_success{model="dropkv",version="1"}'):
            self.assertIn(name, ok)
        bad = moved(infer_request(parameters={"window": 0}))
        self.assertIn('dropkv_requests_total{outcome="invalid"}', bad)
        self.assertIn('dropkv_http_responses_total{class="4xx"}', bad)
        self.assertNotIn("dropkv_blocks_total", bad)
        self.assertIn('dropkv_http_refused_total{reason="host"}', moved(b"GET /v2 HTTP/1.1\r\nHost: evil\r\n\r\n"))
        self.assertIn('dropkv_http_refused_total{reason="size"}',
                      moved(request("POST", INFER, ["Content-Length: %d" % (1 << 40)])))

    @unittest.skipIf(is_sanitized(DROPKVD), "AddressSanitizer keeps freed memory")
    def test_memory_of_a_body_goes_back(self):
        raw = infer_request(tokens=1 << 20, dim=8, q_heads=1, rows=1, parameters={"keep_tokens": 1, "window": 1})
        self.assertGreater(len(raw), 64 << 20)
        before = self.daemon.rss_kib()
        for _ in range(3):
            self.assertEqual(self.daemon.ask(raw).status, 200)
        self.daemon.wait_for_metric("dropkv_body_bytes", lambda v: v == 0)
        deadline = time.monotonic() + 30
        while self.daemon.rss_kib() - before > 16 << 10:
            self.assertLess(time.monotonic(), deadline, "%d KiB stay" % (self.daemon.rss_kib() - before))
            self.daemon.metrics()

    def test_long_json_holds_nobody_up(self):
        """What others wait meanwhile is a small part of what it takes, in one of a few attempts: the machine may
        be busy with something else."""
        for name, raw in (("read", long_json()), ("written", long_answer())):
            shares = []
            with self.subTest(name), Daemon(DROPKVD, "--threads", "1") as daemon:
                for _ in range(5):
                    shares.append(self.longest_wait_during(daemon, raw))
                    if shares[-1] < 0.25:
                        break
                self.assertLess(shares[-1], 0.25, shares)

    def longest_wait_during(self, daemon, raw):
        """Of requests sent one after the other, as a share of the time that `raw` takes once received."""
        replies, longest = [], 0.0
        with daemon.connect() as connection, daemon.connect() as other:
            connection.sendall(raw)
            began = time.monotonic()
            reader = threading.Thread(target=lambda: replies.append(read_reply(connection)))
            reader.start()
            while reader.is_alive():
                sent = time.monotonic()
                other.sendall(request("GET", "/v2/health/live"))
                read_reply(other)
                longest = max(longest, time.monotonic() - sent)
            reader.join()
            self.assertEqual(replies[0].status, 200, replies[0].body[:200])
            return longest / (time.monotonic() - began)

    def test_peers_that_leave_while_long_json_is_read_or_written_do_no_harm(self):
        with Daemon(DROPKVD, "--threads", "1") as daemon:
            n_fds, rss_kib = daemon.n_fds(), daemon.rss_kib()
            for raw in (long_json(), long_answer()):
                for _ in range(4):
                    with daemon.connect() as connection:
                        connection.sendall(raw)
            daemon.wait_for_metric('dropkv_connections{transport="http"}', lambda v: v == 1)
            daemon.wait_for_metric("dropkv_body_bytes", lambda v: v == 0)
            for raw in (long_json(), long_answer()):
                self.assertEqual(daemon.ask(raw).status, 200)
            daemon.wait_for_metric('dropkv_connections{transport="http"}', lambda v: v == 1)
            self.assertLessEqual(daemon.n_fds(), n_fds + 4)
            if not is_sanitized(DROPKVD):
                deadline = time.monotonic() + 30
                while daemon.rss_kib() > rss_kib + 8192 and time.monotonic() < deadline:
                    daemon.metrics()
                self.assertLess(daemon.rss_kib(), rss_kib + 8192)

    def test_draining_waits_for_long_json(self):
        for raw in (long_json(), long_answer()):
            with Daemon(DROPKVD, "--threads", "1") as daemon, daemon.connect() as connection:
                connection.sendall(raw)
                daemon.wait_for_metric("dropkv_body_bytes", lambda v: v > 0)
                daemon.process.send_signal(signal.SIGTERM)
                self.assertEqual(read_reply(connection).status, 200)
                self.assertEqual(daemon.wait(), 0)

    def test_peers_that_leave_in_the_middle_of_a_reply_do_no_harm(self):
        raw = infer_request(tokens=1 << 16, dim=8, q_heads=1, rows=1, binary_output=False,
                            parameters={"keep_ratio": 1.0, "window": 1})
        fds = self.daemon.n_fds()
        for _ in range(100):
            with self.daemon.connect(receive_bytes=4096) as connection:
                connection.sendall(raw)
                connection.recv(100)
        self.daemon.wait_for_metric('dropkv_connections{transport="http"}', lambda v: v == 1)
        deadline = time.monotonic() + 10
        while self.daemon.n_fds() > fds:
            self.assertLess(time.monotonic(), deadline, "descriptors leak")
        self.assertEqual(self.daemon.ask(infer_request()).status, 200)


class Load(unittest.TestCase):
    def test_a_full_queue_refuses_at_once_and_loses_nothing(self):
        with Occupied("--max-queue-requests", "4") as (daemon, occupant):
            waiting = []
            for _ in range(3):
                waiting.append(daemon.connect())
                waiting[-1].sendall(infer_request())
            daemon.wait_for_metric("dropkv_queue_depth", lambda v: v == 3)
            for size in (64, 1 << 18):  # one small enough to be read over, one refused before its body
                began = time.monotonic()
                with daemon.connect() as connection:
                    try:
                        connection.sendall(infer_request(tokens=size))
                    except (BrokenPipeError, ConnectionResetError):
                        pass
                    reply = read_reply(connection)
                self.assertEqual(reply.status, 503, reply.body)
                self.assertEqual(reply.fields["retry-after"], "1")
                self.assertLess(time.monotonic() - began, 1)
            self.assertEqual(daemon.metrics()["dropkv_running_requests"], 1, "the occupant was too quick")
            for connection in (*waiting, occupant):
                self.assertEqual(read_reply(connection).status, 200)
                connection.close()
            metrics = daemon.metrics()
            self.assertEqual(metrics['dropkv_requests_total{outcome="busy"}'], 2)
            self.assertEqual(metrics['dropkv_requests_total{outcome="ok"}'], 4)
            self.assertEqual(metrics["dropkv_batches_total"], 2, "what waited together runs together")

    def test_a_request_whose_client_left_is_never_started(self):
        with Occupied() as (daemon, occupant):
            connection = daemon.connect()
            connection.sendall(infer_request())
            daemon.wait_for_metric("dropkv_queue_depth", lambda v: v == 1)
            connection.close()
            daemon.wait_for_metric('dropkv_requests_total{outcome="cancelled"}', lambda v: v == 1)
            metrics = daemon.metrics()
            self.assertEqual((metrics["dropkv_queue_depth"], metrics["dropkv_running_requests"]), (0, 1))
            self.assertEqual(read_reply(occupant).status, 200)
            self.assertEqual(daemon.metrics()["dropkv_blocks_total"], 1)

    def test_a_client_that_leaves_while_its_request_runs_does_no_harm(self):
        with Occupied() as (daemon, occupant):
            occupant.close()
            daemon.wait_for_metric('dropkv_requests_total{outcome="cancelled"}', lambda v: v == 1)
            self.assertEqual(daemon.ask(infer_request()).status, 200)
            metrics = daemon.metrics()
            self.assertEqual(metrics["dropkv_blocks_total"], 1)
            self.assertEqual(metrics["dropkv_body_bytes"], 0)

    def test_deadlines_are_kept_while_the_engine_is_busy(self):
        with Occupied() as (daemon, occupant):
            reply = daemon.ask(infer_request(parameters={"timeout": 1000}))
            self.assertEqual(reply.status, 503)
            self.assertIn("deadline", reply.error())
            self.assertEqual(daemon.metrics()["dropkv_running_requests"], 1, "the occupant was too quick")
            self.assertEqual(read_reply(occupant).status, 200)
            self.assertEqual(daemon.metrics()['dropkv_requests_total{outcome="timeout"}'], 1)

    def test_connections_beyond_the_limit_wait_their_turn(self):
        with Daemon(DROPKVD, "--max-connections", "4") as daemon:
            held = [daemon.connect() for _ in range(4)]
            for connection in held:  # each is in the middle of a body
                connection.sendall(request("POST", INFER, ["Content-Length: 100", "Expect: 100-continue"]))
                self.assertEqual(read_reply(connection).status, 100)
            late = daemon.connect()
            late.sendall(request("GET", "/v2/health/live"))
            self.assertFalse(is_closed(late, 0.2))
            held.pop().close()
            self.assertEqual(read_reply(late).status, 200)
            for connection in (*held, late):
                connection.close()

    def test_an_idle_connection_makes_room_for_a_new_one(self):
        with Daemon(DROPKVD, "--max-connections", "4") as daemon:
            held = [daemon.connect() for _ in range(4)]
            for connection in held:
                connection.sendall(request("GET", "/v2/health/live"))
                self.assertEqual(read_reply(connection).status, 200)
            for _ in range(20):
                self.assertEqual(daemon.get("/v2/health/live").status, 200)
            self.assertTrue(any(is_closed(connection, 0.1) for connection in held))
            for connection in held:
                connection.close()


class Signals(unittest.TestCase):
    def test_sigterm_answers_what_was_accepted_and_refuses_the_rest(self):
        with Occupied() as (daemon, occupant):
            waiting = []
            for _ in range(10):
                waiting.append(daemon.connect())
                waiting[-1].sendall(infer_request())
            daemon.wait_for_metric("dropkv_queue_depth", lambda v: v == 10)
            idle = daemon.connect()
            idle.sendall(request("GET", "/v2/health/ready"))
            self.assertEqual(read_reply(idle).status, 200)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_log("draining, 11 requests")
            reply = daemon.ask(infer_request())
            self.assertEqual(reply.status, 503)
            self.assertEqual(reply.fields["connection"].lower(), "close")
            self.assertIn("retry-after", reply.fields)
            self.assertEqual(daemon.get("/v2/health/ready").status, 400)
            self.assertEqual(daemon.get("/v2/health/live").status, 200)
            self.assertTrue(is_closed(idle, 10))
            idle.close()
            for connection in (occupant, *waiting):
                reply = read_reply(connection)
                self.assertEqual(reply.status, 200)
                self.assertEqual(reply.fields["connection"].lower(), "close")
                connection.close()
            self.assertEqual(daemon.wait(), 0)

    def test_a_request_whose_body_is_still_coming_counts_as_accepted(self):
        raw = infer_request()
        with Daemon(DROPKVD) as daemon:
            connection = daemon.connect()
            connection.sendall(raw[:-100])
            daemon.wait_for_metric("dropkv_body_bytes", lambda v: v > 0)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_log("draining, 1 requests")
            connection.sendall(raw[-100:])
            self.assertEqual(read_reply(connection).status, 200)
            connection.close()
            self.assertEqual(daemon.wait(), 0)

    def test_a_second_signal_stops_at_once(self):
        with Occupied() as (daemon, _):
            daemon.allowed_codes = (1,)
            daemon.process.send_signal(signal.SIGTERM)
            daemon.wait_for_log("draining, 1 requests")
            daemon.process.send_signal(signal.SIGTERM)
            self.assertEqual(daemon.wait(), 1)
            daemon.wait_for_log("stopping at once, 1 requests")

    def test_draining_has_an_end(self):
        with Occupied("--drain-timeout-ms", "50") as (daemon, _):
            daemon.allowed_codes = (1,)
            daemon.process.send_signal(signal.SIGTERM)
            self.assertEqual(daemon.wait(), 1)

    def test_draining_at_random_moments_loses_nothing(self):
        for round_ in range(10):
            with Daemon(DROPKVD) as daemon:
                results = []

                def load(seed):
                    while True:
                        try:
                            reply = daemon.ask(infer_request(seed=seed))
                        except (ConnectionError, OSError) as error:
                            # Nobody listens any more, or closed before a byte of ours was read.
                            results.append(error)
                            return
                        results.append(reply.status)
                        if reply.status != 200:
                            return

                threads = [threading.Thread(target=load, args=(i,)) for i in range(8)]
                for thread in threads:
                    thread.start()
                daemon.wait_for_metric('dropkv_requests_total{outcome="ok"}', lambda v: v > 20 * round_)
                daemon.process.send_signal(signal.SIGTERM)
                for thread in threads:
                    thread.join()
                self.assertEqual(daemon.wait(), 0)
                self.assertLessEqual({r for r in results if isinstance(r, int)}, {200, 503})

    def test_the_port_file_appears_when_listening_and_goes(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "port")
            with Daemon(DROPKVD, "--port-file", path) as daemon:
                with open(path, encoding="ascii") as file:
                    self.assertEqual(int(file.read()), daemon.port)
            self.assertEqual(os.listdir(folder), [])


class Tokens(unittest.TestCase):
    GOOD, OTHER, NEW = "a" * 43, "b" * 40 + "xyz", "c" * 64

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "tokens")
        self.write("# ours\n%s\nteam %s\n" % (self.GOOD, self.OTHER))

    def write(self, text, mode=0o600):
        with open(self.path, "w", encoding="ascii") as file:
            file.write(text)
        os.chmod(self.path, mode)

    def test_every_route_but_health_needs_a_token(self):
        with Daemon(DROPKVD, "--token-file", self.path) as daemon:
            routes = [("GET", p) for p in ("/v2", "/metrics", "/v2/models/dropkv", "/v2/models/dropkv/ready",
                                           "/v2/models/dropkv/config", "/v2/models/stats", "/v2/nothing",
                                           "/v2/models/dropkv/stats", "/v2/systemsharedmemory/status")]
            routes += [("POST", p) for p in (INFER, "/v2/repository/index", "/v2/systemsharedmemory/unregister")]
            for method, path in routes:
                for fields in ((), ("Authorization: Bearer " + "x" * 43,), ("Authorization: " + self.GOOD,),
                               ("Authorization: Bearer " + self.GOOD[:-1],), ("Authorization: Bearer " + self.GOOD + "a",),
                               ("Authorization: Basic " + self.GOOD,), ("Authorization: Bearer ",)):
                    with self.subTest((path, fields)):
                        reply = daemon.ask(request(method, path, fields))
                        self.assertEqual(reply.status, 401)
                        self.assertEqual(reply.fields["www-authenticate"], "Bearer")
                for token in (self.GOOD, self.OTHER):
                    self.assertNotEqual(daemon.ask(request(method, path, ["Authorization: Bearer " + token])).status, 401)
            self.assertEqual(daemon.get("/v2/health/live").status, 200)
            self.assertEqual(daemon.get("/v2/health/ready").status, 200)
            reply = daemon.ask(infer_request(["Authorization: Bearer " + self.GOOD]))
            self.assertEqual(reply.status, 200)
            self.write(self.NEW + "\n")
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_for_log("1 tokens in force")
            self.assertEqual(daemon.get("/v2", "Authorization: Bearer " + self.GOOD).status, 401)
            self.assertEqual(daemon.get("/v2", "Authorization: Bearer " + self.NEW).status, 200)
            self.write("short\n")
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_for_log("the tokens in force stay")
            self.assertEqual(daemon.get("/v2", "Authorization: Bearer " + self.NEW).status, 200)
        log = "\n".join(daemon.log)
        for token in (self.GOOD, self.OTHER, self.NEW):
            self.assertNotIn(token, log)

    def test_a_body_is_not_read_without_a_token(self):
        with Daemon(DROPKVD, "--token-file", self.path) as daemon:
            with daemon.connect() as connection:
                connection.sendall(request("POST", INFER, ["Content-Length: %d" % (1 << 30)]))
                self.assertEqual(read_reply(connection).status, 401)
            self.assertEqual(daemon.get("/metrics", "Authorization: Bearer " + self.GOOD).status, 200)

    def test_a_file_that_others_can_read_is_refused(self):
        for mode in (0o640, 0o604, 0o666):
            self.write(self.GOOD + "\n", mode)
            with self.subTest(oct(mode)), self.assertRaises(AssertionError) as raised:
                Daemon(DROPKVD, "--token-file", self.path)
            self.assertIn("%04o" % stat.S_IMODE(mode), str(raised.exception))

    def test_an_open_address_works_behind_a_proxy_with_tokens(self):
        with Daemon(DROPKVD, "--token-file", self.path, "--behind-proxy", "--http", "0.0.0.0:0") as daemon:
            raw = b"GET /v2 HTTP/1.1\r\nHost: any.example\r\nAuthorization: Bearer " + self.GOOD.encode() + b"\r\n\r\n"
            self.assertEqual(daemon.ask(raw).status, 200)


if __name__ == "__main__":
    unittest.main(verbosity=1)
