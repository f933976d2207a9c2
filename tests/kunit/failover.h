/* SPDX-License-Identifier: GPL-2.0 */
/* The failover of a bond, as the connection manager is told of it. */
#include <linux/etherdevice.h>
#include <linux/netdevice.h>
#include <linux/rtnetlink.h>

/* An interface gets another hardware address, and is that of a bond while this is told. */
static inline void fail_over(struct net_device *dev)
{
	u8 addr[ETH_ALEN];

	rtnl_lock();
	ether_addr_copy(addr, dev->dev_addr);
	addr[ETH_ALEN - 1] ^= 1;
	dev->flags |= IFF_MASTER;
	dev->priv_flags |= IFF_BONDING;
	eth_hw_addr_set(dev, addr);
	call_netdevice_notifiers(NETDEV_BONDING_FAILOVER, dev);
	dev->priv_flags &= ~IFF_BONDING;
	dev->flags &= ~IFF_MASTER;
	rtnl_unlock();
}
