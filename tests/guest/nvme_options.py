# SPDX-License-Identifier: GPL-2.0
"""The cases of what users set of NVMe over RDMA: addresses, options of nvme connect, attributes of a port, aliases."""

import json
import random
import re
import socket
import subprocess
import uuid
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import nvme
import wire
from case import sh
from nvme import Load, Null, until
from nvme_discovery import addresses
from nvme_faults import flowing, loaded
from nvme_ground import case
from nvme_wire import CAPSULE

# Of the host on each link: its interface, its device, and a second address.
ENDS = {"rxe": ("rdma0", "rxe0", "192.0.2.3"), "wire": ("wire0", "near0", "198.51.100.3")}
ADDR6 = "2001:db8::1"
# An address that no interface has.
NOWHERE = "203.0.113.77"


def peers(target):
    """The addresses from which the connections of a target come, as its RDMA objects have them."""
    said = sh("rdma", "resource", "show", "cm_id").stdout
    return re.findall(rf" state (?!LISTEN )\S+ .* src-addr \S+:{target.trsvcid} dst-addr (\S+):\d+", said)


def refused(ground, target, **options):
    """Fails if a host connects with these options, or leaves a controller."""
    words = ground.controller(target, **options).words()
    done = subprocess.run(["nvme", "connect", *words], capture_output=True, timeout=120, check=False)
    left = [path.name for path in nvme.CONTROLLERS.iterdir()]
    sh("nvme", "disconnect-all")
    assert done.returncode and not left, f"with {options} it has ended with {done.returncode}, and left {left}"


@contextmanager
def second_address(link):
    """The host has another address, from which its target can be reached as from the first one."""
    interface, device, addr = ENDS[link]
    sh("ip", "addr", "add", f"{addr}/24", "dev", interface)
    try:
        if link == "wire":
            wire.reach(addr, wire.FAR, "wire1")
        gids = Path("/sys/class/infiniband", device, "ports/1/gids")
        gid = socket.inet_pton(socket.AF_INET, addr).hex(" ", 2).replace(" ", ":")
        until(lambda: any(path.read_text(encoding="ascii").strip().endswith(f":ffff:{gid}")
                          for path in gids.iterdir()), f"{device} has no GID of {addr}")
        yield addr
    finally:
        sh("ip", "addr", "del", f"{addr}/24", "dev", interface)
        if link == "wire":
            sh("ip", "route", "del", addr, "table", "100")


@case("host_traddr: the connection comes from the address that is named")
def host_traddr(ground):
    null = Null()
    with second_address(ground.link) as second, null, ground.target(null) as target:
        first = ground.addr if ground.link == "rxe" else wire.NEAR
        for options, addr in (({}, first), ({"host_traddr": second}, second), ({"host_traddr": first}, first)):
            with ground.controller(target, **options) as host:
                found = peers(target)
                assert len(found) >= 2 and set(found) == {addr}, f"{options}: connections come from {found}"
                ground.verify(host.disk(), null, iodepth=16, size="256k")
                host.reset()
                ground.figures["resets"] += 1
                assert set(peers(target)) == {addr}, f"{options}: connections come from {peers(target)} after a reset"
        refused(ground, target, host_traddr=NOWHERE)


class Packets:
    """The packets of connections that an interface sends and receives while this is open."""

    ROCE, UDP = (4791).to_bytes(2, "big"), 17

    def __init__(self, interface):
        # ETH_P_ALL: only these sockets get what is sent.
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.bind((interface, 0))
        self.socket.setblocking(False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def seen(self):
        """The source and the type of service of those that have come, but the connection manager's: its QP is 1."""
        found = set()
        while True:
            try:
                frame = self.socket.recv(128)
            except BlockingIOError:
                return found
            ethernet, ip, udp, bth = frame[:14], frame[14:34], frame[34:42], frame[42:]
            if ethernet[12:] == b"\x08\0" and ip[9] == self.UDP and udp[2:4] == self.ROCE and bth[5:8] != b"\0\0\x01":
                found.add((socket.inet_ntoa(ip[12:16]), ip[1]))


@case("tos: the type of service of the packets, both ways", links=("wire",))
def tos(ground):
    null = Null()
    with null, ground.target(null) as target:
        for options, value in (({}, 0), ({"tos": 0}, 0), ({"tos": 0x28}, 0x28), ({"tos": 0xb8}, 0xb8)):
            with Packets("wire0") as packets, ground.controller(target, **options) as host:
                for _ in range(2):
                    ground.verify(host.disk(), null, bs="16k", iodepth=16, size="256k")
                    found = packets.seen()
                    assert found == {(wire.NEAR, value), (wire.FAR, value)}, f"{options}: packets have {found}"
                    host.reset()
                    ground.figures["resets"] += 1


@case("an IPv6 address, under load: reset, and the port disabled and enabled", links=("rxe",))
def ipv6(ground):
    ground.addr = ADDR6
    with loaded(ground) as (target, host, _):
        assert set(peers(target)) == {ADDR6}, f"connections come from {peers(target)}"
        host.reset()
        ground.figures["resets"] += 1
        flowing(host)
        target.disable()
        host.settle("connecting")
        target.enable()
        host.settle()
        ground.figures["reconnects"] += 1


@case("ports on all addresses, of IPv4 and of IPv6", links=("rxe",))
def all_families(ground):
    """Each listens for its own family, so that both can have one service id, and tells the address that was reached."""
    null = Null()
    families = {"0.0.0.0": ground.addr, "::": ADDR6}
    with null:
        for first, *more in (("0.0.0.0",), ("::",), ("0.0.0.0", "::"), ("::", "0.0.0.0")):
            with nvme.Target(null, addr=first) as target, ExitStack() as ports:
                for addr in more:
                    ports.enter_context(nvme.Port(target.subsystem, addr, target.trsvcid))
                for everywhere, addr in families.items():
                    where = SimpleNamespace(addr=addr, trsvcid=target.trsvcid, nqn=target.nqn,
                                            backings=target.backings)
                    if everywhere not in (first, *more):
                        refused(ground, where)
                        continue
                    told = addresses(ground, where)
                    assert told.get(target.nqn) == addr, f"the log has {told}"
                    with ground.controller(where) as host:
                        assert set(peers(target)) == {addr}, f"connections come from {peers(target)}"
                        ground.verify(host.disk(), null, iodepth=16, size="256k")


@case("alias: enabling a port loads the target's module", links=("rxe",))
def alias(ground):
    """nvmet asks for nvmet-transport-1, which depmod finds in the modules that are installed."""
    module, null = nvme.TARGETS[ground.end], Null()
    nvme.unload(module)
    try:
        with nvme.installed(module), null, ground.target(null) as target:
            assert nvme.loaded(module), f"{module} was not loaded"
            with ground.controller(target) as host:
                ground.verify(host.disk(), null, iodepth=16, size="256k")
    finally:
        nvme.unload(*nvme.TARGETS.values())
        nvme.insert(module)


# What is configured, and what hosts are told: bytes of inline data, entries of a queue, and the size of the largest
# transfer, as a power of two of 4 KiB.
LIMITS = {"inline_data_size": ((-1, 4096), (0, 0), (512, 512), (16384, 16384), (16385, 16384), (1 << 30, 16384)),
          "max_queue_size": ((-1, 128), (0, 16), (17, 17), (256, 256), (257, 256), (1 << 30, 256)),
          "mdts": ((0, 8), (1, 1), (8, 8), (9, 8), (255, 8))}


def number(path):
    return int(path.read_text(encoding="ascii"))


def limits(host):
    """What the controller tells its host, by the names of the attributes."""
    device = f"/dev/{host.name}"
    said = json.loads(sh("nvme", "id-ctrl", device, "--output-format=json").stdout)
    cap = int(re.search(r"value: *(\w+)", sh("nvme", "get-property", device, "--offset=0").stdout)[1], 16)
    mqes = (cap & 0xffff) + 1
    assert said["maxcmd"] == mqes, f"{said['maxcmd']} commands, and queues of {mqes}"
    return {"inline_data_size": 16 * said["ioccsz"] - CAPSULE, "max_queue_size": mqes, "mdts": said["mdts"]}


for name, values in LIMITS.items():
    @case(f"limits of a port: {name}", name, values, links=("rxe",))
    def port_limits(ground, attribute, pairs):
        null = Null()
        with null:
            for value, limit in pairs:
                expected = {"inline_data_size": 4096, "max_queue_size": 128, "mdts": 8, attribute: limit}
                options = {"nr_io_queues": 1, "queue_size": 1024}
                with ground.target(null, **{f"param_{attribute}": value}) as target, \
                        ground.controller(target, **options) as host:
                    told = limits(host)
                    assert told == expected, f"{attribute} {value}: the host is told {told}"
                    entries = number(host.path / "sqsize") + 1
                    assert entries == told["max_queue_size"], f"the host has queues of {entries} entries"
                    most = number(Path("/sys/block", host.disk().name, "queue/max_hw_sectors_kb"))
                    assert most == 4 << told["mdts"], f"the host sends up to {most} KiB"
                    ground.content(host.disk(), null, (512, 4096, 16384, 16896), random.Random(value))
                    ground.verify(host.disk(), null, bs="64k", iodepth=16, size="1m")


# Namespaces that are mapped anew, and how often.
REMAPPED, TIMES = range(2, 6), 10


@case("namespaces mapped to other backings under load, rapidly", links=("rxe",))
def remapped(ground):
    """blktests' nvme/058. The host finds each namespace with the backing that it has in the end, by its UUID."""
    null, others = Null(), [Null(size=16) for _ in range(len(REMAPPED) + 1)]
    with ExitStack() as stack:
        for backing in others:
            backing.namespace = {"device_uuid": str(uuid.uuid4())}
            stack.enter_context(backing)
        target, host = stack.enter_context(ground.pair(null))
        for nsid in REMAPPED:
            stack.callback(target.remove, nsid)
        with Load(host.disk(), size="1m", offset="16m") as load:
            for n in range(TIMES):
                mapped = dict(zip(REMAPPED, others[n % len(others):] + others[:n % len(others)]))
                for nsid, backing in mapped.items():
                    target.remove(nsid)
                    target.add(nsid, backing)
            flowing(host)
            ground.stop(load)
        for nsid, backing in mapped.items():
            until(lambda: has_uuid(host, nsid, backing), f"the host does not have namespace {nsid}")
            ground.content(host.disk(nsid), backing, (512, 4096, 65536), random.Random(nsid))
        ground.verify(host.disk(), null, iodepth=16, size="256k", randseed=3)


def has_uuid(host, nsid, backing):
    """Whether the host's disk of a namespace is this backing; has it look again if not."""
    disk = host.find(nsid)
    with suppress(OSError):
        if disk and Path("/sys/block", disk.name, "uuid").read_text(encoding="ascii").strip() == \
                backing.namespace["device_uuid"]:
            return True
    # A namespace is announced before it can be identified.
    nvme.write(host.path / "rescan_controller", 1)
    return False


@contextmanager
def dummy_down():
    """Takes the dummy interface down while this is open."""
    sh("ip", "link", "set", "rdma0", "down")
    try:
        yield
    finally:
        sh("ip", "link", "set", "rdma0", "up")
        # IPv6 addresses go with the interface.
        sh("ip", "addr", "add", f"{ADDR6}/64", "dev", "rdma0", "nodad")


# That of the target on a wire: packets of the host have a route and its MAC address, and are dropped.
@case("the interface goes down and up again under load, twice", patched=True)
def interface_down(ground):
    if ground.link == "wire":
        wire.introduce()
    with loaded(ground) as (_, host, __):
        for _ in range(2):
            with wire.far_down() if ground.link == "wire" else dummy_down():
                host.settle("connecting")
            host.settle()
            ground.figures["reconnects"] += 1
            flowing(host)
