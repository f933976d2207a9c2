# SPDX-License-Identifier: GPL-2.0
"""The samples, for the tests in a VM. Each adds a function that returns its rows of a table."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

KEYS = ("sample", "what", "operations", "bytes_verified", "errors", "ok")
BUILD = Path("/rdma-rs/build") / os.environ["flavour"]
SAMPLES = []


def sample(function):
    SAMPLES.append(function)
    return function


def row(*values):
    return dict(zip(KEYS, values))


@contextmanager
def module(name):
    """Has a sample's module loaded."""
    subprocess.run(["insmod", BUILD / f"{name}.ko"], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run(["rmmod", name], check=True, timeout=60)


class MadPing:
    """The files of a device in debugfs."""

    def __init__(self, device="rxe0"):
        self.path = Path("/sys/kernel/debug/rdma_mad_ping") / device

    def write(self, name, value):
        fd = os.open(self.path / name, os.O_WRONLY)
        try:
            os.write(fd, str(value).encode())
        finally:
            os.close(fd)

    def stats(self):
        lines = (self.path / "stats").read_text().splitlines()
        return {k: int(v) for k, v in (line.split() for line in lines)}


@sample
def mad_ping(answered=200, unanswered=3):
    """Pings that are answered, and pings that time out: as many as were sent."""
    with module("rdma_mad_ping"):
        pings = MadPing()
        pings.write("answered", answered)
        first = pings.stats()
        pings.write("unanswered", unanswered)
        then = pings.stats()
    verified, timeouts = first["bytes_verified"], then["timeouts"]
    errors = first["errors"] + first["timeouts"]
    yield row("mad_ping", "answered", first["pings"], verified, errors,
              first["pings"] == answered and verified == 216 * answered and errors == 0 and
              first["rtt_ns"] > 0)
    errors = then["errors"] + then["pings"] - first["pings"]
    yield row("mad_ping", "timed out", timeouts, 0, errors, timeouts == unanswered and errors == 0)


def rows():
    return [r for function in SAMPLES for r in function()]
