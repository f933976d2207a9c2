// SPDX-License-Identifier: GPL-2.0
/*
 * An interface drops a packet, as one of a veth pair does whose other one is down. That must be a
 * loss as any other: a request, a MAD and a response to a READ have to be sent again.
 */

#include "cm.h"
#include "packet.h"

/* The opcodes of the packets that were sent, without acknowledgments. The first one is dropped. */
static u8 opcodes[2];
static atomic_t packets;

/* Another packet was sent, or whoever sends it has come to an end. */
static DECLARE_COMPLETION(settled);

static netdev_tx_t lossy_xmit(struct sk_buff *skb, struct net_device *ndev)
{
	const struct packet *packet = (struct packet *)skb_network_header(skb);
	int count = 0;

	if (skb->protocol == cpu_to_be16(ETH_P_IP) && packet->ip.protocol == IPPROTO_UDP &&
	    packet->opcode != IB_OPCODE_RC_ACKNOWLEDGE)
		count = atomic_inc_return(&packets);
	if (count && count <= ARRAY_SIZE(opcodes))
		opcodes[count - 1] = packet->opcode;
	if (count > 1)
		complete(&settled);
	kfree_skb(skb);
	return count == 1 ? NET_XMIT_DROP : NETDEV_TX_OK;
}

static const struct net_device_ops lossy_ops = { .ndo_start_xmit = lossy_xmit };

static void packets_forget(void)
{
	atomic_set(&packets, 0);
	reinit_completion(&settled);
}

static int sent_again(const char *what)
{
	if (!wait_for_completion_timeout(&settled, PATIENCE))
		return -ETIMEDOUT;
	if (atomic_read(&packets) > 1 && opcodes[0] == opcodes[1])
		return 0;
	pr_err("lost_packet: %s is not sent again\n", what);
	return -EIO;
}

static void end_settles(struct ib_cq *cq, struct ib_wc *wc)
{
	complete(&settled);
}

static struct ib_cqe settles = { .done = end_settles };

static int request_lost(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_send_wr wr = { .wr_cqe = &settles, .opcode = IB_WR_SEND };
	struct ib_qp *qp = end_create(pd, cq, NULL);
	int ret = PTR_ERR_OR_ZERO(qp);

	if (ret)
		return ret;
	packets_forget();
	ret = end_to_init(qp) ?: end_to_rtr(qp, 0x123, HOST) ?: end_to_rts(qp) ?:
		ib_post_send(qp, &wr, NULL) ?: sent_again("a request");
	ib_drain_qp(qp);
	ib_destroy_qp(qp);
	return ret;
}

/* The peer reads, and reads again. */
static int response_lost(struct ib_qp *qp, struct ib_mr *mr, struct scatterlist *sg)
{
	struct ib_qp_attr attr = { .qp_access_flags = IB_ACCESS_REMOTE_READ };
	struct ib_recv_wr wr = { .wr_cqe = &settles };
	struct reth reth = { .length = cpu_to_be32(64) };
	int i, ret;

	packets_forget();
	ret = end_to_init(qp) ?: ib_post_recv(qp, &wr, NULL) ?: end_to_rtr(qp, 0x123, HOST) ?:
		end_to_rts(qp) ?: ib_modify_qp(qp, &attr, IB_QP_ACCESS_FLAGS) ?:
		mr_register(qp, mr, sg);
	reth.va = cpu_to_be64(mr->iova);
	reth.rkey = cpu_to_be32(mr->rkey);
	for (i = 0; !ret && i < 2; i++)
		ret = packet_receive(qp->qp_num, IB_OPCODE_RC_RDMA_READ_REQUEST, 0, &reth,
				     sizeof(reth));
	return ret ?: sent_again("a response");
}

static int client_handler(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	if (event->event == IB_CM_REQ_ERROR)
		complete(&settled);
	return 0;
}

static int mad_lost(struct ib_device *dev)
{
	struct ib_cm_id *id = ib_create_cm_id(dev, client_handler, NULL);
	int ret = PTR_ERR_OR_ZERO(id);

	if (ret)
		return ret;
	packets_forget();
	request_host = HOST;
	ret = request(id, 16, 15) ?: sent_again("a MAD");
	ib_destroy_cm_id(id);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct net_device *ndev = dev_get_by_name(&init_net, "rdma0");
	const struct net_device_ops *ops = ndev->netdev_ops;
	int req, rsp, mad;

	WRITE_ONCE(ndev->netdev_ops, &lossy_ops);
	req = request_lost(pd, cq);
	rsp = mr_use(pd, cq, response_lost);
	mad = mad_lost(pd->device);
	WRITE_ONCE(ndev->netdev_ops, ops);
	synchronize_net();
	dev_put(ndev);
	if (req && rsp && mad)
		pr_err("lost_packet: nothing is sent again\n");
	return req ?: rsp ?: mad;
}

MODULE_DESCRIPTION("Reproducer: a packet that the interface drops is an error of its QP");
