#!/usr/bin/python3 -B
# SPDX-License-Identifier: GPL-2.0
"""Tests of what the benchmark makes of its runs."""

import sys
import unittest
from itertools import product
from math import comb
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from bench_rows import counting, interval, key, rows, slower

STREAM = {"clock": "wall", "device": "rxe0", "load": "send_rate", "context": "softirq", "size": 64, "depth": 4}
VOID = {**STREAM, "device": "null0", "load": "void_rate"}
EQUAL = (0.9, 1.1, 0.95, 1.05, 1.2, 0.8, 1.01)
SLOW = (1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.01)


def runs(ratios, base, **more):
    """Rounds of Rust by C."""
    for n, ratio in enumerate(ratios):
        for twin, ns in (("rust", 1000 * ratio), ("c", 1000)):
            result = {"ops": 1, "ns": ns, "post_ns": 0, "poll_ns": 0, "setup_ns": 0, "teardown_ns": 0,
                      "posts": 1, "completions": 1}
            yield {**base, "round": n, "twin": twin, **more, "result": result}


class Rows(unittest.TestCase):
    def test_equal_things_seldom_look_slower(self):
        for n, slow in ((5, 1), (7, 1), (15, sum(comb(15, k) for k in range(4)))):
            # Each round is above or below by another distance.
            seen = sum(interval([s * (i + 1) for i, s in enumerate(signs)])[0] > 0
                       for signs in product((-1, 1), repeat=n))
            self.assertEqual(seen, slow)
            self.assertLessEqual(seen / 2**n, 0.05)

    def test_what_looks_slower_is_found(self):
        other = {**STREAM, "depth": 16}
        found = slower([*runs(SLOW, STREAM), *runs(EQUAL, other), *runs([1 / r for r in SLOW], VOID)])
        self.assertEqual(found, {key(STREAM)})

    def test_one_figure_of_a_run_is_enough(self):
        lines = list(runs(EQUAL, VOID))
        for line in lines:
            slow = line["twin"] == "rust"
            line["result"].update(post_ns=1000, poll_ns=1000 + 100 * slow)
        self.assertEqual(slower(lines), {key(VOID)})

    def test_fresh_rounds_alone_count(self):
        first = [*runs(SLOW, STREAM), *runs(EQUAL, VOID)]
        for ratios, slow in ((EQUAL[::-1], False), (SLOW[::-1] + SLOW, True)):
            fresh = list(runs(ratios, STREAM, again=True))
            found = {row["load"]: row for row in rows(first + fresh)}
            row = found["send_rate"]
            self.assertTrue(row["again"])
            self.assertEqual(row["rounds"], len(ratios))
            self.assertEqual(row["low"] > 1, slow)
            self.assertEqual(row, next(rows(fresh)))
            self.assertFalse(found["void_rate"]["again"])
            self.assertEqual(found["void_rate"]["rounds"], len(EQUAL))
            self.assertEqual(counting(first + fresh), fresh + first[2 * len(SLOW):])


if __name__ == "__main__":
    unittest.main()
