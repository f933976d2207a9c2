// SPDX-License-Identifier: GPL-2.0
/* A message breaks off after its first packet: the receive that it has taken must be flushed. */

#include "ends.h"

static DECLARE_COMPLETION(received);
static DECLARE_COMPLETION(sent);
static enum ib_wc_status status;

static void recv_done(struct ib_cq *cq, struct ib_wc *wc)
{
	status = wc->status;
	complete(&received);
}

static void send_done(struct ib_cq *cq, struct ib_wc *wc)
{
	complete(&sent);
}

/* The second entry has a bad key, which rxe sees when it makes the second packet. */
static int send_half(struct ib_qp *qp, u64 addr)
{
	static struct ib_cqe cqe = { .done = send_done };
	struct ib_sge sge[] = {
		{ .addr = addr, .length = 1024, .lkey = qp->pd->local_dma_lkey },
		{ .addr = addr, .length = 1024, .lkey = 0xbad00 },
	};
	struct ib_send_wr wr = {
		.wr_cqe = &cqe,
		.sg_list = sge,
		.num_sge = 2,
		.opcode = IB_WR_SEND,
	};

	return ib_post_send(qp, &wr, NULL);
}

static int post(struct ib_srq *srq, u64 addr)
{
	static struct ib_cqe cqe = { .done = recv_done };
	struct ib_sge sge = { .addr = addr, .length = 4096, .lkey = srq->pd->local_dma_lkey };
	struct ib_recv_wr wr = { .wr_cqe = &cqe, .sg_list = &sge, .num_sge = 1 };

	return ib_post_srq_recv(srq, &wr, NULL);
}

/* Waits until the QP has received the first packet, and taken the receive. */
static int wait_taken(struct ib_qp *qp)
{
	struct ib_qp_init_attr init;
	struct ib_qp_attr attr;
	unsigned long end = jiffies + PATIENCE;
	int ret;

	do {
		msleep(20);
		ret = ib_query_qp(qp, &attr, IB_QP_RQ_PSN, &init);
	} while (!ret && attr.rq_psn == 0 && time_before(jiffies, end));
	return ret ?: attr.rq_psn == 0 ? -ETIMEDOUT : 0;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_srq_init_attr attr = {
		.attr = { .max_wr = 1, .max_sge = 1 },
		.srq_type = IB_SRQT_BASIC,
	};
	struct ib_srq *srq = ib_create_srq(pd, &attr);
	void *page = kzalloc(4096, GFP_KERNEL);
	struct ib_qp *client, *server;
	u64 addr;
	int ret;

	if (IS_ERR(srq) || !page)
		return -ENOMEM;
	addr = ib_dma_map_single(pd->device, page, 4096, DMA_BIDIRECTIONAL);
	client = end_create(pd, cq, NULL);
	server = end_create(pd, cq, srq);
	ret = ends_connect(client, server) ?: post(srq, addr) ?: send_half(client, addr);
	if (!ret && !wait_for_completion_timeout(&sent, PATIENCE))
		ret = -ETIMEDOUT;
	ret = ret ?: wait_taken(server) ?: end_to_err(server);
	if (!ret && !wait_for_completion_timeout(&received, PATIENCE / 4)) {
		pr_err("srq_flush: the receive has not come back\n");
		ret = -EIO;
	} else if (!ret && status != IB_WC_WR_FLUSH_ERR) {
		pr_err("srq_flush: status %d\n", status);
		ret = -EIO;
	}
	end_destroy(client);
	end_destroy(server);
	ib_destroy_srq(srq);
	ib_dma_unmap_single(pd->device, addr, 4096, DMA_BIDIRECTIONAL);
	kfree(page);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a message breaks off and keeps a receive of an SRQ");
