# SPDX-License-Identifier: GPL-2.0
"""What the transports of 9P over RDMA have done in each case: tests/ninep.json, and the table of Documentation/9p.rst.

    table.py record KERNEL TRANSPORT	keeps results that are on standard input, as the script cases prints them
    table.py page				writes the table, between its two comments
"""

import json
import re
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
RECORD, PAGE = TOP / "tests/ninep.json", TOP / "Documentation/9p.rst"
BEGIN, END = (f".. {text}\n" for text in ("What follows is written by scripts/ninep/cases page.",
                                          "The end of this table."))
SIW = "siw: "
# Where the cases run, in the order of the table.
KERNELS = ("stock", "um-debug", "siw")
# What becomes of the reason that a case gives: the kind of exception, stacks, times and places of the log are left out.
SHORTER = ((r"^(AssertionError|TimeoutError|CalledProcessError|TimeoutExpired|OSError): ", ""),
           (r"^not ok kmemleak: .*unreferenced object \w+ \(size (\d+)\).*", r"\1 bytes are leaked"),
           (r": \[['\"]\[<0>\].*", ""), (r"(?<=kernel log: )\[[^]]*\] *", ""), (r"\+0x[0-9a-f]+(/0x[0-9a-f]+)?", ""),
           (r"Command '[\[(]'([^']*)'.*[\])]' timed out after (\d+) seconds", r"\1 waits for more than \2 s"))


def result(line):
    """The name of a case, behind the transport's, and what it has done, and how many allocations have failed.
    None if the line is no result."""
    found = re.fullmatch(r"(not )?ok 9p[^:]*: (.*?) # (.*)", line.rstrip())
    if not found:
        return None
    failed, name, why = found.groups()
    if not failed:
        places = re.search(r"\d+ places.*", why)
        return name, places[0] if places else "passes"
    for pattern, said in SHORTER:
        why = re.sub(pattern, said, why)
    return name, why


def record(kernel, transport):
    """Keeps what the cases have done; those on siw, which one kernel has, as if that were a kernel of its own."""
    kept = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    for name, said in filter(None, map(result, sys.stdin)):
        is_on_siw = name.startswith(SIW)
        kept.setdefault(transport, {}).setdefault("siw" if is_on_siw else kernel, {})[name.removeprefix(SIW)] = said
    RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def passes(said):
    return said == "passes" or re.match(r"\d+ places", said)


def page():
    """Writes the table into the page."""
    def cell(text):
        return '"' + text.replace('"', "'").replace("\\", "/") + '"'

    def told(kernels, name):
        seen = {}
        for kernel in filter(kernels.get, KERNELS):
            if said := kernels[kernel].get(name):
                seen.setdefault(said if passes(said) else f"**{said}**", []).append(kernel)
        return "; ".join(f"{', '.join(where)}: {said}" for said, where in seen.items()) or "not run"

    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    for transport, group in ("c", "c-faults"), ("rust", "faults"):
        for kernel, rows in kept.get(group, {}).items():
            place = kept[transport].setdefault(kernel, {})
            place.update((f"allocations that fail: {name}", said) for name, said in rows.items())
    kept = [kept.get(transport, {}) for transport in ("c", "rust")]
    names = sorted({name for kernels in kept for rows in kernels.values() for name in rows})
    lines = ["", ".. csv-table::", '   :header: "case", "C", "Rust"', "   :widths: 40, 40, 20", ""]
    for name in names:
        lines.append("   " + ", ".join(map(cell, (name, *(told(kernels, name) for kernels in kept)))))
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    PAGE.write_text(head + BEGIN + "\n".join(lines) + "\n\n" + end + tail, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "page":
        page()
    else:
        record(*sys.argv[2:])
