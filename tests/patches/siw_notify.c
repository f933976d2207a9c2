// SPDX-License-Identifier: GPL-2.0
/* Requests a notification while a request completes: it must be notified or missed. */

#include <linux/delay.h>

#include "siw.h"

static DECLARE_COMPLETION(notified);
static bool post_begins;
static struct ib_qp *flushed;
static int post_error;

static void notify(struct ib_cq *cq, void *context)
{
	complete(&notified);
}

static void post(struct work_struct *work)
{
	struct ib_send_wr send = { .opcode = IB_WR_SEND, .send_flags = IB_SEND_SIGNALED };

	WRITE_ONCE(post_begins, true);
	/* It completes before the call returns: the QP is in the error state. */
	post_error = ib_post_send(flushed, &send, NULL);
}

static DECLARE_WORK(poster, post);

/* Returns whether the completion is neither notified nor missed. */
static int request_while_posting(struct ib_cq *polled)
{
	struct ib_wc wc;
	int missed;

	reinit_completion(&notified);
	WRITE_ONCE(post_begins, false);
	queue_work(system_dfl_wq, &poster);
	/* Interrupts of the other processor are off while it completes the request. */
	while (!READ_ONCE(post_begins))
		cpu_relax();
	mdelay(20);
	missed = ib_req_notify_cq(polled, IB_CQ_NEXT_COMP | IB_CQ_REPORT_MISSED_EVENTS);
	flush_work(&poster);
	if (!post_error && missed <= 0 && !completion_done(&notified))
		return -EIO;
	ib_poll_cq(polled, 1, &wc);
	return post_error;
}

static int run(struct ib_qp *qp)
{
	struct ib_qp_attr to_error = { .qp_state = IB_QPS_ERR };
	struct ib_cq_init_attr cq_attr = { .cqe = 16 };
	struct ib_qp_init_attr attr = {
		.cap = { .max_send_wr = 4, .max_recv_wr = 4 },
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = IB_QPT_RC,
	};
	struct ib_cq *polled;
	int ret, i;

	polled = ib_create_cq(qp->device, notify, NULL, NULL, &cq_attr);
	if (IS_ERR(polled))
		return PTR_ERR(polled);
	attr.send_cq = polled;
	attr.recv_cq = polled;
	flushed = ib_create_qp(pd, &attr);
	ret = PTR_ERR_OR_ZERO(flushed) ?: ib_modify_qp(flushed, &to_error, IB_QP_STATE);
	for (i = 0; i < 20 && !ret; i++)
		ret = request_while_posting(polled);
	if (ret)
		pr_err("siw_notify: the completion: %d\n", ret);
	if (!IS_ERR(flushed))
		ib_destroy_qp(flushed);
	ib_destroy_cq(polled);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a completion is neither notified nor missed");
