// SPDX-License-Identifier: GPL-2.0
/*
 * The hot paths of a ULP, as C ULPs write them: see twin_rs.rs.
 */

#include "twin.h"

#define IB_POLL_BATCH 16

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

/* The handler of requests that are not signaled, if they fail. */
static void c_unsignaled_done(struct ib_cq *cq, struct ib_wc *wc)
{
	if (wc->status != IB_WC_SUCCESS && wc->status != IB_WC_WR_FLUSH_ERR)
		message_failed(NULL, wc->status);
}

static struct ib_cqe c_unsignaled = { .done = c_unsignaled_done };

void c_post_times(struct conn *conn, struct message *message, u32 times)
{
	struct ib_sge sge = {
		.addr = message->addr,
		.length = message->length,
		.lkey = conn->qp->pd->local_dma_lkey,
	};
	struct ib_send_wr wr;
	u32 i;
	int ret;

	for (i = 1; i < times; i++) {
		wr = (struct ib_send_wr) {
			.wr_cqe = &c_unsignaled,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IB_WR_SEND,
		};
		ret = ib_post_send(conn->qp, &wr, NULL);
		if (unlikely(ret)) {
			message_failed(i == 1 ? message : NULL, ret);
			return;
		}
	}
	wr = (struct ib_send_wr) {
		.wr_cqe = &message->cqe,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	ret = ib_post_send(conn->qp, &wr, NULL);
	if (unlikely(ret))
		message_failed(times == 1 ? message : NULL, ret);
}

void c_post_pair(struct conn *conn, struct pair *pair)
{
	u32 lkey = conn->qp->pd->local_dma_lkey;
	struct ib_sge sges[2] = {
		{ .addr = pair->addr[0], .length = pair->length[0], .lkey = lkey },
		{ .addr = pair->addr[1], .length = pair->length[1], .lkey = lkey },
	};
	struct ib_send_wr second = {
		.wr_cqe = &pair->cqe,
		.sg_list = &sges[1],
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	struct ib_send_wr first = {
		.next = &second,
		.wr_cqe = &c_unsignaled,
		.sg_list = &sges[0],
		.num_sge = 1,
		.opcode = IB_WR_SEND,
	};
	const struct ib_send_wr *bad;
	int ret = ib_post_send(conn->qp, &first, &bad);

	if (unlikely(ret))
		pair_failed(pair, bad == &first ? ret : -EIO);
}

void c_post_io(struct conn *conn, struct io *io)
{
	struct ib_sge sge = {
		.addr = io->addr,
		.length = io->length,
		.lkey = conn->qp->pd->local_dma_lkey,
	};
	struct ib_send_wr send = {
		.wr_cqe = &io->cqe,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	struct ib_reg_wr reg = {
		.wr = {
			.next = &send,
			.wr_cqe = &c_unsignaled,
			.opcode = IB_WR_REG_MR,
		},
		.mr = io->mr,
		.access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE,
	};
	const struct ib_send_wr *bad;
	int ret;

	ib_update_fast_reg_key(io->mr, ib_inc_rkey(io->mr->rkey));
	reg.key = io->mr->rkey;
	ret = ib_post_send(conn->qp, &reg.wr, &bad);
	if (unlikely(ret))
		io_failed(io, bad == &reg.wr ? ret : -EIO);
}

void c_post_key(struct conn *conn, struct io *io)
{
	struct ib_sge sge = {
		.addr = io->addr,
		.length = io->length,
		.lkey = conn->qp->pd->local_dma_lkey,
	};
	struct ib_send_wr send = {
		.wr_cqe = &io->cqe,
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	struct ib_reg_wr reg = {
		.wr = {
			.next = &send,
			.wr_cqe = &c_unsignaled,
			.opcode = IB_WR_REG_MR,
		},
		.mr = io->mr,
		.access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE,
	};
	const struct ib_send_wr *bad;
	int ret;

	ib_update_fast_reg_key(io->mr, ib_inc_rkey(io->mr->rkey));
	reg.key = io->mr->rkey;
	WRITE_ONCE(*io->message, cpu_to_le32(reg.key));
	ib_dma_sync_single_for_device(conn->qp->device, io->addr, io->length, DMA_TO_DEVICE);
	ret = ib_post_send(conn->qp, &reg.wr, &bad);
	if (unlikely(ret))
		io_failed(io, bad == &reg.wr ? ret : -EIO);
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

void c_answered(struct ib_cq *cq, struct ib_wc *wc)
{
	struct answer *answer = container_of(wc->wr_cqe, struct answer, cqe);

	answer_completed(wc->qp->qp_context, answer);
}

/* As __ib_process_cq() in drivers/infiniband/core/cq.c, without its trace points. */
int c_process(struct ib_cq *cq, int budget)
{
	struct ib_wc wcs[IB_POLL_BATCH];
	int i, n, completed = 0;

	while ((n = ib_poll_cq(cq, min_t(u32, IB_POLL_BATCH, budget - completed), wcs)) > 0) {
		for (i = 0; i < n; i++) {
			struct ib_wc *wc = &wcs[i];

			if (wc->wr_cqe)
				wc->wr_cqe->done(cq, wc);
			else
				WARN_ON_ONCE(wc->status == IB_WC_SUCCESS);
		}
		completed += n;
		if (n != IB_POLL_BATCH || (budget != -1 && completed >= budget))
			break;
	}
	return completed;
}

/* Without callbacks where that is possible: other requests may complete to the CQ, too. */
void c_poll(struct ib_cq *cq)
{
	struct ib_wc wcs[IB_POLL_BATCH];
	int i, n;

	while ((n = ib_poll_cq(cq, IB_POLL_BATCH, wcs)) > 0) {
		for (i = 0; i < n; i++) {
			struct ib_wc *wc = &wcs[i];

			if (unlikely(!wc->wr_cqe))
				continue;
			if (likely(wc->wr_cqe->done == c_done))
				c_done(cq, wc);
			else
				wc->wr_cqe->done(cq, wc);
		}
	}
}
