// SPDX-License-Identifier: GPL-2.0
/*
 * A stream without a peer, on the null device, where each request completes as it is
 * posted: what is left is what the ULP and the core cost. Where the caller
 * polls, posting and processing take turns, so that each is timed.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include "poll.h"
#include "stream.h"

static void perf_void_done(struct ib_cq *cq, struct ib_wc *wc)
{
	if (unlikely(wc->status != IB_WC_SUCCESS))
		perf_failed_wc(cq->cq_context, wc);
}

static int perf_void_post(struct perf_run *run, struct perf_stream *stream)
{
	u32 i;
	int ret;

	for (i = 0; i < stream->nr_reqs; i++) {
		ret = perf_post(run, &stream->reqs[i], IB_WR_SEND);
		if (unlikely(ret))
			return ret;
	}
	return 0;
}

/* All requests have completed when they are posted, so there is no waiting. */
static int perf_void_direct(struct perf_run *run, u32 left)
{
	int n;

	for (; left; left -= n) {
		n = ib_process_cq_direct(run->a.cq, left);
		if (n <= 0)
			return -EIO;
	}
	return READ_ONCE(run->error);
}

static int perf_void_batch(struct perf_run *run, u32 left)
{
	int n;

	for (; left; left -= n) {
		n = perf_poll_batch(run->a.cq, perf_void_done, NULL);
		if (n <= 0)
			return -EIO;
	}
	return READ_ONCE(run->error);
}

static int perf_void_alternate(struct perf_run *run, u32 ops)
{
	struct perf_stream *stream = run->priv;
	u64 begin, posted, post_ns = 0, poll_ns = 0;
	u64 i, rounds = DIV_ROUND_UP_ULL(ops, stream->nr_reqs);
	int ret;

	for (i = 0; i < rounds; i++) {
		begin = ktime_get_ns();
		ret = perf_void_post(run, stream);
		if (ret)
			return ret;
		posted = ktime_get_ns();
		if (run->args->context == PERF_BATCH)
			ret = perf_void_batch(run, stream->nr_reqs);
		else
			ret = perf_void_direct(run, stream->nr_reqs);
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
	run->result->posts = rounds * stream->nr_reqs;
	run->result->completions = rounds * stream->nr_reqs;
	return 0;
}

static int perf_void_init(struct perf_run *run)
{
	if (!perf_caller_polls(run))
		return perf_rate_init(run);
	if (run->signal != 1) {
		pr_err("void_rate: where the caller polls, each request is signaled\n");
		return -EINVAL;
	}
	return perf_stream_init(run, perf_void_done);
}

static int perf_void_go(struct perf_run *run, u32 ops)
{
	return perf_caller_polls(run) ? perf_void_alternate(run, ops) : perf_rate_go(run, ops);
}

const struct perf_load perf_void_rate = {
	.name = "void_rate",
	.opcode = IB_WR_SEND,
	.holds = true,
	.max_size = SZ_1M,
	.shape = perf_stream_shape,
	.init = perf_void_init,
	.go = perf_void_go,
	.exit = perf_stream_exit,
};
