"""Clients of the local socket that do anything in any order, while workers die: the daemon lives, each message
has its one answer, nobody's answer is wrong, and nothing stays.

usage: test_storm.py DROPKVD [unittest arguments]

DKV_STORM_SECONDS (6) and DKV_STORM_SEED (random, and printed) change it; the seed fixes what each client
does, not how their threads meet.
"""
import fcntl
import os
import random
import signal
import socket
import struct
import threading
import time
import unittest

import wire
from socket_case import PARAMS, QUERY_BYTES, SocketDaemon, http_answer, inline_block, tensors
from wire import Client

SECONDS = float(os.environ.get("DKV_STORM_SECONDS", "6"))
SEED = int(os.environ.get("DKV_STORM_SEED", str(random.randrange(1 << 30))))
N_ACTORS = 6
ROW, KEY_BYTES = 32, 96 * 32


class Session:
    """One connection: sends what a generator says, and notes what is answered."""

    def __init__(self, path, source):
        self.source = source
        self.client = Client(path)
        self.asked, self.answers = {}, {}  # id: type of message; id: how often
        self.objects = {wire.REGION_ADD: [], wire.CACHE_ADD: [], wire.STASH_ADD: []}
        self.files = []
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        try:
            while True:
                answer = self.client.receive()
                with self.changed:
                    self.answers[answer.number] = self.answers.get(answer.number, 0) + 1
                    made = self.objects.get(self.asked.get(answer.number))
                    if answer.kind == wire.DONE and made is not None:
                        made.append(answer.object()[0])
                    self.changed.notify_all()
        except (OSError, ConnectionError):
            with self.changed:
                self.changed.notify_all()

    def send(self, kind, payload, bulk=b"", fds=()):
        with self.changed:  # its answer must not come before it is known
            self.asked[self.client.send(kind, payload, bulk, fds)] = kind

    def any_of(self, kind):
        with self.changed:
            return self.source.choice(self.objects[kind] or [self.source.randrange(1, 9)])

    def region(self):
        return self.any_of(wire.REGION_ADD)

    # ---- what it may do ----

    def add_region(self):
        n_bytes = self.source.choice([4096, 16384, 1 << 20])
        fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.files.append(fd)
        os.ftruncate(fd, n_bytes)
        if self.source.random() < 0.7:
            os.posix_fallocate(fd, 0, n_bytes)  # else it has holes
        if self.source.random() < 0.7:
            fcntl.fcntl(fd, wire.F_ADD_SEALS, wire.F_SEAL_SHRINK | wire.F_SEAL_GROW)
        self.send(wire.REGION_ADD, wire.region(n_bytes, writable=self.source.randrange(2)), fds=[fd])

    def attach_region(self):
        fds = self.files[-1:] or [0]
        number, generation = self.region(), self.source.randrange(1, 4)
        self.send(wire.REGION_ATTACH, wire.region(4096, number=number, generation=generation), fds=fds)

    def release_region(self):
        self.send(self.source.choice([wire.REGION_DROP, wire.REGION_DETACH]), struct.pack("<II", self.region(), 0))

    def add_cache_and_stash(self):
        region, n_layers = self.region(), self.source.choice([1, 2, 8])
        side = [wire.view(region, QUERY_BYTES, ROW, KEY_BYTES), wire.view(region, QUERY_BYTES + KEY_BYTES, ROW, KEY_BYTES)]
        self.send(wire.CACHE_ADD, wire.cache(side * n_layers))
        self.send(wire.STASH_ADD, wire.stash(region, self.source.choice([8, 11]), ROW, 8 * ROW, n_layers=n_layers))

    def drop_cache_or_stash(self):
        add, drop = self.source.choice([(wire.CACHE_ADD, wire.CACHE_DROP), (wire.STASH_ADD, wire.STASH_DROP)])
        self.send(drop, struct.pack("<II", self.any_of(add), 0))

    def options(self):
        """Parameters, flags, and at times a fence and an output."""
        source = self.source
        params = PARAMS + (wire.integer(wire.TIMEOUT_PARAM, source.choice([1000, 20000, 200000])) if source.random() < 0.5 else b"")
        fence = (self.region(), 8 * source.randrange(4), source.randrange(3)) if source.random() < 0.3 else (0, 0, 0)
        output = (self.region(), source.choice([0, 64, 8192]), source.choice([4, 96, 4096])) if source.random() < 0.3 else (0, 0, 0)
        return dict(params=params, flags=source.randrange(2), fence=fence, output=output)

    def score_blocks(self):
        blocks = [inline_block(0, self.region())] * self.source.choice([1, 1, 3, 20])
        self.send(wire.SCORE_BLOCKS, wire.score_blocks(blocks, **self.options()))

    def score_inline(self):
        self.send(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS), tensors())

    def score_prompt(self):
        cache, stash = self.any_of(wire.CACHE_ADD), self.any_of(wire.STASH_ADD)
        layers = (0, self.source.choice([1, 2]))
        self.send(wire.SCORE, wire.score(cache, stash, 96, newest=self.source.randrange(11), layers=layers, **self.options()))

    def cancel(self):
        self.client.send(wire.CANCEL, struct.pack("<Q", self.source.randrange(1, self.client.number + 1)))

    def change_memory(self):
        if self.files and self.source.random() < 0.3:
            try:
                os.ftruncate(self.source.choice(self.files), self.source.choice([0, 4096]))
            except PermissionError:
                pass  # sealed
        elif self.files:
            os.pwrite(self.source.choice(self.files), struct.pack("<Q", self.source.randrange(3)), 0)

    DEEDS = [add_region] * 3 + [add_cache_and_stash] * 2 + [score_blocks] * 6 + [score_prompt] * 5 + [
        score_inline, cancel, cancel, release_region, release_region, attach_region, drop_cache_or_stash, change_memory]

    # ---- from its beginning to its end ----

    def live(self):
        """What went wrong, or None."""
        try:
            for _ in range(self.source.randrange(1, 120)):
                self.source.choice(self.DEEDS)(self)
            if self.source.random() < 0.3:
                return None  # goes without waiting
            return self.missing()
        finally:
            try:
                self.client.socket.shutdown(socket.SHUT_RDWR)  # which the reader hears
            except OSError:
                pass  # the daemon was first
            self.reader.join()
            self.client.socket.close()
            for fd in self.files:
                os.close(fd)

    def missing(self):
        with self.changed:
            self.changed.wait_for(lambda: len(self.answers) == len(self.asked) or not self.reader.is_alive(), 30)
            if set(self.answers) != set(self.asked):
                return "%d messages, %d with an answer" % (len(self.asked), len(self.answers))
            twice = [number for number, n in self.answers.items() if n != 1]
            return "%d messages were answered more than once" % len(twice) if twice else None


class Storm(unittest.TestCase):
    def act(self, path, seed):
        source = random.Random(seed)
        while time.monotonic() < self.end:
            wrong = Session(path, source).live()
            with self.lock:
                self.n_sessions += 1
                if wrong is not None:
                    self.wrong.append(wrong)

    def be_steady(self, path, expected):
        """Asks the same all the time: what is answered is right."""
        with Client(path) as client:
            while time.monotonic() < self.end:
                answer = client.ask(wire.SCORE_BLOCKS, wire.score_blocks([inline_block()], PARAMS), tensors())
                with self.lock:
                    self.n_steady += answer.kind == wire.RESULT
                    if answer.kind == wire.RESULT and answer.keep() != [expected]:
                        self.wrong.append("another answer: %s" % answer.keep())

    def test_nothing_breaks_and_nothing_stays(self):
        source = random.Random(SEED)
        self.lock, self.wrong, self.n_sessions, self.n_steady = threading.Lock(), [], 0, 0
        self.end = time.monotonic() + SECONDS
        with SocketDaemon("--request-timeout-ms", "2000") as daemon:
            expected = http_answer(daemon)
            threads = [threading.Thread(target=self.act, args=(daemon.path, SEED + i)) for i in range(N_ACTORS)]
            threads.append(threading.Thread(target=self.be_steady, args=(daemon.path, expected)))
            for thread in threads:
                thread.start()
            n_kills = 0
            while time.monotonic() < self.end:
                threads[0].join(source.random() * 0.8)  # a moment
                for pid in daemon.processes()[1:]:
                    os.kill(pid, signal.SIGKILL)
                    n_kills += 1
            for thread in threads:
                thread.join()
            print("  seed %d: %d sessions, %d steady answers, %d workers killed" % (SEED, self.n_sessions, self.n_steady, n_kills))
            self.assertIsNone(daemon.process.poll(), "\n".join(daemon.log[-40:]))
            self.assertEqual(self.wrong, [])
            self.assertGreater(self.n_sessions, 0)
            for kind in ("sealed", "loose"):
                daemon.wait_for_metric('dropkv_regions{kind="%s"}' % kind, lambda n: n == 0)
            daemon.wait_for_metric("dropkv_ready", lambda ready: ready == 1)
            self.assertEqual(http_answer(daemon), expected)
            self.assertEqual(daemon.n_maps(), 0)


if __name__ == "__main__":
    unittest.main()
