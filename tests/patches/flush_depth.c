// SPDX-License-Identifier: GPL-2.0
/* A FLUSH comes to a QP that has no resources for it: that must end the connection, and no more. */

#include "packet.h"

static DECLARE_COMPLETION(flushed);

static void recv_done(struct ib_cq *cq, struct ib_wc *wc)
{
	pr_info("flush_depth: the receive completes with status %d\n", wc->status);
	complete(&flushed);
}

/* A FLUSH of a whole MR. It has no type, so it needs no access. */
static int flush_receive(struct ib_qp *qp, u32 psn, u32 rkey)
{
	const struct {
		__be32 feth;
		__be64 va;
		__be32 rkey;
		__be32 len;
	} __packed flush = {
		.feth = cpu_to_be32(IB_FLUSH_MR << 4),
		.rkey = cpu_to_be32(rkey),
	};

	return packet_receive(qp->qp_num, IB_OPCODE_RC_FLUSH, psn, &flush, sizeof(flush));
}

/* The key is that of the PD's own MR. */
static int flush_end(struct ib_pd *pd, struct ib_cq *cq, u8 depth, u32 count)
{
	struct ib_cqe cqe = { .done = recv_done };
	struct ib_recv_wr wr = { .wr_cqe = &cqe };
	struct ib_qp *qp = end_create(pd, cq, NULL);
	u32 psn;
	int ret;

	if (IS_ERR(qp))
		return PTR_ERR(qp);
	end_depth = depth;
	reinit_completion(&flushed);
	ret = end_to_init(qp) ?: ib_post_recv(qp, &wr, NULL) ?: end_to_rtr(qp, 0x123, HOST);
	for (psn = 0; !ret && psn < count; psn++)
		ret = flush_receive(qp, psn, pd->local_dma_lkey);
	if (!ret && !wait_for_completion_timeout(&flushed, PATIENCE))
		ret = -ETIMEDOUT;
	ib_drain_qp(qp);
	ib_destroy_qp(qp);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	/* rxe rounds 200 up to 256, and keeps the number in a u8. */
	return flush_end(pd, cq, 200, 300) ?: flush_end(pd, cq, 0, 1);
}

MODULE_DESCRIPTION("Reproducer: a FLUSH comes to a QP without resources for it");
