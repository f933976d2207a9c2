# SPDX-License-Identifier: GPL-2.0
"""The links, and the rping module at work on them."""

import threading
import time
from contextlib import contextmanager
from pathlib import Path

from case import sh
from rping import ADDR, Instance, finish, peer, ports

OBJECTS = Path("/sys/kernel/debug/rdma_rs/objects")


def link(add=True):
    if add:
        sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
    else:
        sh("rdma", "link", "delete", "rxe0")


def siw_link(add=True):
    """On the interface of the rxe link, which is not there meanwhile."""
    if add:
        sh("rdma", "link", "add", "siw0", "type", "siw", "netdev", "rdma0")
    else:
        sh("rdma", "link", "delete", "siw0")


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


def link_delete(context, change=link):
    """Deletes the link under traffic, and adds it again: clients are served as before."""
    with traffic(context) as (client, server):
        change(False)
        reason = client.wait_reason()
        server.wait_reason()
    change()
    with listening(context=context) as (server, port):
        serve_one(server, port)
    return reason


def no_connection():
    """Waits until no QP is left."""
    for _ in range(300):
        if "QP" not in OBJECTS.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"still there: {OBJECTS.read_text()}")
