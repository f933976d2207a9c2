/* SPDX-License-Identifier: GPL-2.0 */
/*
 * C for what Rust cannot express: inline functions and macros off the hot path.
 */
#ifndef RDMA_HELPERS_H
#define RDMA_HELPERS_H

#include <rdma/ib_verbs.h>

int rdma_helper_dma_map_single(struct ib_device *dev, void *cpu_addr, size_t size,
			       enum dma_data_direction dir, u64 *addr);
void rdma_helper_dma_unmap_single(struct ib_device *dev, u64 addr, size_t size,
				  enum dma_data_direction dir);
void rdma_helper_dma_sync_for_cpu(struct ib_device *dev, u64 addr, size_t size,
				  enum dma_data_direction dir);
void rdma_helper_dma_sync_for_device(struct ib_device *dev, u64 addr, size_t size,
				     enum dma_data_direction dir);
bool rdma_helper_may_sleep(void);
struct workqueue_struct *rdma_helper_alloc_workqueue(const char *name);
void rdma_helper_device_name(struct ib_device *dev, char *name, size_t size);
bool rdma_helper_cq_is_polled_by_current(struct ib_cq *cq);
void rdma_helper_cq_watch(struct ib_cq *cq);
int rdma_helper_map_mr(struct ib_mr *mr, u64 addr, u32 len);
void rdma_helper_memcpy(void *to, const void *from, size_t len);

#endif
