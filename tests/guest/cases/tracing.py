# SPDX-License-Identifier: GPL-2.0
"""What can be seen of objects, drains and mappings while they are there: Documentation/debugging.rst."""

import os
import re
import subprocess
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

from case import BUILD, FLAVOUR, STOCK, case, sh
from rping import CONTEXTS
from samples import module
from traffic import OBJECTS, no_connection, traffic

TRACING = Path("/sys/kernel/tracing")
WR_FLUSH_ERR = 5
HOT = [f"rdma_rs/{event}" for event in ("post_send", "post_recv", "post_srq_recv", "wc")]
# The opcode of a completion, where it is not that of the request.
COMPLETES = {"SEND_WITH_INV": "SEND"}


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
def enabled(*events):
    if not (TRACING / "trace").exists():
        sh("mount", "-t", "tracefs", "tracefs", TRACING)
    write("trace", "")
    for event in events:
        write(f"events/{event}/enable", 1)
    try:
        yield
    finally:
        for event in events:
            write(f"events/{event}/enable", 0)
    lost = re.findall(r"^overrun: [^0].*", "".join(p.read_text() for p in TRACING.glob("per_cpu/*/stats")), re.M)
    assert not lost, lost


def drains():
    with enabled("rdma_rs/drain_begin", "rdma_rs/drain_end", "rdma_rs/mr_map"):
        with traffic():
            qps = set(re.findall(r"QP (\d+)", OBJECTS.read_text()))
        no_connection()
    begun, ended = ({(event["device"], event["qp_num"]) for event in traced(name)}
                    for name in ("drain_begin", "drain_end"))
    assert begun == ended == {("rxe0", qp) for qp in qps}, f"{qps}: {begun}, {ended}"
    assert all(event["rc"] == "0" for event in traced("drain_end")), traced("drain_end")
    maps = [(event["nents"], event["len"], event["rc"]) for event in traced("mr_map")]
    assert maps == [("1", "64", "0")] * 2, maps
    with enabled("rdma_rs/mr_map"):
        with module("rdma_rpc"):
            pass
    # Pages that are not contiguous.
    assert ("65536", "0") in {(event["len"], event["rc"]) for event in traced("mr_map")}, traced("mr_map")
    write("trace", "")
    with traffic():
        pass
    no_connection()
    assert not traced(r"(?:drain_|mr_|post_|wc)\w*"), "events that are off are traced"


def matched():
    """Says of how many requests there are a post and its completion: all, but for receives of SRQs that are left."""
    posts, completions, on_srq = defaultdict(list), defaultdict(list), defaultdict(int)
    for event in traced("post_(?:send|recv)"):
        assert (event["device"], event["rc"]) == ("rxe0", "0"), event
        assert event.get("flags", "SIGNALED") == "SIGNALED", event
        posts[event["qp_num"], event["wr_cqe"]].append(event.get("opcode", "RECV"))
    for event in traced("post_srq_recv"):
        assert (event["device"], event["num_sge"], event["rc"]) == ("rxe0", "1", "0"), event
        on_srq[event["wr_cqe"]] += 1
    for event in traced("wc"):
        assert event["status"] in ("SUCCESS", "WR_FLUSH_ERR"), event
        if event["wr_cqe"] in on_srq:
            assert event["opcode"] == "RECV", event
            on_srq[event["wr_cqe"]] -= 1
        else:
            completions[event["qp_num"], event["wr_cqe"]].append(event)
    assert posts.keys() == completions.keys(), f"{posts.keys() ^ completions.keys()}"
    for request, opcodes in posts.items():
        # One at a time, so that they come back in their order.
        assert len(opcodes) == len(completions[request]), f"{request}: {opcodes}, {completions[request]}"
        for posted, wc in zip(opcodes, completions[request]):
            expected = COMPLETES.get(posted, posted) if wc["status"] == "SUCCESS" else "-"
            assert wc["opcode"] == expected, f"{posted}: {wc}"
    assert all(left in (0, 1) for left in on_srq.values()), on_srq
    return sum(map(len, posts.values()))


def hot_path():
    with enabled(*HOT):
        # Pointers are hashed otherwise, or all the same as long as there is no entropy.
        write("options/hash-ptr", 0)
        with module("rdma_rpc"):
            pass
        matched()
        # 4 clients make 60 calls each. A call has its data registered and is sent, and one that brings data has
        # it read. Where it asks for data the answer is the last of a chain. One call more is refused.
        opcodes = [event["opcode"] for event in traced("post_send")]
        assert [opcodes.count(of) for of in ("REG_MR", "RDMA_READ", "SEND", "SEND_WITH_INV")] == [240, 120, 241, 240]
        assert max(int(event["num"]) for event in traced("post_send")) > 1
        for context in CONTEXTS:
            write("trace", "")
            with traffic(context):
                qps = set(re.findall(r"QP (\d+)", OBJECTS.read_text()))
            no_connection()
            assert matched() > 2 * len(qps), context
            assert {event["qp_num"] for event in traced("wc")} == qps, f"{context}: {qps}"
    write("trace", "")
    with traffic():
        pass
    no_connection()
    assert not traced(r"(?:post_|wc)\w*"), "events that are off are traced"


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


def late():
    names = ("rdma_null", "rdma_late")
    with enabled("rdma_rs/wc"):
        write("options/hash-ptr", 0)
        try:
            for name in names:
                sh("insmod", f"{BUILD}/{FLAVOUR}/{name}.ko")
        finally:
            for name in reversed(names):
                subprocess.run(["rmmod", name], capture_output=True, check=False)
    events = traced("wc")
    # Four requests, and the markers of the drain.
    assert len(events) >= 4, events
    assert len({event["cq.id"] for event in events}) == 1, f"traced by a CQ that is gone: {events}"
    assert len({event["wr_cqe"] for event in events}) == len(events), f"traced twice: {events}"


# The debug kernel has no tracefs.
if STOCK:
    case("tracing: drains and mappings, and nothing when it is off")(drains)
    case("tracing: posts and completions in each context, and nothing when it is off")(hot_path)
    case("tracing: completions are dispatched after their CQ was destroyed, and traced once")(late)
    case("tracing: posts and failed completions by probes at the driver's functions")(probes)
