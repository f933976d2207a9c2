# SPDX-License-Identifier: GPL-2.0
"""The callers of the crate's public functions, as the compiler has resolved them.

The samples and the examples (those of the pages in tests/examples, and those in the crate's own
documentation) are compiled to MIR, in which each call has the path of the function that is meant. A
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
SAMPLES = ["kv/kv", "mad_ping/mad_ping", "minimal/minimal", "perf/perf", "replog/replog", "rpc/rpc", "rping/rping",
           "ud_echo/ud_echo"]


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


def of_samples(kernel):
    """Returns {(type, name): samples}, with the modules built for a kernel."""
    found = {}
    for sample in SAMPLES:
        env, command = kbuild.rust(f"{kernel}/samples/{sample}.o")
        for function in compile_mir(Path(sample).stem, kernel, command, env, TOP / f"samples/{sample}.rs"):
            found.setdefault(function, []).append(Path(sample).stem)
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
    """Returns {(type, name): caller} of all public functions: a sample, "example", "test" or "none"."""
    OUT.mkdir(parents=True, exist_ok=True)
    samples, examples = of_samples(kernel), of_examples(kernel)
    tests = "\n".join(path.read_text() for folder in ("kunit", "random", "soak", "twins", "netns", "asm", "compile")
                      for path in (TOP / "tests" / folder).rglob("*.rs"))
    found = {}
    for function in sorted(public(kernel)):
        if function in samples:
            found[function] = " ".join(samples[function])
        elif function in examples:
            found[function] = "example"
        else:
            found[function] = "test" if re.search(rf"\b{function[1]}\b", tests) else "none"
    return found
