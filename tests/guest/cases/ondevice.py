# SPDX-License-Identifier: GPL-2.0
"""scripts/on-device, on a link of its own."""

import json
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

from case import BUILD, FLAVOUR, SECONDS, STOCK, case, sh

KIT = "/rdma-rs/scripts/on-device"
ADDR, MAC, HOST = "198.51.100.77", "02:5a:17:c0:ff:ee", "planted-host"
REPORT = Path("/run/on-device-test")


def command(device, *options):
    return [KIT, device, "--modules", f"{BUILD}/{FLAVOUR}", "--report", str(REPORT), *options]


def state():
    """What a run has to leave as it was."""
    modules = sorted(line.split()[0] for line in Path("/proc/modules").read_text().splitlines())
    made = sorted(str(it) for it in Path("/sys/kernel/config").glob("rdma_rping/*"))
    shown = json.loads(sh("rdma", "-j", "resource", "show").stdout)
    used = [{k: v for k, v in it.items() if k != "ifindex"} for it in shown]
    return modules, made, Path("/proc/mounts").read_text(), used


@contextmanager
def link():
    """Has a link kit0, and neither rdma_rs nor rdma_rping loaded."""
    host = sh("hostname").stdout.strip()
    sh("rmmod", "rdma_rping", "rdma_rs")
    sh("hostname", HOST)
    sh("ip", "link", "add", "kit_net", "address", MAC, "type", "dummy")
    try:
        sh("ip", "addr", "add", f"{ADDR}/24", "dev", "kit_net")
        sh("ip", "link", "set", "kit_net", "up")
        sh("rdma", "link", "add", "kit0", "type", "rxe", "netdev", "kit_net")
        yield
    finally:
        subprocess.run(["rdma", "link", "delete", "kit0"], check=False, capture_output=True)
        sh("ip", "link", "delete", "kit_net")
        sh("hostname", host)
        for name in "rdma_rs", "rdma_rping":
            sh("insmod", f"{BUILD}/{FLAVOUR}/{name}.ko")


def report():
    return json.loads(REPORT.with_suffix(".json").read_text())


def interrupted(interrupt, count):
    """The status, and the report, of a run that this comes to after its first row."""
    with subprocess.Popen(command("kit0", "--count", str(count)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True) as run:
        while not run.stdout.readline().startswith("pass: "):
            assert run.poll() is None, run.stderr.read()
        interrupt(run)
        _, said = run.communicate(timeout=SECONDS)
    assert "Traceback" not in said, said
    return run.returncode, report()


if STOCK and FLAVOUR != "arm64":
    @case("on-device: a dry run changes nothing, and what cannot be run is said")
    def refusals():
        with link():
            before = state()
            said = sh(*command("kit0", "--dry-run")).stdout
            assert "rdma_rping" in said and "userspace-rust" in said, said
            wrong = subprocess.run(command("kit9"), capture_output=True, text=True, check=False)
            assert wrong.returncode == 2 and "no device kit9; there are: kit0, rxe0" in wrong.stderr, wrong
            sh("ip", "link", "set", "kit_net", "down")
            down = subprocess.run(command("kit0"), capture_output=True, text=True, check=False)
            assert down.returncode == 2 and "port is not ACTIVE: nothing was run" in down.stderr, down
            assert state() == before, f"{before} {state()}"

    @case("on-device: passes, leaves nothing, and tells no names or addresses")
    def passes():
        with link():
            before = state()
            path = Path("/sys/class/infiniband/kit0")
            secret = [ADDR, MAC, MAC.replace(":", ""), HOST, "kit0", "kit_net",
                      (path / "node_guid").read_text().strip(),
                      *(it.read_text().strip() for it in (path / "ports/1/gids").iterdir())]
            run = subprocess.run(command("kit0", "--count", "20"), capture_output=True, text=True, check=False)
            assert run.returncode == 0, f"{run.stdout} {run.stderr}"
            assert state() == before, f"{before} {state()}"
        told = report()
        assert told["verdict"] == "pass" and len(told["results"]) == 12, told
        for text in REPORT.with_suffix(".json").read_text(), REPORT.with_suffix(".txt").read_text():
            found = [it for it in secret if it.strip("0:") and it.lower() in text.lower()]
            assert not found, f"{found} in {text}"

    @case("on-device: the device goes away in the middle")
    def goes():
        with link():
            before = state()[:3]
            status, told = interrupted(lambda _: sh("rdma", "link", "delete", "kit0"), 2000)
            assert status == 1 and told["results"][-1]["verdict"].startswith("ENODEV"), told
            assert not told["left"] and state()[:3] == before, f"{told} {before} {state()}"

    @case("on-device: SIGINT in the middle")
    def interrupt():
        with link():
            before = state()
            status, told = interrupted(lambda run: run.send_signal(signal.SIGINT), 500)
            assert status == 1 and told["verdict"] == "ended by SIGINT", told
            assert not told["left"] and state() == before, f"{told} {before} {state()}"
