# SPDX-License-Identifier: GPL-2.0
"""What is done while allocations fail: loading, links, connections, transfers, suites of KUnit."""

import ctypes
import os
import socket
import struct
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

from perf import LOADS, SET_UP, Perf
from rping import Instance, finish, peer, ports
from samples import BUILD, MadPing, UdEcho

ACTIONS = []
KUNIT = Path("/sys/kernel/debug/kunit")
RDMA_KUNIT = Path("/sys/module/rdma_kunit/parameters")
LIBC = ctypes.CDLL(None, use_errno=True)
FINIT_MODULE, DELETE_MODULE = 313, 176

# include/uapi/rdma/rdma_netlink.h
NETLINK_RDMA = 20
NEWLINK, DELLINK = 5123, 5124
DEV_INDEX, DEV_NAME, NDEV_NAME, LINK_TYPE = 1, 2, 51, 65
REQUEST_ACK = 5


def action(name, *args, keeps=()):
    """Declares an action: a context that has everything there and yields what is to be done. The modules
    that it keeps are not loaded and unloaded for each fault."""
    def add(function):
        ACTIONS.append((name, contextmanager(function), args, ("rdma_rs", *keeps)))
        return function
    return add


def syscall(number, *args):
    if LIBC.syscall(number, *args) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def load(name, params=""):
    with open(BUILD / f"{name}.ko", "rb") as module:
        syscall(FINIT_MODULE, module.fileno(), params.encode(), 0)


def is_loaded(name):
    return Path("/sys/module", name, "initstate").exists()


def unload(name):
    """A fault may have kept it out."""
    if is_loaded(name):
        syscall(DELETE_MODULE, name.encode(), os.O_NONBLOCK)


def netlink(command, **attributes):
    """Has iproute2's request done in this thread, and no other work with it."""
    body = b""
    for kind, value in attributes.items():
        data = struct.pack("=I", value) if isinstance(value, int) else value.encode() + b"\0"
        data = struct.pack("=HH", 4 + len(data), globals()[kind]) + data
        body += data + bytes(-len(data) % 4)
    message = struct.pack("=IHHII", 16 + len(body), command, REQUEST_ACK, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_RDMA) as sock:
        sock.send(message)
        error = struct.unpack_from("=i", sock.recv(4096), 16)[0]
    if error:
        raise OSError(-error, os.strerror(-error))


def index(name):
    said = subprocess.run(["rdma", "dev"], check=True, capture_output=True, text=True).stdout
    for line in said.splitlines():
        number, this = line.split(":")[:2]
        if this.strip() == name:
            return int(number)
    raise FileNotFoundError(f"{name} is not in {said}")


def has_link(name):
    return Path("/sys/class/infiniband", name).exists()


def add_link(name, kind, netdev):
    netlink(NEWLINK, DEV_NAME=name, LINK_TYPE=kind, NDEV_NAME=netdev)


def delete_link(name):
    if has_link(name):
        subprocess.run(["rdma", "link", "delete", name], check=True, timeout=90)


@contextmanager
def modules(*names):
    """Has modules loaded that are not, without faults."""
    loaded = []
    try:
        for name in names:
            if not is_loaded(name):
                load(name)
                loaded.append(name)
        yield
    finally:
        for name in reversed(loaded):
            unload(name)


# Module, what it is loaded with, and what has to be there.
LOADED = (("rdma_rs", ""), ("rdma_null", ""), ("rdma_rping", ""), ("rdma_mad_ping", ""),
          ("rdma_ud_echo", ""), ("rdma_perf_rs", ""), ("rdma_minimal", "context=1"),
          ("rdma_rpc", "clients=2 calls=3"), ("rdma_replog", "records=4 rounds=2"),
          ("rdma_kv", "connections=2 operations=4 memory=8"))

for m in LOADED:
    @action(f"load {m[0]}", *m)
    def loading(name, params):
        with ExitStack() as stack:
            if name not in ("rdma_rs", "rdma_null"):
                stack.enter_context(modules("rdma_rs"))
            unload(name)
            stack.callback(unload, name)
            yield lambda: load(name, params)

    @action(f"unload {m[0]}", *m)
    def unloading(name, params):
        with ExitStack() as stack:
            if name not in ("rdma_rs", "rdma_null"):
                stack.enter_context(modules("rdma_rs"))
            unload(name)
            stack.callback(unload, name)
            load(name, params)
            yield lambda: unload(name)

CLIENTS = ("rdma_null", "rdma_rping", "rdma_mad_ping", "rdma_ud_echo", "rdma_perf_rs")

for k, dev in (("rxe", "rdma7"), ("null", "lo")):
    @action(f"add a link of {k}", k, dev, keeps=CLIENTS)
    def adding(kind, netdev):
        try:
            yield lambda: add_link("fault0", kind, netdev)
        finally:
            delete_link("fault0")

    @action(f"delete a link of {k}", k, dev, keeps=CLIENTS)
    def deleting(kind, netdev):
        add_link("fault0", kind, netdev)
        try:
            number = index("fault0")
            yield lambda: netlink(DELLINK, DEV_INDEX=number)
        finally:
            delete_link("fault0")


@action("rping: make an instance", keeps=["rdma_rping"])
def instance_made():
    it = Instance(port=next(ports))
    try:
        yield it.path.mkdir
    finally:
        if it.path.exists():
            it.path.rmdir()


@action("rping: listen, and stop", keeps=["rdma_rping"])
def instance_listens():
    def listen_and_stop():
        server.write("listen", 1)
        server.write("listen", 0)

    with Instance(port=next(ports)) as server:
        yield listen_and_stop


for c in ("direct", "workqueue"):
    @action(f"rping: connect, transfer, end, {c}", c, keeps=["rdma_rping"])
    def client(context):
        common = {"port": next(ports), "context": context, "timeout_ms": 2000}
        with Instance(**common) as server, Instance(count=3, **common) as it:
            server.write("listen", 1)
            yield lambda: it.write("connect", 1)


@action("rping: serve a client in user space", keeps=["rdma_rping"])
def served():
    def ping():
        status, said = finish(peer("client", port, 3))
        if status:
            raise OSError(status, said)

    port = next(ports)
    with Instance(port=port, timeout_ms=2000) as server:
        server.write("listen", 1)
        yield ping


for w in (*LOADS, "call_rate", "tag_rate", "rw_read_rate", "rw_write_rate", *SET_UP):
    @action(f"perf: {w}", w, keeps=["rdma_null", "rdma_perf_rs"])
    def perf(what):
        def run():
            failed = Perf("rdma_perf_rs").run(text)
            if failed:
                raise OSError(failed, os.strerror(failed))

        text = f"load={what} count=4 warmup=1"
        with ExitStack() as stack:
            if what.startswith("rw_"):
                text += " context=direct device=null0"
                add_link("null0", "null", "lo")
                stack.callback(delete_link, "null0")
            elif what == "connect_rate":
                text += " addr=192.0.2.1"
            elif what in SET_UP:
                text += " device=rxe0 qps=2"
            yield run


@action("ud_echo: ask", keeps=["rdma_ud_echo"])
def asks():
    yield lambda: UdEcho().write("ask", 5)


@action("mad_ping: ping", keeps=["rdma_mad_ping"])
def pings():
    yield lambda: MadPing().write("answered", 3)


def suites():
    """The suites in tests/kunit, by the names that KUnit knows them by."""
    source = Path("/rdma-rs/tests/kunit")
    found = []
    for path in sorted(source.glob("*/*.rs")):
        if path.parent.name == "timeouts":
            continue
        _, has, rest = path.read_text(encoding="utf-8").partition("#[kunit_tests(")
        if has:
            found.append(rest.partition(")")[0])
    return found


@contextmanager
def suite(name):
    """Has a suite loaded, which runs it once without faults; yields what runs it with a fail-nth.

    With zero it has all cases run again the next time, also those in which nothing has failed."""
    def run(fault, nth):
        (RDMA_KUNIT / "nth").write_text(str(nth), encoding="ascii")
        if not nth:
            return 0
        # Cases take them away.
        for i in range(7):
            if not has_link(f"rxe{i}"):
                add_link(f"rxe{i}", "rxe", f"rdma{i}")
        (RDMA_KUNIT / "fault").write_text(fault, encoding="ascii")
        (KUNIT / name / "run").write_text("1", encoding="ascii")
        return int((RDMA_KUNIT / "fired").read_text(encoding="ascii"))

    Path("/sys/module/kunit/parameters/filter_glob").write_text(name, encoding="ascii")
    try:
        with modules("rdma_rs", "rdma_null", "rdma_kunit"):
            yield run
    finally:
        for i in range(1, 7):
            delete_link(f"rxe{i}")
