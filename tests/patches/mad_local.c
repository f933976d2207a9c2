// SPDX-License-Identifier: GPL-2.0
/*
 * Keeps the answers that the device itself has to messages with a directed route. rxe has none, so
 * the reproducer answers as the driver of an InfiniBand device does.
 */

#include "ends.h"
#include <rdma/ib_mad.h>
#include <rdma/ib_smi.h>

static struct ib_mad_recv_wc *kept[2];
static unsigned int received;
static DECLARE_COMPLETION(sent);

static int answer(struct ib_device *dev, int flags, u32 port, const struct ib_wc *wc,
		  const struct ib_grh *grh, const struct ib_mad *in, struct ib_mad *out,
		  size_t *out_size, u16 *out_pkey_index)
{
	*out = *in;
	out->mad_hdr.method = IB_MGMT_METHOD_GET_RESP;
	return IB_MAD_RESULT_SUCCESS | IB_MAD_RESULT_REPLY;
}

static void recv_handler(struct ib_mad_agent *agent, struct ib_mad_send_buf *buf,
			 struct ib_mad_recv_wc *recv_wc)
{
	/* It is ours until ib_free_recv_mad(). */
	kept[received++] = recv_wc;
}

static void send_handler(struct ib_mad_agent *agent, struct ib_mad_send_wc *send_wc)
{
	ib_free_send_mad(send_wc->send_buf);
	complete(&sent);
}

static int ask(struct ib_mad_agent *agent, u16 pkey_index)
{
	struct ib_mad_send_buf *buf;
	struct ib_smp *smp;
	int ret;

	buf = ib_create_send_mad(agent, 0, pkey_index, 0, IB_MGMT_MAD_HDR, IB_MGMT_MAD_DATA,
				 GFP_KERNEL, IB_MGMT_BASE_VERSION);
	if (IS_ERR(buf))
		return PTR_ERR(buf);
	smp = buf->mad;
	smp->base_version = IB_MGMT_BASE_VERSION;
	smp->mgmt_class = IB_MGMT_CLASS_SUBN_DIRECTED_ROUTE;
	smp->class_version = 1;
	smp->method = IB_MGMT_METHOD_GET;
	smp->dr_slid = IB_LID_PERMISSIVE;
	smp->dr_dlid = IB_LID_PERMISSIVE;
	ret = ib_post_send_mad(buf, NULL);
	if (ret)
		ib_free_send_mad(buf);
	else if (!wait_for_completion_timeout(&sent, PATIENCE))
		ret = -ETIMEDOUT;
	return ret;
}

/* Where the message came from, as the kernel has it of what the device itself has sent. */
static int check(int i, u16 pkey_index)
{
	struct ib_wc *wc = kept[i]->wc;

	if (wc->status == IB_WC_SUCCESS && wc->opcode == IB_WC_RECV && wc->port_num == 1 &&
	    !wc->src_qp && wc->pkey_index == pkey_index)
		return 0;
	pr_err("mad_local: answer %d: status %d opcode %d port %u src_qp %u pkey_index %u\n", i,
	       wc->status, wc->opcode, wc->port_num, wc->src_qp, wc->pkey_index);
	return -EIO;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_device *dev = pd->device;
	struct ib_mad_agent *agent;
	int ret;

	agent = ib_register_mad_agent(dev, 1, IB_QPT_GSI, NULL, 0, send_handler, recv_handler,
				      NULL, 0);
	if (IS_ERR(agent))
		return PTR_ERR(agent);
	dev->ops.process_mad = answer;
	ret = ask(agent, 3) ?: ask(agent, 5);
	dev->ops.process_mad = NULL;
	if (!ret && received != 2)
		ret = -ENOMSG;
	ret = ret ?: check(0, 3) ?: check(1, 5);
	while (received)
		ib_free_recv_mad(kept[--received]);
	ib_unregister_mad_agent(agent);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: the completion of a MAD lies on a stack");
