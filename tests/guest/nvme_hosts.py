# SPDX-License-Identifier: GPL-2.0
"""Hosts of NVMe over RDMA that lie, against a target."""

import random
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import nvme
import nvme_wire as wire
from nvme_host import BLOCK, MOMENT, PATIENCE, Host, Queue, Refused
from nvme_lies import Defect, lie
from peer import PAGE, Peer

# Of what a case may write, and what others read.
PLACE = 1024
SECRET = b"this is the data of another command. "
ROOM = 8192


def against(name, *args, **how):
    return lie("target", name, *args, **how)


def came(function, *args, **how):
    """What came of a call, in words."""
    try:
        said = function(*args, **how)
    except Refused as e:
        return str(e)
    return said if isinstance(said, str) else f"status {said.status:#x}" if hasattr(said, "status") else "accepted"


def started(ground, peer, **how):
    """A host with an I/O queue."""
    host = Host(peer, ground.target)
    host.start()
    return host, host.io(**how)


def count(said, word):
    said[word] = said.get(word, 0) + 1


def counted(said):
    return ", ".join(f"{number} x {word}" for word, number in sorted(said.items()))


def end(queue, ms=MOMENT):
    """Whether the connection goes on."""
    return "connection ended" if queue.ended(ms) else "connection stays"


# The request for a connection.

def request(ground, peer, private, **how):
    host = Host(peer, ground.target)
    queue = Queue(host, 0, private, **how)
    said = came(queue.established)
    if said != "accepted":
        return said
    return f"accepted, Connect: {came(queue.connect)}"


against("request: no private data", b"", known="a queue that is never released")(request)
against("request: 31 bytes", wire.request(0)[:31])(request)
against("request: 56 bytes", wire.request(0) + b"\xff" * 24)(request)
against("request: record format 1", wire.request(0, recfmt=1))(request)
against("request: record format 65535", wire.request(0, recfmt=65535))(request)
against("request: 33 entries for the admin queue", wire.request(0, hsqsize=32))(request)
against("request: hsqsize 0", wire.request(0, hsqsize=0))(request)
against("request: hrqsize 0", wire.request(0, hrqsize=0), known="a queue that is never released")(request)
against("request: hrqsize 1", wire.request(0, hrqsize=1))(request)


@against("request: hsqsize 65535", known="allocations without end")
def large_sq(ground, peer):
    return request(ground, peer, wire.request(1, hsqsize=65535))


@against("request: hrqsize 65535", known="allocations without end")
def large_rq(ground, peer):
    return request(ground, peer, wire.request(0, hrqsize=65535))


@against("request: more entries than the port has")
def large_for_port(ground, peer):
    with nvme.Port(ground.target.subsystem, param_max_queue_size=16) as port:
        host = Host(peer, SimpleNamespace(addr=port.addr, trsvcid=port.trsvcid, nqn=ground.target.nqn))
        host.start()
        return ", ".join(f"{depth}: {came(host.queue, 1, depth=depth, receives=1)}" for depth in (16, 17, 256))


SILENT = 300


@against(f"request: {SILENT} that are not confirmed, and hosts in good order", times=3)
def unconfirmed(ground, peer):
    """One has asked in between, and hears of the answer last of all; another one comes then."""
    said = []
    with Peer() as other:
        host = Host(other, ground.target)
        for n in range(SILENT):
            if n == SILENT // 2:
                queue = Queue(host, 0)
            number = peer.connect(ground.target.addr, ground.target.trsvcid, wire.request(0), depth=0)
            said.append(peer.event(number, PATIENCE).name)
        served = f"{came(queue.established)}, Connect: {came(queue.connect)}"
        if served != "accepted, Connect: status 0x0":
            raise Defect(f"the host that has asked in between: {served}")
        ground.serve()
    return f"{said.count('CONNECT_RESPONSE')} accepted, {said.count('REJECTED')} rejected"


@against("request: 10 hosts that send no command, and the port goes, with one worker")
def port_goes(ground, peer):
    """No controller has these connections, whose ends the end of the port waits for. They do not wait for that of
    another one, which waits for its disk."""
    host = Host(peer, ground.target)
    queues = [host.queue(0, receives=1) for _ in range(10)]
    nsec = (MOMENT + 2000) * 10**6
    with nvme.Null(irqmode=2, completion_nsec=nsec) as null, nvme.Target(null) as target, nvme.one_worker():
        other = Host(peer, target)
        other.start()
        queue = other.io()
        queue.write_inline(0, bytes(BLOCK))
        peer.tell("disconnect", queue.number)
        queue.ended()
        ground.target.disable()
        ended = [queue.ended() for queue in queues]
        ground.target.enable()
    if not all(ended):
        raise Defect(f"{ended.count(False)} connections stay")
    return f"{len(ended)} end"


# The Connect command.

@against("Connect: an I/O queue of no controller")
def no_controller(ground, peer):
    return came(Host(peer, ground.target).queue(1).connect, 77)


@against("Connect: an I/O queue twice")
def twice(ground, peer):
    host, queue = started(ground, peer)
    return f"{came(host.io)}, again on one queue: {came(queue.connect, host.cntlid)}"


@against("Connect: I/O queues of a controller of another port, which goes", known="memory of a port that was freed")
def other_port(ground, peer):
    """The controller knows the port that has made it, and stays as long as its queues: the first one waits for its
    disk, and the second one comes when the port is disabled."""
    nsec = (MOMENT + 2000) * 10**6
    with nvme.Null(irqmode=2, completion_nsec=nsec) as null, nvme.Target(null) as target:
        with nvme.Port(target.subsystem) as port:
            host = Host(peer, SimpleNamespace(addr=port.addr, trsvcid=port.trsvcid, nqn=target.nqn))
            host.start()
            host.target = target
            first, second = (host.queue(qid) for qid in (1, 2))
            said = [came(first.connect, host.cntlid)]
            if said == ["status 0x0"]:
                first.write_inline(0, bytes(BLOCK))
                # It has come.
                first.poll(PATIENCE)
                port.disable()
            said.append(came(second.connect, host.cntlid))
        if "status 0x0" in said:
            # nvmet looks at the port for what it thinks of this flag.
            cid = second.next_cid()
            said.append(came(second.call, wire.read_write(wire.READ, cid, wire.NOTHING, 0, 1, flags=0)))
            raise Defect(f"they are served: {', '.join(said)}")
    return "refused"


@against("Connect: an I/O queue of a controller that has failed", known="a controller that has failed is served")
def failed(ground, peer):
    """It stays as long as its queues, of which the first one waits for its disk."""
    nsec = (MOMENT + 2000) * 10**6
    with nvme.Null(irqmode=2, completion_nsec=nsec) as null, nvme.Target(null) as target:
        host = Host(peer, target)
        host.start()
        first, second = host.io(), host.queue(2)
        first.write_inline(0, bytes(BLOCK))
        # It has come.
        first.poll(PATIENCE)
        host.admin.send(bytes(64), length=63)
        if not host.admin.ended(PATIENCE):
            raise Defect("a capsule of 63 bytes is no error")
        said = came(second.connect, host.cntlid)
        if said == "status 0x0":
            raise Defect(f"it is served: {said}, {second.said(second.read(0, peer.buffer(BLOCK), 0))}")
    return said


@against("Connect: queue 65535")
def last_qid(ground, peer):
    host = Host(peer, ground.target)
    host.start()
    return came(host.io, 65535)


@against("Connect: queue 0 on a connection for queue 1")
def admin_for_io(ground, peer):
    host = Host(peer, ground.target)
    queue = Queue(host, 0, wire.request(1))
    queue.established()
    return came(queue.connect)


@against("Connect: queue 1 on a connection for queue 0, and inline data", known="a NULL pointer")
def io_for_admin(ground, peer):
    host = Host(peer, ground.target)
    host.start()
    queue = Queue(host, 1, wire.request(0))
    queue.established()
    said = came(queue.connect, host.cntlid)
    if said != "status 0x0":
        return said
    ground.spoil(PLACE, BLOCK)
    cid = queue.next_cid()
    queue.send(wire.read_write(wire.WRITE, cid, wire.inline(BLOCK), PLACE, 1))
    return queue.said(cid)


@against("Connect: inline data on the admin queue", known="a NULL pointer")
def inline_connect(ground, peer):
    host = Host(peer, ground.target)
    queue = host.queue(0)
    cid = queue.next_cid()
    queue.send(wire.connect(cid, 0, 32, wire.inline(wire.CONNECT_DATA)))
    return queue.said(cid)


@against("Connect: the admin queue ends alone, and an administrator asks who the host is", known="a NULL pointer")
def headless(ground, peer):
    """The controller stays as long as its I/O queue."""
    host, _ = started(ground, peer)
    asked = Path("/sys/kernel/debug/nvmet", ground.target.nqn, f"ctrl{host.cntlid}", "host_traddr")
    if not asked.exists():
        return "nothing to ask"
    if not asked.read_text(encoding="ascii").strip():
        raise Defect("the host has no address")
    peer.tell("disconnect", host.admin.number)
    nvme.until(lambda: not asked.read_text(encoding="ascii").strip(), "the admin queue does not end")
    return "no address"


@against("Connect: data of garbage")
def garbage(ground, peer):
    said = []
    for seed in range(8):
        host = Host(peer, ground.target)
        queue, data = host.queue(0, receives=4), peer.buffer(wire.CONNECT_DATA)
        data.put(random.Random(seed).randbytes(wire.CONNECT_DATA))
        said.append(came(queue.call, wire.connect(1, 0, 32, wire.keyed(data.addr, data.length, data.register()))))
        peer.tell("disconnect", queue.number)
    return ", ".join(sorted(set(said)))


@against("Connect: names that do not end")
def endless_names(ground, peer):
    host = Host(peer, ground.target)
    queue, data = host.queue(0), peer.buffer(wire.CONNECT_DATA)
    data.put(b"\xff" * 16 + b"\xff\xff" + bytes(238) + b"a" * 512 + b"b" * 256)
    return came(queue.call, wire.connect(1, 0, 32, wire.keyed(data.addr, data.length, data.register())))


@against("Connect: data of other lengths")
def other_lengths(ground, peer):
    said = []
    for length in (0, 1, 1023, 1025, 4096, 65536):
        host = Host(peer, ground.target)
        queue, data = host.queue(0, receives=4), peer.buffer(65536)
        data.put(wire.connect_data(ground.target.nqn, host.nqn))
        said.append(came(queue.call, wire.connect(1, 0, 32, wire.keyed(data.addr, length, data.register()))))
        peer.tell("disconnect", queue.number)
    return ", ".join(said)


@against("Connect: other commands before it")
def before_connect(ground, peer):
    host, said = Host(peer, ground.target), []
    for qid in 0, 1:
        queue = host.queue(qid)
        said.append(came(queue.call, wire.command(wire.IDENTIFY, queue.next_cid())))
        said.append(came(queue.call, wire.prop(wire.PROPERTY_GET, queue.next_cid(), wire.CAP)))
        said.append(came(queue.call, wire.read_write(wire.READ, queue.next_cid(), wire.NOTHING, 0, 1)))
    return ", ".join(said)


# More than may be without a controller, by connections of three processes.
IDLE = 1050


@against(f"Connect: {IDLE} connections without it, and a host in good order", known="connections without end", times=3)
def idle(ground, peer):
    """Those that are idle for longest end."""
    with ExitStack() as undo:
        peers = [undo.enter_context(Peer()) for _ in range(3)]
        queues = [Host(one, ground.target).queue(0, receives=1) for one in peers for _ in range(IDLE // len(peers))]
        stay = [queue for queue in queues[:IDLE - 1024:5] if not queue.ended(PATIENCE)]
        if stay:
            raise Defect("all connections stay" if len(stay) > 1 else "a connection stays")
        ground.serve()
    return "the oldest end"


@against("Connect: none, and the connection ends")
def never(ground, peer):
    host = Host(peer, ground.target)
    for qid in 0, 1, 2:
        peer.tell("disconnect", host.queue(qid).number)
    return "accepted"


# Capsules.

def capsule_of(ground, peer, qid, length):
    """A capsule of so many bytes, on a queue that is connected."""
    host, queue = started(ground, peer)
    queue = queue if qid else host.admin
    cid = queue.next_cid()
    command = wire.command(wire.FLUSH, cid, nsid=1) if qid else wire.command(wire.KEEP_ALIVE, cid)
    queue.send(command, bytes(ROOM - wire.CAPSULE), length)
    return f"{queue.said(cid)}, {end(queue)}"


for q in 0, 1:
    for n in 0, 1, 63, 64, 65, 64 + PAGE, 65 + PAGE, ROOM:
        against(f"capsule: {n} bytes on {'an I/O' if q else 'the admin'} queue", q, n)(capsule_of)


@against("capsule: 63 bytes before Connect")
def short_first(ground, peer):
    queue = Host(peer, ground.target).queue(0)
    queue.send(bytes(64), length=63)
    return end(queue)


@against("inline: 64 bytes that say 4,096 follow", known="an earlier command's data are written")
def short_inline(ground, peer):
    _, queue = started(ground, peer)
    whole = (SECRET * 200)[:PAGE]
    # Each of the target's buffers has had it.
    for _ in range(max(64, ground.shared_receives())):
        assert queue.said(queue.write_inline(PLACE, whole)) == "status 0x0"
    ground.expect(PLACE, whole)
    cid = queue.next_cid()
    queue.send(wire.read_write(wire.WRITE, cid, wire.inline(PAGE), PLACE + 8, PAGE // BLOCK))
    said = queue.said(cid)
    written = ground.written(PLACE + 8, PAGE)
    if written == whole:
        raise Defect(f"{said}, and an earlier command's data are on the disk")
    if said == "status 0x0":
        raise Defect("it has written what it was not sent")
    return f"{said}, {end(queue)}"


def inline_entry(ground, peer, length, offset, sent=PAGE, opcode=wire.WRITE):
    _, queue = started(ground, peer)
    cid = queue.next_cid()
    blocks = min(max(length // BLOCK, 1), 65536)
    queue.send(wire.read_write(opcode, cid, wire.inline(length, offset), PLACE, blocks), bytes(sent))
    return f"{queue.said(cid)}, {end(queue)}"


for n, o in ((BLOCK, -1), (BLOCK, -BLOCK), (PAGE, 1), (PAGE, PAGE), (BLOCK, PAGE), (PAGE + 1, 0),
             ((1 << 32) - 1, 0), ((1 << 32) - 1, 1), ((1 << 32) - BLOCK, BLOCK), (0, PAGE), (0, -1)):
    against(f"inline: {n} bytes at {o if o >= 0 else f'2^64 - {-o}'}", n, o)(inline_entry)
against("inline: a READ", BLOCK, 0, BLOCK, wire.READ)(inline_entry)


@against("inline: an offset into what was sent")
def inline_offset(ground, peer):
    _, queue = started(ground, peer)
    data, cid = (SECRET * 40)[:2 * BLOCK], queue.next_cid()
    queue.send(wire.read_write(wire.WRITE, cid, wire.inline(BLOCK, BLOCK), PLACE, 1), data)
    said = queue.said(cid)
    if said == "status 0x0":
        ground.expect(PLACE, data[BLOCK:])
    return said


# Keyed entries.

def keyed_length(ground, peer, opcode, length, blocks, good):
    """An entry of another length than the command's, and a key that is right, or nobody's."""
    _, queue = started(ground, peer)
    data = peer.buffer(1 << 14)
    key = data.register() if good else 0x5eed5e
    cid = queue.next_cid()
    queue.send(wire.read_write(opcode, cid, wire.keyed(data.addr, length, key), PLACE, blocks))
    said = f"{queue.said(cid, 10000)}, {end(queue)}"
    if not data.holds(0xc5):
        raise Defect(f"{said}, and the host's memory has changed")
    return said


for n, b in ((BLOCK, 2), (2 * BLOCK, 1), (1, 1), (BLOCK - 1, 1)):
    for op, w in ((wire.READ, "READ"), (wire.WRITE, "WRITE")):
        against(f"keyed: {n} bytes for a {w} of {b * BLOCK}", op, n, b, True)(keyed_length)
for op, w in ((wire.READ, "READ"), (wire.WRITE, "WRITE")):
    for n in ((1 << 20) + BLOCK, (1 << 24) - 1, (1 << 24) - BLOCK):
        against(f"keyed: a {w} of {n} bytes and a key of nobody", op, n, min(n // BLOCK, 65536), False)(keyed_length)


@against("keyed: 31 WRITEs of 2^24 - 1 bytes at once", known="memory for what is larger than MDTS", size=1 << 25)
def much(ground, peer):
    _, queue = started(ground, peer)
    data = peer.buffer((1 << 24) - 1)
    key, before, least = data.register(), ground.free(), 1 << 60
    cids = [queue.write(PLACE, data, key) for _ in range(31)]
    until = time.monotonic() + 20
    while time.monotonic() < until and not queue.closed and not all(c in queue.replies for c in cids):
        least = min(least, ground.free())
        queue.poll(5)
    statuses = sorted({queue.replies[c].status for c in cids if c in queue.replies})
    held = before - least
    said = f"{len(queue.replies)} replies, statuses {[hex(s) for s in statuses]}, {queue.closed or 'connection stays'}"
    if held > 1 << 27:
        raise Defect(f"it has taken {held >> 20} MiB; {said}")
    return said


@against("keyed: 127 READs of 1 MiB at once, and room for one", known="memory for commands that wait", size=1 << 25)
def waiting(ground, peer):
    """With an hrqsize of 1 the send queue has places for one such transfer."""
    host = Host(peer, ground.target)
    host.start()
    queue = host.io(depth=128, private=wire.request(1, depth=128, hrqsize=1))
    data, cids, most = peer.buffer(1 << 20), [], 127
    key, before, least = data.register(), ground.free(), 1 << 60
    until = time.monotonic() + 60
    while time.monotonic() < until and not queue.closed and len(queue.replies) < most:
        if len(cids) < most:
            cids.append(queue.read(PLACE, data, key))
        least = min(least, ground.free())
        queue.poll(0 if len(cids) < most else 5)
    statuses = sorted({queue.replies[c].status for c in cids if c in queue.replies})
    held = before - least
    said = f"{len(queue.replies)} replies, statuses {[hex(s) for s in statuses]}, {queue.closed or 'connection stays'}"
    if held > 1 << 26:
        raise Defect(f"it has taken {held >> 20} MiB; {said}")
    return said


@against("keyed: a transfer larger than its send queue", known="a queue that is never released", size=1 << 25)
def never_fits(ground, peer):
    host = Host(peer, ground.target)
    host.start()
    queue = host.io(private=wire.request(1, hrqsize=1))
    data = peer.buffer((1 << 24) - BLOCK)
    cid = queue.write(PLACE, data, data.register())
    return queue.said(cid, 15000)


@against("keyed: each type of an entry that is not known")
def types(ground, peer):
    _, queue = started(ground, peer)
    said = {}
    data = peer.buffer(BLOCK)
    key = data.register()
    for kind in range(256):
        if kind in (wire.INLINE, wire.KEYED, wire.KEYED_INVALIDATE):
            continue
        for opcode in wire.READ, wire.WRITE:
            cid = queue.next_cid()
            entry = wire.keyed(data.addr, BLOCK, key)[:15] + bytes([kind])
            queue.send(wire.read_write(opcode, cid, entry, PLACE, 1))
            count(said, queue.said(cid))
    if not data.holds(0xc5):
        raise Defect("the host's memory has changed")
    return counted(said)


def bad_key(ground, peer, opcode, what):
    """An entry whose key does not give what the command takes."""
    _, queue = started(ground, peer)
    data, at, other = peer.buffer(PAGE), 0, None
    if what == "dead":
        key = data.register()
        peer.tell("dereg", key)
    elif what == "foreign":
        # That of another process, on another PD.
        other = Peer(1 << 20)
        other.connect(ground.target.addr, ground.target.trsvcid, wire.request(0))
        key = other.buffer(PAGE).register()
    elif what == "one-sided":
        key = data.register("r" if opcode == wire.READ else "w")
    elif what == "short":
        key, at = data.register(), BLOCK
    elif what == "before":
        key, at = data.register(), -BLOCK
    else:
        key = 0
    queue.read(PLACE, data, key, at=at) if opcode == wire.READ else queue.write(PLACE, data, key, at=at)
    said = f"{queue.said(queue.cid)}, {end(queue)}"
    if other:
        other.close()
    if what != "short" and not data.holds(0xc5):
        raise Defect(f"{said}, and the host's memory has changed")
    return said


for op, w in ((wire.READ, "READ"), (wire.WRITE, "WRITE")):
    for k in "zero", "dead", "foreign", "one-sided", "short", "before":
        against(f"key of a {w}: {k}", op, k)(bad_key)


@against("key: it ends while the target reads")
def key_ends(ground, peer):
    _, queue = started(ground, peer)
    data = peer.buffer(1 << 20)
    key = data.register()
    for i in range(8):
        queue.write(PLACE, data, key, 1 << 20)
    peer.tell("dereg", key)
    ground.spoil(PLACE, 1 << 20)
    return end(queue, 10000)


@against("key: one to invalidate that is nobody's")
def invalidate(ground, peer):
    _, queue = started(ground, peer)
    cid = queue.next_cid()
    queue.send(wire.read_write(wire.READ, cid, wire.keyed(0, 0, 0x5eed5e, wire.KEYED_INVALIDATE), PLACE, 1))
    return f"{queue.said(cid)}, {end(queue)}"


@against("key: one to invalidate, of a region")
def invalidated(ground, peer):
    _, queue = started(ground, peer)
    data = peer.buffer(BLOCK)
    key = data.register()
    said = queue.said(queue.read(PLACE, data, key, kind=wire.KEYED_INVALIDATE))
    again = queue.said(queue.read(PLACE, data, key, kind=wire.KEYED_INVALIDATE))
    return f"{said}, again: {again}"


# What is no SEND, and commands that nobody has asked for.

def other_request(ground, peer, how, *words):
    """A request of another kind on a queue that is connected."""
    _, queue = started(ground, peer)
    cid = queue.next_cid()
    words = ("0x1000", words[1]) if words and words[0] == "addr" else words
    length = 0 if how == "writeimm" and words[-1] == 0 else 64
    queue.send(wire.command(wire.FLUSH, cid, nsid=1), b"", length, how, *words)
    return f"{queue.said(cid)}, {end(queue)}"


against("RDMA WRITE with immediate data of no bytes", "writeimm", 0, 0)(other_request)
against("RDMA WRITE with immediate data and a key of nobody", "writeimm", 0x1000, 0x5eed5e)(other_request)
against("RDMA WRITE and a key of nobody", "write", 0x1000, 0x5eed5e)(other_request)
against("RDMA READ and a key of nobody", "read", 0x1000, 0x5eed5e)(other_request)
against("SEND with immediate data", "sendimm")(other_request)
against("SEND that invalidates a key of nobody", "sendinv", 0x5eed5e)(other_request)


@against("commands: more than the queue has")
def many(ground, peer):
    host = Host(peer, ground.target)
    host.start()
    queue = host.io(depth=8, receives=120)
    for _ in range(100):
        queue.send(wire.command(wire.FLUSH, queue.next_cid(), nsid=1))
    while len(queue.replies) < 100 and not queue.poll(MOMENT):
        pass
    return f"{len(queue.replies)} replies, {queue.closed or 'connection stays'}"


@against("commands: AENs without end")
def many_aens(ground, peer):
    host = Host(peer, ground.target)
    admin = host.start()
    for _ in range(64):
        admin.send(wire.command(wire.ASYNC_EVENT, admin.next_cid()))
    while not admin.poll(2000):
        pass
    statuses = {f"{r.status:#x}" for r in admin.replies.values()}
    return f"{len(admin.replies)} replies of {sorted(statuses)}, {end(admin)}"


@against("commands: no receive for their replies")
def no_receives(ground, peer):
    host = Host(peer, ground.target)
    admin = host.start()
    queue = Queue(host, 1, receives=1)
    queue.established()
    queue.connect(host.cntlid)
    # The receive that was posted again is taken.
    for _ in range(24):
        queue.send(wire.command(wire.FLUSH, queue.next_cid(), nsid=1))
    time.sleep(2)
    return f"admin queue: {came(admin.call, wire.command(wire.KEEP_ALIVE, admin.next_cid()))}"


@against("commands: the same id")
def same_id(ground, peer):
    _, queue = started(ground, peer)
    for _ in range(16):
        queue.send(wire.command(wire.FLUSH, 7, nsid=1))
    replies = 0
    while replies < 16 and not queue.poll(MOMENT):
        replies += 1 if queue.replies.pop(7, None) else 0
    return f"{replies} replies"


@against("commands: fused, and other flags")
def flags(ground, peer):
    host, queue = started(ground, peer)
    said = {}
    for flag in 0x00, 0x01, 0x02, 0x03, 0x41, 0x42, 0x43, 0x80, 0xc0:
        for q in host.admin, queue:
            cid = q.next_cid()
            q.send(wire.command(wire.FLUSH, cid, nsid=1, flags=flag))
            count(said, q.said(cid))
    return counted(said)


@against("commands: each opcode")
def opcodes(ground, peer):
    host, queue = started(ground, peer)
    said = {}
    for q in host.admin, queue:
        for opcode in range(256):
            cid = q.next_cid()
            # To no namespace, and none that the admin queue would not answer.
            q.send(wire.command(opcode, cid, nsid=0xfffffff0))
            count(said, q.said(cid, 300))
            if q.closed:
                break
    return counted(said)


@against("commands: random bytes")
def random_bytes(ground, peer):
    said = {}
    for seed in range(6):
        host, queue = started(ground, peer)
        some = random.Random(seed)
        for _ in range(60):
            q = some.choice((host.admin, queue))
            cid = q.next_cid()
            raw = bytearray(some.randbytes(64))
            raw[2:4] = cid.to_bytes(2, "little")
            if some.random() < 0.8:
                raw[1] = wire.METABUF
            if some.random() < 0.8:
                raw[39] = some.choice((wire.INLINE, wire.KEYED, wire.KEYED_INVALIDATE)) if q is queue else wire.KEYED
            if some.random() < 0.5:
                raw[4:8] = (1).to_bytes(4, "little")
            q.send(raw, b"", some.choice((64, 64, 64, 512)) if q is queue else 64)
            count(said, q.said(cid, 200))
            if q.closed:
                break
        ground.spoil(0, 1 << 22)
        peer.tell("destroy", queue.number)
        peer.tell("destroy", host.admin.number)
        peer.reset()
    return f"{sum(said.values())} capsules"


# Ends.

def ends_while(ground, peer, opcode, how):
    """The connection ends while so much data are under way."""
    host, queue = started(ground, peer)
    data = peer.buffer(1 << 20)
    key = data.register()
    for _ in range(16):
        queue.read(0, data, key) if opcode == wire.READ else queue.write(PLACE, data, key)
    ground.spoil(PLACE, 1 << 20)
    if how == "vanishes":
        peer.close()
        return "gone"
    if how == "ends the admin queue":
        peer.tell("disconnect", host.admin.number)
        return end(queue, 10000)
    peer.tell(how.split()[0].removesuffix("s") if how != "destroys" else "destroy", queue.number)
    return "gone"


for op, w in ((wire.READ, "READs"), (wire.WRITE, "WRITEs")):
    for h in "disconnects", "destroys", "vanishes", "ends the admin queue":
        against(f"end: it {h} during {w}", op, h)(ends_while)


@against("end: it vanishes after each step")
def steps(ground, _peer):
    for step in range(5):
        with Peer() as peer:
            host = Host(peer, ground.target)
            if step == 0:
                peer.connect(ground.target.addr, ground.target.trsvcid, wire.request(0))
            elif step == 1:
                host.queue(0)
            elif step == 2:
                host.queue(0).connect()
            elif step == 3:
                host.start()
                host.queue(1)
            else:
                started(ground, peer)
    return "gone"


@against("end: it says nothing, and its keep-alive time is a second")
def keep_alive(ground, peer):
    host = Host(peer, ground.target)
    admin = host.start(kato=1000)
    queue = host.io()
    return f"admin queue: {end(admin, 20000)}, I/O queue: {end(queue, 5000)}"


@against("end: it goes on after the controller is shut down")
def after_shutdown(ground, peer):
    host, queue = started(ground, peer)
    said = came(host.admin.call, wire.prop(wire.PROPERTY_SET, 9, wire.CC, 0x464001))
    again = queue.said(queue.write_inline(PLACE, bytes(BLOCK)))
    ground.spoil(PLACE, BLOCK)
    off = came(host.admin.call, wire.prop(wire.PROPERTY_SET, 10, wire.CC, 0x460000))
    return f"{said}, then: {again}, {off}, {queue.said(queue.write_inline(PLACE, bytes(BLOCK)))}"


def ends_while_written(ground, peer, how):
    """The connection ends while data that have come with commands are written to a slow disk."""
    with nvme.Null(irqmode=2, completion_nsec=2 * 10**9) as null, nvme.Target(null) as target:
        host = Host(peer, target)
        host.start()
        queue = host.io()
        for block in range(8):
            queue.write_inline(block, bytes(BLOCK))
        if how == "vanishes":
            peer.close()
        else:
            peer.tell("disconnect", queue.number)
            peer.tell("disconnect", host.admin.number)
        # The commands have come, and have not ended.
        ground.serve()
    return "gone"


for h in "disconnects", "vanishes":
    against(f"end: it {h} while inline data are written", h)(ends_while_written)


# Hosts that lie beside one in good order.

@contextmanager
def honest(ground):
    """Has a host in good order write, and read what it has written, until the end, and once after it."""
    over, failed, rounds = threading.Event(), [], []

    def once(queue, data, key):
        content, inline = random.randbytes(ROOM), random.randbytes(PAGE)
        data.put(content)
        Host.ok(queue.wait(queue.write(64, data, key)))
        Host.ok(queue.wait(queue.write_inline(96, inline)))
        ground.expect(64, content)
        ground.expect(96, inline)
        for block, right in (64, content), (96, inline):
            data.fill(0)
            Host.ok(queue.wait(queue.read(block, data, key, len(right))))
            assert data.get() == right + bytes(ROOM - len(right)), "a host has read other data"

    def work():
        try:
            with Peer() as peer:
                host = Host(peer, ground.target)
                host.start()
                queue, data, is_last = host.io(), peer.buffer(ROOM), False
                key = data.register()
                while not is_last:
                    is_last = over.is_set()
                    once(queue, data, key)
                    rounds.append(is_last)
        except Exception as e:      # pylint: disable=broad-except
            failed.append(e)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while not (rounds or failed):
        time.sleep(0.01)
    try:
        yield
    finally:
        over.set()
        thread.join()
    if failed:
        raise Defect(f"a host in good order, after {len(rounds)} rounds: {failed[0]}")


def beside(ground, peer, lies):
    with honest(ground):
        return lies(ground, peer)


@contextmanager
def sharing(ground):
    """Has all connections of the target share their receives."""
    ground.target.disable()
    with nvme.target_with(ground.end, use_srq=1):
        ground.target.enable()
        try:
            yield
        finally:
            ground.target.disable()
    ground.target.enable()


def beside_sharing(ground, peer, lies):
    with sharing(ground), honest(ground):
        return lies(ground, peer)


for k, f, c in (("keys that are zero", lambda *of: bad_key(*of, wire.READ, "zero"), ""),
                ("keys of nobody", lambda *of: bad_key(*of, wire.WRITE, "foreign"), ""),
                ("64 bytes that say 4,096 follow", short_inline, "an earlier command's data are written"),
                ("more commands than the queue has", many, ""),
                ("31 WRITEs of 2^24 - 1 bytes at once", much, "memory for what is larger than MDTS"),
                ("no receive for replies", no_receives, ""),
                ("an end during READs", lambda *of: ends_while(*of, wire.READ, "vanishes"), ""),
                ("an end during WRITEs", lambda *of: ends_while(*of, wire.WRITE, "destroys"), "")):
    against(f"beside a host in good order: {k}", f, size=1 << 25, known=c)(beside)
    against(f"with shared receives, beside a host in good order: {k}", f, size=1 << 25, known=c)(beside_sharing)
