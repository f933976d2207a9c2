# SPDX-License-Identifier: GPL-2.0
"""NVMe over RDMA: the modules that have bindings of the kernel's private headers, and a few of the cases of
nvme_matrix.py between both ends in Rust."""

import errno
import subprocess
from contextlib import contextmanager
from pathlib import Path

import nvme
# pylint: disable-next=unused-import,multiple-imports
import nvme_data, nvme_faults
from case import BUILD, FLAVOUR, case, sh
from nvme_ground import CASES, Ground

NVMET = Path("/sys/kernel/config/nvmet")
ADDR = "192.0.2.99"
CHOSEN = ("rxe: 4 KiB, depths 1, 16, 64", "rxe: reset under load, 3 times",
          "rxe: port disabled and enabled under load, twice")


@contextmanager
def loaded(name, *kernel):
    """Loads a module, and those of the kernel that it needs, for a while."""
    sh("modprobe", "-a", *kernel)
    sh("insmod", BUILD / FLAVOUR / f"{name}.ko")
    try:
        yield
    finally:
        sh("rmmod", name)


def refused(said, what, *args, error=errno.EOPNOTSUPP):
    """Does what fails, and looks for what the kernel says then."""
    subprocess.run(["dmesg", "-C"], check=True)
    try:
        what(*args)
    except OSError as e:
        assert e.errno == error, e
    else:
        raise AssertionError("it was not refused")
    log = sh("dmesg").stdout
    assert said in log, f"the kernel said: {log}"


# They are built for kernels that have NVMe.
if (BUILD / FLAVOUR / "nvme_rdma_rs.ko").exists():
    @case("nvme: the host reads its options, and refuses an address that is none")
    def host():
        with loaded("nvme_rdma_rs", "nvme-fabrics"):
            refused("nvme_rdma_rs: malformed address passed: nowhere:4420", Path("/dev/nvme-fabrics").write_text,
                    "transport=rdma_rs,traddr=nowhere,nqn=none", error=errno.EINVAL)


if (BUILD / FLAVOUR / "nvmet_rdma_rs.ko").exists():
    @case("nvme: the target refuses a port whose address no device has, or that is to have T10-PI")
    def target():
        with loaded("nvmet_rdma_rs", "nvmet", "configfs"):
            if not NVMET.exists():
                sh("mount", "-t", "configfs", "none", NVMET.parent)
            port, subsystem = NVMET / "ports/99", NVMET / "subsystems/none"
            for folder in port, subsystem:
                folder.mkdir()
            try:
                for name, value in (("trtype", "rdma"), ("adrfam", "ipv4"), ("traddr", ADDR), ("trsvcid", "4420")):
                    (port / f"addr_{name}").write_text(value)
                enable = (port / "subsystems/none").symlink_to
                refused(f"nvmet_rdma_rs: listening to {ADDR}:4420 failed", enable, subsystem, error=errno.EADDRNOTAVAIL)
                if (port / "param_pi_enable").exists():
                    (port / "param_pi_enable").write_text("1")
                    refused("T10-PI is not supported", enable, subsystem, error=errno.EINVAL)
            finally:
                for folder in port, subsystem:
                    folder.rmdir()


def between(host, target):
    """Runs the chosen cases between two ends."""
    host, target = nvme.named(host, nvme.HOSTS), nvme.named(target, nvme.TARGETS)
    nvme.load(host, target)
    try:
        for name in CHOSEN:
            chosen = CASES[name]
            chosen.function(Ground(chosen.link, host, target), *chosen.args)
            nvme.none_left()
    finally:
        nvme.unload(nvme.HOSTS[host], nvme.TARGETS[target])
        nvme.PARAMETERS.clear()


if all((BUILD / FLAVOUR / f"{module}.ko").exists() for module in ("nvme_rdma_rs", "nvmet_rdma_rs")):
    case("nvme: data, resets and a port that goes, with nothing that saves completions",
         "rust", "rust,sig_limit=1,kept_data_size=0")(between)
    case("nvme: data, resets and a port that goes, with all that saves completions",
         "rust,sig_limit=16,copied_data_size=4096", "rust,sig_limit=16,kept_data_size=4096")(between)
