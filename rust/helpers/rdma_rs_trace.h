/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Trace events of the crate: what those of rdma_core, rdma_cma and ib_cma do not have.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM rdma_rs

#if !defined(RDMA_RS_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define RDMA_RS_TRACE_H

#include <linux/tracepoint.h>
#include <rdma/ib_verbs.h>

TRACE_EVENT(drain_begin,
	TP_PROTO(const struct ib_qp *qp),

	TP_ARGS(qp),

	TP_STRUCT__entry(
		__array(char, device, IB_DEVICE_NAME_MAX)
		__field(u32, qp_num)
	),

	TP_fast_assign(
		/* The string of dev_name() is freed when the device is renamed. */
		strscpy(__entry->device, qp->device->name, IB_DEVICE_NAME_MAX);
		__entry->qp_num = qp->qp_num;
	),

	TP_printk("device=%s qp_num=%u", __entry->device, __entry->qp_num)
);

TRACE_EVENT(drain_end,
	TP_PROTO(const struct ib_qp *qp, u64 usecs, int rc),

	TP_ARGS(qp, usecs, rc),

	TP_STRUCT__entry(
		__array(char, device, IB_DEVICE_NAME_MAX)
		__field(u32, qp_num)
		__field(u64, usecs)
		__field(int, rc)
	),

	TP_fast_assign(
		strscpy(__entry->device, qp->device->name, IB_DEVICE_NAME_MAX);
		__entry->qp_num = qp->qp_num;
		__entry->usecs = usecs;
		__entry->rc = rc;
	),

	TP_printk("device=%s qp_num=%u took %llu [us] rc=%d",
		  __entry->device, __entry->qp_num, __entry->usecs, __entry->rc)
);

TRACE_EVENT(mr_map,
	TP_PROTO(const struct ib_mr *mr, int nents, size_t len, int rc),

	TP_ARGS(mr, nents, len, rc),

	TP_STRUCT__entry(
		__field(u32, mr_id)
		__field(int, nents)
		__field(size_t, len)
		__field(u64, iova)
		__field(int, rc)
	),

	TP_fast_assign(
		__entry->mr_id = mr->res.id;
		__entry->nents = nents;
		__entry->len = len;
		__entry->iova = mr->iova;
		__entry->rc = rc;
	),

	TP_printk("mr.id=%u nents=%d len=%zu iova=%#llx rc=%d",
		  __entry->mr_id, __entry->nents, __entry->len, __entry->iova, __entry->rc)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE rdma_rs_trace
#include <trace/define_trace.h>
