# SPDX-License-Identifier: GPL-2.0
"""The samples, for the tests in a VM. Each adds a function that returns its rows of a table."""

import os
import re
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

KEYS = ("sample", "what", "operations", "bytes_verified", "errors", "ok")
BUILD = Path("/rdma-rs/build") / os.environ["flavour"]
# The debug kernel is slow, and shows mistakes in fewer operations.
PART = 1 if not os.environ["flavour"].startswith("um") else 4
SAMPLES = []


def sample(function):
    SAMPLES.append(function)
    return function


def row(*values):
    return dict(zip(KEYS, values))


@contextmanager
def module(name, *parameters):
    """Has a sample's module loaded."""
    subprocess.run(["insmod", BUILD / f"{name}.ko", *parameters], check=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run(["rmmod", name], check=True, timeout=60)


class Debugfs:
    """The files that a sample has for a device in debugfs."""

    module = None

    def __init__(self, device="rxe0"):
        self.path = Path("/sys/kernel/debug") / self.module / device

    def write(self, name, value):
        fd = os.open(self.path / name, os.O_WRONLY)
        try:
            os.write(fd, str(value).encode())
        finally:
            os.close(fd)

    def stats(self):
        said = (self.path / "stats").read_text()
        return {k: int(v) for k, v in re.findall(r"(\w+): (\d+)", said)}


class MadPing(Debugfs):
    """One that pings by MADs."""

    module = "rdma_mad_ping"


@sample
def mad_ping(answered=200 // PART, unanswered=3):
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


class UdEcho(Debugfs):
    """One that sends datagrams and gets them back."""

    module = "rdma_ud_echo"


@sample
def ud_echo(count=300 // PART, lost=1):
    """Datagrams that come back, and one that goes to no peer and is lost."""
    with module(UdEcho.module):
        echo = UdEcho()
        echo.write("ask", count)
        # An echo may be here before the server knows that it has gone back.
        for _ in range(1000):
            first = echo.stats()
            if first["served"] >= count:
                break
            time.sleep(0.01)
        server = dict(zip(*[iter((echo.path / "server").read_text().split())] * 2))
        echo.write("ask", f"{lost} {0xfffff0} {server['gid']}")
        echo.write("ask", f"{count} {server['qpn']} {server['gid']}")
        then = echo.stats()
    yield row("ud_echo", "echoed", first["echoes"], first["bytes_verified"],
              first["errors"] + first["lost"],
              first["echoes"] == count and first["bytes_verified"] == 200 * count and
              first["served"] >= count and first["errors"] == first["lost"] == 0)
    yield row("ud_echo", "lost", then["lost"], 0, then["errors"],
              then["lost"] == lost and then["echoes"] == 2 * count and then["errors"] == 0)


@sample
def replog(records=300 // PART, rounds=8):
    """Logs that are found whole after crashes: every record that was acknowledged is there."""
    subprocess.run(["dmesg", "-C"], check=True)
    with module("rdma_replog", f"records={records}", f"rounds={rounds}"):
        pass
    said = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"acknowledged (\d+) recovered (\d+) bytes (\d+)", said)
    acknowledged, recovered, verified = map(int, found.groups())
    yield row("replog", "recovered", recovered, verified, 0,
              recovered >= acknowledged >= records * rounds and verified > 0)


@sample
def rpc(clients=4, calls=60 // PART):
    """Calls whose data the server reads or writes, by several clients that it has one SRQ for."""
    subprocess.run(["dmesg", "-C"], check=True)
    with module("rdma_rpc", f"clients={clients}", f"calls={calls}"):
        pass
    said = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"(\d+) clients made (\d+) calls, of (\d+) bytes", said)
    number, each, verified = map(int, found.groups())
    yield row("rpc", "called", number * each, verified, 0,
              (number, each) == (clients, calls) and verified > number * each and
              said.count("a call was refused") == 1)


@sample
def kv(connections=4, operations=500 // PART):
    """Values that are put and got, short and long, by several connections of many requests each."""
    subprocess.run(["dmesg", "-C"], check=True)
    with module("rdma_kv", f"connections={connections}", f"operations={operations}"):
        stats = kv_stats()
    said = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"(\d+) connections, (\d+) requests, (\d+) bytes are right", said)
    number, requests, verified = map(int, found.groups())
    keys = stats["remote_invalidations"] + stats["local_invalidations"]
    yield row("kv", "answered", requests, verified, stats["violations"],
              (number, requests) == (connections, connections * operations) and
              verified > requests and stats["served"] <= requests and requests > keys > 0)


def kv_stats():
    return {path.name: int(path.read_text()) for path in Path("/sys/kernel/debug/rdma_kv/stats").iterdir()}


def rows():
    return [r for function in SAMPLES for r in function()]
