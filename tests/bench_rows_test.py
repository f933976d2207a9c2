#!/usr/bin/python3 -B
# SPDX-License-Identifier: GPL-2.0
"""Tests of what the benchmark makes of its runs."""

import os
import sys
import tempfile
import unittest
from contextlib import contextmanager
from itertools import product
from math import comb
from pathlib import Path
from unittest import mock

TOP = Path(__file__).resolve().parents[1]
sys.path += [str(TOP / "scripts/benchmark"), str(TOP / "tests/guest")]
# The kernel's name, which what runs in a VM has of it.
os.environ["flavour"] = "stock"
import bench_bytes
import bench_nvme
import nvme_bench
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


ROW = "nvme read, 512 bytes, MTU 1500, depth 16"


@contextmanager
def tables(bounds, spreads):
    """Other bounds, and other spreads of equal modules, than those of the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {"BOUNDS": Path(folder, "bounds.tsv"), "SPREADS": Path(folder, "spread.tsv")}
        for path, lines in zip(paths.values(), (bounds, spreads)):
            path.write_text("# Head.\n" + lines)
        with mock.patch.multiple(bench_nvme, **paths):
            yield


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

    def test_by_the_wall_clock_each_round_has_a_ratio_of_its_own(self):
        # The machine is twice as slow in one of the rounds.
        figures = [(100, 110), (200, 210), (100, 90), (100, 105), (100, 104)]
        found, = bench_nvme.wall(turns(figures, ("c:c", "rust:rust")))
        self.assertEqual((found["a"], found["b"], found["rounds"]), (100, 105, 5))
        self.assertEqual([found[key] for key in ("ratio", "low", "high")], [1.05, 0.9, 1.1])
        self.assertEqual([found[f"p99_{key}"] for key in ("a", "b", "ratio")], [200, 210, 1.05])
        self.assertEqual(len(list(bench_nvme.wall_summary([found]))), 1)
        worse, = bench_nvme.wall(turns([(100, 101)] * 5, ("c:c", "rust:rust")))
        self.assertEqual(len(list(bench_nvme.wall_summary([worse]))), 3)

    def test_every_other_round_goes_backwards(self):
        turns = nvme_bench.order(("c:c", "c:rust", "rust:c"), 2)
        self.assertEqual([place for n, place, _ in turns if n == 0], [0, 1, 2])
        self.assertEqual([(place, pair) for n, place, pair in turns if n == 1],
                         [(2, "rust:c"), (1, "c:rust"), (0, "c:c")])

    def test_the_spread_of_a_third_pair_is_no_row_s(self):
        figures = [(100_000, 110_000, 90_000), (100_000, 110_000, 95_000)]
        found = list(bench_nvme.rows(turns(figures, ("c:c", "c:rust", "rust:c"))))
        self.assertEqual([row["spread"] for row in found], [0, 5_000 / 92_500])

    def test_what_two_pairs_differ_by_is_no_spread(self):
        found, = bench_nvme.rows(turns([(100_000, 110_000), (100_100, 110_000)], ("c:c", "c:rust")))
        self.assertAlmostEqual(found["spread"], 100 / 100_050)
        self.assertAlmostEqual(found["ratio"], 110_000 / 100_050)

    def test_a_ratio_is_judged_by_its_goal_and_by_its_bound(self):
        for cost, met, holds in ((100_500, "met", True), (100_900, "in spread", True), (101_400, "MISSED", True),
                                 (101_600, "MISSED", False)):
            with tables("c:rust, 512 bytes\t1.0050\t1.0100\n", f"{ROW}\t0.0050\t0\n"):
                found, = bench_nvme.judged(bench_nvme.rows(turns([(100_000, cost)] * 2, ("c:c", "c:rust"))))
            self.assertEqual((found["met"], found["holds"]), (met, holds))
            self.assertAlmostEqual(found["at_most"], 1.015)
            self.assertEqual(bench_nvme.exceeded([found]), not holds)
            self.assertEqual(bench_nvme.cells(found)[8:12], ["1.0050", met, "1.0150", "holds" if holds else "EXCEEDED"])

    def test_a_bound_of_one_depth_comes_first(self):
        with tables("c:rust, 512 bytes\t-\t2\nc:rust, 512 bytes, depth 16\t1\t1\n", f"{ROW}\t0\t0.02\n"):
            found, = bench_nvme.judged(bench_nvme.rows(turns([(100_000, 110_000)], ("c:c", "c:rust"))))
        self.assertEqual((found["goal"], found["met"], found["holds"]), (1, "MISSED", False))

    def test_what_has_no_bound_is_not_judged(self):
        with tables("c:rust, 4096 bytes\t1\t1\n", f"{ROW}\t0\t0.02\n"):
            found, = bench_nvme.judged(bench_nvme.rows(turns([(100_000, 110_000)], ("c:c", "c:rust"))))
        self.assertEqual((found["goal"], found["met"], found["at_most"], found["holds"]), (None,) * 4)
        self.assertFalse(bench_nvme.exceeded([found]))

    def test_a_short_job_is_as_coarse_as_the_clock(self):
        with tables("c:rust, 512 bytes\t1\t1\n", f"{ROW}\t0.0001\t0\n"):
            found, = bench_nvme.judged(bench_nvme.rows(turns([(100_000, 100_050)], ("c:c", "c:rust"))))
        self.assertEqual(found["grain"], 0.001)
        self.assertEqual((found["met"], found["holds"]), ("in spread", True))

    def test_the_p99_is_judged_by_its_own_spread(self):
        for ratio, met in ((1, "met"), (1.01, "in spread"), (1.03, "MISSED")):
            lines = list(turns([(100_000, 100_000)], ("c:c", "c:rust")))
            lines[1]["result"]["p99"] *= ratio
            with tables("", f"{ROW}\t0\t0.02\n"):
                found, = bench_nvme.judged(bench_nvme.rows(lines))
            self.assertEqual(found["p99_met"], met)

    def test_the_summary_names_what_is_missed_and_exceeded(self):
        row = {"what": "memory", "pairs": ["c:c", "c:rust"], "ratio": 1.3, "goal": 1.1, "at_most": 1.2}
        said = list(bench_nvme.summary([{**row, "met": "MISSED", "holds": False}, {**row, "met": "met", "holds": True},
                                        {**row, "met": None, "holds": None, "p99_met": "in spread"}]))
        self.assertEqual(said, ["Goals: 1 of 3 are met, 1 missed by no more than equal modules differ, 1 MISSED",
                                "  MISSED: memory, c:rust: 1.3000, goal 1.1000",
                                "Bounds: 1 of 2 hold, 1 EXCEEDED", "  EXCEEDED: memory, c:rust: 1.3000, at most 1.2000"])

    def test_the_guard_has_a_bound_of_its_own(self):
        found, = bench_nvme.rows(turns([(100_000, 100_400)], ("c:c", "c:rust")))
        for most, holds in ((1.003, True), (1.001, False)):
            with tables(f"guard, c:rust\t-\t{most}\nc:rust, 512 bytes\t-\t2\n", "guard\t0.0020\t-\n"):
                self.assertEqual(bench_nvme.guarded(found)["holds"], holds)

    def test_the_spread_of_what_was_not_counted_stays(self):
        with tables("", f"{ROW}\t0.5000\t0.5000\nguard\t0.0020\t-\n"):
            bench_nvme.record(list(bench_nvme.rows(turns([(100_000, 100_000)]))))
            found = bench_nvme.table(bench_nvme.SPREADS)
        self.assertEqual(found["guard"], ["0.0020", "-"])
        self.assertEqual(found[ROW], ["0.0010", "0.0160"])

    def test_spreads_are_of_c_alone(self):
        with self.assertRaises(SystemExit):
            bench_nvme.record(list(bench_nvme.rows(turns([(1, 1)], ("c:c", "c:rust")))))

    def test_a_queue_is_the_difference_of_connections(self):
        lines = []
        for place, (pair, rest, queue) in enumerate((("c:c", 1000, 400), ("c:rust", 1500, 500))):
            lines += [{"pair": pair, "place": place, "round": 0, "queues": queues,
                       "result": {"bytes": rest + queues * queue, "connect": 70 + 30 * queues, "disconnect": queues}}
                      for queues in (1, 3)]
        for most, said in ((1.25, "holds"), (1.24, "EXCEEDED")):
            with tables(f"memory, an I/O queue, c:rust\t1.1000\t{most}\n", "memory, an I/O queue\t0.0010\t-\n"):
                found = {row["what"]: row for row in bench_nvme.connections(lines)}
            queue = found["memory, an I/O queue"]
            self.assertEqual(queue["pairs"], ["c:c", "c:rust"])
            self.assertEqual((queue["a"], queue["b"], queue["ratio"]), (400, 500, 1.25))
            self.assertEqual(bench_nvme.other_cells(queue)[-3:], ["MISSED", f"{most + 0.001:.4f}", said])
        self.assertEqual(found["memory, a connection"]["b"], 2000)
        self.assertEqual(found["connecting, a connection"]["a"], 100)

    def test_turns_of_c_alone_are_its_spread(self):
        lines = [{"pair": "c:c", "place": place, "round": n, "queues": queues,
                  "result": {"bytes": (100 + place + 2 * n) * queues, "connect": queues, "disconnect": queues}}
                 for place in (0, 1) for n in (0, 1) for queues in (1, 3)]
        row = next(row for row in bench_nvme.connections(lines) if row["what"] == "memory, an I/O queue")
        self.assertEqual((row["rounds"], row["spread"]), (2, 3 / 101.5))

    def test_every_bound_is_of_what_is_counted(self):
        pairs = ("c:c", "c:rust", "rust:c", "rust:rust", *bench_nvme.ONE_END, "rust+:rust+")
        loads = {f"{pair}, {size} bytes{depth}" for pair in pairs
                 for size in (512, 4096) for depth in ("", ", depth 1", ", depth 16")}
        others = {f"{what}, {thing}" for what, _ in bench_nvme.MEASURED.values()
                  for thing in (bench_nvme.QUEUE, bench_nvme.CONNECTION)} | {"text of the driver", "guard"}
        for name, (goal, most) in bench_nvme.table(bench_nvme.BOUNDS).items():
            self.assertTrue(name in loads or name.rpartition(", ")[0] in others, name)
            self.assertTrue(goal == "-" or float(goal) <= float(most), name)
        self.assertLessEqual(others - {"text of the driver"}, set(bench_nvme.table(bench_nvme.SPREADS)))

    def test_all_plots_are_drawn(self):
        lines = list(turns([(100_000, 100_400, 97_000, 95_000, 90_000)],
                           ("c:c", "rust:rust", *bench_nvme.ONE_END, "rust+:rust+")))
        with tempfile.TemporaryDirectory() as folder:
            bench_nvme.draw(Path(folder), list(bench_nvme.rows(lines + [{**line, "depth": 1} for line in lines])))
            said = {path.name: path.read_text(encoding="utf-8") for path in Path(folder).iterdir()}
        self.assertEqual(set(said), {"bench-nvme.svg", "bench-nvme-fewer.svg", "bench-nvme-one-end.svg"})
        self.assertIn("512 bytes, rust:rust<", said["bench-nvme.svg"])
        self.assertIn("512 bytes, rust+:rust+<", said["bench-nvme-fewer.svg"])
        self.assertIn("512 B, c:rust+<", said["bench-nvme-one-end.svg"])
        # The least tick is below the least ratio, and not zero.
        self.assertIn(">0.95</text>", said["bench-nvme-one-end.svg"])
        self.assertNotIn(">0</text>", said["bench-nvme-one-end.svg"])


if __name__ == "__main__":
    unittest.main()
