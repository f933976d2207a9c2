// SPDX-License-Identifier: GPL-2.0

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include "helpers.h"

#include <kunit/static_stub.h>
#include <linux/cache.h>
#include <linux/dma-mapping.h>
#include <linux/export.h>
#include <linux/gfp.h>
#include <linux/inetdevice.h>
#include <linux/irq_poll.h>
#include <linux/module.h>
#include <linux/netdevice.h>
#include <linux/nsproxy.h>
#include <linux/preempt.h>
#include <linux/rcupdate.h>
#include <linux/sched/task_stack.h>
#include <linux/uaccess.h>
#include <linux/workqueue.h>
#include <rdma/ib_cache.h>

#define CREATE_TRACE_POINTS
#include "rdma_rs_trace.h"

void *rdma_helper_alloc_pages_exact(size_t size)
{
	return alloc_pages_exact(size, GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN);
}
EXPORT_SYMBOL_GPL(rdma_helper_alloc_pages_exact);

size_t rdma_helper_dma_alignment(void)
{
	return max_t(size_t, dma_get_cache_alignment(), L1_CACHE_BYTES);
}

int rdma_helper_dma_map_single(struct ib_device *dev, void *cpu_addr, size_t size,
			       enum dma_data_direction dir, u64 *addr)
{
	*addr = ib_dma_map_single(dev, cpu_addr, size, dir);
	return ib_dma_mapping_error(dev, *addr) ? -EIO : 0;
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_map_single);

void rdma_helper_dma_unmap_single(struct ib_device *dev, u64 addr, size_t size,
				  enum dma_data_direction dir)
{
	ib_dma_unmap_single(dev, addr, size, dir);
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_unmap_single);

/* Returns whether the device sees the memory itself, as software does: nothing is synchronised. */
bool rdma_helper_uses_virt_dma(struct ib_device *dev)
{
	KUNIT_STATIC_STUB_REDIRECT(rdma_helper_uses_virt_dma, dev);
	return ib_uses_virt_dma(dev);
}
EXPORT_SYMBOL_GPL(rdma_helper_uses_virt_dma);

void rdma_helper_dma_sync_for_cpu(struct ib_device *dev, u64 addr, size_t size,
				  enum dma_data_direction dir)
{
	KUNIT_STATIC_STUB_REDIRECT(rdma_helper_dma_sync_for_cpu, dev, addr, size, dir);
	ib_dma_sync_single_for_cpu(dev, addr, size, dir);
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_sync_for_cpu);

void rdma_helper_dma_sync_for_device(struct ib_device *dev, u64 addr, size_t size,
				     enum dma_data_direction dir)
{
	KUNIT_STATIC_STUB_REDIRECT(rdma_helper_dma_sync_for_device, dev, addr, size, dir);
	ib_dma_sync_single_for_device(dev, addr, size, dir);
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_sync_for_device);

int rdma_helper_dma_map_sgtable(struct ib_device *dev, struct sg_table *sgt,
				enum dma_data_direction dir)
{
	int nents = ib_dma_map_sg(dev, sgt->sgl, sgt->orig_nents, dir);

	sgt->nents = nents;
	return nents ? 0 : -EIO;
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_map_sgtable);

void rdma_helper_dma_unmap_sg(struct ib_device *dev, struct scatterlist *sg, int nents,
			      enum dma_data_direction dir)
{
	ib_dma_unmap_sg(dev, sg, nents, dir);
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_unmap_sg);

void rdma_helper_dma_sync_sgtable_for_cpu(struct ib_device *dev, struct sg_table *sgt,
					  enum dma_data_direction dir)
{
	if (!ib_uses_virt_dma(dev))
		dma_sync_sgtable_for_cpu(dev->dma_device, sgt, dir);
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_sync_sgtable_for_cpu);

void rdma_helper_dma_sync_sgtable_for_device(struct ib_device *dev, struct sg_table *sgt,
					     enum dma_data_direction dir)
{
	KUNIT_STATIC_STUB_REDIRECT(rdma_helper_dma_sync_sgtable_for_device, dev, sgt, dir);
	if (!ib_uses_virt_dma(dev))
		dma_sync_sgtable_for_device(dev->dma_device, sgt, dir);
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_sync_sgtable_for_device);

/* Returns whether the device may miss what is written to memory after that was mapped. */
bool rdma_helper_dma_need_sync(struct ib_device *dev)
{
	KUNIT_STATIC_STUB_REDIRECT(rdma_helper_dma_need_sync, dev);
	return !ib_uses_virt_dma(dev) && dma_dev_need_sync(dev->dma_device);
}
EXPORT_SYMBOL_GPL(rdma_helper_dma_need_sync);

/* Lists the pages of memory of any kind that the kernel has an address of. */
int rdma_helper_sg_of_bytes(struct sg_table *sgt, const void *bytes, size_t len)
{
	size_t offset = offset_in_page(bytes), n, count = DIV_ROUND_UP(offset + len, PAGE_SIZE);
	const void *page = bytes - offset;
	struct page **pages;
	int ret = -EINVAL;

	pages = kvmalloc_array(count, sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return -ENOMEM;
	for (n = 0; n < count; n++, page += PAGE_SIZE) {
		if (is_vmalloc_or_module_addr(page))
			pages[n] = vmalloc_to_page(page);
		else if (virt_addr_valid(page))
			pages[n] = virt_to_page(page);
		else
			pages[n] = NULL;
		if (!pages[n] || !pfn_valid(page_to_pfn(pages[n])))
			goto out;
	}
	/* Every device can use entries of one page; an IOMMU may merge them. */
	ret = sg_alloc_table_from_pages_segment(sgt, pages, count, offset, len, PAGE_SIZE,
						GFP_KERNEL);
out:
	kvfree(pages);
	return ret;
}
EXPORT_SYMBOL_GPL(rdma_helper_sg_of_bytes);

void *rdma_helper_page_address(struct page *page)
{
	return page_address(page);
}
EXPORT_SYMBOL_GPL(rdma_helper_page_address);

/*
 * Interrupts and softirqs are always detected; a held spinlock only with CONFIG_PREEMPT_COUNT, and
 * an RCU read-side section only with CONFIG_PREEMPT_RCU.
 */
bool rdma_helper_may_sleep(void)
{
	return !preempt_count() && !irqs_disabled() && !rcu_preempt_depth();
}
EXPORT_SYMBOL_GPL(rdma_helper_may_sleep);

#if defined(CONFIG_MODULES) && !defined(CONFIG_MODULE_UNLOAD)
#error "rdma_rs waits for the users of a module: it needs CONFIG_MODULE_UNLOAD"
#endif
#if defined(CONFIG_MODULES) && defined(CONFIG_PREEMPTION) && !defined(CONFIG_TASKS_RCU)
#error "rdma_rs waits for tasks that were preempted in a module: it needs CONFIG_TASKS_RCU"
#endif

#ifdef CONFIG_MODULES
/* As in kernel/module/internal.h, which modules cannot include. */
struct module_use {
	struct list_head source_list;
	struct list_head target_list;
	struct module *source, *target;
};

/*
 * Returns whether this is code of a module, or of one that it uses and so keeps loaded. The list of
 * these changes only when the module is loaded or freed.
 */
static bool keeps_code(struct module *mod, unsigned long addr)
{
	struct module_use *use;

	list_for_each_entry(use, &mod->target_list, target_list)
		if (keeps_code(use->target, addr))
			return true;
	return within_module(addr, mod);
}
#endif

/*
 * @mod: the module of a ULP, or NULL if that is built in. It uses this one, if that is a module.
 * Without CONFIG_MODULES no code is ever unloaded, and any will do.
 */
bool rdma_helper_is_code_of(unsigned long addr, struct module *mod)
{
#ifdef CONFIG_MODULES
	if (!mod || within_module(addr, mod) || keeps_code(mod, addr))
		return true;
#ifndef MODULE
	if (core_kernel_text(addr))
		return true;
#endif
	pr_err_ratelimited("%pS is code of another module than %s, whose object it was given to: refused\n",
			   (void *)addr, module_name(mod));
	return false;
#else
	return true;
#endif
}

int rdma_helper_module_refcount(struct module *mod)
{
#ifdef CONFIG_MODULES
	return module_refcount(mod);
#else
	return 0;
#endif
}

void rdma_helper_synchronize_rcu_tasks(void)
{
	synchronize_rcu_tasks();
}

struct workqueue_struct *rdma_helper_alloc_workqueue(const char *name)
{
	return alloc_workqueue("%s", WQ_UNBOUND | WQ_MEM_RECLAIM, 0, name);
}

/* Copies from struct ib_device, as the string of dev_name() is freed when the device is renamed. */
void rdma_helper_device_name(struct ib_device *dev, char *name, size_t size)
{
	strscpy(name, dev->name, size);
}
EXPORT_SYMBOL_GPL(rdma_helper_device_name);

int rdma_helper_device_numa_node(struct ib_device *dev)
{
	return ibdev_to_node(dev);
}
EXPORT_SYMBOL_GPL(rdma_helper_device_numa_node);

/*
 * Waits for the end of a softirq CQ's poll, which ib_free_cq() does not: ib_poll_handler() arms the
 * CQ, and may schedule itself again, after irq_poll_complete(), and irq_poll_disable() waits only
 * for that.
 *
 * The poll cannot be scheduled after this has returned. irq_poll_disable() leaves SCHED set, which
 * makes irq_poll_sched() fail in the meantime. DISABLE is set before the grace period, so each call
 * of irq_poll_sched() that has not seen it has failed by SCHED when the grace period ends. Then
 * irq_poll_enable() clears SCHED, as irq_poll_disable() in ib_free_cq() must find it clear, and
 * irq_poll_sched() fails by DISABLE. Softirqs are RCU read-side sections, on PREEMPT_RT too, where
 * local_bh_disable() begins one. CQs that end at the same time share a grace period.
 */
void rdma_helper_cq_end_poll(struct ib_cq *cq)
{
	if (cq->poll_ctx != IB_POLL_SOFTIRQ)
		return;
	irq_poll_disable(&cq->iop);
	set_bit(IRQ_POLL_F_DISABLE, &cq->iop.state);
	synchronize_rcu();
	irq_poll_enable(&cq->iop);
}

/*
 * Completes a request that the device has lost. Handlers of a softirq CQ take locks of each other
 * with softirqs enabled.
 */
void rdma_helper_complete(struct ib_cq *cq, struct ib_wc *wc)
{
	bool softirq = cq->poll_ctx == IB_POLL_SOFTIRQ;

	if (softirq)
		local_bh_disable();
	wc->wr_cqe->done(cq, wc);
	if (softirq)
		local_bh_enable();
}

/* @holder: for a direct CQ, an address on the stack of the thread that polls it, or 0. */
bool rdma_helper_cq_is_polled_by_current(struct ib_cq *cq, unsigned long holder)
{
	if (cq->poll_ctx == IB_POLL_DIRECT)
		return object_is_on_stack((void *)holder);
	return (cq->poll_ctx == IB_POLL_WORKQUEUE || cq->poll_ctx == IB_POLL_UNBOUND_WORKQUEUE) &&
	       current_work() == &cq->work;
}

/* A device that maps less than it was asked to reports no error. */
static int all_mapped(struct ib_mr *mr, int ret, int nents, size_t len)
{
	if (ret < 0)
		return ret;
	return ret == nents && mr->length == len ? 0 : -EINVAL;
}

/*
 * Returns the page size to map with. erdma and vmw_pvrdma give the device PAGE_SIZE when an MR is
 * allocated, and ignore that of ib_map_mr_sg(): an address of a smaller page would stand for a
 * whole page of the CPU, with what is behind the memory.
 */
static unsigned int mr_page_size(const struct ib_mr *mr)
{
	switch (mr->device->ops.driver_id) {
	case RDMA_DRIVER_ERDMA:
	case RDMA_DRIVER_VMW_PVRDMA:
		return PAGE_SIZE;
	default:
		return SZ_4K;
	}
}

/* Maps a list that is mapped for DMA, of @len bytes in all. */
int rdma_helper_map_mr_list(struct ib_mr *mr, struct scatterlist *sg, int nents, u32 len)
{
	int ret = ib_map_mr_sg(mr, sg, nents, NULL, mr_page_size(mr));

	ret = all_mapped(mr, ret, nents, len);
	trace_mr_map(mr, nents, len, ret);
	return ret;
}
EXPORT_SYMBOL_GPL(rdma_helper_map_mr_list);

/* Maps memory that is contiguous to the device. */
int rdma_helper_map_mr(struct ib_mr *mr, u64 addr, u32 len)
{
	struct scatterlist sg;

	sg_init_table(&sg, 1);
	sg_dma_address(&sg) = addr;
	sg_dma_len(&sg) = len;
	return rdma_helper_map_mr_list(mr, &sg, 1, len);
}
EXPORT_SYMBOL_GPL(rdma_helper_map_mr);

bool rdma_helper_device_try_get(struct ib_device *dev)
{
	return ib_device_try_get(dev);
}
EXPORT_SYMBOL_GPL(rdma_helper_device_try_get);

enum rdma_ah_attr_type rdma_helper_ah_type(struct ib_device *dev, u32 port)
{
	return rdma_ah_find_type(dev, port);
}
EXPORT_SYMBOL_GPL(rdma_helper_ah_type);

void rdma_helper_memcpy(void *to, const void *from, size_t len)
{
	memcpy(to, from, len);
}
EXPORT_SYMBOL_GPL(rdma_helper_memcpy);

bool rdma_helper_is_port_valid(struct ib_device *dev, u32 port)
{
	return rdma_is_port_valid(dev, port);
}
EXPORT_SYMBOL_GPL(rdma_helper_is_port_valid);

u32 rdma_helper_port_protocols(struct ib_device *dev, u32 port)
{
	return (rdma_protocol_ib(dev, port) ? RDMA_HELPER_IB : 0) |
	       (rdma_protocol_roce(dev, port) ? RDMA_HELPER_ROCE : 0) |
	       (rdma_protocol_roce_eth_encap(dev, port) ? RDMA_HELPER_ROCE_V1 : 0) |
	       (rdma_protocol_roce_udp_encap(dev, port) ? RDMA_HELPER_ROCE_V2 : 0) |
	       (rdma_protocol_iwarp(dev, port) ? RDMA_HELPER_IWARP : 0) |
	       (rdma_cap_opa_ah(dev, port) ? RDMA_HELPER_OPA_AH : 0);
}
EXPORT_SYMBOL_GPL(rdma_helper_port_protocols);

int rdma_helper_port_netdev(struct ib_device *dev, u32 port, struct rdma_helper_netdev *to)
{
	struct net_device *ndev = ib_device_get_netdev(dev, port);

	if (!ndev)
		return -ENODEV;
	strscpy(to->name, ndev->name, sizeof(to->name));
	to->index = ndev->ifindex;
	dev_put(ndev);
	return 0;
}

/*
 * rdma_read_gid_l2_fields() reads the interface twice, and it may be cleared between: of a copy it
 * is not. The interface itself exists until the RCU read lock is released.
 */
int rdma_helper_gid_l2(const struct ib_gid_attr *attr, u16 *vlan, u8 *mac)
{
	struct ib_gid_attr copy = {};
	int ret;

	rcu_read_lock();
	RCU_INIT_POINTER(copy.ndev, rcu_dereference(attr->ndev));
	ret = rdma_read_gid_l2_fields(&copy, vlan, mac);
	rcu_read_unlock();
	return ret;
}

/* Returns the first global IPv4 address of a GID's interface, in host byte order, or 0. */
u32 rdma_helper_gid_ipv4(const struct ib_gid_attr *attr)
{
	const struct in_ifaddr *ifa;
	struct in_device *in_dev;
	struct net_device *ndev;
	__be32 addr = 0;

	rcu_read_lock();
	ndev = rdma_read_gid_attr_ndev_rcu(attr);
	in_dev = IS_ERR(ndev) ? NULL : __in_dev_get_rcu(ndev);
	if (in_dev) {
		in_dev_for_each_ifa_rcu(ifa, in_dev) {
			if (ifa->ifa_scope == RT_SCOPE_UNIVERSE) {
				addr = ifa->ifa_local;
				break;
			}
		}
	}
	rcu_read_unlock();
	return be32_to_cpu(addr);
}

bool rdma_helper_device_is_accessible(struct ib_device *dev)
{
	return current->nsproxy && rdma_dev_access_netns(dev, current->nsproxy->net_ns);
}

/*
 * Returns the network namespace of a device, or the initial one if there is no device, with a
 * reference, or NULL if it is being dismantled, which is when devices leave it.
 */
struct net *rdma_helper_get_net(struct ib_device *dev)
{
	return maybe_get_net(dev ? rdma_dev_net(dev) : &init_net);
}

void rdma_helper_put_net(struct net *net)
{
	put_net(net);
}

/* The caller releases the device by ib_device_put(). */
struct ib_device *rdma_helper_device_by_netdev(const char *name)
{
	struct net_device *ndev = dev_get_by_name(&init_net, name);
	struct ib_device *dev;

	if (!ndev)
		return NULL;
	dev = ib_device_get_by_netdev(ndev, RDMA_DRIVER_UNKNOWN);
	dev_put(ndev);
	return dev;
}
EXPORT_SYMBOL_GPL(rdma_helper_device_by_netdev);

/* Returns the time in nanoseconds, if the end is traced. */
u64 rdma_helper_trace_drain_begin(const struct ib_qp *qp)
{
	trace_drain_begin(qp);
	return trace_drain_end_enabled() ? ktime_get_ns() : 0;
}

void rdma_helper_trace_drain_end(const struct ib_qp *qp, u64 began, int rc)
{
	u64 took;

	if (!trace_drain_end_enabled())
		return;
	/* It may have been enabled meanwhile. */
	took = began ? ktime_get_ns() - began : 0;
	trace_drain_end(qp, DIV_ROUND_UP_ULL(took, NSEC_PER_USEC), rc);
}

/*
 * The posts and completions of ULPs are inlined, and have a static branch each. Where the event is
 * on, or posts are noted, these are called instead of the driver. What is traced of a request is
 * read before: it may have completed when the driver returns.
 */
#if defined(CONFIG_TRACEPOINTS) && defined(CONFIG_JUMP_LABEL)
EXPORT_SYMBOL_GPL(__tracepoint_post_send);
EXPORT_SYMBOL_GPL(__tracepoint_post_recv);
EXPORT_SYMBOL_GPL(__tracepoint_post_srq_recv);
EXPORT_SYMBOL_GPL(__tracepoint_wc);

/* These do nothing: they turn the branches on. */
static void on_post_send(void *data, const struct ib_qp *qp, const struct ib_cqe *wr_cqe,
			 int opcode, int flags, u32 num, int rc)
{
}

static void on_post_recv(void *data, const struct ib_qp *qp, const struct ib_cqe *wr_cqe,
			 int num_sge, int rc)
{
}

static void on_wc(void *data, const struct ib_cq *cq, const struct ib_wc *wc, u32 qp_num)
{
}

/* Turns the branches of posts and completions on, until rdma_helper_branches_off(). */
int rdma_helper_branches_on(void)
{
	int ret;

	ret = register_trace_wc(on_wc, NULL);
	if (ret)
		return ret;
	ret = register_trace_post_send(on_post_send, NULL);
	if (ret)
		goto wc;
	ret = register_trace_post_recv(on_post_recv, NULL);
	if (ret)
		goto post_send;
	return 0;

post_send:
	unregister_trace_post_send(on_post_send, NULL);
wc:
	unregister_trace_wc(on_wc, NULL);
	tracepoint_synchronize_unregister();
	return ret;
}

void rdma_helper_branches_off(void)
{
	unregister_trace_post_recv(on_post_recv, NULL);
	unregister_trace_post_send(on_post_send, NULL);
	unregister_trace_wc(on_wc, NULL);
	tracepoint_synchronize_unregister();
}
#else
/* There are no such events. */
static void trace_post_send(const struct ib_qp *qp, const struct ib_cqe *wr_cqe, int opcode,
			    int flags, u32 num, int rc)
{
}

static void trace_post_recv(const struct ib_qp *qp, const struct ib_cqe *wr_cqe, int num_sge,
			    int rc)
{
}

static void trace_post_srq_recv(const struct ib_srq *srq, const struct ib_cqe *wr_cqe,
				int num_sge, int rc)
{
}

static void trace_wc(const struct ib_cq *cq, const struct ib_wc *wc, u32 qp_num)
{
}

int rdma_helper_branches_on(void)
{
	return 0;
}

void rdma_helper_branches_off(void)
{
}
#endif

/* Traces @cqe, that of the owner, instead of the one that the last request has. */
int rdma_helper_trace_post_send_of(struct ib_qp *qp, const struct ib_send_wr *wr,
				   const struct ib_send_wr **bad_wr, const struct ib_cqe *cqe)
{
	const struct ib_send_wr *last = wr;
	int opcode, flags, ret;
	u32 num = 1;

	for (; last->next; last = last->next)
		num++;
	opcode = last->opcode;
	flags = last->send_flags;
	ret = qp->device->ops.post_send(qp, wr, bad_wr);
	trace_post_send(qp, cqe, opcode, flags, num, ret);
	return ret;
}

int rdma_helper_trace_post_send(struct ib_qp *qp, const struct ib_send_wr *wr,
				const struct ib_send_wr **bad_wr)
{
	const struct ib_send_wr *last = wr;

	while (last->next)
		last = last->next;
	return rdma_helper_trace_post_send_of(qp, wr, bad_wr, last->wr_cqe);
}
EXPORT_SYMBOL_GPL(rdma_helper_trace_post_send);

int rdma_helper_trace_post_recv_of(struct ib_qp *qp, const struct ib_recv_wr *wr,
				   const struct ib_recv_wr **bad_wr, const struct ib_cqe *cqe)
{
	int num_sge = wr->num_sge;
	int ret = -EINVAL;

	/* As refuse_recv() does where nothing is traced. */
	if (qp->srq)
		*bad_wr = wr;
	else
		ret = qp->device->ops.post_recv(qp, wr, bad_wr);
	trace_post_recv(qp, cqe, num_sge, ret);
	return ret;
}

int rdma_helper_trace_post_recv(struct ib_qp *qp, const struct ib_recv_wr *wr,
				const struct ib_recv_wr **bad_wr)
{
	return rdma_helper_trace_post_recv_of(qp, wr, bad_wr, wr->wr_cqe);
}
EXPORT_SYMBOL_GPL(rdma_helper_trace_post_recv);

int rdma_helper_trace_post_srq_recv(struct ib_srq *srq, const struct ib_recv_wr *wr,
				    const struct ib_recv_wr **bad_wr)
{
	const struct ib_cqe *cqe = wr->wr_cqe;
	int num_sge = wr->num_sge;
	int ret = srq->device->ops.post_srq_recv(srq, wr, bad_wr);

	trace_post_srq_recv(srq, cqe, num_sge, ret);
	return ret;
}
EXPORT_SYMBOL_GPL(rdma_helper_trace_post_srq_recv);

void rdma_helper_trace_completion(const struct ib_cq *cq, const struct ib_wc *wc)
{
	u32 qp_num;

	/* The QP may be gone: its drain may have polled the CQ meanwhile. */
	if (get_kernel_nofault(qp_num, &wc->qp->qp_num))
		qp_num = 0;
	trace_wc(cq, wc, qp_num);
}

int rdma_helper_poll_cq(struct ib_cq *cq, int num_entries, struct ib_wc *wc)
{
	return ib_poll_cq(cq, num_entries, wc);
}

/* Called by a completion callback before it does anything. */
void rdma_helper_trace_wc(struct ib_cq *cq, struct ib_wc *wc)
{
	rdma_helper_trace_completion(cq, wc);
	wc->wc_flags &= ~RDMA_HELPER_WC_TRACED_MASK;
	wc->wc_flags |= RDMA_HELPER_WC_TRACED;
	wc->wr_cqe->done(cq, wc);
	wc->wc_flags &= ~RDMA_HELPER_WC_TRACED_MASK;
}
EXPORT_SYMBOL_GPL(rdma_helper_trace_wc);
