# SPDX-License-Identifier: GPL-2.0
"""9P over RDMA: the transport of the kernel's client, and C's, which scripts/ninep/cases names."""

import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import faults
import wire
from case import BUILD, FLAVOUR, STOCK, case, sh
from ninep import (MNT_FORCE, MOUNT, RELAY_LOG, SERVED, TRANSPORTS, built, configure, diod, ended_by, fill, loaded,
                   mount, mount_here, mounted, relay, silence, system_call, told, unmount, unmount_here, words)
from rping import ADDR
from traffic import link, siw_link

# The replies to what a mount asks for, and some more.
REPLIES = 8
PROCESSES = 64
# The flushes that the transport in Rust sends before one is answered.
FLUSHES = 7
LIES = ("unknown", "twice", "flood", "notag", "untagged", "type", "header", "empty", "shorter", "longer", "long",
        "huge", "disconnect", "vanish")
# Of those where all is slow: in the kernel with checkers.
FEW_LIES = ("unknown", "flood", "untagged", "huge", "vanish")


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


def is_in_client(pid):
    """Returns whether a process has made a request, which waits for a place or for its reply."""
    return "p9_client_rpc" in Path(f"/proc/{pid}/stack").read_text()


def wait_for_reply(process):
    """Waits until a process waits for a reply."""
    while process.poll() is None and not is_in_client(process.pid):
        time.sleep(0.05)


def tree(transport):
    with tempfile.TemporaryDirectory() as local, loaded(transport), mounted(transport):
        fill(Path(local) / "tree", 12, 60_000)
        sh("cp", "-a", f"{local}/tree", MOUNT)
        for where in SERVED, MOUNT:
            sh("diff", "-r", "--no-dereference", f"{local}/tree", where / "tree")
        shutil.rmtree(MOUNT / "tree")
        assert not list(SERVED.iterdir())


def compiled(transport):
    with loaded(transport), mounted(transport):
        sh("cp", "-r", "/rdma-rs/tests/guest", MOUNT / "source")
        sh("diff", "-r", "/rdma-rs/tests/guest", MOUNT / "source")
        sh("make", "-s", "-C", MOUNT / "source", f"OUT={MOUNT}/out", f"{MOUNT}/out/p9_relay")
        done = subprocess.run([SERVED / "out/p9_relay"], capture_output=True, text=True, check=False)
        assert "usage: p9_relay" in done.stderr, done.stderr


def verify(transport):
    with loaded(transport), mounted(transport, "sq=3", "rq=5", "msize=65536"):
        sh("fio", "--name=verify", f"--directory={MOUNT}", "--rw=randwrite", "--bs=1k-96k", "--size=256k",
           "--numjobs=8", "--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--fallocate=none")


def writes(number):
    """What one of many processes does: it finds what it has written."""
    at, data = MOUNT / f"{number}", os.urandom(1 + 977 * number)
    at.write_bytes(data)
    assert at.read_bytes() == data
    at.unlink()


def in_process(function, *args):
    """Forks a process that calls this, and ends with the error of a system call; gives its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function(*args)
        os._exit(0)
    except OSError as e:
        os._exit(e.errno)
    finally:
        os._exit(1)


def many(transport):
    with loaded(transport), mounted(transport, "sq=8", "rq=8"):
        pids = [in_process(writes, number) for number in range(PROCESSES)]
        failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
        assert not failed, f"{len(failed)} of {PROCESSES} processes have failed"
        assert not list(SERVED.iterdir())


def exit_status(function, *args):
    return os.waitstatus_to_exitcode(os.waitpid(in_process(function, *args), 0)[1])


def locks(at):
    """What a process does that ends with the error of a lock."""
    with at.open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def attributes(transport):
    """Extended attributes, and locks of two processes, as far as the server has them."""
    said = []
    with loaded(transport), mounted(transport):
        works()
        at = MOUNT / "works"
        try:
            os.setxattr(at, "user.rdma", b"value")
        except OSError as e:
            assert e.errno == errno.EOPNOTSUPP, e
            said.append("the server has no attributes")
        else:
            assert os.getxattr(at, "user.rdma") == os.getxattr(SERVED / "works", "user.rdma") == b"value"
            assert "user.rdma" in os.listxattr(at)
            os.removexattr(at, "user.rdma")
            assert "user.rdma" not in os.listxattr(SERVED / "works")

        with at.open("r+") as file, (SERVED / "works").open() as served:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The server takes one of its own for it. It drops that when a process closes its copy of the file.
            with suppress(BlockingIOError):
                fcntl.flock(served, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise AssertionError("the server does not know of the lock")
            assert exit_status(locks, at) == errno.EAGAIN, "a lock was taken twice"
            fcntl.lockf(file, fcntl.LOCK_UN)
            assert exit_status(locks, at) == 0, "a lock was not given back"
            fcntl.flock(served, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert exit_status(locks, at) == errno.EAGAIN, "a lock that the server refuses was taken"
    return ", ".join(said)


def nobody_listens(transport, port, times=30, source=ADDR):
    """The QP of a connection that is refused is flushed before the thread that connects hears of it;
    where that race was lost, which 3 of 11 did, this failed with ECANCELED."""
    for _ in range(times):
        try:
            mount_here(transport, port, source=source)
        except OSError as e:
            assert e.errno == errno.ECONNREFUSED, e
        else:
            unmount()
            raise AssertionError("nobody listens, and it was mounted")


def refused(transport, port, why, *options, source=ADDR):
    """The mount fails, and the transport in Rust has one line in the log."""
    sh("dmesg", "-C")
    assert mount(transport, port, *options, source=source).returncode, why
    said = [line.partition("9pnet_rdma_rs: ")[2] for line in sh("dmesg").stdout.splitlines()]
    assert transport == "rdma" or [line for line in said if line] == [why], said


def options(transport):
    with loaded(transport), diod(), relay() as (port, _), relay() as (other, _):
        for wrong, most in ("sq=0", 0x7fffffff), ("rq=0", 1016), ("rq=1017", 1016):
            refused(transport, port, f"{wrong}: 1 to {most}", wrong)
        assert mount(transport, other, "msize=4000").returncode
        nobody_listens(transport, port + 100)
        if transport == "rdma_rs":
            # C's transport has addresses of IPv4 only.
            nobody_listens(transport, port + 100, times=1, source="2001:db8::1")
            refused(transport, port, "timeout=0: 1 to 2147483647", "timeout=0")
            refused(transport, port, '"nobody" is no IPv4 or IPv6 address', source="nobody")
        done = mount(transport, port, "sq=7", "rq=9", "timeout=20000")
        assert not done.returncode, done.stderr
        try:
            shown = next(line for line in Path("/proc/mounts").read_text().splitlines() if f" {MOUNT} " in line)
            assert f"trans={transport},port={port},sq=7,rq=9,timeout=20000" in shown, shown
            works()
        finally:
            unmount()


def unload(transport):
    with loaded(transport), mounted(transport):
        refused = subprocess.run(["rmmod", TRANSPORTS[transport]], capture_output=True, text=True, check=False)
        assert "in use" in refused.stderr, refused.stderr
        works()


def namespace(transport):
    """The mount outlives the network namespace of who has mounted: the transport's is the initial one."""
    with loaded(transport), diod(), relay() as (port, _):
        done = mount(transport, port, by=("unshare", "--net"))
        assert not done.returncode, done.stderr
        try:
            works()
        finally:
            unmount()


def wait_until(is_so, what):
    end = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def held_reads(before=0, reads=2):
    """Readers, whose reads the server holds besides those before. The first read has the file go over to I/O
    without its cache (netfs_start_io_direct()), which a second one that begins at the same time waits for."""
    readers = []
    for count in range(before + 1, before + reads + 1):
        readers.append(subprocess.Popen(["cat", MOUNT / "works"], stderr=subprocess.DEVNULL))
        wait_until(lambda: told() >= count, "a read does not come")     # pylint: disable=cell-var-from-loop
    return readers


def flushed(transport, rounds=3):
    with loaded(transport), mounted(transport, "sq=2", "rq=2", how="hold") as process:
        works()
        for done in range(rounds):
            # A reader that is killed before its request was sent would wait for the reply: the client puts a signal
            # aside that is there already. The queue is full of what is to be flushed.
            readers = held_reads(2 * done)
            for reader in readers:
                reader.kill()
            try:
                for reader in readers:
                    assert reader.wait(60) == -signal.SIGKILL
            except subprocess.TimeoutExpired:
                stacks = [Path(f"/proc/{it.pid}/stack").read_text() for it in readers if it.poll() is None]
                # What they wait for ends with the connection, so that the mount and the module can go.
                process.kill()
                raise AssertionError(f"a reader does not end: {stacks}") from None
        works()


def outstanding(transport):
    """As many requests wait for their replies as rq has places, also where sq has fewer."""
    with loaded(transport), mounted(transport, "sq=1", "rq=3", how="hold") as process:
        works()
        readers = []
        try:
            readers += held_reads(reads=3)
        finally:
            # What they wait for ends with the connection.
            process.kill()
            for reader in readers:
                reader.kill()
                reader.wait(60)


def is_flushing(process):
    # The request waits, and in it that which flushes it; p9_client_flush() may be inlined.
    return Path(f"/proc/{process.pid}/stack").read_text().count("p9_client_rpc") > 1


def overtaken(transport):
    """A read is answered while its flush waits for others, and its tag is used again until that is sent."""
    flushes = FLUSHES if transport == "rdma_rs" else 1
    places = flushes + 2
    with loaded(transport), mounted(transport, f"sq={places}", f"rq={places}", how="overtake", count=flushes + 1):
        works()
        readers = held_reads(reads=flushes + 1)
        for reader in readers:
            reader.kill()
            wait_until(lambda: is_flushing(reader), "a read is not flushed")  # pylint: disable=cell-var-from-loop
        wait_until(lambda: told("flushes") == flushes, "a flush does not come")
        while not told("flushed"):
            os.stat(MOUNT / "works")
        for reader in readers:
            assert reader.wait(60) == -signal.SIGKILL
        assert told("held again"), "the tag was not used again"
        assert not told("another request is flushed")
        works()


def unanswered(transport):
    """A flush is not answered. Who waits for that waits as long as the connection is there, and nobody else."""
    with loaded(transport), mounted(transport, "sq=4", "rq=4", how="noflush") as process:
        works()
        lost, = held_reads(reads=1)
        lost.kill()
        wait_until(lambda: told("lost"), "no flush comes")
        other, = held_reads(before=1, reads=1)
        other.kill()
        try:
            assert other.wait(60) == -signal.SIGKILL
            assert lost.poll() is None, "a request has ended that the server may still answer"
            # Not the file that is being read.
            (MOUNT / "other").write_text("it works")
        finally:
            process.kill()
        assert lost.wait(60) == -signal.SIGKILL


def late(transport):
    """The server replies to a request that it has flushed."""
    with loaded(transport), mounted(transport, how="late"):
        works()
        reader, = held_reads(reads=1)
        reader.kill()
        assert reader.wait(60) == -signal.SIGKILL
        said = until_failed()
        assert os.strerror(errno.EIO) in said, said
    return said.strip()


def makes(at):
    """What a process does that signals come to, and that does not begin again what they end."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    system_call("mkdir", str(at).encode(), 0o755)


def signalled(transport):
    """Signals that are not fatal come while a request waits for a place: nothing fails by them."""
    with loaded(transport), mounted(transport, "sq=1", "rq=1", how="hold") as process:
        works()
        reader, = held_reads(reads=1)
        try:
            maker = in_process(makes, MOUNT / "made")
            wait_until(lambda: is_in_client(maker), "a process does not wait")
            for _ in range(20):
                os.kill(maker, signal.SIGUSR1)
                time.sleep(0.05)
            ended = os.waitpid(maker, os.WNOHANG)
            assert ended == (0, 0), os.strerror(os.waitstatus_to_exitcode(ended[1]))
            reader.kill()
            assert reader.wait(60) == -signal.SIGKILL
            assert os.waitpid(maker, 0) == (maker, 0)
            assert (SERVED / "made").is_dir()
        except BaseException:
            # What they wait for ends with the connection, so that the mount and the module can go.
            process.kill()
            reader.kill()
            raise


def interrupted_writes(number):
    """What one of some processes does that signals come to all the time: the server has what was written and synced,
    and it is what is mapped."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    at = MOUNT / f"{number}"
    for _ in range(4):
        data = os.urandom(20_000 + number)
        with at.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with at.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            assert memory[:] == data
        assert (SERVED / f"{number}").read_bytes() == data
        at.unlink()


def interrupted(transport):
    """More processes than requests can be sent at once, and signals in all that they do."""
    with loaded(transport), mounted(transport, "sq=2", "rq=2", "cache=mmap"):
        pids = [in_process(interrupted_writes, number) for number in range(8)]
        failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
        assert not failed, f"{len(failed)} of {len(pids)} processes have failed"
        assert not list(SERVED.iterdir())


def configures(transport, port):
    """What a process does whose system calls begin again after a signal."""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR1, False)
    configure(transport, port)


def connecting(transport):
    """A mount that a signal ends while the server is asked for a connection: one that is fatal, and another one."""
    with loaded(transport), diod():
        with relay("deaf") as (port, _):
            mounting = subprocess.Popen(["mount", "-t", "9p", "-o", words(transport, port), ADDR, MOUNT])
            wait_until(lambda: told("asked"), "nobody asks for a connection")
            mounting.kill()
            assert mounting.wait(60) == -signal.SIGKILL
        with relay("deaf") as (port, _):
            mounting = in_process(configures, transport, port)
            wait_until(lambda: told("asked"), "nobody asks for a connection")
            os.kill(mounting, signal.SIGUSR1)
            status = os.waitstatus_to_exitcode(os.waitpid(mounting, 0)[1])
            assert status == errno.EINTR, os.strerror(status)


def largest(transport):
    """Messages of the largest size, and what is more than that."""
    for msize in 1 << 20, 2 << 20:
        with loaded(transport), mounted(transport, "sq=2", "rq=2", f"msize={msize}"):
            data = os.urandom(3_000_000)
            (MOUNT / "file").write_bytes(data)
            assert (SERVED / "file").read_bytes() == data
            assert (MOUNT / "file").read_bytes() == data


def autoloaded(transport):
    """The client asks for the module of a transport by its name."""
    sh("modprobe", "-a", "9p", "rdma_cm")
    setting = Path("/proc/sys/kernel/modprobe")
    with tempfile.TemporaryDirectory() as root:
        modules = Path(root) / "lib/modules" / os.uname().release
        modules.mkdir(parents=True)
        shutil.copy(built(transport), modules)
        sh("depmod", "-b", root)
        program, before = Path(root) / "modprobe", setting.read_text()
        program.write_text(f"#!/bin/sh\nexec modprobe -d {root} \"$@\"\n")
        program.chmod(0o755)
        setting.write_text(str(program))
        try:
            with ended_by("rmmod", TRANSPORTS[transport]), mounted(transport):
                works()
        finally:
            setting.write_text(before)


def server_namespace(transport):
    """The network namespace of the server is deleted, and with it the wire that the mount's device is on."""
    wire.up()
    try:
        with loaded(transport), diod(wire.NETNS) as server, relay(addr=wire.FAR, where=wire.NETNS) as (port, process):
            done = mount(transport, port, source=wire.FAR)
            assert not done.returncode, done.stderr
            with ended_by("umount", MOUNT):
                works()
                wire.down()
                # It goes with the last process that is in it.
                for it in server, process:
                    it.kill()
                    it.wait()
                said = until_failed()
                assert os.strerror(errno.EIO) in said, said
            wait_until(lambda: not wire.devices(), "the devices do not go")
    except BaseException:
        with suppress(subprocess.SubprocessError):
            wire.down()
        raise


def version_flushed(transport):
    """A mount that is killed before the server has answered. Its first request has no tag, nor has what flushes it."""
    with loaded(transport), diod(), relay("mute") as (port, _):
        mounting = subprocess.Popen(["mount", "-t", "9p", "-o", words(transport, port), ADDR, MOUNT])
        wait_until(told, "no version comes")
        mounting.kill()
        assert mounting.wait(60) == -signal.SIGKILL
        assert told("flushes 65535"), RELAY_LOG.read_text()


def lied(transport, how):
    with loaded(transport), mounted(transport, how=how, count=REPLIES):
        said = until_failed()
        assert os.strerror(errno.EIO) in said, said
    return said.strip()


def wait_in_silence():
    """Has processes ask a server until it is silent; gives the one that waits for a reply then, and more of them."""
    while True:
        first = ask()
        while first.poll() is None and not silence():
            time.sleep(0.05)
        if silence():
            break
    waiting = [first, *(ask() for _ in range(3))]
    for it in waiting:
        wait_for_reply(it)
    return waiting


def silent(transport):
    with loaded(transport), mounted(transport, how="silent", count=REPLIES) as process:
        waiting = wait_in_silence()
        process.kill()
        for it in waiting:
            assert os.strerror(errno.EIO) in it.communicate(timeout=100)[1]


def forced(transport):
    """After umount -f who waits for a server that is silent can be killed: nothing is flushed any longer."""
    with loaded(transport), mounted(transport, how="silent", count=REPLIES) as process:
        try:
            waiting = wait_in_silence()
            with suppress(OSError):
                system_call("umount2", str(MOUNT).encode(), MNT_FORCE)
                raise AssertionError("it was unmounted while processes wait")
            for it in waiting:
                it.kill()
                it.communicate(timeout=60)
        finally:
            # The end of the mount has a request, too.
            process.kill()


def removal(transport):
    with loaded(transport), mounted(transport):
        works()
        link(False)
        try:
            assert os.strerror(errno.EIO) in until_failed()
        finally:
            link()


def on_siw(function, *args):
    link(False)
    sh("modprobe", "siw")
    siw_link()
    try:
        return function(*args)
    finally:
        siw_link(False)
        link()


# The place of ucma_create_uevent() in ucma_connect_event_handler(): the relay's kernel destroys the id of the request
# then in that id's own handler, whose mutex rdma_destroy_id() waits for.
UCMA_EVENT = "1930bb399dee0ba4"


@contextmanager
def places():
    """Has allocations fail in threads that say so: at each place once."""
    if not faults.PLACES.exists():
        # It cannot be unloaded.
        sh("insmod", BUILD / FLAVOUR / "rdma_faults.ko")
    faults.says("rdma-rs allows: Call Trace:")
    faults.prepare()
    faults.write(faults.PLACES / "shared", "debugfs_create_file")
    faults.write(faults.PLACES / "known", "\n")
    faults.write(faults.PLACES / "known", UCMA_EVENT)
    faults.write("/sys/kernel/debug/fail_page_alloc/min-order", 20)
    yield


@contextmanager
def ends_if_stuck(process):
    """Ends a relay that what is done waits for: a fault may have cost it an event (ib_uverbs_comp_handler()), so that
    it no longer replies. What waits for a reply ends with the connection then."""
    timer = threading.Timer(200, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def relay_that_ends(how=""):
    """A relay to the end of what is done."""
    with relay(how) as (port, process), ends_if_stuck(process):
        yield port


# Less is allocated with these, at the same places.
SMALL = ("sq=4", "rq=4", "msize=16384")


def is_mounted():
    return f" {MOUNT} " in Path("/proc/mounts").read_text()


def failed_places(module=""):
    """Returns how many places have failed in this case, of those that functions of a module have called."""
    log = sh("dmesg").stdout.rpartition("rdma-rs test: ")[2]
    return sum("rdma-rs fault: place" in line and module in line for line in log.splitlines())


def still_works(transport):
    with relay() as (port, _):
        mount_here(transport, port)
        works()
        unmount_here()


def fails_to_mount(transport):
    with loaded(transport), diod(), places():
        for nth in faults.EACH.values():
            fired = True
            while fired:
                with relay_that_ends() as port:
                    fired, said = faults.attempt(lambda: mount_here(transport, port), nth)
                    if is_mounted():
                        unmount_here()
                    else:
                        assert fired, said
        still_works(transport)
    ours = failed_places("trans_rdma")
    assert ours, "no allocation of the transport has failed"
    return f"{failed_places()} places, {ours} of the transport"


def uses():
    """Small and large messages, and a folder. What is read is what was written."""
    for size in 10, 5000, 100_000:
        data = os.urandom(size)
        with open(MOUNT / "file", "wb", buffering=0) as file:
            file.write(data)
        assert (MOUNT / "file").read_bytes() == data[:os.stat(MOUNT / "file").st_size]
    os.listdir(MOUNT)


def fails_in_use(transport, action, again):
    """Has each place of an action on a mount fail. One that has lost its connection by that is mounted again."""
    with loaded(transport), diod(), places():
        for nth in faults.EACH.values():
            fired = True
            while fired:
                with relay() as (port, process):
                    with ends_if_stuck(process):
                        mount_here(transport, port, *SMALL)
                    for _ in range(again):
                        with ends_if_stuck(process):
                            fired, said = faults.attempt(action, nth)
                            assert "AssertionError" not in said, said
                            lost = is_mounted() and is_lost()
                        # If the mount was lost, places may be left.
                        fired = fired or lost
                        if not fired or lost or not is_mounted():
                            break
                    if is_mounted():
                        with ends_if_stuck(process):
                            unmount_here()
        still_works(transport)
    count = failed_places()
    assert count, "no allocation has failed"
    return f"{count} places"


def killed_reader(nth):
    """Kills a process that waits for a read, of which an allocation fails from then on: those of a flush, and of its
    end. Returns whether one has."""
    reader = subprocess.Popen(["cat", MOUNT / "works"], stderr=subprocess.DEVNULL)
    fail_nth = Path(f"/proc/{reader.pid}/task/{reader.pid}/fail-nth")
    while not told():
        assert reader.poll() is None, "a reader has ended"
        time.sleep(0.05)
    faults.write(fail_nth, nth)
    reader.kill()
    os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WNOWAIT)
    fired = not int(fail_nth.read_text())
    reader.wait()
    return fired


def fails_to_flush(transport):
    with loaded(transport), diod(), places():
        for nth in faults.EACH.values():
            fired = True
            while fired:
                with relay_that_ends("hold") as port:
                    mount_here(transport, port, *SMALL)
                    try:
                        works()
                        fired = killed_reader(nth)
                    finally:
                        unmount_here()
        still_works(transport)
    count = failed_places()
    assert count, "no allocation has failed"
    return f"{count} places"


def is_lost():
    """Returns whether the mount has lost its connection."""
    try:
        works()
    except OSError:
        return True
    return False


def declare(prefix, slow, transport):
    """The cases of a transport; `slow` begins the names of those that take longer, which depends on the kernel."""
    for name, function in (
            ("options are shown, and those that cannot be are refused", options),
            ("it is not unloaded under a mount", unload),
            ("mounted from a network namespace that ends", namespace),
            ("the network namespace of the server is deleted", server_namespace),
            # Deleting a link of siw waits until the relay, which is a process on it, has ended.
            ("rdma link delete under a mount", removal)):
        case(f"{prefix}: {name}", transport)(function)
    short = (
        ("attributes and locks", attributes),
        ("messages of the largest size", largest),
        ("signals while a request waits for a place", signalled),
        ("signals in all that some processes do", interrupted),
        ("a mount that a signal ends while it connects", connecting),
        ("more requests wait for replies than can be sent at once", outstanding),
        ("reads that are flushed give their requests back", flushed),
        ("a read that is answered while its flush waits", overtaken),
        ("a flush that is never answered", unanswered),
        ("a reply that comes after its flush", late),
        ("a mount that is killed before the server has answered", version_flushed),
        ("a server that is silent, and then killed", silent),
        ("a server that is silent, and umount -f", forced),
        *((f"a server that lies: {how}", lied, how) for how in FEW_LIES))
    longer = (
        ("a tree is copied, and read back", tree),
        ("a source is copied, compared and compiled", compiled),
        ("fio verifies what many processes have written, more than requests can be sent at once", verify),
        (f"{PROCESSES} processes at once", many),
        *((f"a server that lies: {how}", lied, how) for how in LIES if how not in FEW_LIES))
    for group, cases in (prefix, short), (prefix if STOCK else slow, longer):
        for name, function, *args in cases:
            case(f"{group}: {name}", transport, *args)(function)
            # Debian's kernel has no siw.
            if not STOCK:
                siw_group = group if function in (flushed, lied) else slow
                case(f"{siw_group}: siw: {name}", function, transport, *args)(on_siw)


def declare_faults(prefix, transport):
    """The cases in which allocations fail."""
    case(f"{prefix}: flushes", transport)(fails_to_flush)
    case(f"{prefix}: mount", transport)(fails_to_mount)
    case(f"{prefix}: use", transport, uses, 100)(fails_in_use)
    case(f"{prefix}: unmount", transport, unmount_here, 1)(fails_in_use)


# Neither the kernel with PREEMPT_RT nor Debian's for arm64 have 9P.
if FLAVOUR.partition(".")[0] in ("stock", "um-debug", "um-kcsan"):
    case("9p: the module is loaded by the name of the transport", "rdma_rs")(autoloaded)
    declare("9p", "9p long", "rdma_rs")
    declare("9p c", "9p c", "rdma")
    if FLAVOUR.startswith("um-debug"):
        declare_faults("9p faults", "rdma_rs")
        declare_faults("9p c faults", "rdma")
