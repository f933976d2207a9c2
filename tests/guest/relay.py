#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""Carries the Ethernet frames of an interface over a serial line to another kernel, framed as SLIP does
(RFC 1055). What the line does not take is lost, as on any wire.

relay INTERFACE LINE"""

import os
import select
import socket
import sys
import tty

END, ESC = b"\xc0", b"\xdb"
MAX_FRAME = 65536
# The bytes that may wait for the line.
MAX_QUEUE = 1 << 18


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
    queue, text = b"", b""
    while True:
        can_read, can_write, _ = select.select([packets, serial], [serial] if queue else [], [])
        if packets in can_read:
            frame, where = packets.recvfrom(MAX_FRAME)
            if where[2] != socket.PACKET_OUTGOING and len(queue) < MAX_QUEUE:
                queue += framed(frame)
        if serial in can_write:
            queue = queue[os.write(serial, queue):]
        if serial in can_read:
            *frames, text = (text + os.read(serial, MAX_FRAME)).split(END)
            for frame in frames:
                if len(frame) >= 14:
                    try:
                        packets.send(unframed(frame))
                    except OSError:
                        # Broken off by the end of the other kernel, and too long.
                        pass


if __name__ == "__main__":
    main()
