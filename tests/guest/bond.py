# SPDX-License-Identifier: GPL-2.0
"""A link on a bond, whose interfaces take over from each other: its hardware address changes then."""

import json
from contextlib import contextmanager

from case import sh

INTERFACES = "bond_a", "bond_b"


@contextmanager
def bond(addr):
    """Has the link rxe1 on a bond of two interfaces, of which the first is active, each with an address of its own."""
    sh("modprobe", "bonding", "max_bonds=0")
    sh("ip", "link", "add", "bond1", "type", "bond", "mode", "active-backup", "fail_over_mac", "active")
    try:
        for name in INTERFACES:
            sh("ip", "link", "add", name, "type", "dummy")
            sh("ip", "link", "set", name, "master", "bond1")
        sh("ip", "addr", "add", f"{addr}/24", "dev", "bond1")
        sh("ip", "link", "set", "bond1", "up")
        take_over(INTERFACES[0])
        sh("rdma", "link", "add", "rxe1", "type", "rxe", "netdev", "bond1")
        yield
        sh("rdma", "link", "delete", "rxe1")
    finally:
        for name in "bond1", *INTERFACES:
            sh("ip", "link", "delete", name)
        sh("rmmod", "bonding")


def take_over(interface):
    sh("ip", "link", "set", "bond1", "type", "bond", "active_slave", interface)


def listener(port):
    """The number of the id that listens there, or None."""
    shown = json.loads(sh("rdma", "-j", "resource", "show", "cm_id", "state", "listen").stdout)
    return next((it["cm-idn"] for it in shown if it["src-addr"].endswith(f":{port}")), None)
