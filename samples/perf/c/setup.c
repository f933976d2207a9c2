// SPDX-License-Identifier: GPL-2.0
/*
 * QPs, and CQs that the RDMA core polls: so many at once are set up, and then
 * taken down.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/slab.h>

#include "perf.h"

/*
 * Has objects set up, then taken down in the opposite order, until there were
 * @ops of them.
 */
int perf_setup_go(struct perf_run *run, u32 ops, int (*set_up)(struct perf_run *run, u32 i),
		  int (*take_down)(struct perf_run *run, u32 i))
{
	u64 begin, setup_ns = 0, teardown_ns = 0, done = 0;
	u32 i, nr = run->args->qps;
	int ret;

	while (done < ops) {
		begin = ktime_get_ns();
		for (i = 0; i < nr; i++) {
			ret = set_up(run, i);
			if (ret)
				return ret;
		}
		setup_ns += ktime_get_ns() - begin;
		ret = perf_hold(run);
		if (ret)
			return ret;
		begin = ktime_get_ns();
		for (i = nr; i--;) {
			ret = take_down(run, i);
			if (ret)
				return ret;
		}
		run->end = ktime_get_ns();
		teardown_ns += run->end - begin;
		done += nr;
	}
	run->result->ops = done;
	run->result->setup_ns = setup_ns;
	run->result->teardown_ns = teardown_ns;
	return 0;
}

/* QPs that can send, without a peer. */
struct perf_qps {
	struct perf_way way;
	struct ib_qp *qps[];
};

static int perf_qp_up(struct perf_run *run, u32 i)
{
	struct perf_qps *all = run->priv;
	struct ib_qp *qp = perf_create_qp(&run->a);

	if (IS_ERR(qp))
		return PTR_ERR(qp);
	all->qps[i] = qp;
	return perf_connect_to_none(qp, &all->way);
}

static int perf_qp_down(struct perf_run *run, u32 i)
{
	struct perf_qps *all = run->priv;

	perf_qp_drain(run, all->qps[i]);
	ib_destroy_qp(all->qps[i]);
	all->qps[i] = NULL;
	return 0;
}

static int perf_check_context(const struct perf_run *run)
{
	if (!perf_caller_polls(run))
		return 0;
	pr_err("%s: only where the core polls\n", run->args->load->name);
	return -EINVAL;
}

static int perf_qp_rate_init(struct perf_run *run)
{
	struct perf_qps *all;
	int ret = perf_check_context(run);

	if (ret)
		return ret;
	all = kvzalloc(struct_size(all, qps, run->nr_qps), GFP_KERNEL);
	if (!all)
		return -ENOMEM;
	run->priv = all;
	return perf_find_way(run->a.dev, &all->way);
}

static int perf_qp_rate_go(struct perf_run *run, u32 ops)
{
	return perf_setup_go(run, ops, perf_qp_up, perf_qp_down);
}

static void perf_qp_rate_exit(struct perf_run *run)
{
	struct perf_qps *all = run->priv;
	u32 i;

	for (i = 0; all && i < run->nr_qps; i++)
		if (all->qps[i])
			ib_destroy_qp(all->qps[i]);
	kvfree(all);
}

static void perf_qp_rate_shape(struct perf_run *run)
{
	run->nr_qps = run->args->qps;
	run->a.sends = 1;
	run->a.recvs = 1;
}

const struct perf_load perf_qp_rate = {
	.name = "qp_rate",
	.by_load = true,
	.holds = true,
	.max_size = SZ_1M,
	.shape = perf_qp_rate_shape,
	.init = perf_qp_rate_init,
	.go = perf_qp_rate_go,
	.exit = perf_qp_rate_exit,
};

/* CQs of @depth entries. */
static int perf_cq_up(struct perf_run *run, u32 i)
{
	struct ib_cq **cqs = run->priv;
	struct ib_cq *cq = perf_cq_alloc(run, run->a.dev, run->args->depth);

	if (IS_ERR(cq))
		return PTR_ERR(cq);
	cqs[i] = cq;
	return 0;
}

static int perf_cq_down(struct perf_run *run, u32 i)
{
	struct ib_cq **cqs = run->priv;

	ib_free_cq(cqs[i]);
	cqs[i] = NULL;
	return 0;
}

static int perf_cq_rate_init(struct perf_run *run)
{
	int ret = perf_check_context(run);

	if (ret)
		return ret;
	run->priv = kvcalloc(run->args->qps, sizeof(struct ib_cq *), GFP_KERNEL);
	return run->priv ? 0 : -ENOMEM;
}

static int perf_cq_rate_go(struct perf_run *run, u32 ops)
{
	return perf_setup_go(run, ops, perf_cq_up, perf_cq_down);
}

static void perf_cq_rate_exit(struct perf_run *run)
{
	struct ib_cq **cqs = run->priv;
	u32 i;

	for (i = 0; cqs && i < run->args->qps; i++)
		if (cqs[i])
			ib_free_cq(cqs[i]);
	kvfree(cqs);
}

static void perf_cq_rate_shape(struct perf_run *run)
{
	run->nr_qps = 1;
	run->a.sends = 1;
	run->a.recvs = 1;
}

const struct perf_load perf_cq_rate = {
	.name = "cq_rate",
	.by_load = true,
	.holds = true,
	.max_size = SZ_1M,
	.shape = perf_cq_rate_shape,
	.init = perf_cq_rate_init,
	.go = perf_cq_rate_go,
	.exit = perf_cq_rate_exit,
};
