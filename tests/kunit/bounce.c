// SPDX-License-Identifier: GPL-2.0
/* A device that does not see the memory that is mapped for it, but a copy. */
#include <kunit/static_stub.h>
#include <kunit/test.h>
#include "bounce.h"

/* How many bytes were synchronised for the CPU, and for the device, which suites look at. */
unsigned int rdma_kunit_synced_for_cpu, rdma_kunit_synced_for_device;

static bool uses_virt_dma(struct ib_device *dev)
{
	return false;
}

static bool need_sync(struct ib_device *dev)
{
	return true;
}

static void sync_for_device(struct ib_device *dev, struct sg_table *sgt,
			    enum dma_data_direction dir)
{
	struct scatterlist *sg;
	unsigned int i;

	for_each_sgtable_sg(sgt, sg, i)
		rdma_kunit_synced_for_device += sg->length;
}

static void sync_single_for_cpu(struct ib_device *dev, u64 addr, size_t size,
				enum dma_data_direction dir)
{
	rdma_kunit_synced_for_cpu += size;
}

static void sync_single_for_device(struct ib_device *dev, u64 addr, size_t size,
				   enum dma_data_direction dir)
{
	rdma_kunit_synced_for_device += size;
}

/* Has the devices that the thread of the case uses be such ones until that ends. */
void rdma_kunit_bounce(void)
{
	struct kunit *test = kunit_get_current_test();

	rdma_kunit_synced_for_cpu = 0;
	rdma_kunit_synced_for_device = 0;
	kunit_activate_static_stub(test, rdma_helper_uses_virt_dma, uses_virt_dma);
	kunit_activate_static_stub(test, rdma_helper_dma_sync_for_cpu, sync_single_for_cpu);
	kunit_activate_static_stub(test, rdma_helper_dma_sync_for_device, sync_single_for_device);
	kunit_activate_static_stub(test, rdma_helper_dma_need_sync, need_sync);
	kunit_activate_static_stub(test, rdma_helper_dma_sync_sgtable_for_device, sync_for_device);
}
