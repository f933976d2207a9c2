# SPDX-License-Identifier: GPL-2.0
"""A host of NVMe over RDMA in userspace: right by itself, wrong where a case wants it to be."""

import nvme_wire as wire
from case import STOCK
from peer import RECEIVE, SUCCESS, PeerError

NQN = "nqn.2014-08.org.nvmexpress:uuid:5eed5eed-0000-4000-8000-{:012x}"
BLOCK = 512
ROOM = 8192
# How long one waits for what is to come, and for what may not come, in ms. Emulated machines are slow.
PATIENCE, MOMENT = (30000, 10000) if STOCK else (10000, 3000)


class Refused(Exception):
    """The target has refused a connection or a command."""


class Queue:
    """A queue of a controller: a connection, receives for completions, and buffers for capsules."""

    def __init__(self, host, qid, private=None, depth=32, receives=None, **how):
        self.host, self.peer, self.qid, self.depth = host, host.peer, qid, depth
        self.cid, self.replies, self.closed = 0x100 * qid, {}, ""
        private = wire.request(qid, depth) if private is None else private
        self.number = self.peer.connect(host.target.addr, host.target.trsvcid, private, **how)
        self.answers = {}
        for _ in range(depth if receives is None else receives):
            buffer = self.peer.buffer(wire.COMPLETION)
            self.answers[buffer.place] = buffer
            self.receive(buffer)
        # What SENDs have that have not completed, by its place, and what none has.
        self.sending, self.idle = {}, []

    def receive(self, buffer):
        self.peer.tell("recv", self.number, buffer.place, buffer.length)

    def established(self):
        """Waits for the target's answer to the request for the connection."""
        event = self.peer.event(self.number, PATIENCE)
        if event.name == "none":
            raise Refused("no answer")
        if event.name != "ESTABLISHED":
            raise Refused(f"{event.name.lower()} {event.status}"
                          + (f", status {int.from_bytes(event.data[2:4], 'little')}" if any(event.data) else ""))
        return event.data

    def next_cid(self):
        self.cid += 1
        return self.cid & 0xffff

    def send(self, capsule, data=b"", length=None, how="send", *words):
        """Sends a capsule with inline data; of all that only so many bytes, if length says so."""
        buffer = self.idle.pop() if self.idle else self.peer.buffer(ROOM)
        self.sending[buffer.place] = buffer
        whole = bytes(capsule) + bytes(data)
        buffer.put(whole)
        length = len(whole) if length is None else length
        self.peer.tell(how, self.number, buffer.place, length, *words)

    def poll(self, ms):
        """Takes a completion; returns what there was in place of a reply, if anything."""
        done = self.peer.poll(self.number, ms)
        if done is None:
            return "silence"
        if done.status != SUCCESS:
            self.closed = f"completion with status {done.status}"
            return self.closed
        if done.place in self.sending:
            self.idle.append(self.sending.pop(done.place))
        if done.opcode & RECEIVE:
            buffer = self.answers[done.place]
            said = wire.reply(buffer.get(), done.length, done.key)
            self.replies[said.cid] = said
            try:
                self.receive(buffer)
            except PeerError:
                pass
        return ""

    def wait(self, cid, ms=PATIENCE):
        """The reply to a command."""
        while cid not in self.replies:
            problem = self.poll(ms)
            if problem:
                raise Refused(problem)
        return self.replies.pop(cid)

    def call(self, capsule, data=b"", ms=PATIENCE):
        """Sends a command and returns the reply."""
        self.send(capsule, data)
        return self.wait(int.from_bytes(capsule[2:4], "little"), ms)

    def said(self, cid, ms=MOMENT):
        """What comes of a command, in words."""
        try:
            reply = self.wait(cid, ms)
        except Refused as e:
            return str(e)
        return f"status {reply.status:#x}"

    def connect(self, cntlid=0xffff, **how):
        """The Connect command; returns the reply."""
        data = self.peer.buffer(wire.CONNECT_DATA)
        data.put(wire.connect_data(self.host.target.nqn, self.host.nqn, cntlid))
        cid = self.next_cid()
        sgl = wire.keyed(data.addr, wire.CONNECT_DATA, data.register())
        said = self.call(wire.connect(cid, self.qid, self.depth, sgl, **how))
        if said.status:
            raise Refused(f"status {said.status:#x}")
        return said

    def ended(self, ms=MOMENT):
        """Whether the target has ended the connection."""
        return self.peer.event(self.number, ms).name in ("DISCONNECTED", "TIMEWAIT_EXIT")

    def read(self, block, buffer, key, length=None, kind=wire.KEYED, at=0):
        """Sends a READ; returns its id."""
        length = buffer.length if length is None else length
        cid = self.next_cid()
        sgl = wire.keyed(buffer.addr + at, length, key, kind)
        self.send(wire.read_write(wire.READ, cid, sgl, block, length // BLOCK))
        return cid

    def write(self, block, buffer, key, length=None, kind=wire.KEYED, at=0):
        """Sends a WRITE; returns its id."""
        length = buffer.length if length is None else length
        cid = self.next_cid()
        sgl = wire.keyed(buffer.addr + at, length, key, kind)
        self.send(wire.read_write(wire.WRITE, cid, sgl, block, length // BLOCK))
        return cid

    def write_inline(self, block, data):
        cid = self.next_cid()
        self.send(wire.read_write(wire.WRITE, cid, wire.inline(len(data)), block, len(data) // BLOCK), data)
        return cid


class Host:
    """A controller of a target: admin queue, and I/O queues when asked for."""

    numbers = iter(range(1, 1 << 40))

    def __init__(self, peer, target):
        self.peer, self.target = peer, target
        self.nqn = NQN.format(next(Host.numbers))
        self.cntlid = self.admin = None

    def queue(self, qid, **how):
        """A queue that is established, without a Connect command."""
        queue = Queue(self, qid, **how)
        queue.established()
        return queue

    def start(self, kato=0):
        """Has the admin queue, and the controller enabled."""
        self.admin = admin = self.queue(0)
        self.cntlid = admin.connect(kato=kato).result & 0xffff
        self.ok(admin.call(wire.prop(wire.PROPERTY_SET, admin.next_cid(), wire.CC, 0x460001)))
        self.ok(admin.call(wire.command(wire.SET_FEATURES, admin.next_cid(), words=(7, 0x00070007))))
        return admin

    def io(self, qid=1, **how):
        """An I/O queue that is connected."""
        queue = self.queue(qid, **how)
        queue.connect(self.cntlid)
        return queue

    @staticmethod
    def ok(reply):
        if reply.status:
            raise Refused(f"status {reply.status:#x}")
        return reply
