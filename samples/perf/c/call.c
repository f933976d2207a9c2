// SPDX-License-Identifier: GPL-2.0
/*
 * Requests that are answered, as those of storage protocols: an operation takes a tag,
 * registers memory and sends its key, in one post. The other end answers with a SEND that
 * invalidates the key. When the send has completed and the answer has come, the tag is free.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/bitops.h>
#include <linux/refcount.h>
#include <linux/slab.h>
#include <linux/wait.h>

#include "poll.h"

#define PERF_CALL_BYTES	PAGE_SIZE	/* that are registered */
#define PERF_GENERATIONS	0xf

struct perf_message {
	__le32 id;	/* the tag, and how often it was used before in the upper half */
	__le32 key;	/* to be invalidated, if it is not 0 */
};

/* What a tag stands for. */
struct perf_call {
	struct ib_cqe send;
	refcount_t ref;		/* the send and the reply */
	u16 index;
	u16 generation;
	u32 left;		/* how often it is still to end */
	struct perf_buf msg;
	struct ib_mr *mr;
	struct perf_buf data;
};

/* A receive; of the other end, also its answer. */
struct perf_call_recv {
	struct ib_cqe recv;
	struct ib_cqe send;
	struct ib_qp *qp;
	struct perf_buf buf;
};

struct perf_calls {
	unsigned long *tags;	/* a bit is set while the tag is in use */
	wait_queue_head_t wait;
	u32 nr;
	struct ib_qp *qp;
	struct ib_cqe reg;
	bool registers;
	struct perf_call *calls;
	struct perf_call_recv *recvs;	/* of A, then of B */
};

static void perf_message_to_cpu(const struct perf_buf *buf, const struct ib_qp *qp)
{
	ib_dma_sync_single_for_cpu(qp->device, buf->sge.addr, buf->sge.length, buf->dir);
}

static void perf_message_to_device(const struct perf_buf *buf, const struct ib_qp *qp)
{
	ib_dma_sync_single_for_device(qp->device, buf->sge.addr, buf->sge.length, buf->dir);
}

static struct perf_call *perf_tag_get(struct perf_calls *calls)
{
	struct perf_call *call;
	u32 tag;

	do {
		tag = find_first_zero_bit(calls->tags, calls->nr);
		if (tag >= calls->nr)
			return NULL;
	} while (test_and_set_bit_lock(tag, calls->tags));
	call = &calls->calls[tag];
	WARN_ON(call->index != tag);
	return call;
}

static void perf_tag_put(struct perf_calls *calls, const struct perf_call *call)
{
	if (WARN_ON(!test_bit(call->index, calls->tags)))
		return;
	clear_bit_unlock(call->index, calls->tags);
	/* A thread that waits is on the list before it looks at the tags again. */
	smp_mb__after_atomic();
	/* The barrier is above. */
	if (waitqueue_active(&calls->wait))
		wake_up(&calls->wait);
}

static int perf_call_start(struct perf_calls *calls, struct perf_call *call)
{
	struct ib_send_wr wr, *first = &wr;
	struct perf_message *msg;
	struct ib_reg_wr reg;
	u32 key = 0;

	call->generation = (call->generation + 1) & PERF_GENERATIONS;
	refcount_set(&call->ref, 2);
	wr = (struct ib_send_wr) {
		.wr_cqe = &call->send,
		.sg_list = &call->msg.sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	if (calls->registers) {
		ib_update_fast_reg_key(call->mr, ib_inc_rkey(call->mr->rkey));
		key = call->mr->rkey;
		reg = (struct ib_reg_wr) {
			.wr = {
				.next = &wr,
				.wr_cqe = &calls->reg,
				.opcode = IB_WR_REG_MR,
			},
			.mr = call->mr,
			.key = key,
			.access = IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_WRITE,
		};
		first = &reg.wr;
	}
	perf_message_to_cpu(&call->msg, calls->qp);
	msg = call->msg.mem;
	msg->id = cpu_to_le32((u32)call->generation << 16 | call->index);
	msg->key = cpu_to_le32(key);
	perf_message_to_device(&call->msg, calls->qp);
	return ib_post_send(calls->qp, first, NULL);
}

/* The send has completed, or the reply has come. */
static void perf_call_end(struct perf_run *run, struct perf_call *call)
{
	struct perf_calls *calls = run->priv;
	int ret;

	if (!refcount_dec_and_test(&call->ref))
		return;
	/* A tag that was in use often enough stays so until the phase is over. */
	if (!perf_goes_on(run, &call->left))
		return;
	perf_tag_put(calls, call);
	call = perf_tag_get(calls);
	ret = likely(call) ? perf_call_start(calls, call) : -EAGAIN;
	if (unlikely(ret))
		perf_fail(run, "call not posted", ret);
}

static void perf_call_sent(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_call *call = container_of(wc->wr_cqe, struct perf_call, send);
	struct perf_run *run = cq->cq_context;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(run, wc);
		return;
	}
	perf_call_end(run, call);
}

/* A registration completes only if it fails. */
static void perf_call_reg_done(struct ib_cq *cq, struct ib_wc *wc)
{
	if (wc->status != IB_WC_SUCCESS)
		perf_failed_wc(cq->cq_context, wc);
}

static int perf_call_post_recv(struct perf_call_recv *recv)
{
	struct ib_recv_wr wr = {
		.wr_cqe = &recv->recv,
		.sg_list = &recv->buf.sge,
		.num_sge = 1,
	};

	return ib_post_recv(recv->qp, &wr, NULL);
}

/* Returns the call that a message answers. */
static struct perf_call *perf_call_find(struct perf_calls *calls, const struct perf_message *msg)
{
	u32 id = le32_to_cpu(msg->id);
	u32 index = id & U16_MAX;
	struct perf_call *call;

	if (unlikely(index >= calls->nr))
		return NULL;
	call = &calls->calls[index];
	if (unlikely(call->generation != id >> 16))
		return NULL;
	return call;
}

static void perf_call_answered(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_call_recv *recv = container_of(wc->wr_cqe, struct perf_call_recv, recv);
	struct perf_run *run = cq->cq_context;
	struct perf_calls *calls = run->priv;
	struct perf_call *call;
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(run, wc);
		return;
	}
	if (unlikely(wc->byte_len < sizeof(struct perf_message))) {
		perf_fail(run, "short message", -EPROTO);
		return;
	}
	perf_message_to_cpu(&recv->buf, recv->qp);
	call = perf_call_find(calls, recv->buf.mem);
	if (unlikely(!call)) {
		perf_fail(run, "reply without a call", -EPROTO);
		return;
	}
	if (calls->registers && unlikely(!(wc->wc_flags & IB_WC_WITH_INVALIDATE) ||
					 wc->ex.invalidate_rkey != call->mr->rkey)) {
		perf_fail(run, "key not invalidated", -EPROTO);
		return;
	}
	perf_call_end(run, call);
	perf_message_to_device(&recv->buf, recv->qp);
	ret = perf_call_post_recv(recv);
	if (unlikely(ret))
		perf_fail(run, "receive not posted", ret);
}

/* The other end: sends the message back. */
static void perf_call_came(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_call_recv *recv = container_of(wc->wr_cqe, struct perf_call_recv, recv);
	struct ib_send_wr wr = {
		.wr_cqe = &recv->send,
		.sg_list = &recv->buf.sge,
		.num_sge = 1,
		.opcode = IB_WR_SEND,
		.send_flags = IB_SEND_SIGNALED,
	};
	const struct perf_message *msg = recv->buf.mem;
	u32 key;
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(cq->cq_context, wc);
		return;
	}
	if (unlikely(wc->byte_len < sizeof(*msg))) {
		perf_fail(cq->cq_context, "short message", -EPROTO);
		return;
	}
	perf_message_to_cpu(&recv->buf, recv->qp);
	key = le32_to_cpu(msg->key);
	perf_message_to_device(&recv->buf, recv->qp);
	if (key) {
		wr.opcode = IB_WR_SEND_WITH_INV;
		wr.ex.invalidate_rkey = key;
	}
	ret = ib_post_send(recv->qp, &wr, NULL);
	if (unlikely(ret))
		perf_fail(cq->cq_context, "answer not posted", ret);
}

static void perf_call_answer_sent(struct ib_cq *cq, struct ib_wc *wc)
{
	struct perf_call_recv *recv = container_of(wc->wr_cqe, struct perf_call_recv, send);
	int ret;

	if (unlikely(wc->status != IB_WC_SUCCESS)) {
		perf_failed_wc(cq->cq_context, wc);
		return;
	}
	ret = perf_call_post_recv(recv);
	if (unlikely(ret))
		perf_fail(cq->cq_context, "receive not posted", ret);
}

static int perf_call_poll(struct perf_run *run)
{
	int n = ib_process_cq_direct(run->a.cq, run->args->depth);

	return n + ib_process_cq_direct(run->b.cq, run->args->depth);
}

static int perf_call_go(struct perf_run *run, u32 ops)
{
	struct perf_calls *calls = run->priv;
	u32 i, nr = min(ops, calls->nr);
	struct perf_call *call;
	int ret;

	run->left = nr;
	bitmap_zero(calls->tags, calls->nr);
	/* All at first, as the first ones may end and be taken again. */
	for (i = 0; i < nr; i++) {
		call = perf_tag_get(calls);
		if (call != &calls->calls[i])
			return -EBUSY;
		call->left = perf_share(ops, i, nr);
	}
	for (i = 0; i < nr; i++) {
		ret = perf_call_start(calls, &calls->calls[i]);
		if (ret)
			return ret;
	}
	ret = perf_wait(run, perf_call_poll);
	if (ret)
		return ret;
	run->result->ops = ops;
	run->result->posts = 2ULL * ops;
	run->result->completions = 4ULL * ops;
	return 0;
}

static void perf_call_shape(struct perf_run *run)
{
	run->nr_qps = 1;
	run->a.sends = 2 * run->args->depth;
	run->a.recvs = 2 * run->args->depth;
	run->b.sends = 2 * run->args->depth;
	run->b.recvs = 2 * run->args->depth;
}

static int perf_call_init_one(struct perf_run *run, struct perf_calls *calls, u32 index)
{
	struct perf_call *call = &calls->calls[index];
	int ret;

	call->index = index;
	call->send.done = perf_call_sent;
	ret = perf_buf_init(&call->msg, &run->a, run->args->size, DMA_TO_DEVICE);
	if (ret || !calls->registers)
		return ret;
	ret = perf_buf_init(&call->data, &run->a, PERF_CALL_BYTES, DMA_BIDIRECTIONAL);
	if (ret)
		return ret;
	call->mr = perf_mr_alloc(&run->a, &call->data);
	if (IS_ERR(call->mr)) {
		ret = PTR_ERR(call->mr);
		call->mr = NULL;
	}
	return ret;
}

static int perf_call_recvs_init(struct perf_run *run, const struct perf_end *end,
				struct perf_call_recv *recvs, enum dma_data_direction dir,
				void (*came)(struct ib_cq *cq, struct ib_wc *wc))
{
	u32 i;
	int ret = 0;

	for (i = 0; !ret && i < end->recvs; i++) {
		recvs[i].recv.done = came;
		recvs[i].send.done = perf_call_answer_sent;
		recvs[i].qp = end->qps[0];
		ret = perf_buf_init(&recvs[i].buf, end, run->args->size, dir);
		if (!ret)
			ret = perf_call_post_recv(&recvs[i]);
	}
	return ret;
}

static int perf_calls_init(struct perf_run *run, bool registers)
{
	struct perf_calls *calls;
	u32 i, nr = run->args->depth;
	int ret;

	if (run->args->context == PERF_BATCH || run->args->context == PERF_STATIC ||
	    run->args->size < sizeof(struct perf_message))
		return -EINVAL;
	calls = kzalloc_obj(*calls);
	if (!calls)
		return -ENOMEM;
	run->priv = calls;
	calls->nr = nr;
	calls->qp = run->a.qps[0];
	calls->reg.done = perf_call_reg_done;
	calls->registers = registers;
	init_waitqueue_head(&calls->wait);
	calls->tags = bitmap_zalloc(nr, GFP_KERNEL);
	calls->calls = kvzalloc_objs(*calls->calls, nr);
	calls->recvs = kvzalloc_objs(*calls->recvs, run->a.recvs + run->b.recvs);
	if (!calls->tags || !calls->calls || !calls->recvs)
		return -ENOMEM;
	for (i = 0; i < nr; i++) {
		ret = perf_call_init_one(run, calls, i);
		if (ret)
			return ret;
	}
	ret = perf_call_recvs_init(run, &run->a, calls->recvs, DMA_FROM_DEVICE,
				   perf_call_answered);
	return ret ?: perf_call_recvs_init(run, &run->b, calls->recvs + run->a.recvs,
					   DMA_BIDIRECTIONAL, perf_call_came);
}

static int perf_call_init(struct perf_run *run)
{
	return perf_calls_init(run, true);
}

static int perf_tag_init(struct perf_run *run)
{
	return perf_calls_init(run, false);
}

static void perf_call_exit(struct perf_run *run)
{
	struct perf_calls *calls = run->priv;
	u32 i;

	if (!calls)
		return;
	for (i = 0; calls->calls && i < calls->nr; i++) {
		if (calls->calls[i].mr)
			ib_dereg_mr(calls->calls[i].mr);
		perf_buf_exit(&calls->calls[i].data, &run->a);
		perf_buf_exit(&calls->calls[i].msg, &run->a);
	}
	for (i = 0; calls->recvs && i < run->a.recvs + run->b.recvs; i++)
		perf_buf_exit(&calls->recvs[i].buf, i < run->a.recvs ? &run->a : &run->b);
	kvfree(calls->recvs);
	kvfree(calls->calls);
	bitmap_free(calls->tags);
	kfree(calls);
}

const struct perf_load perf_call_rate = {
	.name = "call_rate",
	.opcode = IB_WR_SEND,
	.pair = true,
	.max_size = SZ_64K,
	.shape = perf_call_shape,
	.init = perf_call_init,
	.go = perf_call_go,
	.exit = perf_call_exit,
};

const struct perf_load perf_tag_rate = {
	.name = "tag_rate",
	.opcode = IB_WR_SEND,
	.pair = true,
	.max_size = SZ_64K,
	.shape = perf_call_shape,
	.init = perf_tag_init,
	.go = perf_call_go,
	.exit = perf_call_exit,
};
