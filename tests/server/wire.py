"""The local socket's protocol, written from proto/PROTOCOL.md and nothing else. Standard library
only, like daemon.py."""
import array
import ctypes
import fcntl
import mmap
import os
import socket
import struct

HELLO, REGION_ADD, REGION_DROP, REGION_DETACH, REGION_ATTACH = 1, 2, 3, 4, 5
CACHE_ADD, CACHE_DROP, STASH_ADD, STASH_DROP, SCORE, SCORE_BLOCKS, CANCEL, PING = 6, 7, 8, 9, 10, 11, 12, 13
WELCOME, DONE, RESULT, ERROR, PONG = 64, 65, 66, 67, 68
MAGIC = 0x31564B44

OK, MALFORMED, INVALID, UNSUPPORTED, NOT_FOUND, DENIED, TOO_LARGE = 0, 1, 2, 3, 4, 5, 6
BUSY, TIMEOUT, DRAINING, CANCELLED, UNAVAILABLE = 16, 17, 18, 19, 20

BF16, FP16, FP32 = 1, 2, 3
POLICY, KEEP_TOKENS, WINDOW, KEEP_RATIO, STREAM, TIMEOUT_PARAM, TRACEPARENT = 1, 13, 2, 11, 21, 23, 42

F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 1033, 1, 2, 4, 16


def integer(number, value):
    return struct.pack("<BBHIq", number, 0, 8, 0, value)


def real(number, value):
    return struct.pack("<BBHId", number, 1, 8, 0, value)


def text(number, value):
    data = value.encode()
    return struct.pack("<BBHI", number, 3, len(data), 0) + data + bytes(-len(data) % 8)


def header(kind, number, payload, bulk_bytes=0, n_fds=0, version=1):
    return struct.pack("<BBHIQQ", version, kind, n_fds, len(payload), number, bulk_bytes) + payload


def view(region, offset, token_stride, head_stride, page_stride=0, dtype=FP32, scale=0.0, floats=0):
    return struct.pack("<IB3xfIQqqq", region, dtype, scale, floats, offset, page_stride, token_stride, head_stride)


def region(n_bytes, offset=0, writable=0, kind=1, number=0, generation=0, uuid=bytes(16), handle=bytes(64), chunks=()):
    return struct.pack("<IIBBH4xQQ16s64s", number, generation, kind, writable, len(chunks), offset, n_bytes, uuid,
                       handle) + b"".join(struct.pack("<QQ", *chunk) for chunk in chunks)


def fence_and_output(fence=(0, 0, 0), output=(0, 0, 0)):
    return struct.pack("<I4xQQI4xQQ", *fence, *output)


def block(views, q_heads=2, kv_heads=1, dim=8, rows=8, tokens=64, page_tokens=0, table=(0, 0, 0, 0, 0), valid_from=0,
          sink_floats=0, extras=(0, 0, 0, 0)):
    """`table`: region, entries, kind, entry_bytes, offset. `extras`: token_weight, carry_in, external_scores,
    value_metric."""
    return struct.pack("<9II", q_heads, kv_heads, dim, 0, rows, tokens, valid_from, page_tokens, table[0],
                       table[1]) + struct.pack("<BBBxIQQq", table[2], table[3], 0, sink_floats, table[4], 0, 0) + b"".join(
                           views) + struct.pack("<4I", *extras)


def score_blocks(blocks, params=b"", flags=0, fence=(0, 0, 0), output=(0, 0, 0)):
    return struct.pack("<IHBx", len(blocks), len(params), flags) + fence_and_output(fence, output) + params + b"".join(blocks)


def score(cache, stash, tokens, slot=0, newest=7, rows=8, layers=(0, 1), table=(0, 0, 0, 0, 0), params=b"", flags=0,
          extras=0, fence=(0, 0, 0), output=(0, 0, 0)):
    return struct.pack("<IIIIIHHIIIIBBBBH2xQQq", cache, stash, slot, newest, rows, *layers, tokens, 0, table[0], table[1],
                       table[2], table[3], flags, extras, len(params), table[4], 0, 0) + fence_and_output(fence, output) + params


def cache(views, q_heads=2, kv_heads=1, dim=8, page_tokens=0):
    return struct.pack("<IIIIIHBBdd", q_heads, kv_heads, dim, 0, page_tokens, len(views) // 2, 0, 0, 0.0, 0.0) + b"".join(views)


def stash(region_number, n_rows, row_stride, head_stride, offset=0, n_slots=1, n_layers=1, slot_stride=0, layer_stride=0,
          dtype=FP32):
    return struct.pack("<IIIHBxf4xQqqqq", region_number, n_slots, n_rows, n_layers, dtype, 0.0, offset, layer_stride,
                       slot_stride, row_stride, head_stride)


def new_memfd(data, sealed=True):
    """A memfd that holds `data`."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if sealed:
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
    return fd


def punch(fd, offset, n_bytes):
    """Takes pages away from a file of whatever seals."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 3, ctypes.c_long(offset), ctypes.c_long(n_bytes)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def about(welcome):
    """The texts of a welcome: version, platform, backend, device, prefix of names."""
    n_devices, = struct.unpack_from("<H", welcome.payload, 6)
    return welcome.payload[48 + 24 * n_devices :].decode("ascii").split("\0")[:-1]


class Answer:
    def __init__(self, kind, number, payload, bulk):
        self.kind, self.number, self.payload, self.bulk = kind, number, payload, bulk

    def object(self):
        assert self.kind == DONE, self.error()
        return struct.unpack("<II", self.payload)

    def error(self):
        assert self.kind == ERROR, "type %d" % self.kind
        status, _, _, length = struct.unpack_from("<IIIH", self.payload)
        return status, self.payload[16 : 16 + length].decode("ascii")

    def keep(self, numbers=None):
        """Per block the kept indices of all KV heads; `numbers`: the output region's bytes."""
        assert self.kind == RESULT, self.error()
        n_blocks, _, in_region = struct.unpack_from("<IBB", self.payload)
        assert bool(in_region) == (numbers is not None)
        numbers = self.bulk if numbers is None else numbers
        kept = []
        for i in range(n_blocks):
            heads, k, _, _, at, _ = struct.unpack_from("<IIIIQQ", self.payload, 24 + 32 * i)
            kept.append(list(struct.unpack_from("<%di" % (heads * k), numbers, at)))
        return kept


class Client:
    def __init__(self, path, hello=True):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(120)
        self.socket.connect(path)
        self.buffer = b""
        self.number = 0
        if hello:
            self.send(HELLO, struct.pack("<IHHII", MAGIC, 1, 1, 0x3F, 0))
            self.welcome = self.receive()
            assert self.welcome.kind == WELCOME, self.welcome.error()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.socket.close()

    def send(self, kind, payload, bulk=b"", fds=(), claimed_fds=None, number=None):
        """Sends one message; its id."""
        if number is None:
            self.number += 1
            number = self.number
        n_fds = len(fds) if claimed_fds is None else claimed_fds
        self.send_raw(header(kind, number, payload, len(bulk), n_fds), fds)
        if bulk:
            self.socket.sendall(bulk)
        return number

    def send_raw(self, data, fds=()):
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.socket.sendmsg([data], control)
        if sent < len(data):
            self.socket.sendall(data[sent:])

    def _take(self, n):
        while len(self.buffer) < n:
            piece = self.socket.recv(1 << 20)
            if not piece:
                raise ConnectionError("closed")
            self.buffer += piece
        taken, self.buffer = self.buffer[:n], self.buffer[n:]
        return taken

    def receive(self):
        _, kind, _, n_payload, number, n_bulk = struct.unpack("<BBHIQQ", self._take(24))
        return Answer(kind, number, self._take(n_payload), self._take(n_bulk))

    def ask(self, kind, payload, bulk=b"", fds=()):
        """Sends and receives its answer, the next one."""
        number = self.send(kind, payload, bulk, fds)
        answer = self.receive()
        assert answer.number == number, (answer.number, number)
        return answer

    def add_memfd(self, fd, n_bytes, **options):
        return self.ask(REGION_ADD, region(n_bytes, **options), fds=[fd]).object()[0]

    def is_closed(self):
        """Reads to the end; True if the daemon closes."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True


class Memory:
    """A sealed memfd of `n_bytes`, mapped."""

    def __init__(self, n_bytes, sealed=True):
        self.fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.fd, 0, n_bytes)
        if sealed:
            fcntl.fcntl(self.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        self.map = mmap.mmap(self.fd, n_bytes)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.map.close()
        os.close(self.fd)
