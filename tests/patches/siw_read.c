// SPDX-License-Identifier: GPL-2.0
/* Reads memory that its owner has registered for remote writing only: no byte of it may come. */

#include "siw.h"

#define SECRET "what a peer may not read"

static int run(struct ib_qp *qp)
{
	char *page = kzalloc(PAGE_SIZE, GFP_KERNEL), *sink = kzalloc(sizeof(SECRET), GFP_KERNEL);
	struct ib_mr *mr = ib_alloc_mr(pd, IB_MR_TYPE_MEM_REG, 1);
	struct ib_reg_wr reg = {
		.wr = { .opcode = IB_WR_REG_MR },
		.mr = mr,
		.access = IB_ACCESS_REMOTE_WRITE | IB_ACCESS_LOCAL_WRITE,
	};
	struct ib_sge sge = { .length = sizeof(SECRET), .lkey = pd->local_dma_lkey };
	struct ib_rdma_wr read = { .wr = { .opcode = IB_WR_RDMA_READ, .sg_list = &sge, .num_sge = 1 } };
	struct scatterlist sg;
	int ret;

	if (!page || !sink || IS_ERR(mr))
		return -ENOMEM;
	strscpy(page, SECRET, PAGE_SIZE);
	sg_init_one(&sg, page, PAGE_SIZE);
	ib_dma_map_sg(pd->device, &sg, 1, DMA_BIDIRECTIONAL);
	sge.addr = ib_dma_map_single(pd->device, sink, sizeof(SECRET), DMA_FROM_DEVICE);
	ret = ib_map_mr_sg(mr, &sg, 1, NULL, PAGE_SIZE) == 1 ? 0 : -EIO;
	reg.key = mr->rkey;
	ret = ret ?: post_and_wait(server->qp, &reg.wr);
	if (!ret && request_status != IB_WC_SUCCESS)
		ret = -EIO;
	read.remote_addr = mr->iova;
	read.rkey = mr->rkey;
	ret = ret ?: post_and_wait(qp, &read.wr);
	pr_info("siw_read: the READ completes with status %d\n", request_status);
	ib_drain_qp(qp);
	ib_drain_qp(server->qp);
	ib_dma_unmap_single(pd->device, sge.addr, sizeof(SECRET), DMA_FROM_DEVICE);
	ib_dma_unmap_sg(pd->device, &sg, 1, DMA_BIDIRECTIONAL);
	if (!ret && (request_status == IB_WC_SUCCESS || *sink)) {
		pr_err("siw_read: the peer has read \"%s\"\n", sink);
		ret = -EIO;
	}
	ib_dereg_mr(mr);
	kfree(sink);
	kfree(page);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a peer reads what is registered for writing");
