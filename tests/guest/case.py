# SPDX-License-Identifier: GPL-2.0
"""What all cases of the suite in a VM share: how they are declared, and where they run."""

import os
import signal
import subprocess
from pathlib import Path

FLAVOUR = os.environ["flavour"]
# Debian's own kernel, not one with checkers.
STOCK = not FLAVOUR.startswith("um")
BUILD = Path("/rdma-rs/build")
PROGRAMS = BUILD / ("guest-arm64" if FLAVOUR.endswith("arm64") else "guest")
SECONDS = 240 if STOCK else 400
# The debug kernel is slow, and shows mistakes in fewer rounds.
ROUNDS = 2 if STOCK else 1
CASES = []


def case(name, *args):
    """Declares a case: it fails by raising, and what it returns is printed beside its name."""
    def add(function):
        CASES.append((name, function, args))
        return function
    return add


def names(words, name):
    """Returns whether words name a case: they are its name, or the beginning of that, to the end of a word."""
    return name.startswith(words) and not name[len(words):len(words) + 1].isalnum()


def sh(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS, **options)


def show_blocked():
    """Has the kernel's log show where tasks wait that no signal wakes up."""
    trigger = Path("/proc/sysrq-trigger")
    if trigger.exists():
        trigger.write_text("w")
        return
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        try:
            who, _, rest = (task / "stat").read_text().rpartition(")")
            stack = (task / "stack").read_text().splitlines() if rest.split()[0] == "D" else []
        except OSError:
            # It has ended.
            continue
        for line in stack:
            Path("/dev/kmsg").write_text(f"rdma-rs blocked: {who}): {line}\n")


def bound(name, seconds):
    """Has what follows fail after so long; and if its end lasts another minute, ends all."""
    def too_long(*_):
        show_blocked()
        signal.signal(signal.SIGALRM, far_too_long)
        signal.alarm(60)
        raise TimeoutError(f"not done after {seconds} s")

    def far_too_long(*_):
        print(f"not ok {name} # not done after {seconds} s, and does not end", flush=True)
        os._exit(1)

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
