# SPDX-License-Identifier: GPL-2.0
"""The benchmark's two modules, for the tests in a VM."""

import errno
import os
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from samples import module

# On PREEMPT_RT the softirq CQs of C crash the kernel: Documentation/safety.rst, limits.
TWINS = ("rdma_perf_rs",) if "-rt-" in os.uname().release else ("rdma_perf_rs", "rdma_perf_c")
CONTEXTS = ("direct", "batch", "static", "softirq", "workqueue", "unbound_workqueue")
POLLED = CONTEXTS[:3]
LATENCIES = ("send_lat", "write_lat", "read_lat")
SET_UP = ("connect_rate", "qp_rate", "cq_rate")
ARRAYS = ("queue_rate", "pool_rate")
LOADS = (*LATENCIES, "send_rate", "write_rate", "read_rate", "reg_rate")
NULL = Path("/sys/kernel/debug/rdma_null/null0")

# Arguments that are refused, and the reasons.
BAD = {
    "load": errno.EINVAL,
    "load=": errno.EINVAL,
    "load=walk": errno.EINVAL,
    "pace=1": errno.EINVAL,
    "context=hardirq": errno.EINVAL,
    "size=0": errno.EINVAL,
    "size=65537": errno.EINVAL,
    "load=send_rate size=1048577": errno.EINVAL,
    "depth=0": errno.EINVAL,
    "depth=1025": errno.EINVAL,
    "depth=4 signal=5": errno.EINVAL,
    **{f"load=void_rate context={c} signal=2": errno.EINVAL for c in POLLED},
    **{f"load={load} device=null0 signal=2": errno.EINVAL for load in ARRAYS},
    **{f"load={load} device=null0 context=batch": errno.EINVAL for load in ARRAYS},
    "qps=0": errno.EINVAL,
    "timeout=32": errno.EINVAL,
    "qps=16385": errno.EINVAL,
    "count=0": errno.EINVAL,
    "count=4294967296": errno.EINVAL,
    "count=x": errno.EINVAL,
    "count=1 count=1": errno.EINVAL,
    "addr=300.1.1.1": errno.EINVAL,
    "port=65536": errno.EINVAL,
    "x" * 2000: errno.EINVAL,
    "hold=2": errno.EINVAL,
    "load=send_lat hold=1": errno.EINVAL,
    "load=qp_rate context=direct": errno.EINVAL,
    "device=rxe9": errno.ENODEV,
    "peer=rxe9": errno.ENODEV,
}


class Perf:
    """One of the two, through its files."""

    def __init__(self, name):
        self.path = Path("/sys/kernel/debug") / name

    def run(self, text):
        """Runs what the text says, and returns the errno, or None."""
        fd = os.open(self.path / "run", os.O_WRONLY)
        try:
            written = os.write(fd, text.encode())
        except OSError as e:
            return e.errno
        finally:
            os.close(fd)
        assert written == len(text), f"{written} of {len(text)} bytes were written"
        return None

    def result(self):
        return {k: int(v) for k, v in map(str.split, (self.path / "result").read_text().splitlines())}

    def samples(self):
        return [int(line) for line in (self.path / "samples").read_text().splitlines()]

    def check(self, load, count=20, **keys):
        """Has a run, which is to succeed, and looks at what it says."""
        keys = {"load": load, "count": count, "warmup": 3, **keys}
        text = " ".join(f"{k}={v}" for k, v in keys.items())
        failed = self.run(text)
        assert failed is None, f"{text}: {os.strerror(failed)}"
        result = self.result()
        assert result["ops"] >= count and result["ns"] > 0 and result["errors"] == 0, f"{text}: {result}"
        if load in SET_UP:
            assert result["setup_ns"] > 0 and result["teardown_ns"] > 0, f"{text}: {result}"
        else:
            assert result["posts"] >= count and result["completions"] > 0, f"{text}: {result}"
        if load in LATENCIES:
            samples = self.samples()
            assert len(samples) == count and min(samples) > 0, f"{text}: {samples}"
        return result


def sh(*command):
    subprocess.run(command, check=True, timeout=60)


@contextmanager
def null():
    """Has a null device."""
    with module("rdma_null"):
        sh("rdma", "link", "add", "null0", "type", "null", "netdev", "lo")
        try:
            yield
        finally:
            sh("rdma", "link", "delete", "null0")


def every_load(name, contexts=CONTEXTS, largest=1 << 20):
    """Each load, on the devices that it is for."""
    with null(), module(name):
        perf = Perf(name)
        for context in contexts:
            for load in LOADS:
                perf.check(load, context=context)
            perf.check("connect_rate", count=3, context=context, addr="192.0.2.1")
            perf.check("void_rate", device="null0", context=context)
            polled = context in POLLED
            signal = 1 if polled else 4
            result = perf.check("void_rate", device="null0", context=context, signal=signal, qps=8)
            assert result["posts"] == signal * result["completions"], f"{context}: {result}"
            assert all((result[k] > 0) == polled for k in ("post_ns", "poll_ns")), f"{context}: {result}"
            for load in ARRAYS if context != "batch" else ():
                for count in (3, 100):
                    result = perf.check(load, count=count, device="null0", context=context, qps=4, depth=4)
                    assert result["posts"] == result["completions"], f"{load}, {context}: {result}"
                    assert (result["poll_ns"] > 0) == polled, f"{load}, {context}: {result}"
        perf.check("connect_rate", count=3, addr="2001:db8::1")
        perf.check("connect_rate", count=8, qps=4, addr="192.0.2.1")
        for context in set(contexts) - {*POLLED}:
            for device in ("null0", "rxe0"):
                perf.check("qp_rate", device=device, context=context, qps=8)
                perf.check("cq_rate", device=device, context=context, qps=8)
        perf.check("write_rate", peer="rxe0", size=largest, depth=4, signal=2)
        perf.check("send_rate", depth=4, signal=2, qps=64)


def holding(name):
    """What is held stays until it is let go, and a second run goes on meanwhile."""
    with null(), module(name):
        perf, second = Perf(name), Perf(f"{name}/second")
        for load in ("void_rate", *ARRAYS, "qp_rate", "cq_rate", "connect_rate"):
            device = "rxe0" if load == "connect_rate" else "null0"
            text = f"load={load} device={device} addr=192.0.2.1 qps=4 count=4 warmup=0 hold=1"
            ended = []
            thread = threading.Thread(target=lambda: ended.append(perf.run(text)))
            thread.start()
            while thread.is_alive() and not int((perf.path / "held").read_text()):
                time.sleep(0.01)
            assert not ended, f"{text}: ended with {ended}"
            failed = perf.run("load=send_lat")
            assert failed == errno.EBUSY, f"a second run of the same files: {failed}"
            second.check("void_rate", device="null0")
            (perf.path / "held").write_text("0")
            thread.join(60)
            assert ended == [None], f"{text}: ended with {ended}"
        perf.check("void_rate", device="null0", qps=2048, depth=1, count=4096)


def refusals(name):
    """What is wrong is refused, what fails is said, and the next run is none the worse for it."""
    with null(), module(name):
        perf = Perf(name)
        assert perf.result() == {} and perf.samples() == [], "there is a result before the first run"
        for text, number in BAD.items():
            subprocess.run(["dmesg", "-C"], check=True)
            failed = perf.run(text)
            assert failed == number, f"{text[:80]}: {failed} instead of {number}"
            log = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
            # That in C has another one where it has begun to set up.
            assert log.count(f"{name}: ") in ((1, 2) if name == "rdma_perf_c" else (1,)), f"{text[:80]}: {log}"
        perf.check("send_lat")
        for load in ("void_rate", *ARRAYS, "send_lat", "read_rate", "reg_rate"):
            for context in ("direct", "softirq"):
                (NULL / "inject").write_text("status 12")
                failed = perf.run(f"load={load} device=null0 context={context}")
                assert failed == errno.EIO, f"{load}, {context}: {failed}"
                perf.check(load, device="null0", context=context)


def on_siw(name):
    """Connections are made on iWARP; the other loads connect their QPs by themselves, which it refuses."""
    with module(name):
        perf = Perf(name)
        perf.check("connect_rate", count=3, device="siw0", addr="192.0.2.1")
        failed = perf.run("load=send_lat device=siw0")
        assert failed == errno.EINVAL, f"send_lat: {failed}"
        perf.check("connect_rate", count=8, qps=4, device="siw0", addr="192.0.2.1")


def removal(name):
    """The device's removal waits for the run; and meanwhile there is no other."""
    with module(name):
        perf, ended = Perf(name), []
        thread = threading.Thread(target=lambda: ended.append(perf.run("load=send_lat count=2000")))
        thread.start()
        time.sleep(0.2)
        failed = perf.run("load=send_lat")
        assert failed == errno.EBUSY or ended, f"a second run: {failed}"
        sh("rdma", "link", "delete", "rxe0")
        thread.join(60)
        sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
        assert ended == [None], f"it ended with {ended}"
        perf.check("send_lat")
