# SPDX-License-Identifier: GPL-2.0
"""What NVMe over RDMA looks like on the wire: include/linux/nvme.h, include/linux/nvme-rdma.h."""

import struct
from collections import namedtuple

CAPSULE, COMPLETION, CONNECT_DATA = 64, 16, 1024
FLUSH, WRITE, READ, FABRICS = 0, 1, 2, 0x7f
GET_LOG, IDENTIFY, SET_FEATURES, ASYNC_EVENT, KEEP_ALIVE = 2, 6, 9, 12, 0x18
PROPERTY_SET, CONNECT, PROPERTY_GET, AUTH_SEND, AUTH_RECEIVE = 0, 1, 4, 5, 6
# In the result of Connect: authentication is required.
AUTHREQ = 1 << 17
# Registers.
CAP, VS, CC, CSTS, NSSR = 0, 8, 0x14, 0x1c, 0x20
# The controller may reset its subsystem by the last of them.
CAP_NSSRS = 1 << 36
# Types of scatter entries, and the flag of a command that has one.
INLINE, KEYED, KEYED_INVALIDATE = 0x01, 0x40, 0x4f
METABUF = 0x40
# The entry of a command without data.
NOTHING = bytes(15) + bytes([KEYED])
# Statuses (without the phase tag): the type and the code, and "do not retry".
DNR = 0x4000

Reply = namedtuple("Reply", "result head queue cid status length key")
Command = namedtuple("Command", "opcode flags cid nsid sgl words raw")


def request(qid, depth=32, recfmt=0, hrqsize=None, hsqsize=None, cntlid=0):
    """The private data of a request for a connection."""
    return struct.pack("<HHHHH22x", recfmt, qid, depth if hrqsize is None else hrqsize,
                       depth - 1 if hsqsize is None else hsqsize, cntlid)


def accepted(size, recfmt=0):
    return struct.pack("<HH28x", recfmt, size)


def inline(length, offset=0, kind=INLINE):
    return struct.pack("<QI3xB", offset & (1 << 64) - 1, length, kind)


def keyed(addr, length, key, kind=KEYED):
    return struct.pack("<Q", addr) + length.to_bytes(3, "little") + struct.pack("<IB", key, kind)


def command(opcode, cid, sgl=NOTHING, nsid=0, words=(), flags=METABUF):
    """words: from the tenth on."""
    words = [*words, *(0,) * 6][:6]
    return struct.pack("<BBHI16x16s6I", opcode, flags, cid, nsid, sgl, *words)


def read_write(opcode, cid, sgl, block, blocks, nsid=1, flags=METABUF):
    """A READ or WRITE of so many blocks."""
    return command(opcode, cid, sgl, nsid, (block & 0xffffffff, block >> 32, blocks - 1), flags)


def connect(cid, qid, depth, sgl, kato=0, recfmt=0):
    return struct.pack("<BBHB19x16sHHHBxI12x", FABRICS, METABUF, cid, CONNECT, sgl, recfmt, qid, depth - 1, 0, kato)


def connect_data(subsystem, host, cntlid=0xffff, hostid=bytes(range(16))):
    return struct.pack("<16sH238x256s256s256x", hostid, cntlid, subsystem.encode(), host.encode())


def names(data):
    """Of the data of Connect: the names of the subsystem and of the host."""
    return tuple(name.rstrip(b"\0") for name in struct.unpack("<256x256s256s256x", data))


def prop(kind, cid, offset, value=0):
    """Gets or sets a property: of eight bytes, if it is the first."""
    return struct.pack("<BBHB19x16sB3xIQ8x", FABRICS, METABUF, cid, kind, NOTHING, 1 if offset == CAP else 0, offset,
                       value)


def reply(data, length=COMPLETION, key=0):
    """A completion that was received."""
    result, head, queue, cid, status = struct.unpack("<QHHHH", data[:COMPLETION])
    return Reply(result, head, queue, cid, status >> 1, length, key)


def completion(cid, result=0, status=0, queue=0, head=0):
    return struct.pack("<QHHHH", result, head, queue, cid, status << 1)


def parse(data):
    """A command that was received. Of fabrics' the first word is where others have a namespace."""
    opcode, flags, cid, nsid, sgl = struct.unpack("<BBHI16x16s", data[:40])
    return Command(opcode, flags, cid, nsid, sgl, struct.unpack("<6I", data[40:64]), bytes(data[:64]))


def entry(sgl):
    """A keyed entry: address, length, key, type."""
    return (int.from_bytes(sgl[:8], "little"), int.from_bytes(sgl[8:11], "little"),
            int.from_bytes(sgl[11:15], "little"), sgl[15])
