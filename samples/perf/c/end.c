// SPDX-License-Identifier: GPL-2.0
/*
 * One end of a run: a PD, a completion queue, buffers, and memory that
 * its peer may access.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "perf.h"

static const enum ib_poll_context perf_poll_contexts[] = {
	[PERF_DIRECT]			= IB_POLL_DIRECT,
	[PERF_STATIC]			= IB_POLL_DIRECT,
	[PERF_BATCH]			= IB_POLL_DIRECT,
	[PERF_SOFTIRQ]			= IB_POLL_SOFTIRQ,
	[PERF_WORKQUEUE]		= IB_POLL_WORKQUEUE,
	[PERF_UNBOUND_WORKQUEUE]	= IB_POLL_UNBOUND_WORKQUEUE,
};

struct ib_cq *perf_cq_alloc(struct perf_run *run, struct ib_device *dev, u32 cqes)
{
	struct ib_cq *cq;

	cq = ib_alloc_cq(dev, run, cqes, 0, perf_poll_contexts[run->args->context]);
	if (IS_ERR(cq))
		pr_err("%s: no CQ of %u entries: %pe\n", dev_name(&dev->dev), cqes, cq);
	return cq;
}

/*
 * Every request of every QP can complete, also those that are not signaled if
 * they are flushed, and so can two marks behind them.
 */
static int perf_alloc_cq(struct perf_run *run, struct perf_end *end)
{
	u64 cqes = (u64)run->nr_qps * (end->sends + end->transfers + end->recvs + 2);

	if (max(end->sends + end->transfers, end->recvs) + 1 > end->dev->attrs.max_qp_wr ||
	    cqes > end->dev->attrs.max_cqe) {
		pr_err("%s: %u QPs with %u sends and %u receives each are too many\n",
		       dev_name(&end->dev->dev), run->nr_qps, end->sends, end->recvs);
		return -EINVAL;
	}
	end->cq = perf_cq_alloc(run, end->dev, cqes);
	return PTR_ERR_OR_ZERO(end->cq);
}

int perf_end_init(struct perf_run *run, struct perf_end *end, struct ib_device *dev)
{
	int ret;

	end->dev = dev;
	end->pd = ib_alloc_pd(dev, 0);
	if (IS_ERR(end->pd)) {
		ret = PTR_ERR(end->pd);
		pr_err("%s: no PD: %pe\n", dev_name(&dev->dev), end->pd);
		goto err_pd;
	}
	ret = perf_alloc_cq(run, end);
	if (ret)
		goto err_cq;
	return 0;

err_cq:
	end->cq = NULL;
	ib_dealloc_pd(end->pd);
err_pd:
	end->pd = NULL;
	return ret;
}

void perf_end_exit(struct perf_end *end)
{
	if (end->cq)
		ib_free_cq(end->cq);
	if (end->pd)
		ib_dealloc_pd(end->pd);
}

int perf_buf_init(struct perf_buf *buf, const struct perf_end *end, u32 size,
		  enum dma_data_direction dir)
{
	buf->mem = kzalloc(size, GFP_KERNEL);
	if (!buf->mem)
		return -ENOMEM;
	buf->sge = (struct ib_sge) {
		.addr = ib_dma_map_single(end->dev, buf->mem, size, dir),
		.length = size,
		.lkey = end->pd->local_dma_lkey,
	};
	if (ib_dma_mapping_error(end->dev, buf->sge.addr)) {
		kfree(buf->mem);
		buf->mem = NULL;
		return -EIO;
	}
	buf->dir = dir;
	return 0;
}

void perf_buf_exit(struct perf_buf *buf, const struct perf_end *end)
{
	if (!buf->mem)
		return;
	ib_dma_unmap_single(end->dev, buf->sge.addr, buf->sge.length, buf->dir);
	kfree(buf->mem);
	buf->mem = NULL;
}

/* Has an MR map a buffer that is mapped for the device already. */
static int perf_map_mr(struct ib_mr *mr, const struct perf_buf *buf)
{
	struct scatterlist sg;
	int n;

	sg_init_one(&sg, buf->mem, buf->sge.length);
	sg_dma_address(&sg) = buf->sge.addr;
	sg_dma_len(&sg) = buf->sge.length;
	n = ib_map_mr_sg(mr, &sg, 1, NULL, PAGE_SIZE);
	if (n < 0)
		return n;
	return n == 1 && mr->length == buf->sge.length ? 0 : -EINVAL;
}

struct ib_mr *perf_mr_alloc(const struct perf_end *end, const struct perf_buf *buf)
{
	u32 pages = DIV_ROUND_UP(offset_in_page(buf->mem) + buf->sge.length, PAGE_SIZE);
	struct ib_mr *mr;
	int ret;

	if (pages > end->dev->attrs.max_fast_reg_page_list_len)
		return ERR_PTR(-EINVAL);
	mr = ib_alloc_mr(end->pd, IB_MR_TYPE_MEM_REG, pages);
	if (IS_ERR(mr))
		return mr;
	ret = perf_map_mr(mr, buf);
	if (ret) {
		ib_dereg_mr(mr);
		return ERR_PTR(ret);
	}
	return mr;
}

static void perf_registered(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_run *run = cq->cq_context;
	struct perf_mark *mark = container_of(wc->wr_cqe, struct perf_mark, cqe);

	if (wc->status != IB_WC_SUCCESS)
		perf_failed_wc(run, wc);
	perf_mark_hit(mark);
}

static int perf_register(struct perf_run *run, struct perf_end *end)
{
	struct ib_reg_wr wr = {
		.wr = {
			.wr_cqe = &end->registered.cqe,
			.opcode = IB_WR_REG_MR,
			.send_flags = IB_SEND_SIGNALED,
		},
		.mr = end->mr,
		.access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE,
	};
	int ret;

	perf_mark_init(&end->registered, 1, perf_registered);
	ib_update_fast_reg_key(end->mr, ib_inc_rkey(end->mr->rkey));
	wr.key = end->mr->rkey;
	ret = ib_post_send(end->qps[0], &wr.wr, NULL);
	if (ret)
		return ret;
	ret = perf_mark_wait(run, &end->registered, PERF_STUCK);
	return ret ?: READ_ONCE(run->error);
}

/*
 * Gives the peer access to @size bytes. All QPs of this end have one PD, so any
 * of them will do.
 */
int perf_region_init(struct perf_run *run, struct perf_end *end, u32 size)
{
	int ret;

	ret = perf_buf_init(&end->buf, end, size, DMA_BIDIRECTIONAL);
	if (ret)
		return ret;
	end->mr = perf_mr_alloc(end, &end->buf);
	if (IS_ERR(end->mr)) {
		ret = PTR_ERR(end->mr);
		end->mr = NULL;
		return ret;
	}
	return perf_register(run, end);
}

void perf_region_exit(struct perf_end *end)
{
	if (end->mr)
		ib_dereg_mr(end->mr);
	perf_buf_exit(&end->buf, end);
}
