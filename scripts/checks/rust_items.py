# SPDX-License-Identifier: GPL-2.0
"""The functions of the crate, as rustdoc has parsed them: its JSON, of the modules built for a kernel. Runs in the
sandbox."""

import hashlib
import json
import os
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import kbuild

TOP = Path(__file__).resolve().parents[2]
CRATE = TOP / "rust/kernel/rdma"
OUT = TOP / "build/items"
FLAGS = ["-Zunstable-options", "--output-format", "json", "--document-private-items", "--document-hidden-items",
         "--cap-lints", "allow"]


@dataclass(frozen=True)
class Function:
    """A function. `of` is its type, or its trait; `trait` the one that an `impl` is of. `aliases` are other names of the
    type."""
    file: str
    line: int
    module: str
    of: str | None
    aliases: frozenset[str]
    trait: str | None
    name: str
    is_public: bool
    is_hidden: bool
    doc: str


def index(kernel):
    """Returns what rustdoc has found, by its ids. It is made anew if a source has changed."""
    sources = b"".join(path.read_bytes() for path in sorted(CRATE.rglob("*.rs")))
    target, key = OUT / f"{kernel}.json", OUT / f"{kernel}.key"
    made_of = hashlib.sha256(sources).hexdigest()
    if not key.exists() or key.read_text() != made_of:
        OUT.mkdir(parents=True, exist_ok=True)
        env, command = kbuild.rust(f"{kernel}/rust/kernel/rdma/rdma.o", "rustdoc")
        subprocess.run([*command, *FLAGS, "--output", OUT / kernel, CRATE / "rdma.rs"], cwd=TOP / "build" / kernel,
                       check=True, env=os.environ | env | {"RDMA_BUILD": "none"})
        (OUT / kernel / "rdma.json").replace(target)
        key.write_text(made_of)
    return json.loads(target.read_text())["index"]


def last_name(path):
    """Returns the last name of a path, which newer rustdocs call so, and older ones a name."""
    return (path.get("path") or path["name"]).rsplit("::", 1)[-1]


def type_name(kind):
    """Returns the name of the type of an `impl`."""
    path = kind.get("resolved_path")
    return last_name(path) if path else kind.get("generic")


@cache
def source(path):
    return path.read_text().splitlines()


def functions(kernel="stock"):
    """Returns all functions, with those of traits and of their implementations."""
    items = index(kernel)
    found, aliases = [], defaultdict(set)
    for item in items.values():
        if alias := item["inner"].get("type_alias"):
            aliases[type_name(alias["type"])].add(item["name"])

    def visit(item, module, of=None, trait=None):
        kind, inner = next(iter(item["inner"].items()))
        if kind == "module":
            for child in inner["items"]:
                visit_id(child, item["name"])
        elif kind in ("struct", "enum", "union", "trait"):
            for child in inner.get("items", []):
                visit_id(child, module, item["name"])
            for child in inner.get("impls", []):
                visit_id(child, module)
        elif kind == "impl":
            name = inner["trait"] and last_name(inner["trait"])
            for child in inner["items"]:
                visit_id(child, module, type_name(inner["for"]), name)
        elif kind == "function":
            path, line = Path(item["span"]["filename"]), item["span"]["begin"][0]
            if f"fn {item['name']}" not in source(path)[line - 1]:
                return      # It is made by a macro.
            found.append(Function(
                file=str(path.relative_to(CRATE)), line=line, module=module, of=of,
                aliases=frozenset(aliases[of]), trait=trait, name=item["name"],
                is_public=item["visibility"] == "public", is_hidden=any("hidden" in str(attr) for attr in item["attrs"]),
                doc=item["docs"] or ""))

    def visit_id(number, *args):
        # What another crate has, such as a method that a trait provides, is not in the index.
        if item := items.get(str(number)):
            if item["crate_id"] == 0:
                visit(item, *args)

    root = next(item for item in items.values() if item["name"] == "rdma" and "module" in item["inner"])
    visit(root, "rdma")
    return found
