# SPDX-License-Identifier: GPL-2.0
"""The cases of discovery over NVMe over RDMA."""

import json
import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import nvme
from case import sh
from nvme import Null
from nvme_ground import case

DISCOVERY = "nqn.2014-08.org.nvmexpress.discovery"
# NETLINK_KOBJECT_UEVENT, and the event that the log of discovery has changed.
UEVENTS, CHANGED = 15, b"NVME_AEN=0x70f002"


@case("discovery: the subsystem is told, and connect-all connects", links=("rxe",))
def discovery(ground):
    with Null() as null, ground.target(null) as target:
        where = [f"--transport={nvme.TRANSPORTS[ground.host]}", f"--traddr={target.addr}",
                 f"--trsvcid={target.trsvcid}"]
        said = sh("nvme", "discover", *where).stdout
        assert target.nqn in said and f"traddr:  {target.addr}" in said, said
        host = ground.controller(target)
        # The log has no name but "rdma" for a transport.
        sh("nvme", *(["connect-all", *where] if ground.host == "c" else ["connect", *host.words()]))
        ground.verify(host.disk(), null, iodepth=16, size="256k")
        done = subprocess.run(["nvme", "disconnect", f"--nqn={target.nqn}"], capture_output=True, text=True, check=True)
        assert "disconnected 1" in done.stdout, done.stdout
        nvme.until(lambda: not list(nvme.CONTROLLERS.iterdir()), "a controller is still there")


def addresses(ground, target):
    """The addresses of subsystems that a target's discovery log has, by their names."""
    said = sh("nvme", "discover", f"--transport={nvme.TRANSPORTS[ground.host]}", f"--traddr={target.addr}",
              f"--trsvcid={target.trsvcid}", "--output-format=json").stdout
    return {record["subnqn"]: record["traddr"].strip() for record in json.loads(said)["records"]}


@case("discovery: a port on all addresses, and where a host is", links=("rxe",), checkers=True)
def all_addresses(ground):
    """The log tells a host the address that it has come to, and debugfs tells the host's own."""
    with Null() as null, nvme.Target(null, addr="0.0.0.0") as target:
        where = SimpleNamespace(addr=ground.addr, trsvcid=target.trsvcid, nqn=target.nqn, backings=target.backings)
        told = addresses(ground, where)
        assert told.get(target.nqn) == ground.addr, f"the log has {told}"
        with ground.controller(where) as host:
            ground.verify(host.disk(), null, iodepth=16, size="256k")
            path, = Path("/sys/kernel/debug/nvmet", target.nqn).glob("ctrl*/host_traddr")
            seen = path.read_text(encoding="ascii").strip()
            assert seen == ground.addr, f"the host is at {seen}"


@case("discovery: connect-all loads the host's module, Rust's in C's place, and connects to all", links=("rxe",))
def connect_all(ground):
    ours, other = nvme.HOSTS[ground.host], nvme.HOSTS["rust" if ground.host == "c" else "c"]
    nulls = (Null(), Null())
    nvme.unload(ours)
    try:
        with nvme.installed(ours, "nvme-rdma", replace=1), ExitStack() as stack:
            first, second = [stack.enter_context(ground.target(stack.enter_context(null))) for null in nulls]
            link = first.port.path / "subsystems" / second.nqn
            link.symlink_to(second.subsystem)
            stack.callback(link.unlink)
            hosts = [nvme.Controller(target, "c") for target in (first, second)]
            options = {name: hosts[0].options[name] for name in ("transport", "traddr", "trsvcid", "hostnqn", "hostid")}
            stack.callback(sh, "nvme", "disconnect-all")
            sh("nvme", "connect-all", *(word for name, value in options.items() for word in nvme.option(name, value)))
            assert nvme.loaded(ours) and not nvme.loaded(other), f"{other} was loaded, or {ours} was not"
            for host, null in zip(hosts, nulls):
                ground.verify(host.disk(), null, iodepth=16, size="256k")
            found = sorted(path.name for path in nvme.CONTROLLERS.iterdir())
            assert len(found) == len(hosts), f"there are the controllers {found}"
    finally:
        nvme.unload(*nvme.HOSTS.values())
        nvme.insert(ours)


@contextmanager
def discovering(ground, target, **options):
    """A host that stays connected to the discovery controller of a target."""
    where = SimpleNamespace(addr=target.addr, trsvcid=target.trsvcid, nqn=DISCOVERY, backings=())
    with ground.controller(where, **options) as host:
        yield host


@case("discovery: the keep-alive", links=("rxe",))
def keep_alive(ground):
    """blktests' nvme/003: a discovery controller outlives its keep-alive time twice, and is never reset."""
    seconds = 5
    with Null() as null, ground.target(null) as target, discovering(ground, target, keep_alive_tmo=seconds) as host:
        time.sleep(2 * seconds + 1)
        assert host.state() == "live", host.state()
        log = sh("dmesg").stdout.rpartition("rdma-rs test: ")[2]
        for word in ("keep-alive timer", "failed nvme_keep_alive", "reconnecting"):
            assert word not in log, f"the kernel said: {word}"


@case("discovery: events, as a subsystem comes and goes", links=("rxe",))
def events(ground):
    other = nvme.NVMET / "subsystems" / "rdma-rs-other"
    link = "subsystems/rdma-rs-other"
    with Null() as null, ground.target(null) as target, discovering(ground, target) as host, \
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, UEVENTS) as uevents:
        uevents.bind((0, 1))
        uevents.settimeout(120)

        def told():
            """Waits for the event, and reads the log: only then the next event is sent. Returns the subsystems."""
            said = b""
            while not (said.split(b"\0")[0].endswith(f"/{host.name}".encode()) and CHANGED in said):
                said = uevents.recv(1 << 16)
            said = sh("nvme", "discover", f"--device={host.name}", "--output-format=json").stdout
            return {record["subnqn"] for record in json.loads(said)["records"]}

        other.mkdir()
        try:
            nvme.write(other / "attr_allow_any_host", 1)
            for _ in range(3):
                (target.port.path / link).symlink_to(other)
                found = told()
                assert other.name in found, f"the log has {found}"
                (target.port.path / link).unlink()
                found = told()
                assert other.name not in found, f"the log has {found}"
        finally:
            (target.port.path / link).unlink(missing_ok=True)
            other.rmdir()
        assert host.state() == "live", host.state()
