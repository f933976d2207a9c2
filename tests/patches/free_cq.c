// SPDX-License-Identifier: GPL-2.0
/* Frees softirq CQs right after their last completion. */

#include "ends.h"

static int turn(struct ib_pd *pd)
{
	struct ib_cq *cq = ib_alloc_cq(pd->device, NULL, 128, 0, IB_POLL_SOFTIRQ);
	struct ib_qp *qp;
	int ret;

	if (IS_ERR(cq))
		return PTR_ERR(cq);
	qp = end_create(pd, cq, NULL);
	ret = PTR_ERR_OR_ZERO(qp) ?: end_to_init(qp);
	if (!ret)
		ib_drain_qp(qp);
	end_destroy(qp);
	ib_free_cq(cq);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	int i, ret = 0;

	for (i = 0; i < 50 && !ret; i++)
		ret = turn(pd);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a CQ is freed while it is polled");
