# SPDX-License-Identifier: GPL-2.0
"""The callers of the crate's public functions, as the compiler has resolved them.

The ULPs (samples, drivers of NVMe, transport of 9P) and the examples (those of the pages in tests/examples, and those
in the crate's own documentation) are compiled to MIR, in which each call has the path of the function that is meant. A
name in a test's source is taken for a call.
"""

import os
import re
import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import kbuild
import rust_items

TOP = Path(__file__).resolve().parents[2]
OUT = TOP / "build/callers"
# Nothing is inlined, and each function has its whole path.
MIR = ["-Zinline-mir=no", "-Ztrim-diagnostic-paths=no", "-Awarnings"]
ULPS = ["samples/kv/kv", "samples/mad_ping/mad_ping", "samples/minimal/minimal", "samples/perf/perf",
        "samples/replog/replog", "samples/rpc/rpc", "samples/rping/rping", "samples/ud_echo/ud_echo",
        "drivers/nvme/host/nvme_rdma_rs", "drivers/nvme/target/nvmet_rdma_rs", "net/9p/trans_rdma"]


def public(kernel):
    """Returns {(type, name)} of the methods of public types, and of {(module, name)} of functions."""
    return {(function.of or function.module, function.name) for function in rust_items.functions(kernel)
            if function.is_public and not function.is_hidden and not function.trait}


def closing(text, at):
    """Returns the end of the generic arguments that begin at `at`."""
    depth = 0
    for n in range(at, len(text)):
        if text[n] == "<":
            depth += 1
        elif text[n] == ">" and text[n - 1] not in "-=":
            depth -= 1
            if depth == 0:
                return n + 1
    return len(text)


def path_at(text, at):
    """Returns the names of the path that begins at `at`, without generic arguments."""
    names = []
    while match := re.compile(r"(?:::)?(\w+)").match(text, at):
        names.append(match[1])
        at = match.end()
        while text.startswith("::<", at):
            end = closing(text, at + 2)
            if impl := re.match(r"<impl (?:\w+::)*(\w+)", text[at + 2 : end]):
                names.append(impl[1])
            at = end
    return names


def calls(mir):
    """Returns {(type or module, name)} of the crate's functions that a MIR file names."""
    found = set()
    for line in mir.read_text().splitlines():
        for match in re.finditer(r"\brdma::", line):
            found.add(tuple(path_at(line, match.start())[-2:]))
    return found


def compile_mir(name, kernel, command, env, source, *flags):
    target = OUT / f"{name}.mir"
    subprocess.run([*command, *flags, *MIR, f"--emit=mir={target}", source], cwd=TOP / "build" / kernel, check=True,
                   env=os.environ | env)
    return calls(target)


def of_ulps(kernel):
    """Returns {(type, name): ULPs}, with the modules built for a kernel."""
    found = {}
    for ulp in ULPS:
        env, command = kbuild.rust(f"{kernel}/{ulp}.o")
        # kbuild records no variables that a rule exports.
        env["NVME_BINDINGS_DIR"] = str((TOP / "build" / kernel / ulp).parent)
        for function in compile_mir(Path(ulp).stem, kernel, command, env, TOP / f"{ulp}.rs"):
            found.setdefault(function, []).append(Path(ulp).stem)
    return found


def of_examples(kernel):
    """Returns {(type, name)}; scripts/checks/examples makes the crate."""
    loader = SourceFileLoader("examples", str(TOP / "scripts/checks/examples"))
    examples = module_from_spec(spec_from_loader("examples", loader))
    loader.exec_module(examples)
    # In one crate, code is made of one module's symbols only.
    examples.collect(leave=["course_module.rs"])
    env, command = kbuild.rust(f"{kernel}/samples/minimal/minimal.o")
    flags = ["-L", "./drivers/null", "--extern", "rdma_null"]
    return compile_mir("examples", kernel, command, env, examples.OUT / "all.rs", *flags)


def table(kernel):
    """Returns {(type, name): caller} of all public functions: ULPs, "example", "test" or "none"."""
    OUT.mkdir(parents=True, exist_ok=True)
    ulps, examples = of_ulps(kernel), of_examples(kernel)
    tests = "\n".join(path.read_text() for folder in ("kunit", "random", "soak", "twins", "netns", "asm", "compile")
                      for path in (TOP / "tests" / folder).rglob("*.rs"))
    found = {}
    for function in sorted(public(kernel)):
        if function in ulps:
            found[function] = " ".join(ulps[function])
        elif function in examples:
            found[function] = "example"
        else:
            found[function] = "test" if re.search(rf"\b{function[1]}\b", tests) else "none"
    return found
