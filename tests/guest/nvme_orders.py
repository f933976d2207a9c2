# SPDX-License-Identifier: GPL-2.0
"""The cases of the order in which what an end consists of goes: modules, a port, a device, and files that are open."""

import errno
import struct
import subprocess
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import permutations
from pathlib import Path

import faulty
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


@contextmanager
def connecting(host):
    """Connects in a process of its own, and gives that once there is a controller."""
    assert not list(nvme.CONTROLLERS.iterdir()), "there is another controller"
    words = ["nvme", "connect", *host.words()]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        new, = until(lambda: list(nvme.CONTROLLERS.iterdir()) or process.poll(), "there is no controller")
        host.name = new.name
        yield process
        process.wait(120)


@contextmanager
def without_device(target):
    """Removes the device of both ends, and makes it anew."""
    sh("rdma", "link", "delete", "rxe0")
    yield
    sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
    target.disable()
    target.enable()


@case("device removed while a controller is created, at 6 moments", links=("rxe",))
def removed_new(ground):
    """It is not created, or is deleted: or, as in C, it is live and not yet listed, and is given up soon."""
    null = Null()
    with null, ground.target(null) as target:
        for n in range(6):
            host = ground.controller(target, reconnect_delay=1, ctrl_loss_tmo=3)
            with connecting(host):
                time.sleep(n / 40)
                with without_device(target):
                    until(lambda: not list(nvme.CONTROLLERS.iterdir()), "the controller is still there", 120)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case("device removed between two attempts to connect again", links=("rxe",),
      defects={("host", "c"): "remove_one() reads the device of a controller that has none, which may be freed"})
def removed_between(ground):
    """The controller has no queue, and none for long."""
    null = Null()
    with null, ground.target(null) as target:
        with ground.controller(target, reconnect_delay=600, ctrl_loss_tmo=3600) as host:
            target.disable()
            host.settle("connecting")
            with without_device(target):
                until(lambda: host.state() == "gone", "the controller of a deleted device is still there")
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


def unload_busy(ground, moment):
    """In Rust the module is in use. C's deletes a controller, unless nvme-fabrics is just creating it."""
    module, null = nvme.HOSTS[ground.host], Null()
    with null, ground.target(null) as target:
        host = ground.controller(target, reconnect_delay=1, ctrl_loss_tmo=600)
        with ExitStack() as stack:
            process = stack.enter_context(connecting(host))
            if moment != "created":
                assert process.wait(120) == 0, "it is not connected"
                host.settle()
            if moment == "reset":
                stack.enter_context(subprocess.Popen(["nvme", "reset", f"/dev/{host.name}"], stderr=subprocess.DEVNULL))
            elif moment == "connecting again":
                target.disable()
                host.settle("connecting")
            used = in_use(module)
            assert used or ground.host == "c", "it was unloaded, with a controller"
            if moment == "connecting again":
                target.enable()
        if used:
            host.settle()
            ground.verify(host.disk(), null, iodepth=16, size="256k")
            host.disconnect()
            unloaded(module)
        nvme.load(ground.host, None)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k", randseed=2)


WARNS = "WARN_ON_ONCE() in nvme_rdma_reset_ctrl_work(): the deletion begins between its two changes of the state"
for when, why in ("created", ""), ("reset", WARNS), ("connecting again", ""):
    case(f"unloaded while a controller is {when}", when, links=("rxe",), defects=why and {("host", "c"): why})(unload_busy)

LOADS = 20


@case(f"connected and disconnected while the module is unloaded and loaded, {LOADS} times", links=("rxe",),
      defects={("host", "c"): "the kernel panics: nvme_keep_alive_work() has a controller of the unloaded module"})
def unload_loop(ground):
    """A connection is one of the module that is there, or is refused."""
    module, null = nvme.HOSTS[ground.host], Null()

    def reload():
        loads = 0
        while loads < LOADS:
            if not subprocess.run(["rmmod", module], capture_output=True, check=False).returncode:
                nvme.insert(module)
                loads += 1

    with null, ground.target(null) as target:
        host = ground.controller(target, nr_io_queues=1, reconnect_delay=1, ctrl_loss_tmo=600)
        loader = threading.Thread(target=reload)
        loader.start()
        while loader.is_alive():
            for words in (("connect", *host.words()), ("disconnect", f"--nqn={target.nqn}")):
                subprocess.run(["nvme", *words], capture_output=True, check=False)
        loader.join()
        nvme.load(ground.host, None)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case(f"unloaded as soon as the last file of a deleted controller is closed, {LOADS} times", links=("rxe",),
      defects={("host", "c"): "the kernel panics: the file's release calls free_ctrl() of the unloaded module"})
def unload_closed(ground):
    """The file's release ends in code of the module, after it has let go of that."""
    module, null = nvme.HOSTS[ground.host].replace("-", "_"), Null()

    def unload():
        while True:
            try:
                return faulty.unload(module)
            except OSError as error:
                assert error.errno == errno.EAGAIN, error

    with null, ground.target(null) as target:
        for _ in range(LOADS):
            host = ground.controller(target, nr_io_queues=1)
            with open(nvme.FABRICS, "r+b", buffering=0) as fabrics:
                fabrics.write(",".join(f"{name}={value}" for name, value in host.options.items()).encode())
                sh("nvme", "disconnect", "-n", target.nqn)
                unloader = threading.Thread(target=unload)
                unloader.start()
            unloader.join()
            assert not nvme.loaded(module), "it was not unloaded"
            nvme.load(ground.host, None)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


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
