// SPDX-License-Identifier: GPL-2.0
/*
 * Latencies: one message goes to and fro between the two ends, each of which
 * sends it back out of the buffer that it came in; or one READ after the other.
 */

#include <linux/slab.h>

#include "poll.h"

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

/* What is counted is touched by A's handlers only, one of which runs at a time. */
struct perf_ball {
	struct perf_slot a[PERF_SLOTS];
	struct perf_slot b[PERF_SLOTS];
	struct perf_slot *next;		/* of A: sends the ball */
	u32 done;
	u32 total;
	u64 last;		/* when the ball was sent */
};

static int perf_slot_recv(struct perf_slot *slot)
{
	struct ib_recv_wr wr = {
		.wr_cqe = &slot->recv,
		.sg_list = &slot->buf.sge,
		.num_sge = 1,
	};

	return ib_post_recv(slot->qp, &wr, NULL);
}

/* A write has immediate data, so that the peer gets to know of it. */
static int perf_slot_send(const struct perf_run *run, struct perf_slot *slot)
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
 * An operation of A's has just ended: takes its time, and begins the next one
 * out of the same slot.
 */
static void perf_again(struct perf_run *run, struct perf_slot *slot)
{
	struct perf_ball *ball = run->priv;
	u64 now = ktime_get_ns();
	int ret;

	if (ball->done < PERF_SAMPLES)
		run->samples[ball->done] = now - ball->last;
	ball->last = now;
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

static void perf_ball_sent(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_slot *slot = container_of(wc->wr_cqe, struct perf_slot, send);
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(cq->cq_context, wc);
		return;
	}
	ret = perf_slot_recv(slot);
	if (unlikely(ret))
		perf_fail(cq->cq_context, "receive not posted", ret);
}

/* At B. */
static void perf_ball_at_b(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_slot *slot = container_of(wc->wr_cqe, struct perf_slot, recv);
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(cq->cq_context, wc);
		return;
	}
	ret = perf_slot_send(cq->cq_context, slot);
	if (unlikely(ret))
		perf_fail(cq->cq_context, "request not posted", ret);
}

/* Back at A. */
static void perf_ball_at_a(struct ib_cq *cq, struct ib_wc *wc)
{
	if (unlikely(wc->status != IB_WC_SUCCESS))
		perf_failed_wc(cq->cq_context, wc);
	else
		perf_again(cq->cq_context, container_of(wc->wr_cqe, struct perf_slot, recv));
}

static void perf_read_done(struct ib_cq *cq, struct ib_wc *wc)
{
	if (unlikely(wc->status != IB_WC_SUCCESS))
		perf_failed_wc(cq->cq_context, wc);
	else
		perf_again(cq->cq_context, container_of(wc->wr_cqe, struct perf_slot, send));
}

static int perf_poll_direct(struct perf_run *run)
{
	return ib_process_cq_direct(run->a.cq, PERF_SLOTS) + ib_process_cq_direct(run->b.cq, PERF_SLOTS);
}

static int perf_ball_poll_batch(struct perf_run *run)
{
	int m, n = perf_poll_batch(run->a.cq, perf_ball_at_a, perf_ball_sent);

	if (n < 0)
		return n;
	m = perf_poll_batch(run->b.cq, perf_ball_at_b, perf_ball_sent);
	return m < 0 ? m : n + m;
}

static int perf_read_poll_direct(struct perf_run *run)
{
	return ib_process_cq_direct(run->a.cq, PERF_SLOTS);
}

static int perf_read_poll_batch(struct perf_run *run)
{
	return perf_poll_batch(run->a.cq, perf_read_done, NULL);
}

static void perf_latency_result(struct perf_run *run, u64 ops, u64 posts)
{
	run->result->ops = ops;
	run->result->posts = posts;
	run->result->completions = posts;
}

static int perf_latency_begin(struct perf_run *run, u32 ops)
{
	struct perf_ball *ball = run->priv;

	ball->done = 0;
	ball->total = ops;
	ball->last = ktime_get_ns();
	return perf_slot_send(run, ball->next);
}

static int perf_ball_go(struct perf_run *run, u32 ops)
{
	int ret = perf_latency_begin(run, ops);

	if (ret)
		return ret;
	if (run->args->context == PERF_BATCH)
		ret = perf_wait(run, perf_ball_poll_batch);
	else
		ret = perf_wait(run, perf_poll_direct);
	if (ret)
		return ret;
	perf_latency_result(run, ops, 2ULL * ops);
	return 0;
}

static int perf_read_go(struct perf_run *run, u32 ops)
{
	int ret = perf_latency_begin(run, ops);

	if (ret)
		return ret;
	if (run->args->context == PERF_BATCH)
		ret = perf_wait(run, perf_read_poll_batch);
	else
		ret = perf_wait(run, perf_read_poll_direct);
	if (ret)
		return ret;
	perf_latency_result(run, ops, ops);
	return 0;
}

static void perf_latency_shape(struct perf_run *run)
{
	run->nr_qps = 1;
	run->a.sends = PERF_SLOTS;
	run->a.recvs = PERF_SLOTS;
	run->b.sends = PERF_SLOTS;
	run->b.recvs = PERF_SLOTS;
}

static int perf_slot_init(struct perf_run *run, struct perf_slot *slot, const struct perf_end *from,
			  const struct perf_end *to)
{
	slot->qp = from->qps[0];
	if (to->mr) {
		slot->remote_addr = to->mr->iova;
		slot->rkey = to->mr->rkey;
	}
	return perf_buf_init(&slot->buf, from, run->args->size, DMA_BIDIRECTIONAL);
}

static int perf_latency_init(struct perf_run *run)
{
	struct perf_ball *ball = kzalloc_obj(*ball);

	if (!ball)
		return -ENOMEM;
	run->priv = ball;
	ball->next = &ball->a[0];
	return 0;
}

static int perf_read_init(struct perf_run *run)
{
	struct perf_ball *ball;
	int ret;

	ret = perf_latency_init(run);
	if (ret)
		return ret;
	ret = perf_region_init(run, &run->b, run->args->size);
	if (ret)
		return ret;
	ball = run->priv;
	ball->next->send.done = perf_read_done;
	return perf_slot_init(run, ball->next, &run->a, &run->b);
}

static int perf_ball_init_slots(struct perf_run *run, struct perf_ball *ball)
{
	int i, ret;

	for (i = 0; i < PERF_SLOTS; i++) {
		ball->a[i].recv.done = perf_ball_at_a;
		ball->b[i].recv.done = perf_ball_at_b;
		ball->a[i].send.done = perf_ball_sent;
		ball->b[i].send.done = perf_ball_sent;
		ret = perf_slot_init(run, &ball->a[i], &run->a, &run->b);
		if (ret)
			return ret;
		ret = perf_slot_init(run, &ball->b[i], &run->b, &run->a);
		if (ret)
			return ret;
	}
	return 0;
}

static int perf_ball_init(struct perf_run *run)
{
	struct perf_ball *ball;
	int i, ret;

	ret = perf_latency_init(run);
	if (ret)
		return ret;
	if (run->opcode == IB_WR_RDMA_WRITE_WITH_IMM) {
		ret = perf_region_init(run, &run->a, run->args->size);
		if (ret)
			return ret;
		ret = perf_region_init(run, &run->b, run->args->size);
		if (ret)
			return ret;
	}
	ball = run->priv;
	ret = perf_ball_init_slots(run, ball);
	for (i = 0; !ret && i < PERF_SLOTS; i++) {
		if (&ball->a[i] != ball->next)
			ret = perf_slot_recv(&ball->a[i]);
		if (!ret)
			ret = perf_slot_recv(&ball->b[i]);
	}
	return ret;
}

static void perf_latency_exit(struct perf_run *run)
{
	struct perf_ball *ball = run->priv;
	int i;

	for (i = 0; ball && i < PERF_SLOTS; i++) {
		perf_buf_exit(&ball->a[i].buf, &run->a);
		perf_buf_exit(&ball->b[i].buf, &run->b);
	}
	kfree(ball);
}

const struct perf_load perf_send_lat = {
	.name = "send_lat",
	.opcode = IB_WR_SEND,
	.pair = true,
	.samples = true,
	.max_size = SZ_64K,
	.shape = perf_latency_shape,
	.init = perf_ball_init,
	.go = perf_ball_go,
	.exit = perf_latency_exit,
};

const struct perf_load perf_write_lat = {
	.name = "write_lat",
	.opcode = IB_WR_RDMA_WRITE_WITH_IMM,
	.pair = true,
	.samples = true,
	.max_size = SZ_64K,
	.shape = perf_latency_shape,
	.init = perf_ball_init,
	.go = perf_ball_go,
	.exit = perf_latency_exit,
};

const struct perf_load perf_read_lat = {
	.name = "read_lat",
	.opcode = IB_WR_RDMA_READ,
	.pair = true,
	.samples = true,
	.max_size = SZ_64K,
	.shape = perf_latency_shape,
	.init = perf_read_init,
	.go = perf_read_go,
	.exit = perf_latency_exit,
};
