# SPDX-License-Identifier: GPL-2.0
"""DH-HMAC-CHAP as a target has it: in both directions, by SHA-256 and without a group (include/linux/nvme.h)."""

import base64
import hmac
import random
import struct
import zlib
from collections import namedtuple

LENGTH = 32
SHA256, NO_GROUP = 1, 0
# Kinds of messages, those of all protocols and those of this one, and their ids.
COMMON, DHCHAP = 0, 1
NEGOTIATE, CHALLENGE, REPLY, SUCCESS1, SUCCESS2, FAILURE1 = 0, 1, 2, 3, 4, 0xf1
FAILED = 1

# A key, and the text by which a host is told of it.
Secret = namedtuple("Secret", "key text")


def secret():
    key = random.randbytes(LENGTH)
    text = base64.b64encode(key + struct.pack("<I", zlib.crc32(key))).decode()
    return Secret(key, f"DHHC-1:00:{text}:")


def response(key, challenge, number, transaction, *names):
    said = challenge + struct.pack("<IHB", number, transaction, 0) + names[0] + b"\0".join(names[1:])
    return hmac.digest(key, said, "sha256")


class Chap:
    """The authentication of a queue: of the host by one key, and of the target by another."""

    def __init__(self, keys, subsystem, host):
        self.host_key, self.key = keys
        self.subsystem, self.host = subsystem, host
        self.transaction, self.challenge, self.number = 0, b"", 0
        # The last message of the host's, how often it was content, and whether the target's response is a wrong one.
        self.last, self.message, self.passed, self.wrong = None, b"", 0, False

    def stage(self, sends):
        """The message that is to come next from the host, or to it."""
        if sends:
            return {NEGOTIATE: "reply", REPLY: "failure2" if self.wrong else "success2"}.get(self.last, "negotiate")
        return {NEGOTIATE: "challenge", REPLY: "success1"}.get(self.last, "nothing")

    def hear(self, message):
        """Takes a message of the host's."""
        self.last, self.message = message[1], message
        self.passed += self.last == SUCCESS2
        self.transaction, = struct.unpack_from("<H", message, 4)

    def say(self):
        """The message that the host asks for."""
        if self.last == NEGOTIATE:
            self.challenge, self.number = random.randbytes(LENGTH), random.getrandbits(32)
            return struct.pack("<BBxxHBxBBHI", DHCHAP, CHALLENGE, self.transaction, LENGTH, SHA256, NO_GROUP, 0,
                               self.number) + self.challenge
        number, theirs, challenge = struct.unpack_from(f"<I{LENGTH}s{LENGTH}s", self.message, 12)
        right = response(self.host_key, self.challenge, self.number, self.transaction, b"HostHost", self.host,
                         self.subsystem)
        if theirs != right:
            return struct.pack("<BBxxHBB", COMMON, FAILURE1, self.transaction, FAILED, FAILED)
        ours = response(self.key, challenge, number, self.transaction, b"Controller", self.subsystem, self.host)
        return struct.pack("<BBxxHBxB7x", DHCHAP, SUCCESS1, self.transaction, LENGTH, 1) + (
            bytes(LENGTH) if self.wrong else ours)
