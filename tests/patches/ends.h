/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Common part of the reproducers: a PD and a CQ of an rxe device, and RC QPs. A time-out only ends
 * what hangs. A function run() reproduces; insmod returns its error.
 */

#ifndef RDMA_RS_ENDS_H
#define RDMA_RS_ENDS_H

#include <linux/delay.h>
#include <linux/module.h>
#include <net/ipv6.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>

#define PATIENCE (60 * HZ)
/* A host of the device's network that is not there. */
#define HOST 2

/* Returns the first IPv4 address of the device, which is there some time after the device. */
static inline const struct ib_gid_attr *device_gid(struct ib_device *dev)
{
	const struct ib_gid_attr *gid;
	int i;

	for (;; msleep(20)) {
		for (i = 0; i < 16; i++) {
			gid = rdma_get_gid_attr(dev, 1, i);
			if (IS_ERR(gid))
				continue;
			if (gid->gid_type == IB_GID_TYPE_ROCE_UDP_ENCAP &&
			    ipv6_addr_v4mapped((const struct in6_addr *)&gid->gid))
				return gid;
			rdma_put_gid_attr(gid);
		}
	}
}

static inline void ignore_event(struct ib_event *event, void *context)
{
}

static inline struct ib_qp *end_create(struct ib_pd *pd, struct ib_cq *cq, struct ib_srq *srq)
{
	struct ib_qp_init_attr attr = {
		.event_handler = ignore_event,
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = {
			.max_send_wr = 64,
			.max_send_sge = 2,
			.max_recv_wr = srq ? 0 : 4,
			.max_recv_sge = 1,
		},
		.sq_sig_type = IB_SIGNAL_ALL_WR,
		.qp_type = IB_QPT_RC,
	};

	return ib_create_qp(pd, &attr);
}

static inline void end_destroy(struct ib_qp *qp)
{
	if (!IS_ERR(qp))
		ib_destroy_qp(qp);
}

static inline int end_to_init(struct ib_qp *qp)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IB_ACCESS_REMOTE_WRITE,
	};

	return ib_modify_qp(qp, &attr,
			    IB_QP_STATE | IB_QP_PKEY_INDEX | IB_QP_PORT | IB_QP_ACCESS_FLAGS);
}

/* How many READs and atomics of the peer a QP is to have resources for. */
static u8 end_depth = 1;

/* The peer is a QP of the device itself or, with a HOST, of that one in the device's network. */
static inline int end_to_rtr(struct ib_qp *qp, u32 peer, u8 host)
{
	const struct ib_gid_attr *gid = device_gid(qp->device);
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.path_mtu = IB_MTU_1024,
		.dest_qp_num = peer,
		.max_dest_rd_atomic = end_depth,
		.min_rnr_timer = 1,
		.ah_attr = { .type = RDMA_AH_ATTR_TYPE_ROCE, .port_num = 1 },
	};
	union ib_gid dgid = gid->gid;
	int ret;

	if (host)
		dgid.raw[15] = host;
	rdma_ah_set_grh(&attr.ah_attr, &dgid, 0, gid->index, 64, 0);
	ret = rdma_read_gid_l2_fields(gid, NULL, attr.ah_attr.roce.dmac);
	attr.ah_attr.roce.dmac[5] ^= host;
	if (!ret)
		ret = ib_modify_qp(qp, &attr,
				   IB_QP_STATE | IB_QP_AV | IB_QP_PATH_MTU | IB_QP_DEST_QPN |
				   IB_QP_RQ_PSN | IB_QP_MAX_DEST_RD_ATOMIC | IB_QP_MIN_RNR_TIMER);
	rdma_put_gid_attr(gid);
	return ret;
}

static inline int end_to_rts(struct ib_qp *qp)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTS,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
	};

	return ib_modify_qp(qp, &attr,
			    IB_QP_STATE | IB_QP_TIMEOUT | IB_QP_RETRY_CNT | IB_QP_RNR_RETRY |
			    IB_QP_SQ_PSN | IB_QP_MAX_QP_RD_ATOMIC);
}

static inline int end_to_err(struct ib_qp *qp)
{
	struct ib_qp_attr attr = { .qp_state = IB_QPS_ERR };

	return ib_modify_qp(qp, &attr, IB_QP_STATE);
}

static inline int ends_connect(struct ib_qp *a, struct ib_qp *b)
{
	return PTR_ERR_OR_ZERO(a) ?: PTR_ERR_OR_ZERO(b) ?: end_to_init(a) ?: end_to_init(b) ?:
		end_to_rtr(a, b->qp_num, 0) ?: end_to_rtr(b, a->qp_num, 0) ?:
		end_to_rts(a) ?: end_to_rts(b);
}

/* The callback of the one request that is waited for, and its status. */
static DECLARE_COMPLETION(request_done);
static enum ib_wc_status request_status;

static inline void request_completes(struct ib_cq *cq, struct ib_wc *wc)
{
	request_status = wc->status;
	complete(&request_done);
}

static __maybe_unused struct ib_cqe request_cqe = { .done = request_completes };

/* Waits for the request that was posted, and returns whether it has failed. */
static inline int request_wait(void)
{
	if (!wait_for_completion_timeout(&request_done, PATIENCE))
		return -ETIMEDOUT;
	return request_status == IB_WC_SUCCESS ? 0 : -EIO;
}

static int run(struct ib_pd *pd, struct ib_cq *cq);

static int __init reproducer_init(void)
{
	struct net_device *ndev = dev_get_by_name(&init_net, "rdma0");
	struct ib_device *dev;
	struct ib_pd *pd;
	struct ib_cq *cq;
	int ret;

	if (!ndev)
		return -ENODEV;
	dev = ib_device_get_by_netdev(ndev, RDMA_DRIVER_RXE);
	dev_put(ndev);
	if (!dev)
		return -ENODEV;
	pd = ib_alloc_pd(dev, 0);
	cq = ib_alloc_cq(dev, NULL, 256, 0, IB_POLL_WORKQUEUE);
	ret = PTR_ERR_OR_ZERO(pd) ?: PTR_ERR_OR_ZERO(cq) ?: run(pd, cq);
	if (!IS_ERR(cq))
		ib_free_cq(cq);
	if (!IS_ERR(pd))
		ib_dealloc_pd(pd);
	ib_device_put(dev);
	return ret;
}
module_init(reproducer_init);

static void __exit reproducer_exit(void)
{
}
module_exit(reproducer_exit);

MODULE_LICENSE("GPL");

#endif
