/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Requests of streams: those that are sent, and the receives at the other end.
 */

#ifndef PERF_STREAM_H
#define PERF_STREAM_H

#include "perf.h"

/* run->signal requests, the last of which is signaled; or one receive. */
struct perf_req {
	struct ib_cqe cqe;
	struct ib_qp *qp;
	u32 left;		/* how often it is still to come back */
	struct perf_buf buf;
};

struct perf_stream {
	struct perf_req *reqs;
	u32 nr_reqs;
	struct perf_req *recvs;
	u32 nr_recvs;
};

void perf_stream_shape(struct perf_run *run);
int perf_stream_init(struct perf_run *run, void (*done)(struct ib_cq *cq, struct ib_wc *wc));
void perf_stream_exit(struct perf_run *run);
void perf_stream_recv_done(struct ib_cq *cq, struct ib_wc *wc);

int perf_post_unsignaled(const struct perf_run *run, struct perf_req *req,
			 enum ib_wr_opcode opcode, struct ib_rdma_wr *wr, u32 nr);

int perf_rate_init(struct perf_run *run);
int perf_rate_go(struct perf_run *run, u32 ops);

static __always_inline void perf_wr(const struct perf_run *run, struct perf_req *req,
				    enum ib_wr_opcode opcode, struct ib_rdma_wr *wr)
{
	wr->wr = (struct ib_send_wr) {
		.wr_cqe = &req->cqe,
		.sg_list = &req->buf.sge,
		.num_sge = 1,
		.opcode = opcode,
		.send_flags = IB_SEND_SIGNALED,
	};
	if (opcode != IB_WR_SEND) {
		wr->remote_addr = run->remote_addr;
		wr->rkey = run->rkey;
	}
}

/* @opcode is a constant where it can be. */
static __always_inline int perf_post(const struct perf_run *run, struct perf_req *req,
				     enum ib_wr_opcode opcode)
{
	struct ib_rdma_wr wr;
	int ret;

	perf_wr(run, req, opcode, &wr);
	if (run->signal > 1) {
		ret = perf_post_unsignaled(run, req, opcode, &wr, run->signal - 1);
		if (unlikely(ret))
			return ret;
	}
	return ib_post_send(req->qp, &wr.wr, NULL);
}

#endif
