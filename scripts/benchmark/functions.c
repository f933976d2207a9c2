// SPDX-License-Identifier: GPL-2.0

/*
 * A plugin of QEMU: counts how often each instruction is executed, of the kernel's and all others.
 *
 * The guest marks where a count ends and the next one begins by a call of MARK
 * (tests/guest/marks.py). Each goes to a file FOLDER/counts-N, a line an instruction: its
 * address, and the number.
 *
 * Debian has no package with qemu-plugin.h, so what is used of it is declared here.
 */

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct qemu_plugin_tb;
struct qemu_plugin_insn;

void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id,
					   void (*cb)(uint64_t id, struct qemu_plugin_tb *tb));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb,
					  void (*cb)(unsigned int vcpu, void *data),
					  int flags, void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t idx);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *insn, void *dest, size_t len);

int qemu_plugin_version = 4;

/* mov $0x616d6472, %eax */
static const unsigned char MARK[] = { 0xb8, 'r', 'd', 'm', 'a' };

/* A block of instructions that are executed one after the other. */
struct block {
	struct block *next;
	uint64_t executed;
	size_t len;
	uint64_t insns[];
};

static struct block *blocks;
static const char *folder;

static void executed(unsigned int vcpu, void *data)
{
	struct block *block = data;

	block->executed++;
}

static void mark(unsigned int vcpu, void *data)
{
	static unsigned int number;
	char name[4096];
	FILE *file;

	snprintf(name, sizeof(name), "%s/counts-%u", folder, number++);
	file = fopen(name, "w");
	if (!file) {
		perror(name);
		exit(1);
	}
	for (struct block *block = blocks; block; block = block->next) {
		for (size_t i = 0; block->executed && i < block->len; i++)
			fprintf(file, "%" PRIx64 " %" PRIu64 "\n", block->insns[i], block->executed);
		block->executed = 0;
	}
	if (fclose(file)) {
		perror(name);
		exit(1);
	}
}

static void translated(uint64_t id, struct qemu_plugin_tb *tb)
{
	size_t len = qemu_plugin_tb_n_insns(tb);
	struct block *block = calloc(1, sizeof(*block) + len * sizeof(block->insns[0]));
	unsigned char first[sizeof(MARK)] = { };

	if (!block)
		abort();
	block->len = len;
	for (size_t i = 0; i < len; i++)
		block->insns[i] = qemu_plugin_insn_vaddr(qemu_plugin_tb_get_insn(tb, i));
	block->next = blocks;
	blocks = block;
	qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, 0, block);
	qemu_plugin_insn_data(qemu_plugin_tb_get_insn(tb, 0), first, sizeof(first));
	if (!memcmp(first, MARK, sizeof(MARK)))
		qemu_plugin_register_vcpu_tb_exec_cb(tb, mark, 0, NULL);
}

int qemu_plugin_install(uint64_t id, const void *info, int argc, char **argv)
{
	if (argc != 1 || strncmp(argv[0], "folder=", strlen("folder="))) {
		fprintf(stderr, "functions.so: folder=FOLDER, please\n");
		return 1;
	}
	folder = strdup(argv[0] + strlen("folder="));
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
