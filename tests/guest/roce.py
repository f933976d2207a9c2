# SPDX-License-Identifier: GPL-2.0
"""The opcodes of rxe (rxe_opcode[]), and the headers that follow the BTH in the packets of each."""

import struct

# The payload of a full packet.
MTU = 1024
UD_SEND = 0x64
READ, READ_ANSWER, ACK = 0x0c, 0x10, 0x11
COMPARE_SWAP, FETCH_ADD, FLUSH, ATOMIC_WRITE = 0x13, 0x14, 0x1c, 0x1d
# Opcodes of RC.
HEADERS = {
    0x00: (), 0x01: (), 0x02: (), 0x03: ("immdt",), 0x04: (), 0x05: ("immdt",),
    0x06: ("reth",), 0x07: (), 0x08: (), 0x09: ("immdt",), 0x0a: ("reth",), 0x0b: ("reth", "immdt"),
    READ: ("reth",), 0x0d: ("aeth",), 0x0e: (), 0x0f: ("aeth",), READ_ANSWER: ("aeth",), ACK: ("aeth",),
    0x12: ("aeth", "atmack"), COMPARE_SWAP: ("atmeth",), FETCH_ADD: ("atmeth",), 0x16: ("ieth",),
    0x17: ("ieth",), FLUSH: ("feth", "reth"), ATOMIC_WRITE: ("reth",),
}
RC = tuple(HEADERS)
# Those of RC that begin a message, or go on with it, are full; requests without a payload.
FULL, BARE = (0x00, 0x01, 0x06, 0x07), (READ, COMPARE_SWAP, FETCH_ADD, FLUSH)
# UC has the SENDs and WRITEs of these, RD all up to the atomics, and UD two SENDs.
HEADERS |= {0x20 | op: HEADERS[op] for op in range(0x0c)}
HEADERS |= {0x40 | op: ("rdeth", *(() if 0x0d <= op <= 0x12 else ("deth",)), *HEADERS[op]) for op in range(0x15)}
HEADERS |= {UD_SEND: ("deth",), UD_SEND | 1: ("deth", "immdt")}
FORMATS = {"reth": "!QII", "aeth": "!I", "immdt": "!I", "ieth": "!I", "atmeth": "!QIQQ", "atmack": "!Q",
           "feth": "!I", "rdeth": "!I", "deth": "!II"}


def header_length(opcode):
    """How long the headers of a packet are."""
    return sum(struct.calcsize(FORMATS[name]) for name in HEADERS[opcode])


def headers(opcode, **values):
    """The headers of a packet: those of HEADERS, with these values."""
    return b"".join(struct.pack(FORMATS[name], *values[name]) for name in HEADERS.get(opcode, ()))
