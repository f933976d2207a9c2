# SPDX-License-Identifier: GPL-2.0
"""The marks that a benchmark sets for what counts its instructions (scripts/benchmark/functions.c)."""

import ctypes
import mmap


def mark():
    """Ends what the plugin of QEMU counts, and begins the next count: mov $MARK, %eax; ret."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as code:
        code.write(b"\xb8rdma\xc3")
        at = ctypes.c_char.from_buffer(code)
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(at))()
        del at
