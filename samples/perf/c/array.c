// SPDX-License-Identifier: GPL-2.0
/*
 * Requests in arrays, on the null device: an array for each QP, as an NVMe queue
 * has it, or one for all QPs, as a pool. In both the requests of a QP are side by
 * side, and they are posted in the order of memory.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/slab.h>

#include "poll.h"
#include "stream.h"

struct perf_arrays {
	u32 nr_arrays;
	u32 nr_reqs;		/* of each */
	struct perf_req *reqs[] __counted_by(nr_arrays);
};

static void perf_array_posted_done(struct ib_cq *cq, struct ib_wc *wc)
{
	if (unlikely(wc->status != IB_WC_SUCCESS))
		perf_failed_wc(cq->cq_context, wc);
}

static void perf_array_again_done(struct ib_cq *cq, struct ib_wc *wc)
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
	ret = perf_post(run, req, IB_WR_SEND);
	if (unlikely(ret))
		perf_fail(run, "request not posted", ret);
}

static int perf_array_init(struct perf_run *run)
{
	bool pool = run->args->load == &perf_pool_rate;
	u32 nr_arrays = pool ? 1 : run->nr_qps;
	u32 depth = run->args->depth;
	struct perf_arrays *arrays;
	u32 i, j;
	int ret;

	if (run->signal != 1 || run->args->context == PERF_BATCH) {
		pr_err("%s: each request is signaled, not in batches\n", run->args->load->name);
		return -EINVAL;
	}
	arrays = kvzalloc_flex(*arrays, reqs, nr_arrays);
	if (!arrays)
		return -ENOMEM;
	run->priv = arrays;
	arrays->nr_arrays = nr_arrays;
	arrays->nr_reqs = pool ? run->nr_qps * depth : depth;
	for (i = 0; i < nr_arrays; i++) {
		arrays->reqs[i] = kvzalloc_objs(*arrays->reqs[i], arrays->nr_reqs);
		if (!arrays->reqs[i])
			return -ENOMEM;
		for (j = 0; j < arrays->nr_reqs; j++) {
			struct perf_req *req = &arrays->reqs[i][j];

			req->cqe.done = perf_caller_polls(run) ? perf_array_posted_done :
								 perf_array_again_done;
			req->qp = run->a.qps[pool ? j / depth : i];
			ret = perf_buf_init(&req->buf, &run->a, run->args->size, DMA_TO_DEVICE);
			if (ret)
				return ret;
		}
	}
	return 0;
}

static void perf_array_exit(struct perf_run *run)
{
	struct perf_arrays *arrays = run->priv;
	u32 i, j;

	if (!arrays)
		return;
	for (i = 0; i < arrays->nr_arrays; i++) {
		for (j = 0; arrays->reqs[i] && j < arrays->nr_reqs; j++)
			perf_buf_exit(&arrays->reqs[i][j].buf, &run->a);
		kvfree(arrays->reqs[i]);
	}
	kvfree(arrays);
}

static int perf_array_post(struct perf_run *run, struct perf_arrays *arrays, u32 left)
{
	u32 i, j;
	int ret;

	for (i = 0; i < arrays->nr_arrays; i++) {
		struct perf_req *reqs = arrays->reqs[i];

		for (j = 0; j < arrays->nr_reqs && left; j++, left--) {
			ret = perf_post(run, &reqs[j], IB_WR_SEND);
			if (unlikely(ret))
				return ret;
		}
	}
	return 0;
}

/* All requests have completed when they are posted, so there is no waiting. */
static int perf_array_process(struct perf_run *run, u32 left)
{
	int n;

	for (; left; left -= n) {
		n = ib_process_cq_direct(run->a.cq, left);
		if (n <= 0)
			return -EIO;
	}
	return READ_ONCE(run->error);
}

static int perf_array_alternate(struct perf_run *run, u32 ops)
{
	struct perf_arrays *arrays = run->priv;
	u32 owners = run->nr_qps * run->args->depth;
	u64 begin, posted, post_ns = 0, poll_ns = 0;
	u64 i, rounds = DIV_ROUND_UP_ULL(ops, owners);
	int ret;

	for (i = 0; i < rounds; i++) {
		begin = ktime_get_ns();
		ret = perf_array_post(run, arrays, owners);
		if (ret)
			return ret;
		posted = ktime_get_ns();
		ret = perf_array_process(run, owners);
		if (ret)
			return ret;
		run->end = ktime_get_ns();
		post_ns += posted - begin;
		poll_ns += run->end - posted;
		cond_resched();
	}
	run->result->post_ns = post_ns;
	run->result->poll_ns = poll_ns;
	run->result->ops = rounds * owners;
	run->result->posts = rounds * owners;
	run->result->completions = rounds * owners;
	return 0;
}

static int perf_array_stream(struct perf_run *run, u32 ops)
{
	struct perf_arrays *arrays = run->priv;
	u32 nr = min(ops, run->nr_qps * run->args->depth);
	u32 i, j, n = 0;
	int ret;

	/* Before the first one is posted, as handlers count from then on. */
	run->left = nr;
	for (i = 0; i < arrays->nr_arrays; i++)
		for (j = 0; j < arrays->nr_reqs && n < nr; j++, n++)
			arrays->reqs[i][j].left = perf_share(ops, n, nr);
	ret = perf_array_post(run, arrays, nr);
	if (ret)
		return ret;
	ret = perf_wait_sleeping(run);
	if (ret)
		return ret;
	run->result->ops = ops;
	run->result->posts = ops;
	run->result->completions = ops;
	return 0;
}

static int perf_array_go(struct perf_run *run, u32 ops)
{
	return perf_caller_polls(run) ? perf_array_alternate(run, ops) :
					perf_array_stream(run, ops);
}

const struct perf_load perf_queue_rate = {
	.name = "queue_rate",
	.opcode = IB_WR_SEND,
	.holds = true,
	.max_size = SZ_1M,
	.shape = perf_stream_shape,
	.init = perf_array_init,
	.go = perf_array_go,
	.exit = perf_array_exit,
};

const struct perf_load perf_pool_rate = {
	.name = "pool_rate",
	.opcode = IB_WR_SEND,
	.holds = true,
	.max_size = SZ_1M,
	.shape = perf_stream_shape,
	.init = perf_array_init,
	.go = perf_array_go,
	.exit = perf_array_exit,
};
