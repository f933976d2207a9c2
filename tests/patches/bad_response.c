// SPDX-License-Identifier: GPL-2.0
/* A send is answered by an acknowledgment of a reserved kind: it must not complete as done. */

#include <linux/crc32.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include "ends.h"

#define HOST 2

static DECLARE_COMPLETION(sent);
static enum ib_wc_status status;

static void send_done(struct ib_cq *cq, struct ib_wc *wc)
{
	status = wc->status;
	complete(&sent);
}

struct ack {
	struct iphdr ip;
	struct udphdr udp;
	u8 opcode;
	u8 flags;
	__be16 pkey;
	__be32 qpn;
	__be32 psn;
	__be32 aeth;
	u32 icrc;
} __packed;

static u32 icrc(const struct ack *ack)
{
	struct ack masked = *ack;

	masked.ip.tos = 0xff;
	masked.ip.ttl = 0xff;
	masked.ip.check = CSUM_MANGLED_0;
	masked.udp.check = CSUM_MANGLED_0;
	masked.qpn |= cpu_to_be32(0xff000000);
	return ~crc32_le(0xdebb20e3, (u8 *)&masked, offsetof(struct ack, icrc));
}

/* The dummy device receives what a peer may send. */
static int answer(u32 qpn)
{
	struct sk_buff *skb = alloc_skb(sizeof(struct ack) + 64, GFP_KERNEL);
	struct net_device *ndev = dev_get_by_name(&init_net, "rdma0");
	struct ack *ack;

	if (!skb || !ndev)
		return -ENOMEM;
	skb_reserve(skb, 64);
	ack = skb_put_zero(skb, sizeof(*ack));
	ack->ip.version = 4;
	ack->ip.ihl = 5;
	ack->ip.tot_len = cpu_to_be16(sizeof(*ack));
	ack->ip.frag_off = cpu_to_be16(IP_DF);
	ack->ip.ttl = 64;
	ack->ip.protocol = IPPROTO_UDP;
	ack->ip.saddr = cpu_to_be32(0xc0000200 + HOST);
	ack->ip.daddr = cpu_to_be32(0xc0000201);
	ip_send_check(&ack->ip);
	ack->udp.source = cpu_to_be16(0xc000);
	ack->udp.dest = cpu_to_be16(4791);
	ack->udp.len = cpu_to_be16(sizeof(*ack) - sizeof(ack->ip));
	ack->opcode = 0x11;	/* RC acknowledge */
	ack->pkey = cpu_to_be16(0xffff);
	ack->qpn = cpu_to_be32(qpn);
	ack->aeth = cpu_to_be32(0x40000000);
	ack->icrc = icrc(ack);
	skb->dev = ndev;
	skb->protocol = cpu_to_be16(ETH_P_IP);
	skb->pkt_type = PACKET_HOST;
	skb_reset_mac_header(skb);
	skb_reset_network_header(skb);
	netif_rx(skb);
	dev_put(ndev);
	return 0;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_cqe cqe = { .done = send_done };
	struct ib_send_wr wr = { .wr_cqe = &cqe, .opcode = IB_WR_SEND };
	struct ib_qp *qp = end_create(pd, cq, NULL);
	unsigned long end = jiffies + PATIENCE;
	int ret;

	if (IS_ERR(qp))
		return PTR_ERR(qp);
	ret = end_to_init(qp) ?: end_to_rtr(qp, 0x123, HOST) ?: end_to_rts(qp) ?:
		ib_post_send(qp, &wr, NULL);
	/* Answers that come before the request was sent are ignored. */
	while (!ret && !wait_for_completion_timeout(&sent, HZ / 20)) {
		ret = answer(qp->qp_num);
		if (time_after(jiffies, end))
			ret = -ETIMEDOUT;
	}
	pr_info("bad_response: status %d\n", status);
	if (!ret && status == IB_WC_SUCCESS) {
		pr_err("bad_response: the send has completed as done\n");
		ret = -EIO;
	}
	ib_drain_qp(qp);
	ib_destroy_qp(qp);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a response that is not understood completes a request as done");
