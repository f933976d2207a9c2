/* SPDX-License-Identifier: GPL-2.0 */
/* What bounce.c replaces, which is the core's, and what suites call. */
#include <linux/dma-direction.h>
#include <linux/scatterlist.h>
#include <linux/types.h>

struct ib_device;

bool rdma_helper_uses_virt_dma(struct ib_device *dev);
void rdma_helper_dma_sync_for_cpu(struct ib_device *dev, u64 addr, size_t size,
				  enum dma_data_direction dir);
void rdma_helper_dma_sync_for_device(struct ib_device *dev, u64 addr, size_t size,
				     enum dma_data_direction dir);
bool rdma_helper_dma_need_sync(struct ib_device *dev);
void rdma_helper_dma_sync_sgtable_for_device(struct ib_device *dev, struct sg_table *sgt,
					     enum dma_data_direction dir);
void rdma_kunit_bounce(void);
