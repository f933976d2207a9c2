/* SPDX-License-Identifier: GPL-2.0 */
/*
 * C for what Rust cannot express: inline functions and macros off the hot path.
 */
#ifndef RDMA_HELPERS_H
#define RDMA_HELPERS_H

#include <linux/tracepoint-defs.h>
#include <rdma/ib_verbs.h>

void *rdma_helper_alloc_pages_exact(size_t size);
size_t rdma_helper_dma_alignment(void);
int rdma_helper_dma_map_single(struct ib_device *dev, void *cpu_addr, size_t size,
			       enum dma_data_direction dir, u64 *addr);
void rdma_helper_dma_unmap_single(struct ib_device *dev, u64 addr, size_t size,
				  enum dma_data_direction dir);
bool rdma_helper_uses_virt_dma(struct ib_device *dev);
void rdma_helper_dma_sync_for_cpu(struct ib_device *dev, u64 addr, size_t size,
				  enum dma_data_direction dir);
void rdma_helper_dma_sync_for_device(struct ib_device *dev, u64 addr, size_t size,
				     enum dma_data_direction dir);
int rdma_helper_dma_map_sgtable(struct ib_device *dev, struct sg_table *sgt,
				enum dma_data_direction dir);
void rdma_helper_dma_unmap_sg(struct ib_device *dev, struct scatterlist *sg, int nents,
			      enum dma_data_direction dir);
void rdma_helper_dma_sync_sgtable_for_cpu(struct ib_device *dev, struct sg_table *sgt,
					  enum dma_data_direction dir);
void rdma_helper_dma_sync_sgtable_for_device(struct ib_device *dev, struct sg_table *sgt,
					     enum dma_data_direction dir);
bool rdma_helper_dma_need_sync(struct ib_device *dev);
int rdma_helper_sg_of_bytes(struct sg_table *sgt, const void *bytes, size_t len);
void *rdma_helper_page_address(struct page *page);
bool rdma_helper_may_sleep(void);
bool rdma_helper_is_code_of(unsigned long addr, struct module *mod);
int rdma_helper_module_refcount(struct module *mod);
void rdma_helper_synchronize_rcu_tasks(void);
struct workqueue_struct *rdma_helper_alloc_workqueue(const char *name);
void rdma_helper_device_name(struct ib_device *dev, char *name, size_t size);
int rdma_helper_device_numa_node(struct ib_device *dev);
void rdma_helper_cq_end_poll(struct ib_cq *cq);
bool rdma_helper_cq_is_polled_by_current(struct ib_cq *cq, unsigned long holder);
void rdma_helper_complete(struct ib_cq *cq, struct ib_wc *wc);
int rdma_helper_map_mr(struct ib_mr *mr, u64 addr, u32 len);
int rdma_helper_map_mr_list(struct ib_mr *mr, struct scatterlist *sg, int nents, u32 len);
bool rdma_helper_device_try_get(struct ib_device *dev);
enum rdma_ah_attr_type rdma_helper_ah_type(struct ib_device *dev, u32 port);
void rdma_helper_memcpy(void *to, const void *from, size_t len);
u64 rdma_helper_trace_drain_begin(const struct ib_qp *qp);
void rdma_helper_trace_drain_end(const struct ib_qp *qp, u64 began, int rc);

#if defined(CONFIG_TRACEPOINTS) && defined(CONFIG_JUMP_LABEL)
DECLARE_TRACEPOINT(post_send);
DECLARE_TRACEPOINT(post_recv);
DECLARE_TRACEPOINT(post_srq_recv);
DECLARE_TRACEPOINT(wc);
#endif

/*
 * None of enum ib_wc_flags: the bits of the mask are these while the callback of a completion that
 * was traced runs. Drivers leave the flags of one that has failed as they were.
 */
enum rdma_helper_wc_flags {
	RDMA_HELPER_WC_TRACED = 0x5ac3e600,
	RDMA_HELPER_WC_TRACED_MASK = 0x7fffff00,
};

int rdma_helper_branches_on(void);
void rdma_helper_branches_off(void);
int rdma_helper_trace_post_send(struct ib_qp *qp, const struct ib_send_wr *wr,
				const struct ib_send_wr **bad_wr);
int rdma_helper_trace_post_recv(struct ib_qp *qp, const struct ib_recv_wr *wr,
				const struct ib_recv_wr **bad_wr);
int rdma_helper_trace_post_srq_recv(struct ib_srq *srq, const struct ib_recv_wr *wr,
				    const struct ib_recv_wr **bad_wr);
int rdma_helper_trace_post_send_of(struct ib_qp *qp, const struct ib_send_wr *wr,
				   const struct ib_send_wr **bad_wr, const struct ib_cqe *cqe);
int rdma_helper_trace_post_recv_of(struct ib_qp *qp, const struct ib_recv_wr *wr,
				   const struct ib_recv_wr **bad_wr, const struct ib_cqe *cqe);
int rdma_helper_poll_cq(struct ib_cq *cq, int num_entries, struct ib_wc *wc);
void rdma_helper_trace_completion(const struct ib_cq *cq, const struct ib_wc *wc);
void rdma_helper_trace_wc(struct ib_cq *cq, struct ib_wc *wc);

enum rdma_helper_protocol {
	RDMA_HELPER_IB = 1 << 0,
	RDMA_HELPER_ROCE = 1 << 1,
	RDMA_HELPER_ROCE_V1 = 1 << 2,
	RDMA_HELPER_ROCE_V2 = 1 << 3,
	RDMA_HELPER_IWARP = 1 << 4,
	RDMA_HELPER_OPA_AH = 1 << 5,
};

struct rdma_helper_netdev {
	char name[IFNAMSIZ];
	int index;
};

bool rdma_helper_is_port_valid(struct ib_device *dev, u32 port);
u32 rdma_helper_port_protocols(struct ib_device *dev, u32 port);
int rdma_helper_port_netdev(struct ib_device *dev, u32 port, struct rdma_helper_netdev *to);
int rdma_helper_gid_l2(const struct ib_gid_attr *attr, u16 *vlan, u8 *mac);
u32 rdma_helper_gid_ipv4(const struct ib_gid_attr *attr);
bool rdma_helper_device_is_accessible(struct ib_device *dev);
struct net *rdma_helper_get_net(struct ib_device *dev);
void rdma_helper_put_net(struct net *net);
struct ib_device *rdma_helper_device_by_netdev(const char *name);

#endif
