# SPDX-License-Identifier: GPL-2.0
"""9P over RDMA in the benchmark: from what the turns of two transports have taken to rows.

A row's figures are the medians of the turns of each transport; its spread is how far apart those of one are, as a
share.
"""

from collections import defaultdict
from statistics import median

import bench_nvme

KEYS = ("load", "size")
HEAD = (*KEYS, "c", "rust", "ratio", "spread")
TITLE = "9P over RDMA, on rxe over one network device: instructions an operation by C's transport and that in Rust"
# The goal.
MOST = 1.00


def rows(runs):
    """The runs' rows, in the order of the first one."""
    figures = defaultdict(lambda: defaultdict(list))
    for run in runs:
        figures[tuple(run[key] for key in KEYS)][run["place"]].append(run["result"]["ns"] / run["result"]["ops"])
    for key, turns in figures.items():
        c, rust = median(turns[0]), median(turns[1])
        yield dict(zip(KEYS, key)) | {
            "device": "rxe0", "clock": "instructions", "unit": "instructions/operation", "c": c, "rust": rust,
            "ratio": rust / c, "spread": bench_nvme.spread(turns), "rounds": len(turns[0])}


def name(row):
    return f"{row['load']}, {row['size']} bytes" if row["size"] else row["load"]


def cells(row):
    """A line of the table."""
    return [row["load"], str(row["size"]), f"{row['c']:,.0f}", f"{row['rust']:,.0f}", f"{row['ratio']:.4f}",
            f"{row['spread']:.4f}"]


def bounded(found):
    """What must hold: (name, ratio, limit, how far the turns of one transport differ, whether it holds)."""
    for row in found:
        yield name(row), row["ratio"], MOST, row["spread"], row["ratio"] <= MOST + row["spread"]
