# SPDX-License-Identifier: GPL-2.0
"""Targets of NVMe over RDMA that lie, against a host."""

import errno
import mmap
import os
import random
import struct
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import nvme
import nvme_chap
import nvme_wire as wire
from case import STOCK, sh
from nvme_grounds import TIMEOUT
from nvme_lies import Defect, lie
from nvme_target import BLOCK, Target
from peer import PAGE, Peer

LENGTH = 8192
# The id of the command for asynchronous events: the admin queue has one of 32 (NVME_AQ_BLK_MQ_DEPTH).
AEN = 31


def against(name, *args, **how):
    return lie("host", name, *args, **{"size": 1 << 24, **how})


def word(result):
    """What a user has got of an I/O."""
    return "done" if result == 0 else errno.errorcode[result]


def is_user(queue, command, opcode=wire.READ):
    """Whether it is a user's command, and not one by which the kernel looks for partitions."""
    return queue.qid and command.opcode == opcode and (command.words[2] & 0xffff) + 1 == LENGTH // BLOCK


class Once:
    """Lies about one command: the first of the kind that a user has sent, and serves all others."""

    def __init__(self, target, function, opcode=wire.READ):
        self.target, self.function, self.opcode, self.said = target, function, opcode, ""
        target.lie = self

    def __call__(self, queue, command):
        if not is_user(queue, command, self.opcode):
            return False
        self.target.lie = None
        self.said = self.function(queue, command) or ""
        return True


def lied(ground, peer, function, opcode=wire.READ, **how):
    """Lies about an I/O of a host; returns what was said, what the user got, and how the host is then."""
    target = Target(peer)
    with ground.connected(target, **how) as host:
        once = Once(target, function, opcode)
        got = host.io(opcode)
        return "; ".join(filter(None, (once.said, word(got), host.state())))


def key_of(command):
    return wire.entry(command.sgl)[2]


# Replies.

def right(queue, command, **how):
    """Serves a READ in good order."""
    queue.give(command.sgl, bytes(queue.target.disk[:LENGTH]))
    queue.reply(command.cid, key=key_of(command), **how)


def unscheduled(host):
    """Has a host's disk no scheduler, with which ids count the uses of its own tags. Returns the disk."""
    disk = host.disk()
    _, failed = host.beside(lambda: nvme.write(Path("/sys/block", disk.name, "queue/scheduler"), "none"))
    assert not failed, failed
    return disk


def again(ground, peer, change):
    """Replies to READs, and again to a tag that is idle: of those that were used, that which was not for the longest
    time, as a host may keep those of the last commands until a SEND behind them has completed."""
    target, used = Target(peer), {}

    def note(at, command):
        if at.qid:
            used.pop(command.cid & 0xfff, None)
            used[command.cid & 0xfff] = command.cid
        return False
    with ground.connected(target) as host:
        unscheduled(host)
        target.lie, queue = note, target.queue(1)
        got = {word(host.io(wire.READ)) for _ in range(2 * queue.depth)}
        queue.reply(next(iter(used.values())) + change & 0xffff)
        host.serve(1)
        return f"{', '.join(sorted(got))}, {host.state()}"


# The generation is counted when a request ends, and no state of it is looked at.
against("reply: to an idle tag, of the last generation", 0)(again)
against("reply: to an idle tag, of the next generation", 0x1000, known="refcount underflow")(again)


def twice(ground, peer, change):
    def both(queue, command):
        right(queue, command)
        queue.reply(command.cid + change & 0xffff)
    return lied(ground, peer, both)


against("reply: twice", 0)(twice)
against("reply: twice, of two generations", 0x1000, known="refcount underflow")(twice)


def odd_cid(ground, peer, change):
    return lied(ground, peer, lambda queue, command: queue.reply(command.cid ^ change, key=0))


against("reply: with another generation", 0x3000)(odd_cid)
against("reply: to a tag that no queue has", 0x0800)(odd_cid)


@against("reply: to an AEN's tag, on an I/O queue")
def aen_tag(ground, peer):
    return lied(ground, peer, lambda queue, command: queue.reply(AEN))


def of_length(ground, peer, length):
    def short(queue, command):
        queue.give(command.sgl, bytes(LENGTH))
        queue.reply(command.cid, key=key_of(command), length=length)
    return lied(ground, peer, short)


for n in 0, 8, 15, 17, 64:
    against(f"reply: of {n} bytes", n)(of_length)


def without_data(ground, peer, status):
    return lied(ground, peer, lambda queue, command: queue.reply(command.cid, status=status, key=key_of(command)))


against("reply: to a READ, without its data", 0)(without_data)
against("reply: with each bit of a status", 0x7fff)(without_data)


@against("reply: of RDMA WRITE with immediate data in place of a SEND")
def immediate(ground, peer):
    def write(queue, command):
        addr, _, key, _ = wire.entry(command.sgl)
        queue.reply(command.cid, key=0)
        # With the length of a reply, into the region of the command.
        for _ in range(40):
            peer.tell("writeimm", queue.number, queue.next_data().place, wire.COMPLETION, addr, key)
    return lied(ground, peer, write)


@against("reply: to another queue's command")
def other_queue(ground, peer):
    target = Target(peer)
    # Two of each kind.
    target.nqueues = 0x00010001
    with ground.connected(target, nr_io_queues=2) as host:
        assert {queue.qid for queue in target.queues.values()} == {0, 1, 2}, "the host has other queues"

        def elsewhere(queue, command):
            target.queue(3 - queue.qid).reply(command.cid)
        Once(target, elsewhere)
        return f"{word(host.io(wire.READ))}, {host.state()}"


# SENDs that have found no receive.
REFUSED = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters/send_rnr_err")


def following(cids):
    """The next id of commands one after the other. Their tags repeat: blk-mq has two of a word take turns, and a host
    that signals one SEND in so many has their tags again when that has completed."""
    tags = [cid & 0xfff for cid in cids]
    period = next((n for n in range(1, len(tags) // 2 + 1) if tags[n:] == tags[:-n]), 0)
    assert period, f"the tags are {tags}"
    return [cid for cid in cids if cid & 0xfff == tags[-period]][-1] + 0x1000 & 0xffff


class User(threading.Thread):
    """Reads or writes, and uses the memory for something else as soon as that has ended."""

    def __init__(self, disk, opcode, content):
        super().__init__(daemon=True)
        self.disk, self.moves, self.said = disk, os.preadv if opcode == wire.READ else os.pwritev, ""
        self.content, self.memory = content, mmap.mmap(-1, len(content))
        self.memory[:] = content

    def run(self):
        fd = os.open(self.disk, os.O_RDWR | os.O_DIRECT)
        try:
            self.moves(fd, [self.memory], 0)
            result = 0
        except OSError as e:
            result = e.errno
        finally:
            os.close(fd)
        self.memory[:] = bytes(len(self.content))
        self.said = word(result)


def unseen(ground, peer, opcode, length):
    """Replies to a command that has not come, as there is no receive for it, and lets it come then, and one more. Its
    id follows from those before."""
    target, seen, came = Target(peer), [], []
    # Data of this length come with the command.
    target.identity = {1792: ("I", (wire.CAPSULE + LENGTH) // 16)}
    # blk-mq looks for a tag from where the last one of the CPU was.
    with nvme.one_cpu(), ground.connected(target) as host:
        queue, disk = target.queue(1), unscheduled(host)
        target.lie = lambda at, command: at is queue and seen.append(command.cid)

        def read(count):
            least = len(seen) + count
            while len(seen) < least:
                assert host.io(wire.READ) == 0, "a user has not read"
        # Whatever was sent before, tags repeat after as many commands as the queue has.
        read(3 * queue.depth)
        queue.post = lambda buffer: None
        read(queue.depth)
        cids = seen[queue.depth:]
        assert following(cids[:-1]) == cids[-1], f"the ids are {cids}"
        cid = following(cids)
        user, other = (User(disk, opcode, random.randbytes(length)) for _ in range(2))
        refused = REFUSED.read_text(encoding="ascii")
        user.start()
        host.until(lambda: REFUSED.read_text(encoding="ascii") != refused, "no SEND is refused")
        queue.reply(cid)
        host.serve(1)
        early = user.said
        # It may get what the first one has, if that is free too early.
        other.start()
        host.serve(1)

        def come(at, command):
            if at is not queue:
                return False
            came.append(command.cid)
            return len(came) == 1
        target.lie = come
        rooms = [peer.buffer(wire.CAPSULE + LENGTH) for _ in range(2)]
        queue.buffers.update((room.place, room) for room in rooms)
        del queue.post
        for room in rooms:
            queue.post(room)
        # Each is received into once.
        queue.post = lambda buffer: None
        users = user, other
        host.until(lambda: all(it.said for it in users) and (len(came) == 2 or {it.said for it in users} != {"done"}),
                   "a user waits, or a SEND has not come")
        assert not came or came[0] == cid, f"the id is {came[0]:#x}, and not {cid:#x}"
        said = " and ".join(dict.fromkeys(it.said for it in users))
        for it, room, _ in zip(users, rooms, came):
            if opcode == wire.WRITE and room.get()[wire.CAPSULE:][:length] != it.content:
                raise Defect(f"{said}, and other data than the user's have come")
        del queue.post
        for room in rooms:
            queue.post(room)
        return f"{early or 'waits'}, then {said}, {host.state()}"


for op, w, n in ((wire.READ, "READ", LENGTH), (wire.WRITE, "WRITE with its data", LENGTH),
                 (wire.WRITE, "small WRITE with its data", PAGE)):
    against(f"reply: before the SEND of a {w} is received", op, n)(unseen)


# Keys.

def invalidating(ground, peer, which):
    def other(queue, command):
        addr, length, key, _ = wire.entry(command.sgl)
        queue.give(command.sgl, bytes(queue.target.disk[:length]))
        key = {"none": 0, "nobody's": 0x5eed5e, "next": key + 1, "last": key - 1, "no request's": 0x100}[which]
        queue.reply(command.cid, key=key, how="sendinv")
    return lied(ground, peer, other)


for w in "none", "nobody's", "next", "last":
    against(f"key: a reply invalidates one that is {w}", w)(invalidating)


@against("key: a reply invalidates nothing")
def no_invalidation(ground, peer):
    def plain(queue, command):
        queue.give(command.sgl, bytes(queue.target.disk[:LENGTH]))
        queue.reply(command.cid)
    return lied(ground, peer, plain)


@against("key: a reply invalidates that of a READ that has ended")
def ended(ground, peer):
    target, first = Target(peer), []

    def serve(queue, command):
        right(queue, command)
        first.append(key_of(command))

    def invalidate(queue, command):
        queue.give(command.sgl, bytes(LENGTH))
        queue.reply(command.cid, key=first[0])
    with ground.connected(target) as host:
        got = []
        for function in serve, invalidate:
            Once(target, function)
            got.append(word(host.io(wire.READ)))
        return f"{', '.join(got)}, {host.state()}"


@against("key: a reply invalidates another command's")
def others(ground, peer):
    target, held = Target(peer), []
    with ground.connected(target) as host:
        def hold(queue, command):
            if not is_user(queue, command):
                return False
            held.append(command)
            if len(held) == 2:
                target.lie = None
                queue.reply(held[0].cid, key=key_of(held[1]))
            return True
        target.lie = hold
        got = host.ios(wire.READ, 2)
        return f"{', '.join(map(word, got))}, {host.state()}"


def touched(ground, peer, how, opcode, at, length, when, wrong):
    """Memory of a host is read or written where or when the command does not allow that."""
    def touch(queue, command):
        addr, _, key, _ = wire.entry(command.sgl)
        if when == "after":
            right(queue, command)
            ground.host.serve(0.3)
        status, data = queue.access(how, addr + at, length, key)
        if when == "before":
            if opcode == wire.READ:
                right(queue, command)
            else:
                queue.reply(command.cid, key=key)
        if status == 0 and wrong:
            ground.defect = f"{wrong}: {data[:8].hex()}" if data else wrong
        return f"status {status}"
    return lied(ground, peer, touch, opcode)


against("memory: an RDMA WRITE after the reply", "write", wire.READ, 0, LENGTH, "after",
        "it writes memory of a READ that has ended")(touched)
against("memory: an RDMA READ after the reply", "read", wire.READ, 0, LENGTH, "after",
        "it reads memory of a READ that has ended")(touched)
against("memory: an RDMA WRITE past the end", "write", wire.READ, 0, LENGTH + 64, "before",
        "it writes past the end")(touched)
against("memory: an RDMA WRITE before the beginning", "write", wire.READ, -64, LENGTH, "before",
        "it writes before the beginning")(touched)
against("memory: an RDMA READ of what a READ writes", "read", wire.READ, 0, LENGTH, "before",
        "it reads what the user's buffer had", known="regions allow both directions")(touched)
against("memory: an RDMA WRITE of what a WRITE reads", "write", wire.WRITE, 0, LENGTH, "before",
        "it changes what the user writes", known="regions allow both directions")(touched)


@against("memory: by the key of another target's command", known="one PD for all controllers")
def other_target(ground, peer):
    with Peer(1 << 24) as other:
        first, second, status = Target(peer), Target(other), []
        with ground.connected(first) as host, ground.connected(second):
            def cross(queue, command):
                addr, _, key, _ = wire.entry(command.sgl)
                status.append(second.queue(1).access("write", addr, LENGTH, key)[0])
                right(queue, command)
            Once(first, cross)
            got = host.io(wire.READ)
            if status == [0]:
                ground.defect = "another target writes memory of the command"
            return f"status {status[0]}, {word(got)}, {host.state()}"


# Commands that nobody has sent, and none that is answered.

# Changed namespaces are told of: the host asks for that when it is live.
TELLS = {92: ("I", 0x100)}


def event(i):
    """The result of a reply with an event: changed namespaces, and less likely ones."""
    return (0x0002, 0x00040002, 0x01000203, 0xffffffffffffffff)[i % 4]


@against("AENs: 400 that were not asked for")
def events(ground, peer):
    target = Target(peer)
    with ground.connected(target) as host:
        queue = target.queue(0)
        for i in range(400):
            if queue.closed:
                break
            queue.reply(AEN, result=event(i))
            host.serve(0.002)
        host.serve(1)
        return f"{queue.closed or 'connection stays'}; {word(host.io(wire.READ))}; {host.state()}"


@against("AENs: 65,536, each asked for", times=10)
def counted_events(ground, peer):
    target = Target(peer)
    target.identity = TELLS
    with ground.connected(target) as host:
        admin, answer, left = target.queue(0), peer.buffer(wire.COMPLETION), 1 << 16
        # Of a vendor's, nothing follows but that the host asks for one more.
        answer.put(wire.completion(0, result=7))
        while left and not admin.closed:
            host.until(lambda: target.events or admin.closed, "no event is asked for")
            left -= 1
            admin.reply(target.events.pop(), result=7)
            # Quickly, until there is another command: the ids are at 2 in a command, and at 12 in a reply.
            left = int(peer.tell("answer", admin.number, answer.place, answer.length, left, admin.room,
                                 wire.ASYNC_EVENT, 2, 12))
        return f"{admin.closed or 'connection stays'}; {word(host.io(wire.READ))}; {host.state()}"


def is_full():
    """Whether C's host has warned of its send queue in this case."""
    return "nvme_rdma_submit_async_event" in sh("dmesg").stdout.rpartition("rdma-rs test: ")[2]


@against("AENs: 600, and no receive for what they ask for", known="a warning, as the send queue is full")
def events_only(ground, peer):
    target = Target(peer)
    # The host's other commands are not answered either, and are to time out after that.
    with ground.patient(60), ground.connected(target) as host:
        queue = target.queue(0)
        queue.post = lambda buffer: None
        sent, last = 0, time.monotonic()
        # Its work asks for one more event each time that it runs, which is less often on a busy machine. A host that
        # recovers takes no reply.
        while sent < 600 or not (queue.closed or sent > 6000 or is_full()):
            for _ in range(50):
                if len(queue.sending) < 64:
                    queue.reply(AEN, result=event(0))
                    sent, last = sent + 1, time.monotonic()
                host.serve(0.01)
            if time.monotonic() - last > 10:
                break
        peer.tell("disconnect", queue.number)
        return host.state()


@against("silence: a READ")
def silent_read(ground, peer):
    return lied(ground, peer, lambda queue, command: None)


@against("silence: a READ, and a reply when it has timed out")
def late(ground, peer):
    """The user has an error by then, and the host has no connection."""
    target, held = Target(peer), []
    with ground.connected(target, ctrl_loss_tmo=600, fast_io_fail_tmo=1) as host:
        Once(target, lambda queue, command: held.append((queue, command)))
        got = word(host.io(wire.READ))
        right(*held[0])
        host.serve(1)
        target.request = None
        state = host.state()
        return f"{got}; {state}; {word(host.io(wire.READ))}"


def resent(ground, peer, function):
    """A READ is not answered, and sent again on the next connection, where the function lies about both commands."""
    target, commands, said = Target(peer), [], []
    target.disk[:LENGTH] = random.randbytes(LENGTH)
    with ground.connected(target, ctrl_loss_tmo=600) as host:
        target.request = None

        def lie_twice(queue, command):
            if not is_user(queue, command):
                return False
            commands.append(command)
            if len(commands) == 2:
                target.lie = None
                said.append(function(ground, queue, *commands))
            return True
        target.lie = lie_twice
        got = host.io(wire.READ)
        if got == 0 and ground.results[-1][1][PAGE:-PAGE] != target.disk[:LENGTH]:
            said.append("without its data")
        connections = sum(queue.qid == 1 for queue in target.queues.values())
        return "; ".join(filter(None, (*said, word(got), host.state(), f"{connections} connections")))


@against("silence: a READ, and a reply on the next connection")
def last_id(ground, peer):
    def reply(_ground, queue, first, second):
        if first.cid != second.cid:
            queue.reply(first.cid)
            return "another id"
        # It is as good as one to the second.
        right(queue, second)
        return "the same id"
    return resent(ground, peer, reply)


@against("silence: a READ, and the next connection invalidates its key")
def last_key(ground, peer):
    def reply(_ground, queue, first, second):
        assert key_of(first) != key_of(second), "both have one key"
        queue.give(second.sgl, bytes(queue.target.disk[:LENGTH]))
        queue.reply(second.cid, key=key_of(first))
    return resent(ground, peer, reply)


@against("silence: a READ, and the next connection writes by its key")
def last_region(ground, peer):
    def write(ground, queue, first, _second):
        addr, _, key, _ = wire.entry(first.sgl)
        status, _ = queue.access("write", addr, LENGTH, key)
        if status == 0:
            ground.defect = "it writes memory of a READ of the last connection"
        return f"status {status}"
    return resent(ground, peer, write)


@against("silence: the connection ends during a READ")
def ends(ground, peer):
    return lied(ground, peer, lambda queue, command: peer.tell("disconnect", queue.number)[:0])


@against("silence: the peer vanishes during a READ")
def vanishes(ground, peer):
    target = Target(peer)
    with ground.connected(target) as host:
        Once(target, lambda queue, command: peer.close())
        return f"{word(host.io(wire.READ))}, {host.state()}"


@against("silence: a user's command on the admin queue")
def silent_admin(ground, peer):
    target = Target(peer)
    with ground.connected(target, ctrl_loss_tmo=600) as host:
        admin, target.request = target.queue(0), None

        def silent(queue, command):
            if queue.qid or (command.opcode, command.words[0] & 0xff) != (wire.IDENTIFY, 1):
                return False
            target.lie = None
            return True
        target.lie = silent
        _, failed = host.beside(lambda: sh("nvme", "id-ctrl", f"/dev/{host.path().name}"))
        assert not target.lie, "no command has come"
        return f"{'refused' if failed else 'done'}; {connects_again(host, admin)}"


def no_keep_alive(ground, peer, attributes):
    """An idle host that is not told that its target is alive."""
    target, asked = Target(peer), []
    target.identity = {96: ("I", attributes)}
    with ground.connected(target, keep_alive_tmo=2, ctrl_loss_tmo=600) as host:
        admin, target.request = target.queue(0), None

        def silent(queue, command):
            if queue is not admin or command.opcode != wire.KEEP_ALIVE:
                return False
            asked.append(command)
            return True
        target.lie = silent
        host.until(lambda: asked, "it does not ask whether the target is alive")
        return connects_again(host, admin)


# By the second, commands count as a keep-alive (TBKAS).
for n, w in (0, ""), (1 << 6, ", and it says that other commands count"):
    against(f"keep-alive: no answer{w}", n)(no_keep_alive)


# Connecting.

# A host's commands do not time out before a user is tired.
PATIENCE = 200
# Until a host gives up a target that never answers its request for a connection.
UNANSWERED = 200


def connecting(ground, peer, prepare):
    """Connects to a target that lies meanwhile; what has come of it."""
    target = Target(peer)
    prepare(target)
    with ground.connected(target, may_fail=True) as host:
        if host.failed:
            return host.failed
        got = word(host.io(wire.READ)) if host.has_disk(2) else "no disk"
        return f"connected, {got}, {host.state()}"


def rejected(length):
    def prepare(target):
        def reject(asked):
            target.peer.tell("reject", asked.connection, (b"\0\0\x06\0" * 37)[:length].hex() or "-")
            return True
        target.request = reject
    return prepare


for n in 0, 1, 2, 4, 148:
    against(f"connect: a rejection with {n} bytes", rejected(n))(connecting)


def fails_queue(qid, fail):
    """Has the connection or the command Connect of one I/O queue of two fail, and not those before it."""
    def prepare(target):
        # Two of each kind.
        target.nqueues = 0x00010001

        def reject(asked):
            if int.from_bytes(asked.data[2:4], "little") != qid:
                return False
            target.peer.tell("reject", asked.connection, (b"\0\0\x06\0" * 37).hex())
            return True

        def refuse(queue, command):
            if queue.qid != qid or kind_of(command) != wire.CONNECT:
                return False
            queue.reply(command.cid, status=wire.DNR | 0x82)
            return True
        if fail == "connection":
            target.request = reject
        else:
            target.lie = refuse
    return prepare


def of_two(ground, peer, prepare):
    target = Target(peer)
    prepare(target)
    with ground.connected(target, may_fail=True, nr_io_queues=2) as host:
        return host.failed or f"connected, {host.state()}"


for n in 1, 2:
    for f in "connection", "command":
        against(f"connect: the {f} of I/O queue {n} of 2 is refused", fails_queue(n, f))(of_two)


@against("connect: I/O queues 1 and 2 are not answered before both have asked for a connection", "connection")
@against("connect: I/O queues 1 and 2 are not answered before both have sent Connect", "command")
def side_by_side(ground, peer, what):
    """A host sets up all I/O queues at the same time. Without that the first one waits until it gives up."""
    target, held = Target(peer), []
    # Two of each kind, of which a host has one: there may be one CPU.
    target.nqueues = 0x00010001

    def ask(asked):
        if asked.data[2:4] == bytes(2):
            return False
        held.append(asked)
        if len(held) == 2:
            target.request = None
            for it in held:
                target.accept(it)
        return True

    def connect(queue, command):
        if not queue.qid or kind_of(command) != wire.CONNECT:
            return False
        held.append((queue, command))
        if len(held) == 2:
            target.lie = None
            for it in held:
                target.serve(*it, b"")
        return True
    if what == "connection":
        target.request = ask
    else:
        target.lie = connect
    with ground.connected(target, may_fail=True, nr_write_queues=1, patience=UNANSWERED) as host:
        return host.failed or f"connected, {host.state()}"


# Access to namespaces is asymmetric, and that of their only group changes, for which a host waits twice as long as the
# target reports that it takes, in seconds.
ANATT = 1
CHANGING = {76: ("B", 8), 342: ("B", ANATT), 343: ("B", 0x1f), 344: ("I", 1), 348: ("I", 1), 540: ("I", 1)}
ANA_LOG, ANA_CHANGE = 0x0c, 0x0f


@against("connect: access changes, and the command of I/O queue 1 of 2 is refused",
         known="the timer of a controller that is freed")
def changing(ground, peer):
    def prepare(target):
        fails_queue(1, "command")(target)
        target.identity = CHANGING
        target.logs[ANA_LOG] = struct.pack("<QH6xIIQB15x", 1, 1, 1, 0, 1, ANA_CHANGE)
    said = of_two(ground, peer, prepare)
    # A timer that is left expires.
    time.sleep(2 * ANATT + 1)
    return said


def accepted_with(data):
    def prepare(target):
        told = target.peer.tell

        def tell(*words):
            return told(*(words[:2] + (data.hex() or "-",) + words[3:]) if words[0] == "accept" else words)
        target.peer.tell = tell
    return prepare


for n, d in (("nothing", b""), ("a queue of 0 entries", wire.accepted(0)), ("record format 7", wire.accepted(32, 7))):
    against(f"connect: a reply of {n}", accepted_with(d))(connecting)


def field(name, **fields):
    def prepare(target):
        for key, value in fields.items():
            setattr(target, key, value)
    against(f"connect: {name}", prepare)(connecting)


field("MQES 0", cap=1 << 16 | 20 << 24 | 1 << 37)
field("MQES 1", cap=1 | 1 << 16 | 20 << 24 | 1 << 37)
field("a minimum page of 2^27 bytes", cap=127 | 1 << 16 | 20 << 24 | 1 << 37 | 15 << 48)
field("all bits of CAP", cap=(1 << 64) - 1)
field("65,536 queues", nqueues=0xffffffff)
for n, f in (("ioccsz 0", {1792: ("I", 0)}), ("ioccsz 4", {1792: ("I", 4)}),
             ("ioccsz 2^32 - 1", {1792: ("I", 0xffffffff)}),
             ("iorcsz 0", {1796: ("I", 0)}), ("icdoff 1", {1800: ("H", 1)}), ("no keep-alive", {320: ("H", 0)}),
             ("a keep-alive in steps of 6,553.5 s", {320: ("H", 0xffff)}),
             ("maxcmd 0", {514: ("H", 0)}), ("maxcmd 1", {514: ("H", 1)}), ("another controller id", {78: ("H", 7)}),
             ("no scatter lists", {536: ("I", 0)}), ("mdts 255", {77: ("B", 255)}), ("msdbd 0", {1803: ("B", 0)}),
             ("another subsystem", {768: ("256s", b"another")}), ("names without an end", {768: ("256s", b"x" * 256)}),
             ("all bits of Identify", {0: ("4096s", b"\xff" * 4096)})):
    field(n, identity=f)
for n, f in (("a namespace of 2^64 - 1 blocks", {0: ("Q", (1 << 64) - 1)}), ("a namespace of no blocks", {0: ("Q", 0)}),
             ("blocks of 1 byte", {130: ("B", 0)}), ("blocks of 2^255 bytes", {130: ("B", 255)}),
             ("format 15 of none", {26: ("B", 0x0f)}), ("all bits of a namespace", {0: ("4096s", b"\xff" * 4096)})):
    field(n, namespace=f)


# One format, of 512 bytes and eight more behind them, the only place that fabrics have: protection information of type
# 1.
PROTECTED = {26: ("I", 0x01_01_01_10), 128: ("H", 8)}
PRACT = 1 << 29


@against("a namespace with protection information")
def protected(ground, peer):
    """No device here has an offload of it: the target is to make and check it, and gets none."""
    target, bare = Target(peer), []
    target.namespace = PROTECTED

    def look(queue, command):
        if queue.qid and command.opcode in (wire.READ, wire.WRITE) and not command.words[2] & PRACT:
            bare.append(command)
        return False
    target.lie = look
    with ground.connected(target) as host:
        got = [word(host.io(opcode)) for opcode in (wire.READ, wire.WRITE)]
        if bare or got != ["done", "done"]:
            raise Defect(f"{', '.join(got)}, {len(bare)} commands without PRACT")
        return f"{', '.join(got)}, {host.state()}"


def ends_after(ground, peer, commands):
    def prepare(target):
        def stop(queue, _command):
            if target.steps == commands:
                peer.tell("disconnect", queue.number)
            return target.steps >= commands
        target.lie = stop
    return connecting(ground, peer, prepare)


# A host sends some twelve commands until it has a disk.
for n in range(1, 13):
    against(f"connect: it ends at command {n}", n)(ends_after)


def ends_accepted(ground, peer, qid, how):
    """The target lets a queue connect, and ends that before a command has come. If it disconnects before its connection
    manager knows that the connection is established, a host hears nothing: it is not to be patient then."""
    def prepare(target):
        def end(asked):
            if int.from_bytes(asked.data[2:4], "little") != qid:
                return False
            peer.tell("accept", asked.connection, wire.accepted(target.io_depth).hex(), 512)
            peer.tell(how, asked.connection)
            return True
        target.request = end
    with ground.patient(PATIENCE if how == "destroy" else TIMEOUT, "io_timeout"):
        return connecting(ground, peer, prepare)


for n, w in (0, "admin"), (1, "I/O"):
    for m, c in ("disconnect", ""), ("destroy", "in that state no error recovery begins"):
        against(f"connect: the {w} queue is {m}ed as soon as it is accepted", n, m, known=c)(ends_accepted)


@against("connect: silence to the request for a connection, and it vanishes")
def silent_request(ground, peer):
    def prepare(target):
        def vanish(_asked):
            time.sleep(2)
            peer.close()
            return True
        target.request = vanish
    return connecting(ground, peer, prepare)


@against("connect: silence to the request for a connection", times=3,
         known="it waits as long as the connection manager")
def unanswered(ground, peer):
    target = Target(peer)
    target.request = lambda asked: True
    with ground.connected(target, may_fail=True, patience=UNANSWERED) as host:
        return host.failed or "connected"


@against("connect: silence from the first command on")
def silent_connect(ground, peer):
    return connecting(ground, peer, lambda target: setattr(target, "lie", lambda queue, command: True))


@against("connect: each command fails")
def failing(ground, peer):
    def prepare(target):
        target.lie = lambda queue, command: queue.reply(command.cid, status=wire.DNR | 6) or True
    return connecting(ground, peer, prepare)


# Connections that end while a host waits for something else.
EVENTS = 11


def hang_up(ground, queue):
    """Ends a connection, and has the host hear of it."""
    queue.peer.tell("disconnect", queue.number)
    time.sleep(1)


def state_now(host):
    return (host.path() / "state").read_text(encoding="ascii").strip()


def kind_of(command):
    return command.nsid & 0xff if command.opcode == wire.FABRICS else None


def sets_cc(_queue, command):
    return kind_of(command) == wire.PROPERTY_SET and command.words[1] == wire.CC


def gets_csts(_queue, command):
    return kind_of(command) == wire.PROPERTY_GET and command.words[1] == wire.CSTS


@against("hang up: the admin queue, before the reply to Connect of the last I/O queue")
def before_last(ground, peer):
    def prepare(target):
        def end(queue, command):
            if queue.qid and kind_of(command) == wire.CONNECT:
                hang_up(ground, target.queue(0))
            return False
        target.identity, target.lie = TELLS, end
    with ground.patient(PATIENCE):
        return connecting(ground, peer, prepare)


@against("hang up: at Set Features of a host that is live")
def at_features(ground, peer):
    def prepare(target):
        def end(queue, command):
            if queue.qid or command.opcode != wire.SET_FEATURES or command.words[0] & 0xff != EVENTS:
                return False
            target.lie = None
            hang_up(ground, queue)
            return True
        target.identity, target.lie = TELLS, end
    with ground.patient(PATIENCE):
        return connecting(ground, peer, prepare)


@against("hang up: while a host that is reset waits for CSTS", known="in that state no error recovery begins")
def in_reset(ground, peer):
    target = Target(peer)
    with ground.patient(PATIENCE), ground.connected(target) as host:
        def end(queue, command):
            if not gets_csts(queue, command) or target.cc & 1:
                return False
            # It is still ready: the host asks again.
            queue.reply(command.cid, 1)
            hang_up(ground, queue)
            return True
        target.lie = end
        _, failed = host.beside(lambda: nvme.write(host.path() / "reset_controller", 1))
        return f"{failed or 'reset'}; {host.state()}"


@against("deletion: in a reset, in which a scan of namespaces goes on",
         known="the scan's next command waits for a queue that stays quiesced")
def deleted_in_reset(ground, peer):
    target, held, deleting = Target(peer), [], []
    with ground.patient(PATIENCE), ground.connected(target) as host:
        path = host.path()

        def lie_to_scan(queue, command):
            if queue.qid:
                return False
            if command.opcode == wire.IDENTIFY and not held:
                held.append(command)
                return True
            if sets_cc(queue, command):
                target.lie = None
                # From here on the host does not send the commands of the scan.
                target.serve(queue, held[0], b"")
                # A process of its own, which may never end.
                deleting.append(subprocess.Popen(["sh", "-c", f"echo 1 >{path}/delete_controller"]))
                nvme.until(lambda: state_now(host) == "deleting", "it is not being deleted")
                time.sleep(1)
            return False
        target.lie = lie_to_scan
        nvme.write(path / "rescan_controller", 1)
        host.until(lambda: held, "it does not look for namespaces")
        _, failed = host.beside(lambda: nvme.write(path / "reset_controller", 1))
        host.beside(deleting[0].wait)
        return f"{'not reset' if failed else 'reset'}; {host.state()}"


# Deletions, in which no error recovery begins: who waits for a command waits until its queue is stopped.

def reads(host):
    user = User(host.disk(), wire.READ, bytes(LENGTH))
    user.start()
    return user


def scans(host):
    nvme.write(host.path() / "rescan_controller", 1)


def is_of_scan(queue, command):
    return queue.qid == 0 and command.opcode == wire.IDENTIFY


def deleting(host):
    """Has a controller deleted by a thread, which may never end, and returns that."""
    path = host.path() / "delete_controller"
    thread = threading.Thread(target=lambda: nvme.write(path, 1), daemon=True)
    thread.start()
    return thread


def is_deleting(host):
    """Waits until a deletion waits for commands."""
    host.until(lambda: state_now(host).startswith("deleting"), "it is not being deleted")
    host.serve(1)


def deleted(ground, peer, is_it, begin, ends):
    """A deletion waits for a command from before it, or sends one, which is not answered, or whose queue ends."""
    target, held = Target(peer), []
    with ground.patient(PATIENCE if ends else TIMEOUT, "io_timeout"), ground.connected(target) as host:
        def hold(queue, command):
            if held or not is_it(queue, command):
                return False
            held.append(queue)
            if ends and not begin:
                hang_up(ground, queue)
            return True
        target.lie = hold
        user = begin and begin(host)
        host.until(lambda: held or not begin, "no command has come")
        deletion = deleting(host)
        if ends and begin:
            is_deleting(host)
            hang_up(ground, held[0])
        host.beside(deletion.join)
        assert held, "no command has come"
        host.until(lambda: not user or user.said, "a user waits")
        return ", ".join(filter(None, (user and user.said, host.state())))


for w, f, g in (("a READ that it waits for", is_user, reads), ("a scan that it waits for", is_of_scan, scans),
                ("Set CC", sets_cc, None), ("Get CSTS", gets_csts, None)):
    against(f"deletion: silence at {w}", f, g, False)(deleted)
    against(f"deletion: the queue ends at {w}", f, g, True, known="in that state no error recovery begins")(deleted)


@against("deletion: CSTS never tells its end")
def never_shut_down(ground, peer):
    target, asked = Target(peer), []
    with ground.connected(target) as host:
        def shut_down(queue, command):
            if not gets_csts(queue, command):
                return False
            asked.append(command)
            # Ready, and nothing of a shutdown.
            queue.reply(command.cid, 1)
            return True
        target.lie = shut_down
        _, failed = host.beside(lambda: nvme.write(host.path() / "delete_controller", 1))
        assert len(asked) > 1, "it has not asked again"
        return f"{failed or 'deleted'}, {host.state()}"


# Firmware is being activated, which is told of if the host wants it. nvme-core has the controller in the state of a
# reset meanwhile, waits until CSTS no longer has commands wait, and has it live again.
ACTIVATES = {92: ("I", 0x300)}
ACTIVATION = 0x0102


@against("hang up: the I/O queue, while firmware is activated")
def in_activation(ground, peer):
    target = Target(peer)
    target.identity = ACTIVATES
    with ground.patient(PATIENCE), ground.connected(target) as host:
        target.request = None
        admin = target.queue(0)

        def end(queue, command):
            if not gets_csts(queue, command):
                return False
            target.lie = None
            hang_up(ground, target.queue(1))
            return False
        host.until(lambda: target.events, "no event is asked for")
        target.lie = end
        admin.reply(target.events.pop(), ACTIVATION)
        host.until(lambda: not target.lie, "it does not ask for CSTS")
        host.serve(1)
        return f"{word(host.io(wire.READ))}, {host.state()}"


@against("hang up: I/O queue 1 of 2, while a host that connects again waits for a READ of the other")
def between_passes(ground, peer):
    """Such a host sends what has waited when it has connected the queues that blk-mq knows, and blk-mq gets the others
    when that has ended. A queue that ends until then is made again with the others."""
    target, held, connected = Target(peer), [], set()
    # Two of each kind: the first is for writes, and the second for reads.
    target.nqueues = 0x00010001
    with ground.patient(PATIENCE, "io_timeout"), \
         ground.connected(target, ctrl_loss_tmo=600, nr_write_queues=1) as host:
        target.request = None

        def hold(queue, command):
            if kind_of(command) == wire.CONNECT:
                connected.add(queue.qid)
            if is_user(queue, command):
                held.append((queue, command))
            return is_user(queue, command)
        target.lie = hold
        user = reads(host)
        host.until(lambda: held, "no READ has come")
        hang_up(ground, target.queue(0))
        host.until(lambda: len(held) == 2 and connected == {0, 1, 2}, "it does not connect again", BACK)
        # The replies to Connect arrive.
        host.serve(1)
        first = target.queue(1)
        assert held[1][0] is target.queue(2), f"the READ has come by queue {held[1][0].qid}"
        hang_up(ground, first)
        target.lie = None
        right(*held[1])
        host.until(lambda: user.said, "a user waits")
        state = host.state()
        if target.queue(1) is first:
            raise Defect(f"{user.said}; {state} without its first queue")
        said = [user.said, state, word(host.io(wire.WRITE)), host.state()]
        admins = sum(queue.qid == 0 for queue in target.queues.values())
        return f"{'; '.join(said)}; connected {admins} times"


@against("hang up: at a reset of the subsystem", known="nvmf_subsystem_reset() leaves it in resetting")
def at_subsystem_reset(ground, peer):
    target = Target(peer)
    target.cap |= wire.CAP_NSSRS
    with ground.connected(target) as host:
        target.request = None

        def end(queue, command):
            if kind_of(command) != wire.PROPERTY_SET or command.words[1] != wire.NSSR:
                return False
            target.lie = None
            hang_up(ground, queue)
            return True
        target.lie = end
        _, failed = host.beside(lambda: sh("nvme", "subsystem-reset", f"/dev/{host.path().name}"), 150)
        said, state = "refused" if failed else "reset", host.state()
        if state != "live":
            raise Defect(f"{said}; {state}")
        return f"{said}; {word(host.io(wire.READ))}, {host.state()}"


@against("hang up: I/O of a disk with one path fails fast while no attempt to connect is successful")
def one_path(ground, peer):
    target = Target(peer)
    with ground.connected(target, ctrl_loss_tmo=600, fast_io_fail_tmo=1) as host:
        for queue in list(target.queues.values()):
            peer.tell("disconnect", queue.number)
        # Some attempts have failed.
        host.serve(6)
        return f"{word(host.io(wire.READ))}, {host.state()}"


# Authentication, of the host and of the target, on each queue.

# In how many seconds a host is to have connected again.
BACK = 100 if STOCK else 45


def with_secrets(peer):
    """A target that authenticates, and the options of a host that it lets in."""
    secrets = nvme_chap.secret(), nvme_chap.secret()
    target = Target(peer, keys=tuple(it.key for it in secrets))
    return target, {"dhchap_secret": secrets[0].text, "dhchap_ctrl_secret": secrets[1].text}


def at_stage(target, qid, stage, function):
    """Has a function called with a queue when the command for that message has come, which is not answered."""
    def look(queue, command):
        kind = kind_of(command)
        if queue.qid != qid or kind not in (wire.AUTH_SEND, wire.AUTH_RECEIVE):
            return False
        queue.chap.wrong = stage == "failure2"
        if queue.chap.stage(kind == wire.AUTH_SEND) != stage:
            return False
        target.lie = None
        function(queue)
        return True
    target.lie = look


def authenticate(host):
    """Has a live host authenticate all queues once more."""
    path, options = host.path() / "dhchap_secret", host.controller.options
    _, failed = host.beside(lambda: nvme.write(path, options["dhchap_secret"]))
    assert not failed, failed


def connects_again(host, admin):
    """Serves until a host is live by another admin queue than that."""
    end = time.monotonic() + BACK
    while host.target.queue(0) is admin or state_now(host) != "live":
        if time.monotonic() > end:
            raise Defect(f"{state_now(host)} for more than {BACK} s")
        host.serve(0.05)
    return f"{word(host.io(wire.READ))}, {host.state()}"


@against("authentication: in good order, and again")
def authenticated(ground, peer):
    target, options = with_secrets(peer)
    with ground.connected(target, **options) as host:
        authenticate(host)
        queues = list(target.queues.values())
        host.until(lambda: all(queue.chap.passed == 2 for queue in queues), "it is not authenticated again")
        return f"{word(host.io(wire.READ))}, {host.state()}"


def ends_at(ground, peer, qid, stage):
    """What was sent is sent again, and if it cannot be, so is failure2."""
    target, options = with_secrets(peer)
    at_stage(target, qid, stage, lambda queue: hang_up(ground, queue))
    with ground.patient(PATIENCE, "io_timeout"), ground.connected(target, may_fail=True, **options) as host:
        assert not target.lie, f"it has not come to {stage}"
        return host.failed or f"connected, {host.state()}"


for n, w, f in ((0, "admin", ("challenge", "reply", "success2", "failure2")), (1, "I/O", ("reply", "success2"))):
    for m in f:
        against(f"authentication: the {w} queue ends at {m}", n, m,
                known="in that state no error recovery begins")(ends_at)


WAITS = "{} waits for a command that waits for its end"


def ends_again(ground, peer, qid, function):
    target, options = with_secrets(peer)
    with ground.connected(target, ctrl_loss_tmo=600, **options) as host:
        target.request, admin = None, target.queue(0)
        at_stage(target, qid, "reply", lambda queue: function(ground, queue))
        authenticate(host)
        host.until(lambda: not target.lie, "it does not authenticate again")
        return connects_again(host, admin)


against("authentication again: the admin queue ends at reply", 0, hang_up,
        known=WAITS.format("error recovery"))(ends_again)
against("authentication again: the I/O queue ends at reply", 1, hang_up,
        known=WAITS.format("error recovery"))(ends_again)
against("authentication again: silence at reply", 0, lambda ground, queue: None,
        known=WAITS.format("error recovery"))(ends_again)


@against("authentication again: the admin queue ends at reply, in a reset", known=WAITS.format("the reset"))
def ends_in_reset(ground, peer):
    target, options = with_secrets(peer)
    with ground.connected(target, ctrl_loss_tmo=600, **options) as host:
        target.request, admin = None, target.queue(0)
        at_stage(target, 0, "reply", lambda queue: None)
        authenticate(host)
        host.until(lambda: not target.lie, "it does not authenticate again")

        def reset():
            # Of no interest: the state is.
            with suppress(OSError):
                nvme.write(host.path() / "reset_controller", 1)
        threading.Thread(target=reset, daemon=True).start()
        host.until(lambda: state_now(host) == "resetting", "it is not reset")
        hang_up(ground, admin)
        return connects_again(host, admin)


def ends_in_deletion(ground, peer, qid, function):
    target, options = with_secrets(peer)
    with ground.connected(target, ctrl_loss_tmo=600, **options) as host:
        at_stage(target, qid, "reply", lambda queue: None)
        authenticate(host)
        host.until(lambda: not target.lie, "it does not authenticate again")
        deletion = deleting(host)
        is_deleting(host)
        function(ground, target.queue(qid))
        host.beside(deletion.join)
        return host.state()


for n, w in (0, "admin"), (1, "I/O"):
    against(f"authentication again: the {w} queue ends at reply, in a deletion", n, hang_up)(ends_in_deletion)
against("authentication again: silence at reply, in a deletion", 0, lambda ground, queue: None)(ends_in_deletion)
