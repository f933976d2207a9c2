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

extern struct ib_cqe perf_unsignaled;

void perf_stream_shape(struct perf_run *run);
int perf_stream_init(struct perf_run *run, void (*done)(struct ib_cq *cq, struct ib_wc *wc));
void perf_stream_exit(struct perf_run *run);
void perf_stream_recv_done(struct ib_cq *cq, struct ib_wc *wc);

int perf_rate_init(struct perf_run *run);
int perf_rate_go(struct perf_run *run, u32 ops);

static inline int perf_post(const struct perf_run *run, struct perf_req *req)
{
	struct ib_rdma_wr wr = {
		.wr = {
			.wr_cqe = &perf_unsignaled,
			.sg_list = &req->buf.sge,
			.num_sge = 1,
			.opcode = run->opcode,
		},
		.remote_addr = run->remote_addr,
		.rkey = run->rkey,
	};
	u32 i;
	int ret;

	for (i = 1; i < run->signal; i++) {
		ret = ib_post_send(req->qp, &wr.wr, NULL);
		if (unlikely(ret))
			return ret;
	}
	wr.wr.wr_cqe = &req->cqe;
	wr.wr.send_flags = IB_SEND_SIGNALED;
	return ib_post_send(req->qp, &wr.wr, NULL);
}

#endif
