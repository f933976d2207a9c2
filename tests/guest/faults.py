#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Has allocations fail, in a VM, and goes on where the last VM has ended.

faults DIR SECONDS PATIENCE K ANYWHERE [NAME...]: one of K faults of the actions whose names start so, then
one of K of as many as ANYWHERE that hit any allocation. DIR/progress has a line of JSON before each
fault and one after it. Exits with 0 when nothing is left to do, with 4 when another boot is needed, as
after SECONDS, and with 5 when there was no progress for PATIENCE seconds.

Half of the allocations are kmemleak's own and may fail unnoticed, so K is to be odd."""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from faulty import ACTIONS, is_loaded, load, suite, suites

DEBUGFS = Path("/sys/kernel/debug")
KMSG = Path("/dev/kmsg")
# A case that waits allocates again and again. New allocations come earlier than this.
MOST = 3000
# The number of allocations that may come before a fault at any place.
WITHIN = 600
LATER, HANGS = 4, 5


class Progress:
    """What was done, in a file that outlives the VM."""

    def __init__(self, path):
        self.path = path
        self.done = {}
        self.ended = set()
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self.take(json.loads(line))

    def take(self, entry):
        name = entry["action"]
        if entry["event"] == "end":
            self.ended.add(name)
        else:
            self.done[name, entry["where"]] = max(entry["n"], self.done.get((name, entry["where"]), 0))

    def add(self, **entry):
        self.take(entry)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.kill(os.getppid(), signal.SIGUSR1)


def write(path, value):
    path.write_text(str(value), encoding="ascii")


def prepare():
    """Also allocations that may wait, or of memory without an address, fail."""
    for name in ("failslab", "fail_page_alloc"):
        for key in ("ignore-gfp-wait", "verbose", "task-filter", "probability"):
            write(DEBUGFS / name / key, 0)
    write(DEBUGFS / "fail_page_alloc/ignore-gfp-highmem", 0)


def single_pages(fail):
    """Whether allocations of a single page fail, too: a process that starts has very many."""
    write(DEBUGFS / "fail_page_alloc/min-order", int(not fail))


def fail_anywhere(seed):
    """Fails one allocation, in any thread."""
    chosen = random.Random(seed)
    kind = chosen.choice(("failslab", "failslab", "failslab", "fail_page_alloc"))
    write(DEBUGFS / kind / "interval", chosen.randint(2, WITHIN if kind == "failslab" else 40))
    write(DEBUGFS / kind / "times", 1)
    write(DEBUGFS / kind / "probability", 100)


def fail_nowhere():
    """Returns how many have failed."""
    while True:
        try:
            fired = 0
            for name in ("failslab", "fail_page_alloc"):
                if int((DEBUGFS / name / "probability").read_text(encoding="ascii")):
                    fired = 1 - int((DEBUGFS / name / "times").read_text(encoding="ascii"))
            for name in ("failslab", "fail_page_alloc"):
                write(DEBUGFS / name / "probability", 0)
            return fired
        except OSError:
            # The fault has met this, and it was the last.
            continue


def child(function, nth, seed, pipe):
    """Does it, with a fault, and says what has become of it."""
    said, fired = "", None
    with open("/proc/thread-self/fail-nth", "r+b", buffering=0) as fail_nth:
        try:
            if seed:
                fail_anywhere(seed)
            fail_nth.write(str(nth).encode())
            function()
        except BaseException as e:      # pylint: disable=broad-except
            said = f"{type(e).__name__}: {e}"
        finally:
            left = int(os.pread(fail_nth.fileno(), 16, 0).split()[0])
            fail_nth.write(b"0")
            # Later events are not for the thread that waits for the answer.
            fired = fail_nowhere() if seed else nth > 0 and left == 0
    os.write(pipe, json.dumps([bool(fired), said[:200]]).encode())
    os._exit(0)


def attempt(function, nth=0, seed=None):
    """Does it in a process of its own, with the nth allocation of that failing, or with one anywhere.
    Returns whether the fault has come, and what has failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            child(function, nth, seed, writing)
        finally:
            os._exit(1)
    os.close(writing)
    answer = os.read(reading, 4096)
    os.close(reading)
    os.waitpid(pid, 0)
    if answer:
        return json.loads(answer)
    fail_nowhere()
    return True, "the process was ended"


def says(text):
    write(KMSG, text + "\n")


def one(progress, name, where, n, context, args):
    """One fault of an action, and the action without one. Returns whether the fault has come."""
    says(f"rdma-rs test: {name}, {where} {n}")
    progress.add(event="begin", action=name, where=where, n=n)
    with context(*args) as function:
        fault = {"nth": n} if where == "nth" else {"seed": f"{name} {n}"}
        fired, said = attempt(function, **fault)
    try:
        with context(*args) as function:
            _, after = attempt(function)
    except (OSError, subprocess.SubprocessError) as e:
        after = f"{type(e).__name__}: {e}"
    progress.add(event="done", action=name, where=where, n=n, fired=fired, said=said, after=after)
    return fired


def leaks(progress, name):
    """Searches for what an action has leaked; the action is done."""
    says(f"rdma-rs test: {name}, leaks 0")
    found = subprocess.run("/rdma-rs/tests/guest/leaks", capture_output=True, text=True, check=False)
    for line in found.stdout.splitlines():
        says(line)
    Path("/sys/kernel/debug/kmemleak").write_text("clear", encoding="ascii")
    progress.add(event="end", action=name, leaks=found.stdout.count("unreferenced object"))


def faults(progress, every, name, where):
    """The numbers of the faults of an action that are left to do, without an end."""
    first = random.Random(f"{name} {where}").randint(1, every)
    done = progress.done.get((name, where), 0)
    return itertools.count(done + every if done else first, every)


def run_action(progress, every, anywhere, name, context, args):
    """Has the allocations of an action fail, one after the other, then some at any place."""
    # Not for each fault again.
    if not is_loaded("rdma_rs"):
        load("rdma_rs")
    single_pages(False)
    for n in faults(progress, every, name, "nth"):
        yield
        if not one(progress, name, "nth", n, context, args):
            break
    single_pages(True)
    for n in faults(progress, every, name, "anywhere"):
        yield
        if n > anywhere:
            break
        one(progress, name, "anywhere", n, context, args)
    leaks(progress, name)


def run_suite(progress, every, name):
    """Has the allocations of each case of a suite fail, one after the other."""
    title = f"kunit {name}"
    says(f"rdma-rs test: {title}, nth 0")
    single_pages(True)
    with suite(name) as run:
        for n in faults(progress, every, title, "nth"):
            progress.add(event="begin", action=title, where="nth", n=n)
            fired = run(n)
            progress.add(event="done", action=title, where="nth", n=n, fired=fired, said="", after="")
            if not fired or n > MOST:
                break
            yield
    leaks(progress, title)


def watched(patience):
    """Returns in a process of its own, which is to add to the progress. Where it does not, it hangs.

    Who watches allocates nothing meanwhile, so that no fault meets it."""
    def hangs(*_):
        says("rdma-rs fault: it hangs")
        os._exit(HANGS)

    signal.signal(signal.SIGALRM, hangs)
    signal.signal(signal.SIGUSR1, lambda *_: signal.alarm(patience))
    worker = os.fork()
    if not worker:
        return
    signal.alarm(patience)
    _, status = os.waitpid(worker, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("seconds", type=int)
    parser.add_argument("patience", type=int)
    parser.add_argument("every", type=int)
    parser.add_argument("anywhere", type=int)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    progress = Progress(options.dir / "progress")
    names = tuple(options.names) or ("",)

    subprocess.run(["tests/guest/up", "rdma_rs"], check=True)
    subprocess.run(["bash", "-ec", """for i in {1..7}; do
        ip link add rdma$i type dummy
        ip addr add 2001:db8:$i::1/64 dev rdma$i nodad
        ip link set rdma$i up
        done"""], check=True)
    prepare()
    watched(options.patience)
    work = [(name, run_action(progress, options.every, options.anywhere, name, context, args))
            for name, context, args in ACTIONS]
    work += [(f"kunit {name}", run_suite(progress, options.every, name)) for name in suites()]
    for name, steps in work:
        if not name.startswith(names) or name in progress.ended:
            continue
        try:
            for _ in steps:
                if time.monotonic() > end:
                    steps.close()
                    return LATER
        except (OSError, subprocess.SubprocessError) as e:
            says(f"rdma-rs fault: {name}: {type(e).__name__}: {e}")
            print(f"  faults: {name}: {type(e).__name__}: {e}", flush=True)
            # Something of it may still be there: the rest gets another boot.
            progress.add(event="end", action=name, leaks=0, said=str(e))
            return LATER
        print(f"  faults: {name}: up to allocation {progress.done.get((name, 'nth'), 0)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
