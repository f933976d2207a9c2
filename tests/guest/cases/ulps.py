# SPDX-License-Identifier: GPL-2.0
"""The other samples, and the benchmark's two modules."""

import errno
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import perf
from case import BUILD, FLAVOUR, STOCK, case, sh
from samples import SAMPLES, MadPing, UdEcho, module, rpc
from traffic import link


for s in SAMPLES:
    @case(f"sample: {s.__name__}", s)
    def sample_rows(rows):
        for row in rows():
            assert row["ok"], row


@contextmanager
def without_addresses(*names):
    """These null devices have no address; ULPs that are loaded now find them before others, and no rxe link."""
    with module("rdma_null"):
        link(False)
        try:
            for name in names:
                sh("rdma", "link", "add", name, "type", "null", "netdev", "lo")
            yield
            for name in names:
                sh("rdma", "link", "delete", name)
        finally:
            if not Path("/sys/class/infiniband/rxe0").exists():
                link()


@case("samples: a device without an address comes first")
def with_address():
    with without_addresses("null0"):
        link()
        with module("rdma_minimal"):
            pass
        # The others do what they do on a device alone.
        for function in SAMPLES:
            for row in function():
                assert row["ok"], row


@case("samples: without an address they say so")
def without_address():
    for names, said in (((), "there is no RDMA device"),
                        (("null0", "null1"), "none of 2 RDMA device(s) has an IP address")):
        with without_addresses(*names):
            for name in "minimal", "replog", "rpc", "kv":
                sh("dmesg", "-C")
                ended = subprocess.run(["insmod", BUILD / FLAVOUR / f"rdma_{name}.ko"], capture_output=True,
                                       check=False, text=True, timeout=60)
                assert "No such device" in ended.stderr, f"{name}: {ended}"
                log = sh("dmesg").stdout
                assert f"rdma_{name}: {said}" in log, f"{name} does not say so: {log}"


BAD = {
    "minimal": ("context=4", "context=256", "context=x"),
    "replog": ("rounds=0", "rounds=4294967295", "rounds=-1", "records=960", "records=4294967295", "records=x"),
    "rpc": ("calls=0", "calls=-1", "clients=0", "clients=1001", "clients=4294967295", "clients=x"),
    "kv": ("port=65536", "server=x", "server_port=0", "server_port=65536", "connections=-1", "connections=33",
           "connections=4294967295", "operations=x", "memory=0", "memory=x"),
}


def said_by(name):
    """What a module has said since the log was cleared."""
    return [line for line in sh("dmesg").stdout.splitlines() if f"rdma_{name}: " in line]


for n, values in BAD.items():
    @case(f"{n}: a bad value is refused, and one line says why", n, values)
    def bad_parameter(name, values):
        for value in values:
            sh("dmesg", "-C")
            ended = subprocess.run(["insmod", BUILD / FLAVOUR / f"rdma_{name}.ko", value], capture_output=True,
                                   check=False, text=True, timeout=60)
            assert "Invalid" in ended.stderr or "out of range" in ended.stderr, f"{value}: {ended}"
            said = said_by(name)
            assert len(said) == 1 and value.split("=")[0] in said[0], f"{value}: {said}"


for c, f in ((UdEcho, "ask"), (MadPing, "answered"), (MadPing, "unanswered")):
    @case(f"{c.module[5:]}: a bad number is refused, and one line says why: {f}", c, f)
    def bad_number(files, file):
        with module(files.module):
            for value in "x", "-1", "4294967296", "1 2", "1 x ::", "9" * 100, "":
                sh("dmesg", "-C")
                try:
                    files().write(file, value)
                except OSError as e:
                    assert e.errno == errno.EINVAL, f"{value}: {e}"
                else:
                    # The kernel does not pass on what is empty.
                    assert not value, f"{value} was taken"
                    continue
                said = said_by(files.module[5:])
                assert len(said) == 1, f"{value}: {said}"


@case("mad_ping: rdma link delete while it waits")
def mad_ping_removal():
    def ping():
        try:
            pings.write("unanswered", 1000)
        except OSError as e:
            failed.append(e.errno)

    failed, pings = [], MadPing()
    with module("rdma_mad_ping"):
        thread = threading.Thread(target=ping)
        thread.start()
        while not pings.stats()["timeouts"]:
            time.sleep(0.05)
        link(False)
        thread.join(30)
        assert not thread.is_alive(), "it still waits"
        link()
        pings.write("answered", 3)
        assert pings.stats()["pings"] == 3, pings.stats()
    # The removal ends the agent, or the module does, which is told of it.
    assert failed in ([errno.ENODEV], [errno.ECANCELED]), failed


@case("ud_echo: rdma link delete while it asks")
def ud_echo_removal():
    def ask():
        try:
            echo.write("ask", 1000000)
        except OSError as e:
            failed.append(e.errno)

    failed, echo = [], UdEcho()
    with module("rdma_ud_echo"):
        thread = threading.Thread(target=ask)
        thread.start()
        while not echo.stats()["echoes"]:
            time.sleep(0.05)
        link(False)
        thread.join(30)
        assert not thread.is_alive(), "it still asks"
        link()
        echo.write("ask", 3)
        assert echo.stats()["echoes"] == 3, echo.stats()
    assert failed == [errno.ENODEV], failed


@case("rpc: more clients than the server has slots")
def rpc_crowd():
    for row in rpc(clients=12, calls=4):
        assert row["ok"], row


@case("mad_ping: a signal ends the wait")
def mad_ping_signal():
    with module("rdma_mad_ping"):
        write = f"echo 1000 >{MadPing().path}/unanswered"
        ended = subprocess.run(["timeout", "1", "sh", "-c", write], check=False, timeout=30)
        assert ended.returncode == 124, f"it ended with {ended.returncode}"
        assert MadPing().stats()["timeouts"] < 1000


if STOCK:
    for t in perf.TWINS:
        case(f"perf: {t}: each load in each context", t)(perf.every_load)
        case(f"perf: {t}: what is wrong is refused", t)(perf.refusals)
        case(f"perf: {t}: what is held, and a second run", t)(perf.holding)
        case(f"perf: {t}: rdma link delete during a run", t)(perf.removal)
else:
    case("perf: rdma_perf_rs: each load", "rdma_perf_rs", ("softirq",), 1 << 16)(perf.every_load)
