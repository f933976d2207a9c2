// SPDX-License-Identifier: GPL-2.0
/*
 * The control files in debugfs: "run", "result" and "samples".
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/debugfs.h>
#include <linux/init.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "perf.h"

#define PERF_MAX_TEXT	1024

/* Held for as long as a run takes. */
static DEFINE_MUTEX(perf_lock);
static struct perf_args perf_args;
static struct perf_result perf_result;
static bool perf_has_run;
static u64 *perf_samples;
static u32 perf_nr_samples;
static struct dentry *perf_dir;

static int perf_run_text(char *text)
{
	int ret;

	ret = perf_args_parse(&perf_args, text);
	if (ret)
		return ret;
	memset(&perf_result, 0, sizeof(perf_result));
	perf_has_run = true;
	if (perf_args.load->samples)
		perf_nr_samples = 0;
	ret = perf_run(&perf_args, &perf_result, perf_samples);
	if (!ret && perf_args.load->samples)
		perf_nr_samples = min(perf_args.count, PERF_SAMPLES);
	return ret;
}

static ssize_t perf_run_write(struct file *file, const char __user *buf, size_t len, loff_t *pos)
{
	char *text;
	int ret;

	if (len > PERF_MAX_TEXT) {
		pr_err("more than %d bytes\n", PERF_MAX_TEXT);
		return -EINVAL;
	}
	text = memdup_user_nul(buf, len);
	if (IS_ERR(text))
		return PTR_ERR(text);
	if (mutex_trylock(&perf_lock)) {
		ret = perf_run_text(text);
		mutex_unlock(&perf_lock);
	} else {
		ret = -EBUSY;
	}
	kfree(text);
	return ret ?: len;
}

static const struct file_operations perf_run_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = perf_run_write,
};

static int perf_result_show(struct seq_file *s, void *unused)
{
	const struct perf_result *result = &perf_result;
	int ret;

	ret = mutex_lock_interruptible(&perf_lock);
	if (ret)
		return ret;
	if (perf_has_run) {
		seq_printf(s, "ops %llu\n", result->ops);
		seq_printf(s, "ns %llu\n", result->ns);
		seq_printf(s, "post_ns %llu\n", result->post_ns);
		seq_printf(s, "poll_ns %llu\n", result->poll_ns);
		seq_printf(s, "posts %llu\n", result->posts);
		seq_printf(s, "completions %llu\n", result->completions);
		seq_printf(s, "errors %llu\n", result->errors);
	}
	mutex_unlock(&perf_lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(perf_result);

static void *perf_samples_at(loff_t pos)
{
	return pos < perf_nr_samples ? &perf_samples[pos] : NULL;
}

static void *perf_samples_start(struct seq_file *s, loff_t *pos)
{
	mutex_lock(&perf_lock);
	return perf_samples_at(*pos);
}

static void *perf_samples_next(struct seq_file *s, void *sample, loff_t *pos)
{
	++*pos;
	return perf_samples_at(*pos);
}

static void perf_samples_stop(struct seq_file *s, void *sample)
{
	mutex_unlock(&perf_lock);
}

static int perf_samples_show(struct seq_file *s, void *sample)
{
	seq_printf(s, "%llu\n", *(u64 *)sample);
	return 0;
}

static const struct seq_operations perf_samples_sops = {
	.start = perf_samples_start,
	.next = perf_samples_next,
	.stop = perf_samples_stop,
	.show = perf_samples_show,
};
DEFINE_SEQ_ATTRIBUTE(perf_samples);

static int __init perf_init(void)
{
	int ret;

	perf_samples = kvcalloc(PERF_SAMPLES, sizeof(*perf_samples), GFP_KERNEL);
	if (!perf_samples)
		return -ENOMEM;
	ret = perf_devices_init();
	if (ret) {
		kvfree(perf_samples);
		return ret;
	}
	perf_dir = debugfs_create_dir(PERF_NAME, NULL);
	debugfs_create_file("run", 0600, perf_dir, NULL, &perf_run_fops);
	debugfs_create_file("result", 0400, perf_dir, NULL, &perf_result_fops);
	debugfs_create_file("samples", 0400, perf_dir, NULL, &perf_samples_fops);
	return 0;
}

static void __exit perf_exit(void)
{
	debugfs_remove(perf_dir);
	perf_devices_exit();
	kvfree(perf_samples);
}

module_init(perf_init);
module_exit(perf_exit);
MODULE_DESCRIPTION("What an RDMA ULP in C costs");
MODULE_LICENSE("GPL");
