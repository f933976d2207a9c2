#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Has the log scanner read the logs in tests/logs. Each begins with what it is to say of that:

    # it passes
    # it says TEXT              and fails; "all": each line of the log
    # it tells TEXT             beside, as of a known defect of the kernel, and passes
    # with OLD -> NEW it ...    so, of the log with NEW for OLD
"""

import re
import subprocess
import tempfile
import unittest
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
HEAD = re.compile(r"# (?:with (.+) -> (.+) )?it (?:(passes)|says (.+)|tells (.+))")


def scan(log):
    with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
        file.write(log)
        file.flush()
        return subprocess.run([TOP / "scripts/logs/scan-log", file.name], capture_output=True, text=True, check=False)


class Logs(unittest.TestCase):
    def judge(self, log, passes, text, beside):
        found = scan(log)
        self.assertEqual(found.returncode, 1 if text else 0, found.stdout)
        if passes:
            self.assertEqual(found.stdout + found.stderr, "")
        elif beside:
            self.assertEqual(found.stdout, "")
            self.assertIn(beside, found.stderr)
        elif text == "all":
            lines = [line for line in log.splitlines() if "rdma-rs test:" not in line]
            self.assertEqual(found.stdout.splitlines(), [f"planted # kernel log: {line}" for line in lines])
        else:
            self.assertIn(text, found.stdout)

    def test_each(self):
        logs = sorted((TOP / "tests/logs").glob("*.log"))
        self.assertTrue(logs)
        for path in logs:
            lines = path.read_text().splitlines(keepends=True)
            heads = [line for line in lines if line.startswith("# ")]
            log = "".join(lines[len(heads):])
            self.assertTrue(heads, path)
            for head in heads:
                with self.subTest(f"{path.name}: {head.strip()}"):
                    old, new, *outcome = HEAD.fullmatch(head.strip()).groups()
                    self.assertIn(old or "", log)
                    self.judge(log.replace(old, new) if old else log, *outcome)


if __name__ == "__main__":
    unittest.main()
