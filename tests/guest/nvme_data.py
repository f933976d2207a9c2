# SPDX-License-Identifier: GPL-2.0
"""The cases of data over NVMe over RDMA: sizes, depths, the edges of inline data, queues, what is served."""

import errno
import filecmp
import mmap
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import nvme
from case import BUILD, STOCK, sh
from nvme import File, Load, Loop, Null, Ram, mounted
from nvme_ground import MIB, case, direct, jobs_of, read_at, write_at

TRACING = Path("/sys/kernel/tracing")
DEPTHS = (1, 16, 64)
KIB = 1024
# Sizes, and what is special about their memory.
SIZES = {"512 B": (512, {}), "4 KiB": (4 * KIB, {}), "4 KiB across pages": (4 * KIB, {"mem_align": 512}),
         "16 KiB": (16 * KIB, {}), "64 KiB": (64 * KIB, {}), "128 KiB": (128 * KIB, {}), "1 MiB": (MIB, {})}
EDGES = (512, 3584, 4096, 4608, 16384, 16896)
# What the tool shows of IB_POLL_DIRECT, which had another number when its names were written.
DIRECT = "UNBOUND_WORKQUEUE"


for text, (b, extra) in SIZES.items():
    # 64 MiB under way would take minutes where the kernel is emulated.
    d = DEPTHS if b < MIB else DEPTHS[:-1]

    on = ("rxe", "wire", "siw") if text in ("4 KiB", "64 KiB") else ("rxe", "wire")

    @case(f"{text}, depths {', '.join(map(str, d))}", b, d, extra, links=on)
    def sizes(ground, block, depths, options):
        null = Null()
        with ground.pair(null) as (_, host):
            ground.verify(host.disk(), null, *jobs_of(block, depths), bs=block, **options)


@case("mixed reads and writes of 512 B to 64 KiB")
def mixed(ground):
    with ground.pair() as (_, host):
        ground.fio(host.disk(), rw="randrw", verify="crc32c", bsrange="512-64k", blocksize_unaligned=0, iodepth=32,
                   size="2m", bs=None)


for io_queues in (1, 2):
    @case(f"I/O queues: {io_queues}, two jobs", io_queues, links=("rxe",))
    def queues(ground, number):
        null = Null()
        with ground.pair(null, nr_io_queues=number) as (_, host):
            # Where there are two processors, each job has its queue.
            with Load(host.disk(), size="1m", offset="16m", cpus_allowed="0") as load:
                ground.verify(host.disk(), null, iodepth=16, size="1m", cpus_allowed="1")
                ground.stop(load)


@case("I/O queues: the target's are on one completion vector after the other", links=("rxe",), traced=True,
      defects={("target", "c"): "its CQs are of a pool, which a case before this one may have filled"})
def vectors(ground):
    """A target has the completions of its CQs handled by work items, and a host by softirqs."""
    if not TRACING.is_mount():
        sh("mount", "-t", "tracefs", "tracefs", TRACING)
    event = TRACING / "events/rdma_core/cq_alloc/enable"
    nvme.write(event, 1)
    try:
        with ground.pair(nr_io_queues=2):
            said = (TRACING / "trace").read_text(encoding="ascii")
    finally:
        nvme.write(event, 0)
    found = set(re.findall(r"cq_alloc: .*comp_vector=(\d+) poll_ctx=\w*WORKQUEUE", said))
    assert found >= {"0", "1"}, f"the completion vectors are {found}"


for entries in (16, 128):
    @case(f"queue size {entries}, depth 64", entries)
    def depth_above(ground, number):
        null = Null()
        with ground.pair(null, queue_size=number, nr_io_queues=1) as (_, host):
            ground.verify(host.disk(), null, iodepth=64, size="1m")


@case("io_uring, depth 32", links=("rxe",))
def uring(ground):
    null = Null()
    with ground.pair(null) as (_, host):
        ground.verify(host.disk(), null, ioengine="io_uring", iodepth=32, size="1m")


@case("poll queue, depths 1 and 16", links=("rxe",))
def polled(ground):
    null = Null()
    with ground.pair(null, nr_io_queues=1, nr_poll_queues=1) as (_, host):
        ground.verify(host.disk(), null, *jobs_of(4 * KIB, (1, 16)), ioengine="io_uring", hipri=1)


@case("write queues apart from read queues", links=("rxe",))
def write_queues(ground):
    null = Null()
    with ground.pair(null, nr_io_queues=1, nr_write_queues=1) as (_, host):
        ground.verify(host.disk(), null, iodepth=16, size="1m")


@case("read, write and poll queues at once", links=("rxe",))
def all_queues(ground):
    null = Null()
    with ground.pair(null, nr_io_queues=1, nr_write_queues=1, nr_poll_queues=1) as (_, host):
        for _ in range(2):
            number = int((host.path / "queue_count").read_text(encoding="ascii"))
            assert number == 4, f"there are {number} queues, with that of the admin commands"
            log = sh("dmesg").stdout.rpartition("rdma-rs test: ")[2]
            assert "mapped 1/1/1 default/read/poll queues" in log, "there are other queues"
            said = sh("rdma", "resource", "show", "cq").stdout
            polled = len(re.findall(rf" poll-ctx {DIRECT} .* comm \[nvme_rdma", said))
            assert polled == 1, f"{polled} completion queues are polled"
            with Load(host.disk(), size="1m", offset="16m") as load:
                ground.verify(host.disk(), null, *jobs_of(4 * KIB, (1, 16)), ioengine="io_uring", hipri=1)
                ground.stop(load)
            host.reset()
            ground.figures["resets"] += 1
        ground.verify(host.disk(), null, iodepth=16, size="1m")


@case("page cache, with fsync", links=("rxe",))
def buffered(ground):
    null = Null(cache_size=1)
    with ground.pair(null) as (_, host):
        ground.verify(host.disk(), null, direct=0, ioengine="psync", fsync=16, size="1m", iodepth=1)


def counted(backing, column):
    """What the block layer has counted of a device: 4 completed writes, 11 discards, 15 flushes."""
    return int(Path("/sys/block", backing.device.name, "stat").read_text(encoding="ascii").split()[column])


@case("flush", links=("rxe",))
def flush(ground):
    null = Null(cache_size=1)
    with ground.pair(null) as (_, host):
        before = counted(null, 15)
        ground.fio(host.disk(), rw="randwrite", fsync=1, size="128k")
        assert counted(null, 15) > before, "no flush has come to the backing"


@case("trim", links=("rxe",))
def trim(ground):
    null = Null()
    with ground.pair(null) as (_, host):
        before = counted(null, 11)
        ground.fio(host.disk(), rw="randtrimwrite", verify="crc32c", iodepth=16, size="1m")
        assert counted(null, 11) > before, "no discard has come to the backing"


@case("write zeroes", links=("rxe",))
def zeroes(ground):
    null = Null()
    with ground.pair(null) as (_, host):
        write_at(host.disk(), 0, b"\xff" * MIB)
        sh("blkdiscard", "-z", "-o", "4096", "-l", str(MIB // 2), host.disk())
        for device in (host.disk(), null.device):
            data = read_at(device, 0, MIB)
            assert data == b"\xff" * 4096 + bytes(MIB // 2) + b"\xff" * (MIB // 2 - 4096), f"{device} has other data"


# Buffers of a length that is no power of two are to be aligned, too.
for inline in (0, 600, 4096, 5000, 16384):
    @case(f"inline data size {inline}: {EDGES[0]} to {EDGES[-1]} bytes", inline)
    def inline_edges(ground, size):
        null = Null()
        with ground.pair(null, target={"param_inline_data_size": size}) as (_, host):
            ground.content(host.disk(), null, EDGES, random.Random(size))
            jobs = [{"name": f"bs{block}", "bs": block, "size": 64 * block, "offset": MIB * n}
                    for n, block in enumerate((3584, 4096, 4608))]
            ground.verify(host.disk(), null, *jobs, iodepth=16, bs=None)


@case("largest transfer of the target: 16 KiB")
def mdts(ground):
    null = Null()
    with ground.pair(null, target={"param_mdts": 2}) as (_, host):
        most = int(Path("/sys/block", host.disk().name, "queue/max_hw_sectors_kb").read_text(encoding="ascii"))
        assert most == 16, f"the host sends up to {most} KiB"
        ground.verify(host.disk(), null, bs="64k", iodepth=16, size="4m")


BACKINGS = {"brd": Ram, "file": File, "file in the page cache": lambda: File(buffered=True), "loop": Loop}
for text, make in BACKINGS.items():
    @case(f"backing: {text}", make, links=("rxe",))
    def backings(ground, made):
        backing = made()
        with ground.pair(backing) as (_, host):
            ground.verify(host.disk(), backing, {"name": "small", "bs": "4k", "size": "256k"},
                          {"name": "large", "bs": "128k", "size": "2m", "offset": "4m"}, iodepth=8)


@case("write protection", links=("rxe",))
def write_protection(ground):
    with ground.pair() as (_, host):
        data = random.Random(1).randbytes(64 * KIB)
        write_at(host.disk(), 0, data)
        protect = ["nvme", "set-feature", f"/dev/{host.name}", "--namespace-id=1", "--feature-id=0x84"]
        sh(*protect, "--value=1")
        read_only = Path("/sys/block", host.disk().name, "ro")
        nvme.until(lambda: read_only.read_text(encoding="ascii").strip() == "1", "the disk is not read-only")
        try:
            write_at(host.disk(), 0, bytes(64 * KIB))
        except OSError as e:
            assert e.errno in (errno.EPERM, errno.EROFS, errno.EACCES), e
        else:
            raise AssertionError("a namespace that is write-protected was written to")
        assert read_at(host.disk(), 0, len(data)) == data, "other data are read"
        sh(*protect, "--value=0")
        nvme.until(lambda: read_only.read_text(encoding="ascii").strip() == "0", "the disk is still read-only")
        write_at(host.disk(), 0, data)


@case("shared receive queues: two hosts at once", links=("rxe",))
def shared_receives(ground):
    first, second = Null(), Null()
    with nvme.target_with(ground.end, use_srq=1), ground.pair(first) as (_, one), ground.pair(second) as (_, other):
        assert "comm [nvme" in sh("rdma", "resource", "show", "srq").stdout, "the target has no SRQ"
        with Load(one.disk(), size="1m", offset="16m") as load:
            ground.verify(other.disk(), second, {"name": "small", "bs": "4k"},
                          {"name": "large", "bs": "64k", "offset": "4m"}, iodepth=64, size="1m")
            other.reset()
            ground.figures["resets"] += 1
            ground.stop(load)
        ground.verify(one.disk(), first, iodepth=16, size="512k")


@case("a shared receive queue that is larger than a completion queue can be", links=("rxe",))
def large_shared(ground):
    """The connection's completion queue has an entry for each of its receives."""
    null = Null()
    # Without room for data of commands, which would take much memory.
    with (nvme.target_with(ground.end, use_srq=1, srq_size=1 << 15),
          ground.pair(null, target={"param_inline_data_size": 0}, nr_io_queues=1) as (_, host)):
        assert "comm [nvme" in sh("rdma", "resource", "show", "srq").stdout, "the target has no SRQ"
        ground.verify(host.disk(), null, iodepth=16, size="256k")


for text, n, kept in (("one response in 16 is signaled, and memory of reads is kept", 16, 4096),
                      ("each response is signaled, and no memory of reads is kept", 1, 0)):
    @case(text, n, kept, links=("rxe", "siw"), defects={("target", "c"): "it has no parameters for that"})
    def signaled(ground, interval, size):
        null = Null()
        # With few places in the send queue, large transfers wait for those of responses that are not signaled.
        for srq, options in ((0, {}), (0, {"queue_size": 16}), (1, {"queue_size": 16})):
            with (nvme.target_with(ground.end, sig_limit=interval, kept_data_size=size, use_srq=srq),
                  ground.pair(null, nr_io_queues=1, **options) as (_, host)):
                # The last reads leave some that are not signaled.
                for seed in range(2):
                    ground.verify(host.disk(), null, {"name": "small", "bs": "4k", "size": "256k"},
                                  {"name": "large", "bs": "1m", "offset": "16m", "size": "4m"}, iodepth=32,
                                  randseed=seed)
                    host.reset()
                    ground.figures["resets"] += 1


@case("reads past the end of a file that was cut get no data of another host", links=("rxe", "siw"),
      defects={("target", "c"): "nvmet lets them succeed, and what the pages had before is sent"})
def cut_file(ground):
    """Memory that is kept has what was read on the same connection before, and zeros, here."""
    whole, cut = File(1), File(1)
    with (nvme.target_with(ground.end, kept_data_size=4096), ground.pair(whole, nr_io_queues=1) as (_, one),
          ground.pair(cut, nr_io_queues=1) as (_, other), mmap.mmap(-1, 4096) as buffer):
        write_at(one.disk(), 0, b"\xff" * MIB)
        disk = other.disk()
        os.truncate(cut.device, 2048)
        fd = direct(disk, os.O_RDONLY)
        try:
            # The other connection is there, and then it is not.
            for last in False, True:
                ground.fio(one.disk(), rw="randread", bs="4k", iodepth=32, size="1m")
                if last:
                    one.disconnect()
                for offset in range(4096, MIB, 4096):
                    assert os.preadv(fd, [buffer], offset) == 4096
                    assert not any(buffer[:]), f"other data are read at {offset}"
                    ground.figures["verified"] += 4096
            # What is short fails, and nothing of it is sent.
            buffer[:] = b"\xff" * 4096
            try:
                os.preadv(fd, [buffer], 0)
            except OSError as e:
                assert e.errno == errno.EIO, e
            else:
                raise AssertionError("half a block is read")
            assert buffer[:] == b"\xff" * 4096, "a read that has failed was written"
        finally:
            os.close(fd)


@case("one SEND of the host in 16 is signaled", links=("rxe", "siw"), defects={("host", "c"): "it signals each SEND"})
def few_sends_signaled(ground):
    null = Null()
    # With few tags of blk-mq, commands wait for those whose SENDs are not signaled.
    for limit, options in ((16, {}), (4, {"queue_size": 16}), (16, {"queue_size": 16})):
        with nvme.host_with(ground.host, sig_limit=limit), ground.pair(null, nr_io_queues=1, **options) as (_, host):
            # The last reads leave some that are not signaled.
            for seed in range(2):
                ground.verify(host.disk(), null, {"name": "small", "bs": "4k", "size": "256k"},
                              {"name": "large", "bs": "1m", "offset": "16m", "size": "4m"}, iodepth=32, randseed=seed)
                host.reset()
                ground.figures["resets"] += 1


for limit in (1, 16):
    @case(f"data of writes are copied behind their commands, and one SEND in {limit} is signaled", limit,
          links=("rxe", "siw"), defects={("host", "c"): "it sends them from their pages"})
    def copied(ground, interval):
        # Of the port's size, of less than that, and of more than a command may have.
        for inline, most in ((4096, 4096), (16384, 4096), (512, 4096)):
            null, rng = Null(), random.Random(inline)
            with (nvme.host_with(ground.host, sig_limit=interval, copied_data_size=most),
                  ground.pair(null, target={"param_inline_data_size": inline}, nr_io_queues=1) as (_, host)):
                ground.content(host.disk(), null, EDGES, rng)
                before = counted(null, 11)
                # What gives the place is data of a command, too, in no bio.
                ground.fio(host.disk(), rw="randtrimwrite", verify="crc32c", iodepth=16, size="256k")
                assert counted(null, 11) > before, "no discard has come to the backing"
                jobs = [{"name": f"bs{block}", "bs": block, "size": 64 * block, "offset": MIB * n, "mem_align": 512}
                        for n, block in enumerate((512, 3584, 4096, 4608))]
                ground.verify(host.disk(), null, *jobs, iodepth=32, bs=None)
                host.reset()
                ground.figures["resets"] += 1


@case("two namespaces at once")
def two_namespaces(ground):
    first, second = Null(), Null()
    with ground.pair(first, second) as (_, host):
        with Load(host.disk(1), size="1m", offset="16m") as load:
            ground.verify(host.disk(2), second, bs="16k", iodepth=16, size="2m")
            ground.stop(load)
        ground.verify(host.disk(1), first, iodepth=16, size="512k", randseed=2)
        # Neither has written to the other's.
        assert not any(read_at(second.device, 16 * MIB, MIB)), "the second namespace has the first one's data"


@case("two controllers of two subsystems at once", links=("rxe",))
def two_controllers(ground):
    first, second = Null(), Null()
    with ground.pair(first) as (_, one), ground.pair(second) as (_, other):
        with Load(one.disk(), size="1m", offset="16m") as load:
            ground.verify(other.disk(), second, bs="16k", iodepth=16, size="2m")
            ground.stop(load)
        ground.verify(one.disk(), first, iodepth=16, size="512k")


def same(one, other):
    """Two trees are equal."""
    found = filecmp.dircmp(one, other)
    assert not (found.left_only or found.right_only or found.funny_files), (found.left_only, found.right_only)
    _, differ, unread = filecmp.cmpfiles(one, other, found.common_files, shallow=False)
    assert not differ and not unread, (differ, unread)
    return len(found.common_files) + sum(same(Path(one, name), Path(other, name)) for name in found.common_dirs)


@case("file system: a tree is the same after connecting again, and on the backing")
def file_system(ground):
    tree = BUILD.parent / "tests/guest"
    make = ["mkfs.xfs", "--unsupported", "-K", "-q"] if STOCK else ["busybox", "mke2fs"]
    with Null() as null, ground.target(null) as target:
        with ground.controller(target) as host:
            sh(*make, host.disk())
            with mounted(host.disk()) as folder:
                shutil.copytree(tree, folder / "tree", ignore=shutil.ignore_patterns("__pycache__"))
        with ground.controller(target) as host, mounted(host.disk()) as folder:
            files = same(folder / "tree", tree)
            ground.figures["ios"] += files
        target.disable()
        target.remove(1)
        with mounted(null.device, "-o", "ro") as folder:
            same(folder / "tree", tree)
