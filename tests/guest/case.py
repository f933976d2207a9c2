# SPDX-License-Identifier: GPL-2.0
"""What all cases of the suite in a VM share: how they are declared, and where they run."""

import os
import subprocess
from pathlib import Path

FLAVOUR = os.environ["flavour"]
BUILD = Path("/rdma-rs/build")
SECONDS = 240 if FLAVOUR == "stock" else 400
# The debug kernel is slow, and shows mistakes in fewer rounds.
ROUNDS = 2 if FLAVOUR == "stock" else 1
CASES = []


def case(name, *args):
    """Declares a case: it fails by raising, and what it returns is printed beside its name."""
    def add(function):
        CASES.append((name, function, args))
        return function
    return add


def sh(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS, **options)
