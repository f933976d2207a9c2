// SPDX-License-Identifier: GPL-2.0
/*
 * The hot paths of a ULP, as C ULPs write them: see twin_rs.rs.
 */

#include "twin.h"

void c_post_recv(struct conn *conn, struct message *message)
{
	struct ib_sge sge = {
		.addr = message->addr,
		.length = message->length,
		.lkey = conn->qp->pd->local_dma_lkey,
	};
	struct ib_recv_wr wr = {
		.wr_cqe = &message->cqe,
		.sg_list = &sge,
		.num_sge = 1,
	};
	int ret = ib_post_recv(conn->qp, &wr, NULL);

	if (unlikely(ret))
		message_failed(message, ret);
}

void c_post_send(struct conn *conn, struct message *message)
{
	struct ib_sge sge = {
		.addr = message->addr,
		.length = message->length,
		.lkey = conn->qp->pd->local_dma_lkey,
	};
	struct ib_send_wr wr = {
		.wr_cqe = &message->cqe,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	int ret = ib_post_send(conn->qp, &wr, NULL);

	if (unlikely(ret))
		message_failed(message, ret);
}

void c_post_write(struct conn *conn, struct message *message, u64 addr, u32 rkey)
{
	struct ib_sge sge = {
		.addr = message->addr,
		.length = message->length,
		.lkey = conn->qp->pd->local_dma_lkey,
	};
	struct ib_rdma_wr wr = {
		.wr = {
			.wr_cqe = &message->cqe,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IB_WR_RDMA_WRITE,
			.send_flags = IB_SEND_SIGNALED,
		},
		.remote_addr = addr,
		.rkey = rkey,
	};
	int ret = ib_post_send(conn->qp, &wr.wr, NULL);

	if (unlikely(ret))
		message_failed(message, ret);
}

void c_done(struct ib_cq *cq, struct ib_wc *wc)
{
	struct message *message = container_of(wc->wr_cqe, struct message, cqe);

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		message_failed(message, wc->status);
		return;
	}
	message_completed(message, wc->byte_len);
}
