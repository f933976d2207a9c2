/* SPDX-License-Identifier: GPL-2.0 */
/* What bounce.c replaces, which is the core's, and what the suite calls. */
#include <linux/dma-direction.h>
#include <linux/scatterlist.h>
#include <linux/types.h>

struct ib_device;

bool rdma_helper_dma_need_sync(struct ib_device *dev);
void rdma_helper_dma_sync_sgtable_for_device(struct ib_device *dev, struct sg_table *sgt,
					     enum dma_data_direction dir);
void rdma_kunit_bounce(void);
