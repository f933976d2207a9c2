# SPDX-License-Identifier: GPL-2.0
"""The cases of faults of NVMe over RDMA: resets, ends that go, wires in trouble, devices that do not answer.

Each has data written and verified meanwhile. After it they are verified on the disk and on the backing."""

import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import nvme
import wire
from bond import INTERFACES, bond, listener, take_over
from case import BUILD, FLAVOUR, STOCK, sh
from nvme import Load, Null, until
from nvme_ground import case, read_at, write_at

# Seconds between attempts of a host to connect again.
DELAY = 1
RESETS = 20 if STOCK else 10
RECONNECTS = 5
# Each has two connections.
CONTROLLERS = 25


@contextmanager
def loaded(ground, null=None, stop=True, job=None, **options):
    """A pair, and a load on its disk, which goes on through the fault, or which that ends; then all is verified. The
    job of the load may be another one."""
    null = null or Null()
    options = {"reconnect_delay": DELAY, "ctrl_loss_tmo": 600, **options}
    with ground.pair(null, **options) as (target, host):
        with Load(host.disk(), **{"size": "1m", "offset": "16m", **(job or {})}) as load:
            yield target, host, load
            if stop:
                flowing(host)
                ground.stop(load)
        host.settle()
        ground.verify(host.disk(), null, iodepth=16, size="256k", randseed=3)


def flowing(host):
    """Waits until I/Os are completed that begin after this."""
    disk = host.disk()
    before = nvme.completed(disk)
    until(lambda: nvme.completed(disk) > before + Load.FLOWING, "no I/O is completed")


def reconnections(host):
    """How often a controller has connected again, as the log has it."""
    return sh("dmesg").stdout.count(f"{host.name}: Successfully reconnected")


def port_goes(ground, target, *hosts):
    """The port is disabled, and enabled again, when all hosts have seen that: they connect again."""
    target.disable()
    for host in hosts:
        host.settle("connecting")
    target.enable()
    for host in hosts:
        host.settle()
        ground.figures["reconnects"] += 1


@case("reset under load, 3 times")
def reset(ground):
    with loaded(ground) as (_, host, __):
        for _ in range(3):
            host.reset()
            ground.figures["resets"] += 1
            flowing(host)


# A load whose completions its threads poll for, on queues of their own.
POLLED = {"ioengine": "io_uring", "hipri": 1}


@case("reset, port disabled and enabled, and disconnected while I/O is polled for", links=("rxe",),
      defects={("host", "c"): "the kernel panics: nvme_rdma_poll() reads a CQ that is freed"})
def polled(ground):
    with loaded(ground, job=POLLED, stop=False, nr_poll_queues=1) as (target, host, load):
        host.reset()
        ground.figures["resets"] += 1
        flowing(host)
        port_goes(ground, target, host)
        flowing(host)
        host.disconnect()
        ground.broken(load)
        host.connect()


@case(f"reset without load, {RESETS} times", links=("rxe", "siw"))
def resets(ground):
    null = Null()
    with ground.pair(null) as (_, host):
        for _ in range(RESETS):
            host.reset()
            ground.figures["resets"] += 1
        host.settle()
        ground.verify(host.disk(), null, iodepth=16, size="256k")


@case("port disabled and enabled under load, twice")
def port(ground):
    with loaded(ground) as (target, host, _):
        for _ in range(2):
            port_goes(ground, target, host)
            flowing(host)


@case(f"connected again {RECONNECTS} times", links=("rxe",))
def reconnects(ground):
    with loaded(ground) as (target, host, _):
        for _ in range(RECONNECTS):
            port_goes(ground, target, host)


TOGETHER, TIMES = 10, 50


def subsystem(target):
    """The folder in sysfs of what a host knows of a target's subsystem."""
    return next(path for path in Path("/sys/class/nvme-subsystem").iterdir()
                if (path / "subsysnqn").read_text(encoding="ascii").strip() == target.nqn)


@case(f"{TOGETHER * TIMES} reconnects under load, of {TOGETHER} controllers", links=("rxe",), named=True,
      seconds=850)
def reconnects_together(ground):
    null = Null()
    with null, ground.target(null) as target, ExitStack() as stack:
        few = {"nr_io_queues": 1, "queue_size": 16, "reconnect_delay": DELAY, "ctrl_loss_tmo": 600}
        hosts = [stack.enter_context(ground.controller(target, **few)) for _ in range(TOGETHER)]
        # The load goes by all paths.
        nvme.write(subsystem(target) / "iopolicy", "round-robin")
        with Load(hosts[0].disk(), size="1m", offset="16m") as load:
            for _ in range(TIMES):
                port_goes(ground, target, *hosts)
            flowing(hosts[0])
            ground.stop(load)
        ground.verify(hosts[0].disk(), null, iodepth=16, size="256k", randseed=3)


@case("target taken down and set up again under load, twice")
def set_up_again(ground):
    """blktests' nvme/061: port, subsystem and namespace are removed, and made anew with the same names."""
    null = Null()
    # By which the host knows it again.
    null.namespace = {"device_uuid": "5c0e6a2e-3f0b-4f7e-9b1d-1f2a3b4c5d6e"}
    with loaded(ground, null) as (target, host, _):
        for _ in range(2):
            target.down()
            host.settle("connecting")
            target.up()
            host.settle()
            ground.figures["reconnects"] += 1
            flowing(host)


@case("target finds its controller fatal, under load, 3 times", links=("rxe",), checkers=True)
def fatal(ground):
    """blktests' nvme/060: the target ends the queues of a controller by itself, and is told so by debugfs."""
    with loaded(ground) as (target, host, _):
        for _ in range(3):
            state, = Path("/sys/kernel/debug/nvmet", target.nqn).glob("ctrl*/state")
            nvme.write(state, "fatal")
            until(lambda old=state.parent: not old.exists(), "the target still has the controller")
            host.settle()
            ground.figures["reconnects"] += 1
            flowing(host)


@case("another interface of a bond takes over under load, twice: the port listens anew", links=("rxe",), bonds=True)
def failover(ground):
    """The connection manager tells the listener and both ends of the connections that the address is that of another
    hardware (ADDR_CHANGE)."""
    ground.addr = "203.0.113.9"
    with bond(ground.addr), loaded(ground) as (target, host, _):
        for interface in reversed(INTERFACES):
            before = listener(target.trsvcid), reconnections(host)
            take_over(interface)
            until(lambda old=before[0]: listener(target.trsvcid) not in (old, None), "the port listens as before")
            until(lambda old=before[1]: reconnections(host) > old, "the host has not connected again")
            ground.figures["reconnects"] += 1
            flowing(host)


@case(f"one worker for all of the target: port off and on under load, {2 * CONTROLLERS} connections, unloaded",
      links=("rxe",))
def one_by_one(ground):
    """What ends a queue, a port or the module waits for nothing that has yet to be done by that worker."""
    with nvme.one_worker():
        with loaded(ground) as (target, host, _):
            for _ in range(3):
                port_goes(ground, target, host)
                flowing(host)
        null = Null()
        with null, ground.target(null) as target, ExitStack() as stack:
            few = {"nr_io_queues": 1, "queue_size": 16, "reconnect_delay": DELAY, "ctrl_loss_tmo": 600}
            hosts = [stack.enter_context(ground.controller(target, **few)) for _ in range(CONTROLLERS)]
            with Load(hosts[0].disk(), size="1m", offset="16m") as load:
                # All of them at once.
                target.disable()
                sh("rmmod", nvme.TARGETS[ground.end])
                nvme.load(None, ground.end)
                target.enable()
                for host in hosts:
                    host.settle()
                    ground.figures["reconnects"] += 1
                flowing(hosts[0])
                ground.stop(load)
            ground.verify(hosts[0].disk(), null, iodepth=16, size="256k", randseed=3)


@contextmanager
def failing_over(interface):
    """Has a function that lets an interface fail over, as a bond does."""
    nvme.insert("rdma_failover")
    try:
        yield lambda: nvme.write("/sys/module/rdma_failover/parameters/interface", interface)
    finally:
        nvme.unload("rdma_failover")


@case("the address of a port changes under load, 5 times: it listens anew", links=("rxe",), checkers=True)
def moved(ground):
    with failing_over("rdma0") as fail_over, loaded(ground) as (target, host, _):
        for _ in range(5):
            before = listener(target.trsvcid)
            fail_over()
            until(lambda old=before: listener(target.trsvcid) not in (old, None), "the port listens as before")
            host.settle()
            flowing(host)


@case("the address of a port changes while it is disabled and enabled, 20 times, with one worker", links=("rxe",),
      checkers=True)
def moved_away(ground):
    """What listens anew has the port's address, for which the new port must not have to wait. A host that connects when
    the subsystem has just left the port is refused for good."""
    null = Null()
    with nvme.one_worker(), failing_over("rdma0") as fail_over, null, ground.target(null) as target:
        with ground.controller(target, reconnect_delay=DELAY):
            for n in range(20):
                fail_over()
                # At several moments of that.
                time.sleep(n % 5 / 100)
                target.disable()
                target.enable()
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case("the address of a port is gone when it changes under load, and is back, twice", links=("rxe",), checkers=True)
def moved_without(ground):
    """The port cannot listen anew, and tries again every five seconds. The second time it is disabled and enabled."""
    address = "ip", "addr", "{}", f"{ground.addr}/24", "dev", "rdma0"
    with failing_over("rdma0") as fail_over, loaded(ground) as (target, host, _):
        for is_disabled in (False, True):
            before = reconnections(host)
            sh(*(word.format("del") for word in address))
            try:
                fail_over()
                until(lambda: listener(target.trsvcid) is None, "the port listens as before")
                if is_disabled:
                    target.disable()
            finally:
                sh(*(word.format("add") for word in address))
            if is_disabled:
                target.enable()
            until(lambda: listener(target.trsvcid), "the port does not listen")
            until(lambda old=before: reconnections(host) > old, "the host has not connected again", 120)
            host.settle()
            ground.figures["reconnects"] += 1
            flowing(host)


@case("namespace disabled and enabled under load", links=("rxe",))
def namespace(ground):
    with loaded(ground, stop=False) as (target, host, load):
        target.namespace(1, False)
        ground.broken(load)
        until(lambda: host.find() is None, "the disk of a disabled namespace is still there")
        target.namespace(1, True)
        # C's target announces a namespace before that can be identified, so that the host may find nothing.
        nvme.write(host.path / "rescan_controller", 1)
        host.disk()


@case("disconnected under load")
def disconnect(ground):
    null = Null()
    with ground.pair(null) as (target, host):
        with Load(host.disk()) as load:
            host.disconnect()
            ground.broken(load)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case("disconnected as soon as it is connected, 10 times", links=("rxe",))
def disconnect_soon(ground):
    null = Null()
    with null, ground.target(null) as target:
        for _ in range(10):
            host = ground.controller(target)
            sh("nvme", "connect", *host.words())
            sh("nvme", "disconnect", f"--nqn={target.nqn}")
        with ground.controller(target) as host:
            ground.verify(host.disk(), null, iodepth=16, size="256k")


@case(f"{2 * CONTROLLERS} connections at once, under load", links=("rxe",))
def many_at_once(ground):
    null = Null()
    with null, ground.target(null) as target, ExitStack() as stack:
        few = {"nr_io_queues": 1, "queue_size": 16, "keep_alive_tmo": 60}
        hosts = [stack.enter_context(ground.controller(target, **few)) for _ in range(CONTROLLERS)]
        with Load(hosts[0].disk(), size="1m", offset="16m", iodepth=64) as load:
            assert len([line for line in nvme.objects() if " type RC " in line]) >= 4 * CONTROLLERS, "QPs are missing"
            for host in hosts[1:]:
                host.disconnect()
            flowing(hosts[0])
            ground.stop(load)
        ground.verify(hosts[0].disk(), null, iodepth=16, size="256k", randseed=3)


for connections in (50, 500):
    @case(f"{connections} connections made and ended", connections, links=("rxe",), named=connections > 50,
          seconds=600 if connections == 50 else 850)
    def many(ground, number):
        null = Null()
        with null, ground.target(null) as target:
            for _ in range(number // 2):
                host = ground.controller(target, nr_io_queues=1, queue_size=16)
                sh("nvme", "connect", *host.words())
                sh("nvme", "disconnect", f"--nqn={target.nqn}")
            with ground.controller(target) as host:
                ground.verify(host.disk(), null, iodepth=16, size="256k")


@case("reset and disconnected at once under load", links=("rxe",),
      defects={("host", "c"): "WARN_ON_ONCE() in nvme_rdma_reset_ctrl_work(): the deletion begins between its two "
                              "changes of the state"})
def reset_disconnect(ground):
    null = Null()
    with ground.pair(null) as (target, host):
        with Load(host.disk()) as load:
            with subprocess.Popen(["nvme", "reset", f"/dev/{host.name}"], stderr=subprocess.DEVNULL):
                host.disconnect()
            ground.broken(load)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


DEVICES = {"rxe": ("rxe0",), "wire": ("near0", "far0")}


def delete_link(ground, device):
    """The link goes under load, and the host's controller or its connections with it. Its port is enabled anew."""
    null = Null()
    with null, ground.target(null) as target:
        with ground.controller(target, reconnect_delay=DELAY) as host:
            with Load(host.disk()) as load:
                sh("rdma", "link", "delete", device)
                stays = device == "far0"
                if device == "rxe0" and ground.host == "c":
                    # If the target's queues have gone first, the controller may be waiting to connect again. C's host
                    # finds controllers by the device, which such a one does not have: it stays.
                    stays = host.state() == "connecting"
                if stays:
                    host.settle("connecting")
                else:
                    ground.broken(load)
                    until(lambda: host.state() == "gone", "the controller of a deleted device is still there")
                if device == "rxe0":
                    sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
                else:
                    wire.link(device)
                if device != "near0":
                    target.disable()
                    target.enable()
                if stays:
                    host.settle()
                    ground.figures["reconnects"] += 1
                    flowing(host)
                    ground.stop(load)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


for of_link, names in DEVICES.items():
    for name in names:
        case(f"rdma link delete {name} under load", name, links=(of_link,))(delete_link)


@case("a renamed device goes under load", links=("rxe",))
def renamed(ground):
    null = Null()
    with null, ground.target(null) as target:
        with ground.controller(target) as host:
            with Load(host.disk()) as load:
                sh("rdma", "dev", "set", "rxe0", "name", "renamed0")
                sh("rdma", "link", "delete", "renamed0")
                ground.broken(load)
                until(lambda: host.state() == "gone", "the controller of a deleted device is still there")
                sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
                target.disable()
                target.enable()
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


def in_use(module):
    """Whether rmmod says that the module is."""
    said = subprocess.run(["rmmod", module], capture_output=True, text=True, timeout=60, check=False)
    return said.returncode and "in use" in said.stderr


@case("host's module unloaded under load", links=("rxe",))
def unload_host(ground):
    """C's module deletes its controllers. Rust's is in use until a user has done that."""
    module, null = nvme.HOSTS[ground.host], Null()
    with null, ground.target(null) as target:
        with ground.controller(target) as host:
            with Load(host.disk()) as load:
                if ground.host != "c":
                    assert in_use(module), "it was unloaded"
                    flowing(host)
                    host.disconnect()
                sh("rmmod", module)
                ground.broken(load)
            until(lambda: host.state() == "gone", "the controller is still there")
        nvme.load(ground.host, None)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case("target's module is in use while a port is enabled, and unloaded after it", links=("rxe",))
def unload_target(ground):
    module = nvme.TARGETS[ground.end]
    with loaded(ground) as (target, host, _):
        refused = subprocess.run(["rmmod", module], capture_output=True, check=False)
        assert refused.returncode, "it was unloaded below an enabled port"
        target.disable()
        host.settle("connecting")
        sh("rmmod", module)
        nvme.load(None, ground.end)
        target.enable()
        host.settle()
        ground.figures["reconnects"] += 1


@case("target's module replaced by C's and back, under load", links=("rxe",), plain=True)
def in_place(ground):
    """What is set up in configfs stays, and so does the host's controller. nvmet has one transport for RDMA."""
    used, c = nvme.TARGETS[ground.end], nvme.TARGETS["c"]
    with loaded(ground) as (target, host, _):
        for old, new in ((used, c), (c, used)):
            target.disable()
            host.settle("connecting")
            if old == c != used:
                words = ["insmod", BUILD / FLAVOUR / f"{used}.ko"]
                refused = subprocess.run(words, capture_output=True, check=False)
                assert refused.returncode, f"{used} was loaded beside {c}"
            sh("rmmod", old)
            nvme.insert(new)
            target.enable()
            host.settle()
            ground.figures["reconnects"] += 1
            flowing(host)


@case("controller loss time runs out", links=("rxe",))
def controller_loss(ground):
    null = Null()
    with ground.pair(null, reconnect_delay=DELAY, ctrl_loss_tmo=3) as (target, host):
        with Load(host.disk()) as load:
            target.disable()
            ground.broken(load)
            until(lambda: host.state() == "gone", "the controller is not given up")
        target.enable()
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case("connecting again is refused for good: the controller is given up", links=("rxe",))
def refused(ground):
    """The target does not let the host in, with a status that asks it not to try again (DNR)."""
    null = Null()
    with ground.pair(null, reconnect_delay=DELAY, ctrl_loss_tmo=600) as (target, host):
        with Load(host.disk()) as load:
            target.disable()
            host.settle("connecting")
            nvme.write(target.subsystem / "attr_allow_any_host", 0)
            target.enable()
            ground.broken(load)
            until(lambda: host.state() == "gone", "the controller is not given up")
        nvme.write(target.subsystem / "attr_allow_any_host", 1)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case("I/O fails fast while the controller is connecting", links=("rxe",))
def fail_fast(ground):
    with loaded(ground, stop=False, fast_io_fail_tmo=2) as (target, host, load):
        target.disable()
        ground.broken(load)
        assert host.state() == "connecting", host.state()
        target.enable()
        host.settle()
        ground.figures["reconnects"] += 1


@case("number of queues changes when connecting again", links=("rxe",))
def queue_count(ground):
    with loaded(ground, nr_io_queues=2) as (target, host, _):
        for number in (1, 2):
            # Has all controllers connect again.
            nvme.write(target.subsystem / "attr_qid_max", number)
            until(lambda n=number: int((host.path / "queue_count").read_text(encoding="ascii")) == n + 1 and
                  host.state() == "live", f"the host does not have {number} I/O queues")
            ground.figures["reconnects"] += 1
            flowing(host)


@contextmanager
def cpu_goes():
    """Has a function that takes the second CPU offline, or back."""
    path = "/sys/devices/system/cpu/cpu1/online"
    try:
        yield lambda online: nvme.write(path, int(online))
    finally:
        nvme.write(path, 1)


def queues(host):
    """The number of I/O queues that a controller was given."""
    return int((host.path / "queue_count").read_text(encoding="ascii")) - 1


@case("a CPU goes offline and comes back under load, twice, with a reset each time", links=("rxe",), hotplug=True,
      defects={("host", "c"): "it connects again without end if its first queue has that CPU, as below"})
def cpu_offline(ground):
    with cpu_goes() as cpu, loaded(ground, nr_io_queues=2) as (_, host, __):
        for number in (1, 2) * 2:
            cpu(number == 2)
            flowing(host)
            host.reset()
            ground.figures["resets"] += 1
            assert queues(host) == number, f"{number} CPUs, and {queues(host)} I/O queues"
            flowing(host)


@case("the CPU of a queue is offline when the host connects again, twice, under load", links=("rxe",), hotplug=True,
      defects={("host", "c"): "it does not: blk-mq has no request for the Connect command of such a queue"})
def cpu_of_a_queue(ground):
    """Two queues for writes and two for reads, of two CPUs; of one CPU two, which blk-mq maps to both. The second time it
    has that map from before, and one queue is left out, until the CPU that is back has a request."""
    with cpu_goes() as cpu, loaded(ground, nr_io_queues=2, nr_write_queues=2) as (_, host, __):
        cpu(False)
        for _ in range(2):
            host.reset()
            ground.figures["resets"] += 1
            assert queues(host) == 2, f"one CPU, and {queues(host)} I/O queues"
            flowing(host)
        def missing():
            return sh("dmesg").stdout.count(f"{host.name}: no queue ")
        before = missing()
        cpu(True)
        with nvme.one_cpu(1):
            read_at(host.disk(), 0, 4096)
        until(lambda: missing() > before, "the host is not reset")
        host.settle()
        ground.figures["resets"] += 1
        assert queues(host) == 4, f"two CPUs, and {queues(host)} I/O queues"
        flowing(host)


@case("queues are smaller when connecting again", links=("rxe",),
      defects={("host", "c"): "WARN_ON_ONCE() in nvme_rdma_map_sg_fr(): the new queue has an MR for each of its entries, "
                              "and there are as many tags as before"})
def queue_size(ground):
    null = Null()
    with ground.pair(null, reconnect_delay=DELAY, ctrl_loss_tmo=600, nr_io_queues=1) as (target, host):
        with Load(host.disk(), size="1m", offset="16m", iodepth=64) as load:
            target.disable()
            host.settle("connecting")
            nvme.write(target.port.path / "param_max_queue_size", 16)
            target.enable()
            host.settle()
            ground.figures["reconnects"] += 1
            sqsize = int((host.path / "sqsize").read_text(encoding="ascii"))
            assert sqsize < 16, f"the host has queues of {sqsize} entries"
            flowing(host)
            ground.stop(load)
        ground.verify(host.disk(), null, iodepth=128, size="1m", randseed=3)


@case("I/O times out on a slow backing", links=("rxe",))
def timeout(ground):
    # An I/O takes 4 s there, and its command 1 s at most; it is not tried again.
    slow = Null(irqmode=2, completion_nsec=4 * 10**9)
    retries = Path("/sys/module/nvme_core/parameters/max_retries")
    before = retries.read_text(encoding="ascii")
    with ExitStack() as stack:
        stack.callback(nvme.write, retries, before)
        _, host = stack.enter_context(ground.pair(slow, reconnect_delay=DELAY))
        nvme.write(retries, 0)
        for path in Path("/sys/block").glob("nvme*n*/queue/io_timeout"):
            nvme.write(path, 1000)
        begin = time.monotonic()
        try:
            read_at(host.disk(), 0, 4096)
        except OSError as e:
            assert time.monotonic() - begin >= 0.9, f"it failed before its time: {e}"
        else:
            raise AssertionError("an I/O of 4 s did not time out")
        host.settle()
        ground.figures["reconnects"] += 1


def inject(null, fault, **attributes):
    """Has null_blk inject faults of a kind, of which the log has none."""
    for name, value in {"verbose": 0, **attributes}.items():
        nvme.write(null.path / fault / name, value)


def io_timeout(device, milliseconds):
    nvme.write(Path("/sys/block", device.name, "queue/io_timeout"), milliseconds)


@case("I/Os of the backing are lost under load, 3 times: the host connects again before they fail", links=("rxe",),
      checkers=True)
def lost_ios(ground):
    """The target's queue has ended by then, but for these commands."""
    null = Null()
    with loaded(ground, null) as (_, host, __):
        io_timeout(host.way(), 2000)
        io_timeout(null.device, 15000)
        for _ in range(3):
            before = reconnections(host)
            inject(null, "timeout_inject", times=4, probability=100)
            until(lambda old=before: reconnections(host) > old, "the host has not connected again")
            host.settle()
            ground.figures["reconnects"] += 1
            flowing(host)


@case("I/Os of the backing are lost under load, and fail before the host's time is over", links=("rxe",),
      checkers=True)
def failed_ios(ground):
    null = Null()
    with loaded(ground, null, stop=False) as (_, host, load):
        io_timeout(null.device, 1000)
        inject(null, "timeout_inject", times=1, probability=100)
        ground.broken(load)
        assert host.state() == "live", host.state()


@case("the backing is busy under load, for one I/O in two", links=("rxe",), checkers=True)
def busy(ground):
    null = Null()
    with loaded(ground, null) as (_, host, __):
        inject(null, "requeue_inject", times=200, probability=50)
        until(lambda: (null.path / "requeue_inject/times").read_text().strip() == "0", "the backing was not busy so often")
        flowing(host)


# Fewer packets are late than in the storms: a connection of C on rxe ends there whenever 64 KiB are sent, and is made
# again, without an end.
TROUBLES = {**{kind: wire.TROUBLES[kind] for kind in ("loss", "duplication", "reordering")},
            "delay": "delay 5ms", "all": "delay 2ms reorder 1% loss 1% duplicate 1%"}
for kind, words in TROUBLES.items():
    @case(f"wire in trouble: {kind}", words, links=("wire",))
    def in_trouble(ground, trouble):
        null, figures = Null(), {}
        with ground.pair(null, reconnect_delay=DELAY) as (_, host):
            with wire.trouble(trouble, figures):
                ground.verify(host.disk(), null, {"name": "small", "bs": "4k", "size": "256k"},
                              {"name": "large", "bs": "64k", "size": "1m", "offset": "4m"}, iodepth=16)
                host.reset()
                ground.figures["resets"] += 1
            host.settle()
            ground.verify(host.disk(), null, iodepth=16, size="256k", randseed=3)
        ground.figures |= {key: figures[key] for key in ("sent", "lost", "duplicates", "reordered")}


@case("deleted while it connects again, 5 times", links=("rxe",))
def deleted_connecting(ground):
    """At several moments: between two attempts, and in one that is rejected."""
    null = Null()
    with null, ground.target(null) as target:
        for n in range(5):
            with ground.controller(target, reconnect_delay=DELAY, ctrl_loss_tmo=600) as host:
                with Load(host.disk()) as load:
                    target.disable()
                    host.settle("connecting")
                    # The next attempt is DELAY after the loss.
                    time.sleep(DELAY * n / 4)
                    host.disconnect()
                    ground.broken(load)
            target.enable()
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case("deleted while it connects for the first time: refused, and connected", links=("rxe",))
def deleted_new(ground):
    """nvme-core refuses that, as the controller has not started."""
    null = Null()
    with null, ground.target(null) as target:
        for n in range(5):
            host = ground.controller(target)
            before = set(nvme.CONTROLLERS.iterdir())
            with subprocess.Popen(["nvme", "connect", *host.words()], stdout=subprocess.DEVNULL) as connecting:
                new, = until(lambda old=before: set(nvme.CONTROLLERS.iterdir()) - old, "there is no controller")
                time.sleep(n / 50)
                # It may have started already, or its file may not be there yet.
                refused = False
                try:
                    nvme.write(new / "delete_controller", 1)
                except OSError:
                    refused = True
                status = connecting.wait(60)
            if refused:
                assert status == 0 and new.exists(), f"a deletion that was refused has ended it: {status}"
                nvme.write(new / "delete_controller", 1)
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


@case("reset as soon as it is live, 5 times", links=("rxe",))
def reset_new(ground):
    """Its creation may not have come to an end then. There is no namespace, which would be found while the queues are
    quiesced: nvme-core warns of that, as those of its new disk are not (blk_mq_unquiesce_queue())."""
    with ground.target() as target:
        for _ in range(5):
            host = ground.controller(target)
            before = set(nvme.CONTROLLERS.iterdir())
            with subprocess.Popen(["nvme", "connect", *host.words()], stdout=subprocess.DEVNULL) as connecting:
                new, = until(lambda old=before: set(nvme.CONTROLLERS.iterdir()) - old, "there is no controller")
                host.name = new.name
                host.settle()
                nvme.write(new / "reset_controller", 1)
                status = connecting.wait(60)
            assert status == 0, "it was not created"
            ground.figures["resets"] += 1
            host.settle()
            host.disconnect()
    null = Null()
    with ground.pair(null) as (_, host):
        ground.verify(host.disk(), null, iodepth=16, size="256k")


@case("device removed while files of a controller are open", links=("rxe",))
def removed_open(ground):
    """Those of the disk, of the controller and of its connection. The removal does not wait for them."""
    null = Null()
    with null, ground.target(null) as target:
        host = ground.controller(target)
        words = ",".join(f"{name}={value}" for name, value in host.options.items())
        with ExitStack() as files:
            fabrics = files.enter_context(open(nvme.FABRICS, "r+b", buffering=0))
            fabrics.write(words.encode())
            path, = nvme.CONTROLLERS.iterdir()
            host.name = path.name
            disk = files.enter_context(open(host.disk(), "rb"))
            files.enter_context(until(lambda: control(host), f"/dev/{host.name} cannot be opened"))
            sh("rdma", "link", "delete", "rxe0")
            until(lambda: host.state() == "gone", "the controller of a deleted device is still there")
            with suppress(OSError):
                assert not disk.read(4096), "a disk without a device was read"
            if ground.host != "c":
                assert in_use(nvme.HOSTS[ground.host]), "it was unloaded, with a file that has a controller"
        sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
        target.disable()
        target.enable()
        with ground.controller(target) as again:
            ground.verify(again.disk(), null, iodepth=16, size="256k")


def control(host):
    """The character device of a controller, opened, once that can be done."""
    try:
        return open(f"/dev/{host.name}", "rb", buffering=0)
    except OSError:
        return None


# Seconds, of which a slow machine may lose some.
KEEP_ALIVE = 15


@case("keep-alive: an idle controller stays, new, after a reset and connected again", links=("rxe",))
def idle(ground):
    """Its target ends one that is silent for longer than the keep-alive time. The host sends when half of it is over,
    so it may be late by the other half."""
    null = Null()
    with ground.pair(null, reconnect_delay=DELAY, ctrl_loss_tmo=600, keep_alive_tmo=KEEP_ALIVE) as (target, host):
        def stays():
            number = host.path / "cntlid"
            before = number.read_text(encoding="ascii")
            for _ in range(KEEP_ALIVE + 2):
                assert host.state() == "live", f"the idle controller is {host.state()}"
                time.sleep(1)
            assert number.read_text(encoding="ascii") == before, "the controller has connected again"

        stays()
        host.reset()
        ground.figures["resets"] += 1
        stays()
        port_goes(ground, target, host)
        stays()
        ground.verify(host.disk(), null, iodepth=16, size="256k")


def has_users(module):
    """Whether a module is loaded and in use: a controller of Rust's host keeps its module, one of C's does not."""
    count = Path("/sys/module", module.replace("-", "_"), "refcnt")
    return count.exists() and int(count.read_text(encoding="ascii")) > 0


@case("in C's place: replace=1 and the alias, and C's again", links=("rxe",),
      defects={("host", "c"): "it is C's host that the case is about to replace"})
def replace(ground):
    """nvme-fabrics asks for nvme-rdma, which modprobe takes for the alias. The module is in build/."""
    ours, c, null = nvme.HOSTS[ground.host], nvme.HOSTS["c"], Null()

    def used(target, module):
        with nvme.Controller(target, "c") as host:
            assert has_users(ours) == (module == ours), f"the controller is not one of {module}"
            ground.verify(host.disk(), null, iodepth=16, size="256k")

    with null, ground.target(null) as target:
        nvme.unload(ours)
        with nvme.installed(ours, "nvme-rdma", replace=1):
            used(target, ours)
            assert not nvme.loaded(c), f"{c} was loaded"
        nvme.unload(ours)
        used(target, c)
        assert not nvme.loaded(ours), f"{ours} was loaded"
        # Of two transports of one name the first is found.
        nvme.insert(ours, replace=1)
        used(target, c)
        nvme.unload(c, ours)
        nvme.insert(ours)


@contextmanager
def cut(interface):
    """Loses all that an end sends, while its routes stay."""
    sh("tc", "qdisc", "replace", "dev", interface, "root", "netem", "loss", "100%")
    try:
        yield
    finally:
        sh("tc", "qdisc", "del", "dev", interface, "root")


@case("wire cut for longer than the keep-alive time, under load", links=("wire",))
def keep_alive(ground):
    wire.introduce()
    with loaded(ground, keep_alive_tmo=2) as (_, host, __):
        with cut("wire0"), cut("wire1"):
            host.settle("connecting")
            time.sleep(5)
        host.settle()
        ground.figures["reconnects"] += 1


@case("idle on a wire that is cut: the keep-alive finds it", links=("wire",))
def keep_alive_idle(ground):
    wire.introduce()
    null = Null()
    with ground.pair(null, reconnect_delay=DELAY, keep_alive_tmo=2) as (_, host):
        with cut("wire0"), cut("wire1"):
            host.settle("connecting")
        host.settle()
        ground.figures["reconnects"] += 1
        ground.verify(host.disk(), null, iodepth=16, size="256k")


@case("unloaded while /dev/nvme-fabrics of a connection is open", links=("rxe",),
      defects={("host", "c"): "the kernel panics: the file's release calls free_ctrl() of the unloaded module"})
def open_fabrics(ground):
    null = Null()
    with null, ground.target(null) as target:
        host = ground.controller(target)
        words = ",".join(f"{name}={value}" for name, value in host.options.items())
        with open("/dev/nvme-fabrics", "r+b", buffering=0) as fabrics:
            fabrics.write(words.encode())
            module = nvme.HOSTS[ground.host]
            if ground.host == "c":
                rmmod = subprocess.Popen(["rmmod", module])
                until(lambda: not list(nvme.CONTROLLERS.iterdir()), "the controller is still there")
                # It may wait for the file's end, and must not once that has come.
                with suppress(subprocess.TimeoutExpired):
                    rmmod.wait(10)
            else:
                assert in_use(module), "it was unloaded, with a controller"
                sh("nvme", "disconnect", "-n", target.nqn)
                assert not list(nvme.CONTROLLERS.iterdir()), "the controller is still there"
                assert in_use(module), "it was unloaded, with a file that has a controller"
                # By a task that has the file itself.
                said = subprocess.run(["rmmod", module], pass_fds=[fabrics.fileno()], capture_output=True, timeout=60,
                                      check=False)
                assert said.returncode, "it was unloaded, with a file that has a controller"
        if ground.host == "c":
            assert rmmod.wait(60) == 0, "it was not unloaded"
        else:
            sh("rmmod", module)
        nvme.load(ground.host, None)
        with ground.controller(target) as again:
            write_at(again.disk(), 0, bytes(4096))
