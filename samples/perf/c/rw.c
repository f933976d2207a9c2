// SPDX-License-Identifier: GPL-2.0
/*
 * Transfers by rdma_rw, of pages that a scatterlist describes, as those of storage targets. All
 * are posted, then their completions are processed, and so on.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>
#include <rdma/rw.h>

#include "poll.h"

struct perf_rw {
	struct ib_cqe cqe;
	struct rdma_rw_ctx ctx;
	struct ib_qp *qp;
	enum dma_data_direction dir;
	struct sg_table sgt;
	void *mem;
};

static void perf_rw_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_rw *rw = container_of(wc->wr_cqe, struct perf_rw, cqe);

	rdma_rw_ctx_destroy(&rw->ctx, rw->qp, PERF_PORT, rw->sgt.sgl, rw->sgt.nents, rw->dir);
	if (unlikely(wc->status != IB_WC_SUCCESS))
		perf_failed_wc(cq->cq_context, wc);
}

static int perf_rw_post(struct perf_run *run, struct perf_rw *rw)
{
	int ret;

	ret = rdma_rw_ctx_init(&rw->ctx, rw->qp, PERF_PORT, rw->sgt.sgl, rw->sgt.nents, 0,
			       run->remote_addr, run->rkey, rw->dir);
	if (unlikely(ret < 0))
		return ret;
	ret = rdma_rw_ctx_post(&rw->ctx, rw->qp, PERF_PORT, &rw->cqe, NULL);
	if (unlikely(ret))
		rdma_rw_ctx_destroy(&rw->ctx, rw->qp, PERF_PORT, rw->sgt.sgl, rw->sgt.nents,
				    rw->dir);
	return ret;
}

static int perf_rw_round(struct perf_run *run, struct perf_rw *rws, u32 nr)
{
	u32 i;
	int ret;

	for (i = 0; i < nr; i++) {
		ret = perf_rw_post(run, &rws[i]);
		if (unlikely(ret))
			return ret;
	}
	/* On this device all have completed when they are posted. */
	for (i = 0; i < nr; i += ret) {
		ret = ib_process_cq_direct(run->a.cq, nr - i);
		if (ret <= 0)
			return -EIO;
	}
	return READ_ONCE(run->error);
}

static int perf_rw_go(struct perf_run *run, u32 ops)
{
	u32 i, nr = run->args->depth, rounds = DIV_ROUND_UP(ops, nr);
	int ret;

	for (i = 0; i < rounds; i++) {
		ret = perf_rw_round(run, run->priv, nr);
		if (ret)
			return ret;
		cond_resched();
	}
	run->end = ktime_get_ns();
	run->result->ops = (u64)rounds * nr;
	run->result->posts = run->result->ops;
	run->result->completions = run->result->ops;
	return 0;
}

static void perf_rw_shape(struct perf_run *run)
{
	run->nr_qps = 1;
	run->a.sends = 1;
	run->a.transfers = run->args->depth;
}

static int perf_rw_init_one(struct perf_run *run, struct perf_rw *rw)
{
	u32 i, nr = DIV_ROUND_UP(run->args->size, PAGE_SIZE);
	struct page **pages;
	int ret;

	rw->cqe.done = perf_rw_done;
	rw->qp = run->a.qps[0];
	rw->dir = run->opcode == IB_WR_RDMA_READ ? DMA_FROM_DEVICE : DMA_TO_DEVICE;
	rw->mem = vzalloc(run->args->size);
	pages = kcalloc(nr, sizeof(*pages), GFP_KERNEL);
	ret = -ENOMEM;
	if (rw->mem && pages) {
		for (i = 0; i < nr; i++)
			pages[i] = vmalloc_to_page(rw->mem + i * PAGE_SIZE);
		ret = sg_alloc_table_from_pages(&rw->sgt, pages, nr, 0, run->args->size,
						GFP_KERNEL);
	}
	kfree(pages);
	return ret;
}

static int perf_rw_init(struct perf_run *run)
{
	struct perf_rw *rws;
	u32 i;
	int ret;

	if (run->args->context != PERF_DIRECT)
		return -EINVAL;
	rws = kvzalloc_objs(*rws, run->args->depth);
	if (!rws)
		return -ENOMEM;
	run->priv = rws;
	for (i = 0; i < run->args->depth; i++) {
		ret = perf_rw_init_one(run, &rws[i]);
		if (ret)
			return ret;
	}
	ret = perf_region_init(run, &run->b, run->args->size);
	if (ret)
		return ret;
	run->remote_addr = run->b.mr->iova;
	run->rkey = run->b.mr->rkey;
	return 0;
}

static void perf_rw_exit(struct perf_run *run)
{
	struct perf_rw *rws = run->priv;
	u32 i;

	for (i = 0; rws && i < run->args->depth; i++) {
		sg_free_table(&rws[i].sgt);
		vfree(rws[i].mem);
	}
	kvfree(rws);
}

const struct perf_load perf_rw_read_rate = {
	.name = "rw_read_rate",
	.opcode = IB_WR_RDMA_READ,
	.pair = true,
	.max_size = SZ_1M,
	.shape = perf_rw_shape,
	.init = perf_rw_init,
	.go = perf_rw_go,
	.exit = perf_rw_exit,
};

const struct perf_load perf_rw_write_rate = {
	.name = "rw_write_rate",
	.opcode = IB_WR_RDMA_WRITE,
	.pair = true,
	.max_size = SZ_1M,
	.shape = perf_rw_shape,
	.init = perf_rw_init,
	.go = perf_rw_go,
	.exit = perf_rw_exit,
};
