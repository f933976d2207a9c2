// SPDX-License-Identifier: GPL-2.0
/*
 * Rejects what an id has sent, then destroys the id. A message that is still sent again keeps the
 * id until ib_destroy_cm_id() warns that it waits for too long.
 */

#include "cm.h"

static DECLARE_COMPLETION(requested);
static struct ib_cm_id *child;

static int listener_handler(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	if (event->event != IB_CM_REQ_RECEIVED)
		return 0;
	/* One that is sent again finds no id, and gets none. */
	if (child)
		return -EBUSY;
	child = id;
	complete(&requested);
	return 0;
}

static int client_handler(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	return 0;
}

static int reject(struct ib_cm_id *id)
{
	return ib_send_cm_rej(id, IB_CM_REJ_CONSUMER_DEFINED, NULL, 0, NULL, 0);
}

static int reply(struct ib_cm_id *id)
{
	/* A number that a request has as well would be refused as a stale connection. */
	static u32 qp_num = 0x1000;
	struct ib_cm_rep_param param = { .qp_num = qp_num++, .rnr_retry_count = 7 };

	return ib_send_cm_rep(id, &param);
}

/* Confirms the connection in REP_SENT, and ends it before a worker cancels the reply. */
static int established(struct ib_cm_id *id)
{
	int ret;

	preempt_disable();
	ret = ib_cm_notify(id, IB_EVENT_COMM_EST) ?: ib_send_cm_dreq(id, NULL, 0);
	preempt_enable();
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_cm_id *listener = ib_create_cm_id(pd->device, listener_handler, NULL), *client;
	int ret, i;

	if (IS_ERR(listener))
		return PTR_ERR(listener);
	ret = ib_cm_listen(listener, SERVICE);
	for (i = 0; i < 3 && !ret; i++) {
		reinit_completion(&requested);
		client = ib_create_cm_id(pd->device, client_handler, NULL);
		if (IS_ERR(client)) {
			ret = PTR_ERR(client);
			break;
		}
		/* Each time for 9 seconds. */
		ret = request(client, 21, 1);
		if (!ret && !wait_for_completion_timeout(&requested, PATIENCE / 4))
			ret = -ETIMEDOUT;
		if (!ret && i == 0)
			ret = reject(client);
		if (!ret && i > 0)
			ret = reply(child) ?: i == 1 ? reject(child) : established(child);
		if (ret)
			pr_err("cm_reject: turn %d: %d\n", i, ret);
		if (child)
			ib_destroy_cm_id(child);
		ib_destroy_cm_id(client);
		pr_info("cm_reject: turn %d has ended\n", i);
		child = NULL;
	}
	ib_destroy_cm_id(listener);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: an id that has rejected sends again");
