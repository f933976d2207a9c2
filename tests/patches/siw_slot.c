// SPDX-License-Identifier: GPL-2.0
/* Posts what siw does not have, an atomic operation: its place in the queue must stay free. */

#include "siw.h"

static bool refused_seen;

static void refused_completes(struct ib_cq *cq, struct ib_wc *wc)
{
	refused_seen = true;
}

static int run(struct ib_qp *qp)
{
	struct ib_cqe cqe = { .done = refused_completes };
	struct ib_atomic_wr atomic = {
		.wr = {
			.wr_cqe = &cqe,
			.opcode = IB_WR_ATOMIC_FETCH_AND_ADD,
			.send_flags = IB_SEND_SIGNALED,
		},
	};
	struct ib_rdma_wr write = { .wr = { .opcode = IB_WR_RDMA_WRITE } };
	const struct ib_send_wr *bad;
	int ret = ib_post_send(qp, &atomic.wr, &bad);

	pr_info("siw_slot: the atomic operation: %d\n", ret);
	if (ret != -EINVAL)
		return -EIO;
	ret = post_and_wait(qp, &write.wr);
	if (ret)
		pr_err("siw_slot: the next request: %d\n", ret);
	ib_drain_qp(qp);
	if (refused_seen) {
		pr_err("siw_slot: the atomic operation has completed although it was refused\n");
		ret = -EIO;
	}
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a request that was refused stays in the queue");
