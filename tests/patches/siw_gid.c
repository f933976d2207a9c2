// SPDX-License-Identifier: GPL-2.0
/* Destroys an id of a device that goes. */

#include <rdma/rdma_cm.h>

#include "ends.h"

static struct rdma_cm_id *id;
static DECLARE_COMPLETION(goes);

static int handler(struct rdma_cm_id *cm_id, struct rdma_cm_event *event)
{
	if (event->event == RDMA_CM_EVENT_DEVICE_REMOVAL)
		complete(&goes);
	return 0;
}

static void destroy(struct work_struct *work)
{
	wait_for_completion(&goes);
	/* The removal waits for this id by then. */
	msleep(200);
	rdma_destroy_id(id);
}

static DECLARE_WORK(destruction, destroy);

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct net_device *ndev = dev_get_by_name(&init_net, "rdma1");
	struct sockaddr_in addr = {
		.sin_family = AF_INET,
		.sin_addr.s_addr = cpu_to_be32(0xc6336401),
	};
	struct ib_device *dev;
	int ret;

	if (!ndev)
		return -ENODEV;
	dev = ib_device_get_by_netdev(ndev, RDMA_DRIVER_SIW);
	dev_put(ndev);
	if (!dev)
		return -ENODEV;
	id = rdma_create_id(&init_net, handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(id)) {
		ib_device_put(dev);
		return PTR_ERR(id);
	}
	ret = rdma_bind_addr(id, (struct sockaddr *)&addr);
	if (ret || !id->device) {
		rdma_destroy_id(id);
		ib_device_put(dev);
		return ret ?: -ENODEV;
	}
	schedule_work(&destruction);
	ib_unregister_device_and_put(dev);
	flush_work(&destruction);
	/* The work item that frees the GID. */
	msleep(500);
	return 0;
}

MODULE_DESCRIPTION("Reproducer: an id is destroyed while its device goes");
