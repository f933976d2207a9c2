# SPDX-License-Identifier: GPL-2.0
"""The samples and a peer that is no RDMA device, and sends what it likes."""

import subprocess
import time

from case import SECONDS, STOCK, case, sh
from fuzz import fuzz
from samples import BUILD
from stranger import REJ, REP, THERE, Stranger, cable
from traffic import listening, serve_one

# As in samples/rping/instance.rs.
BACKLOG = 64


@case("stranger: requests whose answers it does not confirm")
def unconfirmed(count=160):
    accepted, refused = set(), set()
    with cable(), listening(addr=THERE) as (server, port), Stranger() as stranger:
        for _ in range(count):
            # It wants to have the answers for more than a day.
            stranger.send_mad(stranger.request(port, timeout=31, retries=15)[0])
        end = time.monotonic() + SECONDS / 2
        # The server has no more than so many at once: the others end, accepted or not.
        while len(refused) < count - BACKLOG:
            assert time.monotonic() < end, f"{len(accepted)} accepted, {len(refused)} ended"
            for attribute, message in stranger.mads():
                {REP: accepted, REJ: refused}[attribute].add(message[4:8])
            time.sleep(0.01)
        serve_one(server, port, addr=THERE)
    return f"{len(accepted)} accepted, {len(refused)} ended"


@case("stranger: messages to rpc that break off")
def broken_off(calls=60, slots=10):
    # rxe takes a receive for the first packet, and forgets that when the connection ends; but one
    # of rpc has no room for a whole packet.
    broken = 0
    with cable(), Stranger() as stranger:
        with subprocess.Popen(["insmod", BUILD / "rdma_rpc.ko", f"calls={calls}"]) as load:
            while load.poll() is None:
                connection = stranger.connect(7177)
                if connection:
                    qpn, psn = connection
                    stranger.send(0, qpn, psn, bytes(1024))
                    broken += 1
                time.sleep(0.01)
        assert load.returncode == 0, "the clients of rpc were not served"
        sh("rmmod", "rdma_rpc")
    assert broken > slots, f"only {broken} messages were begun meanwhile"
    return f"{broken} messages"


if not STOCK:
    # The long run is scripts/fuzz.
    for t in "rping", "rpc", "kv", "ud_echo":
        @case(f"stranger: messages, right and wrong, at {t}", t)
        def messages(target):
            sent, said, _ = fuzz(0, target, 0, 1, 300)
            return f"{sent.total()} sent, {said.total()} answered"
