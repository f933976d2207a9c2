// SPDX-License-Identifier: GPL-2.0
/*
 * Posts a transfer by MR too early, so that it is refused, and again when the QP is ready: it must
 * not invalidate what was never registered.
 */

#include <rdma/rw.h>

#include "ends.h"

/* A QP that has an MR for a transfer. */
static struct ib_qp *rw_create(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_qp_init_attr attr = {
		.event_handler = ignore_event,
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = 4, .max_send_sge = 1, .max_rdma_ctxs = 1 },
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = IB_QPT_RC,
		.port_num = 1,
	};

	return ib_create_qp(pd, &attr);
}

/* Writes a page to the peer. Returns what the post has returned, or how the request has ended. */
static int rw_write(struct ib_qp *qp, struct page *page, struct ib_mr *sink)
{
	struct rdma_rw_ctx ctx;
	struct scatterlist sg;
	int ret;

	sg_init_table(&sg, 1);
	sg_set_page(&sg, page, PAGE_SIZE, 0);
	ret = rdma_rw_ctx_init(&ctx, qp, 1, &sg, 1, 0, sink->iova, sink->rkey, DMA_TO_DEVICE);
	if (ret < 0)
		return ret;
	ret = rdma_rw_ctx_post(&ctx, qp, 1, &request_cqe, NULL) ?: request_wait();
	rdma_rw_ctx_destroy(&ctx, qp, 1, &sg, 1, DMA_TO_DEVICE);
	return ret;
}

static int sink_register(struct ib_qp *qp, struct ib_mr *mr, struct scatterlist *sg)
{
	struct ib_reg_wr reg = {
		.wr = {
			.wr_cqe = &request_cqe,
			.opcode = IB_WR_REG_MR,
			.send_flags = IB_SEND_SIGNALED,
		},
		.mr = mr,
		.key = mr->rkey,
		.access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE,
	};

	if (ib_map_mr_sg(mr, sg, 1, NULL, PAGE_SIZE) != 1)
		return -EIO;
	return ib_post_send(qp, &reg.wr, NULL) ?: request_wait();
}

static int do_writes(struct ib_qp *client, struct ib_qp *server, struct page *page,
		     struct ib_mr *mr, struct scatterlist *sg)
{
	int early, ret;

	ret = end_to_init(client) ?: end_to_init(server) ?:
	      end_to_rtr(client, server->qp_num, 0) ?: end_to_rtr(server, client->qp_num, 0) ?:
	      end_to_rts(server) ?: sink_register(server, mr, sg);
	if (ret)
		return ret;
	early = rw_write(client, page, mr);
	ret = end_to_rts(client) ?: rw_write(client, page, mr);
	pr_info("rw_refused: too early: %d, then: %d, status %d\n", early, ret, request_status);
	if (early != -EINVAL)
		return -EPROTO;
	if (ret)
		pr_err("rw_refused: the next transfer fails with status %d\n", request_status);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_qp *client = rw_create(pd, cq), *server = rw_create(pd, cq);
	struct ib_mr *mr = ib_alloc_mr(pd, IB_MR_TYPE_MEM_REG, 1);
	struct page *page = alloc_pages(GFP_KERNEL | __GFP_ZERO, 1);
	struct scatterlist sg;
	int ret;

	ret = PTR_ERR_OR_ZERO(client) ?: PTR_ERR_OR_ZERO(server) ?: PTR_ERR_OR_ZERO(mr) ?:
	      (page ? 0 : -ENOMEM);
	if (ret)
		return ret;
	sg_init_table(&sg, 1);
	sg_set_page(&sg, page + 1, PAGE_SIZE, 0);
	ib_dma_map_sg(pd->device, &sg, 1, DMA_FROM_DEVICE);
	ret = do_writes(client, server, page, mr, &sg);
	end_destroy(client);
	end_destroy(server);
	ib_dereg_mr(mr);
	ib_dma_unmap_sg(pd->device, &sg, 1, DMA_FROM_DEVICE);
	__free_pages(page, 1);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a transfer that was refused makes the next one fail");
