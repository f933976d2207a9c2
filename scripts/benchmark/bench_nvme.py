# SPDX-License-Identifier: GPL-2.0
"""NVMe over RDMA in the benchmark: from its jobs to rows, and what is made of these.

Pairs of a host's and a target's module take turns. Each is compared, as B, with the first one, A: a row's figures are
the medians of the turns of each; its spread is how far apart the turns of one of them are, as a share: equal modules
differ by no more than that.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from statistics import median

from bench_plot import Axis, Line, plot
from bench_rows import interval

TOP = Path(__file__).resolve().parents[2]
# What each ratio is to be, and may be at most; and how far equal modules differ, in instructions and in p99.
BOUNDS, SPREADS = TOP / "tests/bench-nvme-bounds.tsv", TOP / "tests/bench-nvme-spread.tsv"
KEYS = ("load", "size", "mtu", "depth")
JUDGED = ("goal", "", "at most", "")
HEAD = (*KEYS, "a", "b", "ratio", "spread", *JUDGED, "p99 a, us", "p99 b, us", "ratio", "spread", "goal 1")
# fio gives the time of a job in milliseconds, so a figure is as coarse as that.
GRAIN_NS = 1_000_000
# The steps in which it gives a percentile.
P99_STEP = 0.016


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


def table(path):
    """The lines of a table of tests/, by their names."""
    lines = [line.split("\t") for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name: cells for name, *cells in lines}


def judge(names, ratio, differ):
    """What becomes of a ratio by the goal and the bound of the first of the names that has them. Equal modules differ
    by `differ`: a ratio that is above its goal by no more is not told from it, and holds a bound."""
    bounds = table(BOUNDS)
    goal, most = next((bounds[name] for name in names if name in bounds), ("-", "-"))
    met = holds = None
    if goal != "-":
        met = "met" if ratio <= float(goal) else "in spread" if ratio <= float(goal) + differ else "MISSED"
    if most != "-":
        holds = ratio <= float(most) + differ
    return {"goal": None if goal == "-" else float(goal), "met": met,
            "at_most": None if most == "-" else float(most) + differ, "holds": holds}


def name(row):
    return f"{row['load']}, {row['size']} bytes, MTU {row['mtu']}, depth {row['depth']}"


def full_name(row):
    """What a row is of, and the pair that it compares with the first one."""
    return f"{row.get('what') or name(row)}, {row['pairs'][1]}"


def judged(found):
    """The rows with what becomes of their ratios. In jobs that are shorter than those which the spread was recorded of,
    fio's clock alone may be coarser. The p99 is to be no worse, and has no bound."""
    spreads = table(SPREADS)
    for row in found:
        load = f"{row['pairs'][1]}, {row['size']} bytes"
        differ, tail_differs = map(float, spreads[name(row)])
        tail = row["p99_b"] / row["p99_a"]
        yield row | judge((f"{load}, depth {row['depth']}", load), row["ratio"], max(differ, row["grain"])) | {
            "p99_ratio": tail,
            "p99_met": "met" if tail <= 1 else "in spread" if tail <= 1 + tail_differs else "MISSED"}


def guarded(row):
    """What becomes of a row of the guard."""
    return judge([f"guard, {row['pairs'][1]}"], row["ratio"], float(table(SPREADS)["guard"][0]))


def judgment(row):
    """The cells of a table for it: goal, at most."""
    goal, most = (f"{row[key]:.4f}" if row[key] is not None else "-" for key in ("goal", "at_most"))
    return [goal, row["met"] or "", most, {None: "", True: "holds", False: "EXCEEDED"}[row["holds"]]]


def cells(row):
    """A line of the table."""
    return [row["load"], str(row["size"]), str(row["mtu"]), str(row["depth"]), f"{row['a']:,.0f}", f"{row['b']:,.0f}",
            f"{row['ratio']:.4f}", f"{row['spread']:.4f}", *judgment(row), f"{row['p99_a'] / 1000:,.1f}",
            f"{row['p99_b'] / 1000:,.1f}", f"{row['p99_ratio']:.3f}", f"{row['p99_spread']:.3f}", row["p99_met"]]


def title(row):
    """What the pairs of a row, and of those of the same table, are."""
    first, other = row["pairs"]
    return (f"NVMe over RDMA, on rxe over one network device: instructions an I/O by host and target {first} (a) and"
            f" {other} (b), of {row['rounds']} turns each")


WALL_TITLE = ("NVMe over RDMA by the wall clock, on two CPUs, on rxe over one network device: microseconds an I/O by host and"
              " target {} (a) and {} (b), of {} turns each")
WALL_HEAD = (*KEYS, "a", "b", "ratio", "low", "high", "p99 a", "p99 b", "ratio", "low", "high")


def wall(runs):
    """The rows of what was measured by the wall clock. Pairs take turns, so each round has a ratio of its own; nine times
    out of ten the median of endless rounds lies between `low` and `high`."""
    jobs, pairs = defaultdict(lambda: defaultdict(dict)), {}
    for run in runs:
        result = run["result"]
        jobs[tuple(run[key] for key in KEYS)][run["place"]][run["round"]] = (result["ns"] / result["ops"], result["p99"])
        pairs[run["place"]] = run["pair"]
    for place in sorted(set(pairs) - {0}):
        for key, by_place in jobs.items():
            row = dict(zip(KEYS, key)) | {"device": "rxe0", "clock": "wall", "unit": "ns/IO",
                                          "pairs": [pairs[0], pairs[place]], "rounds": len(by_place[place])}
            for n, prefix in enumerate(("", "p99_")):
                a, b = ([by_place[at][turn][n] for turn in sorted(by_place[at])] for at in (0, place))
                ratios = [y / x for x, y in zip(a, b)]
                low, high = interval(ratios)
                row |= {f"{prefix}a": median(a), f"{prefix}b": median(b), f"{prefix}ratio": median(ratios),
                        f"{prefix}low": low, f"{prefix}high": high,
                        f"{prefix}middle": [interval(a), interval(b)]}
            yield row


def wall_cells(row):
    """A line of the table."""
    yield from (row["load"], str(row["size"]), str(row["mtu"]), str(row["depth"]))
    for prefix in ("", "p99_"):
        yield from (f"{row[prefix + key] / 1000:,.1f}" for key in "ab")
        yield from (f"{row[prefix + key]:.3f}" for key in ("ratio", "low", "high"))


def wall_summary(found):
    """How many ratios are no worse than 1, and which are."""
    worse = [(full_name(row), what, row[f"{prefix}ratio"], row[f"{prefix}low"]) for row in found
             for prefix, what in (("", "an I/O"), ("p99_", "p99")) if row[f"{prefix}low"] > 1]
    yield (f"By the wall clock {2 * len(found) - len(worse)} of {2 * len(found)} ratios are at most 1.00, or not told"
           " from it")
    for name_of_it, what, ratio, low in worse:
        yield f"  WORSE: {name_of_it}: {what} {ratio:.3f}, low {low:.3f}"


def draw_wall(folder, found):
    """Microseconds against depth of the first pair, dashed, and of the last one."""
    if not found:
        return
    last, lines = found[-1]["pairs"], []
    picked = [row for row in found if row["pairs"] == last]
    for color, (load, size) in enumerate(dict.fromkeys((row["load"], row["size"]) for row in picked)):
        for n, (key, pair) in enumerate(zip("ab", last)):
            points = [(row["depth"], row[key] / 1000, *(end / 1000 for end in row["middle"][n])) for row in picked
                      if (row["load"], row["size"]) == (load, size)]
            lines.append(Line(f"{load.removeprefix('nvme ')}, {size:,} bytes, {pair}", points, color, key == "a"))
    plot(folder / "bench-nvme-wall.svg", "NVMe over RDMA on two CPUs: time of an I/O against their depth",
         Axis("I/Os in flight", 2), Axis("microseconds an I/O"), lines)


def summary(found):
    """How many goals are met and how many bounds hold, and which are not and do not."""
    goals = [row["met"] for row in found if row["met"]] + [row["p99_met"] for row in found if "p99_met" in row]
    holds = [row["holds"] for row in found if row["holds"] is not None]
    yield (f"Goals: {goals.count('met')} of {len(goals)} are met, {goals.count('in spread')} missed by no more than"
           f" equal modules differ, {goals.count('MISSED')} MISSED")
    for row in found:
        if row["met"] == "MISSED":
            yield f"  MISSED: {full_name(row)}: {row['ratio']:.4f}, goal {row['goal']:.4f}"
        if row.get("p99_met") == "MISSED":
            yield f"  MISSED: {full_name(row)}: p99 {row['p99_ratio']:.3f}, goal 1"
    yield f"Bounds: {holds.count(True)} of {len(holds)} hold, {holds.count(False)} EXCEEDED"
    for row in found:
        if row["holds"] is False:
            yield f"  EXCEEDED: {full_name(row)}: {row['ratio']:.4f}, at most {row['at_most']:.4f}"


def exceeded(found):
    """Whether a bound is."""
    return any(row["holds"] is False for row in found)


def record(found):
    """How far C differs from itself, which cannot be told from equal. What was not counted stays."""
    if any(row["pairs"] != ["c:c", "c:c"] for row in found):
        raise SystemExit("bench: the spread is how far C differs from itself")
    spreads = {}
    for row in found:
        tail = f"{max(row['p99_spread'], P99_STEP):.4f}" if "what" not in row else "-"
        spreads[row.get("what") or name(row)] = [f"{row['spread'] + row.get('grain', 0):.4f}", tail]
    head, *_ = SPREADS.read_text().splitlines(keepends=True)
    SPREADS.write_text(head + "".join("\t".join([name, *cells]) + "\n"
                                      for name, cells in {**table(SPREADS), **spreads}.items()))


OTHERS_TITLE = ("NVMe over RDMA, on rxe over one network device: what a connection with an I/O queue takes, and each queue"
                " more, of 128 entries, and the text of drivers, by host and target {} (a) and others (b)")
OTHERS_HEAD = ("what", "b is", "a", "b", "unit", "ratio", "spread", *JUDGED)
# What is measured, in which unit. A connection has, beside its I/O queue, the admin queue, a controller of nvme-core and
# one of nvmet, and a disk.
MEASURED = {"bytes": ("memory", "bytes"), "connect": ("connecting", "instructions"),
            "disconnect": ("disconnecting", "instructions")}
QUEUE, CONNECTION = "an I/O queue", "a connection"
# The modules in Rust and in C of each end, and the pair that has it in Rust.
MODULES = {"host": ("nvme_rdma_rs.ko", "nvme-rdma.ko", "rust:c"),
           "target": ("nvmet_rdma_rs.ko", "nvmet-rdma.ko", "c:rust")}


def connections(runs):
    """The rows of what a connection with one I/O queue takes, and of what each queue more does: by the difference of
    connections with few and with many."""
    turns, pairs = defaultdict(dict), {}
    for run in runs:
        turns[run["place"], run["round"]][run["queues"]] = run["result"]
        pairs[run["place"]] = run["pair"]
    figures = defaultdict(lambda: defaultdict(list))
    for (place, _), by_queues in turns.items():
        few, many = min(by_queues), max(by_queues)
        for key, (what, unit) in MEASURED.items():
            one, all_of_them = by_queues[few][key], by_queues[many][key]
            figures[f"{what}, {CONNECTION}", unit][place].append(one)
            figures[f"{what}, {QUEUE}", unit][place].append((all_of_them - one) / (many - few))
    for (what, unit), by_place in figures.items():
        for place in sorted(set(pairs) - {0}):
            yield other(what, [pairs[0], pairs[place]], by_place[0], by_place[place], unit)


def other(what, pairs, first, second, unit):
    """A row of what is no I/O, of the figures of both pairs' turns, with what becomes of its ratio."""
    figures = defaultdict(list)
    for pair, values in zip(pairs, (first, second)):
        figures[pair] += values
    a, b = median(first), median(second)
    row = {"what": what, "pairs": pairs, "a": a, "b": b, "ratio": b / a, "unit": unit, "spread": spread(figures),
           "rounds": len(second)}
    return row | judge([f"{what}, {pairs[1]}"], row["ratio"], float(table(SPREADS).get(what, [0])[0]))


def text(module):
    """The bytes of a module's text, those of its init and exit included."""
    said = subprocess.run(["size", "-A", module], check=True, capture_output=True, text=True).stdout
    return sum(int(line.split()[1]) for line in said.splitlines() if re.match(r"\.(init\.|exit\.)?text", line))


def sizes(build, kernel):
    """The rows of the text of each end's module in Rust, which is in a folder, by that in C, of a kernel's modules."""
    for end, (rust, c, pair) in MODULES.items():
        a, b = text(next(kernel.glob(f"lib/modules/*/kernel/drivers/nvme/{end}/{c}"))), text(build / rust)
        yield other("text of the driver", ["c:c", pair], [a], [b], "bytes")


def other_cells(row):
    """A line of the table."""
    return [row["what"], row["pairs"][1], f"{row['a']:,.0f}", f"{row['b']:,.0f}", row["unit"], f"{row['ratio']:.4f}",
            f"{row['spread']:.4f}", *judgment(row)]


# The pairs of one end in Rust with all of it that saves completions: the target, the host.
ONE_END = ("c:rust+", "rust+:c")


def saves(pair):
    """Whether a pair has fewer completions, or other parameters of its modules."""
    return "+" in pair or "," in pair


def draw(folder, found):
    """Instructions against depth of the first pair, dashed, and of another one: in bench-nvme.svg of the last one whose
    modules are as they are loaded, in bench-nvme-fewer.svg of the last one that saves completions; and in
    bench-nvme-one-end.svg the ratios of those of which one end does."""
    others = [row["pairs"][1] for row in found]
    fewer, plain = [pair for pair in others if saves(pair)], [pair for pair in others if not saves(pair)]
    if plain:
        compare(folder / "bench-nvme.svg", found, plain[-1])
    if fewer:
        compare(folder / "bench-nvme-fewer.svg", found, fewer[-1])
    ratios(folder / "bench-nvme-one-end.svg", found)


def ratios(path, found):
    """The ratios of the pairs of which one end saves completions against depth, those of the host dashed."""
    found = [row for row in found if row["mtu"] == 1500 and row["pairs"][1] in ONE_END]
    lines = []
    for color, (load, size) in enumerate(dict.fromkeys((row["load"], row["size"]) for row in found)):
        for pair in ONE_END:
            points = [(row["depth"], *[row["ratio"]] * 3) for row in found
                      if (row["load"], row["size"], row["pairs"][1]) == (load, size, pair)]
            if points:
                said = f"{load.removeprefix('nvme ')}, {size:,} B, {pair}"
                lines.append(Line(said, points, color, pair == ONE_END[1]))
    plot(path, "NVMe over RDMA on one CPU: one end in Rust that saves completions", Axis("I/Os in flight", 2),
         Axis("instructions an I/O, by those of C with C", around=1), lines)


def compare(path, found, other):
    """Instructions against depth by the first pair, dashed, and by another one, if that is not the same."""
    found = [row for row in found if row["pairs"][1] == other and row["mtu"] == 1500]
    lines = []
    for color, (load, size) in enumerate(dict.fromkeys((row["load"], row["size"]) for row in found)):
        picked = [row for row in found if (row["load"], row["size"]) == (load, size)]
        pairs = dict.fromkeys(picked[0]["pairs"])
        for key, pair in zip("ab", pairs):
            points = [(row["depth"], *[row[key] / 1000] * 3) for row in picked]
            said = f"{load.removeprefix('nvme ')}, {size:,} bytes" + (f", {pair}" if len(pairs) > 1 else "")
            lines.append(Line(said, points, color, key == "a" and len(pairs) > 1))
    plot(path, "NVMe over RDMA on one CPU: cost of an I/O against their depth", Axis("I/Os in flight", 2),
         Axis("thousand instructions an I/O"), lines)
