// SPDX-License-Identifier: GPL-2.0
/* Has an interface fail over as a bond does, also where the kernel has no bonds. */
#include <linux/module.h>
#include <linux/string.h>
#include <net/net_namespace.h>

#include "../kunit/failover.h"

static int interface_set(const char *val, const struct kernel_param *kp)
{
	struct net_device *dev;
	char name[IFNAMSIZ];

	strscpy(name, val, sizeof(name));
	dev = dev_get_by_name(&init_net, strim(name));
	if (!dev)
		return -ENODEV;
	fail_over(dev);
	dev_put(dev);
	return 0;
}

static const struct kernel_param_ops interface_ops = {
	.set = interface_set,
};

module_param_cb(interface, &interface_ops, NULL, 0200);
MODULE_PARM_DESC(interface, "The interface that fails over, each time that it is written");
MODULE_DESCRIPTION("An interface that fails over");
MODULE_LICENSE("GPL");
