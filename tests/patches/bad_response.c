// SPDX-License-Identifier: GPL-2.0
/* A send is answered by an acknowledgment of a reserved kind: it must not complete as done. */

#include "packet.h"

static DECLARE_COMPLETION(sent);
static enum ib_wc_status status;

static void send_done(struct ib_cq *cq, struct ib_wc *wc)
{
	status = wc->status;
	complete(&sent);
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_cqe cqe = { .done = send_done };
	struct ib_send_wr wr = { .wr_cqe = &cqe, .opcode = IB_WR_SEND };
	const __be32 aeth = cpu_to_be32(0x40000000);
	struct ib_qp *qp = end_create(pd, cq, NULL);
	unsigned long end = jiffies + PATIENCE;
	int ret;

	if (IS_ERR(qp))
		return PTR_ERR(qp);
	ret = end_to_init(qp) ?: end_to_rtr(qp, 0x123, HOST) ?: end_to_rts(qp) ?:
		ib_post_send(qp, &wr, NULL);
	/* Answers that come before the request was sent are ignored. */
	while (!ret && !wait_for_completion_timeout(&sent, HZ / 20)) {
		ret = packet_receive(qp->qp_num, IB_OPCODE_RC_ACKNOWLEDGE, 0, &aeth, sizeof(aeth));
		if (time_after(jiffies, end))
			ret = -ETIMEDOUT;
	}
	pr_info("bad_response: status %d\n", status);
	if (!ret && status == IB_WC_SUCCESS) {
		pr_err("bad_response: the send has completed as done\n");
		ret = -EIO;
	}
	ib_drain_qp(qp);
	ib_destroy_qp(qp);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a response that is not understood completes a request as done");
