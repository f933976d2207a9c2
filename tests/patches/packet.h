/* SPDX-License-Identifier: GPL-2.0 */
/* Common part of the reproducers for rxe that play a peer: packets of theirs. */

#include <linux/crc32.h>
#include <linux/ip.h>
#include <linux/scatterlist.h>
#include <linux/udp.h>
#include <rdma/ib_pack.h>

#include "ends.h"

struct packet {
	struct iphdr ip;
	struct udphdr udp;
	u8 opcode;
	u8 flags;
	__be16 pkey;
	__be32 qpn;
	__be32 psn;
} __packed;

struct reth {
	__be64 va;
	__be32 rkey;
	__be32 length;
} __packed;

static inline u32 packet_icrc(const struct packet *packet, const void *rest, size_t len)
{
	struct packet masked = *packet;
	u32 crc;

	masked.ip.tos = 0xff;
	masked.ip.ttl = 0xff;
	masked.ip.check = CSUM_MANGLED_0;
	masked.udp.check = CSUM_MANGLED_0;
	masked.qpn |= cpu_to_be32(0xff000000);
	crc = crc32_le(0xdebb20e3, (u8 *)&masked, sizeof(masked));
	crc = crc32_le(crc, rest, len);
	/* rxe knows of no payload in a FLUSH: it takes the BTH for that, and all after it. */
	if (packet->opcode == IB_OPCODE_RC_FLUSH) {
		crc = crc32_le(crc, &packet->opcode,
			       sizeof(*packet) - offsetof(struct packet, opcode));
		crc = crc32_le(crc, rest, len);
	}
	return ~crc;
}

/* The dummy device receives what a peer may send. */
static inline int packet_receive(u32 qpn, u8 opcode, u32 psn, const void *rest, size_t len)
{
	size_t all = sizeof(struct packet) + len + sizeof(u32);
	struct sk_buff *skb = alloc_skb(all + 64, GFP_KERNEL);
	struct net_device *ndev = dev_get_by_name(&init_net, "rdma0");
	struct packet *packet;
	u32 icrc;

	if (!skb || !ndev)
		return -ENOMEM;
	skb_reserve(skb, 64);
	packet = skb_put_zero(skb, sizeof(*packet));
	packet->ip.version = 4;
	packet->ip.ihl = 5;
	packet->ip.tot_len = cpu_to_be16(all);
	packet->ip.frag_off = cpu_to_be16(IP_DF);
	packet->ip.ttl = 64;
	packet->ip.protocol = IPPROTO_UDP;
	packet->ip.saddr = cpu_to_be32(0xc0000200 + HOST);
	packet->ip.daddr = cpu_to_be32(0xc0000201);
	ip_send_check(&packet->ip);
	packet->udp.source = cpu_to_be16(0xc000);
	packet->udp.dest = cpu_to_be16(4791);
	packet->udp.len = cpu_to_be16(all - sizeof(packet->ip));
	packet->opcode = opcode;
	packet->pkey = cpu_to_be16(0xffff);
	packet->qpn = cpu_to_be32(qpn);
	packet->psn = cpu_to_be32(psn);
	skb_put_data(skb, rest, len);
	icrc = packet_icrc(packet, rest, len);
	skb_put_data(skb, &icrc, sizeof(icrc));
	skb->dev = ndev;
	skb->protocol = cpu_to_be16(ETH_P_IP);
	skb->pkt_type = PACKET_HOST;
	skb_reset_mac_header(skb);
	skb_reset_network_header(skb);
	netif_rx(skb);
	dev_put(ndev);
	return 0;
}

/* Registers a page, which the peer may read. */
static inline int mr_register(struct ib_qp *qp, struct ib_mr *mr, struct scatterlist *sg)
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

/* Calls back with a QP, and an MR and a page of it to be registered. */
static inline int mr_use(struct ib_pd *pd, struct ib_cq *cq,
			 int (*use)(struct ib_qp *qp, struct ib_mr *mr, struct scatterlist *sg))
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
		ret = use(qp, mr, &sg);
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
