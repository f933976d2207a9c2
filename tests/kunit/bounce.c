// SPDX-License-Identifier: GPL-2.0
/* A device that does not see what is written to memory after it was mapped. */
#include <kunit/static_stub.h>
#include <kunit/test.h>
#include "bounce.h"

/* How many bytes were synchronised for it, which the suite looks at. */
unsigned int rdma_kunit_synced;

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
		rdma_kunit_synced += sg->length;
}

/* Has the devices that the thread of the case uses be such ones until that ends. */
void rdma_kunit_bounce(void)
{
	struct kunit *test = kunit_get_current_test();

	rdma_kunit_synced = 0;
	kunit_activate_static_stub(test, rdma_helper_dma_need_sync, need_sync);
	kunit_activate_static_stub(test, rdma_helper_dma_sync_sgtable_for_device, sync_for_device);
}
