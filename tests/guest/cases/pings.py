# SPDX-License-Identifier: GPL-2.0
"""The smallest ULP, and rping with good peers."""

import errno
import json
import time

from bond import INTERFACES, bond, listener, take_over
from case import BUILD, FLAVOUR, SECONDS, STOCK, case, sh
from demo import PAIRINGS, run
from rping import CONTEXTS, Instance, finish, peer, ports, wait_listening
from traffic import listening, serve_one


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


@case("rping: a link-local address")
def link_local():
    shown = json.loads(sh("ip", "-j", "-6", "addr", "show", "dev", "rdma0").stdout)
    interface = next(it for it in shown if it.get("ifname") == "rdma0")
    local = next(it["local"] for it in interface["addr_info"] if it.get("scope") == "link")
    addr = f"{local}%{interface['ifindex']}"
    port = next(ports)
    with Instance(addr=addr, port=port) as server, Instance(addr=addr, port=port, count=3) as client:
        assert client.read("addr") == addr, client.read("addr")
        server.write("listen", 1)
        client.connect()
        assert client.stats()["pings"] == 3, client.stats()


if STOCK:
    @case("rping: listens again when another interface of a bond takes over")
    def failover(addr="203.0.113.9"):
        with bond(addr), listening(addr=addr) as (server, port):
            serve_one(server, port, addr=addr)
            first = listener(port)
            take_over(INTERFACES[1])
            end = time.monotonic() + SECONDS / 4
            while listener(port) in (first, None):
                assert time.monotonic() < end, f"the listener is {listener(port)}, as {first}: {server.read('reason')}"
                time.sleep(0.05)
            serve_one(server, port, addr=addr)


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


@case("configfs: bad values are refused")
def bad_values():
    with Instance() as it:
        for name, value in (("port", "x"), ("port", 65536), ("size", 0), ("size", 1 << 30),
                            ("context", "hardirq"), ("addr", "300.1.1.1"), ("addr", "x"),
                            ("addr", "fe80::1%rdma0"), ("addr", "192.0.2.1%2"), ("timeout_ms", 0),
                            ("validate", "maybe"), ("count", -1), ("listen", "x"), ("connect", "x")):
            sh("dmesg", "-C")
            try:
                it.write(name, value)
            except OSError as e:
                assert e.errno in (errno.EINVAL, errno.ERANGE), f"{name}={value}: {e}"
            else:
                raise AssertionError(f"{name}={value!r} was taken")
            said = [line for line in sh("dmesg").stdout.splitlines() if "rdma_rping: " in line]
            assert len(said) == 1 and f'{name}: ' in said[0] and f'not "{value}"' in said[0], f"{name}={value}: {said}"
    with listening() as (server, _):
        try:
            server.write("port", 1)
        except OSError as e:
            assert e.errno == errno.EBUSY, e
        else:
            raise AssertionError("the port was changed under a running server")
