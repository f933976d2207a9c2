# SPDX-License-Identifier: GPL-2.0
"""Part of scripts/upstream/intree: the series as the files of a kernel tree, patch by patch.

    intree.py SOURCE REPO
    intree.py --lists	only checks that each file is in one of the lists, and the sizes that first.cover has

SOURCE is the kernel's source. REPO becomes a git repository with those of its files that the series
change, and a branch a series, with a commit for each file of upstream/SERIES: a commit message, "---",
and the files of this repository that come with it. What stays here is in upstream/here.txt. Where a file
lists others (modules, options, rules), it has what is there so far."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from fnmatch import filter as matching, fnmatch
from functools import cache
from pathlib import Path

from intree_pages import WIDTH, Pages

TOP = Path(__file__).resolve().parents[2]
SERIES = ("first", "rest")

# Where a file goes to; the first prefix that fits counts. The rules of all modules are read by one
# Makefile, as those of nova-core and nova-drm are, as long as kbuild knows no crates of other folders.
PLACES = (
    ("upstream/infiniband.rst", "Documentation/infiniband/rust/index.rst"),
    ("Documentation/", "Documentation/infiniband/rust/"),
    ("Kconfig", "drivers/infiniband/rust/Kconfig"),
    ("Kbuild", "drivers/infiniband/rust/modules.mk"),
    ("rust/kernel/rdma/", "drivers/infiniband/rust/rdma/"),
    ("rust/", "drivers/infiniband/rust/"),
    ("drivers/null/", "drivers/infiniband/sw/null/"),
    ("drivers/nvme/host/", "drivers/nvme/host/rdma_rs/"),
    ("drivers/nvme/target/", "drivers/nvme/target/rdma_rs/"),
    ("net/9p/", "net/9p/rdma_rs/"),
    ("samples/", "drivers/infiniband/ulp/rust/"),
    ("tests/kunit/kunitconfig", "drivers/infiniband/rust/.kunitconfig"),
    ("tests/examples/", "drivers/infiniband/tests/examples/"),
    ("tests/kunit/", "drivers/infiniband/tests/rust/"),
)

# The crates that grow.
ROOTS = ("rust/kernel/rdma/rdma.rs", "tests/kunit/rdma_kunit.rs")

# Files that lose what is not there.
TRIMMED = (*ROOTS, "rust/kernel/rdma/prelude.rs", "tests/kunit/fixture.rs")

# The sizes that upstream/first.cover has: the words around each, and the files whose lines it is about. The second is
# without comments and empty lines.
CRATE = "rust/kernel/rdma/"
SIZES = (
    (r"([\d,]+) are the crate", (CRATE,)),
    (r"([\d,]+) of them code", (CRATE,)),
    (r"([\d,]+) its bindings", ("rust/bindings/", "rust/helpers/", "rust/macros/", "rust/rules.mk", "rust/exports.c")),
    (r"([\d,]+) the null device", ("drivers/null/",)),
    (r"([\d,]+) the suites;", ("tests/kunit/",)),
    (r"([\d,]+) the documentation", ("Documentation/", "upstream/")),
    (r"([\d,]+) the ULP", ("samples/",)),
    (r"SRQs \(([\d,]+) lines", (CRATE + "srq.rs",)),
    (r"address handles \(([\d,]+)", (CRATE + "ah.rs",)),
)
# By so much of itself a size may differ from what the cover has.
STALE = 0.05

# What is added to files of the kernel: the file, the line before which it comes (or the end), the lines.
HOOKS = (
    ("drivers/infiniband/Makefile", None, ["include $(src)/rust/modules.mk"]),
    ("drivers/infiniband/Kconfig", "endif # INFINIBAND", ['source "drivers/infiniband/rust/Kconfig"', ""]),
    ("MAINTAINERS", "INGENIC JZ4780 NAND DRIVER", "upstream/MAINTAINERS"),
    ("Documentation/infiniband/index.rst", "   sysfs", ["   rust/index"]),
)
# A hook comes with the first file of this prefix.
HOOKED_BY = {
    "drivers/infiniband/Makefile": "drivers/infiniband/rust/modules.mk",
    "drivers/infiniband/Kconfig": "drivers/infiniband/rust/Kconfig",
    "MAINTAINERS": "drivers/infiniband/rust/",
    "Documentation/infiniband/index.rst": "Documentation/infiniband/rust/",
}


def place(name):
    """Returns the file's place in the kernel tree."""
    for prefix, where in PLACES:
        if name.startswith(prefix):
            return where + name[len(prefix):]
    sys.exit(f"error: {name} has no place in the kernel tree: scripts/upstream/intree.py")


def moved(text):
    """Returns rules of make with the places in drivers/infiniband instead of those here."""
    for old, new in (("rust/kernel/rdma", "rust/rdma"), ("drivers/null", "sw/null"),
                     ("samples/", "ulp/rust/"), ("tests/kunit", "tests/rust")):
        text = text.replace(old, new)
    return text


def rules(text, files):
    """Returns make's rules without the paragraphs, and the ULPs, that are not there, or are out of tree."""
    text = re.sub(r"ifneq \(\$\(KBUILD_EXTMOD\),\)\n.*?\nendif\n\n", "", text, flags=re.DOTALL)
    there = {folder.as_posix() for name in files for folder in Path(name).parents}

    def is_there(code):
        tests = re.findall(r"\btests/[\w/]+(?=\.o\b)", code)
        return there.issuperset(re.findall(r"\b((?:drivers|net|samples|tests)/[\w/]+)/\w", code)) \
            and files.issuperset(t + (".rs" if t + ".rs" in files else ".c") for t in tests)

    def suites(line):
        """Returns the suites that are run built in, without those that are not there."""
        names = [n for n in line[1].replace("\\\n", " ").split() if matching(files, f"tests/kunit/*/{n}.rs")]
        return "SUITES := " + " \\\n\t".join(textwrap.wrap(" ".join(names), 100)) + "\n"

    # Each ULP is a line.
    text = "".join(line for line in text.splitlines(True) if not line.startswith("$(call rdma-ulp,") or is_there(line))
    kept = [paragraph for paragraph in text.strip("\n").split("\n\n") if is_there(re.sub(r"(?m)^#.*", "", paragraph))]
    text = re.sub(r"(?m)^SUITES := ((?:.*\\\n)*.*)\n", suites, "\n\n".join(kept))
    return moved(re.sub(r"\n{3,}", "\n\n", text) + "\n")


def options(text, made):
    """Returns the options whose modules the rules make."""
    head, *entries = re.split(r"(?m)^(?=config )", text)
    kept = [e for e in entries if re.search(rf"\bCONFIG_{e.split()[1]}\b", made)]
    head = "# SPDX-License-Identifier: GPL-2.0\n\n"
    return head + "".join(kept).rstrip("\n") + "\n"


def modules(name, text, files):
    """Returns Rust without the modules, and what is used of them, that are not there."""
    folders = {os.path.dirname(name), name[:-3]}
    is_there = lambda m: any(f"{f}/{m}.rs" in files for f in folders)   # pylint: disable=unnecessary-lambda-assignment
    declared = re.findall(r"(?m)^((?:#\[[^\n]*\n)*)(?:pub(?:\([a-z]+\))? )?mod (\w+);$", text)
    gone = [m for attributes, m in declared if "path =" not in attributes and not is_there(m)]
    for m in gone:
        text = re.sub(rf"(?m)^(?:(?:#\[|///)[^\n]*\n)*(?:pub(?:\([a-z]+\))? )?mod {m};\n", "", text)
        text = re.sub(rf"(?m)^(?:pub(?:\([a-z]+\))? )?use {m}::[^;]*;\n", "", text)
        # What is called of it when the module is loaded.
        text = re.sub(rf"(?m)^ +{m}::\w+\(\);\n", "", text)
        # Its line in the documentation of the root: an item of a list, or a paragraph.
        text = re.sub(rf"(?m)^//! - (?:(?!^//! - |^//!\n)[^\n]*\n)*?[^\n]*\[`{m}`\][^\n]*\n", "", text)
        text = re.sub(rf"//!\n//! [^\n]*\[`{m}`\]\.\n", "", text)
    if name == "rust/kernel/rdma/prelude.rs":
        crate = "rust/kernel/rdma"
        for line, module in re.findall(r"(?m)^(pub(?:\(crate\))? use crate::(\w+)[^;]*;\n)", text):
            if module != "bindings" and f"{crate}/{module}.rs" not in files:
                text = text.replace(line, "")
    if name == "tests/kunit/rdma_kunit.rs":
        for folder, suites in re.findall(r"(?ms)^    (\w+) \{\n(.*?)^    \}\n", text):
            for suite in re.findall(r"(\w+): suite_\1,$", suites, re.M):
                if f"tests/kunit/{folder}/{suite}.rs" not in files:
                    text = text.replace(f"        {suite}: suite_{suite},\n", "")
                    gone.append(suite)
        text = re.sub(r"(?m)^    \w+ \{\n    \}\n", "", text)
    if gone and name in ROOTS:
        # The example of the root uses all of the first series; that of a module comes with the module.
        if "qp" in gone:
            text = re.sub(r"(?m)^//!\n//! # Examples\n(?://![^\n]*\n)*", "", text)
        # What uses some of it comes with another patch.
        allowed = "#![allow(dead_code, unreachable_pub, unused_imports)]\n"
        text = re.sub(r"\n\n(?!//)(#!)?", lambda m: f"\n\n{allowed}" + (m[1] or "\n"), text, count=1)
        if left := set(re.findall(r"(?<![:\w])(\w+)::", re.sub(r"//.*", "", text))).intersection(gone):
            sys.exit(f"error: {name} uses {', '.join(sorted(left))}, which comes later: scripts/upstream/intree.py")
    return text


def tree(files, base, pages):
    """Returns the contents of the files of the kernel tree, by their places."""
    made = rules((TOP / "Kbuild").read_text(), files)
    contents = {}
    for name in files:
        text = (TOP / name).read_text()
        if name == "Kbuild":
            text = made
        elif name == "Kconfig":
            text = options(text, made)
        elif name.endswith(".mk"):
            text = rules(text, files)
        elif name.endswith(".rs"):
            text = modules(name, text, files)
        if name.endswith(".rst"):
            text, _ = pages.page(text)
        elif name.endswith((".rs", ".c", ".h")):
            text, _ = pages.source(text)
        contents[place(name)] = text
    for name, before, lines in HOOKS:
        if not any(place.startswith(HOOKED_BY[name]) for place in contents):
            continue
        if isinstance(lines, str):
            lines = (TOP / lines).read_text().split("\n")
        have = base[name].rstrip("\n").split("\n")
        at = have.index(before) if before else len(have)
        contents[name] = "\n".join(have[:at] + lines + have[at:]) + "\n"
    return contents


def git(repo, *args, **options_):
    return subprocess.run(["git", "-C", repo, *args], check=True, capture_output=True, text=True, **options_).stdout


def write(repo, contents):
    for name, text in contents.items():
        path = repo / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def too_early(path, files, there):
    """Returns what the files of a patch use of the crate, or of the fixtures, although a later patch brings it."""
    crate, fixtures, wrong = "rust/kernel/rdma", "tests/kunit/fixture", []
    for name in sorted(files - set(TRIMMED)):
        if not name.endswith(".rs") or name.startswith("rust/macros/"):
            continue
        code = re.sub(r"//.*", "", (TOP / name).read_text())
        root = "crate" if name.startswith(crate) else "rdma"
        used = re.findall(rf"\b{root}::(\w+)", code)
        for group, indent in re.findall(rf"(?ms)^ *use {root}::{{\n(( +).*?)^ *}};", code):
            used += re.findall(rf"(?m)^{indent}(\w+)", group)
        used = {f"{crate}/{m}.rs" for m in used}
        # A file that a module is made of, by its path from this one.
        paths = re.findall(r'#\[path = "(.*)"\]', code)
        used |= {os.path.normpath(f"{os.path.dirname(name)}/{at}") for at in paths}
        if name.startswith("tests/kunit/"):
            root = "super" if name.startswith(fixtures) else "fixture"
            for group in re.findall(rf"\b{root}::({{[^{{}}]*}}|\w+)", code):
                used |= {f"{fixtures}/{exports().get(m)}.rs" for m in re.findall(r"\w+", group)}
        wrong += [f"{path.relative_to(TOP)}: {name} uses {file}, which comes later"
                  for file in sorted(used - there) if (TOP / file).exists()]
    return wrong


@cache
def exports():
    """Returns the names that the root of the fixtures exports, with their modules."""
    text = re.sub(r"//.*", "", (TOP / "tests/kunit/fixture.rs").read_text())
    groups = re.findall(r"(?m)^pub\(crate\) use (\w+)::({[^{}]*}|\w+);", text)
    return {name: module for module, names in groups for name in re.findall(r"\w+", names)}


def sizes(files):
    """Returns what first.cover says of the sizes of its series and is no longer so."""
    cover, wrong = " ".join((TOP / "upstream/first.cover").read_text().split()), []
    for words, prefixes in SIZES:
        lines = [line.strip() for name in files if name.startswith(prefixes)
                 for line in (TOP / name).read_text().splitlines()]
        if "code" in words:
            lines = [line for line in lines if line and not line.startswith("//")]
        said = re.search(words, cover)
        if not said or abs(int(said[1].replace(",", "")) - len(lines)) > STALE * len(lines):
            wrong.append(f"upstream/first.cover: there are {len(lines):,} lines now: {said[0] if said else words}")
    return wrong


def lists():
    """Returns the patches, and what makes their pages. A patch is a series, a message and files. Each file that
    has a place in the tree is in one, or stays. The cover of the first series has its sizes."""
    known = git(TOP, "ls-files").split("\n")
    left = {name for name in known if name.startswith(tuple(prefix for prefix, _ in PLACES))}
    wrong, patches = [], []
    paths = [path for series in SERIES for path in sorted((TOP / "upstream" / series).glob("*.txt"))]
    for path in [*paths, TOP / "upstream/here.txt"]:
        message, listed = path.read_text().split("\n---\n")
        files = set()
        for pattern in listed.split():
            found = {name for name in left if fnmatch(name, pattern)}
            if not found:
                wrong.append(f"{path.relative_to(TOP)}: no other file is called {pattern}")
            files |= found
            left -= found
        if path in paths:
            patches.append((path.parent.name, message, files))
            wrong += too_early(path, files, set(known) - left)
            for root in set(ROOTS) - left:
                modules(root, (TOP / root).read_text(), set(known) - left)
    wrong += [f"upstream: {name} is in no list" for name in sorted(left)]
    wrong += sizes({name for series, _, files in patches if series == "first" for name in files})
    pages = Pages({name for _, _, files in patches for name in files}, place)
    for name in sorted(pages.files):
        if name.endswith((".rst", ".rs", ".c", ".h")):
            text = (TOP / name).read_text()
            text, stays = pages.page(text) if name.endswith(".rst") else pages.source(text)
            if name.endswith(".rs"):
                wrong += [f"{name}: in the tree this is longer than {WIDTH}: {line.strip()}"
                          for line in text.expandtabs(8).split("\n") if len(line) > WIDTH]
            wrong += [f"{name}: points to {what}, which stays here, and not in parentheses" for what in stays]
    if wrong:
        sys.exit("\n".join(wrong))
    return patches, pages


def main():
    patches, pages = lists()
    if sys.argv[1:] == ["--lists"]:
        return
    source, repo = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.rmtree(repo, ignore_errors=True)
    repo.mkdir(parents=True)
    git(repo, "init", "-q", "-b", "base")
    who = {"NAME": "rdma-rs authors", "EMAIL": "rdma-rs@example.org", "DATE": "2026-11-22T18:00:00+0000"}
    for role in ("AUTHOR", "COMMITTER"):
        os.environ |= {f"GIT_{role}_{k}": v for k, v in who.items()}
    base = {name: (source / name).read_text() for name, _, _ in HOOKS}
    write(repo, base)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", f"Files of {source.name}")
    files = set()
    for series in SERIES:
        git(repo, "checkout", "-q", "-b", series)
        for _, message, more in (patch for patch in patches if patch[0] == series):
            files |= more
            write(repo, tree(files, base, pages))
            git(repo, "add", "-A")
            git(repo, "commit", "-q", "-F", "-", input=message)


if __name__ == "__main__":
    main()
