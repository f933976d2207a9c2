// SPDX-License-Identifier: GPL-2.0
/* Takes a QP to the error state right after a READ was posted: the READ must complete once. */

#include "siw.h"

static atomic_t completions;

static void read_completes(struct ib_cq *cq, struct ib_wc *wc)
{
	pr_info("siw_flush: the READ completes with status %d\n", wc->status);
	atomic_inc(&completions);
}

static int run(struct ib_qp *qp)
{
	struct ib_cqe cqe = { .done = read_completes };
	struct ib_sge sge = { .lkey = pd->local_dma_lkey };
	struct ib_rdma_wr read = {
		.wr = {
			.wr_cqe = &cqe,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IB_WR_RDMA_READ,
			.send_flags = IB_SEND_SIGNALED,
		},
	};
	struct ib_qp_attr attr = { .qp_state = IB_QPS_ERR };
	int ret = ib_post_send(qp, &read.wr, NULL) ?: ib_modify_qp(qp, &attr, IB_QP_STATE);

	ib_drain_qp(qp);
	if (!ret && atomic_read(&completions) != 1) {
		pr_err("siw_flush: the READ has completed %d times\n", atomic_read(&completions));
		ret = -EIO;
	}
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a READ that is about to be sent is flushed twice");
