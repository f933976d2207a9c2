#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""The tests that run in a VM. Prints "ok NAME # seconds" or "not ok NAME # reason" for each.

suite [NAME...]: all of them, or those whose names start so. Exits with 0 once all have run."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import null
import perf
from demo import PAIRINGS, run
from rping import ADDR, CONTEXTS, Instance, finish, peer, ports, wait_listening
from samples import SAMPLES, MadPing, UdEcho, module, rpc

FLAVOUR = os.environ["flavour"]
BUILD = Path("/rdma-rs/build")
KMEMLEAK = Path("/sys/kernel/debug/kmemleak")
SECONDS = 240 if FLAVOUR == "stock" else 400
# The debug kernel is slow, and shows mistakes in fewer rounds.
RELOADS = 100 if FLAVOUR == "stock" else 5
ROUNDS = 2 if FLAVOUR == "stock" else 1
CASES = []


def case(name, *args):
    def add(function):
        CASES.append((name, function, args))
        return function
    return add


def sh(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS, **options)


def up():
    sh("/rdma-rs/tests/guest/up")


def reload(times=1):
    # The shared folder is slow, so they are copied once.
    sh("bash", "-ec", f"""cp --update=none {BUILD}/{FLAVOUR}/rdma_{{rs,rping}}.ko /run
        for _ in {{1..{times}}}; do
            rmmod rdma_rping rdma_rs; insmod /run/rdma_rs.ko; insmod /run/rdma_rping.ko
        done""")


def link(add=True):
    if add:
        sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
    else:
        sh("rdma", "link", "delete", "rxe0")


def serve_one(server, port, count=3, size=64, addr=ADDR):
    """A peer in good order is served."""
    before = server.stats()["pings"]
    status, said = finish(peer("client", port, count, size, addr))
    assert status == 0, f"a good client failed afterwards ({status}): {said}"
    after = server.settle("pings", before + count)["pings"]
    assert after == before + count, f"{after - before} of {count} pings of a good client"


@contextmanager
def listening(**attributes):
    port = next(ports)
    with Instance(port=port, **attributes) as server:
        server.write("listen", 1)
        yield server, port


@contextmanager
def traffic(context="softirq"):
    """A Rust client against a Rust server without end; it may fail, but it must end."""
    def connect():
        try:
            client.connect()
        except OSError:
            pass

    with listening(context=context) as (server, port):
        with Instance(port=port, count=0, context=context) as client:
            thread = threading.Thread(target=connect)
            thread.start()
            try:
                client.settle("pings", 5)
                assert client.stats()["pings"] >= 5, "no traffic: " + client.read("reason")
                yield client, server
            finally:
                client.write("connect", 0)
                thread.join(30)
                assert not thread.is_alive(), "the client does not end"


@case("modules: load, after making an rxe link")
def first():
    up()


@case(f"modules: unload and load {RELOADS} times")
def reload_often():
    reload(RELOADS)


@case("modules: unload and load while addresses come and go")
def reload_events():
    # Each is an event of the port, told to every client.
    address = "192.0.2.77/24 dev rdma0"
    flap = subprocess.Popen(["bash", "-c", f"while ip addr add {address}; do ip addr del {address}; done"])
    try:
        reload(max(RELOADS // 5, 2))
        assert flap.poll() is None, "the addresses have stopped"
    finally:
        flap.kill()
        flap.wait()
        subprocess.run(["ip", "addr", "del", *address.split()], capture_output=True, check=False)


@case("modules: unload and load under traffic")
def reload_traffic():
    for context in CONTEXTS * ROUNDS:
        with traffic(context):
            refused = subprocess.run(["rmmod", "rdma_rping"], capture_output=True, check=False)
            assert refused.returncode, "unloaded while an instance exists"
        # The instances are gone, but what they began may still be ending.
        reload()


for i, c in enumerate(CONTEXTS):
    @case(f"minimal: says hello, {c}", i)
    def minimal(context):
        sh("dmesg", "-C")
        sh("insmod", f"{BUILD}/{FLAVOUR}/rdma_minimal.ko", f"context={context}")
        sh("rmmod", "rdma_minimal")
        assert 'Recv: Ok("hello")' in sh("dmesg").stdout, "no hello"


for c in CONTEXTS:
    for p in PAIRINGS:
        @case(f"rping: {c}, {p}", c, p)
        def matrix(context, pairing):
            row, why = run(context, pairing, 20)
            assert row["ok"], f"{row} {why}"


@case("rping: IPv6, both ways")
def ipv6():
    addr = "2001:db8::1"
    with listening(addr=addr) as (server, port):
        serve_one(server, port, addr=addr)
    port = next(ports)
    user = peer("server", port, 3, addr=addr)
    wait_listening(port)
    with Instance(addr=addr, port=port, count=3) as client:
        client.connect()
        assert finish(user)[0] == 0
        assert client.stats()["pings"] == 3


for s in (17, 4095, 65535):
    @case(f"rping: messages of {s} bytes", s)
    def sizes(size):
        if size < 24:       # rping itself refuses them.
            port = next(ports)
            with Instance(port=port, size=size) as server, \
                    Instance(port=port, size=size, count=5) as client:
                server.write("listen", 1)
                client.connect()
                assert client.stats()["bytes_verified"] == 5 * size
            return
        with listening() as (server, port):
            serve_one(server, port, 5, size)
            assert server.stats()["bytes_verified"] == 5 * size


@case("rping: eight clients at once")
def many():
    with listening(context="workqueue") as (server, port):
        users = [peer("client", port, 20) for _ in range(8)]
        for user in users:
            status, said = finish(user)
            assert status == 0, said
        stats = server.settle("pings", 160)
        assert stats["pings"] == 160 and stats["connections"] == 8, stats


for s in SAMPLES:
    @case(f"sample: {s.__name__}", s)
    def sample_rows(rows):
        for row in rows():
            assert row["ok"], row


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
    assert failed == [errno.ECANCELED], failed


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


if FLAVOUR == "stock":
    for t in perf.TWINS:
        case(f"perf: {t}: each load in each context", t)(perf.every_load)
        case(f"perf: {t}: what is wrong is refused", t)(perf.refusals)
        case(f"perf: {t}: rdma link delete during a run", t)(perf.removal)
else:
    case("perf: rdma_perf_rs: each load", "rdma_perf_rs", ("batch", "softirq"), 1 << 16)(perf.every_load)


@case("configfs: bad values are refused")
def bad_values():
    with Instance() as it:
        for name, value in (("port", "x"), ("port", 65536), ("size", 0), ("size", 1 << 30),
                            ("context", "hardirq"), ("addr", "300.1.1.1"), ("addr", "x"),
                            ("validate", "maybe"), ("count", -1), ("listen", "x")):
            try:
                it.write(name, value)
            except OSError as e:
                assert e.errno in (errno.EINVAL, errno.ERANGE), f"{name}={value}: {e}"
            else:
                raise AssertionError(f"{name}={value!r} was taken")
    with listening() as (server, _):
        try:
            server.write("port", 1)
        except OSError as e:
            assert e.errno == errno.EBUSY, e
        else:
            raise AssertionError("the port was changed under a running server")


def hostile(role, how, port):
    return subprocess.Popen([BUILD / "guest/hostile", role, ADDR, str(port), how],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_reason(it, seconds=45):
    end = time.monotonic() + seconds
    while not it.read("reason") and time.monotonic() < end:
        time.sleep(0.1)
    reason = it.read("reason")
    assert reason, "no reason is given"
    return reason


def hostile_client(how):
    with listening() as (server, port):
        bad = hostile("client", how, port)
        if how == "silent":
            serve_one(server, port)
        status, said = finish(bad)
        assert status == 0, f"the hostile client could not do it: {said}"
        reason = wait_reason(server)
        if how not in ("vanish", "disconnect"):
            assert reason != "peer disconnected", "the reason is not the misdeed"
        serve_one(server, port)
        return reason


def hostile_server(how):
    port = next(ports)
    bad = hostile("server", how, port)
    wait_listening(port)
    with Instance(port=port, count=3) as client:
        try:
            client.write("connect", 1)
        except OSError as e:
            failed = e
        else:
            raise AssertionError("connect succeeded")
        reason = wait_reason(client)
        assert client.read("state") == "failed", client.read("state")
    status, said = finish(bad)
    assert status == 0, f"the hostile server could not do it: {said}"
    with listening() as (server, port):
        serve_one(server, port)
    return f"{errno.errorcode.get(failed.errno, failed.errno)}, {reason}"


# It takes the module half a minute to lose patience with these, so the others run meanwhile.
waiting = ThreadPoolExecutor()
silent = []


@case("hostile peers: two silent ones begin")
def begin_silent():
    silent.append(waiting.submit(hostile_client, "silent"))
    silent.append(waiting.submit(hostile_server, "silent"))


for h in ("garbage", "short", "long", "empty", "badkey", "beyond", "resize", "badsink", "vanish",
          "disconnect", "flood"):
    case(f"hostile client: {h}", h)(hostile_client)
for h in ("short", "early", "vanish", "disconnect", "reject"):
    case(f"hostile server: {h}", h)(hostile_server)


@case("hostile client: silent")
def end_silent_client():
    return silent[0].result()


@case("hostile server: silent")
def end_silent_server():
    return silent[1].result()


for c in CONTEXTS:
    @case(f"rdma link delete under traffic: {c}", c)
    def link_delete(context):
        for _ in range(ROUNDS):
            with traffic(context) as (client, server):
                link(False)
                reason = wait_reason(client)
                wait_reason(server)
            link()
            with listening(context=context) as (server, port):
                serve_one(server, port)
        return reason


if FLAVOUR == "stock":
    for n in null.CASES:
        case(f"null device: {n.__name__.replace('_', ' ')}")(n)

    @case("soak: a million completions in each polling context, each owner back once")
    def soak():
        return sh("/rdma-rs/tests/guest/soak", "1000000").stdout.strip()


@case("modules: unload after all of it")
def last():
    # Where kmemleak will find what the modules have allocated.
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
        # Only objects of a certain age that have not changed between two scans count.
        time.sleep(5)
        KMEMLEAK.write_text("scan")
        KMEMLEAK.write_text("scan")
        leaks = re.sub(r"\b0x[0-9a-f]{16}$", symbol, KMEMLEAK.read_text(), flags=re.M)
        print(leaks, end="", file=sys.stderr)
        assert not leaks, leaks.splitlines()[0]


if FLAVOUR == "stock":
    # Nothing can come after this.
    case("null device: a QP that is leaked stalls its device, and nothing else")(null.leaked)


def timed_out(*_):
    raise TimeoutError(f"not done after {SECONDS} s")


def main():
    wanted = tuple(sys.argv[1:]) or ("",)
    signal.signal(signal.SIGALRM, timed_out)
    for name, function, args in CASES:
        if not name.startswith(wanted) and function is not first:
            continue
        Path("/dev/kmsg").write_text(f"rdma-rs test: {name}\n")
        begin = time.monotonic()
        signal.alarm(SECONDS)
        try:
            said = function(*args)
        except subprocess.CalledProcessError as e:
            print(f"not ok {name} # {e}: {e.stderr.strip()}")
        except Exception as e:      # pylint: disable=broad-except
            print(f"not ok {name} # {type(e).__name__}: {e}".replace("\n", " "))
        else:
            print(f"ok {name} # {time.monotonic() - begin:.1f} s" + (f", {said}" if said else ""))
        finally:
            signal.alarm(0)
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
