// SPDX-License-Identifier: GPL-2.0
/* Invalidates a key that was not registered: that must fail, and not end one that was. */

#include "siw.h"

static int run(struct ib_qp *qp)
{
	void *page = kzalloc(PAGE_SIZE, GFP_KERNEL);
	struct ib_mr *mr = ib_alloc_mr(pd, IB_MR_TYPE_MEM_REG, 1);
	struct ib_reg_wr reg = {
		.wr = { .opcode = IB_WR_REG_MR },
		.mr = mr,
		.access = IB_ACCESS_REMOTE_WRITE | IB_ACCESS_LOCAL_WRITE,
	};
	struct ib_send_wr inv = { .opcode = IB_WR_LOCAL_INV };
	struct scatterlist sg;
	int ret;

	if (!page || IS_ERR(mr))
		return -ENOMEM;
	sg_init_one(&sg, page, PAGE_SIZE);
	ib_dma_map_sg(pd->device, &sg, 1, DMA_BIDIRECTIONAL);
	ret = ib_map_mr_sg(mr, &sg, 1, NULL, PAGE_SIZE) == 1 ? 0 : -EIO;
	inv.ex.invalidate_rkey = mr->rkey;
	ib_update_fast_reg_key(mr, mr->rkey + 1);
	reg.key = mr->rkey;
	ret = ret ?: post_and_wait(qp, &reg.wr);
	if (!ret && request_status != IB_WC_SUCCESS)
		ret = -EIO;
	ret = ret ?: post_and_wait(qp, &inv);
	if (!ret && request_status == IB_WC_SUCCESS) {
		pr_err("siw_stag: key %#x is invalidated by %#x\n", reg.key,
		       inv.ex.invalidate_rkey);
		ret = -EIO;
	}
	ib_drain_qp(qp);
	ib_dereg_mr(mr);
	ib_dma_unmap_sg(pd->device, &sg, 1, DMA_BIDIRECTIONAL);
	kfree(page);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a key invalidates another one");
