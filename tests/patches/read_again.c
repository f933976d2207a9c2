// SPDX-License-Identifier: GPL-2.0
/*
 * A peer asks again for an RDMA READ whose response was lost, or is late. What it has read was
 * invalidated meanwhile: the connection must last.
 */

#include <linux/scatterlist.h>

#include "packet.h"

struct reth {
	__be64 va;
	__be32 rkey;
	__be32 length;
} __packed;

/* The peer sends a message, which comes when all before it was handled. */
static int message_receive(struct ib_qp *qp, u32 psn)
{
	struct ib_recv_wr wr = { .wr_cqe = &request_cqe };

	return ib_post_recv(qp, &wr, NULL) ?:
		packet_receive(qp->qp_num, IB_OPCODE_RC_SEND_ONLY, psn, NULL, 0) ?:
		request_wait();
}

static int mr_register(struct ib_qp *qp, struct ib_mr *mr, struct scatterlist *sg)
{
	struct ib_reg_wr reg = {
		.wr = {
			.wr_cqe = &request_cqe,
			.opcode = IB_WR_REG_MR,
			.send_flags = IB_SEND_SIGNALED,
		},
		.mr = mr,
		.key = mr->rkey,
		.access = IB_ACCESS_REMOTE_READ,
	};

	if (ib_map_mr_sg(mr, sg, 1, NULL, PAGE_SIZE) != 1)
		return -EIO;
	return ib_post_send(qp, &reg.wr, NULL) ?: request_wait();
}

static int mr_invalidate(struct ib_qp *qp, struct ib_mr *mr)
{
	struct ib_send_wr inv = {
		.wr_cqe = &request_cqe,
		.opcode = IB_WR_LOCAL_INV,
		.send_flags = IB_SEND_SIGNALED,
		.ex.invalidate_rkey = mr->rkey,
	};

	return ib_post_send(qp, &inv, NULL) ?: request_wait();
}

static int read_twice(struct ib_qp *qp, struct ib_mr *mr, struct scatterlist *sg)
{
	struct ib_qp_attr attr = { .qp_access_flags = IB_ACCESS_REMOTE_READ };
	struct reth reth = { .length = cpu_to_be32(64) };
	int ret;

	ret = end_to_init(qp) ?: end_to_rtr(qp, 0x123, HOST) ?: end_to_rts(qp) ?:
		ib_modify_qp(qp, &attr, IB_QP_ACCESS_FLAGS) ?: mr_register(qp, mr, sg);
	if (ret)
		return ret;
	reth.va = cpu_to_be64(mr->iova);
	reth.rkey = cpu_to_be32(mr->rkey);
	ret = packet_receive(qp->qp_num, IB_OPCODE_RC_RDMA_READ_REQUEST, 0, &reth,
			     sizeof(reth)) ?:
		message_receive(qp, 1) ?: mr_invalidate(qp, mr) ?:
		packet_receive(qp->qp_num, IB_OPCODE_RC_RDMA_READ_REQUEST, 0, &reth,
			       sizeof(reth));
	if (ret)
		return ret;
	ret = message_receive(qp, 2);
	if (ret)
		pr_err("read_again: the connection has ended: status %d\n", request_status);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct page *page = alloc_page(GFP_KERNEL);
	struct ib_qp *qp = end_create(pd, cq, NULL);
	struct ib_mr *mr = ib_alloc_mr(pd, IB_MR_TYPE_MEM_REG, 1);
	struct scatterlist sg;
	int ret = page ? PTR_ERR_OR_ZERO(qp) ?: PTR_ERR_OR_ZERO(mr) : -ENOMEM;

	if (!ret) {
		sg_init_table(&sg, 1);
		sg_set_page(&sg, page, PAGE_SIZE, 0);
		ret = ib_dma_map_sg(pd->device, &sg, 1, DMA_TO_DEVICE) == 1 ? 0 : -EIO;
	}
	if (!ret) {
		ret = read_twice(qp, mr, &sg);
		ib_drain_qp(qp);
		ib_dma_unmap_sg(pd->device, &sg, 1, DMA_TO_DEVICE);
	}
	end_destroy(qp);
	if (!IS_ERR(mr))
		ib_dereg_mr(mr);
	if (page)
		__free_page(page);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a repeated READ of what was invalidated ends the connection");
