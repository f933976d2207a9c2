#!/usr/bin/python3 -B
# SPDX-License-Identifier: GPL-2.0
"""Tests of what the benchmark makes of its runs."""

import sys
import tempfile
import unittest
from itertools import product
from math import comb
from pathlib import Path
from unittest import mock

TOP = Path(__file__).resolve().parents[1]
sys.path += [str(TOP / "scripts/benchmark"), str(TOP / "tests/guest")]
import bench_bytes
import bench_nvme
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


    def test_arrays_have_names_of_their_own(self):
        for load, names in (("void_rate", {"post", "complete"}), ("pool_rate", {"pool post", "pool complete"})):
            lines = list(runs(EQUAL, {**VOID, "load": load}))
            for line in lines:
                line["result"].update(post_ns=1, poll_ns=1)
            self.assertEqual({row["load"] for row in rows(lines)}, {*names, load})


class Bytes(unittest.TestCase):
    def test_what_is_not_freed_counts(self):
        made = (" perf-1 [000] ..... 1.0: kmalloc: call_site=f+0x1/0x2 ptr=00000000000000a{} bytes_req=56"
                " bytes_alloc=64 gfp_flags=GFP_KERNEL node=-1 accounted=false")
        freed = " perf-1 [000] ..... 1.0: kfree: call_site=g+0x1/0x2 ptr=00000000000000a{}"
        area = " perf-1 [000] ..... 1.0: alloc_vmap_area: va_start: 4096 size=8192 align=1 vstart=0x0 vend=0x1 failed={}"
        lines = [made.format(1), made.format(2), freed.format(1), freed.format(3), area.format(0)]
        self.assertEqual(bench_bytes.live(lines), 56 + 8192)
        self.assertEqual(bench_bytes.live([area.format(1)]), 0)
        own = made.format(4).replace("call_site=f", "call_site=alloc_empty_sheaf")
        freed_area = " perf-1 [000] ..... 1.0: free_vmap_area_noflush: va_start=0x1000 nr_lazy=1 nr_lazy_max=9"
        self.assertEqual(bench_bytes.live([*lines, own, freed_area]), 56)


def turns(figures, pairs=("c:c", "c:c"), **more):
    """Jobs of NVMe over RDMA: each round's instructions an I/O by the first pair and by the second."""
    for n, costs in enumerate(figures):
        for place, (pair, cost) in enumerate(zip(pairs, costs)):
            yield {"load": "nvme read", "size": 512, "mtu": 1500, "depth": 16, "round": n, "place": place, "pair": pair,
                   "result": {"ops": 10_000, "ns": 10_000 * cost, "p99": 2 * cost}, **more}


class Nvme(unittest.TestCase):
    def test_equal_modules_differ_by_their_spread(self):
        found, = bench_nvme.rows(turns([(100_000, 100_400), (100_200, 100_600)]))
        self.assertEqual((found["a"], found["b"]), (100_100, 100_500))
        self.assertAlmostEqual(found["spread"], 600 / 100_300)
        self.assertLessEqual(abs(found["ratio"] - 1), found["spread"])
        self.assertAlmostEqual(found["p99_spread"], found["spread"])

    def test_each_pair_is_compared_with_the_first_one(self):
        found = list(bench_nvme.rows(turns([(100_000, 110_000, 103_000)], ("c:c", "c:rust", "rust:c"))))
        self.assertEqual([(row["pairs"], row["ratio"], row["rounds"]) for row in found],
                         [(["c:c", "c:rust"], 1.1, 1), (["c:c", "rust:c"], 1.03, 1)])

    def test_the_spread_of_a_third_pair_is_no_row_s(self):
        figures = [(100_000, 110_000, 90_000), (100_000, 110_000, 95_000)]
        found = list(bench_nvme.rows(turns(figures, ("c:c", "c:rust", "rust:c"))))
        self.assertEqual([row["spread"] for row in found], [0, 5_000 / 92_500])

    def test_what_two_pairs_differ_by_is_no_spread(self):
        found, = bench_nvme.rows(turns([(100_000, 110_000), (100_100, 110_000)], ("c:c", "c:rust")))
        self.assertAlmostEqual(found["spread"], 100 / 100_050)
        self.assertAlmostEqual(found["ratio"], 110_000 / 100_050)

    def test_what_costs_more_than_equal_modules_differ_is_above_its_bound(self):
        for cost, holds in ((100_900, True), (101_200, False)):
            runs = turns([(100_000, cost)] * 2, ("c:c", "c:rust"))
            with mock.patch.object(bench_nvme, "limits", lambda: {"nvme read, 512 bytes, MTU 1500, depth 16": (1, 0.01)}):
                (_, _, _, _, held), = bench_nvme.bounded(bench_nvme.rows(runs))
            self.assertEqual(held, holds)

    def test_the_guard_has_a_bound_of_its_own(self):
        found, = bench_nvme.rows(turns([(100_000, 100_400)], ("c:c", "c:rust")))
        name = "guard, c:rust: nvme read, 512 bytes, MTU 1500, depth 16"
        self.assertEqual(bench_nvme.guarded(found), name)
        for most, holds in ((1.003, True), (1.001, False)):
            with mock.patch.object(bench_nvme, "limits", lambda: {name: (most, 0.002)}):
                self.assertEqual(bench_nvme.held(name, found["ratio"])[2], holds)

    def test_bounds_that_are_set_stay(self):
        with tempfile.TemporaryDirectory() as folder:
            bounds = Path(folder, "bounds.tsv")
            bounds.write_text("# Head.\nnvme read, 512 bytes, MTU 1500, depth 16\t1.0000\t0.5000\nguard\t1.0030\t0.0020\n")
            with mock.patch.object(bench_nvme, "BOUNDS", bounds):
                bench_nvme.record(list(bench_nvme.rows(turns([(100_000, 100_000)]))))
                found = bench_nvme.limits()
        self.assertEqual(found["guard"], (1.003, 0.002))
        self.assertLess(found["nvme read, 512 bytes, MTU 1500, depth 16"][1], 0.5)

    def test_bounds_are_of_c_alone(self):
        with self.assertRaises(SystemExit):
            bench_nvme.record(list(bench_nvme.rows(turns([(1, 1)], ("c:c", "c:rust")))))

    def test_a_queue_is_the_difference_of_connections(self):
        lines = []
        for pair, rest, queue in (("c:c", 1000, 400), ("c:rust", 1500, 500)):
            lines += [{"pair": pair, "round": 0, "queues": queues,
                       "result": {"bytes": rest + queues * queue, "connect": 70 + 30 * queues, "disconnect": 9 + queues}}
                      for queues in (1, 3)]
        found = {(row["what"], row["pair"]): row for row in bench_nvme.connections(lines)}
        queue = found["memory, an I/O queue", "c:rust"]
        self.assertEqual((queue["figure"], queue["by_c"]), (500, 1.25))
        self.assertEqual(found["memory, all else", "c:rust"]["figure"], 1500)
        self.assertEqual(found["connecting, all else", "c:c"]["figure"], 70)
        self.assertEqual(bench_nvme.connection_cells(queue)[-1], "holds")
        self.assertEqual(bench_nvme.connection_cells({**queue, "by_c": 1.26})[-1], "DOES NOT HOLD")


if __name__ == "__main__":
    unittest.main()
