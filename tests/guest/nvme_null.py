# SPDX-License-Identifier: GPL-2.0
"""The cases of a device that refuses requests and loses completions: the null device, whose connections are iWARP's."""

import subprocess
from contextlib import contextmanager, nullcontext
from pathlib import Path

import faults
import null
import nvme
from nvme import Load, Null, until
from nvme_faults import flowing
from nvme_ground import case
from samples import module

WAITS = "ib_drain_qp() waits for ever for a completion that is lost"


def core():
    """The crate, which ends in C have not loaded."""
    return nullcontext() if Path("/sys/module/rdma_rs").exists() else module("rdma_rs")


@contextmanager
def device(ground):
    """A device at the address of the link, and a target there."""
    with core(), null.connected() as lossy, Null() as backing, ground.target(backing) as target:
        yield lossy, target, backing
        until(lambda: not lossy.qps(), "there are QPs still", 240)


def verified(ground, target, backing):
    with ground.controller(target, nr_io_queues=1) as host:
        ground.verify(host.disk(), backing, size="256k")


def fails(ground, target):
    """A host that connects fails: one in C, whose queue goes meanwhile, by the timeout of its Connect, a minute."""
    words = ("nvme", "connect", *ground.controller(target, nr_io_queues=1).words())
    assert subprocess.run(words, capture_output=True, check=False, timeout=240).returncode, "it has connected"


@case("data", links=("null",))
def data(ground):
    with device(ground) as (_, target, backing):
        verified(ground, target, backing)


@case("a controller's memory is near to its device", links=("null",))
def near(ground):
    """The device is near to the first NUMA node, where the kernel knows of nodes."""
    node = 0 if Path("/sys/devices/system/node").exists() else -1
    with device(ground) as (_, target, _), ground.controller(target, nr_io_queues=1) as host:
        said = int((host.path / "numa_node").read_text(encoding="ascii"))
        assert said == node, f"the node is {said} and not {node}"


# What the crate logs of a request that was refused so.
UNKNOWN = "a driver did not say which request it refused"


def refused(ground, how):
    """One after the other, from the first receive of the host to the registration and the SEND of Connect. A target in
    Rust whose device does not say which SEND it refused waits for that for ever: none of its are."""
    faults.says(f"rdma-rs allows: {UNKNOWN}")
    with device(ground) as (lossy, target, backing):
        for after in (0, 40, 65, 66) if how == "refuse" else (0, 40, 65):
            lossy.write("inject", f"{how} {after} 5")
            fails(ground, target)
            until(lambda: not lossy.qps(), "there are QPs still")
        verified(ground, target, backing)


# The device refuses a request; without a word about which one of a chain it was; or posts it nevertheless.
REFUSALS = {"refuse": "are refused", "mute": "are refused without a word about which",
            "lapse": "are refused, and posted nevertheless,"}
for refusal, words in REFUSALS.items():
    case(f"requests {words} while a queue is set up", refusal, links=("null",))(refused)


# A QP by its number: of the admin queue at the host and at the target, and then of the other queue.
HOST, TARGET = 2, 3


def queue_lost(ground, end, bs):
    # The deletion of the disk waits for its requests, uninterruptibly: a minute for the drain of the queue, and one for
    # the end of its QP.
    nvme.write("/proc/sys/kernel/hung_task_timeout_secs", 240)
    with device(ground) as (lossy, target, backing):
        with ground.controller(target, nr_io_queues=1) as host, Load(host.disk(), bs=bs, iodepth=32) as load:
            qps = sorted(lossy.qps(), key=int)
            assert len(qps) == 4, qps
            lossy.write(f"{qps[end]}/inject", "hold")
            host.disconnect()
            ground.broken(load)
        until(lambda: not lossy.qps(), "there are QPs still", 240)
        verified(ground, target, backing)


@case("a target's queue completes nothing any more", links=("null",), defects={("target", "c"): WAITS})
def lost(ground):
    # Some RDMA READs are posted when nothing completes any longer.
    queue_lost(ground, TARGET, "64k")


@case("a host's queue stops completing", links=("null",), defects={("host", "c"): WAITS})
def host_lost(ground):
    queue_lost(ground, HOST, "4k")


def host_lost_again(ground, what):
    """By itself, when an I/O has timed out: where nothing completes, after a minute for the drain, and one for the end
    of the QP."""
    nvme.write("/proc/sys/kernel/hung_task_timeout_secs", 240)
    with device(ground) as (lossy, target, backing):
        with ground.controller(target, nr_io_queues=1, reconnect_delay=1, ctrl_loss_tmo=600) as host, \
                Load(host.disk(), size="1m", offset="16m") as load:
            for path in Path("/sys/block").glob("nvme*n*/queue/io_timeout"):
                nvme.write(path, 5000)
            before = set(lossy.qps())
            qps = sorted(before, key=int)
            assert len(qps) == 4, qps
            lossy.write(f"{qps[HOST]}/inject", what)
            until(lambda: len(lossy.qps()) == 4 and not before & set(lossy.qps()) and host.state() == "live",
                  "the host has not connected again", 400)
            ground.figures["reconnects"] += 1
            flowing(host)
            ground.stop(load)
            ground.verify(host.disk(), backing, iodepth=16, size="256k", randseed=3)


case("a host's queue stops completing, and the host connects again", "hold", links=("null",),
     defects={("host", "c"): WAITS})(host_lost_again)
case("a host's queue loses a completion, and the host connects again", "vanish", links=("null",))(host_lost_again)


def refused_loaded(ground, how):
    """A host may connect again for it, or send the request again."""
    faults.says(f"rdma-rs allows: {UNKNOWN}")
    with device(ground) as (lossy, target, backing):
        with ground.controller(target, nr_io_queues=1, reconnect_delay=1, ctrl_loss_tmo=600) as host, \
                Load(host.disk(), size="1m", offset="16m") as load:
            for _ in range(3):
                host.settle()
                # Of the last queue, beside those that have not gone yet.
                lossy.write(f"{sorted(lossy.qps(), key=int)[HOST - 4]}/inject", f"{how} 50")
                flowing(host)
            ground.stop(load)
            ground.verify(host.disk(), backing, iodepth=16, size="256k", randseed=3)


TWICE = {("host", "c"): "the kernel panics: it sends a request again that was posted"}
for refusal, words in REFUSALS.items():
    case(f"requests {words} under load, 3 times", refusal, links=("null",),
         defects=TWICE if refusal == "lapse" else {})(refused_loaded)


@case("a target's queue with unsignaled responses completes nothing any more", links=("null",),
      defects={("target", "c"): "nvmet-rdma signals every response"})
def lost_unsignaled(ground):
    # Data of that size come and go with their commands and responses, which are in the ring then.
    with nvme.target_with(ground.end, sig_limit=16, kept_data_size=4096):
        queue_lost(ground, TARGET, "4k")
