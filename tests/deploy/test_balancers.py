"""Three daemons behind a real HAProxy and behind a real nginx: one is killed with SIGKILL, one drained, both
come back, all under load, and no caller may see a failed request.

usage: test_balancers.py DROPKVD DROPKV_CLIENT CONFIG_FOLDER [--seconds S]

    --seconds S   load for each proxy, from the first request to the last (default 8; 60 for the figure
                  of docs/deploying.md)

The configurations are the shipped ones, with addresses of this machine in place of the examples' and without
TLS. Callers of two kinds: plain HTTP with bodies that the proxies keep, where the first answer counts, and
dropkv-client with bodies that are passed on as they come, where its own retries count.
"""
import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "server"))
from daemon import INFER, PATIENCE_S, Daemon, infer_body, infer_request, read_reply  # noqa: E402 (its folder is known only now)

N_CALLERS, N_BIG_CALLERS = 6, 2
BIG_TOKENS, BIG_HEADS, BIG_DIM = 24576, 2, 64  # keys and values of 12 MB: above what either proxy keeps

# Deadlines are long: a daemon rightly refuses what it could not do in time, and this machine may be busy with
# anything. What is counted here is what nodes that die and leave cost.
ARGS = None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_dump(path):
    """A safetensors file of one large bf16 block."""
    shapes = {"query": [1, BIG_HEADS, 8, BIG_DIM], "key": [1, BIG_HEADS, BIG_TOKENS, BIG_DIM],
              "value": [1, BIG_HEADS, BIG_TOKENS, BIG_DIM]}
    head, data, rng = {}, b"", random.Random(7)
    for name, shape in shapes.items():
        n_bytes = 2 * shape[0] * shape[1] * shape[2] * shape[3]
        head[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + n_bytes]}
        # bf16 of 0.5 to 2, of either sign: any bits below the exponent's.
        piece = b"".join(struct.pack("<H", rng.choice((0x3F00, 0xBF00)) | rng.getrandbits(7)) for _ in range(4096))
        data += (piece * (n_bytes // len(piece) + 1))[:n_bytes]
    text = json.dumps(head).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


class Node:
    """A daemon at a fixed port that can be killed, drained and started again."""

    def __init__(self, *options):
        self.port, self.options = free_port(), options
        self.start()

    def start(self):
        self.daemon = Daemon(ARGS.dropkvd, "--http", "127.0.0.1:%d" % self.port, "--threads", "1", *self.options)
        assert self.daemon.port == self.port

    def kill(self):
        self.daemon.process.kill()
        self.daemon._finish()

    def drain(self):
        """Its exit status."""
        self.daemon.process.send_signal(signal.SIGTERM)
        return self.daemon._finish()

    def wait_until_used(self):
        """It came back: the proxy sends it requests again."""
        self.daemon.wait_for_metric('dropkv_requests_total{outcome="ok"}', lambda n: n > 0)

    def close(self):
        if self.daemon.process.poll() is None:
            self.kill()


class Proxy:
    """A proxy in the foreground, with the shipped configuration changed by (regular expression, text) pairs."""

    name = None

    def __init__(self, folder, changes, ports):
        self.folder, self.port = folder, free_port()
        with open(os.path.join(ARGS.configs, self.config), encoding="utf-8") as file:
            text = file.read()
        for i, port in enumerate(ports):
            changes = [*changes, (r"192\.0\.2\.%d:8480" % (11 + i), "127.0.0.1:%d" % port)]
        for pattern, replacement in changes:
            text, n = re.subn(pattern, replacement.replace("{port}", str(self.port)), text, flags=re.M)
            assert n == 1, "%s matches %d lines of %s" % (pattern, n, self.config)
        self.path = os.path.join(folder, self.config)
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(self.whole(text))
        with open(os.path.join(folder, self.name + ".log"), "wb") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while not self.answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError("%s did not start: %s" % (self.name, self.log()))

    def whole(self, text):
        return text

    def log(self):
        with open(os.path.join(self.folder, self.name + ".log"), encoding="utf-8", errors="replace") as file:
            return file.read()[-2000:]

    def answers(self):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            connection.request("GET", "/v2/health/ready", headers={"Host": "localhost"})
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def close(self):
        self.process.terminate()
        self.process.wait(PATIENCE_S)


class HAProxy(Proxy):
    name, config = "haproxy", "haproxy.cfg"

    def __init__(self, folder, ports, changes=()):
        super().__init__(folder, [(r"bind :8443 ssl.*", "bind 127.0.0.1:{port}"),
                                  (r"/run/haproxy/admin.sock mode 660", folder + "/admin.sock mode 600"),
                                  *changes], ports)

    def command(self):
        return ["haproxy", "-db", "-f", self.path]

    def table(self):
        """{server: {column: text}} of the nodes."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(self.folder + "/admin.sock")
            admin.sendall(b"show stat\n")
            text = b""
            while piece := admin.recv(65536):
                text += piece
        lines = text.decode().splitlines()
        names = lines[0].lstrip("# ").split(",")
        rows = [dict(zip(names, line.split(","))) for line in lines[1:] if line.startswith("nodes,")]
        return {row["svname"]: row for row in rows}


class Nginx(Proxy):
    name, config = "nginx", "nginx.conf"

    def __init__(self, folder, ports, changes=()):
        super().__init__(folder, [(r"listen 8443 ssl;", "listen 127.0.0.1:{port};"), (r"^\s*ssl_certificate .*", ""),
                                  (r"^\s*ssl_certificate_key .*", ""), *changes], ports)

    def whole(self, text):
        temporary = "".join("%s_temp_path %s/%s;\n" % (kind, self.folder, kind)
                            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        return ("daemon off; pid %s/nginx.pid; error_log stderr notice; worker_processes 2;\n"
                "events { worker_connections 512; }\nhttp { access_log off;\n%s\n%s }\n"
                % (self.folder, temporary, text))

    def command(self):
        return ["nginx", "-e", "stderr", "-p", self.folder, "-c", self.path]


class Load:
    """Callers, from start() to stop()."""

    def __init__(self, port, dump):
        self.port, self.dump = port, dump
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.answered, self.big_answered = 0, 0
        self.failures = []
        head, data = infer_body(tokens=256, kv_heads=1, dim=16)
        self.body = head + data
        self.head_bytes = len(head)
        self.expected = None
        self.threads = [threading.Thread(target=self._call) for _ in range(N_CALLERS)]
        self.threads += [threading.Thread(target=self._call_big) for _ in range(N_BIG_CALLERS if dump else 0)]

    def _count(self, failure, big=False):
        with self.lock:
            if failure is not None:
                self.failures.append(("big: " if big else "") + failure)
            elif big:
                self.big_answered += 1
            else:
                self.answered += 1

    def _call(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        fields = {"Host": "localhost", "Inference-Header-Content-Length": str(self.head_bytes)}
        while not self.stopping.is_set():
            failure = None
            try:
                connection.request("POST", INFER, self.body, fields)
                reply = connection.getresponse()
                answer = reply.read()
                if reply.status != 200:
                    failure = "%d %s" % (reply.status, answer[:80])
                else:
                    with self.lock:
                        self.expected = self.expected or answer
                    failure = None if answer == self.expected else "another answer"
            except (OSError, http.client.HTTPException) as error:
                failure = repr(error)
                connection.close()
            self._count(failure)
        connection.close()

    def _call_big(self):
        while not self.stopping.is_set():
            result = subprocess.run(
                [ARGS.client, "score", "--endpoint", "http://127.0.0.1:%d" % self.port, "--keep-ratio", "0.1",
                 "--timeout", "110000000", "--format", "json", self.dump], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            self._count(None if result.returncode == 0 else result.stderr.strip()[-160:], big=True)

    def start(self):
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()

    def go_on(self, for_s):
        """Lets the load run for that long, and on until every kind of caller had ten more answers."""
        end = time.monotonic() + for_s
        goals = self.answered + 10, self.big_answered + (1 if self.dump else 0)
        while time.monotonic() < end or self.answered < goals[0] or self.big_answered < goals[1]:
            if time.monotonic() > end + PATIENCE_S:
                raise AssertionError("the load stands: %s" % self.failures[:5])
            self.stopping.wait(0.02)


class Balancers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        os.chmod(folder.name, 0o755)  # nginx's workers are another user
        self.folder = folder.name

    def world(self, kind, options=(), changes=()):
        if shutil.which(kind.name) is None:
            self.skipTest("%s is not installed" % kind.name)
        nodes = [Node(*options) for _ in range(3)]
        for node in nodes:
            self.addCleanup(node.close)
        proxy = kind(self.folder, [node.port for node in nodes], changes)
        self.addCleanup(proxy.close)
        return nodes, proxy

    def kill_and_drain_under_load(self, kind):
        nodes, proxy = self.world(kind, ("--drain-delay-ms", "2000", "--request-timeout-ms", "120000"))
        dump = self.folder + "/big.safetensors"
        write_dump(dump)
        load = Load(proxy.port, dump)
        started = time.monotonic()
        load.start()
        part_s = (ARGS.seconds - 2) / 5
        try:
            load.go_on(part_s)
            nodes[0].kill()
            load.go_on(part_s)
            nodes[0].start()
            nodes[0].wait_until_used()
            load.go_on(part_s)
            self.assertEqual(nodes[1].drain(), 0)
            load.go_on(part_s)
            nodes[1].start()
            nodes[1].wait_until_used()
            load.go_on(part_s)
        finally:
            load.stop()
        seconds = time.monotonic() - started
        print("%s: %d requests and %d large ones in %.0f s, one node killed, one drained: %d failed"
              % (kind.name, load.answered, load.big_answered, seconds, len(load.failures)), file=sys.stderr)
        self.assertEqual(load.failures, [])
        return proxy

    def test_haproxy_loses_no_request(self):
        proxy = self.kill_and_drain_under_load(HAProxy)
        # It was needed: some request went to a node that was gone.
        retried = sum(int(row["wretr"]) + int(row["wredis"]) for row in proxy.table().values())
        self.assertGreater(retried, 0)

    def test_nginx_loses_no_request(self):
        self.kill_and_drain_under_load(Nginx)

    def refusals_go_to_another_node(self, kind):
        """A node that says 503 at once, and stays there to say it."""
        nodes, proxy = self.world(kind, ("--body-grace-ms", "3600000"))
        raw = infer_request()
        with nodes[0].daemon.connect() as unfinished:
            unfinished.sendall(raw[:-100])  # accepted, so draining waits for the rest
            nodes[0].daemon.wait_for_metric("dropkv_body_bytes", lambda n: n > 0)
            load = Load(proxy.port, None)
            load.start()
            try:
                load.go_on(0.2)
                nodes[0].daemon.process.send_signal(signal.SIGTERM)
                nodes[0].daemon.wait_for_metric('dropkv_requests_total{outcome="draining"}', lambda n: n > 0)
                load.go_on(0.5)
            finally:
                load.stop()
            unfinished.sendall(raw[-100:])
            self.assertEqual(read_reply(unfinished).status, 200)
        self.assertEqual(nodes[0].daemon._finish(), 0)
        self.assertEqual(load.failures, [])

    def test_haproxy_sends_what_was_refused_to_another_node(self):
        self.refusals_go_to_another_node(HAProxy)

    def test_nginx_sends_what_was_refused_to_another_node(self):
        self.refusals_go_to_another_node(Nginx)

    def test_without_retries_requests_are_lost(self):
        """The test above can fail: with what saves requests taken out, some are lost."""
        nodes, proxy = self.world(HAProxy, changes=[(r"^\s*retries 3", "    retries 0"), (r"^\s*retry-on.*", "")])
        load = Load(proxy.port, None)
        load.start()
        load.go_on(0.2)
        nodes[0].kill()
        load.go_on(1)
        load.stop()
        self.assertGreater(len(load.failures), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("dropkvd")
    parser.add_argument("client")
    parser.add_argument("configs")
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("names", nargs="*")
    ARGS = parser.parse_intermixed_args()
    ARGS.dropkvd, ARGS.client = os.path.abspath(ARGS.dropkvd), os.path.abspath(ARGS.client)
    if not any(shutil.which(kind.name) for kind in (HAProxy, Nginx)):
        print("skipped: neither haproxy nor nginx is installed")
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], *ARGS.names], verbosity=2)
