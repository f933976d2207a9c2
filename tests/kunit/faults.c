// SPDX-License-Identifier: GPL-2.0
/*
 * Has each case of a suite run with one allocation that fails: the thread that runs the case has
 * the parameter nth of the module as its fail-nth. None fails where that is zero.
 *
 * A suite is run again and again by its file in debugfs, until the parameter fired shows that
 * nothing has failed. A case in which nothing has failed is left out afterwards, until
 * zero is written.
 */
#include <kunit/test.h>
#include <linux/bitmap.h>
#include <linux/module.h>
#include <linux/sched/task.h>

/* More than any suite has cases. */
#define MAX_CASES 256

/* The fixture, in Rust, looks at it, too. */
unsigned int rdma_kunit_nth;

static unsigned int fired;
module_param(fired, uint, 0444);
MODULE_PARM_DESC(fired, "in how many cases an allocation has failed, since nth was written");

static char fault[32];
module_param_string(fault, fault, sizeof(fault), 0644);
MODULE_PARM_DESC(fault, "which fault it is, for the log");

/* The suite that runs, its case, the thread of that, and the cases that are left out. */
static struct kunit_suite *suite;
static unsigned int number;
static struct task_struct *thread;
static DECLARE_BITMAP(ended, MAX_CASES);

static int begin_suite(struct kunit_suite *this)
{
	struct kunit_case *it;
	unsigned int i = 0;

	suite = this;
	kunit_suite_for_each_test_case(this, it) {
		if (i == MAX_CASES)
			return -E2BIG;
		if (test_bit(i++, ended))
			it->status = KUNIT_SKIPPED;
	}
	thread = NULL;
	return 0;
}

/* Runs in the thread of the case, before it. */
static int begin_case(struct kunit *test)
{
	struct kunit_case *it;

	number = 0;
	kunit_suite_for_each_test_case(suite, it) {
		if (it->name == test->name)
			break;
		number++;
	}
	pr_info("rdma-rs test: %s.%s, %s\n", suite->name, test->name, fault);
	thread = get_task_struct(current);
	current->fail_nth = rdma_kunit_nth;
	return 0;
}

/* Runs in another thread, when that of the case has ended. */
static void end_case(struct kunit *test)
{
	if (!thread)
		return;
	if (thread->fail_nth)
		set_bit(number, ended);
	else
		fired++;
	put_task_struct(thread);
	thread = NULL;
}

static int set_nth(const char *text, const struct kernel_param *param)
{
	int i, ret = param_set_uint(text, param);

	if (ret)
		return ret;
	fired = 0;
	if (!rdma_kunit_nth)
		bitmap_zero(ended, MAX_CASES);
	for (i = 0; i < THIS_MODULE->num_kunit_suites; i++) {
		struct kunit_suite *it = THIS_MODULE->kunit_suites[i];

		it->suite_init = rdma_kunit_nth ? begin_suite : NULL;
		it->init = rdma_kunit_nth ? begin_case : NULL;
		it->exit = rdma_kunit_nth ? end_case : NULL;
	}
	return 0;
}

static const struct kernel_param_ops nth_ops = {
	.set = set_nth,
	.get = param_get_uint,
};
module_param_cb(nth, &nth_ops, &rdma_kunit_nth, 0644);
MODULE_PARM_DESC(nth, "the fail-nth of each case: which allocation fails, counted from one");
