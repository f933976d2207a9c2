// SPDX-License-Identifier: GPL-2.0
/* Reads the link layer's fields of a GID that loses its interface. */

#include <linux/etherdevice.h>
#include <linux/kthread.h>
#include <linux/rtnetlink.h>

#include "ends.h"

static DECLARE_COMPLETION(begun);
static DECLARE_COMPLETION(ended);

static int read_fields(void *gid)
{
	u8 mac[ETH_ALEN];
	u16 vlan;

	complete(&begun);
	while (!rdma_read_gid_l2_fields(gid, &vlan, mac))
		cond_resched();
	complete(&ended);
	return 0;
}

/* The device has new default GIDs then. */
static int change_mac(struct net_device *ndev)
{
	struct sockaddr_storage addr = { .ss_family = ndev->type };
	int ret;

	ether_addr_copy(addr.__data, ndev->dev_addr);
	addr.__data[ETH_ALEN - 1] ^= 1;
	rtnl_lock();
	ret = dev_set_mac_address(ndev, &addr, NULL);
	rtnl_unlock();
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	const struct ib_gid_attr *gid = rdma_get_gid_attr(pd->device, 1, 0);
	struct net_device *ndev = dev_get_by_name(&init_net, "rdma0");
	struct task_struct *reader;
	int ret;

	if (IS_ERR(gid) || !ndev)
		return -ENODEV;
	reader = kthread_run(read_fields, (void *)gid, "gid_ndev");
	if (IS_ERR(reader))
		return PTR_ERR(reader);
	wait_for_completion(&begun);
	ret = change_mac(ndev);
	if (!wait_for_completion_timeout(&ended, PATIENCE))
		ret = -ETIMEDOUT;
	rdma_put_gid_attr(gid);
	dev_put(ndev);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a GID loses its interface while that is read");
