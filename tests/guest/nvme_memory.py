# SPDX-License-Identifier: GPL-2.0
"""The cases of NVMe over RDMA in which allocations fail: each place of an action once (tests/faults), in the thread of
the user, then in threads of the kernel; and with seeds, some in any thread. The action is then done without a fault,
and has to succeed."""

import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path

import faults
import faulty
import nvme
from case import BUILD, FLAVOUR, sh
from nvme import Ram
from nvme_ground import case, read_at, write_at

# The longest time of an action on a busy machine, and that after which a command has to fail.
LONGEST, IO_TIMEOUT = 850, 20
SEEDS = 20
# One I/O queue, which connects again soon.
FEW = {"nr_io_queues": 1, "queue_size": 16, "reconnect_delay": 1, "ctrl_loss_tmo": 600}
# Of the places in it, those are alike that are reached by another file: nvme-core makes dozens for each disk.
SHARED = "debugfs_create_file"
TIMEOUTS = Path("/sys/module/nvme_core/parameters")
# A place that has failed, and the modules that its functions are in, as tests/faults prints it.
PLACE = re.compile(r"rdma-rs fault: place (\w+): .*, of(.*)")


@contextmanager
def prepared():
    """Has allocations of slabs fail if the thread says so. Those of pages do not: the kernel reports each."""
    nvme.insert("rdma_faults")
    # What allocates virtual memory reports that, too.
    faults.says("rdma-rs allows: Call Trace:")
    # Said of a page fault of the program, which is tried again.
    faults.says("rdma-rs allows: VM_FAULT_OOM leaked")
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
    count_places(ground)


def count_places(ground):
    """Counts the places that have failed in this case by whose functions have led to them: an end's, else the crate's,
    else the kernel's alone."""
    ends = {"host": nvme.HOSTS[ground.host], "target": nvme.TARGETS[ground.end], "crate": "rdma_rs"}
    counts = dict.fromkeys((*ends, "kernel"), 0)
    for modules in dict(PLACE.findall(sh("dmesg").stdout.rpartition("rdma-rs test: ")[2])).values():
        counts[next((end for end, name in ends.items() if f"[{name.replace('-', '_')}]" in modules), "kernel")] += 1
    ground.figures["places"] = counts


def delete(host):
    """Deletes a controller by the thread that asks for it."""
    with suppress(FileNotFoundError):
        nvme.write(host.path / "delete_controller", 1)


def connected_by(host):
    """Connects by one system call."""
    words = ",".join(f"{name}={value}" for name, value in host.options.items())
    with open(nvme.FABRICS, "r+b", buffering=0) as fabrics:
        fabrics.write(words.encode())


@case("allocations fail: connect", links=("rxe",), checkers=True, seconds=LONGEST)
def connect(ground):
    ram = Ram()
    # Another controller keeps the subsystem: nvme-core deadlocks where it has to drop it (nvme_init_subsystem()).
    with ram, ground.target(ram) as target, ground.controller(target, **FEW) as other, prepared():
        host = ground.controller(target, **FEW)

        def mended():
            for path in nvme.CONTROLLERS.iterdir():
                if path.name != other.name:
                    nvme.write(path / "delete_controller", 1)
            # The fault may have met a thread that served this one.
            other.settle()

        def again():
            with host:
                host.way()

        each_place(ground, lambda: connected_by(host), mended, again)
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


@case("allocations fail: a port is enabled and disabled", links=("rxe",), checkers=True, seconds=LONGEST)
def port(ground):
    ram = Ram()
    with ram, ground.target(ram) as target, prepared():
        def listened():
            target.enable()
            target.disable()

        def again():
            target.enable()
            with ground.controller(target, **FEW) as host:
                ground.verify(host.disk(), ram, iodepth=16, size="256k")
            target.disable()

        target.disable()
        each_place(ground, listened, target.disable, again)
        again()


for of in "host", "target":
    @case(f"allocations fail: the {of}'s module is loaded and unloaded", of, links=("rxe",), checkers=True,
          seconds=LONGEST)
    def module(ground, end):
        name = nvme.HOSTS[ground.host] if end == "host" else nvme.TARGETS[ground.end]
        built = BUILD / FLAVOUR / f"{name}.ko"
        file = built if built.exists() else Path(sh("modinfo", "-n", name).stdout.strip())

        def removed():
            faulty.unload(name.replace("-", "_"))

        def loaded():
            with open(file, "rb") as opened:
                faulty.syscall(faulty.FINIT_MODULE, opened.fileno(), b"", 0)
            removed()

        ram = Ram()
        with ram, prepared():
            removed()
            each_place(ground, loaded, removed)
            nvme.insert(name)
            with ground.target(ram) as target, ground.controller(target, **FEW) as host:
                ground.verify(host.disk(), ram, iodepth=16, size="256k")


# Data with a command, in one piece, and in more pieces than a command has entries of its own.
SIZES = (4096, 1 << 16, 1 << 20)


def moved(disk):
    """Writes and reads. What is read must be what was written."""
    for size in SIZES:
        data = os.urandom(size)
        write_at(disk, 0, data)
        assert read_at(disk, 0, size) == data, f"{size} bytes are not what was written"


def reset_of(host):
    """Resets a controller, and waits until it is live, as threads of the kernel may fail until then."""
    nvme.write(host.path / "reset_controller", 1)
    host.settle()


@case("allocations fail: I/O", links=("rxe",), checkers=True, seconds=LONGEST)
def io(ground):
    ram = Ram()
    with ram, ground.target(ram) as target, ground.controller(target, **FEW) as host, prepared():
        disk = host.disk()
        each_place(ground, lambda: moved(disk), host.settle, lambda: moved(disk))
        ground.verify(disk, ram, iodepth=16, size="256k")


@case("allocations fail: reset", links=("rxe",), checkers=True, seconds=LONGEST)
def reset(ground):
    ram = Ram()
    with ram, ground.target(ram) as target, ground.controller(target, **FEW) as host, prepared():
        disk = host.disk()
        each_place(ground, lambda: reset_of(host), host.settle, lambda: moved(disk))
        ground.verify(disk, ram, iodepth=16, size="256k")


@case("allocations fail: error recovery, and a connection anew", links=("rxe",), checkers=True, seconds=LONGEST)
def reconnect(ground):
    """The target ends the connections by itself."""
    ram = Ram()
    with ram, ground.target(ram) as target, ground.controller(target, **FEW) as host, prepared():
        disk = host.disk()

        def recovered():
            state, = Path("/sys/kernel/debug/nvmet", target.nqn).glob("ctrl*/state")
            nvme.write(state, "fatal")
            nvme.until(lambda: not state.parent.exists(), "the target still has the controller")
            host.settle()

        each_place(ground, recovered, host.settle, lambda: moved(disk))
        ground.verify(disk, ram, iodepth=16, size="256k")


@case(f"allocations fail: in any thread, with the seeds 1 to {SEEDS}", links=("rxe",), checkers=True, seconds=LONGEST)
def anywhere(ground):
    """A connection, I/O and a reset of another controller, and the end of the connection, each with a fault that may
    meet any thread."""
    ram = Ram()
    with ram, ground.target(ram) as target, ground.controller(target, **FEW) as other, prepared():
        disk, host = other.disk(), ground.controller(target, **FEW)

        def new():
            return [path for path in nvme.CONTROLLERS.iterdir() if path.name != other.name]

        def deleted():
            for path in new():
                nvme.write(path / "delete_controller", 1)

        actions = {"connect": lambda: connected_by(host), "I/O": lambda: moved(disk),
                   "reset": lambda: reset_of(other), "delete": deleted}
        fired = dict.fromkeys(actions, 0)
        for seed in range(1, SEEDS + 1):
            for name, action in actions.items():
                faults.says(f"rdma-rs: {name}, seed {seed}")
                came, said = faults.attempt(action, seed=f"{name} {seed}")
                assert "AssertionError" not in said, f"{name}, seed {seed}: {said}"
                fired[name] += came
                other.settle()
            deleted()
            moved(disk)
        assert all(fired.values()), f"no allocation has failed: {fired}"
        ground.figures["faults"] = sum(fired.values())
        with host:
            host.way()
            ground.verify(host.disk(), ram, iodepth=16, size="256k")
