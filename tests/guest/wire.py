# SPDX-License-Identifier: GPL-2.0
"""Two rxe links with a wire between them: near0, and far0 in the network namespace "far".

Or both in one namespace, for ULPs that know no other: what is sent to an address of these is routed to the wire
before it is found to be local, and what comes from the wire is local first."""

import json
import subprocess
from contextlib import contextmanager
from pathlib import Path

from case import sh

NEAR, FAR = "198.51.100.1", "198.51.100.2"
NETNS = ("ip", "netns", "exec", "far")
# Each end of the wire: its device, its interface, and where commands that see this run.
ENDS = {"near0": ("wire0", ()), "far0": ("wire1", NETNS)}
# The faults of a packet in twenty. Those that are reordered go ahead of others, which are delayed.
TROUBLES = {
    "loss": "loss 5%",
    "duplication": "duplicate 5%",
    "reordering": "delay 2ms reorder 5%",
    "delay": "delay 5ms 5ms 5%",
    "all": "delay 2ms reorder 5% loss 5% duplicate 5%",
}


def link(device):
    interface, where = ENDS[device]
    sh(*where, "rdma", "link", "add", device, "type", "rxe", "netdev", interface)


def devices():
    """The devices on the wire that are there."""
    said = sh("rdma", "dev").stdout
    return [device for device in ENDS if f" {device}:" in said]


def reach(addr, source, interface):
    """Has an address be reached by the wire, from one at its other end."""
    sh("ip", "route", "add", addr, "dev", interface, "src", source, "table", "100")


def route():
    """Has the ends reach each other by the wire in one namespace."""
    for rule in ("pref 10 iif wire0 lookup local", "pref 10 iif wire1 lookup local", "pref 20 lookup 100",
                 "pref 30 lookup local"):
        sh("ip", "rule", "add", *rule.split())
    sh("ip", "rule", "del", "pref", "0")
    reach(FAR, NEAR, "wire0")
    reach(NEAR, FAR, "wire1")
    for interface in ("all", "wire0", "wire1"):
        conf = Path("/proc/sys/net/ipv4/conf", interface)
        for name, value in (("accept_local", 1), ("rp_filter", 0), ("arp_ignore", 1)):
            (conf / name).write_text(str(value), encoding="ascii")


def up(apart=True):
    """Makes both ends, in namespaces of their own (apart) or in one."""
    sh("modprobe", "-a", "veth", "sch_netem", "rdma_rxe")
    if apart:
        sh("ip", "netns", "add", "far")
    else:
        ENDS["far0"] = ("wire1", ())
    sh("ip", "link", "add", "wire0", "type", "veth", "peer", "name", "wire1", *(("netns", "far") if apart else ()))
    if apart:
        sh(*NETNS, "ip", "link", "set", "lo", "up")
    for device, addr in (("near0", NEAR), ("far0", FAR)):
        interface, where = ENDS[device]
        sh(*where, "ip", "addr", "add", f"{addr}/24", "dev", interface)
        sh(*where, "ip", "link", "set", interface, "up")
        link(device)
    if not apart:
        route()


def down():
    sh("ip", "netns", "del", "far")


@contextmanager
def far_down():
    """Takes the interface of the far end down while this is open, where both are in one namespace."""
    sh("ip", "link", "set", "wire1", "down")
    try:
        yield
    finally:
        sh("ip", "link", "set", "wire1", "up")
        # Routes go with the interface.
        reach(NEAR, FAR, "wire1")


def counted(interface, where):
    said = sh(*where, "tc", "-s", "-j", "qdisc", "show", "dev", interface).stdout
    netem = json.loads(said)[0]
    assert netem["kind"] == "netem", said
    return {"sent": netem["packets"], "lost": netem["drops"], "reordered": netem["requeues"]}


def received():
    """What both devices have counted."""
    names = {"duplicate_request": "duplicates", "out_of_seq_request": "gaps", "send_rnr_err": "rnr",
             "completer_retry_err": "retries"}
    said = dict.fromkeys(names.values(), 0)
    for device in ENDS:
        # One by one: of all devices nothing is shown if one of them, as siw, has no counters.
        for row in json.loads(sh("rdma", "-j", "statistic", "show", "link", f"{device}/1").stdout):
            for key, name in names.items():
                said[name] += row.get(key, 0)
    return said


def introduce():
    """Has both ends know each other's MAC address: rping waits for two seconds only to learn it."""
    macs = {addr: json.loads(sh(*where, "ip", "-j", "link", "show", "dev", interface).stdout)[0]["address"]
            for addr, (interface, where) in zip((NEAR, FAR), ENDS.values())}
    for peer, (interface, where) in zip((FAR, NEAR), ENDS.values()):
        sh(*where, "ip", "neigh", "replace", peer, "lladdr", macs[peer], "dev", interface, "nud", "permanent")


@contextmanager
def trouble(kind, figures):
    """Has both directions of the wire in trouble, of a kind or in netem's words; adds to the figures what was done to
    how many packets."""
    introduce()
    for interface, where in ENDS.values():
        sh(*where, "tc", "qdisc", "replace", "dev", interface, "root", "netem", *TROUBLES.get(kind, kind).split())
    before = received()
    try:
        yield
    finally:
        for key, value in received().items():
            figures[key] = value - before[key]
        for interface, where in ENDS.values():
            for key, value in counted(interface, where).items():
                figures[key] = figures.get(key, 0) + value
            subprocess.run([*where, "tc", "qdisc", "del", "dev", interface, "root"], check=True)
