// SPDX-License-Identifier: GPL-2.0
/* Moves a device to another network namespace: it must have a QP for MADs there. */

#include <linux/kmod.h>
#include <linux/module.h>
#include <rdma/ib_mad.h>

#define MOVE "rdma system set netns exclusive && ip netns add there && " \
	"rdma dev set rxe0 netns there"

static int move(void)
{
	char *argv[4] = { "/bin/sh", "-c", MOVE, NULL };
	char *envp[2] = { "PATH=/usr/sbin:/usr/bin:/sbin:/bin", NULL };

	return call_usermodehelper(argv[0], argv, envp, UMH_WAIT_PROC) ? -EIO : 0;
}

static void sent(struct ib_mad_agent *agent, struct ib_mad_send_wc *wc)
{
}

static int register_agent(struct ib_device *dev)
{
	struct ib_mad_agent *agent = ib_register_mad_agent(dev, 1, IB_QPT_GSI, NULL, 0,
							      sent, NULL, NULL, 0);

	if (IS_ERR(agent))
		return PTR_ERR(agent);
	ib_unregister_mad_agent(agent);
	return 0;
}

static int __init reproducer_init(void)
{
	struct net_device *ndev = dev_get_by_name(&init_net, "rdma0");
	struct ib_device *dev;
	int ret;

	if (!ndev)
		return -ENODEV;
	/* A reference to the device would keep it where it is. */
	ret = move();
	dev = ib_device_get_by_netdev(ndev, RDMA_DRIVER_RXE);
	dev_put(ndev);
	if (!dev)
		return -ENODEV;
	ret = ret ?: register_agent(dev);
	ib_device_put(dev);
	return ret;
}
module_init(reproducer_init);

static void __exit reproducer_exit(void)
{
}
module_exit(reproducer_exit);

MODULE_DESCRIPTION("Reproducer: a device that was moved has no QP for MADs");
MODULE_LICENSE("GPL");
