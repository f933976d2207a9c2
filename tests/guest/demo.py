#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""The main job, in a VM: rping in every polling context and pairing, the other samples, NVMe and 9P over RDMA, as
tables.

demo COUNT REPORT: COUNT pings a row; the rows go to the file REPORT as JSON, and those of the
samples, of NVMe and of 9P to samples.json, nvme.json and 9p.json beside it."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import ninep
import nvme
import samples
from nvme_ground import Ground
from rping import CONTEXTS, Instance, finish, peer, ports, wait_listening

SIZE = 64
PAIRINGS = ("rust server, user client", "user server, rust client", "rust server, rust client")
KEYS = ("context", "pairing", "pings", "bytes_verified", "completions", "errors", "rtt_ns", "ok")
NVME_PAIRINGS = (("c", "rust"), ("rust", "rust"))
NVME_KEYS = ("nvme host", "target", "ios", "bytes_written", "bytes_verified", "ok")
NVME_BYTES = 4 * nvme.MIB
NINEP_KEYS = ("9p transport", "server", "files", "bytes_written", "bytes_verified", "ok")
NINEP_FILES = 16


def run(context, pairing, count):
    """One row: what the ends in Rust count, and whether all of it is as it must be."""
    port = next(ports)
    common = {"port": port, "size": SIZE, "context": context}
    ends, user = [], None
    with ExitStack() as stack:
        if "rust server" in pairing:
            server = stack.enter_context(Instance(**common))
            server.write("listen", 1)
            ends.append(server)
        else:
            user = peer("server", port, count, SIZE)
            # It would wait for another client if this one fails.
            stack.callback(user.terminate)
            wait_listening(port)
        if "rust client" in pairing:
            client = stack.enter_context(Instance(count=count, **common))
            client.connect()
            ends.append(client)
        else:
            user = peer("client", port, count, SIZE)
        status, said = finish(user) if user else (0, "")
        stats = [end.settle("pings", count) for end in ends]
        reasons = [end.read("reason") for end in ends]
    row = {"context": context, "pairing": pairing, "pings": stats[-1]["pings"]}
    for key in ("bytes_verified", "completions", "errors"):
        row[key] = sum(s[key] for s in stats)
    row["rtt_ns"] = stats[-1]["rtt_ns"]
    row["ok"] = (status == 0 and row["errors"] == 0 and row["rtt_ns"] > 0 and
                 all(s["pings"] == count and s["bytes_verified"] == count * SIZE and
                     s["completions"] >= 2 * count for s in stats))
    why = f"rping exited with {status}: {said}" if status else ""
    return row, why if row["ok"] else "; ".join([*filter(None, [why]), *reasons])


def table(rows, keys, report):
    report.write_text(json.dumps(rows, indent=1) + "\n", encoding="ascii")
    cells = [keys] + [[("yes" if r[k] else "NO") if k == "ok" else str(r[k]) for k in keys]
                      for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line in cells:
        print("  ".join(c.ljust(w) if i < 2 else c.rjust(w)
                        for i, (c, w) in enumerate(zip(line, widths))))
    return all(row["ok"] for row in rows)


def nvme_row(host, end):
    """One row of NVMe over RDMA: writes a null_blk device behind a target by a host, which verifies all of it. It is
    then verified on the device itself."""
    row = {"nvme host": host, "target": end, "ios": 0, "bytes_written": 0, "bytes_verified": 0, "ok": False}
    try:
        nvme.load(host, end)
        ground, null = Ground("rxe", host, end), nvme.Null()
        with ground.pair(null, nr_io_queues=1) as (_, controller):
            ground.verify(controller.disk(), null, bs="16k", iodepth=16, size=NVME_BYTES)
        nvme.none_left()
        nvme.unload(nvme.HOSTS[host], nvme.TARGETS[end])
    except (OSError, AssertionError, subprocess.SubprocessError) as e:
        # The next row has modules of its own.
        with suppress(OSError, AssertionError, subprocess.SubprocessError):
            nvme.unload(nvme.HOSTS[host], nvme.TARGETS[end])
        return row, f"NVMe, {host} host, {end} target: {e}: {(getattr(e, 'stderr', '') or '').strip()}"
    figures = ground.figures
    row |= {"ios": figures["ios"], "bytes_written": figures["bytes"] // 2, "bytes_verified": figures["verified"]}
    row["ok"] = row["bytes_written"] == row["bytes_verified"] == NVME_BYTES
    return row, ""


def nvme_rows():
    for host, end in NVME_PAIRINGS:
        row, why = nvme_row(host, end)
        if why:
            print(why)
        yield row


def ninep_row():
    """The row of 9P: files are written on a mount, and compared with what the server has."""
    row = {"9p transport": "rust", "server": "diod", "files": 0, "bytes_written": 0, "bytes_verified": 0, "ok": False}
    try:
        with ninep.loaded("rdma_rs"), ninep.mounted("rdma_rs"):
            for number in range(NINEP_FILES):
                data = os.urandom(nvme.MIB // 4 - number)
                (ninep.MOUNT / f"{number}").write_bytes(data)
                row["bytes_written"] += len(data)
                for where in ninep.SERVED, ninep.MOUNT:
                    assert (where / f"{number}").read_bytes() == data, f"file {number} is not what was written"
                row["bytes_verified"] += len(data)
                row["files"] += 1
    except (OSError, AssertionError, subprocess.SubprocessError) as e:
        return row, f"9P: {e}: {(getattr(e, 'stderr', '') or '').strip()}"
    row["ok"] = row["bytes_written"] == row["bytes_verified"] > 0
    return row, ""


def ninep_rows():
    row, why = ninep_row()
    if why:
        print(why)
    yield row


def show_cqs():
    """What iproute2 says of the module's CQs, while one connection runs in each context."""
    with ExitStack() as stack:
        threads = []
        for context in CONTEXTS:
            common = {"port": next(ports), "context": context}
            server = stack.enter_context(Instance(**common))
            server.write("listen", 1)
            client = stack.enter_context(Instance(count=0, **common))
            threads.append((client, threading.Thread(target=client.connect)))
            threads[-1][1].start()
            client.settle("pings", 1)
        shown = subprocess.run(["rdma", "resource", "show", "cq"], capture_output=True, text=True,
                               check=True).stdout
        for client, thread in threads:
            client.write("connect", 0)
            thread.join()
    lines = [line for line in shown.splitlines() if re.search(r"\[rdma_r", line)]
    print("\nrdma resource show cq, one connection a context (" + ", ".join(CONTEXTS) + "):")
    print("\n".join(lines))
    print("iproute2 prints contexts in the order before Linux 5.8: softirq shows as DIRECT,\n"
          "workqueue as SOFTIRQ, unbound workqueue as WORKQUEUE, direct as UNBOUND_WORKQUEUE.")
    return len(lines) >= len(CONTEXTS)


def main():
    count, report = int(sys.argv[1]), Path(sys.argv[2])
    rows = []
    for context in CONTEXTS:
        for pairing in PAIRINGS:
            row, why = run(context, pairing, count)
            rows.append(row)
            if why:
                print(f"{context}, {pairing}: {why}")
    ok = [table(rows, KEYS, report)]
    print()
    ok.append(table(samples.rows(), samples.KEYS, report.with_name("samples.json")))
    print()
    ok.append(table(list(nvme_rows()), NVME_KEYS, report.with_name("nvme.json")))
    print()
    ok.append(table(list(ninep_rows()), NINEP_KEYS, report.with_name("9p.json")))
    ok.append(show_cqs())
    return 0 if all(ok) else 1


if __name__ == "__main__":
    sys.exit(main())
