/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Slots: what latencies are measured with.
 */

#ifndef PERF_SLOT_H
#define PERF_SLOT_H

#include "perf.h"

#define PERF_SLOTS	4	/* of each end */

/* Posted as a receive, then as a send, and so on. */
struct perf_slot {
	struct ib_cqe recv;
	struct ib_cqe send;
	struct ib_qp *qp;
	u64 remote_addr;
	u32 rkey;
	struct perf_buf buf;
};

/* The counts are touched by A's handlers only, one of which runs at a time. */
struct perf_ball {
	struct perf_slot a[PERF_SLOTS];
	struct perf_slot b[PERF_SLOTS];
	struct perf_slot *next;		/* of A: sends the ball */
	u32 done;
	u32 total;
	u64 began;
};

static inline int perf_slot_recv(struct perf_slot *slot)
{
	struct ib_recv_wr wr = {
		.wr_cqe = &slot->recv,
		.sg_list = &slot->buf.sge,
		.num_sge = 1,
	};

	return ib_post_recv(slot->qp, &wr, NULL);
}

/* A write has immediate data, so that the peer gets to know of it. */
static inline int perf_slot_send(const struct perf_run *run, struct perf_slot *slot)
{
	struct ib_rdma_wr wr;

	wr.wr = (struct ib_send_wr) {
		.wr_cqe = &slot->send,
		.sg_list = &slot->buf.sge,
		.num_sge = 1,
		.opcode = run->opcode,
		.send_flags = IB_SEND_SIGNALED,
	};
	if (run->opcode != IB_WR_SEND) {
		wr.remote_addr = slot->remote_addr;
		wr.rkey = slot->rkey;
	}
	return ib_post_send(slot->qp, &wr.wr, NULL);
}

/*
 * An operation of A's has just ended: notes when, and begins the next one out of
 * the same slot.
 */
static inline void perf_again(struct perf_run *run, struct perf_slot *slot)
{
	struct perf_ball *ball = run->priv;
	u64 now = ktime_get_ns();
	int ret;

	if (ball->done < PERF_SAMPLES)
		run->samples[ball->done] = now;
	ball->done++;
	if (unlikely(ball->done % 64 == 0))
		WRITE_ONCE(run->progress, run->progress + 1);
	if (unlikely(ball->done == ball->total)) {
		ball->next = slot;
		run->end = now;
		complete(&run->finished);
		return;
	}
	ret = perf_slot_send(run, slot);
	if (unlikely(ret))
		perf_fail(run, "request not posted", ret);
}

void perf_latency_shape(struct perf_run *run);
int perf_latency_init(struct perf_run *run);
int perf_slot_init(struct perf_run *run, struct perf_slot *slot, const struct perf_end *from,
		   const struct perf_end *to);
void perf_latency_exit(struct perf_run *run);

int perf_latency_begin(struct perf_run *run, u32 ops);
void perf_latency_result(struct perf_run *run, u64 ops, u64 posts);

#endif
