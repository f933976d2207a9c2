// SPDX-License-Identifier: GPL-2.0
/* Destroys QPs while packets for them are received: none is looked at after it was freed. */

#include <linux/kthread.h>

#include "packet.h"

static u32 qpn;

/* The QP is in the reset state, so each packet is dropped as soon as its QP was found. */
static int receive_packets(void *unused)
{
	while (!kthread_should_stop()) {
		packet_receive(READ_ONCE(qpn), IB_OPCODE_RC_SEND_ONLY, 0, NULL, 0);
		cond_resched();
	}
	return 0;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct task_struct *task;
	struct ib_qp *qp;
	int i, ret = 0;

	rdma_put_gid_attr(device_gid(pd->device));
	task = kthread_run(receive_packets, NULL, "receive_packets");
	if (IS_ERR(task))
		return PTR_ERR(task);
	for (i = 0; i < 50 && !ret; i++) {
		qp = end_create(pd, cq, NULL);
		ret = PTR_ERR_OR_ZERO(qp);
		if (!ret)
			WRITE_ONCE(qpn, qp->qp_num);
		/* At another moment each time. */
		usleep_range(5000 + 100 * i, 5050 + 100 * i);
		end_destroy(qp);
	}
	kthread_stop(task);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a QP is freed while a packet looks for it");
