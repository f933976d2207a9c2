// SPDX-License-Identifier: GPL-2.0
/*
 * A peer asks again for an RDMA READ whose response was lost, or is late. What it has read was
 * invalidated meanwhile: the connection must last.
 */

#include "packet.h"

/* The peer sends a message, which comes when all before it was handled. */
static int message_receive(struct ib_qp *qp, u32 psn)
{
	struct ib_recv_wr wr = { .wr_cqe = &request_cqe };

	return ib_post_recv(qp, &wr, NULL) ?:
		packet_receive(qp->qp_num, IB_OPCODE_RC_SEND_ONLY, psn, NULL, 0) ?:
		request_wait();
}

static int mr_invalidate(struct ib_qp *qp, struct ib_mr *mr)
{
	struct ib_send_wr inv = {
		.wr_cqe = &request_cqe,
		.opcode = IB_WR_LOCAL_INV,
		.send_flags = IB_SEND_SIGNALED,
		.ex.invalidate_rkey = mr->rkey,
	};

	return ib_post_send(qp, &inv, NULL) ?: request_wait();
}

static int read_twice(struct ib_qp *qp, struct ib_mr *mr, struct scatterlist *sg)
{
	struct ib_qp_attr attr = { .qp_access_flags = IB_ACCESS_REMOTE_READ };
	struct reth reth = { .length = cpu_to_be32(64) };
	int ret;

	ret = end_to_init(qp) ?: end_to_rtr(qp, 0x123, HOST) ?: end_to_rts(qp) ?:
		ib_modify_qp(qp, &attr, IB_QP_ACCESS_FLAGS) ?: mr_register(qp, mr, sg);
	if (ret)
		return ret;
	reth.va = cpu_to_be64(mr->iova);
	reth.rkey = cpu_to_be32(mr->rkey);
	ret = packet_receive(qp->qp_num, IB_OPCODE_RC_RDMA_READ_REQUEST, 0, &reth,
			     sizeof(reth)) ?:
		message_receive(qp, 1) ?: mr_invalidate(qp, mr) ?:
		packet_receive(qp->qp_num, IB_OPCODE_RC_RDMA_READ_REQUEST, 0, &reth,
			       sizeof(reth));
	if (ret)
		return ret;
	ret = message_receive(qp, 2);
	if (ret)
		pr_err("read_again: the connection has ended: status %d\n", request_status);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	return mr_use(pd, cq, read_twice);
}

MODULE_DESCRIPTION("Reproducer: a repeated READ of what was invalidated ends the connection");
