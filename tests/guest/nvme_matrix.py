#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Runs cases of NVMe over RDMA in a VM, and goes on where the last VM has ended.

nvme_matrix PROGRESS NAMES SECONDS HOST TARGET: those cases of the file NAMES that PROGRESS does not have, which gets a
line of JSON before each and one after it. An end may have parameters of its module behind it (rust,sig_limit=16).
Exits with 0 when all are done, and with 4 when another boot is needed: after SECONDS, or after a case that has
failed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nvme
from case import bound, sh
from nvme_ground import CASES, Ground
# They run in this order.
# pylint: disable-next=unused-import,multiple-imports
import nvme_data, nvme_addresses, nvme_discovery, nvme_auth, nvme_faults
# pylint: disable-next=unused-import,multiple-imports
import nvme_options, nvme_orders, nvme_null, nvme_paths, nvme_memory

DONE, LATER = 0, 4


class Progress:
    """What was done, in a file that outlives the VM."""

    def __init__(self, path):
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.done = {json.loads(line)["case"] for line in lines}

    def add(self, **entry):
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def run(case, host, target):
    """Runs a case: its figures, and why it has failed."""
    ground, failed = Ground(case.link, host, target), ""
    Path("/dev/kmsg").write_text(f"rdma-rs test: {case.name}\n", encoding="utf-8")
    bound(case.name, case.seconds)
    try:
        case.function(ground, *case.args)
        nvme.none_left()
    except subprocess.CalledProcessError as e:
        failed = f"{e}: {(e.stderr or '').strip()}"
    except Exception as e:      # pylint: disable=broad-except
        failed = f"{type(e).__name__}: {e}"
    signal.alarm(0)
    return ground.figures, " ".join(failed.split())[:600]


def finish():
    """Unloads all, and searches for leaks: what is found is the last case's."""
    nvme.unload()
    found = sh("/rdma-rs/tests/guest/leaks").stdout if Path("/sys/kernel/debug/kmemleak").exists() else ""
    for line in found.splitlines():
        Path("/dev/kmsg").write_text(line + "\n", encoding="utf-8")


def main():
    path, names, seconds, host, target = sys.argv[1:]
    host, target = nvme.named(host, nvme.HOSTS), nvme.named(target, nvme.TARGETS)
    names = Path(names).read_text(encoding="utf-8").splitlines()
    progress, begin, links = Progress(Path(path)), time.monotonic(), set()
    nvme.load(host, target)
    todo = [CASES[name] for name in names if name not in progress.done]
    for n, case in enumerate(todo):
        if time.monotonic() - begin > int(seconds):
            finish()
            return LATER
        if case.link not in links:
            nvme.up(case.link)
            links.add(case.link)
        progress.add(event="begin", case=case.name)
        since = time.monotonic()
        figures, failed = run(case, host, target)
        took = round(time.monotonic() - since, 1)
        progress.add(event="end", case=case.name, failed=failed, seconds=took, **figures)
        print(f"  {len(names) - len(todo) + n + 1} of {len(names)}: {case.name}: {failed or f'{took} s'}", flush=True)
        if failed:
            # What it has left would be the next one's trouble.
            return LATER
    Path("/dev/kmsg").write_text("rdma-rs test: unloading at the end\n", encoding="utf-8")
    finish()
    return DONE


if __name__ == "__main__":
    sys.exit(main())
