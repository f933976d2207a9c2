# SPDX-License-Identifier: GPL-2.0
"""The ends of NVMe over RDMA that are named: what is built for them, and what their results depend on."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
# The module that all ends in Rust need.
CORE = "rdma_rs"


def names(kernel):
    """The modules of hosts and of targets, by the names of the ends, as the guest has them."""
    os.environ["flavour"] = kernel
    sys.path.insert(0, str(TOP / "tests/guest"))
    import nvme             # pylint: disable=import-outside-toplevel
    return nvme.HOSTS, nvme.TARGETS


def built(kernel, *modules):
    """Builds those of the modules that are in Rust. Returns what tells the kernel and them from others."""
    said = subprocess.run([TOP / "scripts/kernel", kernel], check=True, text=True, stdout=subprocess.PIPE).stdout
    ours = [module for module in modules if module.endswith("_rs")]
    if ours:
        # Their errors go to the terminal, and to build/log.
        subprocess.run(["bash", "-c", '. scripts/lib.sh; STEP_TAIL=60 step "$@"', "step",
                        f"building the modules for the kernel {kernel}", "0", "scripts/build", kernel, "modules", "TESTS=",
                        "SAMPLES=", "CONFIG_RDMA_RUST_KUNIT_TEST="], check=True, cwd=TOP)
    for module in (CORE, *ours) if ours else ():
        digest = hashlib.sha256((TOP / f"build/{kernel}/{module}.ko").read_bytes()).hexdigest()
        said += f"{module} {digest}\n"
    return said
