#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Part of scripts/upstream/patches: makes the patches of a person, to be sent by mail.

    patches_as.py "Name <mail>" SOURCE OUT [--tree DIR] [NAME...]	all, or those whose names start so

They are numbered in the order of patches/order, and have this author and sign-off. Whom each goes to is what
get_maintainer.pl of SOURCE, a kernel's source, has; a security fix goes to no list (SECURITY.md). "Fixes:" is what a
patch has below its "---"; with --tree, a git tree of the kernel that has v7.3, the commit that its removed lines are of
is proposed there, for the person to confirm.
"""

import argparse
import collections
import re
import subprocess
import sys
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
# The number of groups of patches/order that are security fixes.
SECURITY = 2
HUNK = re.compile(r"^@@ -(\d+)", re.M)
# A name may have parentheses, and so may what it is the maintainer of.
RECIPIENT = re.compile(r"(.*?<\S+@\S+>|\S+@\S+) \((.*)\)$")


def ordered():
    """Yields the groups of patches/order: what they have in common, and their files."""
    text = (TOP / "patches/order").read_text().split("\n\n", 1)[1]
    for group in text.strip().split("\n\n"):
        title, *names = group.splitlines()
        yield title.removeprefix("# "), [next((TOP / "patches").glob(f"{name}-*.patch")) for name in names]


def fields(text):
    """Returns what a patch says of itself, and the diff."""
    said, diff = text.split("\ndiff ", 1)
    return dict(re.findall(r"^ (\w+): (.*)", said, re.M)), "diff " + diff


def removed(diff):
    """Yields the file, and the number, of each line that is removed, or that a line is added after."""
    for part in re.split(r"(?m)^(?=diff --git )", diff)[1:]:
        name, line = re.search(r"^--- a/(.*)", part, re.M), 0
        for text in part.splitlines() if name else ():
            if hunk := HUNK.match(text):
                line = int(hunk[1])
            elif line and text.startswith("-"):
                yield name[1], line
                line += 1
            elif line and text.startswith("+"):
                yield name[1], max(line - 1, 1)
            elif line:
                line += 1


def proposal(tree, diff):
    """Returns the commit that most of these lines are of, as a tag."""
    commits = collections.Counter()
    for name, line in set(removed(diff)):
        said = subprocess.run(["git", "-C", tree, "blame", "-l", "-s", "-L", f"{line},{line}", "v7.3", "--", name],
                              capture_output=True, text=True, check=False).stdout
        if said:
            commits[said.split()[0].lstrip("^")] += 1
    if not commits:
        return None
    show = ["git", "-C", tree, "show", "-s", "--abbrev=12", '--format=%h ("%s")', commits.most_common(1)[0][0]]
    return subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()


def recipients(path, source):
    """Returns whom a patch goes to, people first, as get_maintainer.pl says."""
    said = subprocess.run(["perl", "scripts/get_maintainer.pl", "--no-git", "--no-git-fallback", path], cwd=source,
                          capture_output=True, text=True, check=True).stdout.splitlines()
    roles = dict(RECIPIENT.match(line).groups() for line in said)
    people = [one for one, role in roles.items() if re.match("maintainer|supporter", role)]
    others = list(roles)
    return people, [one for one in others if one not in people]


def make(path, private, options):
    """Returns the mail of a patch, to no list if it is private."""
    who = options.who
    text = path.read_text()
    own, diff = fields(text)
    subject, message = re.search(r"^Subject: (.*?)\n\n(.*?)\n---$", text, re.M | re.S).groups()
    tags = [f"Fixes: {own['Fixes']}"] if "Fixes" in own else []
    notes = [f"Reproducer: tests/patches/{own['Test']}, of rdma-rs"]
    if not tags:
        found = options.tree and proposal(options.tree, diff)
        notes.append(f"Confirm, and move above: Fixes: {found}" if found else "Fixes: is still to be found")
    people, others = recipients(path, options.source)
    if private:
        others = ["security@kernel.org"]
        notes.append("A security fix: SECURITY.md of rdma-rs says how it is reported")
    headers = [f"From {'0' * 40} Mon Sep 17 00:00:00 2001", f"From: {who}",
               f"Date: {format_datetime(datetime.now(timezone.utc))}"]
    headers += [f"To: {', '.join(people)}"] if people else []
    headers += [f"Cc: {', '.join(others)}"] if others else []
    stat = subprocess.run(["git", "apply", "--stat"], input=diff, capture_output=True, text=True, check=True).stdout
    return "\n".join([*headers, f"Subject: {subject}", "", message, "", *tags, f"Signed-off-by: {who}", "---", *notes, "",
                      stat, diff])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("who")
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tree")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if not re.fullmatch(r"[^<>@]+ <[^<>@\s]+@[^<>@\s]+\.[^<>@\s]+>", options.who) or "@example." in options.who:
        sys.exit(f"error: --as wants a person, as 'Name <name@host.org>', not '{options.who}'")
    names = [f"{path.parent.name}/{path.name}" for _, paths in ordered() for path in paths]
    for name in options.names:
        if not any(one.startswith(name) for one in names):
            sys.exit(f"error: no patch is called {name}: they are in patches")
    options.out.mkdir(parents=True, exist_ok=True)
    for old in options.out.glob("*.patch"):
        old.unlink()
    number, said = 0, None
    for group, (title, paths) in enumerate(ordered()):
        for path in paths:
            number += 1
            name = f"{number:02}-{path.parent.name}-{path.name}"
            if f"{path.parent.name}/{path.name}".startswith(tuple(options.names) or ""):
                if title != said:
                    print(title)
                    said = title
                (options.out / name).write_text(make(path, group < SECURITY, options))
                print(f"  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
