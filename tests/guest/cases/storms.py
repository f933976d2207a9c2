# SPDX-License-Identifier: GPL-2.0
"""A few rounds of each storm of "make storms"."""

import os

import storms
import wire
from case import STOCK, case

SEED = int(os.environ.get("SEED", "1"))
ROUNDS = {"killed": 3, "deleted": 2, "stopped": 2, "rpc": 1, "cut": 1, "namespace": 1, "unloaded": 1}


def begin():
    wire.up()


def some(name, rounds):
    return storms.short(name, SEED, rounds)


def loss():
    # Not what is reordered, which rxe does not bear: see scripts/stress/storms.
    return storms.short("loss", SEED, 1, count=2)


def end():
    wire.down()
    storms.until(lambda: not wire.devices(), "the devices do not go")


if not STOCK:
    case("storms: a wire between two namespaces")(begin)
    case("storms: loss")(loss)
    for n, r in ROUNDS.items():
        case(f"storms: {n}", n, r)(some)
    case("storms: the wire goes")(end)
