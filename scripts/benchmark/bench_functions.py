# SPDX-License-Identifier: GPL-2.0
"""The functions that an I/O over NVMe, or an operation of 9P, runs through: from counts of instructions by their
addresses (functions.c) to what each module and each of its functions takes, by two pairs of ends, or two transports."""

import re
import subprocess
from bisect import bisect_right
from collections import Counter, defaultdict

TITLE = ("NVMe over RDMA: instructions an I/O by host and target {} (a) and {} (b), by modules and functions, on rxe over"
         " one network device")
NINEP_TITLE = ("9P over RDMA: instructions an operation by {} (a) and {} (b), by modules and functions, on rxe over one"
               " network device")
HEAD = ("load", "size", "depth", "module", "a", "b", "b - a")
FUNCTIONS_HEAD = ("load", "size", "module", "function", "a", "b")
KEYS = ("load", "size", "depth")
# Addresses above it are the kernel's.
KERNEL = 1 << 63
# What the tables do not name: less of a module, less of a function, in instructions an I/O.
LEAST, LEAST_FUNCTION = 10, 4.5
# So many instructions an operation of 9P are named of a function that both transports run.
NINEP_DIFFERENCE = 100


def readable(names):
    """The names of Rust's functions as paths, and all others as they are."""
    said = subprocess.run(["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    return [re.sub(r"\[[0-9a-f]+\]", "", name) for name in said.splitlines()]


class Symbols:
    """The functions of a kernel, by their addresses."""

    def __init__(self, text):
        found = []
        for line in text.splitlines():
            address, kind, name, *module = line.split()
            if kind in "tTwW" and not name.startswith("__pfx_"):
                found.append((int(address, 16), name, module[0].strip("[]") if module else "kernel"))
        found.sort()
        self.starts = [start for start, *_ in found]
        self.names = list(zip(readable([name for _, name, _ in found]), (module for *_, module in found)))

    def of(self, address):
        """The name and the module of the function that has an address."""
        if address < KERNEL:
            return "", "user space"
        at = bisect_right(self.starts, address) - 1
        return self.names[at] if at >= 0 else ("", "kernel")


def counted(path, symbols):
    """The instructions that were executed of each function."""
    counts = Counter()
    for line in path.read_text(encoding="ascii").splitlines():
        address, number = line.split()
        counts[symbols.of(int(address, 16))] += int(number)
    return counts


def rows(folder, runs):
    """{load: {(function, module): [by the first pair, by the second one]}}, in instructions an I/O."""
    jobs, pairs = defaultdict(dict), list(dict.fromkeys(run["pair"] for run in runs))
    symbols = {pair: Symbols((folder / f"symbols-{pair}").read_text(encoding="ascii")) for pair in pairs}
    for run in runs:
        counts = counted(folder / run["counts"], symbols[run["pair"]])
        jobs[tuple(run[key] for key in KEYS), run["pair"]][run["ios"]] = counts
    found = defaultdict(lambda: defaultdict(lambda: [0.0] * len(pairs)))
    for (load, pair), by_length in jobs.items():
        few, many = min(by_length), max(by_length)
        for function in set(by_length[few]) | set(by_length[many]):
            taken = by_length[many][function] - by_length[few][function]
            found[load][function][pairs.index(pair)] += taken / (many - few)
    return pairs, found


def modules(functions):
    """What each module takes."""
    found = defaultdict(lambda: [0.0, 0.0])
    for (_, module), figures in functions.items():
        found[module] = [one + other for one, other in zip(found[module], figures)]
    return found


def cells(found):
    """The lines of the table of modules: what both pairs have, and what one has."""
    for load, functions in found.items():
        every = sorted(modules(functions).items(), key=lambda row: -max(row[1]))
        for module, (first, second) in every:
            if max(first, second) >= LEAST:
                yield [load[0], str(load[1]), str(load[2]), module, f"{first:,.0f}", f"{second:,.0f}",
                       f"{second - first:+,.0f}"]
        first, second = map(sum, zip(*functions.values()))
        yield [load[0], str(load[1]), str(load[2]), "all", f"{first:,.0f}", f"{second:,.0f}", f"{second - first:+,.0f}"]


def function_cells(found, difference=float("inf")):
    """The lines of the table of functions: those of the modules that one pair alone has, and what differs by so much."""
    for load, functions in found.items():
        of = modules(functions)
        for (name, module), (first, second) in sorted(functions.items(), key=lambda row: -max(row[1])):
            is_own = min(of[module]) == 0
            if (max(first, second) >= LEAST_FUNCTION and is_own) or abs(second - first) >= difference:
                yield [load[0], str(load[1]), module, name, f"{first:,.0f}", f"{second:,.0f}"]
