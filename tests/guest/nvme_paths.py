# SPDX-License-Identifier: GPL-2.0
"""The cases of several paths to one disk over NVMe over RDMA."""

from contextlib import ExitStack, contextmanager

import nvme
from case import BUILD, sh
from nvme import Load, Null, until
from nvme_faults import DELAY, flowing
from nvme_ground import case

# The states of three ports, one after the other.
STATES = (("optimized", "non-optimized", "inaccessible"), ("inaccessible", "optimized", "non-optimized"),
          ("non-optimized", "inaccessible", "optimized"), ("inaccessible", "inaccessible", "non-optimized"),
          ("optimized", "optimized", "optimized"))


@contextmanager
def ported(ground, number):
    """A backing, its subsystem's ports, so many, and a controller of one host by each."""
    null = Null()
    with null, ground.target(null) as target, ExitStack() as stack:
        ports = [target.port] + [stack.enter_context(nvme.Port(target.subsystem, target.addr))
                                 for _ in range(number - 1)]
        first = ground.controller(target, reconnect_delay=DELAY)
        hosts = [stack.enter_context(ground.controller(target, **{**first.options, "trsvcid": port.trsvcid}))
                 for port in ports]
        yield null, ports, hosts


@case("two paths: each port goes, and I/O goes on", links=("rxe",))
def paths(ground):
    with ported(ground, 2) as (null, ports, hosts):
        disk = hosts[0].disk()
        with Load(disk, size="1m", offset="16m") as load:
            for port, host in zip(ports, hosts):
                flowing(hosts[0])
                port.disable()
                host.settle("connecting")
                flowing(hosts[0])
                port.enable()
                host.settle()
                ground.figures["reconnects"] += 1
            flowing(hosts[0])
            ground.stop(load)
        ground.verify(disk, null, iodepth=16, size="256k", randseed=3)


@case("two paths, one by C's host: each goes under load, and the other takes over", links=("rxe",))
def mixed(ground):
    """Its disk, as nvme-cli and lsblk show it, goes to build/nvme/mixed.txt."""
    null = Null()
    nvme.load("c", None)
    try:
        with null, ground.target(null) as target, nvme.Port(target.subsystem, target.addr) as port, \
                ground.controller(target, reconnect_delay=DELAY) as first, \
                nvme.Controller(target, "c", **{**first.options, "transport": nvme.TRANSPORTS["c"],
                                                "trsvcid": port.trsvcid}) as second:
            disk, ways = first.disk(), [first.way(), second.way()]
            shown(disk)
            with Load(disk, size="1m", offset="16m") as load:
                for _ in range(2):
                    for gone, host, way in ((target.port, first, ways[1]), (port, second, ways[0])):
                        gone.disable()
                        host.settle("connecting")
                        before = done_by(way)
                        flowing(first)
                        assert done_by(way) > before, f"no I/O went by {way}"
                        gone.enable()
                        host.settle()
                        ground.figures["reconnects"] += 1
                for _ in range(2):
                    for state in (("optimized", "inaccessible"), ("inaccessible", "optimized")):
                        for it, way, word in zip((target.port, port), ways, state):
                            nvme.write(it.path / "ana_groups/1/ana_state", word)
                            until(lambda: (way / "ana_state").read_text(encoding="ascii").strip() == word,
                                  f"the host does not know that a path is {word}")
                        flowing(first)
                        ended(ways, state)
                        before = [done_by(way) for way in ways]
                        flowing(first)
                        went = [done_by(way) > then for way, then in zip(ways, before)]
                        assert went == [word == "optimized" for word in state], f"{state}: I/Os went by {went}"
                ground.stop(load)
            ground.verify(disk, null, iodepth=16, size="256k", randseed=3)
    finally:
        if ground.host != "c":
            nvme.unload(nvme.HOSTS["c"])


def shown(disk):
    """Keeps what users see of a disk."""
    lines = []
    for words in (("nvme", "list"), ("nvme", "list-subsys"), ("lsblk", "-o", "NAME,SIZE,TYPE,TRAN", disk)):
        lines += ["# " + " ".join(map(str, words)), sh(*words).stdout]
    folder = BUILD / "nvme"
    folder.mkdir(exist_ok=True)
    (folder / "mixed.txt").write_text("\n".join(lines), encoding="utf-8")


def done_by(way):
    """The reads and writes that were completed by a path."""
    words = (way / "stat").read_text(encoding="ascii").split()
    return int(words[0]) + int(words[4])


def ended(ways, states):
    """Waits for the I/Os that were sent by paths before these became inaccessible."""
    for way, state in zip(ways, states):
        if state == "inaccessible":
            until(lambda: int((way / "stat").read_text(encoding="ascii").split()[8]) == 0,
                  f"I/Os are under way by {way}")


@case("ANA: the states of three ports change under load", links=("rxe",))
def states(ground):
    with ported(ground, 3) as (null, ports, hosts):
        disk, ways = hosts[0].disk(), [host.way() for host in hosts]
        with Load(disk, size="1m", offset="16m") as load:
            for row in STATES:
                for port, way, state in zip(ports, ways, row):
                    nvme.write(port.path / "ana_groups/1/ana_state", state)
                    # The target sends the next event only once the host has read the log.
                    until(lambda: (way / "ana_state").read_text(encoding="ascii").strip() == state,
                          f"the host does not know that a port is {state}")
                flowing(hosts[0])
                ended(ways, row)
                before = [done_by(way) for way in ways]
                flowing(hosts[0])
                went = [done_by(way) > then for way, then in zip(ways, before)]
                best = next(state for state in ("optimized", "non-optimized") if state in row)
                assert any(done for state, done in zip(row, went) if state == best), f"{row}: I/Os went by {went}"
                assert not any(done for state, done in zip(row, went) if state == "inaccessible"), \
                    f"{row}: I/Os went by {went}"
            ground.stop(load)
        ground.verify(disk, null, iodepth=16, size="256k", randseed=3)
