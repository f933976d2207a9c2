#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Has allocations fail, in a VM, and goes on where the last VM has ended.

faults DIR SECONDS PATIENCE K ANYWHERE NAME...: has each place of actions fail once (tests/faults) or, with a K
that is not zero, one of K of their allocations, then one of K of as many as ANYWHERE that hit any allocation.
DIR/progress has a line of JSON before each fault and one after it, and a log of each boot is in DIR. Exits
with 0 when nothing is left to do, with 4 when another boot is needed, as after SECONDS, and with 5 when there
was no progress for PATIENCE seconds. Without arguments, prints the names of the actions."""

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from faulty import ACTIONS, modules, suite, suites

DEBUGFS = Path("/sys/kernel/debug")
PLACES = Path("/sys/module/rdma_faults/parameters")
# The fail-nth of a thread that fails at the first place that has not failed yet, and of one that has a thread
# of the kernel do so (tests/faults).
EACH = {"nth": (1 << 32) - 1, "elsewhere": (1 << 32) - 2}
KMSG = Path("/dev/kmsg")
# A case that waits allocates again and again. New allocations, and all places, come earlier than this.
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
    Path(path).write_text(str(value), encoding="ascii")


def prepare():
    """Also allocations that may wait, or of memory without an address, fail."""
    for name in ("failslab", "fail_page_alloc"):
        for key in ("ignore-gfp-wait", "verbose", "task-filter", "probability"):
            write(DEBUGFS / name / key, 0)
    write(DEBUGFS / "fail_page_alloc/ignore-gfp-highmem", 0)
    # KUnit waits for a case, uninterruptibly, for as long.
    write("/proc/sys/kernel/hung_task_timeout_secs", 240)


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


def one(progress, name, where, n, context, args, fault):
    """One fault of an action, and the action without one. Returns whether the fault has come."""
    says(f"rdma-rs test: {name}, {where} {n}")
    progress.add(event="begin", action=name, where=where, n=n)
    with context(*args) as function:
        fired, said = attempt(function, **fault)
    after = again(context, args)
    progress.add(event="done", action=name, where=where, n=n, fired=fired, said=said, after=after)
    return fired


def again(context, args):
    """Does an action without a fault, and returns what has failed."""
    try:
        with context(*args) as function:
            return attempt(function)[1]
    except (OSError, subprocess.SubprocessError) as e:
        return f"{type(e).__name__}: {e}"


def leaks(progress, name):
    """Searches for what an action has leaked; the action is done."""
    says(f"rdma-rs test: {name}, leaks 0")
    found = subprocess.run("/rdma-rs/tests/guest/leaks", capture_output=True, text=True, check=False)
    for line in found.stdout.splitlines():
        says(line)
    Path("/sys/kernel/debug/kmemleak").write_text("clear", encoding="ascii")
    progress.add(event="end", action=name, leaks=found.stdout.count("unreferenced object"))


def numbers(progress, every, name, where):
    """The numbers of the faults of an action that are left to do, without an end."""
    every = every or 1
    first = random.Random(f"{name} {where}").randint(1, every)
    done = progress.done.get((name, where), 0)
    return itertools.count(done + every if done else first, every)


def places(folder, action, shared=""):
    """Has each place of an action fail that did not in an earlier boot, where it may have been the end of it."""
    write(PLACES / "shared", shared)
    write(PLACES / "known", "\n")
    for log in folder.glob("log.*"):
        here = False
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            _, mark, what = line.partition("rdma-rs test: ")
            if mark:
                here = re.match(rf"(kunit )?{re.escape(action.removeprefix('kunit '))}[.,]", what)
            elif here and (place := re.search(r"rdma-rs fault: place (\w+):", line)):
                write(PLACES / "known", place[1])


def kinds(every):
    """The kinds of faults by fail-nth, and the fail-nth of a fault by its number."""
    if every:
        return {"nth": lambda n: n}
    return {where: lambda _, nth=nth: nth for where, nth in EACH.items()}


def run_action(progress, every, anywhere, name, context, args, keeps):
    """Has the allocations of an action fail, one after the other, then some at any place."""
    with modules(*keeps):
        single_pages(False)
        for where, nth in kinds(every).items():
            for n in numbers(progress, every, name, where):
                yield
                if not one(progress, name, where, n, context, args, {"nth": nth(n)}) or n > MOST:
                    break
        single_pages(True)
        for n in numbers(progress, every, name, "anywhere"):
            yield
            if n > anywhere:
                break
            one(progress, name, "anywhere", n, context, args, {"seed": f"{name} {n}"})
        single_pages(False)
    leaks(progress, name)


def run_suite(progress, every, name):
    """Has the allocations of each case of a suite fail, one after the other."""
    title = f"kunit {name}"
    says(f"rdma-rs test: {title}, nth 0")
    single_pages(True)
    with suite(name) as run:
        for where, nth in kinds(every).items():
            run("", 0)
            for n in numbers(progress, every, title, where):
                progress.add(event="begin", action=title, where=where, n=n)
                fired = run(f"{where} {n}", nth(n))
                progress.add(event="done", action=title, where=where, n=n, fired=fired, said="", after="")
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
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    progress = Progress(options.dir / "progress")

    subprocess.run(["tests/guest/up", "rdma_rs", "rdma_faults"], check=True)
    subprocess.run(["bash", "-ec", """for i in {1..7}; do
        ip link add rdma$i type dummy
        ip addr add 2001:db8:$i::1/64 dev rdma$i nodad
        ip link set rdma$i up
        done
        # The addresses of null devices with a connection manager, as in tests/guest/kunit.
        ip addr add 203.0.113.1/32 dev lo
        ip addr add 2001:db8:ff::1/128 dev lo nodad"""], check=True)
    prepare()
    watched(options.patience)
    for name in options.names:
        if name in progress.ended:
            continue
        kind, _, rest = name.partition(" ")
        if kind == "kunit":
            # All that calls the fixtures of the tests does so alike.
            places(options.dir, name, "10rdma_kunit7fixture")
            steps = run_suite(progress, options.every, rest)
        else:
            places(options.dir, name)
            it = next(it for it in ACTIONS if it[0] == name)
            steps = run_action(progress, options.every, options.anywhere, *it)
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
    return 0


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(main())
    for action_name in (*(it[0] for it in ACTIONS), *(f"kunit {name}" for name in suites())):
        print(action_name)
