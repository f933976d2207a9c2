// SPDX-License-Identifier: GPL-2.0
/* Destroys a listener while its callback sleeps. */

#include "cm.h"

static DECLARE_COMPLETION(called);
static struct ib_cm_id *child;

static int listener_handler(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	if (event->event == IB_CM_REQ_RECEIVED) {
		child = id;
		complete(&called);
		msleep(1000);
	}
	return 0;
}

static int client_handler(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	return 0;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_cm_id *listener = ib_create_cm_id(pd->device, listener_handler, NULL);
	struct ib_cm_id *client = ib_create_cm_id(pd->device, client_handler, NULL);
	int ret;

	if (IS_ERR(listener) || IS_ERR(client))
		return -ENOMEM;
	ret = ib_cm_listen(listener, SERVICE) ?: request(client, 22, 1);
	if (!ret && !wait_for_completion_timeout(&called, PATIENCE / 4))
		ret = -ETIMEDOUT;
	ib_destroy_cm_id(listener);
	if (child)
		ib_destroy_cm_id(child);
	ib_destroy_cm_id(client);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a listener is destroyed while its callback sleeps");
