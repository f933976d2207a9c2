/* SPDX-License-Identifier: GPL-2.0 */
/* Common part of the reproducers for siw: two connected QPs of one device. See ends.h for run(). */

#include <linux/module.h>
#include <linux/slab.h>

#include "cma.h"

static struct rdma_cm_id *server;
static struct ib_pd *pd;
static struct ib_cq *cq;

static inline int qp_create(struct rdma_cm_id *id)
{
	struct ib_qp_init_attr attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = {
			.max_send_wr = 16,
			.max_send_sge = 1,
			.max_recv_wr = 4,
			.max_recv_sge = 1,
		},
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = IB_QPT_RC,
	};

	return rdma_create_qp(id, pd, &attr);
}

static DECLARE_COMPLETION(server_disconnected);

static inline int server_handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };

	if (event->event == RDMA_CM_EVENT_DISCONNECTED)
		complete(&server_disconnected);
	if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST)
		return 0;
	server = id;
	return qp_create(id) ?: rdma_accept(id, &param);
}

static inline int client_connect(struct rdma_cm_id *id, struct sockaddr *addr)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	int ret = client_resolve(id, addr);

	if (ret)
		return ret;
	pd = ib_alloc_pd(id->device, 0);
	if (IS_ERR(pd))
		return PTR_ERR(pd);
	cq = ib_alloc_cq(id->device, NULL, 256, 0, IB_POLL_WORKQUEUE);
	if (IS_ERR(cq))
		return PTR_ERR(cq);
	return qp_create(id) ?: rdma_connect(id, &param) ?:
	       wait_event_of(id, RDMA_CM_EVENT_ESTABLISHED);
}

static DECLARE_COMPLETION(request_done);
static enum ib_wc_status request_status;

static inline void request_completes(struct ib_cq *cq, struct ib_wc *wc)
{
	request_status = wc->status;
	complete(&request_done);
}

/* Posts a signaled request, and waits for request_status. */
static inline int post_and_wait(struct ib_qp *qp, struct ib_send_wr *wr)
{
	static struct ib_cqe cqe = { .done = request_completes };
	int ret;

	wr->wr_cqe = &cqe;
	wr->send_flags = IB_SEND_SIGNALED;
	ret = ib_post_send(qp, wr, NULL);
	if (!ret && !wait_for_completion_timeout(&request_done, PATIENCE))
		ret = -ETIMEDOUT;
	return ret;
}

/* Registers as many bytes as a page has for the peer, from an offset on. */
static inline struct ib_mr *page_register(struct scatterlist *sg, void *page, unsigned int offset,
					  int access)
{
	struct ib_mr *mr = ib_alloc_mr(pd, IB_MR_TYPE_MEM_REG, 1);
	struct ib_reg_wr reg = { .wr = { .opcode = IB_WR_REG_MR }, .mr = mr, .access = access };
	int ret;

	if (IS_ERR(mr))
		return mr;
	sg_init_one(sg, page, PAGE_SIZE);
	ib_dma_map_sg(pd->device, sg, 1, DMA_BIDIRECTIONAL);
	reg.key = mr->rkey;
	ret = ib_map_mr_sg(mr, sg, 1, &offset, PAGE_SIZE) == 1 ? 0 : -EIO;
	ret = ret ?: post_and_wait(server->qp, &reg.wr);
	if (ret || request_status != IB_WC_SUCCESS) {
		ib_dma_unmap_sg(pd->device, sg, 1, DMA_BIDIRECTIONAL);
		ib_dereg_mr(mr);
		return ERR_PTR(ret ?: -EIO);
	}
	return mr;
}

/* Both QPs are drained. */
static inline void page_deregister(struct scatterlist *sg, struct ib_mr *mr)
{
	ib_dereg_mr(mr);
	ib_dma_unmap_sg(pd->device, sg, 1, DMA_BIDIRECTIONAL);
}

/* Reads the first bytes of the peer's region, and waits for request_status. */
static inline int read_and_wait(struct ib_qp *qp, struct ib_mr *mr, void *sink, u32 len)
{
	struct ib_sge sge = { .length = len, .lkey = pd->local_dma_lkey };
	struct ib_rdma_wr read = {
		.wr = { .opcode = IB_WR_RDMA_READ, .sg_list = &sge, .num_sge = 1 },
		.remote_addr = mr->iova,
		.rkey = mr->rkey,
	};
	int ret;

	sge.addr = ib_dma_map_single(pd->device, sink, len, DMA_FROM_DEVICE);
	ret = post_and_wait(qp, &read.wr);
	ib_drain_qp(qp);
	ib_drain_qp(server->qp);
	ib_dma_unmap_single(pd->device, sge.addr, len, DMA_FROM_DEVICE);
	return ret;
}

static inline void id_end(struct rdma_cm_id *id)
{
	if (id->qp) {
		ib_drain_qp(id->qp);
		rdma_destroy_qp(id);
	}
	rdma_destroy_id(id);
}

static int run(struct ib_qp *qp);

static int __init reproducer_init(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct rdma_cm_id *listener, *client;
	int ret;

	addr.sin_addr.s_addr = htonl(0xc6336401);
	listener = rdma_create_id(&init_net, server_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	client = rdma_create_id(&init_net, client_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(listener) || IS_ERR(client))
		return -ENOMEM;
	ret = rdma_bind_addr(listener, (struct sockaddr *)&addr) ?: rdma_listen(listener, 1);
	ret = ret ?: client_connect(client, (struct sockaddr *)&addr);
	pr_info("siw: connected: %d\n", ret);
	ret = ret ?: run(client->qp);
	id_end(client);
	if (server)
		id_end(server);
	rdma_destroy_id(listener);
	if (!IS_ERR_OR_NULL(cq))
		ib_free_cq(cq);
	if (!IS_ERR_OR_NULL(pd))
		ib_dealloc_pd(pd);
	return ret;
}
module_init(reproducer_init);

static void __exit reproducer_exit(void)
{
}
module_exit(reproducer_exit);

MODULE_LICENSE("GPL");
