"""/metrics of a real daemon: complete from the start, moved by what it counts, of a fixed size, quick.

usage: test_metrics.py DROPKVD

What promtool (Debian: prometheus) has to say of the text is asked where it is installed.
"""
import contextlib
import resource
import shutil
import struct
import subprocess
import sys
import time
import unittest

import wire
from daemon import Daemon, infer_body, infer_request, is_sanitized, request
from socket_daemon import SocketDaemon
from wire import Client, Memory

DROPKVD = sys.argv.pop(1)
N_STREAMS = 1000


def names(text):
    return sorted(line.rsplit(" ", 1)[0] for line in text.splitlines() if line[0] != "#")


def promtool(text):
    """(exit status, complaints)"""
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stdout + result.stderr


def nan_request(**parameters):
    head, data = infer_body(parameters={"keep_ratio": 0.25, **parameters})
    data = bytearray(data)
    data[-4:] = struct.pack("<f", float("nan"))
    return request("POST", "/v2/models/dropkv/infer", ["Inference-Header-Content-Length: %d" % len(head)],
                   head + bytes(data))


class Text(unittest.TestCase):
    def test_counters_begin_at_zero_and_are_there(self):
        with Daemon(DROPKVD) as daemon:
            metrics = daemon.metrics()
        for name, value in metrics.items():
            if "_total" in name.split("{")[0] or name.endswith(("_sum", "_count")):
                begun = name.startswith(("process_", "dropkv_connections_total{transport=\"http\"}"))
                self.assertTrue(begun or value == 0, (name, value))
        for name in ('dropkv_requests_total{outcome="failed"}', 'dropkv_bytes_in_total{transport="device"}',
                     'dropkv_build_info{version="0.1.0",protocol="1"}', "dropkv_queue_seconds_count",
                     'dropkv_nonfinite_inputs_total{action="refused"}', 'dropkv_regions{kind="loose"}',
                     'dropkv_regions_released_total{reason="disconnect"}', "process_open_fds",
                     'dropkv_worker_restarts_total{worker="0",device="cpu"}', "dropkv_degraded_total"):
            self.assertIn(name, metrics)
        self.assertGreater(metrics["process_resident_memory_bytes"], 1 << 20)
        self.assertGreater(metrics['dropkv_worker_resident_memory_bytes{worker="0",device="cpu"}'], 1 << 20)
        self.assertLess(abs(metrics["process_start_time_seconds"] - time.time()), 60)

    @unittest.skipUnless(shutil.which("promtool"), "promtool is not installed")
    def test_promtool_finds_nothing_to_say(self):
        with Daemon(DROPKVD) as daemon:
            daemon.ask(infer_request())
            text = daemon.get("/metrics").body.decode()
        self.assertEqual(promtool(text), (0, ""))
        status, complaints = promtool(text + "# TYPE dropkv_bad counter\ndropkv_bad 1\n")
        self.assertEqual(status, 3, complaints)  # it does look

    def test_triton_names_are_behind_a_switch(self):
        for options in ((), ("--nv-metrics",)):
            with Daemon(DROPKVD, *options) as daemon:
                daemon.ask(infer_request())
                text = daemon.get("/metrics").body.decode()
            found = [name for name in names(text) if name.startswith("nv_")]
            self.assertEqual(len(found), 13 if options else 0, found)
            if options and shutil.which("promtool"):
                status, complaints = promtool(text)
                self.assertNotEqual(status, 1, complaints)  # not to its taste, but read
                self.assertFalse([line for line in complaints.splitlines() if not line.startswith("nv_")])


class Movement(unittest.TestCase):
    """Each way of doing something moves what counts it."""

    def moved(self, daemon, act):
        before = daemon.metrics()
        act()
        after = daemon.metrics()
        return {name: value - before[name] for name, value in after.items() if value != before[name]}

    def test_nonfinite_inputs_are_counted_by_what_became_of_them(self):
        with Daemon(DROPKVD) as daemon:
            refused = self.moved(daemon, lambda: self.assertEqual(daemon.ask(nan_request()).status, 400))
            masked = self.moved(daemon, lambda: self.assertEqual(daemon.ask(nan_request(nonfinite="mask")).status, 200))
            clean = self.moved(daemon, lambda: self.assertEqual(daemon.ask(infer_request()).status, 200))
        name = 'dropkv_nonfinite_inputs_total{action="%s"}'
        self.assertEqual((refused.get(name % "refused"), refused.get(name % "masked")), (1, None))
        self.assertEqual((masked.get(name % "refused"), masked.get(name % "masked")), (None, 1))
        self.assertEqual((clean.get(name % "refused"), clean.get(name % "masked")), (None, None))

    def test_a_transport_counts_what_came_through_it(self):
        data = infer_body(tokens=96)[1]
        query_bytes, cache_bytes = 2 * 8 * 8 * 4, 96 * 8 * 4

        def blocks(region):
            views = [wire.view(region, 0, 32, 8 * 32), wire.view(region, query_bytes, 32, cache_bytes),
                     wire.view(region, query_bytes + cache_bytes, 32, cache_bytes)]
            return wire.score_blocks([wire.block(views, tokens=96)], wire.real(wire.KEEP_RATIO, 0.25))

        with SocketDaemon(DROPKVD) as daemon, Memory(len(data)) as memory:
            memory.map[:] = data
            client = Client(daemon.path)
            http = self.moved(daemon, lambda: daemon.ask(infer_request(tokens=96)))
            inline = self.moved(daemon, lambda: client.ask(wire.SCORE_BLOCKS, blocks(0), data).keep())
            region = client.add_memfd(memory.fd, len(data))
            shared = self.moved(daemon, lambda: client.ask(wire.SCORE_BLOCKS, blocks(region)).keep())
            metrics = daemon.metrics()
            self.assertEqual(metrics['dropkv_regions{kind="sealed"}'], 1)
            self.assertEqual(metrics['dropkv_region_bytes{kind="sealed"}'], len(data))
            self.assertEqual(metrics['dropkv_worker_mapped_bytes{worker="0",device="cpu"}'], len(data))
            asked = self.moved(daemon, lambda: client.ask(wire.REGION_DROP, struct.pack("<II", region, 0)).object())
            self.assertEqual(daemon.metrics()['dropkv_region_bytes{kind="sealed"}'], 0)
            client.add_memfd(memory.fd, len(data))
            client.socket.close()
            daemon.wait_for_metric('dropkv_regions_released_total{reason="disconnect"}', lambda v: v == 1)
            daemon.wait_for_metric('dropkv_regions{kind="sealed"}', lambda v: v == 0)
            daemon.wait_for_metric('dropkv_connections{transport="socket"}', lambda v: v == 0)
        self.assertEqual(asked['dropkv_regions_released_total{reason="asked"}'], 1)
        for way, moved, n_bytes in (("http", http, None), ("socket", inline, len(data)), ("shared", shared, len(data))):
            self.assertEqual(moved['dropkv_answered_total{transport="%s"}' % way], 1, way)
            self.assertEqual(moved['dropkv_worker_blocks_total{worker="0",device="cpu"}'], 1, way)
            self.assertGreater(moved['dropkv_worker_busy_seconds_total{worker="0",device="cpu"}'], 0, way)
            came = moved['dropkv_bytes_in_total{transport="%s"}' % way]
            self.assertTrue(came == n_bytes if n_bytes else came > len(data), (way, came))


class Size(unittest.TestCase):
    """No client makes the text grow, and it is quick however many there are."""

    def setUp(self):
        """A descriptor per stream, here and in the daemon, which inherits the limit."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = N_STREAMS + 200
        if hard != resource.RLIM_INFINITY and hard < wanted:
            self.skipTest("%d file descriptors are allowed, %d needed" % (hard, wanted))
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))

    def test_a_thousand_streams_leave_the_series_as_they_were(self):
        with SocketDaemon(DROPKVD, "--max-connections", "2048") as daemon, contextlib.ExitStack() as stack:
            daemon.ask(infer_request())
            before = names(daemon.get("/metrics").body.decode())
            clients = [stack.enter_context(Client(daemon.path)) for _ in range(N_STREAMS)]
            params = wire.real(wire.KEEP_RATIO, 0.25)
            data = infer_body(tokens=16)[1]
            views = [wire.view(0, 0, 32, 8 * 32), wire.view(0, 512, 32, 512), wire.view(0, 1024, 32, 512)]
            for i, client in enumerate(clients):
                block = wire.score_blocks([wire.block(views, tokens=16)], params + wire.text(wire.STREAM, "stream-%d" % i))
                client.ask(wire.SCORE_BLOCKS, block, data).keep()
            self.assertGreaterEqual(daemon.metrics()["dropkv_clients"], N_STREAMS)
            took = []
            with daemon.connect() as connection:
                for _ in range(30):
                    began = time.perf_counter()
                    connection.sendall(request("GET", "/metrics"))
                    text = read_text(connection)
                    took.append(time.perf_counter() - began)
            self.assertEqual(names(text), before)
            if not is_sanitized(DROPKVD):
                self.assertLess(min(took), 0.002, "/metrics of %d streams" % N_STREAMS)
            print("/metrics of %d streams: %.2f ms at best, %.2f ms in the middle" %
                  (N_STREAMS, min(took) * 1e3, sorted(took)[15] * 1e3), file=sys.stderr)


def read_text(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(next(line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")))
    while len(body) < length:
        body += connection.recv(65536)
    return body.decode()


if __name__ == "__main__":
    unittest.main(verbosity=1)
