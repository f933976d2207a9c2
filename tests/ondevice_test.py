#!/usr/bin/python3 -B
# SPDX-License-Identifier: GPL-2.0
"""Has signals come to scripts/on-device at random moments: what it had made is undone, and nothing else."""

import os
import random
import signal
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

LOADER = SourceFileLoader("on_device", str(Path(__file__).resolve().parents[1] / "scripts/on-device"))
kit = module_from_spec(spec_from_loader("on_device", LOADER))
LOADER.exec_module(kit)
RUNS, MOST = 2000, 0.003


def open_files():
    return os.listdir("/proc/self/fd")


def attempt(delay):
    """A run that signals come to after so many seconds, over and over. Returns why it has ended."""
    made, run, opened = [], kit.Run.__new__(kit.Run), open_files()
    run.left, run.results, run.stacks, run.held, run.ended = [], [], [], 0, None
    run.log, run.device = SimpleNamespace(lines=list), SimpleNamespace(gone=lambda: False)

    def make(undo, what):
        undo.make(what, lambda: made.append(what), lambda _: made.remove(what))

    def prepare(undo):
        signal.setitimer(signal.ITIMER_REAL, delay, 0.0003)
        make(undo, "module")

    def work(undo):
        for what in "folder", "process", "link":
            make(undo, what)
            kit.write(os.devnull, what)

    def rows(_):
        for number in range(40):
            run.row(f"row {number}", work)

    run.prepare = prepare
    why = kit.carry_out(run, rows)
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert not made and not run.left, f"{why}, and it has left {made}"
    assert open_files() == opened, f"{why}, and a file is open"
    return why


def main():
    kit.SIGNALS, kit.say = (signal.SIGALRM,), lambda _: None
    random.seed(1)
    found = {attempt(random.uniform(1e-6, MOST)) for _ in range(RUNS)}
    assert "ended by SIGALRM" in found, found


if __name__ == "__main__":
    main()
