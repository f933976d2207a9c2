# SPDX-License-Identifier: GPL-2.0
"""The ends of NVMe over RDMA that are named: what is built for them, what their results depend on, and what is known
about the reports of their kernels."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
# The module that all ends in Rust need.
CORE = "rdma_rs"
# Reports about C that are known: what they begin with, functions in the lines that follow, whose they are if they are
# an end's, and what they are about.
KNOWN = (("possible circular locking dependency", ("nvmet_find_get_subsys+", "nvmet_rdma_disable_port+"),
          ("target", "c"), "lockdep: nvmet_config_sem and the handler_mutex of two ids, as a command that has come "
          "before the connection is established is executed in its handler; lockdep stops there"),
         ("refcount_warn_saturate+", ("nvme_rdma_end_request+", "nvme_rdma_send_done+"), ("host", "c"),
          "a completed SEND takes a reference of a request that has none left"),
         ("rxe_comp.c:827 at rxe_completer+", (), None, "rxe completes a request as done that has failed"
          " (patches/rdma_rxe/0004)"))
# The lines of a report.
REPORT = 160


def names(kernel):
    """The modules of hosts and of targets, by the names of the ends, as the guest has them."""
    os.environ["flavour"] = kernel
    sys.path.insert(0, str(TOP / "tests/guest"))
    import nvme             # pylint: disable=import-outside-toplevel
    return nvme.HOSTS, nvme.TARGETS


def name_of(end):
    """The name of an end that may have parameters of its module behind it (rust,sig_limit=16)."""
    return end.partition(",")[0]


def built(kernel, *modules, faults=False):
    """Builds those of the modules that are in Rust, and for faults those that have allocations fail and interfaces
    fail over, if the kernel can. Returns what tells the kernel and the modules from others."""
    said = subprocess.run([TOP / "scripts/kernel", kernel], check=True, text=True, stdout=subprocess.PIPE).stdout
    ours = [module for module in modules if module.endswith("_rs")]
    goals = ["modules", "TESTS=", "SAMPLES=", "CONFIG_RDMA_RUST_KUNIT_TEST="] if ours else []
    if faults and kernel == "um-debug":
        goals += ["FAULTS=m"] if ours else ["rdma_faults.ko", "rdma_failover.ko", "FAULTS=m"]
    if goals:
        # Their errors go to the terminal, and to build/log.
        subprocess.run(["bash", "-c", '. scripts/lib.sh; STEP_TAIL=60 step "$@"', "step",
                        f"building the modules for the kernel {kernel}", "0", "scripts/build", kernel, *goals],
                       check=True, cwd=TOP)
    for module in (CORE, *ours) if ours else ():
        digest = hashlib.sha256((TOP / f"build/{kernel}/{module}.ko").read_bytes()).hexdigest()
        said += f"{module} {digest}\n"
    return said


def known(lines, ends):
    """What is known about the reports in a log, by the line at which each begins."""
    found = {}
    for words, functions, whose, reason in KNOWN:
        if whose and ends[whose[0]] != whose[1]:
            continue
        for n, line in enumerate(lines):
            report = lines[n:n + REPORT]
            if words in line and all(any(function in other for other in report) for function in functions):
                found.setdefault(n, f"{whose[1].upper()} {whose[0]}: {reason}" if whose else reason)
    return found


def reports(log, host, target):
    """What a log says that a healthy kernel does not: the case, the line, and what is known about it, if anything."""
    said = subprocess.run([TOP / "scripts/logs/scan-log", log], capture_output=True, text=True, check=False)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    reasons, place = known(lines, {"host": host, "target": target}), 0
    for line in said.stdout.splitlines():
        case, _, text = line.partition(" # ")
        text = text.removeprefix("kernel log: ")
        place = next((n for n in range(place, len(lines)) if text in lines[n]), place)
        yield case, text, next((why for begin, why in reasons.items() if begin <= place < begin + REPORT), "")
        place += 1
    for line in said.stderr.splitlines():
        print(line, file=sys.stderr)
