// SPDX-License-Identifier: GPL-2.0
/*
 * Slots before and after a measurement.
 */

#include <linux/slab.h>

#include "slot.h"

void perf_latency_shape(struct perf_run *run)
{
	run->nr_qps = 1;
	run->a.sends = PERF_SLOTS;
	run->a.recvs = PERF_SLOTS;
	run->b.sends = PERF_SLOTS;
	run->b.recvs = PERF_SLOTS;
}

int perf_slot_init(struct perf_run *run, struct perf_slot *slot, const struct perf_end *from,
		   const struct perf_end *to)
{
	slot->qp = from->qps[0];
	if (to->mr) {
		slot->remote_addr = to->mr->iova;
		slot->rkey = to->mr->rkey;
	}
	return perf_buf_init(&slot->buf, from, run->args->size, DMA_BIDIRECTIONAL);
}

int perf_latency_init(struct perf_run *run)
{
	struct perf_ball *ball = kzalloc_obj(*ball);

	if (!ball)
		return -ENOMEM;
	run->priv = ball;
	ball->next = &ball->a[0];
	return 0;
}

void perf_latency_exit(struct perf_run *run)
{
	struct perf_ball *ball = run->priv;
	int i;

	for (i = 0; ball && i < PERF_SLOTS; i++) {
		perf_buf_exit(&ball->a[i].buf, &run->a);
		perf_buf_exit(&ball->b[i].buf, &run->b);
	}
	kfree(ball);
}

void perf_latency_result(struct perf_run *run, u64 ops, u64 posts)
{
	struct perf_ball *ball = run->priv;
	u64 end, last = ball->began;
	u32 i;

	/* From when they ended to how long they took. */
	for (i = 0; i < min(ops, PERF_SAMPLES); i++) {
		end = run->samples[i];
		run->samples[i] = end - last;
		last = end;
	}
	run->result->ops = ops;
	run->result->posts = posts;
	run->result->completions = posts;
}

int perf_latency_begin(struct perf_run *run, u32 ops)
{
	struct perf_ball *ball = run->priv;

	ball->done = 0;
	ball->total = ops;
	ball->began = ktime_get_ns();
	return perf_slot_send(run, ball->next);
}
