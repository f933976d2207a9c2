#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Carries the Ethernet frames of an interface over a serial line to another kernel, framed as SLIP does
(RFC 1055). What the line does not take is lost, as on any wire.

A line that gets more bytes than its buffer of 4 KiB takes, before somebody reads them, stops for good. So each end
says how many it has read, and sends only so many that were not. One that begins says so: what was sent to the one
before it will not be read.

relay INTERFACE LINE"""

import os
import select
import socket
import sys
import tty
from collections import deque

END, ESC = b"\xc0", b"\xdb"
MAX_FRAME, SHORTEST = 65536, 14
# The frames that may wait for the line, and the bytes of those that may be on it before another one. That and a frame,
# and as much again that was sent to a relay before one that begins, are less than 4 KiB.
MAX_QUEUE, WINDOW = 256, 500
# What is no frame: a relay begins, or has read a number of bytes.
BEGINS, HAS_READ = b"B", b"R"


def framed(frame):
    return END + frame.replace(ESC, b"\xdb\xdd").replace(END, b"\xdb\xdc") + END


def unframed(text):
    return text.replace(b"\xdb\xdc", END).replace(b"\xdb\xdd", ESC)


def main():
    interface, line = sys.argv[1:]
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    packets.bind((interface, 0))
    serial = os.open(line, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
    tty.setraw(serial)
    # What waits, what goes out now, how many bytes of frames are on the line, and what came of the next one.
    queue, told, now, sent, text = deque(), framed(BEGINS), b"", 0, b""
    while True:
        if not now and told:
            now, told = told, b""
        elif not now and queue and sent < WINDOW:
            now = queue.popleft()
            sent += len(now)
        can_read, can_write, _ = select.select([packets, serial], [serial] if now else [], [])
        if packets in can_read:
            frame, where = packets.recvfrom(MAX_FRAME)
            if where[2] != socket.PACKET_OUTGOING and len(queue) < MAX_QUEUE:
                queue.append(framed(frame))
        if serial in can_write:
            now = now[os.write(serial, now):]
        if serial in can_read:
            *frames, text = (text + os.read(serial, MAX_FRAME)).split(END)
            for frame in frames:
                if frame == BEGINS:
                    sent = 0
                elif frame.startswith(HAS_READ) and len(frame) < SHORTEST:
                    sent = max(0, sent - int(frame[1:]))
                elif len(frame) >= SHORTEST:
                    told += framed(HAS_READ + b"%d" % (len(frame) + 2))
                    try:
                        packets.send(unframed(frame))
                    except OSError:
                        # Broken off by the end of the other kernel, and too long.
                        pass


if __name__ == "__main__":
    main()
