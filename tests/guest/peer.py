# SPDX-License-Identifier: GPL-2.0
"""A peer that does what it is told (peer.c), and its memory, of which each byte has an owner."""

import subprocess
from collections import namedtuple

from case import PROGRAMS

CANARY, PAGE = 0xc5, 4096

Event = namedtuple("Event", "connection name status data")
Completion = namedtuple("Completion", "opcode place status length key")
# Opcodes of completions (enum ibv_wc_opcode), and a status (enum ibv_wc_status).
WRITE, READ, RECEIVE = 1, 2, 128
SUCCESS = 0


class PeerError(Exception):
    """What the peer could not do."""


def unhex(word):
    return b"" if word == "-" else bytes.fromhex(word)


class Buffer:
    """A part of a peer's memory, with canaries before and behind it."""

    def __init__(self, peer, place, length):
        self.peer, self.place, self.length = peer, place, length

    @property
    def addr(self):
        return self.peer.base + self.place

    def register(self, access="rw"):
        """Lets the other side have it; returns the key."""
        return int(self.peer.tell("reg", self.place, self.length, access))

    def put(self, data, at=0):
        if data:
            self.peer.tell("put", self.place + at, len(data), bytes(data).hex())

    def get(self, length=None, at=0):
        return unhex(self.peer.tell("get", self.place + at, self.length if length is None else length))

    def fill(self, byte):
        self.peer.tell("fill", self.place, self.length, byte)

    def holds(self, byte):
        """Whether all of it is this byte."""
        return self.peer.tell("check", self.place, self.length, byte).split()[0] == "0"


class Peer:
    """The process. Its memory outside of buffers is to stay as it is, which its end checks."""

    def __init__(self, size=1 << 23):
        self.process = subprocess.Popen([PROGRAMS / "peer", str(size)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, bufsize=1)
        self.base = int(self.process.stdout.readline().split()[1])
        self.size, self.buffers, self.end = size, [], PAGE
        self.tell("fill", 0, size, CANARY)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None and self.process.returncode is None:
                self.check_canaries()
        finally:
            self.close()

    def reset(self):
        """Forgets all buffers, as one does once nothing is posted."""
        self.check_canaries()
        self.buffers, self.end = [], PAGE
        self.tell("fill", 0, self.size, CANARY)

    def close(self):
        """Ends without a word to the other side."""
        self.process.kill()
        self.process.wait()

    def order(self, *words):
        """Gives a command whose answer is taken later."""
        try:
            self.process.stdin.write(" ".join(map(str, words)) + "\n")
        except (BrokenPipeError, ValueError):
            raise PeerError("the peer has ended") from None

    def answer(self):
        said = self.process.stdout.readline().strip()
        if said.startswith("error") or not said:
            raise PeerError(said or "the peer has ended")
        return said

    def tell(self, *words):
        self.order(*words)
        return self.answer()

    def buffer(self, length):
        """A buffer, whose first byte is that of a page."""
        buffer = Buffer(self, self.end, length)
        self.end += -(-length // PAGE) * PAGE + PAGE
        assert self.end <= self.size, "the peer has too little memory"
        self.buffers.append(buffer)
        return buffer

    def check_canaries(self):
        begin = 0
        for place, length in [(b.place, b.length) for b in self.buffers] + [(self.size, 0)]:
            count, first = map(int, self.tell("check", begin, place - begin, CANARY).split())
            assert count == 0, f"{count} bytes outside of all buffers have changed, the first at {first:#x}"
            begin = place + length

    def event(self, connection, ms=10000):
        number, name, status, data = self.tell("event", connection, ms).split()
        return Event(int(number), name, int(status), unhex(data))

    def poll(self, connection, ms=10000):
        said = self.tell("poll", connection, ms)
        return None if said == "none" else Completion(*map(int, said.split()))

    def connect(self, addr, port, private=b"", depth=128, rnr=7):
        """Asks for a connection; returns its number. With a depth of 0 it is never confirmed."""
        return int(self.tell("connect", addr, port, private.hex() or "-", depth, rnr))

    def listen(self, addr, port):
        self.tell("listen", addr, port)

    def request(self, ms=10000):
        """The next connection that the other side asks for."""
        number, name, status, data = self.tell("request", ms).split()
        return Event(int(number), name, int(status), unhex(data))
