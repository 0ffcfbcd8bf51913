"""What the local socket costs: a one-block request from caller to answer, beside the engine alone.

usage: bench_socket.py DROPKVD DROPKV_CLIENT [ROUNDS [SECONDS [THREADS]]]

Both read the same kind of memory with the same engine and number of threads. They take turns, so
that whatever else the machine does meets both; the figure is the median over the rounds of the
differences between two medians that were measured one after the other. THREADS limits both engines:
with 1 no time is spent on waking the engine's own threads, which a busy machine makes long.
"""
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile

TARGET_US = 60
SHAPES = ((64, 1, 1, 64), (256, 8, 2, 128), (1024, 8, 2, 128))


def median_us(client, endpoint, memory, shape, seconds):
    tokens, q_heads, kv_heads, dim = map(str, shape)
    output = subprocess.run(
        [client, "bench", "-e", endpoint, "--memory", memory, "--tokens", tokens, "--q-heads", q_heads, "--kv-heads", kv_heads,
         "--head-dim", dim, "--duration", str(seconds), "--warmup", "0.1", "--format", "json"],
        stdout=subprocess.PIPE, check=True).stdout
    answer = json.loads(output)
    assert answer["errors"] == 0, answer
    return answer["latency_us"]["p50"]


def main():
    dropkvd, client = sys.argv[1:3]
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 9
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 0.5
    threads = sys.argv[5] if len(sys.argv) > 5 else str(os.cpu_count())
    with tempfile.TemporaryDirectory() as folder:
        path = folder + "/run/dropkvd.sock"
        daemon = subprocess.Popen([dropkvd, "--http", "off", "--socket", path, "--threads", threads], stderr=subprocess.PIPE, text=True)
        try:
            while "listening at" not in (line := daemon.stderr.readline()):
                assert line, "the daemon did not start"
            print("%d CPUs, load %.1f, engines of %s threads; %d rounds of %.1f s" % (
                os.cpu_count(), os.getloadavg()[0], threads, rounds, seconds))
            print("tokens heads dim   engine us   socket, memfd   overhead (least..most)   inline overhead")
            for shape in SHAPES:
                engine, memfd, inline = [], [], []
                for _ in range(rounds):
                    engine.append(median_us(client, "embedded:cpu?threads=" + threads, "memfd", shape, seconds))
                    memfd.append(median_us(client, "unix://" + path, "memfd", shape, seconds))
                    inline.append(median_us(client, "unix://" + path, "inline", shape, seconds))
                over = sorted(s - e for s, e in zip(memfd, engine))
                print("%6d %2d/%-2d %3d %11.1f %15.1f %10.1f (%.1f..%.1f) %17.1f   %s" % (
                    shape[0], shape[1], shape[2], shape[3], statistics.median(engine), statistics.median(memfd),
                    statistics.median(over), over[0], over[-1],
                    statistics.median(s - e for s, e in zip(inline, engine)),
                    "within %d us" % TARGET_US if statistics.median(over) <= TARGET_US else "ABOVE %d us" % TARGET_US))
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait()
            daemon.stderr.close()


main()
