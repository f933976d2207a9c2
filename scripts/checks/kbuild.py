#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""The command lines that kbuild has recorded, for tools that compile as it does.

    scripts/checks/kbuild.py OBJECT [TOOL]

Prints the command line for an object in build/, such as stock/samples/minimal/minimal.o, in the
shell's syntax: with TOOL instead of the compiler, and without the source and all that is written. It
is to be run in the folder of the modules' kernel, here build/stock.
"""

import shlex
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build"


def words(name):
    """Returns the words of the command line for an object."""
    path = BUILD / name
    if not path.exists():
        sys.exit(f"error: there is no build/{name}: scripts/sandbox scripts/build {name.split('/', 1)[0]}")
    line = path.with_name(f".{path.name}.cmd").read_text().splitlines()[0]
    return shlex.split(line.split(":=", 1)[1].replace("$(pound)", "#"))


def rust(name, tool="rustc"):
    """Returns the environment and the command line of the compiler for a Rust object."""
    recorded = words(name)
    begin = recorded.index("rustc")
    command = [w for w in recorded[begin + 1:] if not w.startswith(("--emit=", "-Zbinary_dep_depinfo"))]
    at = command.index("--out-dir")
    del command[at:at + 2]
    # What follows the source, such as objtool, is a command of its own.
    source = next(n for n, word in enumerate(command) if word.endswith(".rs"))
    env = dict(w.split("=", 1) for w in recorded[:begin] if "=" in w)
    return env | {"RUSTC_BOOTSTRAP": "1"}, [tool, *command[:source]]


if __name__ == "__main__":
    env, command = rust(*sys.argv[1:])
    print(shlex.join(["env", *(f"{key}={value}" for key, value in env.items()), *command]))
