#!/usr/bin/env python3
"""Draws the curves of docs/tuning.md. Needs matplotlib.

usage: docs/draw_tuning.py [FOLDER]     (docs/tuning by default)

Reads window.csv, load.csv, batch.csv and clients.csv of the folder and writes a picture beside each:

    for what in window load batch clients; do build/tests/server/sim_tuning $what > docs/tuning/$what.csv; done
"""
import csv
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402 (the backend is chosen first)

COLOURS = ("#1f6f8b", "#c8553d", "#5b8c5a", "#8a5a9e", "#b0872a")


def read(path):
    with open(path, encoding="ascii") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def finish(figure, axes, path):
    for axis in axes:
        axis.grid(True, color="#e3e3e3", linewidth=0.7)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        axis.tick_params(labelsize=8)
    lines, labels = axes[-1].get_legend_handles_labels()
    figure.legend(lines, labels, fontsize=7.5, frameon=False, loc="lower center", ncols=len(labels))
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_lines(axis, rows, by, x, y, label, keep=lambda row: True):
    """One line per value of `by`, over the places of the values of `x`."""
    places = sorted({row[x] for row in rows})
    for colour, value in zip(COLOURS, sorted({row[by] for row in rows})):
        points = [(places.index(row[x]), row[y]) for row in rows if row[by] == value and keep(row)]
        axis.plot(*zip(*points), color=colour, marker="o", markersize=3.5, linewidth=1.6, label=label(value))
    axis.set_xticks(range(len(places)), ["%g" % place for place in places])


def log_scale(axis, ticks):
    axis.set_yscale("log")
    axis.set_yticks(ticks)
    axis.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def of_full_load(load):
    return "%d%% of full load" % round(100 * load)


def draw_window(rows, path):
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.7))
    for axis, name, title in zip(axes, ("p50_us", "p99_us", "blocks_per_batch"),
                                 ("median latency, µs", "99th percentile, µs", "blocks in a batch")):
        draw_lines(axis, rows, "load", "delay_us", name, of_full_load)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("max_queue_delay_us", fontsize=8.5)
    log_scale(axes[0], [100, 200, 400, 700])
    log_scale(axes[1], [150, 300, 600, 1200])
    log_scale(axes[2], [1, 2, 5, 10, 20, 40])
    finish(figure, axes, path)


def draw_load(rows, path):
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.7))
    rows = [{**row, "p99_ms": row["p99_us"] / 1000, "refused": 100 * row["refused_share"]} for row in rows]
    for axis, name, title in zip(axes, ("p99_ms", "refused", "answers_per_s"),
                                 ("99th percentile of answers, ms", "refused at once, %", "answers a second")):
        draw_lines(axis, rows, "queue", "load", name, lambda queue: "max_queue_requests %d" % queue)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("requests offered, share of full load", fontsize=8.5)
    log_scale(axes[0], [0.25, 0.5, 1, 2, 5, 10])
    axes[2].set_ylim(bottom=0)
    finish(figure, axes, path)


def draw_batch(rows, path):
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.7))
    usual = [row for row in rows if row["load"] < 1]
    most = [row for row in rows if row["load"] > 1]
    axes[0].plot(range(len(most)), [row["answers_per_s"] for row in most], color="#444444", marker="o", markersize=3.5)
    axes[0].set_xticks(range(len(most)), ["%g" % row["batch_items"] for row in most])
    draw_lines(axes[1], usual, "load", "batch_items", "p99_us", of_full_load, lambda row: row["refused_share"] == 0)
    for axis, title in zip(axes, ("answers a second, twice full load offered", "99th percentile where nothing is refused, µs")):
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("max_batch_items", fontsize=8.5)
    axes[0].set_ylim(bottom=0)
    log_scale(axes[1], [100, 200, 500, 1000, 2000])
    finish(figure, axes, path)


def draw_clients(rows, path):
    figure, axes = plt.subplots(1, 2, figsize=(7.6, 3.7))
    rows = [{**row, "p99_ms": row["p99_us"] / 1000, "refused": 100 * row["refused_share"]} for row in rows]
    for axis, name, title in zip(axes, ("p99_ms", "refused"), ("99th percentile of answers, ms", "refused at once, %")):
        draw_lines(axis, rows, "load", "client_queue", name, of_full_load)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xlabel("max_client_requests, of 256 for 16 clients", fontsize=8.5)
    axes[0].set_ylim(bottom=0)
    finish(figure, axes, path)


def main(folder):
    plt.rcParams.update({"font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "tuning"})
    folder = pathlib.Path(folder)
    for name, draw in (("window", draw_window), ("load", draw_load), ("batch", draw_batch), ("clients", draw_clients)):
        draw(read(folder / (name + ".csv")), folder / (name + ".svg"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "tuning")
