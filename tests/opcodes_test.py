#!/usr/bin/python3 -B
# SPDX-License-Identifier: GPL-2.0
"""The opcodes that strangers send are those of rxe in the kernel's source.

tests/opcodes_test.py SOURCE"""

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "guest"))
from roce import HEADERS

source = Path(sys.argv[1])
numbers = dict(re.findall(r"IB_OPCODE_(\w+)\s*= (0x\w+)", (source / "include/rdma/ib_pack.h").read_text()))
table = (source / "drivers/infiniband/sw/rxe/rxe_opcode.c").read_text().split("rxe_opcode[RXE_NUM_OPCODE]")[1]
known = {}
for transport, operation, entry in re.findall(r"\[IB_OPCODE_([A-Z]+)_(\w+)\]\s*= \{(.*?)\n\t\},", table, re.S):
    names = (name.lower() for name in re.findall(r"\[RXE_(\w+)\]", entry))
    opcode = int(numbers[transport], 16) | int(numbers[operation], 16)
    known[opcode] = tuple(name for name in names if name not in ("bth", "payload"))
for opcode in sorted(known.keys() | HEADERS):
    if known.get(opcode) != HEADERS.get(opcode):
        sys.exit(f"opcode {opcode:#x} of rxe: {known.get(opcode)}, of strangers: {HEADERS.get(opcode)}")
