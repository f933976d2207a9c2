/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Waiting for a run to end, and polling meanwhile if the caller has to.
 */

#ifndef PERF_POLL_H
#define PERF_POLL_H

#include <linux/cpumask.h>
#include <linux/delay.h>
#include <linux/jiffies.h>
#include <linux/processor.h>
#include <linux/sched.h>

#include "perf.h"

#define PERF_BATCH_SIZE	16

/*
 * The number of polls without a completion before sleeping. The other end may need the only CPU;
 * where there are more, the sleep would be what is measured.
 */
#define PERF_SPINS		512
#define PERF_SPINS_ALONE	64

typedef void (*perf_done_fn)(struct ib_cq *cq, struct ib_wc *wc);

/*
 * Polls once into an array. Most completions come to one of two callbacks, which
 * are known here and called directly; the others are called as the core does.
 */
static __always_inline int perf_poll_batch(struct ib_cq *cq, perf_done_fn first,
					   perf_done_fn second)
{
	struct ib_wc wcs[PERF_BATCH_SIZE];
	int i, n = ib_poll_cq(cq, PERF_BATCH_SIZE, wcs);

	for (i = 0; i < n; i++) {
		struct ib_wc *wc = &wcs[i];
		perf_done_fn done = wc->wr_cqe->done;

		if (done == first)
			first(cq, wc);
		else if (done == second)
			second(cq, wc);
		else
			done(cq, wc);
	}
	return n;
}

/* Polls until the phase has ended. @poll returns how many completions there were. */
static __always_inline int perf_wait_polling(struct perf_run *run,
					     int (*poll)(struct perf_run *run))
{
	unsigned int spins = nr_cpu_ids > 1 ? PERF_SPINS : PERF_SPINS_ALONE;
	unsigned long since = jiffies;
	unsigned int idle = 0;
	int n;

	while (!try_wait_for_completion(&run->finished)) {
		cond_resched();
		n = poll(run);
		if (n < 0)
			return n;
		if (n) {
			idle = 0;
			continue;
		}
		if (!idle++)
			since = jiffies;
		if (idle <= spins) {
			cpu_relax();
			continue;
		}
		fsleep(20);
		if (time_after(jiffies, since + PERF_STUCK))
			return -ETIME;
	}
	return run->error;
}

/* Waits for a phase that others poll for. */
static inline int perf_wait_sleeping(struct perf_run *run)
{
	u32 before;

	do {
		before = READ_ONCE(run->progress);
		if (wait_for_completion_timeout(&run->finished, PERF_STUCK))
			return run->error;
	} while (READ_ONCE(run->progress) != before);
	return -ETIME;
}

static __always_inline int perf_wait(struct perf_run *run, int (*poll)(struct perf_run *run))
{
	return perf_caller_polls(run) ? perf_wait_polling(run, poll) : perf_wait_sleeping(run);
}

#endif
