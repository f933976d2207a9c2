#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Makes the links of the crate's pages lead somewhere, and looks whether each link leads somewhere.

    scripts/checks/doc_links.py DIR SOURCE

Links to the kernel's source (srctree/) lead to that of kernel.org, if SOURCE, a kernel's source, has the file. Each
page of the crate begins with a link to the other pages. A link within DIR must have its file, and the place in it.
"""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

TREE = "https://git.kernel.org/pub/scm/linux/kernel/git/torvalds/linux.git/tree/"


class Page(HTMLParser):
    """The links of a page, and the places in it that others may link to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.places = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def lead(root, source):
    """Changes the links to the kernel's source, and yields those that it has not."""
    make = dict(re.findall(r"^(VERSION|PATCHLEVEL) = (\d+)$", (source / "Makefile").read_text(), re.M))
    tag = f"v{make['VERSION']}.{make['PATCHLEVEL']}"
    # The pages of rustdoc's own, as of its settings, link to one of all crates.
    (root / "rust/index.html").write_text('<!DOCTYPE html><meta http-equiv="refresh" content="0; url=rdma/index.html">'
                                          '<title>rdma</title><body><a href="rdma/index.html">rdma</a></body>')
    for path in root.glob("rust/**/*.html"):
        text = path.read_text()
        for name in set(re.findall(r'href="srctree/([^"#]+)', text)):
            if not (source / name).exists():
                yield f"{path.relative_to(root)}: {name} is not in the kernel's source"
        text = re.sub(r'href="srctree/([^"#]+)', rf'href="{TREE}\1?h={tag}', text)
        back = os.path.relpath(root / "index.html", path.parent)
        text = re.sub(r'(<section id="main-content"[^>]*>)', rf'\1<p><a href="{back}">rdma-rs: all guides</a></p>', text, count=1)
        path.write_text(text)


def dead(root):
    """Yields the links that lead nowhere."""
    pages = {path: Page(path) for path in root.rglob("*.html")}
    for path, page in pages.items():
        for link in sorted(set(page.links)):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            to = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            place = parts.fragment
            # rustdoc asks for a list of the trait's implementations in other crates, and makes none if there is none.
            if "/trait.impl/" in parts.path:
                continue
            if not to.is_file():
                yield f"{path.relative_to(root)}: {link} leads nowhere"
            # A script numbers the lines of a source, and rustdoc names methods of what a type dereferences to.
            elif place and to in pages and not {place, unquote(place)} & pages[to].places and \
                    not re.match(r"[\d-]+$|(ty)?method\.", place):
                yield f"{path.relative_to(root)}: {link} leads to no place of that page"


def main():
    root, source = map(Path, sys.argv[1:])
    bad = [*lead(root, source), *dead(root)]
    print("\n".join(bad))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
