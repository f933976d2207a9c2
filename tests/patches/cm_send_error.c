// SPDX-License-Identifier: GPL-2.0
/* Destroys an id while its callback is told of a timeout: that must wait for the callback. */

#include "cm.h"

static DECLARE_COMPLETION(called);
static DECLARE_COMPLETION(returns);
static struct ib_cm_id *child;
static int context = 1;

static int requested(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	/* There is no peer. */
	if (event->event == IB_CM_REQ_RECEIVED)
		child = id;
	return 0;
}

static int given_up(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	if (event->event != IB_CM_REQ_ERROR)
		return 0;
	complete(&called);
	/* The other task is in ib_destroy_cm_id(), or has returned: freed memory waits for RCU. */
	msleep(1000);
	if (!READ_ONCE(id->context))
		pr_err("cm_send_error: no context\n");
	complete(&returns);
	return 0;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_cm_id *listener = ib_create_cm_id(pd->device, requested, NULL);
	struct ib_cm_id *id = ib_create_cm_id(pd->device, given_up, &context);
	int ret;

	if (IS_ERR(listener) || IS_ERR(id))
		return -ENOMEM;
	ret = ib_cm_listen(listener, SERVICE) ?: request(id, 10, 1);
	if (!ret && !wait_for_completion_timeout(&called, PATIENCE))
		ret = -ETIMEDOUT;
	ib_destroy_cm_id(id);
	if (!ret && !completion_done(&returns)) {
		pr_err("cm_send_error: the id is destroyed, its callback runs\n");
		ret = -EIO;
		wait_for_completion(&returns);
	}
	ib_destroy_cm_id(listener);
	if (child)
		ib_destroy_cm_id(child);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: an id is destroyed while its send error is reported");
