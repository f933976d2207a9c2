# SPDX-License-Identifier: GPL-2.0
"""scripts/on-device, on a link of its own."""

import json
import os
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

from case import BUILD, FLAVOUR, SECONDS, STOCK, case, sh
from traffic import link as rxe_link

KIT = "/rdma-rs/scripts/on-device"
ADDR, MAC, HOST = "198.51.100.77", "02:5a:17:c0:ff:ee", "planted-host"
REPORT = Path("/run/on-device-test")
CONFIGFS = Path("/sys/kernel/config")
# What the suite has loaded, in the order of loading.
SUITE = ("configfs", "ib_uverbs", "rdma_ucm", "rdma_rs", "rdma_rping")
# What it prints when it has begun with the rows of a kind.
ROW = {"rping": "pass: rping, ", "nvme": "pass: nvme, "}
# The rows of each kind.
ROWS = {"rping": 12, "samples": 9, "nvme": 3, "bench": 7}


def command(device, *options):
    return [KIT, device, "--modules", f"{BUILD}/{FLAVOUR}", "--report", str(REPORT), *options]


def run(device, *options, **others):
    """The status, and the report, of a run."""
    done = subprocess.run(command(device, *options), stderr=subprocess.PIPE, text=True, check=False, timeout=SECONDS,
                          **{"stdout": subprocess.PIPE, **others})
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, report()


def report():
    return json.loads(REPORT.with_suffix(".json").read_text())


def state():
    """What a run has to leave as it was."""
    modules = sorted(line.split()[0] for line in Path("/proc/modules").read_text().splitlines())
    made = sorted(str(it) for folder in ("rdma_rping", "nvmet/subsystems", "nvmet/ports")
                  for it in CONFIGFS.glob(f"{folder}/*"))
    shown = json.loads(sh("rdma", "-j", "resource", "show").stdout)
    # The core keeps CQs that are shared, as C's host shares them, until the device goes.
    used = [{k: v for k, v in it.items() if k not in ("ifindex", "cq")} for it in shown]
    return modules, made, Path("/proc/mounts").read_text(), used


def insert(name):
    built = BUILD / FLAVOUR / f"{name}.ko"
    if not Path("/sys/module", name).exists():
        sh(*(("insmod", built) if built.exists() else ("modprobe", name)))


@contextmanager
def link():
    """Has a link kit0 in place of rxe0, without the modules of the suite and without configfs."""
    with ExitStack() as undo:
        undo.callback(sh, "hostname", sh("hostname").stdout.strip())
        sh("hostname", HOST)
        rxe_link(False)
        undo.callback(rxe_link)
        sh("ip", "link", "add", "kit_net", "address", MAC, "type", "dummy")
        undo.callback(sh, "ip", "link", "delete", "kit_net")
        sh("ip", "addr", "add", f"{ADDR}/24", "dev", "kit_net")
        sh("ip", "link", "set", "kit_net", "up")
        sh("rdma", "link", "add", "kit0", "type", "rxe", "netdev", "kit_net")
        undo.callback(subprocess.run, ["rdma", "link", "delete", "kit0"], check=False, capture_output=True)
        undo.enter_context(bare())
        yield


@contextmanager
def bare():
    """Has none of the suite's modules that can go, and no configfs mounted."""
    with ExitStack() as undo:
        undo.callback(lambda: [insert(name) for name in SUITE])
        for name in reversed(SUITE):
            path = Path("/sys/module", name)
            if name == "configfs":
                undo.callback(sh, "mount", "-t", "configfs", "configfs", CONFIGFS)
                undo.callback(insert, name)
                sh("umount", CONFIGFS)
            # rxe and others of the kernel have some of them loaded.
            if (path / "initstate").exists() and not any((path / "holders").iterdir()):
                sh("rmmod", name)
        yield


def interrupted(interrupt, row, *options):
    """The status, and the report, of a run that this comes to after its first row."""
    with subprocess.Popen(command("kit0", *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as process:
        while not (line := process.stdout.readline()).startswith(row):
            assert line, process.communicate()
        interrupt(process)
        _, said = process.communicate(timeout=SECONDS)
    assert "Traceback" not in said, said
    return process.returncode, report()


def delete(_):
    sh("rdma", "link", "delete", "kit0")


def passes(device, *options):
    """All rows pass, or are skipped for a reason; nothing is left. Returns the report."""
    before = state()
    status, told = run(device, "--count", "5", "--rounds", "2", *options)
    bad = [it for it in told["results"] if it["verdict"] != "pass" and not it["verdict"].startswith("skipped: ")]
    assert status == 0 and told["verdict"] == "pass" and not bad, bad or told
    assert state() == before, f"{before} {state()}"
    return told


def secrets():
    """What no report may have."""
    path = Path("/sys/class/infiniband/kit0")
    return [ADDR, MAC, MAC.replace(":", ""), HOST, "kit0", "kit_net", (path / "node_guid").read_text().strip(),
            *(it.read_text().strip() for it in (path / "ports/1/gids").iterdir())]


def skipped(told):
    return {it["what"]: it["verdict"] for it in told["results"] if it["verdict"] != "pass"}


if STOCK and not FLAVOUR.endswith("arm64"):
    @case("on-device: a dry run changes nothing, and what cannot be run is said")
    def refusals():
        with link():
            before = state()
            said = sh(*command("kit0", "--dry-run")).stdout
            assert "rdma_rs" in said and "userspace-rust" in said and "NVMe" in said, said
            sh("ip", "link", "set", "kit_net", "down")
            for why, device, *options in (("there is no device kit9; there are: kit0", "kit9"),
                                          ("kit0 has no port 2", "kit0/2"),
                                          ("port is not ACTIVE: nothing was run", "kit0"),
                                          ("the IP address of a machine that serves", "kit0", "--peer", "kit"),
                                          ("for two machines", "kit0", "--serve", "--peer", "192.0.2.1"),
                                          ("its folder cannot be written to", "kit0", "--report", "/no/where"),
                                          ("--count 0: it is 1 to", "kit0", "--count", "0")):
                done = subprocess.run(command(device, *options), capture_output=True, text=True, check=False)
                assert done.returncode == 2 and why in done.stderr, done
            assert state() == before, f"{before} {state()}"

    for kind, number in ROWS.items():
        @case(f"on-device: passes, leaves nothing, and tells no names or addresses: {kind}", kind, number)
        def everything(kind, number):
            with link():
                secret, told = secrets(), passes("kit0", "--only", kind)
            assert not skipped(told) and len(told["results"]) == number, told
            assert told["version"] != "unknown" and told["build"], told
            for text in REPORT.with_suffix(".json").read_text(), REPORT.with_suffix(".txt").read_text():
                found = [it for it in secret if it.strip("0:") and it.lower() in text.lower()]
                assert not found, f"{found} in {text}"

    @case("on-device: the other end is another process that serves, and ends by a signal")
    def peer():
        with link():
            before = state()
            with subprocess.Popen(command("kit0", "--serve"), stdout=subprocess.PIPE, text=True) as server:
                while "until it is interrupted" not in (line := server.stdout.readline()):
                    assert line and "does not" not in line, line
                told = passes("kit0/1", "--peer", ADDR)
                server.terminate()
                assert server.wait(SECONDS) == 0, server.stdout.read()
            assert state() == before, f"{before} {state()}"
        # Both processes are on one machine here.
        assert skipped(told) == {"kv": "skipped: rdma_kv is loaded"}, told
        assert len(told["results"]) == 12 + 1 + 2, told

    for kind, row in ROW.items():
        @case(f"on-device: the device goes away in the middle: {kind}", kind, row)
        def goes(kind, row):
            with link():
                before = state()[:3]
                status, told = interrupted(delete, row, "--only", kind, "--count", "2000")
                assert status == 1 and told["results"][-1]["verdict"].startswith("ENODEV"), told
                assert not told["left"] and state()[:3] == before, f"{told} {before} {state()}"

    @case("on-device: signals in the middle, of which the first one ends it")
    def signals():
        with link():
            before = state()
            for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
                def interrupt(process):
                    for it in (number, signal.SIGINT, signal.SIGTERM):
                        process.send_signal(it)
                status, told = interrupted(interrupt, ROW["rping"], "--count", "500")
                assert status == 1 and told["verdict"].startswith("ended by SIG"), told
                assert not told["left"] and state() == before, f"{told} {before} {state()}"

    @case("on-device: a report in the kernel's log fails it")
    def planted():
        def plant(_):
            for line in "rdma-rs expects: planted_secret", "WARNING: CPU: 0 at planted_secret":
                Path("/dev/kmsg").write_text(f"{line}\n")

        with link():
            status, told = interrupted(plant, ROW["rping"], "--only", "rping")
        assert status == 1 and told["verdict"] == "fail" and told["log"] == {"warning": 1}, told
        assert "planted_secret" not in REPORT.with_suffix(".txt").read_text()

    @case("on-device: what others have loaded, mounted or made stays, and a reader that goes is no failure")
    def others():
        with link():
            for name in "configfs", "rdma_rs", "rdma_rping":
                insert(name)
            sh("mount", "-t", "configfs", "configfs", CONFIGFS)
            folder = CONFIGFS / "rdma_rping/theirs"
            folder.mkdir()
            try:
                before = state()
                ours, theirs = os.pipe()
                os.close(ours)
                status, told = run("kit0", "--only", "rping", stdout=theirs)
                os.close(theirs)
                assert status == 0 and told["build"] == "unknown, as it was loaded before", told
                assert state() == before, f"{before} {state()}"
            finally:
                folder.rmdir()
            # What comes first is another device.
            rxe_link()
            sh("rdma", "link", "delete", "kit0")
            sh("rdma", "link", "add", "kit0", "type", "rxe", "netdev", "kit_net")
            status, told = run("kit0", "--only", "samples")
            rxe_link(False)
            reason = "skipped: another device with an address comes first"
            assert status == 1 and list(skipped(told).values()) == [reason], told


def on_siw():
    """It passes on siw0."""
    with bare():
        told = passes("siw0")
    known = ("iWARP", "connection manager", "lockdep")
    reasons = {it for it in skipped(told).values() if not any(word in it for word in known)}
    assert not reasons, told
