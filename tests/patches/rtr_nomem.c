// SPDX-License-Identifier: GPL-2.0
/* Each allocation of a modify to RTR fails once: the receives must be flushed all the same. */

#include "ends.h"

static DECLARE_COMPLETION(flushed);

static void recv_done(struct ib_cq *cq, struct ib_wc *wc)
{
	complete(&flushed);
}

/* Returns what the modify to RTR has returned when its nth allocation failed. */
static int turn(struct ib_pd *pd, struct ib_cq *cq, int nth)
{
	static struct ib_cqe cqe = { .done = recv_done };
	struct ib_recv_wr wr = { .wr_cqe = &cqe };
	struct ib_qp *qp = end_create(pd, cq, NULL);
	int ret, rtr;

	if (IS_ERR(qp))
		return -EIO;
	reinit_completion(&flushed);
	ret = end_to_init(qp) ?: ib_post_recv(qp, &wr, NULL);
	current->fail_nth = nth;
	rtr = end_to_rtr(qp, qp->qp_num, 0);
	current->fail_nth = 0;
	ret = ret ?: end_to_err(qp);
	if (!ret && !wait_for_completion_timeout(&flushed, PATIENCE / 4)) {
		pr_err("rtr_nomem: the receive has not come back, allocation %d had failed\n", nth);
		ret = -EIO;
	}
	end_destroy(qp);
	return ret ?: rtr;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	int nth = 1, ret;

	do
		ret = turn(pd, cq, nth++);
	while (ret == -ENOMEM);
	pr_info("rtr_nomem: %d allocations\n", nth - 2);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a modify to RTR that fails stops the receives");
