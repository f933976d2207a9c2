// SPDX-License-Identifier: GPL-2.0
/*
 * Waiting for single completions, outside of what is measured.
 */

#include "poll.h"

void perf_mark_init(struct perf_mark *mark, int left,
		    void (*done)(struct ib_cq *cq, struct ib_wc *wc))
{
	mark->cqe.done = done;
	atomic_set(&mark->left, left);
	init_completion(&mark->done);
}

void perf_mark_hit(struct perf_mark *mark)
{
	if (atomic_dec_and_test(&mark->left))
		complete(&mark->done);
}

static void perf_process(struct perf_run *run)
{
	ib_process_cq_direct(run->a.cq, PERF_BATCH_SIZE);
	if (run->b.cq)
		ib_process_cq_direct(run->b.cq, PERF_BATCH_SIZE);
}

int perf_mark_wait(struct perf_run *run, struct perf_mark *mark, unsigned long timeout)
{
	unsigned long since = jiffies;

	if (!perf_caller_polls(run))
		return wait_for_completion_timeout(&mark->done, timeout) ? 0 : -ETIME;
	while (!try_wait_for_completion(&mark->done)) {
		if (jiffies - since > timeout)
			return -ETIME;
		perf_process(run);
		fsleep(20);
	}
	return 0;
}
