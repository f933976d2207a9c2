#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Messages that a peer can send, right and wrong, at each sample.

fuzz SEED TARGET FIRST COUNT, in a test VM: that many rounds of a thousand messages, from round
FIRST on. What a round sends follows from the seed, the target, the number of the round, and what
has been answered by then. After each round a peer in good order has to be served. Prints a line of
a table."""

import random
import struct
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

import roce
import stranger
from case import sh
from roce import ACK, ATOMIC_WRITE, BARE, FLUSH, FULL, MTU, READ, READ_ANSWER, UD_SEND
from samples import BUILD, MadPing, UdEcho, module
from stranger import (APR, CM_QPN, DREP, DREQ, LAP, MRA, REJ, REP, RTU, SIDR_REP, SIDR_REQ, TCP,
                      THERE, Stranger, cable, mad)
from traffic import listening, serve_one

ROUND = 1000
# The payload that fits into a packet, with every header.
LONGEST = 1300
# The packets of WRITEs: of the first, the last, and the only one.
WRITE_FIRST, WRITE_LAST, WRITE_ONLY = 0x06, (0x08, 0x09), (0x0a, 0x0b)
# Numbers that are wrong more often than others.
EDGES = (0, 1, 4, 16, 255, 1 << 12, 1 << 16, (1 << 16) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


class Connection:
    """What the stranger knows of a connection with the target."""

    def __init__(self, number, theirs, qpn, psn):
        self.number, self.theirs, self.qpn = number, theirs, qpn
        # The one that is expected next.
        self.psn = psn
        # Memory that it has learned of: address, key, length.
        self.memory = (0, 0, 0)
        # What is to come of the WRITE that has begun.
        self.left = 0


class Fuzzer:
    """The stranger, with messages of its own invention at the port of one target."""

    def __init__(self, peer, seed, target):
        self.peer, self.target = peer, target
        self.seed = f"{seed} {target.name}"
        self.random = random.Random(self.seed)
        self.connections, self.early, self.forgotten = {}, {}, Connection(1, 1, 1, 1)
        self.sent, self.said = Counter(), Counter()

    def number(self, bits):
        """Any number of so many bits."""
        some = self.random
        if some.random() < 0.5:
            return some.choice(EDGES) & (1 << bits) - 1
        return some.getrandbits(bits)

    def spoiled(self, message, most=4):
        """The message, often with some bits or bytes changed, sometimes shorter or longer."""
        some, message = self.random, bytearray(message)
        for _ in range(some.choice((0, 0, 1, 1, 2, most))):
            if message:
                at = some.randrange(len(message))
                flipped = message[at] ^ 1 << some.randrange(8)
                message[at] = some.choice((0, 0xff, some.getrandbits(8), flipped))
        if some.random() < 0.1:
            length = some.randrange(min(2 * len(message) + 8, LONGEST))
            message = (message + some.randbytes(length))[:length]
        return message

    def connect(self):
        """Asks for a connection; what comes of it is seen when the answer is here."""
        message, _ = self.peer.request(self.target.port, timeout=self.random.choice((8, 20, 31)),
                                       retries=self.random.randrange(16), private=self.target.hello(self))
        self.peer.send_mad(message)
        self.sent["request"] += 1

    def listen(self):
        """Takes what has come, and answers some of it."""
        for opcode, qpn, psn, rest in self.peer.answers():
            if opcode == UD_SEND and qpn == CM_QPN and len(rest) >= 8 + 256:
                self.manager(int.from_bytes(rest[24:26], "big"), rest[32:])
                continue
            self.said["packets"] += 1
            if qpn in self.connections:
                self.answer(self.connections[qpn], opcode, psn, rest)
            else:
                # The first message of a target may overtake the manager's.
                self.early[qpn] = opcode, psn, rest

    def answer(self, connection, opcode, psn, rest):
        some = self.random
        if opcode == ACK:
            if rest[0] & 0x60 == 0x60:
                self.said["refusals"] += 1
                if rest[0] == 0x60:
                    connection.psn = psn
                else:
                    self.drop(connection)
        elif opcode == READ:
            length = min(int.from_bytes(rest[12:16], "big"), 1024)
            data = struct.pack("!I", connection.number) + some.randbytes(length)
            if some.random() < 0.3:
                data = self.spoiled(data, 0)
            self.packet(connection, READ_ANSWER, psn, data)
        elif some.random() < 0.9:
            if opcode in (4, 5, 0x17) and len(rest) == 16:
                connection.memory = struct.unpack("!QII", rest)
            self.packet(connection, ACK, psn, struct.pack("!I", connection.number & 0xffffff))

    def manager(self, attribute, message):
        self.said[{REP: "accepted", REJ: "rejected"}.get(attribute, "other answers")] += 1
        theirs, ours = struct.unpack("!II", message[:8])
        if attribute == REP and ours not in (c.number for c in self.connections.values()):
            qpn, psn = (int.from_bytes(message[at:at + 3], "big") for at in (12, 20))
            connection = Connection(ours, theirs, qpn, psn)
            if self.random.random() < 0.9:
                self.peer.send_mad(mad(RTU, {0: ("II", ours, theirs)}))
                self.connections[ours & 0xffffff] = connection
                self.said["connections"] += 1
                if ours & 0xffffff in self.early:
                    self.answer(connection, *self.early.pop(ours & 0xffffff))
        elif attribute == DREQ:
            self.connections.pop(ours & 0xffffff, None)
            self.peer.send_mad(mad(DREP, {0: ("II", ours, theirs)}))

    def drop(self, connection):
        self.connections.pop(connection.number & 0xffffff, None)
        self.forgotten = connection
        ids = (connection.number, connection.theirs, connection.qpn << 8)
        self.peer.send_mad(mad(DREQ, {0: ("III", *ids)}))

    def some_connection(self):
        return self.random.choice(list(self.connections.values()) or [self.forgotten])

    def packet(self, connection, opcode, psn, payload):
        self.peer.send(opcode, connection.qpn, psn, payload, self.random.random() < 0.02)

    def send_to_manager(self):
        some, c = self.random, self.some_connection()
        ids, qpn = {0: ("II", c.number, c.theirs)}, (c.number & 0xffffff) << 8
        message = some.choice((
            lambda: self.peer.request(self.target.port, self.number(5), self.number(4),
                                      self.target.hello(self))[0],
            lambda: mad(MRA, {**ids, 8: ("BB", self.number(2) << 6, self.number(5) << 3)}),
            lambda: mad(REJ, {**ids, 8: ("BBH", self.number(2) << 6, 0, some.randrange(40))}),
            lambda: mad(REP, {**ids, 12: ("I", qpn), 20: ("I", qpn)}),
            lambda: mad(RTU, ids),
            lambda: mad(DREQ, {**ids, 8: ("I", c.qpn << 8)}),
            lambda: mad(DREP, ids),
            lambda: mad(SIDR_REQ, {0: ("IHHQ", c.number, 0xffff, 0, TCP | self.target.port)}),
            lambda: mad(SIDR_REP, {0: ("I", c.number)}),
            lambda: mad(LAP, {**ids, 12: ("I", c.qpn << 8)}),
            lambda: mad(APR, ids),
        ))()
        message = self.spoiled(message)
        # Shorter ones are no MADs.
        self.peer.send_mad(message.ljust(256, b"\0")[:256] if some.random() < 0.9 else message,
                           some.random() < 0.02)
        return "manager"

    def send_to_qp(self):
        some, c = self.random, self.some_connection()
        opcode = some.choice((4, 4, 4, 4, *roce.RC, some.choice((*roce.HEADERS, some.getrandbits(8)))))
        payload, length = self.payload(c, opcode)
        addr, key, most = c.memory
        if some.random() < 0.3:
            addr, key, length = map(self.number, (64, 32, 32))
        elif opcode in (READ, FLUSH):
            length = some.choice((0, 1, 8, most, most))
        # The type and the extent of a FLUSH are six bits.
        flush = some.getrandbits(6) if some.random() < 0.9 else self.number(32)
        header = roce.headers(opcode, reth=(addr, key, length), atmeth=(addr, key, self.number(64), self.number(64)),
                              aeth=(self.number(32),), atmack=(self.number(64),), immdt=(self.number(32),),
                              ieth=(key,), feth=(flush,), rdeth=(self.number(24),),
                              deth=(self.number(32), self.number(24)))
        packet = header + payload
        if some.random() < 0.1:
            packet = self.spoiled(packet)
        psn = c.psn if some.random() < 0.9 else self.number(24)
        self.packet(c, opcode, psn, packet)
        # A READ takes as many numbers as its answer has packets.
        c.psn = c.psn + (max(1, -(-length // MTU)) if opcode == READ else 1) & 0xffffff
        return "packets"

    def payload(self, c, opcode):
        """The payload of a packet, and the length that its RETH says."""
        some = self.random
        if opcode == ATOMIC_WRITE:
            return some.randbytes(8), 8
        if opcode in BARE and some.random() < 0.9:
            return b"", 0
        if opcode == WRITE_FIRST:
            c.left = some.choice((MTU + 1, 2 * MTU, 3 * MTU))
            return some.randbytes(MTU), c.left
        if opcode in WRITE_LAST and c.left > MTU:
            return some.randbytes(c.left % MTU or MTU), 0
        if opcode in WRITE_ONLY:
            length = some.choice((0, 1, 8, 64, MTU))
            return some.randbytes(length), length
        if some.random() < 0.8:
            payload = self.spoiled(self.target.message(self))
        else:
            payload = some.randbytes(some.randrange(1100))
        if opcode in FULL and some.random() < 0.8:
            payload = payload.ljust(MTU, b"\0")
        return bytes(payload), len(payload)

    def round(self, number, size):
        """Sends a round of so many messages."""
        self.random = some = random.Random(f"{self.seed} {number}")
        end = self.sent.total() + size
        while self.sent.total() < end:
            if self.target.port and len(self.connections) < 4 and some.random() < 0.1:
                self.connect()
            else:
                self.sent[some.choice(self.target.kinds)(self)] += 1
            if some.random() < 0.02 and self.connections:
                self.drop(self.some_connection())
            if some.random() < 0.2:
                self.listen()
        # Packets in flight are as good as gone.
        time.sleep(0.05)
        self.listen()
        for connection in list(self.connections.values()):
            self.drop(connection)


class Target:
    """A sample: where it listens, what it is sent, and how it serves a peer in good order."""

    port = 0
    kinds = (Fuzzer.send_to_manager, Fuzzer.send_to_qp, Fuzzer.send_to_qp)

    def __init__(self):
        self.name = type(self).__name__.lower()

    def message(self, fuzzer):
        return fuzzer.random.randbytes(16)

    def hello(self, _fuzzer):
        """The private data of a request for a connection."""
        return b""

    def serving(self):
        """Where a round goes on."""
        return nullcontext()

    def there(self):
        """Where all of them go on."""
        return nullcontext()

    def serve(self):
        """Serves a peer in good order."""
        raise NotImplementedError


class Rping(Target):
    """The server of rping."""

    @contextmanager
    def there(self):
        loaded = Path("/sys/module/rdma_rping").exists()
        with nullcontext() if loaded else module("rdma_rping"):
            with listening(addr=THERE) as (self.server, self.port):
                yield

    def message(self, fuzzer):
        size = fuzzer.random.choice((64, 64, 1024, 65536))
        return struct.pack("!QII", fuzzer.number(64), fuzzer.number(32), size)

    def serve(self):
        serve_one(self.server, self.port, addr=THERE)


class Loaded(Target):
    """A sample that serves its own peers, when it is loaded."""

    parameters = ()

    @contextmanager
    def serving(self):
        """Loads it again and again. The stranger may make that fail, but not last."""
        load = f"""while :; do
            timeout 20 insmod {BUILD}/rdma_{self.name}.ko {' '.join(self.parameters)} 2>/dev/null
            rmmod rdma_{self.name} 2>/dev/null
        done"""
        with subprocess.Popen(["bash", "-c", f"trap 'exit' TERM; {load}"]) as loads:
            yield
            loads.terminate()
            loads.wait(60)
        subprocess.run(["rmmod", f"rdma_{self.name}"], capture_output=True, check=False, timeout=60)

    def serve(self):
        with module(f"rdma_{self.name}", *self.parameters):
            pass


class Rpc(Loaded):
    """Calls with data."""

    port, parameters = 7177, ("calls=12",)

    def message(self, fuzzer):
        length, op = fuzzer.random.choice((1, 64, 1024, 65536)), fuzzer.random.choice((1, 2))
        return struct.pack("!QIIII", fuzzer.number(64), fuzzer.number(32), length, op,
                           fuzzer.number(32))


class Replog(Loaded):
    """A log that its leader writes."""

    port, parameters = 7176, ("records=30", "rounds=2")


class Minimal(Loaded):
    """A message."""

    port = 7175

    def message(self, fuzzer):
        return b"hello"


class Kv(Loaded):
    """A store, which takes commands from its peers, and reads and writes the memory that they lend."""

    port, parameters = 7178, ("connections=2", "operations=40", "memory=4")
    GET, PUT = 1, 2
    INLINE, MOST = 512, 128 * 1024

    @contextmanager
    def serving(self):
        """One target is to live through a round."""
        with module("rdma_kv", "connections=0", "memory=4"):
            yield

    def hello(self, fuzzer):
        some = fuzzer.random
        magic = 0x6b760001 if some.random() < 0.95 else fuzzer.number(32)
        return struct.pack("!II", magic, some.choice((1, 32, 32, fuzzer.number(32))))

    def message(self, fuzzer):
        some = fuzzer.random
        op, lent = some.choice((self.GET, self.PUT, self.PUT, some.getrandbits(16))), some.choice((0, 1))
        length = some.choice((1, self.INLINE, self.MOST, fuzzer.number(32)) if lent else
                             (1, 64, self.INLINE, self.INLINE + 1))
        request = struct.pack("!IHHQIIQ", fuzzer.number(32), op, lent, some.randrange(4), length,
                              fuzzer.number(32), fuzzer.number(64))
        return request if lent or op != self.PUT else request + some.randbytes(length)


class Ud_echo(Target):
    """Datagrams."""

    def there(self):
        return module("rdma_ud_echo")

    def send_datagram(self):
        some = self.random
        key = 0x0ec40ec4 if some.random() < 0.9 else self.number(32)
        data = some.randbytes(some.choice((0, 1, 200, 201, 1024)))
        datagram = struct.pack("!II", key, self.number(24)) + self.spoiled(data)
        opcode = UD_SEND | (some.random() < 0.1)
        self.peer.send(opcode, self.target.qpn(), self.number(24), datagram, some.random() < 0.02)
        return "packets"

    kinds = (send_datagram, send_datagram, Fuzzer.send_to_manager)

    def qpn(self):
        return int((UdEcho("rxe1").path / "server").read_text().split()[1])

    def serve(self):
        echo = UdEcho("rxe1")
        before = echo.stats()["echoes"]
        echo.write("ask", 3)
        assert echo.stats()["echoes"] == before + 3, echo.stats()


class Mad_ping(Target):
    """MADs of its own class."""

    def there(self):
        return module("rdma_mad_ping")

    def send_ping(self):
        message = bytearray(256)
        method = self.random.choice((1, 2, 3, 0x81))
        stranger.put(message, 0, "BBBBHHQHHI", 1, 0x31, 1, method, 0, 0, self.number(64),
                     self.number(16), 0, self.number(32))
        stranger.put(message, 36, "I", 0x5e)
        self.peer.send_mad(self.spoiled(message))
        return "manager"

    kinds = (send_ping, send_ping, Fuzzer.send_to_manager)

    def serve(self):
        pings = MadPing("rxe1")
        before, end = pings.stats()["pings"], time.monotonic() + 60
        # It waits 150 ms for an answer, which may be behind what was sent before.
        while pings.stats()["pings"] < before + 3:
            try:
                pings.write("answered", 3)
            except TimeoutError:
                assert time.monotonic() < end, pings.stats()


TARGETS = {t.__name__.lower(): t for t in (Rping, Rpc, Replog, Minimal, Kv, Ud_echo, Mad_ping)}


def fuzz(seed, name, first, rounds, size=ROUND):
    """Sends rounds of messages; returns what was sent, what was answered, and how many peers were served."""
    target, served = TARGETS[name](), 0
    with cable(), target.there(), Stranger() as peer:
        fuzzer = Fuzzer(peer, seed, target)
        for number in range(first, first + rounds):
            with target.serving():
                fuzzer.round(number, size)
            target.serve()
            served += 1
    return fuzzer.sent, fuzzer.said, served


def main():
    seed, name, first, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sh("/rdma-rs/tests/guest/up", "rdma_rs")
    Path("/dev/kmsg").write_text(f"rdma-rs test: fuzz {name}, seed {seed}, from round {first}\n")
    begin = time.monotonic()
    sent, said, served = fuzz(seed, name, first, rounds)
    seconds = time.monotonic() - begin
    sh("rmmod", "rdma_rs")
    sh("/rdma-rs/tests/guest/leaks")
    print(name, first, served, sent.total(), said.total(), said["connections"], said["rejected"],
          said["refusals"], f"{seconds:.0f}", sep="\t")


if __name__ == "__main__":
    main()
