# SPDX-License-Identifier: GPL-2.0
"""rping with peers that misbehave: each time there is a reason, and a good peer is served."""

import errno
import subprocess
from concurrent.futures import ThreadPoolExecutor

from case import PROGRAMS, case
from rping import ADDR, Instance, finish, ports, wait_listening
from traffic import listening, serve_one


def hostile(role, how, port):
    return subprocess.Popen([PROGRAMS / "hostile", role, ADDR, str(port), how],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def hostile_client(how):
    with listening() as (server, port):
        bad = hostile("client", how, port)
        if how == "silent":
            serve_one(server, port)
        status, said = finish(bad)
        assert status == 0, f"the hostile client could not do it: {said}"
        reason = server.wait_reason()
        if how not in ("vanish", "disconnect"):
            assert reason != "peer disconnected", "the reason is not the misdeed"
        serve_one(server, port)
        return reason


def hostile_server(how):
    port = next(ports)
    bad = hostile("server", how, port)
    wait_listening(port)
    with Instance(port=port, count=3) as client:
        try:
            client.write("connect", 1)
        except OSError as e:
            failed = e
        else:
            raise AssertionError("connect succeeded")
        reason = client.wait_reason()
        assert client.read("state") == "failed", client.read("state")
    status, said = finish(bad)
    assert status == 0, f"the hostile server could not do it: {said}"
    with listening() as (server, port):
        serve_one(server, port)
    return f"{errno.errorcode.get(failed.errno, failed.errno)}, {reason}"


# It takes the module half a minute to lose patience with these, so the others run meanwhile.
waiting = ThreadPoolExecutor()
silent = []


@case("hostile peers: two silent ones begin")
def begin_silent():
    silent.append(waiting.submit(hostile_client, "silent"))
    silent.append(waiting.submit(hostile_server, "silent"))


for h in ("garbage", "short", "long", "empty", "badkey", "beyond", "resize", "badsink", "vanish",
          "disconnect", "flood"):
    case(f"hostile client: {h}", h)(hostile_client)
for h in ("short", "early", "vanish", "disconnect", "reject"):
    case(f"hostile server: {h}", h)(hostile_server)


@case("hostile client: silent")
def end_silent_client():
    return silent[0].result()


@case("hostile server: silent")
def end_silent_server():
    return silent[1].result()
