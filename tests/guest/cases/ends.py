# SPDX-License-Identifier: GPL-2.0
"""Devices that go, and what is left after all of it."""

import errno
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import null
from case import BUILD, FLAVOUR, ROUNDS, STOCK, case, sh
from rping import ADDR, CONTEXTS, Instance, ports
from traffic import OBJECTS, link_delete, no_connection, traffic

KMEMLEAK = Path("/sys/kernel/debug/kmemleak")


@case("objects: those of connections are in debugfs with their peers, and go with them")
def objects():
    addr = re.escape(ADDR)
    named = [rf"rdma_rping: rxe0: QP \d+ to {addr}:\d+, made \d+ s ago",
             rf"rdma_rping: CM id to {addr}:\d+, made \d+ s ago, established",
             rf"rdma_rping: CM id on {addr}:\d+, made \d+ s ago"]
    with traffic():
        said = OBJECTS.read_text()
        for line in named:
            assert re.search("^" + line, said, re.M), f"not there: {line}: {said}"
    no_connection()
    return len(said.splitlines())


@case("rping: a client that polls leaves nothing when it is stopped")
def stopped():
    for _ in range(20):
        # Its last completions are found by the drain, and their handlers post once more.
        with traffic("direct"):
            pass
        no_connection()


for c in CONTEXTS:
    @case(f"rdma link delete under traffic: {c}", c)
    def deleted(context):
        for _ in range(ROUNDS):
            reason = link_delete(context)
        return reason


def ids_in_namespaces():
    """What rdma_netns has said since it was loaded."""
    log = sh("dmesg").stdout.rpartition("rdma-rs test: ")[2]
    return re.findall(r"rdma_netns: id in the namespace of rxens: (.*)", log)


def until(done):
    """Waits: a namespace ends in a work item."""
    while not done():       # the suite gives up some time
        time.sleep(0.1)


@contextmanager
def rxens():
    """An RDMA device on an interface of its own: rxens, on nsdummy."""
    sh("ip", "link", "add", "nsdummy", "type", "dummy")
    sh("rdma", "link", "add", "rxens", "type", "rxe", "netdev", "nsdummy")
    try:
        yield
    finally:
        sh("rdma", "link", "delete", "rxens")
        sh("ip", "link", "del", "nsdummy")


@contextmanager
def namespace_ends():
    """rxens is in a network namespace that ends."""
    sh("rdma", "system", "set", "netns", "exclusive")
    sh("ip", "netns", "add", "dying")
    sh("rdma", "dev", "set", "rxens", "netns", "dying")
    sh("ip", "netns", "del", "dying")
    yield
    until(lambda: subprocess.run(["rdma", "system", "set", "netns", "shared"],
                                 capture_output=True, check=False).returncode == 0)


@case("namespaces: no id in one that is being dismantled")
def dying_namespace():
    with rxens():
        sh("insmod", f"{BUILD}/{FLAVOUR}/rdma_netns.ko")
        try:
            with namespace_ends():
                # The device comes back to the client, too.
                until(lambda: len(ids_in_namespaces()) == 2)
        finally:
            sh("rmmod", "rdma_netns")
    said = ids_in_namespaces()[:2]
    assert said == ["0", str(-errno.ENODEV)], said


@case("namespaces: an id ends on a device that came back without MADs")
def no_mads():
    addr = "203.0.113.1"
    with rxens():
        sh("ip", "addr", "add", f"{addr}/24", "dev", "nsdummy")
        sh("ip", "link", "set", "nsdummy", "up")
        with namespace_ends():
            until(lambda: subprocess.run(["rdma", "dev", "show", "rxens"],
                                         capture_output=True, check=False).returncode == 0)
        # rxe does not forget the QP 1 that the device had before, and makes no other.
        assert "rxens: Couldn't open port 1" in sh("dmesg").stdout
        with Instance(addr=addr, port=next(ports)) as client:
            try:
                client.write("connect", 1)
                raise AssertionError("connected without MADs")
            except OSError as e:
                failed = errno.errorcode[e.errno]
    return failed


if STOCK:
    for n in null.CASES:
        case(f"null device: {n.__name__.replace('_', ' ')}")(n)

    @case("soak: a million completions in each polling context, each owner back once")
    def soak():
        return sh("/rdma-rs/tests/guest/soak", "1000000").stdout.strip()


@case("modules: unload after all of it")
def last():
    # The log of kmemleak shows what the modules have allocated.
    symbols.extend(line.split() for line in Path("/proc/kallsyms").read_text().splitlines()
                   if line.endswith(("[rdma_rs]", "[rdma_rping]")))
    sh("rmmod", "rdma_rping", "rdma_rs")


def symbol(match):
    """The name of an address in the modules, which are gone."""
    address = int(match[0], 16)
    below = [(int(s[0], 16), s[2]) for s in symbols if int(s[0], 16) <= address]
    base, name = max(below, default=(0, ""))
    return f"{match[0]} {name}+{address - base:#x}" if address - base < 0x4000 else match[0]


symbols = []
if KMEMLEAK.exists():
    @case("kmemleak: no leak in all of it")
    def kmemleak():
        found = subprocess.run("/rdma-rs/tests/guest/leaks", capture_output=True, text=True, check=False)
        leaks = re.sub(r"\b0x[0-9a-f]{16}$", symbol, found.stdout, flags=re.M)
        print(leaks, end="", file=sys.stderr)
        assert found.returncode == 0, leaks.splitlines()[0] if leaks else found.stderr


if STOCK:
    case("null device: a QP that cannot be drained stalls its device until it can")(null.stuck)
