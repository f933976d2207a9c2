// SPDX-License-Identifier: GPL-2.0
/* A request finds no memory for its packet: it must go out when it is sent again. */

#include "cm.h"

static DECLARE_COMPLETION(received);
static struct ib_cm_id *child;

/* There is no peer. */
static int listener_handler(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	if (event->event == IB_CM_REQ_RECEIVED && !child) {
		child = id;
		complete(&received);
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
	struct ib_cm_id *after = ib_create_cm_id(pd->device, client_handler, NULL);
	int ret;

	if (IS_ERR(listener) || IS_ERR(client) || IS_ERR(after))
		return -ENOMEM;
	ret = ib_cm_listen(listener, SERVICE) ?: request(client, 16, 15);
	/* What is sent again is dropped if its first packet was an error. */
	msleep(1000);
	if (!ret && !child)
		ret = request(after, 16, 15);
	if (!ret && !wait_for_completion_timeout(&received, PATIENCE / 4)) {
		pr_err("gsi_nomem: no request comes any more\n");
		ret = -ETIMEDOUT;
	}
	ib_destroy_cm_id(listener);
	ib_destroy_cm_id(client);
	ib_destroy_cm_id(after);
	if (child)
		ib_destroy_cm_id(child);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a MAD without memory ends the QP for MADs");
