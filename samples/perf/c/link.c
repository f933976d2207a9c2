// SPDX-License-Identifier: GPL-2.0
/*
 * The QPs of both ends, connected to each other directly. They may be of two
 * devices, and these in two network namespaces.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/etherdevice.h>
#include <linux/slab.h>
#include <net/ipv6.h>
#include <rdma/ib_cache.h>

#include "perf.h"

#define PERF_RD_ATOMIC	128

static bool perf_is_ipv4(const struct ib_gid_attr *attr)
{
	return attr->gid_type == IB_GID_TYPE_ROCE_UDP_ENCAP &&
	       ipv6_addr_v4mapped((const struct in6_addr *)&attr->gid);
}

/* The first IPv4 address of RoCE v2. Without one, the first GID. */
static const struct ib_gid_attr *perf_find_gid(struct ib_device *dev)
{
	const struct ib_gid_attr *attr;
	struct ib_port_attr port;
	int i, ret;

	ret = ib_query_port(dev, PERF_PORT, &port);
	if (ret)
		return ERR_PTR(ret);
	for (i = 0; i < port.gid_tbl_len; i++) {
		attr = rdma_get_gid_attr(dev, PERF_PORT, i);
		if (IS_ERR(attr))
			continue;
		if (perf_is_ipv4(attr))
			return attr;
		rdma_put_gid_attr(attr);
	}
	return rdma_get_gid_attr(dev, PERF_PORT, 0);
}

/* Both ends are here, so MAC addresses need no looking for. */
int perf_find_way(struct ib_device *dev, struct perf_way *way)
{
	const struct ib_gid_attr *attr;
	int ret;

	way->roce = rdma_protocol_roce(dev, PERF_PORT);
	if (!way->roce)
		return 0;
	attr = perf_find_gid(dev);
	if (IS_ERR(attr))
		return PTR_ERR(attr);
	way->gid = attr->gid;
	way->index = attr->index;
	ret = rdma_read_gid_l2_fields(attr, NULL, way->mac);
	rdma_put_gid_attr(attr);
	return ret;
}

static int perf_to_init(struct ib_qp *qp)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_INIT,
		.port_num = PERF_PORT,
		.qp_access_flags = IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE,
	};

	return ib_modify_qp(qp, &attr, IB_QP_STATE | IB_QP_PKEY_INDEX | IB_QP_PORT |
				       IB_QP_ACCESS_FLAGS);
}

/* The number of READs that a QP of @from can have outstanding at @to. */
static u8 perf_rd_atomic(const struct ib_device *from, const struct ib_device *to)
{
	int max = min(from->attrs.max_qp_init_rd_atom, to->attrs.max_qp_rd_atom);

	return clamp(max, 1, PERF_RD_ATOMIC);
}

static int perf_to_rtr(struct ib_qp *qp, u32 peer, u8 rd_atomic,
		       const struct perf_way *from, const struct perf_way *to)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.path_mtu = IB_MTU_1024,
		.dest_qp_num = peer,
		.max_dest_rd_atomic = rd_atomic,
		.min_rnr_timer = 1,
	};

	attr.ah_attr.type = rdma_ah_find_type(qp->device, PERF_PORT);
	rdma_ah_set_port_num(&attr.ah_attr, PERF_PORT);
	if (from->roce) {
		rdma_ah_set_grh(&attr.ah_attr, NULL, 0, from->index, 64, 0);
		rdma_ah_set_dgid_raw(&attr.ah_attr, (void *)to->gid.raw);
		ether_addr_copy(attr.ah_attr.roce.dmac, to->mac);
	}
	return ib_modify_qp(qp, &attr, IB_QP_STATE | IB_QP_AV | IB_QP_PATH_MTU |
				       IB_QP_DEST_QPN | IB_QP_RQ_PSN |
				       IB_QP_MAX_DEST_RD_ATOMIC | IB_QP_MIN_RNR_TIMER);
}

static int perf_to_rts(struct ib_qp *qp, u8 rd_atomic, u8 timeout)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTS,
		.timeout = timeout,
		.retry_cnt = 7,
		.rnr_retry = 7,
		.max_rd_atomic = rd_atomic,
	};

	return ib_modify_qp(qp, &attr, IB_QP_STATE | IB_QP_TIMEOUT | IB_QP_RETRY_CNT |
				       IB_QP_RNR_RETRY | IB_QP_SQ_PSN |
				       IB_QP_MAX_QP_RD_ATOMIC);
}

struct ib_qp *perf_create_qp(const struct perf_end *end)
{
	struct ib_qp_init_attr attr = {
		.send_cq = end->cq,
		.recv_cq = end->cq,
		.cap = {
			/* One more each for the mark at the end. */
			.max_send_wr = end->sends + 1,
			.max_recv_wr = end->recvs + 1,
			.max_send_sge = 1,
			.max_recv_sge = 1,
			.max_rdma_ctxs = end->transfers,
		},
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = IB_QPT_RC,
		.port_num = PERF_PORT,
	};

	return ib_create_qp(end->pd, &attr);
}

static int perf_create_qps(struct perf_run *run, struct perf_end *end)
{
	struct ib_qp *qp;
	u32 i;
	int ret;

	end->qps = kvzalloc_objs(*end->qps, run->nr_qps);
	if (!end->qps)
		return -ENOMEM;
	for (i = 0; i < run->nr_qps; i++) {
		qp = perf_create_qp(end);
		if (IS_ERR(qp))
			return PTR_ERR(qp);
		end->qps[i] = qp;
		ret = perf_to_init(qp);
		if (ret)
			return ret;
	}
	return 0;
}

/* On a null device, requests then complete and do nothing. */
int perf_connect_to_none(struct ib_qp *qp, const struct perf_way *way)
{
	u8 rd_atomic = perf_rd_atomic(qp->device, qp->device);
	int ret = perf_to_init(qp);

	if (!ret)
		ret = perf_to_rtr(qp, 0, rd_atomic, way, way);
	return ret ?: perf_to_rts(qp, rd_atomic, PERF_TIMEOUT);
}

/* Connects the QPs of @from to those of @to, or to none. */
static int perf_connect_qps(struct perf_run *run, struct perf_end *from, struct perf_end *to,
			    const struct perf_way *from_way, const struct perf_way *to_way)
{
	struct ib_device *peer = to ? to->dev : from->dev;
	u32 i;
	int ret;

	for (i = 0; i < run->nr_qps; i++) {
		ret = perf_to_rtr(from->qps[i], to ? to->qps[i]->qp_num : 0,
				  perf_rd_atomic(peer, from->dev), from_way, to_way);
		if (!ret)
			ret = perf_to_rts(from->qps[i], perf_rd_atomic(from->dev, peer),
					  run->args->timeout);
		if (ret)
			return ret;
	}
	return 0;
}

static int perf_connect(struct perf_run *run)
{
	struct perf_way a, b;
	int ret;

	ret = perf_find_way(run->a.dev, &a);
	if (ret)
		return ret;
	ret = perf_create_qps(run, &run->a);
	if (ret)
		return ret;
	if (!run->args->load->pair)
		return perf_connect_qps(run, &run->a, NULL, &a, &a);

	ret = perf_find_way(run->b.dev, &b);
	if (ret)
		return ret;
	ret = perf_create_qps(run, &run->b);
	if (ret)
		return ret;
	ret = perf_connect_qps(run, &run->b, &run->a, &b, &a);
	if (ret)
		return ret;
	return perf_connect_qps(run, &run->a, &run->b, &a, &b);
}

int perf_link_init(struct perf_run *run)
{
	int ret;

	if (run->args->load->by_load)
		return 0;
	ret = perf_connect(run);
	if (ret)
		pr_err("%s: QPs cannot be connected: %d\n", run->args->load->name, ret);
	else
		run->linked = true;
	return ret;
}

static void perf_destroy_qps(struct perf_run *run, struct perf_end *end)
{
	u32 i;

	if (!end->qps)
		return;
	for (i = 0; i < run->nr_qps && end->qps[i]; i++)
		ib_destroy_qp(end->qps[i]);
	kvfree(end->qps);
}

void perf_link_exit(struct perf_run *run)
{
	perf_destroy_qps(run, &run->a);
	perf_destroy_qps(run, &run->b);
}
