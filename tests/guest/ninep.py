# SPDX-License-Identifier: GPL-2.0
"""9P over RDMA: a server of TCP (diod), relays between that and RDMA, and mounts."""

import ctypes
import os
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from case import BUILD, FLAVOUR, PROGRAMS, sh
from rping import ADDR, ports, wait_listening

SERVED, MOUNT = Path("/run/ninep-served"), Path("/run/ninep")
# The name of a transport, and the module that it is of.
TRANSPORTS = {"rdma": "9pnet_rdma", "rdma_rs": "9pnet_rdma_rs"}
DIOD_PORT = 5650


@contextmanager
def ended_by(*command):
    """Runs a command at the end. If it cannot be run where something has failed, that is not the reason."""
    try:
        yield
    except BaseException:
        with suppress(subprocess.SubprocessError):
            subprocess.run(command, capture_output=True, check=False, timeout=60)
        raise
    sh(*command)


def built(transport):
    """The file of a transport's module, which is this build's."""
    return BUILD / FLAVOUR / f"{TRANSPORTS[transport]}.ko"


@contextmanager
def loaded(transport):
    """Loads the client and a transport of it."""
    sh("modprobe", "9p")
    if transport == "rdma":
        sh("modprobe", "9pnet_rdma")
    else:
        sh("insmod", built(transport))
    with ended_by("rmmod", TRANSPORTS[transport]):
        yield


def ended(process):
    process.kill()
    process.wait()


def wait_accepting(port, where):
    end = time.monotonic() + 60
    while subprocess.run([*where, "bash", "-c", f"</dev/tcp/127.0.0.1/{port}"], stderr=subprocess.DEVNULL,
                         check=False).returncode:
        assert time.monotonic() < end, "diod does not accept connections"
        time.sleep(0.05)


@contextmanager
def diod(where=()):
    """Serves an empty folder, to the relays of a network namespace."""
    shutil.rmtree(SERVED, ignore_errors=True)
    SERVED.mkdir()
    MOUNT.mkdir(exist_ok=True)
    server = subprocess.Popen([*where, "diod", "-f", "-n", "-L", "/run/diod.log", "-e", SERVED,
                               "-l", f"127.0.0.1:{DIOD_PORT}"])
    try:
        wait_accepting(DIOD_PORT, where)
        yield server
    finally:
        ended(server)
        shutil.rmtree(SERVED, ignore_errors=True)


RELAY_LOG = Path("/run/p9_relay.log")


def silence():
    """Returns whether the relay has kept a reply to itself."""
    return "silent" in RELAY_LOG.read_text()


def told(what="held"):
    """Returns how often the relay has told of this, as of a request that it has not passed on."""
    return RELAY_LOG.read_text().count(f"{what}\n")


@contextmanager
def relay(how="", count=0, addr=ADDR, where=()):
    """Relays between RDMA and diod, in the manner `how` from so many replies on; gives the port and the process."""
    port = next(ports)
    with RELAY_LOG.open("w") as log:
        process = subprocess.Popen([*where, PROGRAMS / "p9_relay", addr, str(port), str(DIOD_PORT), how, str(count)],
                                   stderr=log)
    try:
        wait_listening(port, where=where)
        yield port, process
    finally:
        ended(process)


def words(transport, port, *options):
    return ",".join((f"trans={transport}", f"port={port}", f"aname={SERVED}", "uname=root", *options))


def mount(transport, port, *options, source=ADDR, at=MOUNT, by=()):
    """Mounts by a program, which another one may start."""
    return subprocess.run([*by, "mount", "-t", "9p", "-o", words(transport, port, *options), source, at],
                          capture_output=True, text=True, check=False)


LIBC = ctypes.CDLL(None, use_errno=True)
# include/uapi/linux/mount.h: FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE. include/linux/fs.h: MNT_FORCE.
SET_STRING, CREATE = 1, 6
MNT_FORCE = 1


def system_call(name, *args):
    if getattr(LIBC, name)(*args):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def mount_here(transport, port, *options, source=ADDR):
    """Mounts by one system call of the caller."""
    options = words(transport, port, *options).encode()
    system_call("mount", source.encode(), str(MOUNT).encode(), b"9p", 0, options)


def configure(transport, port):
    """Makes a mount by fsconfig(), for which a context is there that is used once; it is mounted nowhere."""
    context = LIBC.fsopen(b"9p", 0)
    for word in (f"source={ADDR}", *words(transport, port).split(",")):
        key, _, value = word.encode().partition(b"=")
        system_call("fsconfig", context, SET_STRING, key, value, 0)
    system_call("fsconfig", context, CREATE, None, None, 0)


def unmount_here():
    system_call("umount2", str(MOUNT).encode(), 0)


def unmount(at=MOUNT):
    subprocess.run(["umount", at], check=True, timeout=60)


@contextmanager
def mounted(transport, *options, how="", count=0):
    """Mounts what diod serves; gives the relay's process."""
    with diod(), relay(how, count) as (port, process):
        done = mount(transport, port, *options)
        assert not done.returncode, done.stderr
        with ended_by("umount", MOUNT):
            yield process


def fill(folder, files, size):
    """Makes a tree of files with random bytes."""
    for n in range(files):
        at = folder / f"folder{n % 5}"
        at.mkdir(parents=True, exist_ok=True)
        (at / f"file{n}").write_bytes(os.urandom(size * n // files))
    (folder / "link").symlink_to("folder0/file0")
