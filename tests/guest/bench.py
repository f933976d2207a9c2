#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""The benchmark, in a VM: the two modules of samples/perf, one in Rust and one in C, do the same in
turns.

bench CLOCK DIR PHASE...: measures the phases; CLOCK says what a nanosecond is there (instructions,
native or wall). What each run has said goes to DIR/PHASE.jsonl, a line a run, once the phase is
whole.

Where time is measured, what looks slower in Rust is measured again, in fresh rounds."""

import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench_bytes
import perftest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts/benchmark"))
from bench_rows import key, slower

BUILD = Path("/rdma-rs/build") / os.environ["flavour"]
TWINS = {"rust": Path("/sys/kernel/debug/rdma_perf_rs"), "c": Path("/sys/kernel/debug/rdma_perf_c")}
CALLBACKS = ("direct", "softirq", "workqueue", "unbound_workqueue")
CONTEXTS = (*CALLBACKS, "batch", "static")
LATENCY = ("send_lat", "write_lat", "read_lat")
RATE = ("send_rate", "write_rate", "read_rate")
QPS = (1, 4, 16, 64, 256, 1024)
HANDLED_QPS = (1, 32, 1024)
MANY_QPS = (4096, 16384)
HELD = (128, 640)           # Objects that are held to see what one costs: the difference counts.
# Requests on a QP, so: with what the crate adds for its own, below powers of two, so that both twins'
# CQs, which devices round up, grow alike.
DEEP = (112, 1008)
DEPTHS = (1, 4, 16, 64, 256)
ROUND = 1024                # Requests in flight on the null device, over all QPs.
# What is counted in bytes where that is a request.
NAMES = {"void_rate": "request", "queue_rate": "queue request", "pool_rate": "pool request"}
AGAIN = {"wall": 15, "native": 41}  # Rounds of what looks slower, where time is measured.


def grid(**keys):
    """A run for each combination of the values, where several are given."""
    values = [v if isinstance(v, tuple) else (v,) for v in keys.values()]
    return [dict(zip(keys, chosen)) for chosen in itertools.product(*values)]


def void(context, count=ROUND, **keys):
    return grid(load="void_rate", device="null0", context=context, size=64, count=count, **keys)


def arrays(contexts, count, **keys):
    """An array of requests for each QP, and one for all: both twins post them in the order of memory."""
    return grid(load=("queue_rate", "pool_rate"), device="null0", context=contexts, size=64, count=count, **keys)


def plain():
    rows = void(CONTEXTS, depth=64, signal=1, qps=1, warmup=64)
    # The device's share of these; there is no Rust in it.
    return rows + [{**rows[0], "load": "bare_rate", "twin": "c"}]


def storage(count):
    """What storage protocols do: requests that are answered, and transfers by rdma_rw."""
    rows = grid(load=("call_rate", "tag_rate"), device="null0", context=("softirq", "workqueue"), size=64, depth=32,
                count=count)
    return rows + grid(load=("rw_read_rate", "rw_write_rate"), device="null0", context="direct", size=4096, depth=32,
                       count=count)


def guard():
    """Long runs of what takes thousands of instructions, where a tick of the timer more or less does not show, and few."""
    rows = plain() + void("softirq", 4 * ROUND, depth=64, signal=16, qps=1)
    long = storage(8 * ROUND) + grid(load="reg_rate", device="null0", context=CALLBACKS[:3], depth=16, count=8 * ROUND)
    return rows + [row | {"rounds": 9} for row in long]


def null(count):
    rows = guard()
    for qps in QPS:
        rows += void(("direct", "static"), depth=ROUND // qps, signal=1, qps=qps)
    for qps in HANDLED_QPS:
        # The first that are in flight are posted by the caller, and all others by handlers. As in
        # the guard, each comes back 16 times, so that its begin and its end weigh as much.
        rows += void(("softirq", "workqueue"), 16 * ROUND, depth=ROUND // qps, signal=1, qps=qps)
        rows += arrays(("direct", "softirq"), 16 * ROUND, depth=ROUND // qps, qps=qps)
    rows += grid(load=LATENCY, device="null0", context=CONTEXTS, size=64, count=count)
    # No SENDs: they are done when posted, so they would outrun the other end's receives.
    rows += grid(load=RATE[1:], device="null0", context=CONTEXTS, size=64, depth=64, count=4 * count)
    rows += grid(load="write_rate", device="null0", context="softirq", size=64, depth=DEPTHS, count=4 * count)
    return rows + grid(load="reg_rate", device="null0", context=CALLBACKS[3], depth=16, count=count)


def native():
    """Short runs, of some milliseconds each: what else the machine does then disturbs few of them."""
    rows = [row | {"count": 40 * ROUND} for row in plain() + void("softirq", depth=64, signal=16, qps=1)]
    for qps in HANDLED_QPS:
        # Often enough that the begin and the end of each, a lock in Rust, do not weigh much.
        rows += void(CONTEXTS, 128 * ROUND, depth=ROUND // qps, signal=1, qps=qps)
        rows += arrays(("direct", "static", "softirq", "workqueue"), 128 * ROUND, depth=ROUND // qps, qps=qps)
    rows += grid(load=LATENCY, device="null0", context=CONTEXTS, size=64, count=1000)
    rows += storage(8 * ROUND)
    return rows + grid(load="reg_rate", device="null0", context=CALLBACKS, depth=16, count=8 * ROUND)


def scale():
    """With so many QPs that no cache has them, and what it takes to set them up."""
    rows = []
    for qps in MANY_QPS:
        rows += void(("static", "softirq"), 4 * qps, depth=1, signal=1, qps=qps, warmup=1)
        rows += arrays(("direct", "softirq"), 4 * qps, depth=1, qps=qps, warmup=1)
    setup = {"context": "softirq", "warmup": 1}
    rows += grid(load="qp_rate", device="null0", qps=(64, 1024), count=1024, **setup)
    rows += grid(load="qp_rate", device="rxe0", qps=64, count=256, **setup)
    rows += grid(load="cq_rate", device=("null0", "rxe0"), depth=16, qps=64, count=256,
                 **setup | {"context": "workqueue"})
    return rows + grid(load="connect_rate", device="rxe0", addr="192.0.2.1", qps=64, count=64, **setup)


def two_cpus():
    """Two CQs, each with a device, a thread and a CPU of its own."""
    return [row | {"count": 100 * ROUND, "cpus": cpus} for cpus in (1, 2)
            for row in void(("direct", "static", "softirq", "workqueue"), depth=64, signal=1, qps=1)]


def counted():
    """As held(), where the difference is exact: of requests. QPs and CQs are in tables that grow
    in steps, and for connections work items allocate."""
    keys = {"device": "null0", "warmup": 0, "hold": 1}
    for row in (*grid(load="void_rate", context=("direct", "static", "softirq"), size=64, **keys),
                *grid(load=("queue_rate", "pool_rate"), context="direct", size=64, **keys)):
        yield [row | {"depth": n, "count": n} for n in DEEP]


def held():
    """What is held twice, in different numbers, to see what one of it costs."""
    keys = {"context": "softirq", "warmup": 0, "hold": 1}
    few, many = HELD
    for row in (*grid(load="connect_rate", device="rxe0", addr="192.0.2.1", **keys),
                *grid(load="qp_rate", device=("null0", "rxe0"), **keys),
                *grid(load="cq_rate", device=("null0", "rxe0"), depth=16, **keys | {"context": "workqueue"})):
        yield [row | {"qps": n, "count": n} for n in (few, many)]
    for row in grid(load="void_rate", device="null0", size=64, warmup=0, hold=1, qps=16,
                    context=("direct", "static", "softirq")):
        yield [row | {"depth": n, "count": 16 * n} for n in DEEP]


def connections(count, **keys):
    return grid(load="connect_rate", device="rxe0", context=CALLBACKS, addr="192.0.2.1", count=count, **keys)


def wire(device, peer, count):
    """What crosses rxe, on one device or between two. Large messages take long, so there are fewer."""
    ends = {"device": device, "peer": peer, "context": "softirq"}
    rows = grid(load=LATENCY, **ends | {"context": CONTEXTS}, size=64, count=count)
    rows += grid(load=RATE[1:], **ends, size=4096, depth=64, count=2 * count)
    rows += grid(load=RATE, **ends, size=4096, depth=64, signal=16, count=2 * count)
    for size, times in ((64, 4), (4096, 2), (65536, 0.5)):
        rows += grid(load="send_rate", **ends, size=size, depth=(1, 4, 16, 64), count=int(count * times))
    return rows


def rxe(count):
    rows = wire("rxe0", "rxe0", count)
    rows += grid(load="send_rate", device="rxe0", context="softirq", size=64, depth=4, qps=(1, 16, 256),
                 count=8 * count)
    rows += grid(load="reg_rate", device="rxe0", context=CALLBACKS, depth=16, count=count)
    return rows + connections(10)


# Each with its rounds: how often every run of it is made.
PHASES = {
    "guard": (31, guard),
    "null-counted": (15, lambda: null(200)),
    "rxe-counted": (5, lambda: rxe(50)),
    "native": (51, native),
    "native-rxe": (31, lambda: connections(20, warmup=2)),
    "scale": (9, scale),
    "cpus": (25, two_cpus),
    "null": (7, lambda: null(1000)),
    "rxe": (7, lambda: rxe(150)),
    "veth": (5, lambda: wire("rxe1", "rxe2", 150)),
}


def sh(script):
    subprocess.run(["bash", "-ec", script], check=True)


def up(phases):
    """The modules, and the devices that the phases need."""
    sh(f"""
        modprobe -a configfs rdma_cm
        cd {BUILD}
        for module in rdma_rs rdma_perf_rs rdma_perf_c rdma_null; do insmod $module.ko; done
        ip link set lo up
        for n in 0 1; do rdma link add null$n type null netdev lo; done""")
    if {"rxe-counted", "native-rxe", "scale", "bytes", "rxe", "perftest"} & {*phases}:
        sh("""
            modprobe -a dummy rdma_rxe
            ip link add rdma0 type dummy
            ip addr add 192.0.2.1/24 dev rdma0
            ip link set rdma0 up
            rdma link add rxe0 type rxe netdev rdma0""")
    if "veth" in phases:
        sh("""
            modprobe -a veth rdma_rxe
            for n in 1 2; do ip netns add end$n; done
            ip link add veth1 netns end1 type veth peer name veth2 netns end2
            for n in 1 2; do
                ip -n end$n addr add 198.51.100.$n/24 dev veth$n
                ip -n end$n link set veth$n up
            done
            for n in 1 2; do
                ip netns exec end$n rdma link add rxe$n type rxe netdev veth$n
            done""")


def words_of(row):
    return " ".join(f"{key}={value}" for key, value in row.items() if key not in ("twin", "cpus", "rounds"))


def on_two_cpus(twin, row):
    """Two runs at the same time, each on a CPU and a null device of its own: what the first says."""
    row = {key: value for key, value in row.items() if key != "cpus"}
    ready = threading.Barrier(2)

    def go(cpu, folder):
        os.sched_setaffinity(0, {cpu})
        words = words_of(row | {"device": f"null{cpu}"})
        ready.wait()
        (folder / "run").write_text(words)

    # Threads, as each has its own affinity, and writing lets the other run.
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(go, 0, TWINS[twin]), pool.submit(go, 1, TWINS[twin] / "second")]:
            done.result()


def measure(twin, row):
    """One run; what it says."""
    folder = TWINS[twin]
    words = words_of(row)
    # Otherwise the timer's interrupt comes at the same place in each round, or never.
    time.sleep(random.uniform(0, 0.004))
    try:
        if row.get("cpus") == 2:
            on_two_cpus(twin, row)
        else:
            (folder / "run").write_text(words)
    except OSError as e:
        raise SystemExit(f"bench: {twin}: {words}: {e}") from e
    result = {key: int(value) for key, value in map(str.split, (folder / "result").read_text().splitlines())}
    if result["errors"] or not result["ops"]:
        raise SystemExit(f"bench: {twin}: {words}: {result}")
    said = {**row, "twin": twin, "result": result}
    if row["load"].endswith("_lat"):
        said["samples"] = [int(line) for line in (folder / "samples").read_text().split()]
    return said


def measured(rows, rounds, said, **marks):
    """The runs of so many rounds, or of fewer for a row that says so."""
    lines, told = [], time.monotonic()
    for n in range(rounds):
        # The first one changes, so that neither always follows the other.
        order = sorted(TWINS, reverse=bool(n % 2))
        for row in (row for row in rows if n < row.get("rounds", rounds)):
            for twin in (row["twin"],) if "twin" in row else order:
                lines.append({**marks, "round": n, **measure(twin, row)})
        if time.monotonic() > told + 10 or n + 1 == rounds:
            told = time.monotonic()
            print(f"  {said}: {n + 1} of {rounds} rounds of {len(rows)} runs each in Rust and C", flush=True)
    return lines


def allocated():
    """Bytes that are allocated: in slabs, as large kmallocs, and by vmalloc."""
    for cache in Path("/sys/kernel/slab").iterdir():
        # Freed memory is not to look allocated.
        (cache / "shrink").write_text("1")
    used, pages = 0, 0
    for line in Path("/proc/slabinfo").read_text().splitlines()[2:]:
        _, objects, _, size, _, per_slab, _, _, _, _, _, _, _, _, slabs, _ = line.split()
        used += int(objects) * int(size)
        pages += int(slabs) * int(per_slab)
    memory = {key: int(value.split()[0]) << 10
              for key, value in (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())}
    # The rest of what is called slab are the large ones.
    return used + memory["Slab"] - pages * os.sysconf("SC_PAGE_SIZE") + memory["VmallocUsed"]


def settle():
    """Waits until what the last run has left to work items and to RCU is gone."""
    before, now = None, allocated()
    while now != before:
        time.sleep(0.3)
        before, now = now, allocated()


def while_held(twin, row, used, begin=lambda thread: None):
    """What is used while a run holds everything; the thread of the run begins with `begin`."""
    folder = TWINS[twin]

    def go():
        begin(threading.get_native_id())
        (folder / "run").write_text(words_of(row))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(go)
        while not int((folder / "held").read_text()):
            if done.done():
                break
            time.sleep(0.005)
        found = used()
        (folder / "held").write_text("0")
        done.result()
    return found


def slab_bytes(twin, row):
    settle()
    return while_held(twin, row, allocated)


def counted_bytes(twin, row):
    return while_held(twin, row, bench_bytes.end, bench_bytes.begin)


def in_bytes(rounds, plan, used_by, phase, clock):
    """What an object costs: the slope between few and many of them."""
    lines = []
    for n in range(rounds):
        for few, many in plan():
            for twin in sorted(TWINS, reverse=bool(n % 2)):
                used = [used_by(twin, row) for row in (few, many)]
                result = {"objects": many["count"] - few["count"], "bytes": used[1] - used[0]}
                load = NAMES.get(few["load"]) or few["load"].removesuffix("_rate")
                lines.append({"device": few["device"], "context": few["context"], "load": f"{load} bytes",
                              "twin": twin, "result": result, "round": n, "phase": phase, "clock": clock})
    return lines


def run(phase, clock):
    if phase == "bytes":
        return in_bytes(3, held, slab_bytes, phase, "slab")
    if phase == "counted-bytes":
        return in_bytes(3, counted, counted_bytes, phase, "allocations")
    rounds, plan = PHASES[phase]
    rows, marks = plan(), {"phase": phase, "clock": clock}
    lines = measured(rows, rounds, phase, **marks)
    if phase == "guard":
        lines += in_bytes(3, counted, counted_bytes, phase, "allocations")
    if clock not in AGAIN:
        return lines
    # Of so many rows of equal things, a few look slower by chance.
    slow = slower(lines)
    rows = [row for row in rows if key({**marks, **row}) in slow]
    if rows:
        print(f"  {phase}: {len(rows)} rows look slower: measured again", flush=True)
        lines += measured(rows, AGAIN[clock], f"{phase}, again", again=True, **marks)
    return lines


def main():
    clock, folder, phases = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    up(phases)
    for phase in phases:
        Path("/dev/kmsg").write_text(f"rdma-rs test: bench {phase}\n")
        lines = perftest.run() if phase == "perftest" else run(phase, clock)
        part = folder / f"{phase}.part"
        part.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        part.rename(folder / f"{phase}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
