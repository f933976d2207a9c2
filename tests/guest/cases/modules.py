# SPDX-License-Identifier: GPL-2.0
"""Loading and unloading."""

import os
import subprocess
import time
from pathlib import Path

from case import BUILD, FLAVOUR, ROUNDS, STOCK, case, sh
from rping import CONTEXTS
from traffic import traffic

# A reload takes more than a second where the kernel is emulated: make soak has more of them.
RELOADS = int(os.environ.get("RELOADS", 20 if STOCK else 5))


def up():
    sh("/rdma-rs/tests/guest/up")


def reload(times=1):
    # The shared folder is slow, so they are copied once.
    sh("bash", "-ec", f"""cp --update=none {BUILD}/{FLAVOUR}/rdma_{{rs,rping}}.ko /run
        for _ in {{1..{times}}}; do
            rmmod rdma_rping rdma_rs; insmod /run/rdma_rs.ko; insmod /run/rdma_rping.ko
        done""")


@case("modules: load, after making an rxe link")
def first():
    up()


if STOCK and not FLAVOUR.endswith("arm64"):
    @case("vm: what a shell says first is true")
    def greeting():
        said = sh("/rdma-rs/tests/guest/greet").stdout
        # Its commands, as somebody types them, and the tools that it names.
        commands = [line for line in said.splitlines() if line.startswith("  ")]
        assert len(commands) == 4 and "rxe0" in said and "192.0.2.1/24" in said, said
        sh("bash", "-ec", "\n".join(commands), cwd="/rdma-rs")
        sh("bash", "-ec", "rmmod rdma_minimal; rmdir /sys/kernel/config/rdma_rping/s")
        sh("bash", "-ec", "less --version; nano --version; perf --version; tcpdump --version; bpftrace --version")


@case(f"modules: unload and load {RELOADS} times")
def reload_often():
    reload(RELOADS)


@case("modules: unload and load while addresses come and go")
def reload_events():
    # Each is an event of the port, told to every client.
    address = "192.0.2.77/24 dev rdma0"
    flap = subprocess.Popen(["bash", "-c", f"while ip addr add {address}; do ip addr del {address}; done"])
    try:
        reload(max(min(RELOADS, 20) // 2, 2))
        assert flap.poll() is None, "the addresses have stopped"
    finally:
        flap.kill()
        flap.wait()
        subprocess.run(["ip", "addr", "del", *address.split()], capture_output=True, check=False)


@case("modules: unload and load under traffic")
def reload_traffic():
    for context in CONTEXTS * ROUNDS:
        with traffic(context):
            refused = subprocess.run(["rmmod", "rdma_rping"], capture_output=True, check=False)
            assert refused.returncode, "unloaded while an instance exists"
        # The instances are gone, but what they began may still be ending.
        reload()


@case("modules: a ULP gets no data of another whose names are the same")
def twins():
    names = [f"rdma_twin_{name}" for name in ("shelf", "first", "second")]
    try:
        for name in names:
            sh("insmod", f"{BUILD}/{FLAVOUR}/{name}.ko")
    finally:
        for name in reversed(names):
            subprocess.run(["rmmod", name], capture_output=True, check=False)


@case("modules: a load that fails waits for those who have what was registered")
def unready():
    load = subprocess.Popen(["insmod", f"{BUILD}/{FLAVOUR}/rdma_unready.ko"], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not (file := Path("/dev/rdma_unready")).exists():
            assert load.poll() is None and time.monotonic() < end, "there is no file"
            time.sleep(0.05)
        with file.open("rb", buffering=0):
            while "rdma_unready: loading has failed: waits for 1 user(s)" not in sh("dmesg").stdout:
                assert load.poll() is None and time.monotonic() < end, "the load does not wait"
                time.sleep(0.05)
        _, said = load.communicate(timeout=60)
        assert load.returncode and "Operation canceled" in said, said
    finally:
        load.kill()
        load.wait()


if STOCK:
    @case("modules: owners that a device loses end where posts are noted")
    def noted():
        try:
            for on, ends in (1, True), (0, False):
                sh("rmmod", "rdma_rping", "rdma_rs")
                sh("insmod", f"{BUILD}/{FLAVOUR}/rdma_rs.ko", f"note_posts={on}")
                sh("insmod", f"{BUILD}/{FLAVOUR}/rdma_null.ko")
                lost = subprocess.run(["insmod", f"{BUILD}/{FLAVOUR}/rdma_lost.ko"],
                                      capture_output=True, check=False)
                loaded = ["rdma_lost"] * (lost.returncode == 0)
                sh("rmmod", *loaded, "rdma_null")
                sh("insmod", f"{BUILD}/{FLAVOUR}/rdma_rping.ko")
                assert bool(loaded) == ends, f"note_posts={on}: {lost}"
        finally:
            # As the other cases have it, whatever is loaded.
            for name in ("rdma_lost", "rdma_null", "rdma_rping", "rdma_rs"):
                subprocess.run(["rmmod", name], capture_output=True, check=False)
            for name in ("rdma_rs", "rdma_rping"):
                sh("insmod", f"{BUILD}/{FLAVOUR}/{name}.ko")
