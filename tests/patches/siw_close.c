// SPDX-License-Identifier: GPL-2.0
/* Disconnects while a READ is not answered: it must be flushed. */

#include <linux/delay.h>

#include "siw.h"

static int run(struct ib_qp *qp)
{
	static struct ib_cqe cqe = { .done = request_completes };
	struct ib_sge sge = { .length = 16 };
	struct ib_rdma_wr read = {
		.wr = {
			.wr_cqe = &cqe,
			.opcode = IB_WR_RDMA_READ,
			.send_flags = IB_SEND_SIGNALED,
			.sg_list = &sge,
			.num_sge = 1,
		},
	};
	void *source = kzalloc(PAGE_SIZE, GFP_KERNEL), *sink = kzalloc(sge.length, GFP_KERNEL);
	struct scatterlist sg;
	struct ib_mr *mr;
	int ret;

	if (!source || !sink)
		return -ENOMEM;
	mr = page_register(&sg, source, 0, IB_ACCESS_REMOTE_READ);
	if (IS_ERR(mr))
		return PTR_ERR(mr);
	read.remote_addr = mr->iova;
	read.rkey = mr->rkey;
	sge.lkey = pd->local_dma_lkey;
	sge.addr = ib_dma_map_single(pd->device, sink, sge.length, DMA_FROM_DEVICE);
	ret = ib_post_send(server->qp, &read.wr, NULL);
	if (!ret) {
		/* By now it was sent. */
		msleep(100);
		rdma_disconnect(server);
		ib_drain_qp(server->qp);
		if (!wait_for_completion_timeout(&request_done, PATIENCE))
			ret = -ETIMEDOUT;
	}
	if (ret)
		pr_err("siw_close: the READ: %d\n", ret);
	ib_drain_qp(qp);
	ib_dma_unmap_single(pd->device, sge.addr, sge.length, DMA_FROM_DEVICE);
	page_deregister(&sg, mr);
	kfree(source);
	kfree(sink);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a READ that was sent is lost when its connection is closed");
