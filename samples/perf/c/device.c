// SPDX-License-Identifier: GPL-2.0
/*
 * The RDMA devices that there are. A run holds those that it uses, and their removal waits for it.
 */

#include <linux/completion.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/refcount.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "perf.h"

struct perf_device {
	struct list_head list;
	struct ib_device *dev;
	refcount_t users;
	struct completion unused;
};

static LIST_HEAD(perf_devices);
static DEFINE_MUTEX(perf_devices_lock);

static struct ib_client perf_client;

static void perf_device_release(struct perf_device *device)
{
	if (refcount_dec_and_test(&device->users))
		complete(&device->unused);
}

static int perf_device_add(struct ib_device *dev)
{
	struct perf_device *device = kzalloc_obj(*device);

	if (!device)
		return -ENOMEM;
	device->dev = dev;
	refcount_set(&device->users, 1);
	init_completion(&device->unused);
	ib_set_client_data(dev, &perf_client, device);

	mutex_lock(&perf_devices_lock);
	list_add_tail(&device->list, &perf_devices);
	mutex_unlock(&perf_devices_lock);
	return 0;
}

static void perf_device_remove(struct ib_device *dev, void *client_data)
{
	struct perf_device *device = client_data;

	mutex_lock(&perf_devices_lock);
	list_del(&device->list);
	mutex_unlock(&perf_devices_lock);

	perf_device_release(device);
	wait_for_completion(&device->unused);
	kfree(device);
}

static struct ib_client perf_client = {
	.name = PERF_NAME,
	.add = perf_device_add,
	.remove = perf_device_remove,
};

struct ib_device *perf_device_get(const char *name)
{
	struct ib_device *dev = NULL;
	struct perf_device *device;

	mutex_lock(&perf_devices_lock);
	list_for_each_entry(device, &perf_devices, list) {
		if (!strcmp(dev_name(&device->dev->dev), name)) {
			refcount_inc(&device->users);
			dev = device->dev;
			break;
		}
	}
	mutex_unlock(&perf_devices_lock);
	return dev;
}

void perf_device_put(struct ib_device *dev)
{
	perf_device_release(ib_get_client_data(dev, &perf_client));
}

int perf_devices_init(void)
{
	return ib_register_client(&perf_client);
}

void perf_devices_exit(void)
{
	ib_unregister_client(&perf_client);
}
