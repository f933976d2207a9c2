// SPDX-License-Identifier: GPL-2.0
/* Posts a list to a QP in the error state, and frees each request when it completes. */

#include "siw.h"

struct request {
	struct ib_cqe cqe;
	struct ib_send_wr wr;
};

static void poll(struct ib_cq *cq, void *context)
{
	struct ib_wc wc;

	do {
		while (ib_poll_cq(cq, 1, &wc) > 0)
			kfree(container_of(wc.wr_cqe, struct request, cqe));
	} while (ib_req_notify_cq(cq, IB_CQ_NEXT_COMP | IB_CQ_REPORT_MISSED_EVENTS) > 0);
}

static int post_list(struct ib_qp *qp)
{
	struct request *first = kzalloc_obj(*first), *second = kzalloc_obj(*second);
	struct ib_qp_attr attr = { .qp_state = IB_QPS_ERR };

	if (!first || !second)
		return -ENOMEM;
	first->wr.wr_cqe = &first->cqe;
	first->wr.opcode = IB_WR_SEND;
	first->wr.next = &second->wr;
	second->wr.wr_cqe = &second->cqe;
	second->wr.opcode = IB_WR_SEND;
	return ib_modify_qp(qp, &attr, IB_QP_STATE) ?: ib_post_send(qp, &first->wr, NULL);
}

static int run(struct ib_qp *connected)
{
	struct ib_cq_init_attr cq_attr = { .cqe = 16 };
	struct ib_cq *polled = ib_create_cq(pd->device, poll, NULL, NULL, &cq_attr);
	struct ib_qp_init_attr attr = {
		.send_cq = polled,
		.recv_cq = polled,
		.cap = { .max_send_wr = 4, .max_send_sge = 1, .max_recv_wr = 4, .max_recv_sge = 1 },
		.sq_sig_type = IB_SIGNAL_ALL_WR,
		.qp_type = IB_QPT_RC,
	};
	struct ib_qp *qp;
	int ret;

	if (IS_ERR(polled))
		return PTR_ERR(polled);
	ib_req_notify_cq(polled, IB_CQ_NEXT_COMP);
	qp = ib_create_qp(pd, &attr);
	ret = PTR_ERR_OR_ZERO(qp) ?: post_list(qp);
	if (!IS_ERR(qp))
		ib_destroy_qp(qp);
	ib_destroy_cq(polled);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a list is followed from a request that has completed");
