// SPDX-License-Identifier: GPL-2.0
/*
 * The device's own share of a stream without a peer: a request that is made once is
 * posted again and again, and its completion is not looked at.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include "poll.h"
#include "stream.h"

static int perf_bare_post(struct perf_stream *stream)
{
	const struct ib_send_wr wr = {
		.wr_cqe = &stream->reqs[0].cqe,
		.sg_list = &stream->reqs[0].buf.sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	u32 i;
	int ret;

	for (i = 0; i < stream->nr_reqs; i++) {
		ret = ib_post_send(stream->reqs[i].qp, &wr, NULL);
		if (unlikely(ret))
			return ret;
	}
	return 0;
}

static int perf_bare_poll(struct perf_run *run, u32 left)
{
	struct ib_wc wcs[PERF_BATCH_SIZE];
	int n;

	for (; left; left -= n) {
		n = ib_poll_cq(run->a.cq, PERF_BATCH_SIZE, wcs);
		if (n <= 0)
			return -EIO;
	}
	return 0;
}

static int perf_bare_go(struct perf_run *run, u32 ops)
{
	struct perf_stream *stream = run->priv;
	u64 i, rounds = DIV_ROUND_UP_ULL(ops, stream->nr_reqs);
	u64 begin, posted, post_ns = 0, poll_ns = 0;
	int ret;

	for (i = 0; i < rounds; i++) {
		begin = ktime_get_ns();
		ret = perf_bare_post(stream);
		if (ret)
			return ret;
		posted = ktime_get_ns();
		ret = perf_bare_poll(run, stream->nr_reqs);
		if (ret)
			return ret;
		run->end = ktime_get_ns();
		post_ns += posted - begin;
		poll_ns += run->end - posted;
		cond_resched();
	}
	run->result->post_ns = post_ns;
	run->result->poll_ns = poll_ns;
	run->result->ops = rounds * stream->nr_reqs;
	run->result->posts = run->result->ops;
	run->result->completions = run->result->ops;
	return 0;
}

/* Only of what is flushed, if anything is. */
static void perf_bare_done(struct ib_cq *cq, struct ib_wc *wc)
{
}

static int perf_bare_init(struct perf_run *run)
{
	if (!perf_caller_polls(run)) {
		pr_err("bare_rate: only where the caller polls\n");
		return -EINVAL;
	}
	return perf_stream_init(run, perf_bare_done);
}

const struct perf_load perf_bare_rate = {
	.name = "bare_rate",
	.opcode = IB_WR_SEND,
	.max_size = SZ_1M,
	.shape = perf_stream_shape,
	.init = perf_bare_init,
	.go = perf_bare_go,
	.exit = perf_stream_exit,
};
