// SPDX-License-Identifier: GPL-2.0
/* The failover of a bond, as the connection manager is told of it. */
#include <linux/etherdevice.h>
#include <linux/netdevice.h>
#include <linux/rtnetlink.h>
#include <net/net_namespace.h>

void rdma_kunit_failover(void);

/* The loopback interface is that of a bond, with another hardware address, in the meantime. */
void rdma_kunit_failover(void)
{
	struct net_device *lo = init_net.loopback_dev;
	u8 old[ETH_ALEN], new[ETH_ALEN];

	rtnl_lock();
	ether_addr_copy(old, lo->dev_addr);
	ether_addr_copy(new, old);
	new[ETH_ALEN - 1] ^= 1;
	lo->flags |= IFF_MASTER;
	lo->priv_flags |= IFF_BONDING;
	eth_hw_addr_set(lo, new);
	call_netdevice_notifiers(NETDEV_BONDING_FAILOVER, lo);
	eth_hw_addr_set(lo, old);
	lo->priv_flags &= ~IFF_BONDING;
	lo->flags &= ~IFF_MASTER;
	rtnl_unlock();
}
