# SPDX-License-Identifier: GPL-2.0
"""What the cases of NVMe over RDMA share: how they are declared, the two ends that they are run with, and
what they count."""

import mmap
import os
from contextlib import ExitStack, contextmanager

import nvme
from nvme import Controller, Null, Target

CASES = {}
LOST_QP = "rxe of {} ends its QP 1 for good then (patches/rdma_rxe/0007 and 0012)"
# What a link or a case needs, and the kernels that have it not, with the reason.
MISSING = {"siw": {"stock": "Debian's kernel has no siw"},
           "checkers": {"stock": "Debian's kernel has no faults and no files of nvmet in debugfs",
                        "um-kcsan": "the kernel that looks for data races has no faults"},
           "patched": {"stock": LOST_QP.format("Debian's kernel"), "um-kcsan": LOST_QP.format("this kernel")},
           "traced": dict.fromkeys(("um-debug", "um-kcsan"), "this kernel has no tracing"),
           "bonds": dict.fromkeys(("um-debug", "um-kcsan"), "this kernel has no bonds"),
           "hotplug": dict.fromkeys(("um-debug", "um-kcsan"), "CPUs of this kernel cannot go offline"),
           "plain": {"um-debug": "lockdep reports C's target, and stops"}}
MIB = nvme.MIB


class Case:
    """A case on a link. Defects are why it is not run with an end of a name, by both: ("host", "c"). It may need the
    kernel with checkers, a plain one without, one whose rxe is patched, one that has bonds of interfaces, or tracing,
    or whose CPUs go offline, be one that runs only where it is named, and last for so many seconds on a busy machine.
    """

    def __init__(self, name, function, link, args, defects=None, checkers=False, plain=False, patched=False,
                 bonds=False, traced=False, hotplug=False, named=False, seconds=600):
        self.name, self.function, self.link, self.args, self.defects = name, function, link, args, defects or {}
        words = {"checkers": checkers, "plain": plain, "patched": patched, "bonds": bonds, "traced": traced,
                 "hotplug": hotplug}
        self.needs = [link, *(word for word, needed in words.items() if needed)]
        self.named, self.seconds = named, seconds

    def skipped(self, host, target, kernel):
        """Why it is not run, or an empty string."""
        for need in self.needs:
            if kernel in MISSING.get(need, {}):
                return MISSING[need][kernel]
        for end, name in (("host", host), ("target", target)):
            if (end, name) in self.defects:
                return f"{name.upper()} {end}: {self.defects[end, name]}"
        return ""


def case(name, *args, links=("rxe", "wire"), **how):
    """Declares a case for each link. It fails by raising. `defects` says what an end of a name does wrong in it: it is
    skipped for that."""
    def add(function):
        for link in links:
            full = f"{link}: {name}"
            CASES[full] = Case(full, function, link, args, **how)
        return function
    return add


class Ground:
    """The two ends of a case, and its figures."""

    def __init__(self, link, host, target):
        self.link, self.host, self.end = link, host, target
        self.addr = nvme.LINKS[link]
        self.figures = {"ios": 0, "bytes": 0, "verified": 0, "resets": 0, "reconnects": 0}

    def target(self, *backings, **attributes):
        return Target(*backings, addr=self.addr, **attributes)

    def controller(self, target, **options):
        return Controller(target, self.host, **options)

    @contextmanager
    def pair(self, *backings, target=None, **options):
        """A target and a controller of it, with these backings, or one null_blk device."""
        with ExitStack() as stack:
            backings = [stack.enter_context(backing) for backing in backings or (Null(),)]
            target = stack.enter_context(self.target(*backings, **(target or {})))
            yield target, stack.enter_context(self.controller(target, **options))

    def count(self, job):
        """Adds the figures of a job of fio."""
        for way in ("read", "write", "trim"):
            self.figures["ios"] += job[way]["total_ios"]
            self.figures["bytes"] += job[way]["io_bytes"]
        return job

    def fio(self, disk, *jobs, **options):
        for job in nvme.fio_jobs(disk, *jobs, **options):
            self.count(job)

    def verify(self, disk, backing=None, *jobs, **options):
        """Writes by the host and reads what was written; then reads that from the backing itself."""
        options = {"rw": "randwrite", "verify": "crc32c", **options}
        self.fio(disk, *jobs, **options)
        if backing:
            local = {"ioengine": "libaio", "direct": 1, "hipri": None, "fsync": None, "mem_align": None,
                     "iodepth": 16, "verify_only": 1}
            jobs = [{**job, "iodepth": 16} for job in jobs]
            for done in nvme.fio_jobs(backing.device, *jobs, **{**options, **local}):
                assert done["read"]["io_bytes"], "nothing was verified on the backing"
                self.figures["verified"] += done["read"]["io_bytes"]

    def content(self, disk, backing, sizes, rng):
        """What the host writes is on the backing, and what is written there the host reads, at random offsets."""
        for size in sizes:
            for writer, reader in ((disk, backing.device), (backing.device, disk)):
                offset, data = rng.randrange(64) * 512, rng.randbytes(size)
                write_at(writer, offset, data)
                assert read_at(reader, offset, size) == data, f"{size} bytes at {offset} are not what {writer} wrote"
                self.figures["ios"] += 1
                self.figures["bytes"] += size
                self.figures["verified"] += size

    def broken(self, load):
        """Waits for the end of a load that must have failed, without wrong data; returns how."""
        error = load.broken()
        self.count(load.figures)
        return error

    def stop(self, load):
        """Ends a load that must not have failed."""
        self.count(load.stop())


def direct(path, flags):
    """Opens a device or a file past the page cache."""
    return os.open(path, flags | os.O_DIRECT)


def write_at(path, offset, data):
    with mmap.mmap(-1, len(data)) as buffer:
        buffer[:] = data
        fd = direct(path, os.O_WRONLY)
        try:
            written = os.pwritev(fd, [buffer], offset)
        finally:
            os.close(fd)
    assert written == len(data), f"{written} of {len(data)} bytes were written"


def read_at(path, offset, size):
    with mmap.mmap(-1, size) as buffer:
        fd = direct(path, os.O_RDONLY)
        try:
            read = os.preadv(fd, [buffer], offset)
        finally:
            os.close(fd)
        return buffer[:read]


def jobs_of(block, depths, ios=128, most=2 * MIB):
    """Jobs of these depths, each in a place of its own: so many I/Os, or a number of bytes, but as many I/Os as are
    under way at once."""
    jobs, offset = [], 0
    for depth in depths:
        size = max(min(ios * block, most), depth * block)
        jobs.append({"name": f"depth{depth}", "iodepth": depth, "offset": offset, "size": size})
        offset += size
    return jobs
