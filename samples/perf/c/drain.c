// SPDX-License-Identifier: GPL-2.0
/*
 * Waiting for single completions, outside of what is measured, and so for the
 * end of all requests.
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
	for (;;) {
		perf_process(run);
		if (try_wait_for_completion(&mark->done))
			return 0;
		if (jiffies - since > timeout)
			return -ETIME;
		fsleep(20);
	}
}

static void perf_drained(struct ib_cq *cq, struct ib_wc *wc)
{
	perf_mark_hit(container_of(wc->wr_cqe, struct perf_mark, cqe));
}

/* As ib_drain_qp(), but without waiting between the queues. */
static void perf_drain_qp(struct ib_qp *qp, struct perf_mark *mark)
{
	struct ib_qp_attr attr = { .qp_state = IB_QPS_ERR };
	struct ib_rdma_wr send = {
		.wr = { .wr_cqe = &mark->cqe, .opcode = IB_WR_RDMA_WRITE },
	};
	struct ib_recv_wr recv = { .wr_cqe = &mark->cqe };
	int ret = ib_modify_qp(qp, &attr, IB_QP_STATE);

	if (WARN_ONCE(ret, "QP not drained: %d\n", ret)) {
		perf_mark_hit(mark);
		perf_mark_hit(mark);
		return;
	}
	ret = ib_post_send(qp, &send.wr, NULL);
	if (WARN_ONCE(ret, "send queue not drained: %d\n", ret))
		perf_mark_hit(mark);
	ret = ib_post_recv(qp, &recv, NULL);
	if (WARN_ONCE(ret, "receive queue not drained: %d\n", ret))
		perf_mark_hit(mark);
}

/* Has all requests of a QP completed. */
void perf_qp_drain(struct perf_run *run, struct ib_qp *qp)
{
	struct perf_mark mark;

	perf_mark_init(&mark, 2, perf_drained);
	perf_drain_qp(qp, &mark);
	perf_mark_wait(run, &mark, MAX_SCHEDULE_TIMEOUT);
}

/*
 * Has all requests of all QPs completed: nothing is posted and no handler of
 * theirs runs from here on.
 */
void perf_link_drain(struct perf_run *run)
{
	u32 i, a = run->nr_qps, b = run->args->load->pair ? run->nr_qps : 0;

	if (!run->linked)
		return;
	WRITE_ONCE(run->draining, true);
	perf_mark_init(&run->drained, 2 * (a + b), perf_drained);
	for (i = 0; i < a; i++)
		perf_drain_qp(run->a.qps[i], &run->drained);
	for (i = 0; i < b; i++)
		perf_drain_qp(run->b.qps[i], &run->drained);
	perf_mark_wait(run, &run->drained, MAX_SCHEDULE_TIMEOUT);
}
