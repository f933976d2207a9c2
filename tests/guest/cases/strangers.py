# SPDX-License-Identifier: GPL-2.0
"""The samples and a peer that is no RDMA device, and sends what it likes."""

import re
import socket
import struct
import subprocess
import time
from contextlib import contextmanager

import roce
from case import SECONDS, STOCK, case, sh
from fuzz import fuzz
from samples import BUILD, UdEcho, module
from stranger import REJ, REP, THERE, UD_SEND, Stranger, cable
from traffic import OBJECTS, listening, serve_one


@contextmanager
def rping(_stranger):
    """Has a server of rping; then a peer in good order is to be served."""
    with listening(addr=THERE) as (server, port):
        yield port, 64, b""
        serve_one(server, port, addr=THERE)


@contextmanager
def rpc(_stranger, calls=60, clients=4):
    """Has the server of rpc, and its clients, which are to be served: they, and one more, are connected."""
    def confirmed():
        states = {*re.findall(r"^rdma_rpc: CM id to .*, (\w+)$", OBJECTS.read_text(), re.M)}
        return "established" in states and states <= {"established", "closed"}

    with subprocess.Popen(["insmod", BUILD / "rdma_rpc.ko", f"calls={calls}", f"clients={clients}"]) as load:
        while load.poll() is None and OBJECTS.read_text().count("rdma_rpc: rxe1: QP") < 2 * (clients + 1):
            time.sleep(0.001)
        # A connection whose confirmation is still to come is given up as a stranger's is.
        while load.poll() is None and not confirmed():
            time.sleep(0.001)
        yield 7177, 8, b""
    assert load.returncode == 0, "the clients of rpc were not served"
    sh("rmmod", "rdma_rpc")


@contextmanager
def kv(stranger):
    """Has a target of kv; then a connection that is confirmed is to be served."""
    port, hello = 7178, struct.pack("!II", 0x6b760001, 32)
    with module("rdma_kv", "connections=0", "memory=4"):
        yield port, 16, hello
        qpn, psn = stranger.connect(port, private=hello)
        # A PUT of one byte, and its reply, which has the same name.
        name = struct.pack("!I", 0x6e616d65)
        stranger.send(4, qpn, psn, name + struct.pack("!HHQIIQ", 2, 0, 1, 1, 0, 0) + b"x")
        end = time.monotonic() + SECONDS / 4
        while not any(opcode == 4 and rest.startswith(name) for opcode, _, _, rest in stranger.answers()):
            assert time.monotonic() < end, "no reply"
            time.sleep(0.01)


def unconfirmed(serving, count):
    """The server has no more than its backlog of unconfirmed connections at once: the others end."""
    accepted, ended = set(), set()
    with cable(), Stranger() as stranger, serving(stranger) as (port, backlog, private):
        for _ in range(count):
            # It wants to have the answers for more than a day.
            stranger.send_mad(stranger.request(port, timeout=31, retries=15, private=private)[0])
        end = time.monotonic() + SECONDS / 2
        # Accepted or not.
        while len(ended) < count - backlog:
            assert time.monotonic() < end, f"{len(accepted)} accepted, {len(ended)} ended"
            for attribute, message in stranger.mads():
                {REP: accepted, REJ: ended}[attribute].add(message[4:8])
            time.sleep(0.01)
        assert len(accepted) > backlog, f"{len(accepted)} accepted"
    return f"{len(accepted)} accepted, {len(ended)} ended"


# With the backlogs of the samples.
case("stranger: requests whose answers it does not confirm", rping, 160)(unconfirmed)
if not STOCK:
    for s, n in (rpc, 40), (kv, 60):
        case(f"stranger: requests to {s.__name__} whose answers it does not confirm", s, n)(unconfirmed)


@case("stranger: each opcode of rxe, with its headers")
def opcodes():
    """Each is sent on a connection of its own; those that name a key, which is none, are refused for that."""
    keyed = {op for op, names in roce.HEADERS.items() if op in roce.RC and {"reth", "atmeth"} & {*names}}
    key, unanswered = 0x5eed00, set(keyed)
    values = {name: (0,) * (len(form) - 1) for name, form in roce.FORMATS.items()}
    # A FLUSH without a type, which needs no access, of all that has the key.
    values |= {"reth": (0, key, 8), "atmeth": (0, key, 0, 0), "feth": (0x10,)}
    with cable(), Stranger() as stranger, listening(addr=THERE) as (server, port):
        # A packet, or its answer, may be lost.
        for opcode in [*roce.HEADERS, *keyed, *keyed]:
            if opcode in keyed and opcode not in unanswered:
                continue
            qpn, psn = stranger.connect(port)
            payload = b"" if opcode in roce.BARE else bytes(roce.MTU if opcode in roce.FULL else 8)
            stranger.send(opcode, qpn, psn, roce.headers(opcode, **values) + payload)
            end = time.monotonic() + (SECONDS / 4 if opcode in keyed else 0.01)
            while time.monotonic() < end and (opcode not in keyed or opcode in unanswered):
                # A remote access error.
                if any(op == roce.ACK and rest[0] == 0x62 for op, _, _, rest in stranger.answers()):
                    unanswered.discard(opcode)
                # With a receive, rxe completes that first, and answers no more once its owner has
                # ended the QP.
                if "immdt" in roce.HEADERS[opcode] and "remote access error" in server.read("reason"):
                    unanswered.discard(opcode)
                time.sleep(0.001)
        serve_one(server, port, addr=THERE)
        assert not unanswered, f"not refused for their keys: {[hex(op) for op in sorted(unanswered)]}"
    return f"{len(roce.HEADERS)} opcodes, {len(keyed)} refused for their keys"


@case("stranger: messages to rpc that break off")
def broken_off(calls=60, slots=10):
    # rxe takes a receive for the first packet, and forgets that when the connection ends; but one
    # of rpc has no room for a whole packet.
    broken = 0
    with cable(), Stranger() as stranger:
        with subprocess.Popen(["insmod", BUILD / "rdma_rpc.ko", f"calls={calls}"]) as load:
            while load.poll() is None:
                connection = stranger.connect(7177)
                if connection:
                    qpn, psn = connection
                    stranger.send(0, qpn, psn, bytes(1024))
                    broken += 1
                time.sleep(0.01)
        assert load.returncode == 0, "the clients of rpc were not served"
        sh("rmmod", "rdma_rpc")
    assert broken > slots, f"only {broken} messages were begun meanwhile"
    return f"{broken} messages"


@case("stranger: a request that leaves a FLUSH no resource")
def no_resource():
    with cable(), Stranger() as stranger, listening(addr=THERE) as (server, port):
        # The request may be lost.
        while not server.stats()["errors"]:
            assert not stranger.connect(port, seconds=1, depth=0), "it was accepted"
        serve_one(server, port, addr=THERE)


def looked_for(arp):
    """The hosts that have been asked for since."""
    asked = set()
    while True:
        try:
            asked.add(arp.recv(64)[38:42])
        except BlockingIOError:
            return asked


@case("stranger: ud_echo looks for no host once it is unloaded")
def no_way_back(hosts=64):
    # To look for a host takes the server a second, and it has room for half of the datagrams.
    key = struct.pack("!II", 0x0ec40ec4, 1)
    arp = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
    with cable(), Stranger() as stranger, arp:
        arp.bind(("stranger", 0))
        arp.setblocking(False)
        with module("rdma_ud_echo"):
            qpn = int((UdEcho("rxe1").path / "server").read_text().split()[1])
            for host in range(100, 100 + hosts):
                stranger.addresses = socket.inet_aton(f"198.51.100.{host}") + socket.inet_aton(THERE)
                stranger.send(UD_SEND, qpn, 0, key + bytes(200))
            time.sleep(1)
            before = looked_for(arp)
        after = looked_for(arp) - before
        assert before, "it has looked for none"
        assert len(after) < hosts // 4, f"it has looked for {len(after)} more"
    return f"{len(before)} before, {len(after)} after"


if not STOCK:
    # The long run is scripts/stress/fuzz.
    for t in "rping", "rpc", "kv", "ud_echo", "replog", "minimal", "mad_ping":
        @case(f"stranger: messages, right and wrong, at {t}", t)
        def messages(target):
            sent, said, _ = fuzz(0, target, 0, 1, 300)
            return f"{sent.total()} sent, {said.total()} answered"
