# SPDX-License-Identifier: GPL-2.0
"""The cases of the order in which what an end consists of goes: modules, a port, a device, and files that are open."""

import struct
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from itertools import permutations
from pathlib import Path

import nvme
import wire
from case import sh
from nvme import Load, Null, until
from nvme_faults import flowing, in_use, loaded
from nvme_ground import case, write_at


def unloaded(module):
    """Unloads a module, once what was just ended has let go of it, and udev of what it has looked at."""
    def done():
        said = subprocess.run(["rmmod", module], capture_output=True, text=True, timeout=60, check=False)
        assert not said.returncode or "in use" in said.stderr, said.stderr
        return not said.returncode
    until(done, f"{module} is still in use")


@case("both modules unloaded after use, in each order, twice", links=("rxe",))
def both(ground):
    """With the other end as it was: a target that is still enabled, and a controller that is connecting again."""
    host_module, target_module, null = nvme.HOSTS[ground.host], nvme.TARGETS[ground.end], Null()
    for _ in range(2):
        with null, ground.target(null) as target:
            with ground.controller(target) as host:
                ground.verify(host.disk(), null, iodepth=16, size="256k")
            unloaded(host_module)
            target.disable()
            unloaded(target_module)
            nvme.load(ground.host, ground.end)
            target.enable()
            with ground.controller(target, reconnect_delay=1, ctrl_loss_tmo=600) as host:
                ground.verify(host.disk(), null, iodepth=16, size="256k")
                target.disable()
                unloaded(target_module)
                host.settle("connecting")
            unloaded(host_module)
            nvme.load(ground.host, ground.end)
            target.enable()
            with ground.controller(target) as host:
                ground.verify(host.disk(), null, iodepth=16, size="256k")


@case("modules below the host's are in use while it is loaded", links=("rxe",))
def below(ground):
    cores = ["nvme-fabrics", "nvme-core"] + (["rdma_rs"] if ground.host == "rust" else [])

    def kept():
        for core in cores:
            assert in_use(core), f"{core} was unloaded, or rmmod has failed in another way"

    kept()
    with loaded(ground) as (_, host, __):
        kept()
        flowing(host)
    kept()


# What a user may have open of a controller: each returns the path.

def disk_of(host):
    return host.disk()


def partition_of(host):
    """The first sector of the disk gets a table of one partition, of Linux."""
    disk = host.disk()
    entry = struct.pack("<4xB3xII", 0x83, 2048, 2048)
    write_at(disk, 0, bytes(446) + entry + bytes(48) + b"\x55\xaa")
    sh("blockdev", "--rereadpt", disk)
    return Path(f"{disk}p1")


def namespace_of(host):
    return Path("/dev", host.disk().name.replace("nvme", "ng"))


def controller_of(host):
    return Path("/dev", host.name)


def opened(path):
    """A file that is opened, once that can be done."""
    def file():
        with suppress(OSError):
            return open(path, "rb", buffering=0)
        return None
    return until(file, f"{path} cannot be opened")


@contextmanager
def single_path(ground):
    """Has nvme-core make disks that belong to their only controller."""
    nvme.unload()
    sh("modprobe", "nvme-core", "multipath=N")
    nvme.load(ground.host, ground.end)
    try:
        yield
    finally:
        nvme.unload()
        nvme.load(ground.host, ground.end)


def unload_open(ground, path_of, holds):
    """A controller in Rust holds the module; in C the module deletes it. A file may hold the module after that."""
    module, null = nvme.HOSTS[ground.host], Null()
    with null, ground.target(null) as target:
        with ground.controller(target) as host:
            ground.verify(host.disk(), null, iodepth=16, size="256k")
            with opened(path_of(host)):
                if ground.host == "c" and not holds:
                    unloaded(module)
                    until(lambda: host.state() == "gone", "the controller is still there")
                else:
                    assert in_use(module), "it was unloaded"
                    ground.verify(host.disk(), null, iodepth=16, size="256k", randseed=2)
                    host.disconnect()
                    if holds:
                        assert in_use(module), "it was unloaded, with a file that is open"
                    else:
                        unloaded(module)
            if holds:
                unloaded(module)
        nvme.load(ground.host, None)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


FILES = {"a disk": disk_of, "a partition": partition_of, "a namespace's character device": namespace_of}
for what, path in FILES.items():
    case(f"unloaded while {what} is open", path, False, links=("rxe",))(unload_open)
case("unloaded while a controller's character device is open", controller_of, True, links=("rxe",))(unload_open)


@case("unloaded while files of a disk with one path are open", links=("rxe",))
def unload_open_single(ground):
    with single_path(ground):
        for path_of in FILES.values():
            unload_open(ground, path_of, True)


STEPS = ("device", "port", "module")


def target_goes(ground, *order):
    """The module is in use while the port is enabled, and goes last then."""
    module = nvme.TARGETS[ground.end]
    with loaded(ground) as (target, host, _), ExitStack() as back:
        last = []
        for step in order:
            if step == "device":
                sh("rdma", "link", "delete", "far0")
                back.callback(wire.link, "far0")
            elif step == "port":
                target.disable()
            elif "port" in order[:order.index(step)]:
                unloaded(module)
            else:
                assert in_use(module), "it was unloaded below an enabled port"
                last.append(module)
        for name in last:
            unloaded(name)
        host.settle("connecting")
        back.close()
        nvme.load(None, ground.end)
        target.enable()
        host.settle()
        ground.figures["reconnects"] += 1


for steps in permutations(STEPS):
    case("target's {}, {} and {} removed under load".format(*steps), *steps, links=("wire",))(target_goes)
