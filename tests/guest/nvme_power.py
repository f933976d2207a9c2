#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""A host and a target of NVMe over RDMA in two kernels, joined by a serial line, of which one loses its power under
load, for scripts/nvme/power.

On the disk is ext4, whose journal the host replays once it was gone. A target that comes back has all that it has
completed, as /dev/ubda has no cache of its own: the host's file system goes on.

nvme_power survivor|victim host|target END ROUNDS FOLDER: the part of this kernel, its end, the name of that end's
module, and where a file is for each kernel that has lost its power: 0, 1 and so on. The survivor says "ready" when the
other one is to boot, "ended" when it has seen to the other one's end, and "done" with the number of its I/Os. The host
says "flowing" once its load is under way."""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import nvme
import power
from case import sh
from nvme import Load, mounted, until
from nvme_ground import Ground

NQN, TRSVCID, UUID = "rdma-rs-power", 4420, "5c0e6a2e-3f0b-4f7e-9b1d-1f2a3b4c5d6f"
KIB = 1 << 10
# The magic number of ext4, and where it is.
MAGIC, MAGIC_AT = b"\x53\xef", 0x438
# A kernel boots meanwhile, on a busy machine.
PATIENCE = 600
# The line is slow: a keep-alive waits for the data before it.
KEEP_ALIVE = 15


class Disk:
    """A file of the machine that the kernels run on, which has what a kernel has written when that is gone."""

    device = Path("/dev/ubda")
    namespace = {"device_uuid": UUID}


def say(*words):
    print(*words, flush=True)


def flowing(count):
    """Waits for I/Os that are completed after this."""
    before = count()
    until(lambda: count() > before + Load.FLOWING, "no I/O is completed", PATIENCE)


def connect(host):
    """Connects to a target that may not be there yet."""
    def connected():
        try:
            host.connect()
        except subprocess.CalledProcessError:
            time.sleep(0.5)
            return False
        return True
    until(connected, "not connected", PATIENCE)


def has_file_system(disk):
    with disk.open("rb") as raw:
        raw.seek(MAGIC_AT)
        return raw.read(len(MAGIC)) == MAGIC


def replayed(disk):
    """Has the journal of a file system replayed, and the file system looked over."""
    with mounted(disk):
        pass
    sh("e2fsck", "-fn", disk)


def marks(folder):
    """The number of files that kernels have left before they went: each has what was synchronised then."""
    found = list(folder.glob("mark-*"))
    for file in found:
        assert file.read_text(encoding="ascii") == file.name * KIB, f"{file}: not what was written"
    return len(found)


def leave_mark(folder):
    file = folder / f"mark-{marks(folder)}"
    with file.open("w", encoding="ascii") as opened:
        opened.write(file.name * KIB)
        opened.flush()
        os.fsync(opened.fileno())


def load(host, folder):
    """Writes in a file that grows, and has the journal written."""
    return Load(folder / "data", disk=host.disk(), size="2m", iodepth=4, fsync=16, fallocate="none",
                patience=PATIENCE)


def connections():
    return [line for line in nvme.objects() if " type RC " in line]


def serve(survives, rounds, served, folder):
    """The host goes: nothing is left of its connections, and the next one is served."""
    with served:
        while not survives:
            time.sleep(1)
        disk = served.backings[0].device
        for n in range(rounds):
            say("ready")
            # On a slow line it may also lose its connection, and connect again.
            until((folder / f"{n}").exists, "no host has lost its power", PATIENCE)
            until(lambda: not connections(), "connections are left", PATIENCE)
            say("ended", n)
        ios = nvme.completed(disk)
    replayed(disk)
    with mounted(disk) as folder:
        assert marks(folder) == rounds, f"{marks(folder)} marks of {rounds} hosts"
    say("done", ios)


def use(survives, rounds, host):
    """The target goes and comes back, with its disk: the load goes on, and finds what it has written."""
    if survives:
        say("ready")
    connect(host)
    disk = host.disk()
    if has_file_system(disk):
        replayed(disk)
    else:
        sh("mkfs.ext4", "-q", disk)
    with mounted(disk) as folder:
        leave_mark(folder)
        figures = go_on(survives, rounds, host, folder)
    replayed(disk)
    host.disconnect()
    say("done", figures["write"]["total_ios"])


def go_on(survives, rounds, host, folder):
    """A load in the host's file system, over the ends of the target."""
    with load(host, folder) as job:
        if not survives:
            flowing(lambda: nvme.completed(host.disk()))
            assert job.running(), f"the load has ended: {job.end()}"
            say("flowing")
            raise SystemExit(f"the load has ended: {job.end()}")
        for n in range(rounds):
            flowing(lambda: nvme.completed(host.disk()))
            say("flowing")
            host.settle("connecting", PATIENCE)
            say("ended", n)
            say("ready")
            host.settle("live", PATIENCE)
        flowing(lambda: nvme.completed(host.disk()))
        figures = job.stop()
    Ground("rxe", None, None).verify(folder / "after", None, iodepth=8, size="256k")
    return figures


def main():
    me, mine, end, rounds, folder = sys.argv[1:]
    survives, other = me == "survivor", "victim" if me == "survivor" else "survivor"
    power.up(me)
    nvme.load(*((end, None) if mine == "host" else (None, end)))
    with power.line():
        if mine == "target":
            with nvme.Null() if survives else nullcontext(Disk) as backing:
                serve(survives, int(rounds), nvme.Target(backing, addr=power.ADDRS[me], nqn=NQN, trsvcid=TRSVCID),
                      Path("/rdma-rs", folder))
        else:
            served = nvme.Target(Disk, addr=power.ADDRS[other], nqn=NQN, trsvcid=TRSVCID)
            use(survives, int(rounds), nvme.Controller(served, end, reconnect_delay=1, ctrl_loss_tmo=PATIENCE,
                                                       keep_alive_tmo=KEEP_ALIVE, nr_io_queues=2))
        nvme.none_left()
    nvme.unload()
    sh("rdma", "link", "delete", "rxe0")
    for leak in sh("/rdma-rs/tests/guest/leaks").stdout.splitlines():
        Path("/dev/kmsg").write_text(leak + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
