// SPDX-License-Identifier: GPL-2.0
/*
 * Has each place at which memory is allocated fail once, where fail-nth has one allocation fail
 * after the other. A thread whose fail-nth is HERE fails at the first place that has not failed
 * yet. One whose fail-nth is ELSEWHERE has a thread of the kernel do so in its stead, as soon as it
 * has allocated something itself. In either case its fail-nth is zero then.
 *
 * A place is a stack, by the names of its functions, so that it is known again after modules were
 * loaded again, and in the next kernel: the log names each that fails. The parameter known takes
 * the number of one that is not to fail, and forgets all of them when it gets an empty line.
 *
 * What the checkers allocate for themselves does not count, whatever the fail-nth: they do without,
 * or no longer look at anything.
 */
#include <linux/fault-inject.h>
#include <linux/hash.h>
#include <linux/kallsyms.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/sched.h>
#include <linux/sched/task.h>
#include <linux/spinlock.h>
#include <linux/stacktrace.h>

#define HERE UINT_MAX
#define ELSEWHERE (UINT_MAX - 1)
#define DEPTH 64
#define TABLE_BITS 16
#define TEXT_LEN 400
#define MODULES_LEN 100

/* Parts of the names of the functions by which checkers allocate. */
static const char *const checkers[] = {
	"kmemleak_", "stack_depot_", "debug_object_", "debug_dma_", "4rdma5debug",
};

/* Those of allocators: their callers cannot tell which part of one has failed. */
static const char *const allocators[] = {
	"kmem_cache_alloc", "__kmalloc", "__vmalloc_node_range",
};

struct table {
	struct entry {
		u64 key;
		u64 value;
	} entries[1 << TABLE_BITS];
	unsigned int used;
};

/* The names of functions by addresses in them: hashes, whose lowest bits are these. */
#define CHECKER BIT(0)
#define SHARED BIT(1)
#define ALLOCATOR BIT(2)

/* What is known of a stack, by the hash of its addresses. */
enum { FAILS_NEVER = 1, FAILS, HAS_FAILED };

/*
 * The first two mean the same as long as no module comes or goes. The value of a place is how often
 * it has failed.
 */
static struct table names, stacks, places;
static DEFINE_RAW_SPINLOCK(lock);
static unsigned long frames[DEPTH];
static char name[KSYM_SYMBOL_LEN];
/* The last thread that was seen to have another one fail. */
static struct task_struct *principal;

static unsigned int times = 1;
module_param(times, uint, 0644);
MODULE_PARM_DESC(times, "how often each place fails");

static char shared[64];
module_param_string(shared, shared, sizeof(shared), 0644);
MODULE_PARM_DESC(shared, "part of the names of functions that are the same place whoever calls them");

/* Returns the entry of a key, which may be a new one. */
static struct entry *find(struct table *table, u64 key)
{
	unsigned int i = hash_64(key, TABLE_BITS);

	while (table->entries[i].key && table->entries[i].key != key)
		i = (i + 1) % ARRAY_SIZE(table->entries);
	if (!table->entries[i].key) {
		table->entries[i].key = key;
		/* More would have to be found in vain. */
		WARN_ON_ONCE(++table->used > ARRAY_SIZE(table->entries) / 2);
	}
	return &table->entries[i];
}

/* FNV-1a. */
static u64 hash_of(const void *data, size_t size)
{
	u64 hash = 0xcbf29ce484222325ULL;
	const u8 *byte = data;

	while (size--)
		hash = (hash ^ *byte++) * 0x100000001b3ULL;
	return hash;
}

/* Returns the hash of a function's name and the offset in it, and what it is. */
static u64 name_of(unsigned long addr)
{
	struct entry *entry = find(&names, addr);
	int i;

	if (entry->value)
		return entry->value;
	sprint_symbol(name, addr);
	entry->value = hash_of(name, strlen(name)) & ~(CHECKER | SHARED | ALLOCATOR);
	for (i = 0; i < ARRAY_SIZE(checkers); i++) {
		if (strstr(name, checkers[i]))
			entry->value |= CHECKER;
	}
	for (i = 0; i < ARRAY_SIZE(allocators); i++) {
		if (strstarts(name, allocators[i]))
			entry->value |= ALLOCATOR;
	}
	if (*shared && strstr(name, shared))
		entry->value |= SHARED;
	return entry->value;
}

/*
 * Returns the place of a stack, or zero if it is a checker's. What has called the outermost
 * function that is shared does not tell places apart.
 */
static u64 place_of(int count)
{
	u64 hashes[2] = { 0, 0 }, place = 0;
	int i;

	for (i = 0; i < count; i++) {
		hashes[1] = name_of(frames[i]);
		if (hashes[1] & CHECKER)
			return 0;
		/* By its caller, not by where it is in it. */
		if (hashes[1] & ALLOCATOR)
			memset(hashes, 0, sizeof(hashes));
		hashes[0] = hash_of(hashes, sizeof(hashes));
		if (hashes[1] & SHARED)
			place = hashes[0];
	}
	return place ?: hashes[0];
}

/* Writes the names of the innermost functions, and of the modules that any of them is in. */
static void describe(int count, char *text)
{
	const char *module;
	int i, first = 0;
	size_t len = 0;

	for (i = 0; i < count; i++) {
		sprint_symbol_no_offset(name, frames[i]);
		if (strstarts(name, "should_fail")) {
			len = 0;
			first = i + 1;
			continue;
		}
		len += scnprintf(text + len, TEXT_LEN - len, "%s%s", len ? " < " : "", name);
		if (len == TEXT_LEN - 1)
			break;
	}
	text += len;
	len = scnprintf(text, MODULES_LEN, ", of");
	for (i = first; i < count; i++) {
		sprint_symbol_no_offset(name, frames[i]);
		module = strchr(name, '[');
		if (module && !strstr(text, module))
			len += scnprintf(text + len, MODULES_LEN - len, " %s", module);
	}
}

/*
 * Returns whether an allocation may fail. If each place is to fail, one at a place that has not yet
 * is to fail now: then *failing is the place.
 */
static bool may_fail_here(bool each, u64 *failing, char *text)
{
	int count = stack_trace_save(frames, DEPTH, 0);
	struct entry *stack = find(&stacks, hash_of(frames, count * sizeof(*frames))), *it;
	u64 place;

	if (stack->value == FAILS_NEVER || (each && stack->value == HAS_FAILED))
		return false;
	if (stack->value && !each)
		return true;
	place = place_of(count);
	stack->value = place ? FAILS : FAILS_NEVER;
	if (!place || !each)
		return place;
	it = find(&places, place);
	if (it->value >= times) {
		stack->value = HAS_FAILED;
		return false;
	}
	it->value++;
	*failing = place;
	describe(count, text);
	return true;
}

/* Has others fail for this thread from now on. */
static void take_principal(void)
{
	struct task_struct *before;
	unsigned long flags;

	raw_spin_lock_irqsave(&lock, flags);
	before = principal;
	principal = get_task_struct(current);
	raw_spin_unlock_irqrestore(&lock, flags);
	if (before)
		put_task_struct(before);
}

/* Whether the thread runs, is to fail, and what does so is another one; with the lock held. */
static bool is_for_principal(void)
{
	return principal && READ_ONCE(principal->fail_nth) == ELSEWHERE &&
	       !(principal->flags & PF_EXITING);
}

static bool may_fail(struct fault_attr *attr)
{
	bool here = current->fail_nth == HERE, elsewhere, may = true;
	char text[TEXT_LEN + MODULES_LEN];
	unsigned long flags;
	u64 failing = 0;

	if (current->fail_nth == ELSEWHERE) {
		if (READ_ONCE(principal) != current)
			take_principal();
		return false;
	}
	/* User mode Linux panics when a page of a program that is being loaded cannot be had. */
	if (!current->fail_nth && !(READ_ONCE(principal) && current->flags & PF_KTHREAD))
		return !current->in_execve;
	raw_spin_lock_irqsave(&lock, flags);
	elsewhere = !current->fail_nth && is_for_principal();
	if (current->fail_nth || elsewhere)
		may = may_fail_here(here || elsewhere, &failing, text);
	if (failing) {
		current->fail_nth = 1;
		if (elsewhere)
			principal->fail_nth = 0;
	}
	raw_spin_unlock_irqrestore(&lock, flags);
	if (failing)
		pr_info("rdma-rs fault: place %016llx: %s\n", failing, text);
	return may;
}

static void clear(struct table *table)
{
	memset(table, 0, sizeof(*table));
}

/* Another module may come to the addresses of one that has gone. */
static int module_notify(struct notifier_block *block, unsigned long state, void *module)
{
	unsigned long flags;

	if (state == MODULE_STATE_COMING || state == MODULE_STATE_GOING) {
		raw_spin_lock_irqsave(&lock, flags);
		clear(&names);
		clear(&stacks);
		raw_spin_unlock_irqrestore(&lock, flags);
	}
	return NOTIFY_OK;
}

static struct notifier_block module_block = { .notifier_call = module_notify };

static int set_known(const char *value, const struct kernel_param *param)
{
	unsigned long flags;
	u64 place = 0;
	int ret = 0;

	if (*value && *value != '\n')
		ret = kstrtou64(value, 16, &place);
	if (ret)
		return ret;
	raw_spin_lock_irqsave(&lock, flags);
	clear(&names);
	clear(&stacks);
	if (place)
		find(&places, place)->value++;
	else
		clear(&places);
	raw_spin_unlock_irqrestore(&lock, flags);
	return 0;
}

static const struct kernel_param_ops known_ops = { .set = set_known };
module_param_cb(known, &known_ops, NULL, 0200);
MODULE_PARM_DESC(known, "the number of a place that is not to fail");

/* It stays: the kernel does not wait for those who are in it. */
static int __init places_init(void)
{
	int ret = register_module_notifier(&module_block);

	if (!ret)
		WRITE_ONCE(fault_filter, may_fail);
	return ret;
}
module_init(places_init);

MODULE_DESCRIPTION("Has each place at which memory is allocated fail once");
MODULE_LICENSE("GPL");
