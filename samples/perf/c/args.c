// SPDX-License-Identifier: GPL-2.0
/*
 * The arguments that are written to the file "run": words of the form key=value.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/array_size.h>
#include <linux/bits.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/inet.h>
#include <linux/kernel.h>
#include <linux/net.h>
#include <linux/string.h>
#include <linux/string_helpers.h>

#include "perf.h"

static const struct perf_load *const perf_loads[] = {
	&perf_send_lat, &perf_write_lat, &perf_read_lat,
	&perf_send_rate, &perf_write_rate, &perf_read_rate,
	&perf_void_rate, &perf_bare_rate, &perf_queue_rate, &perf_pool_rate, &perf_reg_rate,
	&perf_call_rate, &perf_tag_rate, &perf_rw_read_rate, &perf_rw_write_rate,
	&perf_connect_rate, &perf_qp_rate, &perf_cq_rate,
};

static const char *const perf_contexts[] = {
	[PERF_DIRECT]			= "direct",
	[PERF_STATIC]			= "static",
	[PERF_BATCH]			= "batch",
	[PERF_SOFTIRQ]			= "softirq",
	[PERF_WORKQUEUE]		= "workqueue",
	[PERF_UNBOUND_WORKQUEUE]	= "unbound_workqueue",
};

static int perf_parse_load(struct perf_args *args, const char *value)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(perf_loads); i++) {
		if (!strcmp(perf_loads[i]->name, value)) {
			args->load = perf_loads[i];
			return 0;
		}
	}
	return -EINVAL;
}

static int perf_parse_context(struct perf_args *args, const char *value)
{
	int i = match_string(perf_contexts, ARRAY_SIZE(perf_contexts), value);

	if (i < 0)
		return i;
	args->context = i;
	return 0;
}

static int perf_parse_name(char *name, const char *value)
{
	if (!*value)
		return -EINVAL;
	return strscpy(name, value, IB_DEVICE_NAME_MAX) < 0 ? -EINVAL : 0;
}

static int perf_parse_device(struct perf_args *args, const char *value)
{
	return perf_parse_name(args->device, value);
}

static int perf_parse_peer(struct perf_args *args, const char *value)
{
	return perf_parse_name(args->peer, value);
}

static int perf_parse_addr(struct perf_args *args, const char *value)
{
	return inet_pton_with_scope(&init_net, AF_UNSPEC, value, NULL, &args->addr);
}

static const struct perf_key {
	const char *name;
	int (*parse)(struct perf_args *args, const char *value);
	/* Or a number. */
	size_t offset;
	u32 min;
	u32 max;
} perf_keys[] = {
	{ "load", perf_parse_load },
	{ "device", perf_parse_device },
	{ "peer", perf_parse_peer },
	{ "context", perf_parse_context },
	{ "addr", perf_parse_addr },
	{ "size", NULL, offsetof(struct perf_args, size), 1, SZ_1M },
	{ "depth", NULL, offsetof(struct perf_args, depth), 1, 1024 },
	{ "signal", NULL, offsetof(struct perf_args, signal), 1, 1024 },
	{ "qps", NULL, offsetof(struct perf_args, qps), 1, 16384 },
	{ "count", NULL, offsetof(struct perf_args, count), 1, U32_MAX },
	{ "warmup", NULL, offsetof(struct perf_args, warmup), 0, U32_MAX },
	{ "timeout", NULL, offsetof(struct perf_args, timeout), 1, 31 },
	{ "port", NULL, offsetof(struct perf_args, port), 1, U16_MAX },
	{ "hold", NULL, offsetof(struct perf_args, hold), 0, 1 },
};

static int perf_parse_value(struct perf_args *args, const struct perf_key *key, const char *value)
{
	u32 *number = (void *)args + key->offset;
	int ret;

	if (key->parse)
		return key->parse(args, value);
	ret = kstrtou32(value, 10, number);
	if (!ret && (*number < key->min || *number > key->max))
		ret = -ERANGE;
	return ret;
}

static int perf_parse_word(struct perf_args *args, char *word, unsigned long *seen)
{
	char *value = strchr(word, '=');
	int i;

	if (!value) {
		pr_err("\"%s\": not of the form key=value\n", word);
		return -EINVAL;
	}
	*value++ = '\0';
	for (i = 0; i < ARRAY_SIZE(perf_keys); i++)
		if (!strcmp(perf_keys[i].name, word))
			break;
	if (i == ARRAY_SIZE(perf_keys)) {
		pr_err("%s: no such key\n", word);
		return -EINVAL;
	}
	if (*seen & BIT(i)) {
		pr_err("%s: given twice\n", word);
		return -EINVAL;
	}
	*seen |= BIT(i);
	if (perf_parse_value(args, &perf_keys[i], value)) {
		pr_err("%s=%s: no such value, or out of range\n", word, value);
		return -EINVAL;
	}
	return 0;
}

static void perf_set_port(struct perf_args *args)
{
	if (args->addr.ss_family == AF_INET6)
		((struct sockaddr_in6 *)&args->addr)->sin6_port = htons(args->port);
	else
		((struct sockaddr_in *)&args->addr)->sin_port = htons(args->port);
}

/* Parses @text, which is changed. Messages say what is wrong. */
int perf_args_parse(struct perf_args *args, char *text)
{
	unsigned long seen = 0;
	char *word;
	int ret;

	*args = (struct perf_args) {
		.load = &perf_send_lat,
		.context = PERF_SOFTIRQ,
		.device = "rxe0",
		.size = 64,
		.depth = 16,
		.signal = 1,
		.qps = 1,
		.count = 1000,
		.warmup = 100,
		.timeout = PERF_TIMEOUT,
		.port = 7471,
	};
	perf_parse_addr(args, "127.0.0.1");

	while ((word = strsep(&text, " \t\n"))) {
		if (!*word)
			continue;
		ret = perf_parse_word(args, word, &seen);
		if (ret)
			return ret;
	}
	if (!*args->peer)
		strscpy(args->peer, args->device);
	perf_set_port(args);
	if (args->signal > args->depth) {
		pr_err("signal=%u: more than depth=%u\n", args->signal, args->depth);
		return -EINVAL;
	}
	if (args->hold && !args->load->holds) {
		pr_err("hold=1: not possible for %s\n", args->load->name);
		return -EINVAL;
	}
	if (args->size > args->load->max_size) {
		pr_err("size=%u: %s takes at most %u\n", args->size, args->load->name,
		       args->load->max_size);
		return -EINVAL;
	}
	return 0;
}
