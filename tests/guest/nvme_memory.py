# SPDX-License-Identifier: GPL-2.0
"""The cases of NVMe over RDMA in which allocations fail: each place of an action once (tests/faults), in the thread of
the user, then in threads of the kernel. The action is then done without a fault, and has to succeed."""

from contextlib import contextmanager, suppress
from pathlib import Path

import faults
import nvme
from nvme import Ram
from nvme_ground import case

# The longest time of an action on a busy machine, and that after which a command has to fail.
LONGEST, IO_TIMEOUT = 850, 20
# Of the places in it, those are alike that are reached by another file: nvme-core makes dozens for each disk.
SHARED = "debugfs_create_file"
TIMEOUTS = Path("/sys/module/nvme_core/parameters")


@contextmanager
def prepared():
    """Has allocations of slabs fail if the thread says so. Those of pages do not: the kernel reports each."""
    nvme.insert("rdma_faults")
    # What allocates virtual memory reports that, too.
    faults.says("rdma-rs allows: Call Trace:")
    faults.prepare()
    nvme.write(faults.PLACES / "shared", SHARED)
    nvme.write("/sys/kernel/debug/fail_page_alloc/min-order", 20)
    before = {name: (TIMEOUTS / name).read_text(encoding="ascii") for name in ("io_timeout", "admin_timeout")}
    for name in before:
        nvme.write(TIMEOUTS / name, IO_TIMEOUT)
    try:
        yield
    finally:
        for name, value in before.items():
            nvme.write(TIMEOUTS / name, value)
        # What has failed in one case is to fail in the next as well.
        nvme.write(faults.PLACES / "known", "\n")


def each_place(ground, action, mended, again=None, every=8):
    """Has an action meet each place. After each fault what is left is mended, and after some `again` has to succeed."""
    for nth in faults.EACH.values():
        fired = True
        while fired:
            fired, said = faults.attempt(action, nth)
            assert "AssertionError" not in said, said
            mended()
            ground.figures["faults"] = ground.figures.get("faults", 0) + fired
            if again and (not fired or ground.figures["faults"] % every == 0):
                again()


def delete(host):
    """Deletes a controller by the thread that asks for it."""
    with suppress(FileNotFoundError):
        nvme.write(host.path / "delete_controller", 1)


@case("allocations fail: connect", links=("rxe",), checkers=True, seconds=LONGEST)
def connect(ground):
    ram, few = Ram(), {"nr_io_queues": 1, "queue_size": 16, "reconnect_delay": 1, "ctrl_loss_tmo": 600}
    # Another controller keeps the subsystem: nvme-core deadlocks where it has to drop it (nvme_init_subsystem()).
    with ram, ground.target(ram) as target, ground.controller(target, **few) as other, prepared():
        host = ground.controller(target, **few)
        words = ",".join(f"{name}={value}" for name, value in host.options.items())

        def connected():
            with open(nvme.FABRICS, "r+b", buffering=0) as fabrics:
                fabrics.write(words.encode())

        def mended():
            for path in nvme.CONTROLLERS.iterdir():
                if path.name != other.name:
                    nvme.write(path / "delete_controller", 1)
            # The fault may have met a thread that served this one.
            other.settle()

        def again():
            with host:
                host.way()

        each_place(ground, connected, mended, again)
        with host:
            ground.verify(host.disk(), ram, iodepth=16, size="256k")


@case("allocations fail: disconnect", links=("rxe",), checkers=True, seconds=LONGEST)
def disconnect(ground):
    ram = Ram()
    with ram, ground.target(ram) as target, prepared():
        host = ground.controller(target, nr_io_queues=1, queue_size=16)

        def mended():
            host.disconnect()
            host.connect()
            # The disk may still have been there, without a path.
            host.way()

        mended()
        each_place(ground, lambda: delete(host), mended)
        ground.verify(host.disk(), ram, iodepth=16, size="256k")
        host.disconnect()
