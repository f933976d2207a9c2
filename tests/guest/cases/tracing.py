# SPDX-License-Identifier: GPL-2.0
"""What can be seen of objects, drains and mappings while they are there: Documentation/debugging.rst."""

import os
import re
from contextlib import contextmanager
from pathlib import Path

from case import STOCK, case, sh
from samples import module
from traffic import OBJECTS, no_connection, traffic

TRACING = Path("/sys/kernel/tracing")
WR_FLUSH_ERR = 5


def fills(said):
    """The reserved entries that each CQ shows, and those that the QPs show which complete to it."""
    shown = {int(cq): int(n) for cq, n in
             re.findall(r"CQ (\d+), made \d+ s ago, \w+, (\d+) of \d+ entries reserved", said)}
    counted = dict.fromkeys(shown, 0)
    for n, cq in re.findall(r", (\d+) (?:sends|receives) to CQ (\d+)", said):
        counted[int(cq)] += int(n)
    return shown, counted


@case("objects: a CQ shows the entries that its QPs have reserved, also when they are gone")
def reserved():
    with traffic():
        shown, counted = fills(OBJECTS.read_text())
        assert len(shown) == 2 and shown == counted and all(shown.values()), f"{shown}, {counted}"
        assert re.search(r"MR \d+, made \d+ s ago, 2 pages$", OBJECTS.read_text(), re.M)
    no_connection()
    # Its target keeps the CQs when the connections have ended.
    with module("rdma_kv", "operations=40"):
        no_connection()
        shown, _ = fills(OBJECTS.read_text())
        assert shown and not any(shown.values()), OBJECTS.read_text()


def write(name, text, flags=os.O_TRUNC):
    # tracefs does not seek, as Python does to append.
    fd = os.open(TRACING / name, os.O_WRONLY | flags)
    try:
        os.write(fd, f"{text}\n".encode())
    finally:
        os.close(fd)


def traced(event):
    """The fields of each event of that name in the trace."""
    trace = (TRACING / "trace").read_text()
    return [dict(re.findall(r"([\w.]+)=(\S+)", rest)) for rest in re.findall(rf": {event}: (.*)", trace)]


@contextmanager
def enabled(events):
    if not (TRACING / "trace").exists():
        sh("mount", "-t", "tracefs", "tracefs", TRACING)
    write("trace", "")
    write(f"events/{events}/enable", 1)
    try:
        yield
    finally:
        write(f"events/{events}/enable", 0)


def drains():
    with enabled("rdma_rs"):
        with traffic():
            qps = set(re.findall(r"QP (\d+)", OBJECTS.read_text()))
        no_connection()
    begun, ended = ({(event["device"], event["qp_num"]) for event in traced(name)}
                    for name in ("drain_begin", "drain_end"))
    assert begun == ended == {("rxe0", qp) for qp in qps}, f"{qps}: {begun}, {ended}"
    assert all(event["rc"] == "0" for event in traced("drain_end")), traced("drain_end")
    maps = [(event["nents"], event["len"], event["rc"]) for event in traced("mr_map")]
    assert maps == [("1", "64", "0")] * 2, maps
    with enabled("rdma_rs"):
        with module("rdma_rpc"):
            pass
    # Pages that are not contiguous.
    assert ("65536", "0") in {(event["len"], event["rc"]) for event in traced("mr_map")}, traced("mr_map")
    write("trace", "")
    with traffic():
        pass
    no_connection()
    assert not traced(r"(?:drain_|mr_)\w+"), "events that are off are traced"


def probes():
    for probe in ("p:post_send rxe_post_send qp=ibqp->qp_num opcode=wr->opcode",
                  "r:polled rxe_poll_cq n=$retval:s32 status=wc->status qp=wc->qp->qp_num"):
        write("dynamic_events", probe, os.O_APPEND)
    try:
        write("events/kprobes/polled/filter", "n > 0 && status != 0")
        write("events/kprobes/post_send/trigger", "hist:keys=qp")
        with enabled("kprobes/polled"):
            with traffic():
                qps = set(re.findall(r"QP (\d+)", OBJECTS.read_text()))
            no_connection()
        posted = (TRACING / "events/kprobes/post_send/hist").read_text()
        assert set(re.findall(r"qp: +(\d+)", posted)) >= qps, f"{qps}: {posted}"
        flushed = traced("polled")
        assert flushed and all(int(event["status"]) == WR_FLUSH_ERR for event in flushed), flushed
        assert {event["qp"] for event in flushed} <= qps, f"{qps}: {flushed}"
    finally:
        write("events/kprobes/post_send/trigger", "!hist:keys=qp")
        for probe in ("post_send", "polled"):
            write("dynamic_events", f"-:kprobes/{probe}", os.O_APPEND)


# The debug kernel has no tracefs.
if STOCK:
    case("tracing: drains and mappings, and nothing when it is off")(drains)
    case("tracing: posts and failed completions by probes at the driver's functions")(probes)
