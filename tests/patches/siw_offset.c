// SPDX-License-Identifier: GPL-2.0
/* Writes to memory that is registered from an offset on: nothing before it may change. */

#include "siw.h"

#define OFFSET 64

static int write_and_wait(struct ib_qp *qp, struct ib_mr *mr, void *source, u32 len)
{
	struct ib_sge sge = { .length = len, .lkey = pd->local_dma_lkey };
	struct ib_rdma_wr write = {
		.wr = { .opcode = IB_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1 },
		.remote_addr = mr->iova,
		.rkey = mr->rkey,
	};
	int ret;

	sge.addr = ib_dma_map_single(pd->device, source, len, DMA_TO_DEVICE);
	ret = post_and_wait(qp, &write.wr);
	ib_dma_unmap_single(pd->device, sge.addr, len, DMA_TO_DEVICE);
	return ret;
}

static int run(struct ib_qp *qp)
{
	const int access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE | IB_ACCESS_REMOTE_READ;
	char *page = kzalloc(PAGE_SIZE, GFP_KERNEL), *bytes = kzalloc(8, GFP_KERNEL);
	struct scatterlist sg;
	struct ib_mr *mr;
	int ret;

	if (!page || !bytes)
		return -ENOMEM;
	mr = page_register(&sg, page, OFFSET, access);
	if (IS_ERR(mr))
		return PTR_ERR(mr);
	strscpy(bytes, "written", 8);
	/* The bytes of a WRITE have arrived when a later READ has completed. */
	ret = write_and_wait(qp, mr, bytes, 8) ?: read_and_wait(qp, mr, bytes, 8);
	if (!ret && request_status != IB_WC_SUCCESS)
		ret = -EIO;
	if (!ret && (*page || strcmp(page + OFFSET, "written"))) {
		pr_err("siw_offset: there is \"%s\" before the region, \"%s\" in it\n", page,
		       page + OFFSET);
		ret = -EIO;
	}
	page_deregister(&sg, mr);
	kfree(bytes);
	kfree(page);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: the offset of a region is forgotten");
