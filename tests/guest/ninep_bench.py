#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""9P over RDMA in the benchmark, in a VM whose clock counts instructions: operations on a mount, by C's transport
and that in Rust in turns.

ninep_bench DIR: what each row has taken goes to DIR/ninep.jsonl, a line a row, once all are done."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ninep import MOUNT, loaded, mounted

TRANSPORTS = ("rdma", "rdma_rs")
ROUNDS = 2                  # Of the two transports' turns each.
OPERATIONS = 200
SIZES = (512, 4096, 65536)


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


def turn(transport):
    """All rows by one transport."""
    with loaded(transport), mounted(transport):
        fd = os.open(MOUNT / "file", os.O_RDWR | os.O_CREAT)
        os.pwrite(fd, os.urandom(max(SIZES)), 0)
        for load, size, operation in operations(fd):
            # The first ones find nothing in its place.
            measure(operation, OPERATIONS // 10)
            yield {"load": f"9p {load}", "device": "rxe0", "size": size,
                   "result": {"ops": OPERATIONS, "ns": measure(operation, OPERATIONS)}}
        os.close(fd)


def main():
    folder = Path(sys.argv[1])
    subprocess.run(["/rdma-rs/tests/guest/up", "rdma_rs"], check=True)
    gc.disable()
    part = folder / "ninep.part"
    with part.open("w") as file:
        for n in range(ROUNDS):
            for place, transport in enumerate(TRANSPORTS):
                of = {"phase": "ninep", "clock": "instructions", "round": n, "place": place, "pair": transport}
                for line in turn(transport):
                    print(json.dumps(of | line, separators=(",", ":")), file=file, flush=True)
                number = n * len(TRANSPORTS) + place + 1
                print(f"  9p: turn {number} of {ROUNDS * len(TRANSPORTS)}, {transport}", flush=True)
    part.rename(folder / "ninep.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
