# SPDX-License-Identifier: GPL-2.0
"""Part of scripts/upstream/intree.py: the pages of Documentation as they are in the kernel's tree.

What is in the tree has the name that it has there, and a patch that is sent on its own its subject. What
points to something that stays here is in parentheses, which are left out, or is a fault of the page. Comments of sources name pages only."""

import re
import textwrap
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
PATH = r"(?:drivers|packaging|patches|rust|samples|scripts|tests|upstream)/[\w/.*-]*[\w*]"
WIDTH = 100


class Pages:
    """Has what is in the tree: files by their names here. `place` maps a name to that in the tree."""

    def __init__(self, files, place):
        self.files, self.place = files, place

    def path(self, match):
        """Returns how the tree calls a file or a folder, or leaves the name."""
        name, quotes = match["name"], match["quotes"]
        if patch := re.fullmatch(r"patches/\w+/\d{4}", name):
            head = next(TOP.glob(f"{patch[0]}-*.patch")).read_text().split("\nSubject: [PATCH] ")[1]
            return '"' + head.split("\n\n")[0].replace("\n", "") + '"'
        if name in self.files:
            return quotes + self.place(name) + quotes
        if any(file.startswith(name + "/") for file in self.files):
            return quotes + self.place(name + "/").rstrip("/") + quotes
        return match[0]

    def stays(self, text):
        """Returns what a text points to that stays here."""
        found = [f"{name}.rst" for name in re.findall(r"(?<![\w/.-])(?:Documentation/)?([\w-]+)\.rst\b", text)
                 if (TOP / f"Documentation/{name}.rst").exists() and f"Documentation/{name}.rst" not in self.files]
        found += [name for name in re.findall(rf"(?<![\w/.]){PATH}", text)
                  if (TOP / name).exists() or "*" in name]
        return found + re.findall(r"``make [\w-]+|this repository|rdma_perf\w*", text)

    def parentheses(self, match):
        """Leaves out what points to something that stays here."""
        kept = [part for part in re.split(r";\s+", match[2]) if not self.stays(part)]
        if len(kept) == len(re.split(r";\s+", match[2])):
            return match[0]
        return f"{match[1]}({'; '.join(kept)})" if kept else ""

    def paragraph(self, lines):
        """Returns the lines of a paragraph, filled again if they changed."""
        text = "\n".join(lines)
        new = re.sub(rf"(?P<quotes>(?:``)?)(?<![\w/.])(?P<name>{PATH})(?P=quotes)", self.path, text)
        new = re.sub(r"(\s*)\(((?:[^()]|\(\))*)\)", self.parentheses, new)
        if new == text:
            return lines
        indents = [re.match(r"\s*(?:- |:\w+: )?", lines[0])[0], re.match(r"\s*", lines[-1])[0]]
        if len(lines) == 1:
            indents[1] = re.match(r"\s*", indents[0])[0] + ("  " if indents[0].endswith("- ") else "")
        indent = max(len(i.expandtabs(8)) - len(i) for i in indents)
        return textwrap.wrap(" ".join(new[len(indents[0]):].split()), WIDTH - indent, initial_indent=indents[0],
                             subsequent_indent=indents[1], break_long_words=False, break_on_hyphens=False)

    @cache
    def page(self, text):
        """Returns a page as it is in the tree, and what it points to that stays here."""
        result, lines = [], []
        for line in [*text.rstrip("\n").split("\n"), ""]:
            indent = re.match(r"\s*", line)[0]
            starts = not line.strip() or re.match(r"\s*(- |:\w+: |=)", line)
            if lines and (starts or indent != re.match(r"\s*", lines[-1])[0] and (
                    len(lines) > 1 or not re.match(r"\s*(- |:\w+: )", lines[0]))):
                result += self.paragraph(lines)
                lines = []
            if line.strip():
                lines.append(line)
            else:
                result.append(line)
        text = "\n".join(result)
        return text, self.stays(text)

    @cache
    def source(self, text):
        """Returns a source that names pages by the place in the tree, and what its comments point to that stays
        here, or has another name there."""
        for name in set(re.findall(r"\bDocumentation/[\w-]+\.rst", text)) & self.files:
            text = text.replace(name, self.place(name))
        comments = " ".join(re.findall(r"(?:// |//[/!]|/\*| \* ).*", text))
        return text, self.stays(comments)
