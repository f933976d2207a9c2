// SPDX-License-Identifier: GPL-2.0
/*
 * Faults, to see that the debug kernels find them: loading this with fault= one of them plants it.
 */

#include <linux/delay.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "race.h"

static char *fault;
module_param(fault, charp, 0);

static DEFINE_SPINLOCK(spin);
static DEFINE_MUTEX(first);
static DEFINE_MUTEX(second);

static noinline void planted_use_after_free(void)
{
	char *memory = kmalloc(64, GFP_KERNEL);

	kfree(memory);
	OPTIMIZER_HIDE_VAR(memory);
	if (memory)
		memory[8] = 1;
}

static noinline void planted_leak(void)
{
	int i;

	/* The last addresses may be left in registers or on a stack. */
	for (i = 0; i < 16; i++) {
		void *memory = kmalloc(200, GFP_KERNEL);

		OPTIMIZER_HIDE_VAR(memory);
	}
}

static noinline void planted_sleep_in_atomic(void)
{
	spin_lock(&spin);
	msleep(20);
	spin_unlock(&spin);
}

static noinline void planted_lock_order(void)
{
	mutex_lock(&first);
	mutex_lock(&second);
	mutex_unlock(&second);
	mutex_unlock(&first);

	mutex_lock(&second);
	mutex_lock(&first);
	mutex_unlock(&first);
	mutex_unlock(&second);
}

static noinline void planted_race(struct work_struct *work)
{
	static unsigned long sum;
	int i;

	for (i = 0; i < 1000000; i++) {
		sum++;
		barrier();
	}
}

static void run_twice(work_func_t run)
{
	struct work_struct works[2];
	int i;

	for (i = 0; i < 2; i++) {
		INIT_WORK_ONSTACK(&works[i], run);
		queue_work(system_dfl_wq, &works[i]);
	}
	for (i = 0; i < 2; i++) {
		flush_work(&works[i]);
		destroy_work_on_stack(&works[i]);
	}
}

static int __init planted_init(void)
{
	if (!fault)
		return -EINVAL;
	if (!strcmp(fault, "use_after_free"))
		planted_use_after_free();
	else if (!strcmp(fault, "leak"))
		planted_leak();
	else if (!strcmp(fault, "sleep_in_atomic"))
		planted_sleep_in_atomic();
	else if (!strcmp(fault, "lock_order"))
		planted_lock_order();
	else if (!strcmp(fault, "race"))
		run_twice(planted_race);
	else if (!strcmp(fault, "rust_race"))
		run_twice(planted_rust_race);
	else if (!strcmp(fault, "rust_order"))
		run_twice(planted_rust_order);
	else if (!strcmp(fault, "rust_lock"))
		run_twice(planted_rust_lock);
	else
		return -EINVAL;
	return 0;
}
module_init(planted_init);

static void __exit planted_exit(void)
{
}
module_exit(planted_exit);

MODULE_DESCRIPTION("Faults that debug kernels find");
MODULE_LICENSE("GPL");
