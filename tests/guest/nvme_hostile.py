#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Hostile peers of NVMe over RDMA, in a VM.

    nvme_hostile.py target|host END PROGRESS [NAME...]

Runs the cases against that end, which may have parameters of its module behind its name (rust,sig_limit=16), of those
whose names start so, that PROGRESS does not have yet. It has a line of JSON for each that has begun, and for each that
has ended. Exits with 0 once all have, with 3 if one of them has failed, and with 4 after one that has left an end that
serves no more: the others get a kernel that has not seen it."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import nvme
import nvme_hosts       # pylint: disable=unused-import
import nvme_targets     # pylint: disable=unused-import
from case import STOCK, bound, sh
from nvme_grounds import HostGround, TargetGround
from nvme_lies import LIES, Defect
from peer import Peer

FAILED, LATER = 3, 4
SECONDS = 300 if STOCK else 150
WARNED = Path("/sys/kernel/debug/clear_warn_once")


GROUNDS = {"target": TargetGround, "host": HostGround}


def tried(name, function, times=1):
    """What a function has returned, and why it has failed, if it has."""
    try:
        bound(name, SECONDS * times)
        return function(), ""
    except Exception as e:      # pylint: disable=broad-except
        return "", f"{type(e).__name__}: {e}".replace("\n", " ")
    finally:
        signal.alarm(0)


def run(lie, ground):
    """Runs a case: what the end under test has done, why the case has failed, and why the end serves no more."""
    def play():
        with Peer(lie.size) as peer:
            return lie.function(ground, peer, *lie.args)

    said, failed = tried(lie.name, play, lie.times)
    _, broken = tried(lie.name, ground.check)
    if broken.startswith(Defect.__name__):
        # It has done wrong, and serves.
        failed, broken = "; ".join(filter(None, (failed, broken))), ""
    return said, failed, broken


def main():
    against, end, progress, names = sys.argv[1], sys.argv[2], Path(sys.argv[3]), tuple(sys.argv[4:]) or ("",)
    end = nvme.named(end, {"target": nvme.TARGETS, "host": nvme.HOSTS}[against])
    done = set()
    if progress.exists():
        done = {json.loads(line)["name"] for line in progress.read_text(encoding="utf-8").splitlines()}

    def note(**row):
        with progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    whole = True
    todo = [lie for lie in LIES if lie.against == against and lie.name.startswith(names) and lie.name not in done]
    sh("/rdma-rs/tests/guest/up", "none")
    with GROUNDS[against](end) as ground:
        for lie in todo:
            note(name=lie.name)
            # What warns once is to warn in each case.
            if WARNED.exists():
                WARNED.write_text("1", encoding="ascii")
            Path("/dev/kmsg").write_text(f"rdma-rs test: {lie.name}\n", encoding="utf-8")
            begin = time.monotonic()
            said, failed, broken = run(lie, ground)
            seconds = round(time.monotonic() - begin, 1)
            failed = "; ".join(filter(None, (failed, broken)))
            note(name=lie.name, said=said, failed=failed, seconds=seconds)
            print(f"{lie.name}: {'; '.join(filter(None, (said, failed)))} ({seconds} s)", flush=True)
            if failed:
                Path("/dev/kmsg").write_text(f"rdma-rs found: {lie.name}: {failed[:300]}\n", encoding="utf-8")
                whole = False
            if broken:
                # Nothing is taken down, as that may wait for what is wrong.
                sys.stdout.flush()
                os._exit(LATER)
    Path("/dev/kmsg").write_text("rdma-rs test: the end\n", encoding="utf-8")
    nvme.none_left()
    sh("/rdma-rs/tests/guest/leaks")
    return 0 if whole else FAILED


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.exit(status)
