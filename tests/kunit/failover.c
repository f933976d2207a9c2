// SPDX-License-Identifier: GPL-2.0
#include <net/net_namespace.h>

#include "failover.h"

void rdma_kunit_failover(void);

/* The loopback interface has another hardware address in the meantime. */
void rdma_kunit_failover(void)
{
	struct net_device *lo = init_net.loopback_dev;
	u8 old[ETH_ALEN];

	ether_addr_copy(old, lo->dev_addr);
	fail_over(lo);
	rtnl_lock();
	eth_hw_addr_set(lo, old);
	rtnl_unlock();
}
