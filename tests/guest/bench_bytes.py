# SPDX-License-Identifier: GPL-2.0
"""Bytes that a thread has allocated and that are not freed, by the kernel's own trace events.

A slab counts what all of the kernel does, in whole pages of objects. This counts allocations, one by
one, by the bytes that were asked for: the same objects cost the same each time, whatever they are
rounded up to. Pages that are allocated without kmalloc() and
vmalloc() are not counted."""

import re
import subprocess
from pathlib import Path

TRACING = Path("/sys/kernel/tracing")
ALLOC = re.compile(r": (?:kmalloc|kmem_cache_alloc): call_site=(\S+) .*\bptr=(\S+) bytes_req=(\d+) ")
FREE = re.compile(r": (?:kfree|kmem_cache_free): .*\bptr=(\S+)")
AREA = re.compile(r": alloc_vmap_area: va_start: (\d+) size=(\d+) .*failed=0")
AREA_FREE = re.compile(r": free_vmap_area_noflush: va_start=0x([0-9a-f]+) ")
# By the thread, and freed by anybody.
MADE = ("kmem/kmalloc", "kmem/kmem_cache_alloc", "vmalloc/alloc_vmap_area")
FREED = ("kmem/kfree", "kmem/kmem_cache_free", "vmalloc/free_vmap_area_noflush")
# Caches of the allocator itself, which come and go with what was freed before.
OWN = ("alloc_empty_sheaf", "__pcs_replace_empty_main")


def live(lines):
    """The bytes that these lines of a trace ask for and do not free."""
    sizes = {}
    for line in lines:
        if found := ALLOC.search(line):
            site, ptr, size = found.groups()
            if not any(name in site for name in OWN):
                sizes[ptr] = int(size)
        elif found := AREA.search(line):
            sizes["area", int(found[1])] = int(found[2])
        elif found := FREE.search(line):
            sizes.pop(found[1], None)
        elif found := AREA_FREE.search(line):
            sizes.pop(("area", int(found[1], 16)), None)
    return sum(sizes.values())


def enable(value):
    for event in MADE + FREED:
        (TRACING / "events" / event / "enable").write_text(value)


def begin(thread):
    """Traces what this thread allocates, and each free, from here on."""
    if not (TRACING / "trace").exists():
        subprocess.run(["mount", "-t", "tracefs", "tracefs", TRACING], check=True)
    (TRACING / "buffer_size_kb").write_text("16384")
    # Hashes of two addresses may be the same.
    (TRACING / "options/hash-ptr").write_text("0")
    for event in MADE:
        (TRACING / "events" / event / "filter").write_text(f"common_pid == {thread}")
    (TRACING / "trace").write_text("")
    enable("1")


def end():
    """Ends the trace; the bytes that are allocated by then."""
    enable("0")
    lines = (TRACING / "trace").read_text(errors="replace").splitlines()
    # Every event is in the trace, or its bytes are not exact.
    for stats in (TRACING / "per_cpu").glob("cpu*/stats"):
        lost = dict(line.split(":", 1) for line in stats.read_text().splitlines())
        if int(lost["overrun"]) or int(lost["dropped events"]):
            raise SystemExit(f"bench: the trace has lost events: {lost}")
    return live(lines)
