// SPDX-License-Identifier: GPL-2.0
/*
 * One run, from setting it up to taking it down.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/delay.h>
#include <linux/slab.h>

#include "perf.h"

/* The time for which all objects are kept to be looked at. */
#define PERF_HOLD_MS	10000

/* Ends the run for its first error. Any context. */
void perf_fail(struct perf_run *run, const char *what, int error)
{
	if (cmpxchg(&run->error, 0, error))
		return;
	pr_err("%s: %s: %d\n", run->args->load->name, what, error);
	complete(&run->finished);
}

/* A completion has failed, as what is left at the end of a run should. */
void perf_failed_wc(struct perf_run *run, const struct ib_wc *wc)
{
	if (wc->status == IB_WC_WR_FLUSH_ERR &&
	    (READ_ONCE(run->draining) || READ_ONCE(run->error)))
		return;
	atomic_inc(&run->errors);
	perf_fail(run, ib_wc_status_msg(wc->status), -EIO);
}

/* Keeps everything until 0 is written to "held", if that was asked for. */
int perf_hold(struct perf_run *run)
{
	u32 ms;

	if (!run->args->hold || !run->measuring)
		return 0;
	WRITE_ONCE(*run->held, 1);
	for (ms = 0; ms < PERF_HOLD_MS; ms++) {
		if (!READ_ONCE(*run->held))
			return 0;
		fsleep(1000);
	}
	WRITE_ONCE(*run->held, 0);
	return -ETIMEDOUT;
}

static int perf_phase(struct perf_run *run, u32 ops)
{
	u64 begin;
	int ret;

	begin = ktime_get_ns();
	ret = run->args->load->go(run, ops);
	if (!ret)
		run->result->ns = run->end - begin;
	else if (ret == -ETIME)
		pr_err("%s: stuck for %d s\n", run->args->load->name, PERF_STUCK / HZ);
	else if (!READ_ONCE(run->error))
		pr_err("%s: failed: %d\n", run->args->load->name, ret);
	return ret;
}

static int perf_phases(struct perf_run *run)
{
	int ret = run->args->warmup ? perf_phase(run, run->args->warmup) : 0;

	if (ret)
		return ret;
	memset(run->result, 0, sizeof(*run->result));
	run->measuring = true;
	ret = perf_phase(run, run->args->count);
	if (!ret && !run->args->load->by_load)
		ret = perf_hold(run);
	return ret;
}

static int perf_prepare(struct perf_run *run)
{
	const struct perf_load *load = run->args->load;
	int ret;

	load->shape(run);
	ret = perf_end_init(run, &run->a, run->a.dev);
	if (ret)
		return ret;
	if (load->pair) {
		ret = perf_end_init(run, &run->b, run->b.dev);
		if (ret)
			return ret;
	}
	ret = perf_link_init(run);
	if (ret)
		return ret;
	ret = load->init(run);
	if (ret)
		pr_err("%s: cannot be set up: %d\n", load->name, ret);
	return ret;
}

/*
 * Requests end before their QPs, these before the memory that they may access,
 * and that before its PD.
 */
static void perf_take_down(struct perf_run *run)
{
	perf_link_drain(run);
	run->args->load->exit(run);
	perf_link_exit(run);
	perf_region_exit(&run->a);
	perf_region_exit(&run->b);
	perf_end_exit(&run->a);
	perf_end_exit(&run->b);
}

static struct ib_device *perf_get(const char *name)
{
	struct ib_device *dev = perf_device_get(name);

	if (!dev)
		pr_err("%s: no such RDMA device\n", name);
	return dev;
}

static int perf_on_devices(struct perf_run *run)
{
	int ret;

	ret = perf_prepare(run);
	if (!ret)
		ret = perf_phases(run);
	perf_take_down(run);
	run->result->errors = atomic_read(&run->errors);
	return ret;
}

int perf_run(const struct perf_args *args, struct perf_result *result, u64 *samples, u32 *held)
{
	struct perf_run *run = kzalloc_obj(*run);
	int ret = -ENODEV;

	if (!run)
		return -ENOMEM;
	run->args = args;
	run->result = result;
	run->samples = samples;
	run->held = held;
	run->signal = args->signal;
	run->opcode = args->load->opcode;
	init_completion(&run->finished);

	run->a.dev = perf_get(args->device);
	if (!run->a.dev)
		goto out_free;
	run->b.dev = perf_get(args->peer);
	if (!run->b.dev)
		goto out_put;
	ret = perf_on_devices(run);
	perf_device_put(run->b.dev);
out_put:
	perf_device_put(run->a.dev);
out_free:
	kfree(run);
	return ret;
}
