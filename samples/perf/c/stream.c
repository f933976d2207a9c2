// SPDX-License-Identifier: GPL-2.0
/*
 * The requests of streams.
 */

#include <linux/slab.h>

#include "stream.h"

/* A request that is not signaled completes only if it fails. */
static void perf_unsignaled_done(struct ib_cq *cq, struct ib_wc *wc)
{
	if (wc->status != IB_WC_SUCCESS)
		perf_failed_wc(cq->cq_context, wc);
}

static struct ib_cqe perf_unsignaled = { .done = perf_unsignaled_done };

/* Posts @nr requests before @wr, each made anew, as different ones would be. */
int perf_post_unsignaled(const struct perf_run *run, struct perf_req *req,
			 enum ib_wr_opcode opcode, struct ib_rdma_wr *wr, u32 nr)
{
	int ret = 0;

	while (nr-- && !ret) {
		perf_wr(run, req, opcode, wr);
		wr->wr.wr_cqe = &perf_unsignaled;
		wr->wr.send_flags = 0;
		ret = ib_post_send(req->qp, &wr->wr, NULL);
	}
	perf_wr(run, req, opcode, wr);
	return ret;
}

static u32 perf_groups(const struct perf_run *run)
{
	return run->args->depth / run->signal;
}

void perf_stream_shape(struct perf_run *run)
{
	run->nr_qps = run->args->qps;
	run->a.sends = run->args->depth;
	if (run->opcode == IB_WR_SEND && run->args->load->pair)
		run->b.recvs = 2 * run->args->depth;
}

/* So many requests for each QP, those of different QPs in turn. */
static int perf_reqs_init(struct perf_run *run, const struct perf_end *end,
			  struct perf_req *reqs, u32 nr, enum dma_data_direction dir,
			  void (*done)(struct ib_cq *cq, struct ib_wc *wc))
{
	u32 i;
	int ret;

	for (i = 0; i < nr; i++) {
		reqs[i].cqe.done = done;
		reqs[i].qp = end->qps[i % run->nr_qps];
		ret = perf_buf_init(&reqs[i].buf, end, run->args->size, dir);
		if (ret)
			return ret;
	}
	return 0;
}

static void perf_reqs_exit(const struct perf_end *end, struct perf_req *reqs, u32 nr)
{
	u32 i;

	for (i = 0; reqs && i < nr; i++)
		perf_buf_exit(&reqs[i].buf, end);
	kvfree(reqs);
}

static int perf_post_recv(struct perf_req *recv)
{
	struct ib_recv_wr wr = {
		.wr_cqe = &recv->cqe,
		.sg_list = &recv->buf.sge,
		.num_sge = 1,
	};

	return ib_post_recv(recv->qp, &wr, NULL);
}

void perf_stream_recv_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_req *recv = container_of(wc->wr_cqe, struct perf_req, cqe);
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(cq->cq_context, wc);
		return;
	}
	ret = perf_post_recv(recv);
	if (unlikely(ret))
		perf_fail(cq->cq_context, "receive not posted", ret);
}

static int perf_recvs_init(struct perf_run *run, struct perf_stream *stream)
{
	u32 i, nr = run->nr_qps * run->b.recvs;
	int ret;

	stream->recvs = kvzalloc_objs(*stream->recvs, nr);
	if (!stream->recvs)
		return -ENOMEM;
	stream->nr_recvs = nr;
	ret = perf_reqs_init(run, &run->b, stream->recvs, nr, DMA_FROM_DEVICE,
			     perf_stream_recv_done);
	for (i = 0; !ret && i < nr; i++)
		ret = perf_post_recv(&stream->recvs[i]);
	return ret;
}

int perf_stream_init(struct perf_run *run, void (*done)(struct ib_cq *cq, struct ib_wc *wc))
{
	bool reads = run->opcode == IB_WR_RDMA_READ;
	struct perf_stream *stream = kzalloc_obj(*stream);
	u32 nr = run->nr_qps * perf_groups(run);
	int ret;

	if (!stream)
		return -ENOMEM;
	run->priv = stream;
	stream->reqs = kvzalloc_objs(*stream->reqs, nr);
	if (!stream->reqs)
		return -ENOMEM;
	stream->nr_reqs = nr;
	ret = perf_reqs_init(run, &run->a, stream->reqs, nr,
			     reads ? DMA_FROM_DEVICE : DMA_TO_DEVICE, done);
	if (ret)
		return ret;
	if (run->b.recvs)
		return perf_recvs_init(run, stream);
	if (!run->args->load->pair)
		return 0;
	ret = perf_region_init(run, &run->b, run->args->size);
	if (ret)
		return ret;
	run->remote_addr = run->b.mr->iova;
	run->rkey = run->b.mr->rkey;
	return 0;
}

void perf_stream_exit(struct perf_run *run)
{
	struct perf_stream *stream = run->priv;

	if (!stream)
		return;
	perf_reqs_exit(&run->a, stream->reqs, stream->nr_reqs);
	perf_reqs_exit(&run->b, stream->recvs, stream->nr_recvs);
	kfree(stream);
}
