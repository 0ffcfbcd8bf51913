"""A real daemon for tests, and raw HTTP to talk to it. Standard library only.

Nothing here sleeps: the daemon is ready when its log says so, replies are read until they end, and a
state is waited for by asking the daemon again (each question is a round trip of its own).
"""
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import threading
import time

PATIENCE_S = 120


def is_sanitized(program):
    """True for a build with AddressSanitizer, which keeps freed memory for a while."""
    with open(program, "rb") as file:
        return b"__asan_init" in file.read()


class Daemon:
    """dropkvd on a free port; use as a context manager. `log` holds its lines so far."""

    def __init__(self, program, *options):
        self.process = subprocess.Popen(
            [*self.launcher, program, "--http", "127.0.0.1:0", "--socket", "off", *options], stderr=subprocess.PIPE,
            text=True, bufsize=1, **self.popen_options
        )
        self.log = []
        self._lines = threading.Condition()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        try:
            self.port = int(self.wait_for_log(r"listening on .*, port (\d+)").group(1))
        except AssertionError:
            self.process.kill()
            self._finish()
            raise

    def _read_log(self):
        for line in self.process.stderr:
            with self._lines:
                self.log.append(line.rstrip("\n"))
                self._lines.notify_all()
        with self._lines:
            self.log.append("(end of log)")
            self._lines.notify_all()

    def wait_for_log(self, pattern):
        """The first line that matches, as a match object."""
        deadline = time.monotonic() + PATIENCE_S
        at = 0
        with self._lines:
            while True:
                for line in self.log[at:]:
                    found = re.search(pattern, line)
                    if found:
                        return found
                    if line == "(end of log)":
                        raise AssertionError("the daemon ended: " + "\n".join(self.log))
                at = len(self.log)
                if not self._lines.wait(deadline - time.monotonic()):
                    raise AssertionError("no line like %s: %s" % (pattern, "\n".join(self.log)))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self._finish()
        if exc[0] is None and code not in self.allowed_codes:
            raise AssertionError("exit status %s: %s" % (code, "\n".join(self.log)))

    def _finish(self):
        code = self.wait()
        self._reader.join()
        self.process.stderr.close()
        return code

    allowed_codes = (0,)
    launcher = ()  # a command that runs the daemon as its last act
    popen_options = {}

    def wait(self):
        return self.process.wait(PATIENCE_S)

    def connect(self, receive_bytes=None):
        connection = socket.socket()
        if receive_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.settimeout(PATIENCE_S)
        try:
            connection.connect(("127.0.0.1", self.port))
        except OSError:
            connection.close()
            raise
        return connection

    def ask(self, raw):
        """Sends `raw` on a new connection; the first reply."""
        with self.connect() as connection:
            connection.sendall(raw)
            return read_reply(connection)

    def get(self, path, *fields):
        return self.ask(request("GET", path, fields))

    def metrics(self):
        """{name with labels: value}"""
        text = self.get("/metrics").body.decode()
        return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}

    def wait_for_metric(self, name, test):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            value = self.metrics()[name]
            if test(value):
                return value
            if time.monotonic() > deadline:
                raise AssertionError("%s stays at %s" % (name, value))

    def rss_kib(self, key="VmRSS"):
        with open("/proc/%d/status" % self.process.pid, encoding="ascii") as file:
            return int(re.search(key + r":\s+(\d+)", file.read()).group(1))

    def n_fds(self):
        return len(os.listdir("/proc/%d/fd" % self.process.pid))


class Reply:
    def __init__(self, status, fields, body):
        self.status, self.fields, self.body = status, fields, body

    def json(self):
        return json.loads(self.body)

    def error(self):
        return self.json()["error"]


def request(method, path, fields=(), body=b"", version="HTTP/1.1"):
    lines = ["%s %s %s" % (method, path, version), "Host: localhost"]
    if method == "POST" and not any(f.lower().startswith(("content-length", "transfer-enc")) for f in fields):
        lines.append("Content-Length: %d" % len(body))
    return "\r\n".join([*lines, *fields, "", ""]).encode("latin-1") + body


def _parse_head(head):
    lines = head.decode("latin-1").split("\r\n")
    fields = {}
    for line in lines[1:]:
        name, value = line.split(":", 1)
        fields[name.lower()] = value.strip()
    return int(lines[0].split(" ")[1]), fields


def read_reply(connection):
    """One reply; bytes behind it are an error."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            raise ConnectionError("closed before a reply: %r" % data)
        data += piece
    head, body = data.split(b"\r\n\r\n", 1)
    status, fields = _parse_head(head)
    if status == 100:
        return Reply(status, fields, b"")
    body = bytearray(body)
    while len(body) < int(fields["content-length"]):
        piece = connection.recv(1 << 20)
        if not piece:
            raise ConnectionError("closed within a reply")
        body += piece
    assert len(body) == int(fields["content-length"]), "bytes behind the reply: %r" % bytes(body[-200:])
    return Reply(status, fields, bytes(body))


def read_to_end(connection):
    """Everything until the daemon closes."""
    data = b""
    try:
        while True:
            piece = connection.recv(65536)
            if not piece:
                return data
            data += piece
    except ConnectionResetError:
        return data


def is_closed(connection, within_s):
    """True if the daemon closes within that time."""
    deadline = time.monotonic() + within_s
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([connection], [], [], left)[0]:
            return False
        try:
            if not connection.recv(65536):
                return True
        except ConnectionResetError:
            return True


def infer_body(tokens=64, q_heads=2, kv_heads=1, dim=8, rows=8, parameters=None, binary_output=True, seed=1,
               output_names=("keep_indices",)):
    """(json, binary) of a request with made-up FP32 tensors."""
    def tensor(name, shape):
        count = 1
        for extent in shape:
            count *= extent
        nonlocal seed
        values = []
        for _ in range(min(count, 4096)):
            seed = (seed * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            values.append(((seed >> 40) / (1 << 24)) - 0.5)
        block = struct.pack("<%df" % len(values), *values)
        data = (block * (count * 4 // len(block) + 1))[: count * 4]
        return {"name": name, "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": count * 4}}, data

    parts = [
        tensor("query", [1, q_heads, rows, dim]),
        tensor("key", [1, kv_heads, tokens, dim]),
        tensor("value", [1, kv_heads, tokens, dim]),
    ]
    head = {
        "parameters": parameters or {"keep_ratio": 0.25},
        "inputs": [part[0] for part in parts],
        "outputs": [{"name": name, "parameters": {"binary_data": binary_output}} for name in output_names],
    }
    return json.dumps(head).encode(), b"".join(part[1] for part in parts)


INFER = "/v2/models/dropkv/infer"


def infer_request(fields=(), **shape):
    head, data = infer_body(**shape)
    return request("POST", INFER, ["Inference-Header-Content-Length: %d" % len(head), *fields], head + data)


def keep_indices(reply):
    """The kept indices of a 200 reply, whichever way they came."""
    length = reply.fields.get("inference-header-content-length")
    head = json.loads(reply.body[: int(length)] if length else reply.body)
    output = next(o for o in head["outputs"] if o["name"] == "keep_indices")
    if "data" in output:
        return list(output["data"])
    data = reply.body[int(length) :][: output["parameters"]["binary_data_size"]]
    return list(struct.unpack("<%di" % (len(data) // 4), data))
