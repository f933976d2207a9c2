// SPDX-License-Identifier: GPL-2.0
/* An RDMA WRITE whose length is zero has bytes: that must end the connection, and no more. */

#include "packet.h"

static DECLARE_COMPLETION(flushed);

static void recv_done(struct ib_cq *cq, struct ib_wc *wc)
{
	pr_info("zero_write: the receive completes with status %d\n", wc->status);
	complete(&flushed);
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct {
		__be64 va;
		__be32 rkey;
		__be32 len;
		char bytes[4];
	} __packed write = { .bytes = "abc" };
	struct ib_cqe cqe = { .done = recv_done };
	struct ib_recv_wr wr = { .wr_cqe = &cqe };
	struct ib_qp *qp = end_create(pd, cq, NULL);
	int ret;

	if (IS_ERR(qp))
		return PTR_ERR(qp);
	ret = end_to_init(qp) ?: ib_post_recv(qp, &wr, NULL) ?: end_to_rtr(qp, 0x123, HOST) ?:
		packet_receive(qp->qp_num, IB_OPCODE_RC_RDMA_WRITE_ONLY, 0, &write, sizeof(write));
	if (!ret && !wait_for_completion_timeout(&flushed, PATIENCE))
		ret = -ETIMEDOUT;
	ib_drain_qp(qp);
	ib_destroy_qp(qp);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: an RDMA WRITE has more bytes than it says");
