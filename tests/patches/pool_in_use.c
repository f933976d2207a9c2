// SPDX-License-Identifier: GPL-2.0
/* Removes a device while a client that has a part of a shared CQ is unregistered. */

#include "ends.h"

static struct ib_device *device;
static struct ib_cq *shared;
static DECLARE_COMPLETION(removing);
static DECLARE_COMPLETION(may_end);

static int pool_add(struct ib_device *dev)
{
	if (dev != device)
		return 0;
	shared = ib_cq_pool_get(dev, 64, 0, IB_POLL_WORKQUEUE);
	return PTR_ERR_OR_ZERO(shared);
}

static void pool_remove(struct ib_device *dev, void *data)
{
	if (dev != device)
		return;
	complete(&removing);
	wait_for_completion_timeout(&may_end, PATIENCE);
	ib_cq_pool_put(shared, 64);
}

static struct ib_client pool_client = {
	.name = "pool_in_use",
	.add = pool_add,
	.remove = pool_remove,
};

static void unregister(struct work_struct *work)
{
	ib_unregister_client(&pool_client);
}

static DECLARE_WORK(unregistration, unregister);

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	int ret;

	device = pd->device;
	ret = ib_register_client(&pool_client);
	if (ret)
		return ret;
	if (IS_ERR_OR_NULL(shared)) {
		ib_unregister_client(&pool_client);
		return shared ? PTR_ERR(shared) : -ENODEV;
	}
	schedule_work(&unregistration);
	wait_for_completion(&removing);
	ib_unregister_device_queued(device);
	/* By now the removal has come to the shared CQs, or waits for the client. */
	msleep(2000);
	complete(&may_end);
	flush_work(&unregistration);
	return 0;
}

MODULE_DESCRIPTION("Reproducer: shared CQs are freed while a client has a part of one");
