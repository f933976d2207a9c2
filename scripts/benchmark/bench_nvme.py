# SPDX-License-Identifier: GPL-2.0
"""NVMe over RDMA in the benchmark: from its jobs to rows, and what is made of these.

Pairs of a host's and a target's module take turns. Each is compared, as B, with the first one, A: a row's figures are
the medians of the turns of each; its spread is how far apart the turns of one of them are, as a share: equal modules
differ by no more than that.
"""

from collections import defaultdict
from pathlib import Path
from statistics import median

from bench_plot import Axis, Line, plot

BOUNDS = Path(__file__).resolve().parents[2] / "tests/bench-nvme-bounds.tsv"
KEYS = ("load", "size", "mtu", "depth")
HEAD = (*KEYS, "a", "b", "ratio", "spread", "p99 a, us", "p99 b, us", "p99 spread")
# fio says how long a job took in milliseconds, so a figure is as coarse as that.
GRAIN_NS = 1_000_000


def spread(figures):
    """How far apart the figures of one pair are, of those of several."""
    return max((max(values) - min(values)) / median(values) for values in figures.values())


def rows(runs):
    """The runs' rows, those of each other pair in the order of the first one."""
    jobs, places = defaultdict(list), set()
    for run in runs:
        jobs[tuple(run[key] for key in KEYS)].append(run)
        places.add(run["place"])
    for place in sorted(places - {0}):
        for key, group in jobs.items():
            yield compared(key, [run for run in group if run["place"] in (0, place)], place)


def compared(key, group, other):
    """The row of a load, of the runs of the first pair and of that whose place is given."""
    turns, figures, tails = defaultdict(list), defaultdict(list), defaultdict(list)
    for run in group:
        result = run["result"]
        turns[run["place"]].append((result["ns"] / result["ops"], result["p99"]))
        figures[run["pair"]].append(result["ns"] / result["ops"])
        tails[run["pair"]].append(result["p99"])
    a, b = ([median(values) for values in zip(*turns[place])] for place in (0, other))
    pairs = {run["place"]: run["pair"] for run in group}
    return dict(zip(KEYS, key)) | {
        "device": "rxe0", "clock": "instructions", "unit": "instructions/IO", "pairs": [pairs[0], pairs[other]],
        "a": a[0], "b": b[0], "ratio": b[0] / a[0], "spread": spread(figures),
        "grain": max(GRAIN_NS / run["result"]["ns"] for run in group), "rounds": len(group) // len(pairs),
        "p99_a": a[1], "p99_b": b[1], "p99_spread": spread(tails)}


def cells(row):
    """A line of the table."""
    return [row["load"], str(row["size"]), str(row["mtu"]), str(row["depth"]), f"{row['a']:,.0f}", f"{row['b']:,.0f}",
            f"{row['ratio']:.4f}", f"{row['spread']:.4f}", f"{row['p99_a'] / 1000:,.1f}", f"{row['p99_b'] / 1000:,.1f}",
            f"{row['p99_spread']:.3f}"]


def name(row):
    return f"{row['load']}, {row['size']} bytes, MTU {row['mtu']}, depth {row['depth']}"


def title(found):
    """What the pairs of the rows are."""
    first, second = found[0]["pairs"]
    return (f"NVMe over RDMA, on rxe over one network device: instructions an I/O by host and target {first} (a) and"
            f" {second} (b), of {found[0]['rounds']} turns each")


def limits():
    """Of each row: at most so much of A's instructions for B, and how far equal modules differ."""
    lines = [line.split("\t") for line in BOUNDS.read_text().splitlines() if not line.startswith("#")]
    return {row: (float(most), float(differ)) for row, most, differ in lines}


def held(bound, ratio):
    """The limit of this name, how far equal modules differ, and whether a ratio holds it."""
    most, differ = limits()[bound]
    return most, differ, ratio <= most + differ


def bounded(found):
    """What must hold: (name, ratio, limit, how far equal modules differ, whether it holds)."""
    for row in found:
        yield name(row), row["ratio"], *held(name(row), row["ratio"])


def guarded(row):
    """The name of the guard's bound for a row: one that is set, and not recorded."""
    return f"guard, {row['pairs'][1]}: {name(row)}"


def record(found):
    """The bounds, of C by C: what differs there is what cannot be told from equal. Those that are set stay."""
    if any(pair != "c:c" for row in found for pair in row["pairs"]):
        raise SystemExit("bench: the bounds are how far C differs from itself")
    names = {name(row) for row in found}
    head, *lines = BOUNDS.read_text().splitlines(keepends=True)
    kept = [line for line in lines if line.split("\t")[0] not in names]
    BOUNDS.write_text(head + "".join(f"{name(row)}\t1.0000\t{row['spread'] + row['grain']:.4f}\n" for row in found)
                      + "".join(kept))


CONNECTIONS_TITLE = ("NVMe over RDMA: what a connection takes, by the ends HOST:TARGET, on rxe over one network device;"
                     " an I/O queue has 128 entries")
CONNECTIONS_HEAD = ("what", "ends", "figure", "unit", "by C's", "spread", "at most", "")
# What is measured, in which unit. What a connection has beside its I/O queues: the admin queue, a controller of nvme-core
# and one of nvmet, a disk.
MEASURED = {"bytes": ("memory", "bytes"), "connect": ("connecting", "instructions"),
            "disconnect": ("disconnecting", "instructions")}
QUEUE, REST = "an I/O queue", "all else"


def connections(runs):
    """What an I/O queue takes, by the difference of connections with few and with many, and all else, by each pair of ends;
    by C and C, and how far the turns of the pair are apart."""
    found, turns = defaultdict(lambda: defaultdict(list)), defaultdict(dict)
    for run in runs:
        turns[run["pair"], run["round"]][run["queues"]] = run["result"]
    for (pair, _), by_queues in turns.items():
        few, many = min(by_queues), max(by_queues)
        for key, (what, unit) in MEASURED.items():
            queue = (by_queues[many][key] - by_queues[few][key]) / (many - few)
            found[f"{what}, {QUEUE}", unit][pair].append(queue)
            found[f"{what}, {REST}", unit][pair].append(by_queues[few][key] - few * queue)
    for (what, unit), pairs in found.items():
        for pair, values in pairs.items():
            yield {"what": what, "pair": pair, "figure": median(values), "unit": unit,
                   "by_c": median(values) / median(pairs["c:c"]),
                   "spread": (max(values) - min(values)) / median(values), "rounds": len(values)}


def connection_cells(row):
    """A line of the table, with the bound of what has one."""
    bound, cells = f"{row['what']}, {row['pair']}", ["", ""]
    if bound in limits():
        most, differ, holds = held(bound, row["by_c"])
        cells = [f"{most + differ:.3f}", "holds" if holds else "DOES NOT HOLD"]
    return [row["what"], row["pair"], f"{row['figure']:,.0f}", row["unit"], f"{row['by_c']:.3f}",
            f"{row['spread']:.3f}", *cells]


def draw(folder, found):
    """Instructions against depth, A's dashed where B is another pair."""
    lines = []
    for color, (load, size) in enumerate(dict.fromkeys((row["load"], row["size"]) for row in found)):
        picked = [row for row in found if (row["load"], row["size"], row["mtu"]) == (load, size, 1500)]
        for place, pair in enumerate(dict.fromkeys(picked[0]["pairs"])):
            key, other = ("a", "b")[place], len(set(picked[0]["pairs"])) > 1
            points = [(row["depth"], *[row[key] / 1000] * 3) for row in picked]
            name_of = f"{load.removeprefix('nvme ')}, {size:,} bytes" + (f", {pair}" if other else "")
            lines.append(Line(name_of, points, color, other and not place))
    plot(folder / "bench-nvme.svg", "NVMe over RDMA on one CPU: cost of an I/O against their depth",
         Axis("I/Os in flight", 2), Axis("thousand instructions an I/O"), lines)
