#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""The tests that run in a VM. Prints "ok NAME # seconds" or "not ok NAME # reason" for each.

suite [NAME...] [-NAME...]: all of them, or those whose names start so; but not those whose names start as
one after a "-", and of those in NAMED only what is named. Exits with 0 once all have run."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from case import CASES, SECONDS, bound
# They run in this order.
from cases import modules, pings, ulps, kv, hostile, strangers, iwarp, nvme, ninep, storms, tracing, ondevice, ends  # pylint: disable=unused-import

# C's transport for 9P, which may end the kernel, and what takes minutes.
NAMED = ("9p c: ", "9p faults: ", "9p long: ")


def main():
    without = tuple(name[1:] for name in sys.argv[1:] if name.startswith("-"))
    wanted = tuple(name for name in sys.argv[1:] if not name.startswith("-")) or ("",)
    for name, function, args in CASES:
        if function is not modules.first and (not name.startswith(wanted) or name.startswith(without)):
            continue
        if name.startswith(NAMED) and not any(it and name.startswith(it) for it in wanted):
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
