# SPDX-License-Identifier: GPL-2.0
"""kv: its end under load, and targets in userspace that do not keep to the protocol."""

import re
import signal
import subprocess
import time

from case import BUILD, FLAVOUR, PROGRAMS, case
from rping import ADDR, finish, ports, wait_listening
from samples import kv, kv_stats, module
from traffic import OBJECTS, link

ENDLESS = "operations=0"
RATELIMITED = OBJECTS.with_name("ratelimited")


def until_served(count=100):
    end = time.monotonic() + 60
    while kv_stats()["served"] < count:
        assert time.monotonic() < end, f"it does not serve: {kv_stats()}"
        time.sleep(0.05)


def good():
    for row in kv(operations=40):
        assert row["ok"], row


@case("kv: is unloaded under load")
def unload():
    for _ in range(3):
        with module("rdma_kv", ENDLESS):
            until_served()


@case("kv: rdma link delete under load")
def removal():
    with module("rdma_kv", ENDLESS):
        until_served()
        link(False)
        # The target comes back with the device.
        link()
    good()


@case("kv: what is wrong is refused")
def parameters():
    for wrong in ("port=65536", "server_port=1", "memory=0"):
        ended = subprocess.run(["insmod", BUILD / FLAVOUR / "rdma_kv.ko", wrong], capture_output=True,
                               check=False, timeout=120)
        assert ended.returncode, f"{wrong} was taken"
    good()


@case("kv: a hundred requests that are refused do not fill the log")
def refusals():
    count, said = 100, "a connection request was refused"

    def not_printed():
        found = re.search(r"^rdma::cm::listener:\d+: (\d+) messages not printed$", RATELIMITED.read_text(), re.M)
        return int(found[1]) if found else 0

    before = not_printed()
    with module("rdma_kv", "connections=0"):
        subprocess.run(["dmesg", "-C"], check=True)
        begin = time.monotonic()
        # Without the private data of an initiator.
        peer = subprocess.Popen([PROGRAMS / "hostile", "requests", ADDR, "7178", str(count)],
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        status, out = finish(peer)
        assert status == 0, f"they were not refused: {out}"
        # Intervals of five seconds, of which the first and the last may be cut.
        intervals = (time.monotonic() - begin) // 5 + 2
        lines = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout.count(said)
        assert 10 <= lines <= min(10 * intervals, count - 1), f"{lines} lines in {intervals} intervals"
        shown = re.search(r"rdma_kv: CM id on .*, (\d+) requests refused", OBJECTS.read_text())
        assert shown and int(shown[1]) == count, OBJECTS.read_text()
        assert not_printed() - before == count - lines, RATELIMITED.read_text()
    return f"{lines} lines"


def target(how, said, operations=96):
    """Has an initiator meet a target in userspace. Returns what it says; `said` tells what it has to."""
    port = next(ports)
    peer = subprocess.Popen([PROGRAMS / "kv_target", ADDR, str(port), how], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)
    wait_listening(port)
    subprocess.run(["dmesg", "-C"], check=True)
    insmod = ["insmod", BUILD / FLAVOUR / "rdma_kv.ko", "port=0", f"server={ADDR}", f"server_port={port}",
              "connections=1", f"operations={operations}"]
    ended = subprocess.run(insmod, capture_output=True, check=False, timeout=120)
    log = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
    if not ended.returncode:
        subprocess.run(["rmmod", "rdma_kv"], check=True, timeout=60)
    found = re.search(f"rdma_kv: (.*{said}.*)", log)
    assert found, f"it does not say {said}: {log}"
    assert ended.returncode == (0 if "right" in said else 1), f"insmod has ended with {ended.returncode}"
    status, out = finish(peer)
    assert status == 0, f"the target could not do it: {out}"
    return found[1]


@case("kv: what is no address, or two of them, is refused in one line")
def addresses():
    for given in (["server=abc"], ["server=1.2.3"], ["server=0xc0000201"], ["server="], [f"server={ADDR}"] * 2):
        subprocess.run(["dmesg", "-C"], check=True)
        ended = subprocess.run(["insmod", BUILD / FLAVOUR / "rdma_kv.ko", *given], capture_output=True, check=False)
        log = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
        value = given[0].removeprefix("server=")
        assert ended.returncode and log.count("rdma_kv: ") == 1, f"{given}: {log}"
        assert f"rdma_kv: `{value}' invalid for parameter `server'" in log, f"{given}: {log}"


@case("kv: an address where nobody answers, and a signal")
def nobody():
    addr = "192.0.2.99"
    subprocess.run(["dmesg", "-C"], check=True)
    insmod = subprocess.Popen(["insmod", BUILD / FLAVOUR / "rdma_kv.ko", "port=0", f"server={addr}"])
    end = time.monotonic() + 60
    while f"rdma_kv: CM id to {addr}:" not in OBJECTS.read_text():
        assert insmod.poll() is None and time.monotonic() < end, f"it does not connect: {OBJECTS.read_text()}"
        time.sleep(0.05)
    insmod.send_signal(signal.SIGINT)
    assert insmod.wait(60), "it was loaded"
    log = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
    assert re.search(rf"rdma_kv: connection 0: (ERESTARTSYS|.*512).* \({addr}:7178\)", log), log


for h in ("good", "keep"):
    case(f"kv: a target in userspace: {h}", h, "96 requests, .* are right")(target)
# No other request is under way.
case("kv: a target in userspace: idle", "idle", "does not keep to the protocol", 1)(target)
for h in ("range", "generation", "twice", "credits", "length", "short"):
    case(f"kv: a target in userspace: {h}", h, "does not keep to the protocol")(target)
case("kv: a target in userspace: stingy", "stingy", "connection 0: (EPROTO|.*71)")(target)
case("kv: a target in userspace: status", "status", "connection 0: (EPROTO|.*71)")(target)
case("kv: a target in userspace: late", "late", "connection 0: (ENOTCONN|.*107)")(target)
