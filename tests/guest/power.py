#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Two kernels, joined by a serial line, of which one loses its power under traffic, for scripts/stress/storms. On
each a server and a client of rping, in Rust, are connected to those of the other.

power survivor SEED ROUND ROUNDS: says "ready" before each round, "flowing" once data flow both ways, and "ended"
and the bytes that were verified when nothing is left of the connections.
power victim: goes on until the end."""

import random
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

from case import BUILD, FLAVOUR, sh
from rping import CONTEXTS, Instance
from storms import TIMEOUT_MS, connections, until

ADDRS = {"survivor": "198.51.100.1", "victim": "198.51.100.2"}
PORT = 7200


def up(me):
    """Makes an rxe link on one end of a wire, whose other end is joined to the other kernel."""
    sh("modprobe", "-a", "veth", "rdma_rxe", "rdma_ucm")
    sh("mount", "-t", "configfs", "configfs", "/sys/kernel/config")
    sh("ip", "link", "set", "lo", "up")
    sh("ip", "link", "add", "wire0", "type", "veth", "peer", "name", "line0")
    # The peer knows the address that the one before it had.
    sh("ip", "link", "set", "wire0", "address", f"02:00:00:00:00:0{ADDRS[me][-1]}")
    sh("ip", "addr", "add", f"{ADDRS[me]}/24", "dev", "wire0")
    for interface in ("wire0", "line0"):
        sh("ip", "link", "set", interface, "up")
    sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "wire0")


@contextmanager
def line():
    """Has the interface line0 joined to that of the other kernel."""
    relay = subprocess.Popen([sys.executable, "-B", "/rdma-rs/tests/guest/relay.py", "line0", "/dev/ttyS1"])
    try:
        yield
    finally:
        relay.kill()
        relay.wait()


class Pair:
    """A server, and a client that asks until it is connected, and again after each end unless `once`."""

    def __init__(self, me, once, context="softirq"):
        peer = "victim" if me == "survivor" else "survivor"
        attributes = {"port": PORT, "context": context, "timeout_ms": TIMEOUT_MS, "size": 1000}
        self.server = Instance(addr=ADDRS[me], **attributes)
        self.client = Instance(addr=ADDRS[peer], count=0, **attributes)
        self.once = once
        self.thread = threading.Thread(target=self.connect)

    def connect(self):
        while True:
            try:
                self.client.write("connect", 1)
            except OSError:
                pass
            try:
                if self.once and self.client.stats()["pings"]:
                    return
            except FileNotFoundError:
                # The pair has ended.
                return
            time.sleep(0.1)

    def __enter__(self):
        self.server.__enter__()
        self.client.__enter__()
        self.server.write("listen", 1)
        self.thread.start()
        return self

    def __exit__(self, *failed):
        self.client.__exit__(*failed)
        self.server.__exit__(*failed)


def survive(rng):
    # Opened anew each time: bytes that came meanwhile may have stopped the line.
    with line(), Pair("survivor", True, rng.choice(CONTEXTS)) as pair:
        print("ready", flush=True)
        # The other kernel boots meanwhile, which takes long on a busy host.
        until(lambda: pair.server.stats()["pings"] and pair.client.stats()["pings"], "no traffic", 600)
        print("flowing", flush=True)
        # The id of a server's connection asks the peer for long whether it agrees to the end.
        until(lambda: not pair.thread.is_alive() and not any("QP" in c for c in connections()), "no end")
        verified = sum(end.stats()["bytes_verified"] for end in (pair.server, pair.client))
        print(f"ended {verified}", flush=True)
    until(lambda: not connections(), "ids are left")


def main():
    me = sys.argv[1]
    up(me)
    for module in ("rdma_rs", "rdma_rping"):
        sh("insmod", f"{BUILD}/{FLAVOUR}/{module}.ko")
    if me == "victim":
        with line(), Pair(me, False) as pair:
            pair.thread.join()
    seed, first, rounds = map(int, sys.argv[2:])
    for n in range(first, rounds):
        survive(random.Random(f"power {seed} {n}"))
    sh("rmmod", "rdma_rping", "rdma_rs")
    sh("rdma", "link", "delete", "rxe0")
    sh("/rdma-rs/tests/guest/leaks")


if __name__ == "__main__":
    main()
