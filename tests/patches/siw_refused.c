// SPDX-License-Identifier: GPL-2.0
/* Posts what cannot be sent, a fenced READ: it must be named, and leave room for the next. */

#include "siw.h"

static DECLARE_COMPLETION(write_done);
static bool read_done_seen;

static void read_completes(struct ib_cq *cq, struct ib_wc *wc)
{
	pr_info("siw_refused: the READ completes with status %d\n", wc->status);
	read_done_seen = true;
}

static void write_completes(struct ib_cq *cq, struct ib_wc *wc)
{
	if (wc->status == IB_WC_SUCCESS)
		complete(&write_done);
}

static int run(struct ib_qp *qp)
{
	struct ib_cqe read_cqe = { .done = read_completes };
	struct ib_cqe write_cqe = { .done = write_completes };
	struct ib_sge sge = { .lkey = pd->local_dma_lkey };
	struct ib_rdma_wr read = {
		.wr = {
			.wr_cqe = &read_cqe,
			.sg_list = &sge,
			.num_sge = 1,
			.opcode = IB_WR_RDMA_READ,
			.send_flags = IB_SEND_SIGNALED | IB_SEND_FENCE,
		},
	};
	struct ib_rdma_wr write = {
		.wr = {
			.wr_cqe = &write_cqe,
			.opcode = IB_WR_RDMA_WRITE,
			.send_flags = IB_SEND_SIGNALED,
		},
	};
	const struct ib_send_wr *bad = NULL;
	int ret = ib_post_send(qp, &read.wr, &bad), err = 0, i;

	pr_info("siw_refused: the READ: %d\n", ret);
	if (!ret || bad != &read.wr) {
		pr_err("siw_refused: error %d does not name the request\n", ret);
		err = -EIO;
	}
	/* Each slot of the queue once. */
	for (i = 0; i < 64 && !err; i++) {
		err = ib_post_send(qp, &write.wr, NULL);
		if (!err && !wait_for_completion_timeout(&write_done, PATIENCE))
			err = -ETIMEDOUT;
		if (err)
			pr_err("siw_refused: the next request: %d\n", err);
	}
	ib_drain_qp(qp);
	if (ret && read_done_seen)
		pr_err("siw_refused: the READ has completed although its post has failed\n");
	return err;
}

MODULE_DESCRIPTION("Reproducer: a request is refused without its name and stays in the queue");
