// SPDX-License-Identifier: GPL-2.0
/*
 * The control files in debugfs: "run", "result", "samples" and "held", and again
 * in the folder "second", for a run at the same time.
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

/* The state of the files, for one run at a time. */
struct perf_control {
	struct mutex lock;		/* held for as long as a run takes */
	struct perf_args args;
	struct perf_result result;
	bool has_run;
	u64 *samples;
	u32 nr_samples;
	u32 held;
};

static struct perf_control perf_controls[2];
static struct dentry *perf_dir;

static int perf_run_text(struct perf_control *control, char *text)
{
	int ret;

	ret = perf_args_parse(&control->args, text);
	if (ret)
		return ret;
	memset(&control->result, 0, sizeof(control->result));
	control->has_run = true;
	if (control->args.load->samples)
		control->nr_samples = 0;
	ret = perf_run(&control->args, &control->result, control->samples, &control->held);
	if (!ret && control->args.load->samples)
		control->nr_samples = min(control->args.count, PERF_SAMPLES);
	return ret;
}

static ssize_t perf_run_write(struct file *file, const char __user *buf, size_t len, loff_t *pos)
{
	struct perf_control *control = file->private_data;
	char *text;
	int ret;

	if (len > PERF_MAX_TEXT) {
		pr_err("more than %d bytes\n", PERF_MAX_TEXT);
		return -EINVAL;
	}
	text = memdup_user_nul(buf, len);
	if (IS_ERR(text))
		return PTR_ERR(text);
	if (mutex_trylock(&control->lock)) {
		ret = perf_run_text(control, text);
		mutex_unlock(&control->lock);
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
	struct perf_control *control = s->private;
	const struct perf_result *result = &control->result;
	int ret;

	ret = mutex_lock_interruptible(&control->lock);
	if (ret)
		return ret;
	if (control->has_run) {
		seq_printf(s, "ops %llu\n", result->ops);
		seq_printf(s, "ns %llu\n", result->ns);
		seq_printf(s, "post_ns %llu\n", result->post_ns);
		seq_printf(s, "poll_ns %llu\n", result->poll_ns);
		seq_printf(s, "posts %llu\n", result->posts);
		seq_printf(s, "setup_ns %llu\n", result->setup_ns);
		seq_printf(s, "teardown_ns %llu\n", result->teardown_ns);
		seq_printf(s, "completions %llu\n", result->completions);
		seq_printf(s, "errors %llu\n", result->errors);
	}
	mutex_unlock(&control->lock);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(perf_result);

static struct perf_control *perf_control_of(struct seq_file *s)
{
	return file_inode(s->file)->i_private;
}

static void *perf_samples_at(const struct perf_control *control, loff_t pos)
{
	return pos < control->nr_samples ? &control->samples[pos] : NULL;
}

static void *perf_samples_start(struct seq_file *s, loff_t *pos)
{
	struct perf_control *control = perf_control_of(s);

	mutex_lock(&control->lock);
	return perf_samples_at(control, *pos);
}

static void *perf_samples_next(struct seq_file *s, void *sample, loff_t *pos)
{
	++*pos;
	return perf_samples_at(perf_control_of(s), *pos);
}

static void perf_samples_stop(struct seq_file *s, void *sample)
{
	mutex_unlock(&perf_control_of(s)->lock);
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

static int perf_control_init(struct perf_control *control)
{
	mutex_init(&control->lock);
	control->samples = kvcalloc(PERF_SAMPLES, sizeof(*control->samples), GFP_KERNEL);
	return control->samples ? 0 : -ENOMEM;
}

static void perf_create_files(struct perf_control *control, struct dentry *dir)
{
	debugfs_create_file("run", 0600, dir, control, &perf_run_fops);
	debugfs_create_file("result", 0400, dir, control, &perf_result_fops);
	debugfs_create_file("samples", 0400, dir, control, &perf_samples_fops);
	debugfs_create_u32("held", 0600, dir, &control->held);
}

static void perf_free_samples(void)
{
	kvfree(perf_controls[0].samples);
	kvfree(perf_controls[1].samples);
}

static int __init perf_init(void)
{
	int ret;

	ret = perf_control_init(&perf_controls[0]);
	if (!ret)
		ret = perf_control_init(&perf_controls[1]);
	if (!ret)
		ret = perf_devices_init();
	if (ret) {
		perf_free_samples();
		return ret;
	}
	perf_dir = debugfs_create_dir(PERF_NAME, NULL);
	perf_create_files(&perf_controls[0], perf_dir);
	perf_create_files(&perf_controls[1], debugfs_create_dir("second", perf_dir));
	return 0;
}

static void __exit perf_exit(void)
{
	debugfs_remove(perf_dir);
	perf_devices_exit();
	perf_free_samples();
}

module_init(perf_init);
module_exit(perf_exit);
MODULE_DESCRIPTION("What an RDMA ULP in C costs");
MODULE_LICENSE("GPL");
