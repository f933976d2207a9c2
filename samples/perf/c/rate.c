// SPDX-License-Identifier: GPL-2.0
/*
 * Streams of requests: the callback of each posts it again, until there were enough.
 */

#include "poll.h"
#include "stream.h"

static void perf_rate_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_req *req = container_of(wc->wr_cqe, struct perf_req, cqe);
	struct perf_run *run = cq->cq_context;
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(run, wc);
		return;
	}
	if (!perf_goes_on(run, &req->left))
		return;
	ret = perf_post(run, req, run->opcode);
	if (unlikely(ret))
		perf_fail(run, "request not posted", ret);
}

static int perf_rate_poll_direct(struct perf_run *run)
{
	int n = ib_process_cq_direct(run->a.cq, run->args->depth);

	if (run->b.recvs)
		n += ib_process_cq_direct(run->b.cq, run->b.recvs);
	return n;
}

static int perf_rate_poll_batch(struct perf_run *run)
{
	int m, n = perf_poll_batch(run->a.cq, perf_rate_done, NULL);

	if (n < 0 || !run->b.recvs)
		return n;
	m = perf_poll_batch(run->b.cq, perf_stream_recv_done, NULL);
	return m < 0 ? m : n + m;
}

int perf_rate_go(struct perf_run *run, u32 ops)
{
	struct perf_stream *stream = run->priv;
	u32 total = DIV_ROUND_UP_ULL(ops, run->signal);
	u32 i, nr = min(total, stream->nr_reqs);
	int ret;

	/* Before the first one is posted, as handlers count from then on. */
	run->left = nr;
	for (i = 0; i < nr; i++)
		stream->reqs[i].left = perf_share(total, i, nr);
	for (i = 0; i < nr; i++) {
		ret = perf_post(run, &stream->reqs[i], run->opcode);
		if (ret)
			return ret;
	}
	if (run->args->context == PERF_BATCH)
		ret = perf_wait(run, perf_rate_poll_batch);
	else
		ret = perf_wait(run, perf_rate_poll_direct);
	if (ret)
		return ret;
	run->result->ops = (u64)total * run->signal;
	run->result->posts = run->result->ops;
	run->result->completions = total;
	return 0;
}

int perf_rate_init(struct perf_run *run)
{
	return perf_stream_init(run, perf_rate_done);
}

const struct perf_load perf_send_rate = {
	.name = "send_rate",
	.opcode = IB_WR_SEND,
	.pair = true,
	.max_size = SZ_1M,
	.shape = perf_stream_shape,
	.init = perf_rate_init,
	.go = perf_rate_go,
	.exit = perf_stream_exit,
};

const struct perf_load perf_write_rate = {
	.name = "write_rate",
	.opcode = IB_WR_RDMA_WRITE,
	.pair = true,
	.max_size = SZ_1M,
	.shape = perf_stream_shape,
	.init = perf_rate_init,
	.go = perf_rate_go,
	.exit = perf_stream_exit,
};

const struct perf_load perf_read_rate = {
	.name = "read_rate",
	.opcode = IB_WR_RDMA_READ,
	.pair = true,
	.max_size = SZ_1M,
	.shape = perf_stream_shape,
	.init = perf_rate_init,
	.go = perf_rate_go,
	.exit = perf_stream_exit,
};
