#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""9P over RDMA in the benchmark, in a VM whose clock counts instructions: operations on a mount, by C's transport
and that in Rust in turns.

ninep_bench DIR: what each row has taken goes to DIR/ninep.jsonl, a line a row, once all are done.

ninep_bench DIR functions: has a plugin of QEMU (scripts/benchmark/functions.c) count each instruction of two runs of
each row, by each transport, into DIR, where DIR/ninep-functions.jsonl tells what was counted, and DIR/symbols-TRANSPORT
which functions the addresses are of."""

import gc
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from marks import mark
from ninep import MOUNT, loaded, mounted

TRANSPORTS = ("rdma", "rdma_rs")
ROUNDS = 2                  # Of the two transports' turns each.
OPERATIONS = 200
SIZES = (512, 4096, 65536)
# The lengths of the two runs whose functions are counted: what both begin and end with is not in their difference.
FEW, MANY = 100, 300


def operations(fd):
    """What is measured, by name: each is one request and its reply."""
    yield "getattr", 0, lambda: os.fstat(fd)
    for n in SIZES:
        data = bytes(n)
        yield "read", n, lambda n=n: os.pread(fd, n, 0)
        yield "write", n, lambda data=data: os.pwrite(fd, data, 0)


def measure(operation, count):
    """Returns the instructions of so many operations."""
    begin = time.monotonic_ns()
    for _ in range(count):
        operation()
    return time.monotonic_ns() - begin


@contextmanager
def file_on(transport):
    """A file on a mount by a transport."""
    with loaded(transport), mounted(transport):
        fd = os.open(MOUNT / "file", os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, os.urandom(max(SIZES)), 0)
        yield fd
        os.close(fd)


def turn(transport):
    """All rows by one transport."""
    with file_on(transport) as fd:
        for load, size, operation in operations(fd):
            # The first ones find nothing in its place.
            measure(operation, OPERATIONS // 10)
            yield {"load": f"9p {load}", "device": "rxe0", "size": size,
                   "result": {"ops": OPERATIONS, "ns": measure(operation, OPERATIONS)}}


def turns():
    """The rows of all turns."""
    for n in range(ROUNDS):
        for place, transport in enumerate(TRANSPORTS):
            of = {"phase": "ninep", "clock": "instructions", "round": n, "place": place, "pair": transport}
            yield from (of | line for line in turn(transport))
            number = n * len(TRANSPORTS) + place + 1
            print(f"  9p: turn {number} of {ROUNDS * len(TRANSPORTS)}, {transport}", flush=True)


def functions(folder):
    """Has the instructions of each row be counted by their addresses, by each transport."""
    marks = 0
    for transport in TRANSPORTS:
        with file_on(transport) as fd:
            for load, size, operation in operations(fd):
                measure(operation, FEW)
                for count in (FEW, MANY):
                    mark()
                    measure(operation, count)
                    mark()
                    # What is counted before the first mark of the two is nothing of the run.
                    marks += 2
                    yield {"phase": "ninep-functions", "pair": transport, "load": f"9p {load}", "size": size,
                           "depth": 1, "ios": count, "counts": f"counts-{marks - 1}"}
            symbols = Path("/proc/kallsyms").read_text(encoding="ascii")
            (folder / f"symbols-{transport}").write_text(symbols, encoding="ascii")
        print(f"  9p: the functions of {transport}", flush=True)


def main():
    folder, counts_functions = Path(sys.argv[1]), sys.argv[2:] == ["functions"]
    subprocess.run(["/rdma-rs/tests/guest/up", "rdma_rs"], check=True)
    gc.disable()
    name = "ninep-functions" if counts_functions else "ninep"
    part = folder / f"{name}.part"
    with part.open("w") as file:
        for line in functions(folder) if counts_functions else turns():
            print(json.dumps(line, separators=(",", ":")), file=file, flush=True)
    part.rename(folder / f"{name}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
