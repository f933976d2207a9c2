# SPDX-License-Identifier: GPL-2.0
"""The null device's folder in debugfs, and a ULP to see what it does to one: the soak test."""

import errno
import os
import re
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rping import Instance, ports
from samples import BUILD, Debugfs, module

COMPLETIONS = 200000
KINDS = ("null", "null_drain", "null_iwarp", "null_cm", "null_vague", "null_erdma")
OF_LOOPBACK = ("null_iwarp", "null_cm")
# 127.0.0.1 is any device to the connection manager.
LOOPBACK = "203.0.113.1"
BAD = ("\n", "status", "status x", "status 12 1 2 3", "status -1", "nonsense 1", "refuse 1 2 3",
       "create", "create wood", "create qp x", "connect", "event", "opcode 4294967296", "x" * 65,
       "\u00e9")


class Null(Debugfs):
    """A device, or a QP of one by its number."""

    module = "rdma_null"

    def refuses(self, line, error=errno.EINVAL):
        try:
            self.write("inject", line)
        except OSError as e:
            assert e.errno == error, f"{line!r}: {e}"
        else:
            raise AssertionError(f"{line!r} was taken")

    def holding(self):
        """Holds a completion, and returns the QP of it: that waits for it, however fast it is."""
        self.write("inject", "hold 1")
        return wait(lambda: next((qp for qp in self.qps() if self.holds(qp)), None))

    def holds(self, qp):
        try:
            return self.state(qp)["held"] == 1
        except FileNotFoundError:
            return False

    def state(self, path=""):
        lines = (self.path / path / "state").read_text().splitlines()
        return {k: int(v) for k, v in (line.split() for line in lines)}

    def qps(self):
        return [it.name for it in self.path.iterdir() if it.name.isdigit()]


def wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found


def log():
    return subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout


@contextmanager
def soaking():
    """The soak test is under way, on a device "soak"; the caller gets that and the process."""
    with module("rdma_null"):
        null = Null("soak")
        load = subprocess.Popen(["insmod", BUILD / "rdma_soak.ko", f"completions={COMPLETIONS}"],
                                stderr=subprocess.PIPE, text=True)
        try:
            wait(lambda: null.path.exists() and null.qps())
            yield null, load
        finally:
            load.wait(120)
            subprocess.run(["rmmod", "rdma_soak"], capture_output=True, check=False)


def ends(load, said=""):
    """The soak test has found what was done to it; or nothing."""
    _, stderr = load.communicate(timeout=120)
    assert bool(load.returncode) == bool(said) and said in stderr, f"{load.returncode}: {stderr}"


def link():
    """A device by iproute2: bad lines are refused, and it can be removed."""
    with module("rdma_null"):
        subprocess.run(["rdma", "link", "add", "null0", "type", "null", "netdev", "lo"], check=True)
        null = Null("null0")
        for line in BAD:
            null.refuses(line)
        for line in ("fail", "connect 1", "connect all"):
            subprocess.run(["dmesg", "-C"], check=True)
            null.refuses(line)
            assert log().count(f'rdma_null: inject: "{line}": EINVAL') == 1, log()
        for line in ("status 12", "fatal 12 all 7\n", "refuse", "mute 3 5", "create srq 1", "hold",
                     "release", "event 9", "modify", "vanish", "duplicate all", "opcode 4294967295", "eager 0"):
            null.write("inject", line)
        assert null.state() == dict(cqs=0, qps=0, srqs=0, mrs=0, completions=0, eager=0), null.state()
        null.write("inject", "eager")
        assert null.state()["eager"] == 1
        null.write("remove", 1)
        wait(lambda: not null.path.exists())
        said = subprocess.run(["rdma", "link"], check=True, capture_output=True, text=True).stdout
        assert "null0" not in said, said


@contextmanager
def made(name, kind, netdev="lo"):
    """A device of this kind, made by iproute2."""
    link = ("rdma", "link")
    subprocess.run([*link, "add", name, "type", kind, "netdev", netdev], check=True, capture_output=True)
    try:
        yield Null(name)
    finally:
        subprocess.run([*link, "delete", name], check=True, timeout=60)


def kinds():
    """Devices of each kind by iproute2, at the same time; and none whose port would be of another interface."""
    with module("rdma_null"), ExitStack() as all_of_them:
        for kind in KINDS:
            null = all_of_them.enter_context(made(kind, kind))
            assert null.state()["qps"] == 0
            try:
                null.write("inject", "silence 0")
                assert kind == "null_cm", kind
            except OSError as e:
                assert e.errno == errno.EINVAL and kind != "null_cm", f"{kind}: {e}"
        for kind in KINDS:
            try:
                with made("other", kind, "rdma0"):
                    assert kind not in OF_LOOPBACK, kind
            except subprocess.CalledProcessError as e:
                assert kind in OF_LOOPBACK and b"Invalid argument" in e.stderr, f"{kind}: {e.stderr}"
    assert "other: its port can be that of lo only" in log()


@contextmanager
def connected():
    """A device with a connection manager, made by iproute2, and its address."""
    subprocess.run(["ip", "addr", "add", f"{LOOPBACK}/32", "dev", "lo"], check=True)
    try:
        with module("rdma_null"), made("null0", "null_cm") as null:
            yield null
    finally:
        subprocess.run(["ip", "addr", "delete", f"{LOOPBACK}/32", "dev", "lo"], check=True)


def connections():
    """A ULP connects on one made by iproute2, and is refused when that is told so."""
    with connected() as null:
        for context in ("softirq", "workqueue"):
            port = next(ports)
            with Instance(addr=LOOPBACK, port=port, context=context) as server, \
                    Instance(addr=LOOPBACK, port=port, count=50, context=context) as client:
                server.write("listen", 1)
                null.write("inject", "reject 1")
                assert error_of(client.write, "connect", 1) == errno.ECONNREFUSED
                client.connect()
                assert client.stats()["pings"] == 50 == server.settle("pings", 50)["pings"], client.stats()
        wait(lambda: not null.qps())


def error_of(function, *args):
    """The error that it fails with."""
    try:
        function(*args)
    except OSError as e:
        return e.errno
    return 0


def held():
    """A completion that is held is missing until it is released, and no owner is lost."""
    with soaking() as (null, load):
        qp = null.holding()
        time.sleep(0.5)
        assert load.poll() is None and null.holds(qp), "it did not wait"
        null.write("inject", "release")
        ends(load)


def refused():
    """A request that is refused comes to the ULP with its error."""
    with soaking() as (null, load):
        null.write("inject", f"refuse 1000 {errno.EDOM}")
        ends(load, os.strerror(errno.EIO))
    assert "a request was refused: EDOM" in log(), "the error is not that of the injection"


def not_created():
    """A CQ that the device does not create."""
    with soaking() as (null, load):
        null.write("inject", f"create cq 0 {errno.ENOSPC}")
        ends(load, os.strerror(errno.ENOSPC))


def failed():
    """A QP that is made to fail flushes its owners."""
    with soaking() as (null, load):
        null.write(f"{null.holding()}/inject", "fail")
        null.write("inject", "release")
        ends(load, os.strerror(errno.EIO))


def removed():
    """A removal waits for the ULP, and the ULP does not notice."""
    with soaking() as (null, load):
        null.write("remove", 1)
        try:
            null.write("remove", 1)
        except OSError as e:
            assert e.errno == errno.EALREADY, e
        assert null.path.exists(), "it did not wait"
        ends(load)
        wait(lambda: not null.path.exists())


def stuck():
    """QPs that cannot be drained at their end stall the removal of their device, until they can be."""
    said = r"could not be drained for \d+ s \(EIO\); trying again"
    for name in ("rdma_rs", "rdma_null"):
        # The first may be there.
        subprocess.run(["insmod", BUILD / f"{name}.ko"], capture_output=True, check=False)
    null = Null("soak")
    load = subprocess.Popen(["insmod", BUILD / "rdma_soak.ko", "completions=20000"])
    wait(lambda: null.path.exists() and null.qps())
    null.write("inject", "modify all")
    wait(lambda: re.search(r"soak: QP \d+ " + said, log()))
    stall = wait(lambda: re.search(r"rdma_soak: removal of soak: waits for .*[1-9] QP\(s\)", log()))
    assert load.poll() is None and null.state()["qps"], "it did not wait"
    # Each is named, and no signal ends the wait.
    num = re.search(r"soak: QP (\d+) " + said, log())[1]
    wait(lambda: re.search(rf"rdma_soak: removal of soak: waits for QP {num}\b.*, made \d+ s ago", log()))
    assert f"rdma_soak: soak: QP {num}" in Path("/sys/kernel/debug/rdma_rs/objects").read_text()
    load.kill()
    wait(lambda: "rdma_soak: removal of soak: no signal ends this wait" in log())
    assert load.poll() is None, "it was ended"
    for verb in (("add", "null1", "type", "null", "netdev", "lo"), ("delete", "null1")):
        subprocess.run(["rdma", "link", *verb], check=True, timeout=30)
    null.write("inject", "modify 0")
    load.wait(timeout=60)
    return stall[0]


CASES = (link, kinds, connections, held, refused, not_created, failed, removed)
