# SPDX-License-Identifier: GPL-2.0
"""The cases of DH-HMAC-CHAP over NVMe over RDMA."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import nvme
from case import STOCK, sh
from nvme import Null
from nvme_ground import case

HASHES = ("hmac(sha256)", "hmac(sha384)", "hmac(sha512)")
# The kernel with checkers makes no algorithms of templates (CONFIG_CRYPTO_MANAGER).
GROUPS = ("null", "ffdhe2048", "ffdhe3072") if STOCK else ("null",)


@contextmanager
def authenticated(ground, key, **options):
    """A target that lets one host in, by a secret: its backing, the host, and the folder of what the target knows."""
    null = Null()
    with null, ground.target(null, attr_allow_any_host=0) as target:
        host = ground.controller(target, dhchap_secret=key, **options)
        entry = nvme.NVMET / "hosts" / host.hostnqn
        allowed = target.subsystem / "allowed_hosts" / host.hostnqn
        entry.mkdir()
        try:
            allowed.symlink_to(entry)
            yield null, host, entry
        finally:
            allowed.unlink(missing_ok=True)
            entry.rmdir()


def secret():
    return sh("nvme", "gen-dhchap-key", "--hmac=1").stdout.strip()


@case("authentication: DH-HMAC-CHAP", links=("rxe",))
def authentication(ground):
    key = secret()
    with authenticated(ground, key) as (null, host, entry):
        nvme.write(entry / "dhchap_key", key)
        with host:
            ground.verify(host.disk(), null, iodepth=16, size="256k")
            host.reset()
            ground.figures["resets"] += 1
            ground.verify(host.disk(), null, iodepth=16, size="256k", randseed=2)


@case(f"authentication: {len(HASHES)} hashes, groups {', '.join(GROUPS)}", links=("rxe",))
def hashes(ground):
    # Nothing loads it for the sake of a group. In Debian's kernel it is built in.
    if "name         : dh\n" not in Path("/proc/crypto").read_text(encoding="ascii"):
        sh("modprobe", "dh_generic")
    key = secret()
    with authenticated(ground, key) as (null, host, entry):
        nvme.write(entry / "dhchap_key", key)
        for name in HASHES:
            for group in GROUPS:
                nvme.write(entry / "dhchap_hash", name)
                nvme.write(entry / "dhchap_dhgroup", group)
                with host:
                    ground.verify(host.disk(), null, iodepth=16, size="64k")


@case("authentication: of the target, too", links=("rxe",))
def both_ways(ground):
    key, answer = secret(), secret()
    with authenticated(ground, key, dhchap_ctrl_secret=answer) as (null, host, entry):
        nvme.write(entry / "dhchap_key", key)
        nvme.write(entry / "dhchap_ctrl_key", answer)
        with host:
            ground.verify(host.disk(), null, iodepth=16, size="256k")


@case("authentication: secrets change while connected", links=("rxe",))
def new_secrets(ground):
    key = secret()
    with authenticated(ground, key) as (null, host, entry):
        nvme.write(entry / "dhchap_key", key)
        with host:
            for n in range(2):
                key = secret()
                nvme.write(entry / "dhchap_key", key)
                nvme.write(host.path / "dhchap_secret", key)
                ground.verify(host.disk(), null, iodepth=16, size="64k", randseed=n)
                # All queues are authenticated by the new one, or it stays connecting.
                host.reset()
                ground.figures["resets"] += 1
                ground.verify(host.disk(), null, iodepth=16, size="64k", randseed=n)


# Two that are refused, by the end that does so.
REFUSED = ("it waits for a minute, uninterruptibly, as it does not notice that the target disconnects a queue that is "
           "being set up")


@case("authentication: a wrong secret is refused", links=("rxe",), defects={("host", "c"): REFUSED})
def wrong_secret(ground):
    with authenticated(ground, secret()) as (_, host, entry):
        nvme.write(entry / "dhchap_key", secret())
        refused(host)


@case("authentication: a target with a wrong secret is refused", links=("rxe",), defects={("host", "c"): REFUSED})
def wrong_target(ground):
    key = secret()
    with authenticated(ground, key, dhchap_ctrl_secret=secret()) as (_, host, entry):
        nvme.write(entry / "dhchap_key", key)
        nvme.write(entry / "dhchap_ctrl_key", secret())
        refused(host)


def refused(host):
    """The host must not be connected."""
    try:
        host.connect()
    except subprocess.CalledProcessError:
        return
    host.disconnect()
    raise AssertionError("it was connected, with a wrong secret")
