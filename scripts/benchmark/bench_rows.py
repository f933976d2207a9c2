# SPDX-License-Identifier: GPL-2.0
"""From the benchmark's runs to rows: a load on a device, in Rust and in C.

A figure is the median of its rounds. A ratio is Rust's by C's: below one, Rust costs less. Each round
has one: the ratio that more rounds would show lies between low and high, nine times out of ten. Half of
what is between them is the spread.

What looks slower in Rust is measured again. Only the fresh rounds count then: the others were chosen for
how they have come out.
"""

from collections import defaultdict
from math import comb
from statistics import median, quantiles

UNITS = {"instructions": "instructions", "native": "ns", "wall": "ns", "slab": "bytes",
         "allocations": "bytes"}
KEYS = ("clock", "device", "load", "context", "size", "depth", "signal", "qps", "cpus")
WHAT = {"send_lat": "round trip", "write_lat": "round trip", "read_lat": "READ", "reg_rate": "registration",
        "call_rate": "call", "tag_rate": "call", "rw_read_rate": "transfer", "rw_write_rate": "transfer",
        "connect_rate": "connection", "post": "post", "complete": "completion", "qp_rate": "QP", "cq_rate": "CQ",
        "connect": "connection", "qp": "QP", "cq": "CQ"}


# Of these the device's share can be told from the rest: by the native clock a post is nearly all its.
PARTS = {"instructions": ("post", "complete", "void_rate"), "native": ("complete",)}


def figures(run):
    """What a run gives: pairs of a load and what one of its operations has cost."""
    load, result = run["load"], run["result"]
    if "bytes" in result:
        yield load, result["bytes"] / result["objects"]
        return
    # The clock of a kernel that is a process has steps of 256 ns: too long for one operation.
    if "samples" in run and run["clock"] != "native":
        yield load, median(run["samples"])
        return
    if result["post_ns"]:
        what = "" if load == "void_rate" else load.removesuffix("rate").replace("_", " ")
        yield what + "post", result["post_ns"] / result["posts"]
        yield what + "complete", result["poll_ns"] / result["completions"]
    if result["setup_ns"]:
        what = load.removesuffix("_rate")
        yield f"{what} set-up", result["setup_ns"] / result["ops"]
        yield f"{what} tear-down", result["teardown_ns"] / result["ops"]
    yield load, result["ns"] / result["ops"]


def device(run):
    peer = run.get("peer", run["device"])
    return run["device"] if peer == run["device"] else f"{run['device']}-{peer}"


def key(run):
    """What a run is a round of. Words that were not given have their defaults."""
    words = {"signal": 1, "qps": 1, "depth": 1, "size": 0, "cpus": 1, **run, "device": device(run)}
    return tuple(words[k] for k in KEYS)


def interval(values):
    """Where the median of what these are drawn from lies, nine times out of ten, whatever their spread."""
    values, n, k = sorted(values), len(values), 1
    # It lies beyond the k-th from an end as often as fewer than k of n coins show that side.
    while 2 * sum(comb(n, i) for i in range(k + 1)) <= 0.1 * 2**n:
        k += 1
    return values[k - 1], values[n - k]


def middle(values):
    """The quartiles, between which the middle half lies."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, high


def counting(runs):
    """The runs without those of rows that were measured again, rows in their order."""
    again = {key(run) for run in runs if run.get("again")}
    place = {name: n for n, name in enumerate(dict.fromkeys(map(key, runs)))}
    counted = [run for run in runs if run.get("again") or key(run) not in again]
    return sorted(counted, key=lambda run: place[key(run)])


def rows(runs):
    rounds, again = defaultdict(lambda: defaultdict(dict)), set()
    for run in counting(runs):
        words = dict(zip(KEYS, key(run)))
        for load, value in figures(run):
            name = tuple({**words, "load": load}.values())
            rounds[name][run["twin"]][run["round"]] = value
            if run.get("again"):
                again.add(name)
    for name, twins in rounds.items():
        if "rust" not in twins:
            continue
        row = dict(zip(KEYS, name))
        rust, c = (list(twins[t].values()) for t in ("rust", "c"))
        ratios = [r / b for r, b in zip(rust, c)]
        low, high = interval(ratios)
        # Other work of the machine can move the median of one of them, as their runs are short.
        ratio = median(ratios) if row["clock"] == "native" else median(rust) / median(c)
        yield row | {
            "unit": f"{UNITS[row['clock']]}/{WHAT.get(row['load']) or WHAT.get(row['load'].split()[0], 'request')}", "rust": median(rust), "c": median(c),
            "ratio": ratio, "low": low, "high": high, "spread": (high - low) / 2,
            "rounds": len(rust), "again": name in again,
            "middle": {"rust": middle(rust), "c": middle(c)},
        }


def slower(runs):
    """The keys of those runs, a figure of which looks slower in Rust."""
    groups = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return {name for name, group in groups.items() if any(row["low"] > 1 for row in rows(group))}


def share(runs, clock):
    """What posting and completing cost the null device itself; nothing if that was not measured."""
    costs = defaultdict(list)
    for run in runs:
        if (run["clock"], run["load"]) == (clock, "bare_rate"):
            for load, value in figures(run):
                costs[load].append(value)
    if not costs:
        return {}
    post, complete = (median(costs[f"bare {load}"]) for load in ("post", "complete"))
    return {"post": post, "complete": complete, "void_rate": post + complete}
