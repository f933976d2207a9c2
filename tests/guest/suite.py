#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""The tests that run in a VM. Prints "ok NAME # seconds" or "not ok NAME # reason" for each.

suite [NAME...]: all of them, or those whose names start so. Exits with 0 once all have run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from case import CASES, SECONDS
# They run in this order.
from cases import modules, pings, ulps, hostile, strangers, iwarp, ends         # pylint: disable=unused-import


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


def main():
    wanted = tuple(sys.argv[1:]) or ("",)
    for name, function, args in CASES:
        if not name.startswith(wanted) and function is not modules.first:
            continue
        Path("/dev/kmsg").write_text(f"rdma-rs test: {name}\n")
        begin = time.monotonic()
        bound(name, SECONDS)
        try:
            said = function(*args)
        except subprocess.CalledProcessError as e:
            print(f"not ok {name} # {e}: {(e.stderr or '').strip()}")
        except Exception as e:      # pylint: disable=broad-except
            print(f"not ok {name} # {type(e).__name__}: {e}".replace("\n", " "))
        else:
            print(f"ok {name} # {time.monotonic() - begin:.1f} s" + (f", {said}" if said else ""))
        finally:
            signal.alarm(0)
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
