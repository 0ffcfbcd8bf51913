#!/usr/bin/env python3
"""Times the DropKV authors' PyTorch path beside our CPU engine, in one run on the same threads.

The authors' code is not part of this tree: point --authors at a checkout of their repository (the
folder that holds dropkv_cache.py). Needs torch (a CPU wheel with MKL is the strong peer) and the
built dropkv-client. Rounds alternate between the two, so that a noisy machine hits both.

usage: peer_torch.py --authors DIR [--client build/client/dropkv-client] [--tokens 32768] ...
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--authors", required=True, help="folder that holds the authors' dropkv_cache.py")
    parser.add_argument("--client", default="build/client/dropkv-client")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def peer(args):
    """Returns a function that runs the authors' path once and gives its seconds."""
    sys.path.insert(0, args.authors)
    import torch
    from dropkv_cache import DropKVCache

    torch.set_num_threads(args.threads)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    torch.manual_seed(1)
    query = torch.randn(1, args.q_heads, args.window, args.head_dim, dtype=dtype)
    key = torch.randn(1, args.kv_heads, args.tokens, args.head_dim, dtype=dtype)
    value = torch.randn(1, args.kv_heads, args.tokens, args.head_dim, dtype=dtype)
    cache = DropKVCache(keep_ratio=0.1, window_size=args.window, use_triton=False)

    def once():
        start = time.perf_counter()
        with torch.no_grad():
            cache._compute_keep_indices(query, key, value)
        return time.perf_counter() - start

    print(f"peer: torch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"MKL {'yes' if torch.backends.mkl.is_available() else 'no'}")
    return once


def ours(args):
    """One bench run of the embedded engine: its report."""
    command = [args.client, "bench", "--endpoint", "embedded:", "--format", "json", "--duration", "2",
               "--q-heads", str(args.q_heads), "--kv-heads", str(args.kv_heads),
               "--head-dim", str(args.head_dim), "--tokens", str(args.tokens),
               "--window", str(args.window), "--dtype", args.dtype]
    environment = dict(os.environ, DROPKVD_THREADS=str(args.threads))
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)


def main():
    args = arguments()
    once = peer(args)
    once()
    peer_seconds, our_seconds, backend = [], [], ""
    for _ in range(args.rounds):
        peer_seconds.append(once())
        report = ours(args)
        our_seconds.append(report["latency_us"]["p50"] / 1e6)
        backend = report["backend"]
    theirs, mine = statistics.median(peer_seconds), statistics.median(our_seconds)
    print(f"authors' PyTorch path  {theirs * 1e3:9.2f} ms  (median of {args.rounds})")
    print(f"{backend:<22} {mine * 1e3:9.2f} ms")
    print(f"ratio                  {theirs / mine:9.2f}")


if __name__ == "__main__":
    main()
