# SPDX-License-Identifier: GPL-2.0
"""9P over RDMA: the transport of the kernel's client."""

import errno
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from case import FLAVOUR, STOCK, case, sh
from ninep import MOUNT, SERVED, TRANSPORTS, diod, fill, loaded, mount, mounted, relay, silence, unmount
from traffic import link

# The replies to what a mount asks for, and some more.
REPLIES = 8


def works():
    (MOUNT / "works").write_text("it does")
    assert (SERVED / "works").read_text() == "it does"


def until_failed(*command):
    """Has processes ask the server until one fails; gives what it says."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        done = subprocess.run(command or ("stat", MOUNT), capture_output=True, text=True, check=False, timeout=60)
        if done.returncode:
            return done.stderr
    raise AssertionError("the mount still works")


def ask():
    return subprocess.Popen(["stat", MOUNT], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for_reply(process):
    """Waits until a process waits for a reply."""
    while process.poll() is None and "p9_client_rpc" not in Path(f"/proc/{process.pid}/stack").read_text():
        time.sleep(0.05)


if STOCK and FLAVOUR != "arm64":
    @case("9p: a tree is copied, and read back")
    def tree():
        with tempfile.TemporaryDirectory() as local, loaded("rdma_rs"), mounted("rdma_rs"):
            fill(Path(local) / "tree", 12, 60_000)
            sh("cp", "-a", f"{local}/tree", MOUNT)
            for where in SERVED, MOUNT:
                sh("diff", "-r", "--no-dereference", f"{local}/tree", where / "tree")
            shutil.rmtree(MOUNT / "tree")
            assert not list(SERVED.iterdir())

    @case("9p: fio verifies what many processes have written, more than requests can be sent at once")
    def verify():
        with loaded("rdma_rs"), mounted("rdma_rs", "sq=3", "rq=5", "msize=65536"):
            sh("fio", "--name=verify", f"--directory={MOUNT}", "--rw=randwrite", "--bs=1k-96k", "--size=256k",
               "--numjobs=8", "--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--fallocate=none")

    @case("9p: options are shown, and those that cannot be are refused")
    def options():
        with loaded("rdma_rs"), diod(), relay() as (port, _), relay() as (other, _):
            for wrong in "sq=0", "rq=0", "sq=1023":
                assert mount("rdma_rs", port, wrong).returncode, wrong
            assert mount("rdma_rs", other, "msize=4000").returncode
            said = mount("rdma_rs", port + 100).stderr
            assert os.strerror(errno.ECONNREFUSED) in said, said
            done = mount("rdma_rs", port, "sq=7", "rq=9", "timeout=20000")
            assert not done.returncode, done.stderr
            try:
                shown = next(line for line in Path("/proc/mounts").read_text().splitlines() if f" {MOUNT} " in line)
                assert f"trans=rdma_rs,port={port},sq=7,rq=9,timeout=20000" in shown, shown
                works()
                refused = subprocess.run(["rmmod", TRANSPORTS["rdma_rs"]], capture_output=True, text=True, check=False)
                assert "in use" in refused.stderr, refused.stderr
            finally:
                unmount()

    @case("9p: reads that are flushed give their requests back")
    def flushed():
        with loaded("rdma_rs"), mounted("rdma_rs", "sq=2", "rq=2", how="hold"):
            works()
            for _ in range(3):
                readers = [subprocess.Popen(["cat", MOUNT / "works"]) for _ in range(2)]
                for reader in readers:
                    wait_for_reply(reader)
                # The queue is full of what is to be flushed.
                for reader in readers:
                    reader.kill()
                for reader in readers:
                    assert reader.wait(60) == -signal.SIGKILL
            works()

    def lied(how):
        with loaded("rdma_rs"), diod(), relay(how, REPLIES) as (port, _):
            done = mount("rdma_rs", port)
            assert not done.returncode, done.stderr
            try:
                said = until_failed()
                assert os.strerror(errno.EIO) in said, said
            finally:
                unmount()
            return said.strip()

    for h in ("unknown", "twice", "notag", "type", "header", "empty", "shorter", "longer", "long", "huge", "disconnect",
              "vanish"):
        case(f"9p: a server that lies: {h}", h)(lied)

    @case("9p: a server that is silent, and then killed")
    def silent():
        with loaded("rdma_rs"), mounted("rdma_rs", how="silent", count=REPLIES) as process:
            while True:
                waiting = [ask()]
                while waiting[0].poll() is None and not silence():
                    time.sleep(0.05)
                if silence():
                    break
            waiting += [ask() for _ in range(3)]
            for it in waiting:
                wait_for_reply(it)
            process.kill()
            for it in waiting:
                assert os.strerror(errno.EIO) in it.communicate(timeout=100)[1]

    @case("9p: rdma link delete under a mount")
    def removal():
        with loaded("rdma_rs"), mounted("rdma_rs"):
            works()
            link(False)
            try:
                assert os.strerror(errno.EIO) in until_failed()
            finally:
                link()
