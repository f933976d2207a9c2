# SPDX-License-Identifier: GPL-2.0
"""What hostile peers are told of the end that they lie to, and what is to hold after each case."""

import errno
import mmap
import os
import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import nvme
import nvme_wire as wire
from case import STOCK, sh
from nvme_host import BLOCK, Host
from nvme_lies import Defect
from nvme_target import Target
from peer import PAGE, Peer, PeerError

MIB = 1 << 20
# How long each part of what is left of a case may take to be released.
RELEASE = 60 if STOCK else 30
# What a user reads or writes, and what is around that.
LENGTH, CANARY = 8192, 0xc5
# After how many seconds a host's commands time out.
TIMEOUTS, TIMEOUT = Path("/sys/module/nvme_core/parameters"), 60 if STOCK else 8


def queues():
    """The QPs of connections of the kernel's: rdma_cm has made them."""
    said = sh("rdma", "resource", "show", "qp").stdout.splitlines()
    return [line for line in said if " type RC " in line and "comm [" in line]


def released():
    """Waits for the end of all connections, as long as there are fewer and fewer: a busy machine may take long."""
    least, end = None, 0
    while found := len(queues()):
        if least is None or found < least:
            least, end = found, time.monotonic() + RELEASE
        assert time.monotonic() < end, f"{found} QPs are left"
        time.sleep(0.05)


class TargetGround:
    """A target that hosts lie to, and the content that its disk is to have."""

    def __init__(self, end):
        self.end, self.backing, self.image, self.spoiled = end, nvme.Loop(4), bytearray(), []
        self.target = None

    def __enter__(self):
        nvme.load(None, self.end)
        self.backing.__enter__()
        self.image[:] = random.Random(1).randbytes(self.backing.size * MIB)
        self.backing.file.write_bytes(self.image)
        self.target = nvme.Target(self.backing).__enter__()
        return self

    def __exit__(self, *_):
        self.target.__exit__()
        self.backing.__exit__()
        nvme.unload()

    def expect(self, block, data):
        """The disk is to have these data."""
        self.image[block * BLOCK:block * BLOCK + len(data)] = data

    def spoil(self, block, length):
        """The disk may have any data there."""
        self.spoiled.append((block * BLOCK, length))

    def shared_receives(self):
        """The number of receives that all connections share, if they do."""
        folder = Path("/sys/module", nvme.TARGETS[self.end].replace("-", "_"), "parameters")
        used, size = ((folder / name).read_text(encoding="ascii").strip() for name in ("use_srq", "srq_size"))
        return int(size) if used == "Y" else 0

    def disk(self):
        return self.backing.file.read_bytes()

    def written(self, block, length):
        """What the disk has there, which is right."""
        data = self.disk()[block * BLOCK:block * BLOCK + length]
        self.expect(block, data)
        return data

    @staticmethod
    def free():
        """The free memory, in bytes."""
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemFree:"):
                return int(line.split()[1]) << 10
        return 0

    def check(self):
        """After a case: nothing is left of its connections, the disk has what it should, a host is served."""
        released()
        disk = self.disk()
        for at, length in self.spoiled:
            self.image[at:at + length] = disk[at:at + length]
        self.spoiled.clear()
        assert disk == self.image, "the disk has changed where nobody has written"
        self.serve()

    def serve(self):
        """Serves a host in good order."""
        with Peer() as peer:
            host = Host(peer, self.target)
            host.start()
            queue, data = host.io(), peer.buffer(8192)
            key = data.register()
            for place, send in ((64, lambda: queue.write(64, data, key)),
                                (96, lambda: queue.write_inline(96, content[:4096]))):
                content = random.randbytes(8192)
                data.put(content)
                Host.ok(queue.wait(send()))
                self.expect(place, content[:8192 if place == 64 else 4096])
                # The target may have kept memory for small ones.
                for length in 8192, 4096:
                    data.fill(0)
                    Host.ok(queue.wait(queue.read(place, data, key, length)))
                    right = self.image[place * BLOCK:place * BLOCK + length] + bytes(8192 - length)
                    assert data.get() == right, "a host has read other data"
            peer.tell("disconnect", queue.number)
            peer.tell("disconnect", host.admin.number)
        assert self.disk() == self.image, "a host has written other data"


class Connected:
    """The host under test and its controller of a target, which is served whenever something is waited for: for the
    connection, so many seconds."""

    def __init__(self, ground, target, may_fail=False, patience=150 if STOCK else 60, **options):
        self.ground, self.target, self.may_fail, self.patience, self.failed = ground, target, may_fail, patience, ""
        self.controller = nvme.Controller(target, ground.end, **{
            "nr_io_queues": 1, "queue_size": 16, "ctrl_loss_tmo": 1, "reconnect_delay": 1, "keep_alive_tmo": 30,
            **options})

    def __enter__(self):
        self.ground.hosts.append(self)
        self.ground.host = self
        _, failed = self.beside(lambda: sh(*self.words()), self.patience)
        if failed and not self.may_fail:
            raise failed
        if failed:
            self.failed = f"not connected: {(failed.stderr or str(failed)).strip().splitlines()[-1]}"
        elif not self.may_fail:
            assert self.has_disk(20), "the namespace is not found"
        # A host that has given up is not to come back.
        self.target.request = lambda asked: self.target.peer.tell("reject", asked.connection, "-")
        return self

    def words(self):
        """The command that connects."""
        return ["nvme", "connect", *self.controller.words()]

    def __exit__(self, kind, *_):
        def away():
            for path in nvme.CONTROLLERS.glob("nvme*"):
                if (path / "subsysnqn").read_text(encoding="ascii").strip() == self.target.nqn:
                    sh("nvme", "disconnect", f"--device={path.name}")
        self.beside(away)
        self.ground.hosts.remove(self)

    def step(self):
        for host in self.ground.hosts:
            if host.target.peer.process.returncode is None:
                try:
                    host.target.step()
                except PeerError:
                    # A lie that ends the peer is right in the middle.
                    if host.target.peer.process.returncode is None:
                        raise

    def serve(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()

    def until(self, condition, what, seconds=20):
        """Serves until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, what
            self.step()

    def beside(self, function, seconds=150 if STOCK else 60):
        """Has a function run while the targets are served; returns what it has returned, or raised."""
        result = []

        def work():
            try:
                result.append((function(), None))
            except Exception as e:      # pylint: disable=broad-except
                result.append((None, e))
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        end = time.monotonic() + seconds
        while thread.is_alive():
            assert time.monotonic() < end, f"a user waits for more than {seconds} s"
            self.step()
        return result[0]

    def disk(self):
        return self.controller.find()

    def path(self):
        """The controller in sysfs."""
        return next(path for path in nvme.CONTROLLERS.glob("nvme*")
                    if (path / "subsysnqn").read_text(encoding="ascii").strip() == self.target.nqn)

    def has_disk(self, seconds):
        """Whether there is a disk that can be read, in so many seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            disk = self.disk()
            if disk and disk.exists():
                return True
            self.serve(0.05)
        return False

    def state(self):
        """The state of the controller, once it has settled."""
        names = [path for path in nvme.CONTROLLERS.glob("nvme*")]
        states = []
        end = time.monotonic() + 8
        while time.monotonic() < end:
            self.serve(1)
            states = []
            for path in names:
                try:
                    if (path / "subsysnqn").read_text(encoding="ascii").strip() == self.target.nqn:
                        states.append((path / "state").read_text(encoding="ascii").strip())
                except OSError:
                    pass
            if states in ([], ["live"]):
                break
        self.ground.settled()
        return states[0] if states else "gone"

    def io(self, opcode, at=0, data=b""):
        return self.ios(opcode, 1, at, data)[0]

    def ios(self, opcode, count, at=0, data=b""):
        """A user reads or writes, so often at once; returns the errors, 0 for none."""
        length = len(data) or LENGTH
        buffers = [mmap.mmap(-1, length + 2 * PAGE) for _ in range(count)]
        for buffer in buffers:
            buffer[:] = bytes([CANARY]) * len(buffer)
            if data:
                buffer[PAGE:-PAGE] = data
        disk = self.disk()
        if not disk:
            return [errno.ENODEV] * count
        done = [errno.EIO] * count

        def work(i):
            view = memoryview(buffers[i])[PAGE:-PAGE]
            fd = os.open(disk, os.O_RDWR | os.O_DIRECT)
            try:
                moved = (os.preadv if opcode == wire.READ else os.pwritev)(fd, [view], at + i * length)
                done[i] = 0 if moved == length else errno.ENODATA
            except OSError as e:
                done[i] = e.errno
            finally:
                os.close(fd)
            self.ground.results.append((buffers[i], bytes(buffers[i]), opcode, data))

        def all_of_them():
            threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        _, failed = self.beside(all_of_them)
        if failed:
            raise failed
        return done


class HostGround:
    """A host that targets lie to."""

    def __init__(self, end):
        self.end, self.hosts, self.results, self.defect, self.host = end, [], [], "", None

    def __enter__(self):
        nvme.load(self.end, None)
        nvme.write(TIMEOUTS / "admin_timeout", TIMEOUT)
        nvme.write(TIMEOUTS / "io_timeout", TIMEOUT)
        return self

    def __exit__(self, *_):
        nvme.unload()

    @staticmethod
    @contextmanager
    def patient(seconds, *others):
        """Has the admin commands of new controllers time out after so long, and those of these parameters."""
        names = ("admin_timeout", *others)
        for name in names:
            nvme.write(TIMEOUTS / name, seconds)
        try:
            yield
        finally:
            for name in names:
                nvme.write(TIMEOUTS / name, TIMEOUT)

    def connected(self, target, **how):
        return Connected(self, target, **how)

    def settled(self):
        """Compares the memory of each user with what it was when the I/O had ended."""
        for buffer, then, opcode, data in self.results:
            canary = bytes([CANARY]) * PAGE
            assert then[:PAGE] == canary == then[-PAGE:], "memory around a buffer has changed"
            if bytes(buffer) != then:
                raise Defect("memory of an I/O that has ended has changed")
            if opcode == wire.WRITE and data and then[PAGE:-PAGE] != data:
                raise Defect("memory that was written from has changed")
        self.results.clear()

    def check(self):
        """After a case: nothing is left of its connections, memory is as it was, a target is served."""
        defect, self.defect = self.defect, ""
        self.hosts.clear()
        try:
            end = time.monotonic() + RELEASE
            while found := list(nvme.CONTROLLERS.glob("nvme*")):
                assert time.monotonic() < end, f"{found[0].name} is left after {RELEASE} s"
                time.sleep(0.05)
            released()
            self.settled()
        finally:
            self.results.clear()
        self.serve()
        if defect:
            raise Defect(defect)

    def serve(self):
        """Has a target in good order served."""
        with Peer(1 << 24) as peer:
            target = Target(peer)
            with self.connected(target) as host:
                # The last one's data come with the command.
                for at, length in (0, LENGTH), (65536, LENGTH), (131072, PAGE):
                    data = random.randbytes(length)
                    assert host.io(wire.WRITE, at, data) == 0, "a user has not written"
                    assert target.disk[at:at + length] == data, "a user has written other data"
                    assert host.io(wire.READ, at) == 0, "a user has not read"
                    read = self.results[-1][1][PAGE:-PAGE]
                    assert read == target.disk[at:at + LENGTH], "a user has read other data"
                self.settled()
