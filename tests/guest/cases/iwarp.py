# SPDX-License-Identifier: GPL-2.0
"""iWARP: siw in place of rxe, where the kernel has it."""

import re

import perf
from case import ROUNDS, STOCK, case, sh
from cases import ondevice
from demo import PAIRINGS, run
from rping import CONTEXTS
from samples import MadPing, UdEcho, kv, module, rpc
from traffic import link, link_delete, siw_link


def begin():
    link(False)
    sh("modprobe", "siw")
    siw_link()


def matrix(context, pairing):
    row, why = run(context, pairing, 20)
    assert row["ok"], f"{row} {why}"


def minimal():
    sh("dmesg", "-C")
    with module("rdma_minimal", "context=1"):
        pass
    assert 'Recv: Ok("hello")' in sh("dmesg").stdout, "no hello"


def rows(sample):
    for row in sample():
        assert row["ok"], row


def not_there():
    """What needs datagrams or MADs refuses the device, and says why."""
    for sample in (MadPing, UdEcho):
        sh("dmesg", "-C")
        with module(sample.module):
            assert not sample("siw0").path.exists(), f"{sample.module} has files for it"
        said = sh("dmesg").stdout
        assert re.search(rf"{sample.module}: device siw0 is not used", said), said


def deleted(context):
    for _ in range(ROUNDS):
        reason = link_delete(context, siw_link)
    return reason


def end():
    siw_link(False)
    link()


if not STOCK:
    case("siw: in place of rxe")(begin)
    for c in CONTEXTS:
        for p in PAIRINGS:
            case(f"siw: rping: {c}, {p}", c, p)(matrix)
    case("siw: minimal: says hello")(minimal)
    for s in rpc, kv:
        case(f"siw: sample: {s.__name__}", s)(rows)
    case("siw: samples: what needs datagrams or MADs is refused")(not_there)
    case("siw: perf: rdma_perf_rs: each load", "rdma_perf_rs")(perf.on_siw)
    for c in CONTEXTS:
        case(f"siw: rdma link delete under traffic: {c}", c)(deleted)
    case("siw: on-device: passes, and leaves nothing")(ondevice.on_siw)
    case("siw: rxe again")(end)
