// SPDX-License-Identifier: GPL-2.0
/* Asks how many MRs a transfer takes, where they are forced on a device that has none. */

#include "ends.h"
#include <linux/scatterlist.h>
#include <rdma/rw.h>

static int transfer(struct ib_qp *qp)
{
	void *page = (void *)get_zeroed_page(GFP_KERNEL);
	struct rdma_rw_ctx ctx;
	struct scatterlist sg;
	int ret;

	if (!page)
		return -ENOMEM;
	sg_init_one(&sg, page, PAGE_SIZE);
	ret = rdma_rw_ctx_init(&ctx, qp, 1, &sg, 1, 0, 0x1000, 1, DMA_FROM_DEVICE);
	if (ret > 0) {
		rdma_rw_ctx_destroy(&ctx, qp, 1, &sg, 1, DMA_FROM_DEVICE);
		ret = 0;
	}
	free_page((unsigned long)page);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_qp_init_attr attr = {
		.event_handler = ignore_event,
		.send_cq = cq,
		.recv_cq = cq,
		.cap = {
			.max_send_wr = 4,
			.max_send_sge = 1,
			.max_recv_wr = 4,
			.max_recv_sge = 1,
			.max_rdma_ctxs = rdma_rw_mr_factor(pd->device, 1, 256),
		},
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = IB_QPT_RC,
		.port_num = 1,
	};
	struct ib_qp *qp = ib_create_qp(pd, &attr);
	int ret;

	if (IS_ERR(qp))
		return PTR_ERR(qp);
	ret = transfer(qp);
	ib_destroy_qp(qp);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: MRs are forced on a device that has none");
