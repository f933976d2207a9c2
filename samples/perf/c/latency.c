// SPDX-License-Identifier: GPL-2.0
/*
 * Latencies: one message goes to and fro between the two ends, each of which
 * sends it back out of the buffer that it came in; or one READ after the other.
 */

#include "poll.h"
#include "slot.h"

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
	int n = ib_process_cq_direct(run->a.cq, PERF_SLOTS);

	return n + ib_process_cq_direct(run->b.cq, PERF_SLOTS);
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
