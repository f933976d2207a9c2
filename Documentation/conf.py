# SPDX-License-Identifier: GPL-2.0
"""How Sphinx makes the pages: see make doc."""

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

TOP = Path(__file__).resolve().parent.parent

project = "rdma-rs"
copyright = "2026, rdma-rs authors, GPL-2.0"        # pylint: disable=redefined-builtin
# That of the crate, as scripts/packaging/version has it.
version = re.search(r'macro_rules! version.*?"(.*?)"', (TOP / "rust/kernel/rdma/rdma.rs").read_text(), re.S)[1]
# With the date of the release, or that there was none.
release = re.search(rf"(?m)^## ({re.escape(version)}.*)$", (TOP / "CHANGELOG.md").read_text())[1]
exclude_patterns = []
html_title = f"rdma-rs {version}: RDMA in Rust in the Linux kernel"
html_theme = "alabaster"
html_theme_options = {
    "description": "RDMA in Rust in the Linux kernel",
    "extra_nav_links": {"Crate documentation (rustdoc)": "rust/rdma/index.html"},
    "page_width": "1180px",
    "body_max_width": "940px",
}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
highlight_language = "none"

PAGE = re.compile(r"\b([a-z0-9-]+)\.rst\b")


def link(text, docname):
    """Yields a text with the names of pages as references to them, as the kernel's automarkup does."""
    at = 0
    for match in PAGE.finditer(text):
        if not Path(__file__).with_name(match[0]).exists():
            continue
        yield nodes.Text(text[at:match.start()])
        reference = addnodes.pending_xref("", refdomain="std", reftype="doc", reftarget=f"/{match[1]}",
                                          refdoc=docname, refexplicit=True, refwarn=True)
        reference += nodes.inline(match[0], match[0])
        yield reference
        at = match.end()
    yield nodes.Text(text[at:])


def link_pages(app, doctree):
    for node in list(doctree.findall(nodes.Text)):
        if PAGE.search(node) and not isinstance(node.parent, (nodes.literal, nodes.literal_block)):
            node.parent.replace(node, list(link(node.astext(), app.env.docname)))


def look_at_rows(_, doctree):
    """Warns of a row that has its first cell alone: in a simple table the second line of a cell is a row of its own."""
    for row in doctree.findall(nodes.row):
        first, *others = (cell.astext() for cell in row)
        if first and others and not any(others) and not isinstance(row.parent, nodes.thead):
            logging.getLogger(__name__).warning("a row has nothing but %r", first, location=row)


def setup(app):
    app.connect("doctree-read", link_pages)
    app.connect("doctree-read", look_at_rows)
