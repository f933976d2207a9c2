#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""A host and a target of NVMe over RDMA in two kernels, joined by a serial line, of which one loses its power under
load, for scripts/nvme-power.

nvme_power survivor|victim host|target END ROUNDS FILE: the part of this kernel, its end and the name of that end's
module, and the file that is the target's disk. The survivor says "ready" when the other one is to boot, "flowing" once
I/Os are completed, "ended" when it has seen to the other one's end, and "done" with the number of its I/Os."""

import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import nvme
import power
from case import sh
from nvme import Load, until
from nvme_ground import Ground

NQN, TRSVCID, UUID = "rdma-rs-power", 4420, "5c0e6a2e-3f0b-4f7e-9b1d-1f2a3b4c5d6f"
# A kernel boots meanwhile, on a busy machine.
PATIENCE = 600
# The line is slow: a keep-alive waits for the data before it.
KEEP_ALIVE = 15


class Disk:
    """A file of the machine that the kernels run on. Of what is written through, nothing is lost with a kernel."""

    namespace = {"buffered_io": 1, "device_uuid": UUID}

    def __init__(self, file):
        self.device = Path("/rdma-rs", file)


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


def load(host):
    return Load(host.disk(), sync="dsync", size="2m", iodepth=4)


def connections():
    return [line for line in nvme.objects() if " type RC " in line]


def serve(survives, rounds, served):
    """The host goes: nothing is left of its connections, and the next one is served."""
    with served:
        while not survives:
            time.sleep(1)
        disk = served.backings[0].device
        for n in range(rounds):
            say("ready")
            flowing(lambda: nvme.completed(disk))
            say("flowing")
            until(lambda: not connections(), "connections are left", PATIENCE)
            say("ended", n)
        say("done", nvme.completed(disk))


def use(survives, rounds, host):
    """The target goes and comes back, with its disk: the load goes on, and finds what it has written."""
    if survives:
        say("ready")
    connect(host)
    with load(host) as job:
        if not survives:
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
    Ground("rxe", None, None).verify(host.disk(), None, sync="dsync", iodepth=8, size="256k", offset="4m")
    host.disconnect()
    say("done", figures["write"]["total_ios"])


def main():
    me, mine, end, rounds, file = sys.argv[1:]
    survives, other = me == "survivor", "victim" if me == "survivor" else "survivor"
    power.up(me)
    nvme.load(*((end, None) if mine == "host" else (None, end)))
    with power.line():
        if mine == "target":
            # The memory of a target that survives is as good as a file.
            with nvme.Null() if survives else nullcontext(Disk(file)) as backing:
                serve(survives, int(rounds), nvme.Target(backing, addr=power.ADDRS[me], nqn=NQN, trsvcid=TRSVCID))
        else:
            served = nvme.Target(Disk(file), addr=power.ADDRS[other], nqn=NQN, trsvcid=TRSVCID)
            use(survives, int(rounds), nvme.Controller(served, end, reconnect_delay=1, ctrl_loss_tmo=PATIENCE,
                                                       keep_alive_tmo=KEEP_ALIVE, nr_io_queues=2))
        nvme.none_left()
    nvme.unload()
    sh("rdma", "link", "delete", "rxe0")
    for leak in sh("/rdma-rs/tests/guest/leaks").stdout.splitlines():
        Path("/dev/kmsg").write_text(leak + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
