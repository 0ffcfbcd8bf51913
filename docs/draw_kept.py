#!/usr/bin/env python3
"""Draws which tokens of a dump are kept: one strip per layer and KV head.

Reads the JSON of `dropkv-client score --format json` and writes an SVG. Needs matplotlib.

usage: dropkv-client score --format json DUMP | docs/draw_kept.py docs/kept.svg
"""
import json
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402 (the backend is chosen first)


def runs(kept):
    """Ascending indices as (start, length) stretches of neighbours."""
    stretches = []
    for token in kept:
        if stretches and sum(stretches[-1]) == token:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + 1)
        else:
            stretches.append((token, 1))
    return stretches


def main():
    report = json.load(sys.stdin)
    strips, labels = [], []
    for block in report["blocks"]:
        for batch in block["keep_indices"]:
            for head, kept in enumerate(batch):
                strips.append(kept)
                labels.append(f"{block['name']}, KV head {head}")
    tokens = report["blocks"][0]["tokens"]
    kept = report["blocks"][0]["keep_tokens"]

    plt.rcParams.update({"font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "kept"})
    figure, axis = plt.subplots(figsize=(10, 0.28 * len(strips) + 1.1))
    for i, strip in enumerate(strips):
        axis.broken_barh(runs(strip), (i - 0.4, 0.8), color="#1f6f8b" if i // 2 % 2 == 0 else "#c8553d")
    axis.set_yticks(range(len(strips)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(-2, tokens + 1)
    axis.set_xlabel(f"token (coloured: the {kept} kept of {tokens:,})", fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    figure.tight_layout()
    figure.savefig(sys.argv[1], metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
