// SPDX-License-Identifier: GPL-2.0
/* Takes an interface down while a request is sent again, and up: requests must go out then. */

#include <linux/rtnetlink.h>

#include "cm.h"

static DECLARE_COMPLETION(received);
static DECLARE_COMPLETION(given_up);
static struct ib_cm_id *children[2];
static unsigned int requests;

/* There is no peer. */
static int listener_handler(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	if (event->event == IB_CM_REQ_RECEIVED && requests < ARRAY_SIZE(children)) {
		children[requests++] = id;
		complete(&received);
	}
	return 0;
}

static int client_handler(struct ib_cm_id *id, const struct ib_cm_event *event)
{
	if (event->event == IB_CM_REQ_ERROR)
		complete(&given_up);
	return 0;
}

static int set_up(struct net_device *ndev, bool up)
{
	int ret = 0;

	rtnl_lock();
	if (up)
		ret = dev_open(ndev, NULL);
	else
		dev_close(ndev);
	rtnl_unlock();
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct ib_cm_id *listener = ib_create_cm_id(pd->device, listener_handler, NULL);
	struct ib_cm_id *before = ib_create_cm_id(pd->device, client_handler, NULL);
	struct ib_cm_id *after = ib_create_cm_id(pd->device, client_handler, NULL);
	struct net_device *ndev = dev_get_by_name(&init_net, "rdma0");
	int i, ret;

	if (IS_ERR(listener) || IS_ERR(before) || IS_ERR(after) || !ndev)
		return -ENOMEM;
	ret = ib_cm_listen(listener, SERVICE) ?: request(before, 16, 7);
	if (!ret && !wait_for_completion_timeout(&received, PATIENCE))
		ret = -ETIMEDOUT;
	ret = ret ?: set_up(ndev, false);
	if (!ret && !wait_for_completion_timeout(&given_up, PATIENCE))
		ret = -ETIMEDOUT;
	ret = ret ?: set_up(ndev, true) ?: request(after, 16, 15);
	if (!ret && !wait_for_completion_timeout(&received, PATIENCE / 4)) {
		pr_err("gsi_down: no request comes any more\n");
		ret = -ETIMEDOUT;
	}
	dev_put(ndev);
	ib_destroy_cm_id(listener);
	ib_destroy_cm_id(before);
	ib_destroy_cm_id(after);
	for (i = 0; i < requests; i++)
		ib_destroy_cm_id(children[i]);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: an interface that was down has no QP for MADs");
