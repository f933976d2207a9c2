/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Trace events of the crate: what those of rdma_core, rdma_cma and ib_cma do not have.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM rdma_rs

#if !defined(RDMA_RS_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define RDMA_RS_TRACE_H

#include <linux/tracepoint.h>
#include <rdma/ib_cm.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_cm.h>
#include <trace/misc/rdma.h>

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

/*
 * Without static branches those of the hot path would cost more than a no-op. Without tracepoints
 * helpers.c has functions of the same names.
 */
#if defined(CONFIG_TRACEPOINTS) && defined(CONFIG_JUMP_LABEL)

TRACE_DEFINE_ENUM(IB_WR_SEND);
TRACE_DEFINE_ENUM(IB_WR_SEND_WITH_IMM);
TRACE_DEFINE_ENUM(IB_WR_SEND_WITH_INV);
TRACE_DEFINE_ENUM(IB_WR_RDMA_WRITE);
TRACE_DEFINE_ENUM(IB_WR_RDMA_WRITE_WITH_IMM);
TRACE_DEFINE_ENUM(IB_WR_RDMA_READ);
TRACE_DEFINE_ENUM(IB_WR_ATOMIC_CMP_AND_SWP);
TRACE_DEFINE_ENUM(IB_WR_ATOMIC_FETCH_AND_ADD);
TRACE_DEFINE_ENUM(IB_WR_LOCAL_INV);
TRACE_DEFINE_ENUM(IB_WR_REG_MR);

#define rdma_rs_show_wr_opcode(x)					\
	__print_symbolic(x,						\
		{ IB_WR_SEND, "SEND" },					\
		{ IB_WR_SEND_WITH_IMM, "SEND_WITH_IMM" },		\
		{ IB_WR_SEND_WITH_INV, "SEND_WITH_INV" },		\
		{ IB_WR_RDMA_WRITE, "RDMA_WRITE" },			\
		{ IB_WR_RDMA_WRITE_WITH_IMM, "RDMA_WRITE_WITH_IMM" },	\
		{ IB_WR_RDMA_READ, "RDMA_READ" },			\
		{ IB_WR_ATOMIC_CMP_AND_SWP, "ATOMIC_CMP_AND_SWP" },	\
		{ IB_WR_ATOMIC_FETCH_AND_ADD, "ATOMIC_FETCH_AND_ADD" },	\
		{ IB_WR_LOCAL_INV, "LOCAL_INV" },			\
		{ IB_WR_REG_MR, "REG_MR" })

TRACE_DEFINE_ENUM(IB_WC_SEND);
TRACE_DEFINE_ENUM(IB_WC_RDMA_WRITE);
TRACE_DEFINE_ENUM(IB_WC_RDMA_READ);
TRACE_DEFINE_ENUM(IB_WC_COMP_SWAP);
TRACE_DEFINE_ENUM(IB_WC_FETCH_ADD);
TRACE_DEFINE_ENUM(IB_WC_LOCAL_INV);
TRACE_DEFINE_ENUM(IB_WC_REG_MR);
TRACE_DEFINE_ENUM(IB_WC_RECV);
TRACE_DEFINE_ENUM(IB_WC_RECV_RDMA_WITH_IMM);

/* That of a request that has failed is not valid. */
#define RDMA_RS_NO_OPCODE	0xffffffff

#define rdma_rs_show_wc_opcode(x)					\
	__print_symbolic(x,						\
		{ IB_WC_SEND, "SEND" },					\
		{ IB_WC_RDMA_WRITE, "RDMA_WRITE" },			\
		{ IB_WC_RDMA_READ, "RDMA_READ" },			\
		{ IB_WC_COMP_SWAP, "COMP_SWAP" },			\
		{ IB_WC_FETCH_ADD, "FETCH_ADD" },			\
		{ IB_WC_LOCAL_INV, "LOCAL_INV" },			\
		{ IB_WC_REG_MR, "REG_MR" },				\
		{ IB_WC_RECV, "RECV" },					\
		{ IB_WC_RECV_RDMA_WITH_IMM, "RECV_RDMA_WITH_IMM" },	\
		{ RDMA_RS_NO_OPCODE, "-" })

TRACE_DEFINE_ENUM(IB_SEND_FENCE);
TRACE_DEFINE_ENUM(IB_SEND_SIGNALED);
TRACE_DEFINE_ENUM(IB_SEND_SOLICITED);

/* @wr_cqe, @opcode and @flags are of the last request. */
TRACE_EVENT(post_send,
	TP_PROTO(const struct ib_qp *qp, const struct ib_cqe *wr_cqe, int opcode, int flags,
		 u32 num, int rc),

	TP_ARGS(qp, wr_cqe, opcode, flags, num, rc),

	TP_STRUCT__entry(
		__array(char, device, IB_DEVICE_NAME_MAX)
		__field(u32, qp_num)
		__field(const void *, wr_cqe)
		__field(int, opcode)
		__field(int, flags)
		__field(u32, num)
		__field(int, rc)
	),

	TP_fast_assign(
		strscpy(__entry->device, qp->device->name, IB_DEVICE_NAME_MAX);
		__entry->qp_num = qp->qp_num;
		__entry->wr_cqe = wr_cqe;
		__entry->opcode = opcode;
		__entry->flags = flags;
		__entry->num = num;
		__entry->rc = rc;
	),

	TP_printk("device=%s qp_num=%u wr_cqe=%p opcode=%s flags=%s num=%u rc=%d",
		  __entry->device, __entry->qp_num, __entry->wr_cqe,
		  rdma_rs_show_wr_opcode(__entry->opcode),
		  __print_flags(__entry->flags, "|",
				{ IB_SEND_FENCE, "FENCE" },
				{ IB_SEND_SIGNALED, "SIGNALED" },
				{ IB_SEND_SOLICITED, "SOLICITED" }),
		  __entry->num, __entry->rc)
);

TRACE_EVENT(post_recv,
	TP_PROTO(const struct ib_qp *qp, const struct ib_cqe *wr_cqe, int num_sge, int rc),

	TP_ARGS(qp, wr_cqe, num_sge, rc),

	TP_STRUCT__entry(
		__array(char, device, IB_DEVICE_NAME_MAX)
		__field(u32, qp_num)
		__field(const void *, wr_cqe)
		__field(int, num_sge)
		__field(int, rc)
	),

	TP_fast_assign(
		strscpy(__entry->device, qp->device->name, IB_DEVICE_NAME_MAX);
		__entry->qp_num = qp->qp_num;
		__entry->wr_cqe = wr_cqe;
		__entry->num_sge = num_sge;
		__entry->rc = rc;
	),

	TP_printk("device=%s qp_num=%u wr_cqe=%p num_sge=%d rc=%d",
		  __entry->device, __entry->qp_num, __entry->wr_cqe, __entry->num_sge, __entry->rc)
);

TRACE_EVENT(post_srq_recv,
	TP_PROTO(const struct ib_srq *srq, const struct ib_cqe *wr_cqe, int num_sge, int rc),

	TP_ARGS(srq, wr_cqe, num_sge, rc),

	TP_STRUCT__entry(
		__array(char, device, IB_DEVICE_NAME_MAX)
		__field(u32, srq_id)
		__field(const void *, wr_cqe)
		__field(int, num_sge)
		__field(int, rc)
	),

	TP_fast_assign(
		strscpy(__entry->device, srq->device->name, IB_DEVICE_NAME_MAX);
		__entry->srq_id = srq->res.id;
		__entry->wr_cqe = wr_cqe;
		__entry->num_sge = num_sge;
		__entry->rc = rc;
	),

	TP_printk("device=%s srq.id=%u wr_cqe=%p num_sge=%d rc=%d",
		  __entry->device, __entry->srq_id, __entry->wr_cqe, __entry->num_sge, __entry->rc)
);

TRACE_EVENT(wc,
	TP_PROTO(const struct ib_cq *cq, const struct ib_wc *wc, u32 qp_num),

	TP_ARGS(cq, wc, qp_num),

	TP_STRUCT__entry(
		__field(u32, cq_id)
		__field(u32, qp_num)
		__field(const void *, wr_cqe)
		__field(unsigned int, status)
		__field(u32, vendor_err)
		__field(u32, opcode)
		__field(u32, byte_len)
	),

	TP_fast_assign(
		__entry->cq_id = cq->res.id;
		__entry->qp_num = qp_num;
		__entry->wr_cqe = wc->wr_cqe;
		__entry->status = wc->status;
		if (wc->status) {
			__entry->vendor_err = wc->vendor_err;
			__entry->opcode = RDMA_RS_NO_OPCODE;
			__entry->byte_len = 0;
		} else {
			__entry->vendor_err = 0;
			__entry->opcode = wc->opcode;
			__entry->byte_len = wc->byte_len;
		}
	),

	TP_printk("cq.id=%u qp_num=%u wr_cqe=%p status=%s vendor_err=%#x opcode=%s byte_len=%u",
		  __entry->cq_id, __entry->qp_num, __entry->wr_cqe,
		  rdma_show_wc_status(__entry->status), __entry->vendor_err,
		  rdma_rs_show_wc_opcode(__entry->opcode), __entry->byte_len)
);

#endif
#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE rdma_rs_trace
#include <trace/define_trace.h>
