# SPDX-License-Identifier: GPL-2.0
"""A target of NVMe over RDMA in userspace: right by itself, wrong where a case wants it to be."""

import struct
import uuid

import nvme_wire as wire
from nvme_chap import Chap
from peer import READ, RECEIVE, SUCCESS, WRITE, PeerError
from rping import ADDR, ports

BLOCK, BLOCKS = 512, 4096
CNTLID = 1
INVALID_FIELD = wire.DNR | 2
LARGEST = 1 << 17


class Queue:
    """A queue: a connection, and what its commands are received into."""

    def __init__(self, target, number, qid, depth):
        self.target, self.peer, self.number, self.qid, self.depth = target, target.peer, number, qid, depth
        self.buffers, self.room = {}, wire.CAPSULE + 4096
        for _ in range(depth):
            buffer = self.peer.buffer(self.room)
            self.buffers[buffer.place] = buffer
        # What SENDs have that have not completed, by its place, and what none has.
        self.sending, self.idle = {}, []
        self.data = [self.peer.buffer(LARGEST) for _ in range(4)]
        self.closed, self.pending, self.chap = "", [], None

    def post(self, buffer):
        try:
            self.peer.tell("recv", self.number, buffer.place, buffer.length)
        except PeerError:
            self.closed = "closed"

    def reply(self, cid, result=0, status=0, key=0, length=wire.COMPLETION, how=""):
        """Sends a completion, which invalidates a key, if there is one."""
        buffer = self.idle.pop() if self.idle else self.peer.buffer(64)
        self.sending[buffer.place] = buffer
        buffer.put(wire.completion(cid, result, status, self.qid).ljust(length, b"\0"))
        words = ("sendinv", key) if key else ("send", "")
        self.peer.tell(how or words[0], self.number, buffer.place, length, words[1])

    def next_data(self):
        self.data.append(self.data.pop(0))
        return self.data[-1]

    def give(self, sgl, data):
        """Writes data to where a command wants them."""
        addr, length, key, _ = wire.entry(sgl)
        buffer = self.next_data()
        buffer.put(data[:length])
        self.peer.tell("write", self.number, buffer.place, min(len(data), length), addr, key)

    def access(self, how, addr, length, key, data=None):
        """Reads or writes memory of the host; returns the status of that, and what was read."""
        buffer = self.next_data()
        if how == "write":
            buffer.put(b"\xee" * length if data is None else data)
        self.peer.tell(how, self.number, buffer.place, length, addr, key)
        while True:
            done = self.peer.poll(self.number, 5000)
            if done is None:
                return -1, b""
            if done.opcode in (READ, WRITE) or done.status != SUCCESS:
                return done.status, buffer.get(length) if how == "read" else b""
            self.pending.append(done)

    def written(self, command, data, length):
        """So many bytes that a command writes, which have come with it or are read; None if they are not."""
        if command.sgl[15] == wire.INLINE:
            return data[wire.CAPSULE:wire.CAPSULE + length]
        addr, _, key, _ = wire.entry(command.sgl)
        status, data = self.access("read", addr, length, key)
        if status:
            self.closed = f"status {status}"
            return None
        return data


class Target:
    """A subsystem with a namespace, whose content is in `disk`.

    lie: what is called with the queue and the command first; it returns whether it has dealt with it.
    keys: those of the host and of the target, if each queue is to be authenticated."""

    def __init__(self, peer, io_depth=32, keys=()):
        self.peer, self.addr, self.trsvcid, self.nqn = peer, ADDR, str(next(ports)), f"rdma-rs-lies-{next(ports)}"
        self.backings, self.queues, self.io_depth, self.keys = (), {}, io_depth, keys
        self.disk = bytearray(BLOCK * BLOCKS)
        self.cc, self.csts, self.events = 0, 0, []
        self.cap = 127 | 1 << 16 | 20 << 24 | 1 << 37
        self.lie, self.request = None, None
        self.identity, self.namespace, self.nqueues = {}, {}, 0
        # Log pages, by their ids.
        self.logs = {}
        self.uuid = uuid.uuid4().bytes
        self.steps = 0
        peer.listen(self.addr, self.trsvcid)

    def step(self, ms=1):
        """Serves what has come."""
        asked = self.peer.request(0)
        if asked.name == "CONNECT_REQUEST":
            self.accept(asked)
        busy = False
        for queue in list(self.queues.values()):
            while not queue.closed:
                done = queue.pending.pop(0) if queue.pending else self.peer.poll(queue.number, 0)
                if done is None:
                    break
                busy = True
                self.completed(queue, done)
        if not busy and self.queues:
            self.peer.event(next(iter(self.queues)), ms)

    def accept(self, asked):
        if self.request and self.request(asked):
            return
        qid = int.from_bytes(asked.data[2:4], "little")
        depth = min(int.from_bytes(asked.data[6:8], "little") + 1, self.io_depth)
        self.peer.tell("accept", asked.connection, wire.accepted(depth).hex(), 512)
        queue = self.queues[asked.connection] = Queue(self, asked.connection, qid, depth)
        for buffer in queue.buffers.values():
            queue.post(buffer)

    def completed(self, queue, done):
        if done.status != SUCCESS:
            queue.closed = f"status {done.status}"
            return
        if done.place in queue.sending:
            queue.idle.append(queue.sending.pop(done.place))
        if not done.opcode & RECEIVE:
            return
        buffer = queue.buffers[done.place]
        data = buffer.get(done.length)
        queue.post(buffer)
        command = wire.parse(data)
        self.steps += 1
        try:
            if not (self.lie and self.lie(queue, command)):
                self.serve(queue, command, data)
        except PeerError:
            queue.closed = "closed"

    def queue(self, qid):
        """The last queue with that id."""
        return [queue for queue in self.queues.values() if queue.qid == qid][-1]

    def serve(self, queue, command, data):
        """Does what a command asks for, and replies."""
        key = wire.entry(command.sgl)[2] if command.sgl[15] == wire.KEYED_INVALIDATE else 0
        if command.opcode == wire.FABRICS:
            result, status = self.fabrics(queue, command, data)
        elif queue.qid == 0:
            if command.opcode == wire.ASYNC_EVENT:
                self.events.append(command.cid)
                return
            result, status = self.admin(queue, command)
        else:
            result, status = self.io(queue, command, data)
        if result is not None:
            queue.reply(command.cid, result, status, key)

    def fabrics(self, queue, command, data):
        kind, offset = command.nsid & 0xff, command.words[1]
        if self.keys and kind in (wire.CONNECT, wire.AUTH_SEND, wire.AUTH_RECEIVE):
            return self.authentication(queue, command, data)
        if kind == wire.CONNECT:
            return CNTLID, 0
        if kind == wire.PROPERTY_SET:
            if offset == wire.CC:
                self.cc = command.words[2]
                self.csts = (self.cc & 1) | (2 << 2 if self.cc >> 14 & 3 else 0)
            return 0, 0
        registers = {wire.CAP: self.cap, wire.VS: 0x10300, wire.CC: self.cc, wire.CSTS: self.csts}
        return registers.get(offset, 0), 0

    def authentication(self, queue, command, data):
        kind = command.nsid & 0xff
        if kind == wire.AUTH_RECEIVE:
            queue.give(command.sgl, queue.chap.say())
            return 0, 0
        data = queue.written(command, data, wire.entry(command.sgl)[1])
        if data is None:
            return None, 0
        if kind == wire.AUTH_SEND:
            queue.chap.hear(data)
            return 0, 0
        queue.chap = Chap(self.keys, *wire.names(data))
        return CNTLID | wire.AUTHREQ, 0

    def admin(self, queue, command):
        if command.opcode == wire.IDENTIFY:
            page = self.identified(command.words[0] & 0xff, command.nsid)
            if page is None:
                return 0, INVALID_FIELD
            queue.give(command.sgl, page)
            return 0, 0
        if command.opcode == wire.GET_LOG and (page := self.logs.get(command.words[0] & 0xff)):
            queue.give(command.sgl, page)
            return 0, 0
        if command.opcode == wire.SET_FEATURES:
            return self.nqueues if command.words[0] & 0xff == 7 else 0, 0
        if command.opcode == wire.KEEP_ALIVE:
            return 0, 0
        return 0, INVALID_FIELD

    def identified(self, cns, nsid):
        page = bytearray(4096)

        def put(at, form, *values):
            struct.pack_into("<" + form, page, at, *values)

        if cns == 1:
            put(4, "20s40s8s", b"5eed", b"a target that lies", b"1")
            put(77, "BHI", 5, CNTLID, 0x10300)
            put(111, "B", 1)
            put(258, "BB", 3, 3)
            put(320, "H", 10)
            put(512, "BBHI", 0x66, 0x44, 128, 1)
            put(536, "I", 1 | 1 << 2 | 1 << 20)
            put(768, "256s", self.nqn.encode())
            put(1792, "IIHBB", (wire.CAPSULE + 4096) // 16, 1, 0, 0, 1)
            for at, (form, value) in self.identity.items():
                put(at, form, value)
        elif cns == 2:
            put(0, "I", 1 if nsid < 1 else 0)
        elif cns == 3:
            put(0, "BBxx16s", 3, 16, self.uuid)
        elif cns == 0:
            put(0, "QQQ", BLOCKS, BLOCKS, BLOCKS)
            put(128, "HBB", 0, 9, 0)
            for at, (form, value) in self.namespace.items():
                put(at, form, value)
        else:
            return None
        return bytes(page)

    def io(self, queue, command, data):
        at = (command.words[0] | command.words[1] << 32) * BLOCK
        length = ((command.words[2] & 0xffff) + 1) * BLOCK
        if command.opcode == wire.READ:
            queue.give(command.sgl, bytes(self.disk[at:at + length]))
        elif command.opcode == wire.WRITE:
            data = queue.written(command, data, length)
            if data is None:
                return None, 0
            self.disk[at:at + length] = data
        elif command.opcode != wire.FLUSH:
            return 0, INVALID_FIELD
        return 0, 0
