# SPDX-License-Identifier: GPL-2.0
"""The benchmark's plots, of its runs and of the rows that they amount to."""

from bench_plot import Axis, Line, bars, plot
from bench_rows import PARTS, device, share

TWINS = {"rust": "Rust", "c": "C"}
COSTS = {"instructions": "instructions", "native": "nanoseconds"}
FILES = {"instructions": ("bench-counted.svg", "bench-qps.svg", "bench-arrays.svg"),
         "native": ("bench-native.svg", "bench-qps-native.svg", "bench-arrays-native.svg")}
DEVICES = {"rxe0": "rxe over one network device", "rxe1-rxe2": "rxe between two network namespaces"}


def pick(rows, x, **keys):
    """The rows with these values, in the order of the key x."""
    return sorted((r for r in rows if all(r.get(k) == v for k, v in keys.items())), key=lambda r: r[x])


def pairs(names, points):
    """Two lines for each name, Rust's and C's dashed, without those that have no points."""
    lines = [Line(f"{name}, {TWINS[twin]}", points(name, twin), color, twin == "c")
             for color, name in enumerate(names) for twin in TWINS]
    return [line for line in lines if line.points]


def latency(path, runs, dev):
    def points(load, twin):
        samples = sorted(s for r in runs if device(r) == dev and "samples" in r and
                         (r["clock"], r["context"], r["load"], r["twin"]) == ("wall", "softirq", load, twin)
                         for s in r["samples"])
        return [(samples[len(samples) * p // 100] / 1000, p, p, p) for p in range(1, 100)] if samples else []

    lines = pairs(("read_lat", "send_lat", "write_lat"), points)
    plot(path, f"Latency of 64 bytes on {DEVICES[dev]}, softirq", Axis("latency, µs (logarithmic)", 10),
         Axis("operations that took at most so long, %"), lines, dots=False)


def point(row, twin, x, value=lambda v: v):
    low, high = sorted(map(value, row["middle"][twin]))
    return row[x], value(row[twin]), low, high


def depth(path, rows, dev):
    def points(name, twin):
        picked = pick(rows, "depth", load="send_rate", clock="wall", device=dev, size=sizes[name], qps=1, signal=1)
        return [point(r, twin, "depth", lambda ns: 1e6 / ns) for r in picked]

    sizes = {f"{size:,} bytes": size for size in (64, 4096, 65536)}
    plot(path, f"Rate of SENDs against their depth on {DEVICES[dev]}, softirq", Axis("SENDs in flight", 2),
         Axis("thousand SENDs a second"), pairs(sizes, points))


def qps(path, rows, clock):
    def points(context, twin):
        picked = pick(rows, "qps", load="void_rate", clock=clock, context=context, signal=1, cpus=1)
        return [point(r, twin, "qps") for r in picked if r["qps"] * r["depth"] == 1024]

    plot(path, "Cost against the number of QPs on one CQ, 1,024 requests in flight", Axis("QPs", 2),
         Axis(f"{COSTS[clock]} a request: post and completion"),
         pairs(("direct", "static", "softirq", "workqueue"), points))


def arrays(path, rows, clock):
    """So, of requests that are in arrays: one of each QP, or one of all. 1,024 are in flight, or one on each QP."""
    def points(name, twin):
        load, context = names[name]
        picked = pick(rows, "qps", load=load, clock=clock, context=context, cpus=1)
        return [point(r, twin, "qps") for r in picked if r["qps"] * r["depth"] >= 1024]

    names = {f"{load.removesuffix('_rate')}, {context}": (load, context)
             for load in ("queue_rate", "pool_rate") for context in ("direct", "softirq")}
    plot(path, "Cost against the number of QPs, requests in an array of each QP (queue) or of all (pool)",
         Axis("QPs", 2), Axis(f"{COSTS[clock]} a request: post and completion"), pairs(names, points))


def costs(path, runs, rows, clock):
    """What the null device's rows cost, with where the middle half of the rounds lies, beside the share
    of the device itself: where that is measured apart from all else, so that it is within its bar."""
    parts = share(runs, clock)
    bar = lambda row, twin: (row[twin], *row["middle"][twin])
    groups = []
    for load in parts:
        picked = pick(rows, "context", load=load, clock=clock, device="null0", depth=64, signal=1, qps=1,
                      cpus=1)
        for row in picked:
            if load != "void_rate" or row["context"] not in ("direct", "batch", "static"):
                name = "both" if load == "void_rate" else load
                part = parts[load] if load in PARTS[clock] else None
                groups.append((f"{name}, {row['context'].replace('_', ' ')}", bar(row, "rust"), bar(row, "c"), part))
    unit = COSTS[clock]
    bars(path, f"{unit.capitalize()} of a post and of a completion on the null device", unit,
         ("Rust", "C", "the device's share"), groups)


def draw(folder, runs, rows):
    for dev in DEVICES:
        latency(folder / f"bench-latency-{dev}.svg", runs, dev)
        depth(folder / f"bench-depth-{dev}.svg", rows, dev)
    for clock, (bar, line, array) in FILES.items():
        costs(folder / bar, runs, rows, clock)
        qps(folder / line, rows, clock)
        arrays(folder / array, rows, clock)
