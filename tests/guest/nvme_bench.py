#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""NVMe over RDMA in the benchmark, in a VM whose clock counts instructions: fio on a host and a target of the
same machine, by pairs of modules in turns.

nvme_bench DIR PHASE FIRST OTHER...: PHASE is nvme-read or nvme-write, each pair HOST:TARGET, as nvme.py names
them (c:c). An end in Rust saves no completions but by parameters behind it (rust,sig_limit=16:c), or by all that do
(rust+:rust+). What each job has said goes to DIR/PHASE.jsonl, a line a job, once the phase is whole. PHASE nvme-guard
is one row of it, in shorter jobs. The first turn of a boot is discarded: it is up to 0.7 % dearer. PHASE nvme-wall
is reads and writes in a VM of two CPUs, whose clock is the wall's.

nvme_bench modes: counts what one I/O takes of the kernel's work items, softirqs, polls and switches of tasks.

nvme_bench DIR nvme-functions PAIR...: has a plugin of QEMU (scripts/benchmark/functions.c) count each instruction of two
jobs of each load, by each pair, into DIR, where DIR/nvme-functions.jsonl says what was counted, and DIR/symbols-PAIR
which functions the addresses are of.

nvme_bench DIR nvme-connections PAIR...: the bytes that a connection takes with one I/O queue and with more, by each
pair of ends, and the instructions that connecting and disconnecting take, those of nvme-core and nvmet among them.

With --ios N jobs have so many I/Os, and with --turns N each pair has so many turns: fewer try the benchmark itself, and
count too coarsely to tell anything else."""

import argparse
import itertools
import json
import os
import re
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import nvme
from case import sh
from marks import mark

IOS = 10_000
TURNS = 2                   # Of each pair.
# By the MTU of the interface, sizes and depths. The packets of RoCE have 1,024 bytes by the first, 4,096 by the second.
ROWS = {1500: ((512, 4096), (1, 4, 16, 64)), 4400: ((4096,), (1, 16))}
# What the guard measures, in one turn of each pair: fio says a millisecond, which is 0.0010 of such a job.
GUARD_ROWS = {1500: ((4096,), (1,))}
GUARD_IOS = 5_000
# What is measured by the wall clock, in many short turns.
WALL_ROWS = {1500: ((512, 4096), (1, 4, 16))}
WALL_IOS = 1_000
WALL_TURNS = 9
# What saves completions in either module in Rust (nvme-host.rst, nvme-target.rst), and what saves none. Which of it is
# the default does not matter here.
HOST_SAVINGS = ("sig_limit=16", "copied_data_size=4096")
TARGET_SAVINGS = ("sig_limit=16", "kept_data_size=4096")
HOST_PLAIN = ("sig_limit=1", "copied_data_size=0")
TARGET_PLAIN = ("sig_limit=1", "kept_data_size=0")
# Connections that exist at once.
CONNECTIONS = 24
# Those that exist before, so that what many have in common exists.
FIRST = 4
# By the number of I/O queues: on one CPU there is one of each kind, and the last one is polled.
QUEUES = {1: "nr_io_queues=1", 3: "nr_io_queues=1,nr_write_queues=1,nr_poll_queues=1"}
# The loads whose functions are counted, in jobs of two lengths: what both begin and end with is not in their difference.
FUNCTIONS = tuple((load, size, 16) for load in ("read", "write") for size in (512, 4096))
FEW, MANY = 1_000, 3_000
TRACING = Path("/sys/kernel/tracing")
# The keys by which each event is counted.
EVENTS = {"workqueue/workqueue_execute_start": "function.sym", "rdma_core/cq_poll": "cq_id,rc",
          "irq/softirq_entry": "vec", "sched/sched_switch": "prev_comm"}
WORK = {"blk_mq_run_work_fn": "kblockd", "ib_cq_poll_work": "ib-comp-wq", "do_work": "rxe tasks"}
IRQ_POLL = 5


def set_mtu(mtu):
    sh("ip", "link", "set", "rdma0", "mtu", str(mtu))


def loaded_with(end, savings, plain, module_with):
    """The name of an end, and what loads its module with parameters, if it has some: by rust all that save are off, but
    for those that follow, and by rust+ on."""
    name, *words = end.split(",")
    if name.endswith("+"):
        name, words = name[:-1], [*savings, *words]
    elif name == "rust":
        words = [*plain, *words]
    return name, module_with(name, **dict(word.split("=") for word in words)) if words else nullcontext()


@contextmanager
def ends(pair):
    """Has the modules of a pair loaded, and gives the names of its ends."""
    host, target = pair.split(":")
    host, by_host = loaded_with(host, HOST_SAVINGS, HOST_PLAIN, nvme.host_with)
    target, by_target = loaded_with(target, TARGET_SAVINGS, TARGET_PLAIN, nvme.target_with)
    with nvme.ends(host, target), by_host, by_target:
        yield host, target


@contextmanager
def disk(pair, scheduler="none"):
    """A disk of one queue whose target has a null_blk device behind it, by the modules of a pair."""
    with ends(pair) as (host, _), nvme.Null(memory_backed=0) as null:
        with nvme.Target(null) as served, nvme.Controller(served, host, nr_io_queues=1) as controller:
            path = controller.disk()
            # For a disk of one queue the kernel takes mq-deadline, which has a work item submit each request.
            for elevator in controller.path.glob("nvme*n*/queue/scheduler"):
                elevator.write_text(scheduler)
            yield path
    nvme.none_left()


def job(path, load, size, depth, ios=IOS, **more):
    """What a job of fio says: nanoseconds, which are instructions where these are counted."""
    figures = nvme.fio(path, rw=f"rand{load}", bs=size, iodepth=depth, number_ios=ios, size="64m",
                       norandommap=1, lat_percentiles=1, clat_percentiles=0, **more)
    figures = figures[load]
    return {"ops": figures["total_ios"], "ns": figures["runtime"] * 1_000_000,
            "p99": figures["lat_ns"]["percentile"]["99.000000"]}


def turn(pair, loads, said, wanted, ios):
    """All rows of a phase by one pair."""
    for mtu, (sizes, depths) in wanted.items():
        set_mtu(mtu)
        with disk(pair) as path:
            # The first one finds nothing in its place: allocations, code that is patched when it first runs.
            job(path, loads[0], sizes[0], 1, IOS // 10)
            for load, size in itertools.product(loads, sizes):
                for depth in depths:
                    yield {"load": f"nvme {load}", "device": "rxe0", "size": size, "mtu": mtu, "depth": depth,
                           "result": job(path, load, size, depth, ios)}
                print(f"  {said}: {load}s of {size:,} bytes at MTU {mtu:,} of depth {', '.join(map(str, depths))}",
                      flush=True)


def order(pairs, rounds):
    """The turns of pairs: (round, place, pair). Jobs get up to 0.4 % dearer from one round to the next, so every other
    round goes backwards."""
    places = list(enumerate(pairs))
    return [(n, place, pair) for n in range(rounds) for place, pair in (places[::-1] if n % 2 else places)]


class Phase:
    """What a phase measures: loads, rows, by which clock, and unless that is given, in jobs of how many I/Os and in how
    many turns of each pair."""

    def __init__(self, loads, rows=None, clock="instructions", ios=IOS, turns=TURNS):
        self.loads, self.rows, self.clock, self.ios, self.turns = loads, rows or ROWS, clock, ios, turns


PHASES = {
    "nvme-read": Phase(("read",)),
    "nvme-write": Phase(("write",)),
    "nvme-guard": Phase(("read",), GUARD_ROWS, ios=GUARD_IOS, turns=1),
    "nvme-wall": Phase(("read", "write"), WALL_ROWS, "wall", WALL_IOS, WALL_TURNS),
}


def measure(folder, name, pairs, ios, turns):
    phase, lines = PHASES[name], []
    ios, turns = ios or phase.ios, turns or phase.turns
    # Otherwise the pair that comes first, which the others are compared with, would have more to spare.
    for _ in turn(pairs[0], phase.loads, f"{name}: discarded turn, {pairs[0]}", phase.rows, ios):
        pass
    for turned, (n, place, pair) in enumerate(order(pairs, turns), 1):
        said = f"{name}: turn {turned} of {turns * len(pairs)}, {pair}"
        lines += [{"phase": name, "clock": phase.clock, "round": n, "place": place, "pair": pair, **line}
                  for line in turn(pair, phase.loads, said, phase.rows, ios)]
    keep(folder, name, lines)


def keep(folder, phase, lines):
    """Writes what a phase has measured, once it is whole."""
    part = folder / f"{phase}.part"
    part.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    part.rename(folder / f"{phase}.jsonl")


@contextmanager
def counting(counts):
    """Has the kernel count its events meanwhile, and puts (event, key, value) and their numbers into a dictionary."""
    triggers = {TRACING / "events" / event: f"hist:keys={keys}:size=2048" for event, keys in EVENTS.items()}
    for folder, trigger in triggers.items():
        (folder / "trigger").write_text(trigger)
    yield
    for folder, trigger in triggers.items():
        for keys, hits in re.findall(r"^\{ (.*?) *\} hitcount: +(\d+)", (folder / "hist").read_text(), re.M):
            counts[folder.name, *(part.partition(":")[2].strip() for part in keys.split(","))] = int(hits)
        (folder / "trigger").write_text(f"!{trigger}")


def per_io(counts, ios):
    """What one I/O took, by name."""
    found = {name: 0 for name in (*WORK.values(), "irq_poll", "CQEs", "polls", "switches")}
    for (event, *keys), hits in counts.items():
        if event == "workqueue_execute_start":
            function = keys[0].split("] ")[-1].split(" [")[0]
            if function in WORK:
                found[WORK[function]] += hits
        elif event == "softirq_entry":
            found["irq_poll"] += hits * (int(keys[0]) == IRQ_POLL)
        elif event == "cq_poll":
            found["polls"] += hits
            found["CQEs"] += hits * int(keys[1])
        else:
            found["switches"] += hits
    return {name: hits / ios for name, hits in found.items()}


def modes():
    """Which batches there are, by the scheduler of the disk, by depth, and by how fio submits."""
    if not TRACING.is_mount():
        sh("mount", "-t", "tracefs", "tracefs", TRACING)
    set_mtu(1500)
    ios = IOS // 10
    for scheduler in ("none", "mq-deadline"):
        with disk("c:c", scheduler) as path:
            job(path, "read", 512, 1, ios)
            for depth, batch in ((1, 1), (16, 1), (16, 16)):
                more = {"iodepth_batch_submit": batch, "iodepth_batch_complete_max": batch}
                alone, counts = job(path, "read", 4096, depth, ios, **more), {}
                with counting(counts):
                    job(path, "read", 4096, depth, ios, **more)
                print(f"{scheduler}, depth {depth}, {batch} a call: {alone['ns'] / alone['ops']:,.0f} ns an I/O; "
                      + ", ".join(f"{hits:.2f} {name}" for name, hits in per_io(counts, ios).items()), flush=True)


def functions(folder, phase, pairs):
    """Has the instructions of each load be counted by their addresses, by each pair."""
    set_mtu(1500)
    lines, marks = [], 0
    for pair in pairs:
        with disk(pair) as path:
            job(path, "read", 512, 1, FEW)
            for load, size, depth in FUNCTIONS:
                job(path, load, size, depth, FEW)
                for ios in (FEW, MANY):
                    mark()
                    job(path, load, size, depth, ios)
                    mark()
                    # What is counted before the first mark of the two is nothing of the job.
                    marks += 2
                    lines.append({"phase": phase, "pair": pair, "load": f"nvme {load}", "size": size, "depth": depth,
                                  "ios": ios, "counts": f"counts-{marks - 1}"})
                print(f"  {pair}: {load} of {size:,} bytes, depth {depth}", flush=True)
            symbols = Path("/proc/kallsyms").read_text(encoding="ascii")
            (folder / f"symbols-{pair}").write_text(symbols, encoding="ascii")
    keep(folder, phase, lines)


def free():
    """The bytes of memory that nothing uses, once caches are dropped and work items have freed what they are to free."""
    time.sleep(10)
    sh("sync")
    found, before = 0, -1
    # A dentry that is dropped has its inode be dropped the next time, and so on.
    while found > before:
        before = found
        Path("/proc/sys/vm/drop_caches").write_text("3")
        Path("/proc/sys/vm/compact_memory").write_text("1")
        time.sleep(1)
        # Those that a processor keeps for its next allocation are free, too.
        kept = re.findall(r"^ +count: +(\d+)$", Path("/proc/zoneinfo").read_text(encoding="ascii"), re.M)
        found = max(before, (os.sysconf("SC_AVPHYS_PAGES") + sum(map(int, kept))) * os.sysconf("SC_PAGESIZE"))
    return found


def busy():
    """The nanoseconds for which the CPU has run tasks."""
    # So that the time of this one is among them, and that of work items which end a connection.
    time.sleep(1)
    cpu, = [line for line in Path("/proc/schedstat").read_text(encoding="ascii").splitlines() if line.startswith("cpu")]
    return int(cpu.split()[7])


def connect(target, host, queues):
    """Makes a controller, without nvme-cli, which would be most of it. Returns its number."""
    options = {"transport": nvme.TRANSPORTS[host], "traddr": target.addr, "trsvcid": target.trsvcid, "nqn": target.nqn,
               "queue_size": 128}
    with nvme.FABRICS.open("r+b", buffering=0) as file:
        file.write(",".join([*(f"{name}={value}" for name, value in options.items()), "duplicate_connect",
                             QUEUES[queues]]).encode())
        return int(re.match(rb"instance=(\d+),", file.read(64))[1])


def disconnect(number):
    nvme.write(nvme.CONTROLLERS / f"nvme{number}/delete_controller", 1)


def connected(pair, queues):
    """What each of some connections takes by a pair of ends: bytes, and nanoseconds to connect and to disconnect; and of
    the bytes, how many were not free again afterwards, or more than before."""
    with ends(pair) as (host, _):
        with nvme.Target() as served:
            # The first one finds nothing in its place.
            number = connect(served, host, queues)
            said = (nvme.CONTROLLERS / f"nvme{number}/queue_count").read_text(encoding="ascii")
            assert int(said) == queues + 1, f"{said.strip()} queues, the admin queue among them"
            disconnect(number)
        nvme.none_left()
        # The device keeps the CQs that ends in C share (ib_cq_pool_get()) until it goes.
        sh("rdma", "link", "delete", "rxe0")
        sh("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "rdma0")
        with nvme.Target() as served:
            first = [connect(served, host, queues) for _ in range(FIRST)]
            before, begin = free(), busy()
            numbers = [connect(served, host, queues) for _ in range(CONNECTIONS)]
            connecting = busy() - begin
            taken, begin = before - free(), busy()
            for number in numbers:
                disconnect(number)
            disconnecting = busy() - begin
            drift = before - free()
            for number in first:
                disconnect(number)
    nvme.none_left()
    return {"bytes": taken / CONNECTIONS, "drift": drift / CONNECTIONS, "connect": connecting / CONNECTIONS,
            "disconnect": disconnecting / CONNECTIONS}


def connections(folder, phase, pairs, turns):
    """Connections by pairs of ends in turns."""
    lines = []
    for n, place, pair in order(pairs, turns):
        for queues in QUEUES:
            result = connected(pair, queues)
            lines.append({"phase": phase, "round": n, "place": place, "pair": pair, "queues": queues, "result": result})
            print(f"  {phase}: round {n + 1} of {turns}, {pair}, {queues} I/O queues: "
                  + ", ".join(f"{name} {figure:,.0f}" for name, figure in result.items()), flush=True)
    keep(folder, phase, lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ios", type=int)
    parser.add_argument("--turns", type=int)
    parser.add_argument("folder")
    parser.add_argument("phase", nargs="?")
    parser.add_argument("pairs", nargs="*")
    given = parser.parse_args()
    nvme.up("rxe")
    if given.folder == "modes":
        modes()
    elif given.phase == "nvme-connections":
        connections(Path(given.folder), given.phase, given.pairs, given.turns or TURNS)
    elif given.phase == "nvme-functions":
        functions(Path(given.folder), given.phase, given.pairs)
    else:
        measure(Path(given.folder), given.phase, given.pairs, given.ios, given.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
