"""How long others wait for the front while one client's requests have it copy query rows.

One connection sends requests whose query rows, 16 MiB each, lie around the end of a ring, another one
pings all the while. For each daemon, in turns, the pings' times with and without the requests.

usage: bench_rows.py DROPKVD... [SECONDS]     (of each turn; 2)
"""
import os
import statistics
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "server"))
import wire
from socket_daemon import SocketDaemon

Q_HEADS, KV_HEADS, DIM, ROWS, LAYERS, TOKENS, RING = 32, 8, 128, 64, 16, 96, 96
ROW = 4 * DIM


def lend(client, memory):
    region = client.add_memfd(memory.fd, len(memory.map))
    view = wire.view(region, 0, ROW, 0)
    cache = client.ask(wire.CACHE_ADD, wire.cache([view] * (2 * LAYERS), Q_HEADS, KV_HEADS, DIM)).object()[0]
    stash = client.ask(wire.STASH_ADD, wire.stash(region, RING, Q_HEADS * ROW, ROW, n_layers=LAYERS)).object()[0]
    params = wire.integer(wire.WINDOW, ROWS) + wire.integer(wire.KEEP_TOKENS, TOKENS)  # all: nothing to compute
    return wire.score(cache, stash, TOKENS, newest=10, rows=ROWS, layers=(0, LAYERS), params=params)


def ask_for_ever(client, message, stop):
    while not stop.is_set():
        assert client.ask(wire.SCORE, message).kind == wire.RESULT


def pings(client, seconds):
    """Times in us, ascending."""
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        client.ask(wire.PING, bytes(8))
        times.append((time.monotonic() - began) * 1e6)
        time.sleep(0.0002)
    return sorted(times)


def measure(program, seconds):
    with SocketDaemon(program) as daemon, wire.Client(daemon.path) as asker, wire.Client(daemon.path) as other, \
            wire.Memory(RING * Q_HEADS * ROW) as memory:
        quiet, stop = pings(other, seconds / 2), threading.Event()
        thread = threading.Thread(target=ask_for_ever, args=(asker, lend(asker, memory), stop))
        thread.start()
        busy = pings(other, seconds)
        stop.set()
        thread.join()
    return quiet, busy


def main():
    seconds = float(sys.argv.pop()) if sys.argv[-1].replace(".", "").isdigit() else 2
    found = {program: [] for program in sys.argv[1:]}
    for _ in range(5):
        for program, rounds in found.items():
            rounds.append(measure(program, seconds))
    for program, rounds in found.items():
        print(program)
        for i, name in ((0, "alone"), (1, "beside")):
            for share in (0.5, 0.9, 0.99):
                values = [r[i][int(share * len(r[i]))] for r in rounds]
                print("  %-6s p%g: %6.0f us, rounds %s" % (name, 100 * share, statistics.median(values), " ".join("%.0f" % v for v in values)))


if __name__ == "__main__":
    main()
