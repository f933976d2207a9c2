// SPDX-License-Identifier: GPL-2.0
/*
 * Fast registrations: each MR is registered, then invalidated, and so on.
 */

#include <linux/slab.h>

#include "poll.h"

#define PERF_MR_SIZE	(16 * PAGE_SIZE)

struct perf_fmr {
	struct ib_cqe reg;
	struct ib_cqe inv;
	struct ib_mr *mr;
	struct ib_qp *qp;
	u32 left;		/* how often it is still to come back */
	struct perf_buf buf;
};

static int perf_post_reg(struct perf_fmr *fmr)
{
	struct ib_reg_wr wr = {
		.wr = {
			.wr_cqe = &fmr->reg,
			.opcode = IB_WR_REG_MR,
			.send_flags = IB_SEND_SIGNALED,
		},
		.mr = fmr->mr,
		.access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE,
	};

	ib_update_fast_reg_key(fmr->mr, ib_inc_rkey(fmr->mr->rkey));
	wr.key = fmr->mr->rkey;
	return ib_post_send(fmr->qp, &wr.wr, NULL);
}

static int perf_post_inv(struct perf_fmr *fmr)
{
	struct ib_send_wr wr = {
		.wr_cqe = &fmr->inv,
		.opcode = IB_WR_LOCAL_INV,
		.send_flags = IB_SEND_SIGNALED,
		.ex.invalidate_rkey = fmr->mr->rkey,
	};

	return ib_post_send(fmr->qp, &wr, NULL);
}

static void perf_reg_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_fmr *fmr = container_of(wc->wr_cqe, struct perf_fmr, reg);
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(cq->cq_context, wc);
		return;
	}
	ret = perf_post_inv(fmr);
	if (unlikely(ret))
		perf_fail(cq->cq_context, "invalidation not posted", ret);
}

static void perf_inv_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_fmr *fmr = container_of(wc->wr_cqe, struct perf_fmr, inv);
	struct perf_run *run = cq->cq_context;
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(run, wc);
		return;
	}
	if (!perf_goes_on(run, &fmr->left))
		return;
	ret = perf_post_reg(fmr);
	if (unlikely(ret))
		perf_fail(run, "registration not posted", ret);
}

static int perf_reg_poll_direct(struct perf_run *run)
{
	return ib_process_cq_direct(run->a.cq, run->args->depth);
}

static int perf_reg_poll_batch(struct perf_run *run)
{
	return perf_poll_batch(run->a.cq, perf_reg_done, perf_inv_done);
}

static int perf_reg_go(struct perf_run *run, u32 ops)
{
	struct perf_fmr *fmrs = run->priv;
	u32 i, nr = min(ops, run->args->depth);
	int ret;

	/* Before the first one is posted, as handlers count from then on. */
	run->left = nr;
	for (i = 0; i < nr; i++)
		fmrs[i].left = perf_share(ops, i, nr);
	for (i = 0; i < nr; i++) {
		ret = perf_post_reg(&fmrs[i]);
		if (ret)
			return ret;
	}
	if (run->args->context == PERF_BATCH)
		ret = perf_wait(run, perf_reg_poll_batch);
	else
		ret = perf_wait(run, perf_reg_poll_direct);
	if (ret)
		return ret;
	run->result->ops = ops;
	run->result->posts = 2ULL * ops;
	run->result->completions = 2ULL * ops;
	return 0;
}

static void perf_reg_shape(struct perf_run *run)
{
	run->nr_qps = 1;
	run->a.sends = run->args->depth;
}

static int perf_fmr_init(struct perf_run *run, struct perf_fmr *fmr)
{
	int ret;

	fmr->reg.done = perf_reg_done;
	fmr->inv.done = perf_inv_done;
	fmr->qp = run->a.qps[0];
	ret = perf_buf_init(&fmr->buf, &run->a, PERF_MR_SIZE, DMA_BIDIRECTIONAL);
	if (ret)
		return ret;
	fmr->mr = perf_mr_alloc(&run->a, &fmr->buf);
	if (IS_ERR(fmr->mr)) {
		ret = PTR_ERR(fmr->mr);
		fmr->mr = NULL;
	}
	return ret;
}

static int perf_reg_init(struct perf_run *run)
{
	struct perf_fmr *fmrs = kvzalloc_objs(*fmrs, run->args->depth);
	u32 i;
	int ret;

	if (!fmrs)
		return -ENOMEM;
	run->priv = fmrs;
	for (i = 0; i < run->args->depth; i++) {
		ret = perf_fmr_init(run, &fmrs[i]);
		if (ret)
			return ret;
	}
	return 0;
}

static void perf_reg_exit(struct perf_run *run)
{
	struct perf_fmr *fmrs = run->priv;
	u32 i;

	for (i = 0; fmrs && i < run->args->depth; i++) {
		if (fmrs[i].mr)
			ib_dereg_mr(fmrs[i].mr);
		perf_buf_exit(&fmrs[i].buf, &run->a);
	}
	kvfree(fmrs);
}

const struct perf_load perf_reg_rate = {
	.name = "reg_rate",
	.opcode = IB_WR_REG_MR,
	.pair = true,
	.max_size = SZ_1M,
	.shape = perf_reg_shape,
	.init = perf_reg_init,
	.go = perf_reg_go,
	.exit = perf_reg_exit,
};
