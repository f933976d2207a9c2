#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""The tests that run in a VM. Prints "ok NAME # seconds" or "not ok NAME # reason" for each.

suite [NAME...] [-NAME...]: all of them, or those that are named, by the first words of their names or all; but not
those that are named after a "-", and of the groups in NAMED only what is named with the group. Exits with 0 once all
have run."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from case import CASES, SECONDS, bound, names
# They run in this order.
from cases import modules, pings, ulps, kv, hostile, strangers, iwarp, nvme, ninep, storms, tracing, ondevice, ends  # pylint: disable=unused-import

# C's transport for 9P, which may end the kernel, and what takes minutes.
NAMED = ("9p c", "9p c faults", "9p faults", "9p long")
# Each place that fails has a mount of its own.
PATIENCE = {"9p faults": 8, "9p c faults": 8}


def group_of(name):
    return next((group for group in NAMED if name.startswith(group + ":")), "")


def is_wanted(name, wanted, without):
    """Returns whether a case is to run."""
    if any(names(words, name) for words in without):
        return False
    group = group_of(name)
    if not wanted:
        return not group
    return any(names(words, name) and words.startswith(group) for words in wanted)


def main():
    without = [words[1:] for words in sys.argv[1:] if words.startswith("-")]
    wanted = [words for words in sys.argv[1:] if not words.startswith("-")]
    for name, function, args in CASES:
        if function is not modules.first and not is_wanted(name, wanted, without):
            continue
        Path("/dev/kmsg").write_text(f"rdma-rs test: {name}\n")
        begin = time.monotonic()
        bound(name, SECONDS * PATIENCE.get(group_of(name), 1))
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
