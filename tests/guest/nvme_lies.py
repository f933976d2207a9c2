# SPDX-License-Identifier: GPL-2.0
"""How the cases of hostile hosts and targets are declared, and what holds after each of them."""

from collections import namedtuple

# known: what C is known to do wrong, or nothing. times: how often as long as others it may take.
Lie = namedtuple("Lie", "against name function args known size times")
LIES = []


class Defect(Exception):
    """The end under test has done what it must not do."""


def lie(against, name, *args, known="", size=1 << 23, times=1):
    """Declares a case. The function gets the ground and a peer with so much memory; what it returns says what
    the end under test has done, so that two implementations can be compared."""
    def add(function):
        LIES.append(Lie(against, name, function, args, known, size, times))
        return function
    return add
