# SPDX-License-Identifier: GPL-2.0
"""A peer without an RDMA device: it makes each packet of RoCE v2 itself, right or wrong.

It is at the other end of a cable (veth) from the link rxe1. Formats: the InfiniBand specification,
include/rdma/ib_pack.h and include/rdma/ibta_vol1_c12.h."""

import itertools
import socket
import struct
import time
import zlib
from contextlib import contextmanager

from case import sh
from roce import FLUSH, UD_SEND, header_length
from traffic import link

HERE, THERE = "198.51.100.66", "198.51.100.1"
ROCE = 4791
# The manager of connections: its MADs go to QP 1, under a key that all know.
CM_QPN, CM_QKEY = 1, 0x80010000
REQ, MRA, REJ, REP, RTU, DREQ, DREP, SIDR_REQ, SIDR_REP, LAP, APR = range(0x10, 0x1b)
# Service ids of RDMA_PS_TCP, without the port.
TCP = 0x01060000


def gid(addr):
    return bytes(10) + b"\xff\xff" + socket.inet_aton(addr)


@contextmanager
def cable():
    """Has the link rxe1, whose address is THERE, in place of rxe0."""
    link(False)
    sh("modprobe", "veth")
    sh("ip", "link", "add", "rdma1", "type", "veth", "peer", "name", "stranger")
    try:
        sh("ip", "link", "set", "stranger", "address", "02:00:00:00:00:66", "arp", "off", "up")
        sh("ip", "addr", "add", f"{THERE}/24", "dev", "rdma1")
        sh("ip", "link", "set", "rdma1", "up")
        sh("ip", "neigh", "replace", HERE, "lladdr", "02:00:00:00:00:66", "dev", "rdma1")
        sh("rdma", "link", "add", "rxe1", "type", "rxe", "netdev", "rdma1")
        yield
        sh("rdma", "link", "delete", "rxe1")
    finally:
        sh("ip", "link", "delete", "rdma1")
        link()


def put(message, at, form, *values):
    struct.pack_into("!" + form, message, at, *values)


def mad(attribute, fields):
    """A message of the manager: {offset: (format, value...)}."""
    message = bytearray(256)
    put(message, 0, "BBBBHHQHHI", 1, 7, 2, 3, 0, 0, 0, attribute, 0, 0)
    for at, (form, *values) in fields.items():
        put(message, 24 + at, form, *values)
    return message


class Stranger:
    """The peer. numbers: those of its connections and QPs, which no two of a run may share."""

    numbers = itertools.count(0x5eed01)

    def __init__(self):
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
        self.socket.bind(("stranger", 0))
        self.socket.setblocking(False)
        # SO_RCVBUFFORCE: no answer is lost.
        self.socket.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)
        with open("/sys/class/net/rdma1/address", encoding="ascii") as f:
            there = bytes.fromhex(f.read().strip().replace(":", ""))
        self.ethernet = there + bytes.fromhex("020000000066") + b"\x08\0"
        self.addresses = socket.inet_aton(HERE) + socket.inet_aton(THERE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, opcode, qpn, psn, payload, spoil=0):
        """Sends a packet. spoil: what is wrong with its checksum."""
        pad = -len(payload) % 4
        bth = struct.pack("!BBHII", opcode, pad << 4, 0xffff, qpn, 1 << 31 | psn & 0xffffff)
        body = bytes(payload) + bytes(pad)
        length = 8 + len(bth) + len(body) + 4
        udp = struct.pack("!HHH", 0xc000, ROCE, length)
        ip = struct.pack("!BBHHH", 0x45, 0, 20 + length, 0, 0x4000)
        # The fields that routers change count as ones.
        fixed = (b"\xff" * 8 + ip[:1] + b"\xff" + ip[2:] + b"\xff\x11\xff\xff" + self.addresses +
                 udp + b"\xff\xff" + bth[:4] + b"\xff" + bth[5:])
        # rxe knows of no payload in a FLUSH: it takes the BTH for that, and all after it.
        fixed += body[:header_length(FLUSH)] + bth + body if opcode == FLUSH else body
        icrc = struct.pack("<I", zlib.crc32(fixed) ^ spoil)
        total = sum(struct.unpack("!10H", ip + b"\x40\x11\0\0" + self.addresses))
        total = (total & 0xffff) + (total >> 16)
        head = ip + b"\x40\x11" + struct.pack("!H", ~(total + (total >> 16)) & 0xffff)
        self.socket.send(self.ethernet + head + self.addresses + udp + b"\0\0" + bth + body + icrc)

    def send_mad(self, message, spoil=0):
        deth = struct.pack("!II", CM_QKEY, 1)
        self.send(UD_SEND, CM_QPN, 0, deth + bytes(message), spoil)

    def answers(self):
        """What has come since: (opcode, QPN, PSN, what follows) of each packet."""
        while True:
            try:
                frame = self.socket.recv(65536)
            except BlockingIOError:
                return
            if len(frame) >= 58 and frame[23] == 17 and frame[36:38] == struct.pack("!H", ROCE):
                bth = struct.unpack("!BxxxII", frame[42:54])
                yield bth[0], bth[1] & 0xffffff, bth[2] & 0xffffff, frame[54:-4]

    def mads(self):
        """The messages of the manager that have come since: (attribute, what it has)."""
        for opcode, qpn, _, rest in self.answers():
            if opcode == UD_SEND and qpn == CM_QPN and len(rest) >= 8 + 256:
                yield int.from_bytes(rest[24:26], "big"), rest[32:]

    def request(self, port, timeout=20, retries=15, private=b"", depth=1):
        """A request for a connection to a port, with private data, and the number of connection and QP.

        It is to read so many times at once.

        The answer is sent again so often, each time after 4.096 us << timeout."""
        number = next(self.numbers)
        path = (gid(HERE), gid(THERE))
        fields = {
            0: ("I", number), 8: ("Q", TCP | port), 16: ("Q", 0x020000fffe000066),
            32: ("I", number << 8 | 1), 36: ("I", depth), 40: ("I", timeout << 3),
            # The PSN that is expected; one retry, each after 16 ms.
            44: ("I", number << 8 | timeout << 3 | 1),
            48: ("HBB", 0xffff, 3 << 4 | 1, retries << 4),
            52: ("HH16s16s", 0xffff, 0xffff, *path), 93: ("BBB", 64, 0, 12 << 3),
            # The header of rdma_cm: the version of IP, the port, the addresses.
            140: ("BBH16s16s", 0, 4 << 4, 1, *path), 176: (f"{len(private)}s", private),
        }
        return mad(REQ, fields), number

    def connect(self, port, seconds=10, **request):
        """Makes a connection; returns its QP there and the PSN that it expects, or None if it is refused."""
        message, number = self.request(port, **request)
        self.send_mad(message)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for attribute, answer in self.mads():
                theirs, ours = struct.unpack("!II", answer[:8])
                if ours == number and attribute == REP:
                    self.send_mad(mad(RTU, {0: ("II", ours, theirs)}))
                    # Each side tells which PSN it expects, as rdma_cm has it.
                    return int.from_bytes(answer[12:15], "big"), int.from_bytes(answer[20:23], "big")
                if ours == number:
                    return None
            time.sleep(0.01)
        return None
