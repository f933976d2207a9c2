#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Networks in trouble, and sudden ends, in a VM.

storms STORM SEED SECONDS FOLDER: the rounds of a storm that the file FOLDER/STORM does not have yet, and for
each a line there, for so many seconds or until one fails. Exits with 0 if there are none left, with 4 if
there are. Without an argument, prints the names of the storms and their rounds."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import perf
import wire
from case import BUILD, FLAVOUR, bound, sh
from rping import CONTEXTS, Instance, finish, peer, ports, wait_listening
from samples import module
from traffic import link
from wire import FAR, NEAR, NETNS

DONE, LATER = 0, 4
OBJECTS = Path("/sys/kernel/debug/rdma_rs/objects")
# The longest time of an end, in seconds, on the slowest machine.
END = 120
# A connection without a peer is to end long before.
TIMEOUT_MS = 4000
# What a userspace rping prints for IBV_WC_RETRY_EXC_ERR.
UNACKNOWLEDGED = "cq completion failed status 12"
LOADS = ("send_rate", "write_rate", "read_rate")
STORMS = {}


def storm(rounds):
    """Declares a storm: a function that has one round and returns its figures."""
    def add(function):
        STORMS[function.__name__] = (rounds, function)
        return function
    return add


def until(done, what, seconds=END):
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not after {seconds} s: {OBJECTS.read_text()}")
        time.sleep(0.02)


def connections():
    """The QPs and ids of connections of rping."""
    return re.findall(r"^rdma_rping: .*(?:QP|CM id to) .*$", OBJECTS.read_text(), re.M)


class Traffic:
    """rping without end on the wire, or on its near end: with Traffic(rng) as traffic: ..."""

    KINDS = ("user client", "user server", "rust")

    def __init__(self, rng, kinds=KINDS):
        self.kind = rng.choice(kinds)
        self.context = rng.choice(CONTEXTS)
        self.size = rng.choice((64, 1000, 4096))
        self.port = next(ports)
        self.stack, self.thread = ExitStack(), None
        self.server = self.client = self.user = None

    def instance(self, **attributes):
        return self.stack.enter_context(Instance(
            port=self.port, size=self.size, context=self.context, timeout_ms=TIMEOUT_MS, **attributes))

    def start_user(self, role, addr):
        command = [*NETNS, "rping", f"-{role}", "-a", addr, "-p", str(self.port), "-C", "1000000",
                   "-S", str(self.size), "-V"]
        self.user = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.stack.callback(self.kill)

    def connect(self):
        try:
            self.client.connect()
        except (OSError, TimeoutError):
            pass

    def __enter__(self):
        with ExitStack() as undo:
            undo.push(self.stack)
            if self.kind == "user server":
                self.start_user("s", FAR)
                wait_listening(self.port, END)
            else:
                self.server = self.instance(addr=NEAR)
                self.server.write("listen", 1)
            if self.kind == "user client":
                self.start_user("c", NEAR)
            else:
                self.client = self.instance(addr=FAR if self.kind == "user server" else NEAR, count=0)
                self.thread = threading.Thread(target=self.connect)
                self.stack.callback(self.stop)
                self.thread.start()
            undo.pop_all()
        return self

    def __exit__(self, *failed):
        return self.stack.__exit__(*failed)

    def stop(self):
        """Stops the client. One that has not begun yet, or begins again, does not find that."""
        end = time.monotonic() + END
        while self.thread.is_alive():
            assert time.monotonic() < end, "the client does not end"
            self.client.write("connect", 0)
            self.thread.join(0.5)

    def kill(self):
        self.user.kill()
        self.user.wait(END)

    def stats(self):
        return (self.client or self.server).stats()

    def flow(self):
        """Waits until data flow."""
        until(lambda: self.stats()["pings"], f"no traffic, {self.kind}")

    def ended(self):
        """Waits for the end of the ends in Rust, and returns the seconds that it took."""
        begin = time.monotonic()
        until(lambda: not connections() and not (self.thread and self.thread.is_alive()),
              f"no end, {self.kind}, {self.context}")
        return time.monotonic() - begin

    def bytes(self):
        return sum(end.stats()["bytes_verified"] for end in (self.client, self.server) if end)


def good(count=3, size=64):
    """A peer in good order is served, on a server of its own."""
    port = next(ports)
    with Instance(addr=NEAR, port=port) as server:
        server.write("listen", 1)
        status, said = finish(peer("client", port, count, size, NEAR, NETNS))
        assert status == 0, f"a good client failed afterwards ({status}): {said}; {server.read('reason')}"
        stats = server.settle("pings", count, END)
        assert stats["pings"] == count, stats
        return {"served": 1, "bytes": stats["bytes_verified"]}


def summed(*parts):
    figures = {}
    for part in parts:
        for key, value in part.items():
            figures[key] = figures.get(key, 0) + value
    return figures


def some_time(rng, traffic, seconds=0.3, early=0.3):
    """Until a random moment: of the way to a connection, or of one that data flow on."""
    if rng.random() >= early:
        traffic.flow()
    time.sleep(rng.uniform(0, seconds))


def is_told(server, seconds=10):
    """Whether a server in userspace learns of the end of its only client; ends it if not.

    A client's id that is destroyed does not send its DREQ again, so the server waits for ever if the
    wire has lost that."""
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        server.terminate()
        finish(server)
        return False
    status, said = finish(server)
    # If the wire has lost the last acknowledgement as well, it sends to a QP that is gone.
    if status and UNACKNOWLEDGED in said:
        return False
    assert status == 0, f"the userspace server failed ({status}): {said}"
    return True


def in_trouble(rng, kind, count=10):
    """Verified data on a wire in trouble: userspace with a server and a client in Rust, and QPs of perf."""
    figures, context = {}, rng.choice(CONTEXTS)
    begin = time.monotonic()
    with wire.trouble(kind, figures), ExitStack() as stack:
        size, port = rng.choice((64, 1000, 4096)), next(ports)
        server = stack.enter_context(Instance(addr=NEAR, port=port, context=context))
        server.write("listen", 1)
        users = [peer("client", port, count, size, NEAR, NETNS, END) for _ in range(3)]
        port = next(ports)
        user = peer("server", port, count, size, FAR, NETNS, END)
        wait_listening(port, END)
        client = stack.enter_context(Instance(addr=FAR, port=port, context=context, count=count, size=size))
        client.connect()
        told = is_told(user)
        assert told or "loss" in wire.TROUBLES[kind], f"{kind}: a server did not learn of the end"
        figures["untold"] = int(not told)
        # One that is disconnected before its time ends well, and prints that.
        said = []
        for user in users:
            status, text = finish(user)
            assert status == 0, f"{kind}: rping failed ({status}): {text}; {server.read('reason')}"
            said.append(text)
        verified = 0
        for end, pings in ((server, 3 * count), (client, count)):
            stats = end.settle("pings", pings, END)
            took = time.monotonic() - begin
            assert stats["pings"] == pings and stats["bytes_verified"] == pings * size, \
                (stats, end.read("reason"), said, f"{took:.1f} s", wire.received())
            verified += stats["bytes_verified"]
        with module("rdma_perf_rs"):
            for load in LOADS:
                perf.Perf("rdma_perf_rs").check(load, count=10 * count, device="near0", peer="far0", timeout=17)
    return {**figures, "bytes": verified, "connections": 4, "operations": 10 * count * len(LOADS),
            "longest": time.monotonic() - begin}


for k in wire.TROUBLES:
    STORMS[k] = (10, lambda rng, kind=k, **options: in_trouble(rng, kind, **options))


@storm(100)
def killed(rng):
    """The peer's process is killed."""
    with Traffic(rng, Traffic.KINDS[:2]) as traffic:
        some_time(rng, traffic)
        traffic.kill()
        figures = {"kills": 1, "longest": traffic.ended(), "bytes": traffic.bytes()}
    return summed(figures, good())


@storm(50)
def deleted(rng):
    """One of the two links is deleted."""
    with Traffic(rng) as traffic:
        some_time(rng, traffic)
        device = "near0" if traffic.kind == "rust" else rng.choice(tuple(wire.ENDS))
        begin = time.monotonic()
        with subprocess.Popen(["rdma", "link", "delete", device]) as deletion:
            figures = {"deletions": 1, "longest": traffic.ended(), "bytes": traffic.bytes()}
            if traffic.user:
                traffic.kill()
            assert deletion.wait(END) == 0, f"{device} was not deleted"
        figures["longest"] = max(figures["longest"], time.monotonic() - begin)
    wire.link(device)
    return summed(figures, good())


@storm(100)
def stopped(rng):
    """A client is stopped."""
    with Traffic(rng, Traffic.KINDS[1:]) as traffic:
        some_time(rng, traffic, 0.1)
        begin = time.monotonic()
        traffic.stop()
        traffic.ended()
        return {"stops": 1, "longest": time.monotonic() - begin, "bytes": traffic.bytes()}


def sample(rng, name, load, few):
    """The link of all clients and the server of a sample is deleted, which ends the loading of the module."""
    # Of several devices it would take any.
    for device in wire.ENDS:
        sh("rdma", "link", "delete", device)
    with subprocess.Popen(["insmod", f"{BUILD}/{FLAVOUR}/{name}.ko", *load],
                          stderr=subprocess.DEVNULL) as insmod:
        until(lambda: f"{name}: rxe0: QP" in OBJECTS.read_text(), "no connection")
        time.sleep(rng.uniform(0, 0.5))
        begin = time.monotonic()
        link(False)
        assert insmod.wait(END), f"{name} was not ended"
        longest = time.monotonic() - begin
    link()
    with module(name, *few):
        pass
    for device in wire.ENDS:
        wire.link(device)
    return {"deletions": 1, "longest": longest, "served": 1}


@storm(50)
def rpc(rng):
    """The link of all clients and the server of rpc is deleted."""
    return sample(rng, "rdma_rpc", ["calls=100000"], ["calls=4"])


@storm(50)
def kv(rng):
    """The link of the initiator and the target of kv is deleted."""
    return sample(rng, "rdma_kv", ["operations=1000000"], ["operations=40"])


@storm(50)
def cut(rng):
    """One end of the wire goes down and comes up again, under rping or under perf."""
    device = rng.choice(tuple(wire.ENDS))
    interface, where = wire.ENDS[device]
    with ExitStack() as stack:
        if rng.random() < 0.2:
            stack.enter_context(module("rdma_perf_rs"))
            load, ended = rng.choice(LOADS), []
            text = f"load={load} device=near0 peer=far0 count=10000000 timeout=14"
            thread = threading.Thread(target=lambda: ended.append(perf.Perf("rdma_perf_rs").run(text)))
            thread.start()
            time.sleep(rng.uniform(0.2, 1))
            sh(*where, "ip", "link", "set", interface, "down")
            begin = time.monotonic()
            thread.join(END)
            assert ended and ended[0], f"perf: {load}: {ended}"
            figures = {"longest": time.monotonic() - begin}
        else:
            traffic = stack.enter_context(Traffic(rng, Traffic.KINDS[:2]))
            # A client that waits for an answer repeats its request for more than a minute.
            some_time(rng, traffic, early=0.1)
            sh(*where, "ip", "link", "set", interface, "down")
            figures = {"longest": traffic.ended(), "bytes": traffic.bytes()}
    sh(*where, "ip", "link", "set", interface, "up")
    # A device that could not send a MAD meanwhile may answer nobody after it: without
    # patches/rdma_rxe/0007 it has lost its QP 1, and once a good peer got no answer with that, too.
    for device in wire.ENDS:
        sh("rdma", "link", "delete", device)
        wire.link(device)
    return summed({"cuts": 1}, figures, good())


@storm(50)
def namespace(rng):
    """The network namespace of the far end is deleted, and the wire with it."""
    with Traffic(rng, Traffic.KINDS[:2]) as traffic:
        some_time(rng, traffic)
        steps = [wire.down, traffic.kill]
        rng.shuffle(steps)
        begin = time.monotonic()
        for step in steps:
            step()
        traffic.ended()
        until(lambda: not wire.devices(), "the devices do not go")
        figures = {"deletions": 1, "longest": time.monotonic() - begin, "bytes": traffic.bytes()}
    wire.up()
    return summed(figures, good())


@storm(50)
def unloaded(rng):
    """The modules are unloaded while peers connect."""
    port, modules = next(ports), ["rdma_rping", "rdma_rs"]
    loop = f"while :; do rping -c -a {NEAR} -p {port} -C 2 -V; sleep 0.05; done"
    with ExitStack() as stack:
        with Instance(addr=NEAR, port=port, context=rng.choice(CONTEXTS)) as server:
            server.write("listen", 1)
            for _ in range(3):
                user = subprocess.Popen([*NETNS, "bash", "-c", loop], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, start_new_session=True)
                stack.callback(user.wait, END)
                stack.callback(os.killpg, user.pid, signal.SIGKILL)
            until(lambda: server.stats()["connections"], "no connection")
            time.sleep(rng.uniform(0, 0.5))
            connected, verified = (server.stats()[key] for key in ("connections", "bytes_verified"))
            begin = time.monotonic()
        sh("rmmod", *modules)
        longest = time.monotonic() - begin
        for name in reversed(modules):
            sh("insmod", f"{BUILD}/{FLAVOUR}/{name}.ko")
    return summed({"unloadings": 1, "connections": connected, "longest": longest, "bytes": verified}, good())


def short(name, seed, rounds, **options):
    """Some rounds, for the suite."""
    figures = [STORMS[name][1](random.Random(f"{name} {seed} {n}"), **options) for n in range(rounds)]
    longest = max(f.pop("longest") for f in figures)
    return f"longest {longest:.1f} s, {summed(*figures)}"


def one_round(name, n, seed):
    """One round: its figures, and why it has failed."""
    # Each round is to have its own warnings.
    Path("/sys/kernel/debug/clear_warn_once").write_text("1")
    Path("/dev/kmsg").write_text(f"rdma-rs test: {name}, round {n}\n")
    bound(f"storms: {name}, round {n}", 5 * END)
    row = {"round": n, "failed": ""}
    try:
        row |= STORMS[name][1](random.Random(f"{name} {seed} {n}"))
    except subprocess.CalledProcessError as e:
        row["failed"] = f"{e}: {(e.stderr or '').strip()}"
    except Exception as e:      # pylint: disable=broad-except
        row["failed"] = f"{type(e).__name__}: {e}"
    signal.alarm(0)
    return row


def main():
    name, seed, seconds, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    progress, rounds, begin = folder / name, STORMS[name][0], time.monotonic()
    done = len(progress.read_text().splitlines()) if progress.exists() else 0
    sh("/rdma-rs/tests/guest/up")
    wire.up()
    while done < rounds and time.monotonic() - begin < seconds:
        row = one_round(name, done, seed)
        with progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        done += 1
        if row["failed"]:
            # An end that is left would be the next one's trouble.
            return LATER
        if done % 10 == 0 or done == rounds:
            print(f"  {name}: {done} of {rounds} rounds", flush=True)
    Path("/dev/kmsg").write_text(f"rdma-rs test: {name}, the end\n")
    wire.down()
    until(lambda: not wire.devices(), "the devices do not go")
    sh("rmmod", "rdma_rping", "rdma_rs")
    sh("/rdma-rs/tests/guest/leaks")
    return DONE if done == rounds else LATER


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(main())
    for storm_name, (how_many, _) in STORMS.items():
        print(storm_name, how_many)
