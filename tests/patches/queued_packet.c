// SPDX-License-Identifier: GPL-2.0
/* Destroys a QP while its peer sends to it. */

#include "ends.h"

static void done(struct ib_cq *cq, struct ib_wc *wc)
{
}

static struct ib_cqe cqe = { .done = done };

static int post_sends(struct ib_qp *qp)
{
	struct ib_rdma_wr wr = { .wr = { .wr_cqe = &cqe, .opcode = IB_WR_RDMA_WRITE } };
	int i, ret = 0;

	/* Writes of nothing: no memory is needed, each is a packet. */
	for (i = 0; i < 16 && !ret; i++)
		ret = ib_post_send(qp, &wr.wr, NULL);
	return ret;
}

static int turn(struct ib_pd *pd, struct ib_cq *cq, int delay)
{
	struct ib_qp *client = end_create(pd, cq, NULL), *server = end_create(pd, cq, NULL);
	int ret;

	ret = ends_connect(client, server) ?: post_sends(client);
	/* At another moment each time. */
	usleep_range(100 * delay, 100 * delay + 50);
	ret = ret ?: end_to_err(server);
	end_destroy(server);
	if (!ret)
		ib_drain_qp(client);
	end_destroy(client);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	int i, ret = 0;

	for (i = 0; i < 400 && !ret; i++)
		ret = turn(pd, cq, i % 20);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a QP is destroyed while a packet is queued to it");
