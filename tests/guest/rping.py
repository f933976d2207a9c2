# SPDX-License-Identifier: GPL-2.0
"""Control of the rping module (configfs) and of the userspace rping, for the tests in a VM."""

import errno
import os
import subprocess
import time
from pathlib import Path

ROOT = Path("/sys/kernel/config/rdma_rping")
ADDR = "192.0.2.1"
CONTEXTS = ("direct", "softirq", "workqueue", "unbound_workqueue")
ports = iter(range(7200, 30000))


class Instance:
    """An instance of the module: with Instance(port=...) as it: ..."""

    made = iter(range(1 << 30))

    def __init__(self, **attributes):
        self.path = ROOT / f"i{os.getpid()}_{next(self.made)}"
        self.attributes = {"addr": ADDR, "validate": 1, **attributes}

    def __enter__(self):
        self.path.mkdir()
        try:
            for name, value in self.attributes.items():
                self.write(name, value)
        except BaseException:
            self.path.rmdir()
            raise
        return self

    def __exit__(self, *_):
        self.path.rmdir()

    def write(self, name, value):
        fd = os.open(self.path / name, os.O_WRONLY)
        try:
            os.write(fd, str(value).encode())
        finally:
            os.close(fd)

    def read(self, name):
        return (self.path / name).read_text().strip()

    def stats(self):
        return {k: int(v) for k, v in (line.split() for line in self.read("stats").splitlines())}

    def connect(self):
        """Runs a client to its end, waiting for a server that is not listening yet."""
        for _ in range(50):
            try:
                return self.write("connect", 1)
            except OSError as e:
                if e.errno != errno.ECONNREFUSED:
                    raise
            time.sleep(0.1)
        raise TimeoutError("no server listens")

    def settle(self, key, value, seconds=30):
        """A server learns of its last completions a moment after its client has ended."""
        end = time.monotonic() + seconds
        while self.stats()[key] < value and time.monotonic() < end:
            time.sleep(0.05)
        return self.stats()

    def wait_reason(self, seconds=100):
        """Why it has ended."""
        end = time.monotonic() + seconds
        while not self.read("reason") and time.monotonic() < end:
            time.sleep(0.1)
        reason = self.read("reason")
        assert reason, "no reason is given"
        return reason


def peer(role, port, count, size=64, addr=ADDR, where=(), seconds=110):
    """Starts the userspace rping: role is "client" or "server"."""
    return subprocess.Popen(
        [*where, "timeout", str(seconds), "rping", f"-{role[0]}", "-a", addr, "-p", str(port),
         "-C", str(count), "-S", str(size), "-V"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


# At its end rping closes the channel that a thread of its own waits on, which may end it first: after it has
# said that the connection has ended, if it does. What else it prints is a failure.
CLOSED = "rdma_get_cm_event: Bad file descriptor"
ENDED = {"client DISCONNECT EVENT...", "server DISCONNECT EVENT...", "wait for RDMA_READ_ADV state 10"}


def finish(process):
    """The peer's exit status and what it said."""
    said = process.communicate()[0].strip().splitlines()
    closed = process.returncode == 255 and said[-1:] == [CLOSED] and ENDED.issuperset(said[:-1])
    return 0 if closed else process.returncode, "; ".join(said)


def wait_listening(port, seconds=30, where=()):
    """Until a userspace server listens."""
    end = time.monotonic() + seconds
    while f":{port} " not in subprocess.run(
            [*where, "rdma", "resource", "show", "cm_id", "state", "listen"],
            capture_output=True, text=True, check=True).stdout + " ":
        if time.monotonic() > end:
            raise TimeoutError(f"there is no listener on port {port}")
        time.sleep(0.05)
