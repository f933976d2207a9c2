# SPDX-License-Identifier: GPL-2.0
"""The tools of perftest, which measure from user space, on the rxe link."""

import subprocess
import time

DEVICE = "rxe0"
GID = "1"                   # The first RoCE v2 GID of an IPv4 address; 0 is that of a link-local one.
ROUNDS = 5
# The tool, the load of samples/perf that does the same, its size, its depth, and its options.
TOOLS = (
    ("ib_send_lat", "send_lat", 64, 1, ["-n", "500"]),
    ("ib_write_lat", "write_lat", 64, 1, ["-n", "500"]),
    ("ib_read_lat", "read_lat", 64, 1, ["-n", "500"]),
    ("ib_send_bw", "send_rate", 4096, 64, ["-n", "1000", "-t", "64", "-r", "128", "-Q", "1"]),
    ("ib_write_bw", "write_rate", 4096, 64, ["-n", "1000", "-t", "64", "-Q", "1"]),
    ("ib_read_bw", "read_rate", 4096, 64, ["-n", "1000", "-t", "64", "-Q", "1"]),
)


def last_row(said):
    rows = [line.split() for line in said.splitlines() if line.strip()[:1].isdigit()]
    return [float(word) for word in rows[-1]]


def measure(tool, size, options):
    """The figures of one run: a row of the tool's table."""
    command = [tool, "-d", DEVICE, "-x", GID, "-s", str(size), "-F", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(100):
                time.sleep(0.1)
                listening = subprocess.run(["ss", "-Hltn", "sport", "=", "18515"], check=True,
                                           capture_output=True).stdout
                if listening:
                    break
            client = subprocess.run([*command, "127.0.0.1"], check=True, capture_output=True,
                                    text=True, timeout=60)
            server.wait(30)
        finally:
            server.kill()
    return last_row(client.stdout)


def nanoseconds(tool, row):
    """As samples/perf counts: a round trip, where the tool says half of one; the time a request."""
    if tool.endswith("_bw"):
        return 1000 / row[4]                        # Millions a second.
    return row[4] * 1000 * (1 if tool == "ib_read_lat" else 2)     # The median, in microseconds.


def run():
    subprocess.run(["modprobe", "-a", "ib_uverbs", "rdma_ucm"], check=True)
    lines, begin = [], time.monotonic()
    for n in range(ROUNDS):
        for tool, load, size, depth, options in TOOLS:
            lines.append({"phase": "perftest", "clock": "wall", "round": n, "twin": tool, "load": load,
                          "device": DEVICE, "size": size, "depth": depth,
                          "ns": nanoseconds(tool, measure(tool, size, options))})
        print(f"  perftest: {n + 1} of {ROUNDS} rounds of {len(TOOLS)} tools,"
              f" {time.monotonic() - begin:.0f} s", flush=True)
    return lines
