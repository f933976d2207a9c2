// SPDX-License-Identifier: GPL-2.0
/*
 * A peer that does what it is told, line by line: connections of rdma_cm, and requests of each kind
 * on their QPs. It knows no protocol, so whoever tells it may keep to one or break it. peer.py has
 * a method for each command.
 *
 *   peer SIZE	the size of its memory, which it sends from and receives into
 *
 * It prints "ready ADDR" first, with the address of its memory, and one line for each command: what
 * came of it, or "error REASON". Connections are numbered in the order in which they came. Memory is
 * named by offsets and lengths. Bytes are written in hexadecimal digits, and "-" stands for none.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <rdma/rdma_cma.h>

#define CONNECTIONS 512
#define WORDS 12

/* What the connection manager said of an id. */
struct event {
	struct event *next;
	enum rdma_cm_event_type type;
	int status;
	int length;
	unsigned char data[256];
};

struct connection {
	struct rdma_cm_id *id;
	struct ibv_cq *cq;
	/* A completion that was taken and not told, if any. */
	struct ibv_wc kept;
	int keeps;
	struct event *first, **last;
};

static struct rdma_event_channel *channel;
static struct connection connections[CONNECTIONS];
static int known, requested;
static struct rdma_cm_id *listener;
static struct ibv_pd *pd;
static struct ibv_mr *all, *regions[256];
static char *memory;
static size_t size;

static void say(const char *form, ...)
{
	va_list args;

	va_start(args, form);
	vprintf(form, args);
	va_end(args);
	putchar('\n');
	fflush(stdout);
}

static int failed(const char *what)
{
	say("error %s: %s", what, strerror(errno));
	return -1;
}

static uint64_t number(char **words, int at)
{
	return words[at] ? strtoull(words[at], NULL, 0) : 0;
}

/* The memory that two words name, or NULL once that was said to be wrong. */
static char *place(char **words, int at)
{
	uint64_t offset = number(words, at), length = number(words, at + 1);

	if (offset > size || length > size - offset) {
		say("error no such memory");
		return NULL;
	}
	return memory + offset;
}

static int unhex(const char *digits, unsigned char *out, int room)
{
	int i;

	if (!digits || !strcmp(digits, "-"))
		return 0;
	for (i = 0; i < room && sscanf(digits + 2 * i, "%2hhx", &out[i]) == 1; i++)
		;
	return i;
}

static void hex(const unsigned char *data, int length, char *out)
{
	strcpy(out, "-");
	for (int i = 0; i < length; i++)
		sprintf(out + 2 * i, "%02x", data[i]);
}

static struct connection *add(struct rdma_cm_id *id)
{
	struct connection *c;

	if (known == CONNECTIONS)
		return NULL;
	c = &connections[known++];
	c->id = id;
	c->last = &c->first;
	id->context = c;
	return c;
}

static struct connection *find(char **words, int at)
{
	uint64_t n = number(words, at);

	if (n < (uint64_t)known && connections[n].id)
		return &connections[n];
	say("error no such connection");
	return NULL;
}

/* Takes an event, if one comes in so many milliseconds, and keeps it for its connection. */
static int take_event(int ms)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *said;
	struct connection *c;
	struct event *e;

	if (poll(&fd, 1, ms) <= 0 || rdma_get_cm_event(channel, &said))
		return 0;
	c = said->event == RDMA_CM_EVENT_CONNECT_REQUEST ? add(said->id) : said->id->context;
	e = calloc(1, sizeof(*e));
	if (c && e) {
		e->type = said->event;
		e->status = said->status;
		if (said->param.conn.private_data) {
			e->length = said->param.conn.private_data_len;
			memcpy(e->data, said->param.conn.private_data, e->length);
		}
		*c->last = e;
		c->last = &e->next;
	}
	rdma_ack_cm_event(said);
	return 1;
}

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

/* The next event of a connection, or NULL. */
static struct event *next_event(struct connection *c, int ms)
{
	int64_t end = now() + ms, left = ms;
	struct event *e;

	while (!c->first && left >= 0) {
		take_event(left);
		left = end - now();
	}
	e = c->first;
	if (e) {
		c->first = e->next;
		if (!c->first)
			c->last = &c->first;
	}
	return e;
}

static void say_event(int n, struct event *e)
{
	char data[2 * sizeof(e->data) + 2];

	if (!e) {
		say("%d none 0 -", n);
		return;
	}
	hex(e->data, e->length, data);
	/* Without RDMA_CM_EVENT_. */
	say("%d %s %d %s", n, rdma_event_str(e->type) + 14, e->status, data);
	free(e);
}

/* What a connection needs of its device. */
static int prepare(struct connection *c, int depth)
{
	struct ibv_qp_init_attr attr = {
		.cap = {
			.max_send_wr = depth, .max_recv_wr = depth,
			.max_send_sge = 1, .max_recv_sge = 1,
		},
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};

	if (!pd) {
		pd = ibv_alloc_pd(c->id->verbs);
		if (!pd)
			return failed("PD");
		all = ibv_reg_mr(pd, memory, size, IBV_ACCESS_LOCAL_WRITE);
		if (!all)
			return failed("MR");
	}
	c->cq = ibv_create_cq(c->id->verbs, 2 * depth, NULL, NULL, 0);
	if (!c->cq)
		return failed("CQ");
	attr.send_cq = attr.recv_cq = c->cq;
	return rdma_create_qp(c->id, pd, &attr) ? failed("QP") : 0;
}

static int wait_for(struct connection *c, enum rdma_cm_event_type type)
{
	struct event *e = next_event(c, 10000);
	int right = e && e->type == type;

	if (!right)
		say("error no %s", rdma_event_str(type));
	free(e);
	return right ? 0 : -1;
}

static void set_param(struct rdma_conn_param *param, unsigned char *data, const char *digits)
{
	memset(param, 0, sizeof(*param));
	param->private_data_len = unhex(digits, data, 56);
	param->private_data = param->private_data_len ? data : NULL;
	param->responder_resources = param->initiator_depth = 16;
	param->retry_count = param->rnr_retry_count = 7;
}

/* connect ADDR PORT PRIVATE DEPTH [RNR]: with a depth of 0 it has no QP, and confirms nothing. */
static void do_connect(char **words)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(number(words, 2)) };
	struct rdma_conn_param param;
	unsigned char data[56];
	struct rdma_cm_id *id;
	struct connection *c;
	int depth = number(words, 4);

	inet_pton(AF_INET, words[1], &addr.sin_addr);
	if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP)) {
		failed("id");
		return;
	}
	c = add(id);
	if (!c) {
		say("error too many connections");
		return;
	}
	if (rdma_resolve_addr(id, NULL, (struct sockaddr *)&addr, 5000)) {
		failed("resolve");
		return;
	}
	if (wait_for(c, RDMA_CM_EVENT_ADDR_RESOLVED))
		return;
	if (rdma_resolve_route(id, 5000)) {
		failed("route");
		return;
	}
	if (wait_for(c, RDMA_CM_EVENT_ROUTE_RESOLVED) || (depth && prepare(c, depth)))
		return;
	set_param(&param, data, words[3]);
	if (words[5])
		param.rnr_retry_count = number(words, 5);
	/* A number that no other connection has. */
	if (!depth)
		param.qp_num = 0x5e0000 + (c - connections);
	if (rdma_connect(id, &param)) {
		failed("connect");
		return;
	}
	say("%d", (int)(c - connections));
}

/* accept N PRIVATE DEPTH */
static void do_accept(char **words)
{
	struct connection *c = find(words, 1);
	struct rdma_conn_param param;
	unsigned char data[56];

	if (!c || prepare(c, number(words, 3)))
		return;
	set_param(&param, data, words[2]);
	if (rdma_accept(c->id, &param))
		failed("accept");
	else
		say("accepted");
}

/* reject N PRIVATE */
static void do_reject(char **words)
{
	struct connection *c = find(words, 1);
	unsigned char data[148];
	int length = unhex(words[2], data, sizeof(data));

	if (!c)
		return;
	if (rdma_reject(c->id, length ? data : NULL, length))
		failed("reject");
	else
		say("rejected");
}

/* listen ADDR PORT */
static void do_listen(char **words)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(number(words, 2)) };

	inet_pton(AF_INET, words[1], &addr.sin_addr);
	if (rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) ||
	    rdma_bind_addr(listener, (struct sockaddr *)&addr) || rdma_listen(listener, 64))
		failed("listen");
	else
		say("listening");
}

/* request MS: the next connection that is asked for. */
static void do_request(char **words)
{
	int64_t end = now() + number(words, 1), left;

	for (; requested < known; requested++) {
		struct connection *c = &connections[requested];

		if (c->first && c->first->type == RDMA_CM_EVENT_CONNECT_REQUEST)
			break;
	}
	while (requested == known) {
		left = end - now();
		if (left < 0) {
			say("-1 none 0 -");
			return;
		}
		take_event(left);
	}
	say_event(requested, next_event(&connections[requested], 0));
	requested++;
}

/* event N MS */
static void do_event(char **words)
{
	struct connection *c = find(words, 1);

	if (c)
		say_event(c - connections, next_event(c, number(words, 2)));
}

/* reg OFFSET LENGTH ACCESS: a region, whose key it prints. ACCESS has r, w or both. */
static void do_reg(char **words)
{
	int access = IBV_ACCESS_LOCAL_WRITE;
	char *start = place(words, 1);

	if (!start)
		return;
	if (strchr(words[3], 'r'))
		access |= IBV_ACCESS_REMOTE_READ;
	if (strchr(words[3], 'w'))
		access |= IBV_ACCESS_REMOTE_WRITE;
	for (size_t i = 0; i < sizeof(regions) / sizeof(*regions); i++) {
		if (regions[i])
			continue;
		regions[i] = ibv_reg_mr(pd, start, number(words, 2), access);
		if (regions[i])
			say("%u", regions[i]->rkey);
		else
			failed("MR");
		return;
	}
	say("error too many regions");
}

/* dereg KEY */
static void do_dereg(char **words)
{
	for (size_t i = 0; i < sizeof(regions) / sizeof(*regions); i++) {
		if (!regions[i] || regions[i]->rkey != number(words, 1))
			continue;
		ibv_dereg_mr(regions[i]);
		regions[i] = NULL;
		say("deregistered");
		return;
	}
	say("error no such region");
}

static int post_receive(struct connection *c, uint64_t offset, uint64_t length)
{
	struct ibv_sge sge = { .addr = (uintptr_t)memory + offset, .length = length, .lkey = all->lkey };
	struct ibv_recv_wr wr = { .wr_id = offset, .sg_list = &sge, .num_sge = 1 }, *bad;

	errno = ibv_post_recv(c->id->qp, &wr, &bad);
	return errno ? failed("receive") : 0;
}

/* recv N OFFSET LENGTH */
static void do_recv(char **words)
{
	struct connection *c = find(words, 1);

	if (c && place(words, 2) && !post_receive(c, number(words, 2), number(words, 3)))
		say("posted");
}

/*
 * send|sendinv|sendimm N OFFSET LENGTH [KEY or DATA]
 * write|writeimm|read N OFFSET LENGTH REMOTE KEY
 */
static void do_post(char **words)
{
	static const struct {
		const char *name;
		enum ibv_wr_opcode opcode;
	} kinds[] = {
		{ "send", IBV_WR_SEND }, { "sendinv", IBV_WR_SEND_WITH_INV },
		{ "sendimm", IBV_WR_SEND_WITH_IMM }, { "write", IBV_WR_RDMA_WRITE },
		{ "writeimm", IBV_WR_RDMA_WRITE_WITH_IMM }, { "read", IBV_WR_RDMA_READ },
	};
	struct connection *c = find(words, 1);
	char *start = place(words, 2);
	struct ibv_sge sge = { .addr = (uintptr_t)start, .length = number(words, 3) };
	struct ibv_send_wr wr = { .wr_id = number(words, 2), .sg_list = &sge, .num_sge = 1 }, *bad;
	size_t i = 0;

	if (!c || !start)
		return;
	while (strcmp(words[0], kinds[i].name))
		i++;
	wr.opcode = kinds[i].opcode;
	wr.num_sge = sge.length ? 1 : 0;
	sge.lkey = all->lkey;
	if (wr.opcode == IBV_WR_SEND_WITH_INV)
		wr.invalidate_rkey = number(words, 4);
	else
		wr.imm_data = htonl(0x5eed);
	wr.wr.rdma.remote_addr = number(words, 4);
	wr.wr.rdma.rkey = number(words, 5);
	errno = ibv_post_send(c->id->qp, &wr, &bad);
	if (errno)
		failed(words[0]);
	else
		say("posted");
}

static int take_completion(struct connection *c, struct ibv_wc *wc, int ms)
{
	int64_t end = now() + ms;
	int n;

	if (c->keeps) {
		*wc = c->kept;
		c->keeps = 0;
		return 1;
	}
	while (!(n = ibv_poll_cq(c->cq, 1, wc)) && now() < end)
		usleep(200);
	return n > 0;
}

/* poll N MS: the next completion. */
static void do_poll(char **words)
{
	struct connection *c = find(words, 1);
	struct ibv_wc wc;

	if (!c)
		return;
	if (!take_completion(c, &wc, number(words, 2))) {
		say("none");
		return;
	}
	say("%d %" PRIu64 " %d %u %u", wc.opcode, wc.wr_id, wc.status, wc.byte_len,
	    wc.wc_flags & IBV_WC_WITH_INV ? wc.invalidated_rkey : 0);
}

/*
 * answer N OFFSET LENGTH COUNT ROOM BYTE FROM TO: sends that for each of so many messages, which come
 * one after the other into so much room each, and begin with that byte. An answer has two bytes of
 * its message. Says how many are left, once there is another message, an error, or none for long.
 */
static void do_answer(char **words)
{
	struct connection *c = find(words, 1);
	uint64_t offset = number(words, 2), left = number(words, 4);
	char *answer = place(words, 2), *message = NULL;
	struct ibv_sge sge = { .addr = (uintptr_t)answer, .length = number(words, 3) };
	struct ibv_send_wr wr = { .wr_id = offset, .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_wc wc;
	int sent = 1;

	if (!c || !answer)
		return;
	sge.lkey = all->lkey;
	while (left && take_completion(c, &wc, 10000)) {
		if (wc.status || (wc.opcode == IBV_WC_RECV && memory[wc.wr_id] != (char)number(words, 6))) {
			c->kept = wc;
			c->keeps = 1;
			break;
		}
		if (wc.opcode == IBV_WC_RECV)
			message = memory + wc.wr_id;
		else
			sent |= wc.wr_id == offset;
		if (!message || !sent)
			continue;
		memcpy(answer + number(words, 8), message + number(words, 7), 2);
		if (post_receive(c, message - memory, number(words, 5)))
			return;
		errno = ibv_post_send(c->id->qp, &wr, &bad);
		if (errno) {
			failed("answer");
			return;
		}
		message = NULL;
		sent = 0;
		left--;
	}
	say("%d", (int)left);
}

/* put OFFSET LENGTH BYTES; get OFFSET LENGTH; fill OFFSET LENGTH BYTE */
static void do_memory(char **words)
{
	char *start = place(words, 1), *text;
	size_t length = number(words, 2);

	if (!start)
		return;
	if (!strcmp(words[0], "put")) {
		unhex(words[3], (unsigned char *)start, length);
	} else if (!strcmp(words[0], "fill")) {
		memset(start, number(words, 3), length);
	} else {
		text = malloc(2 * length + 2);
		hex((unsigned char *)start, length, text);
		say("%s", text);
		free(text);
		return;
	}
	say("done");
}

/* check OFFSET LENGTH BYTE: how many differ, and the first of them. */
static void do_check(char **words)
{
	const char *start = place(words, 1);
	size_t length = number(words, 2), count = 0, first = 0;
	char byte = number(words, 3);

	if (!start)
		return;
	for (size_t i = length; i--;) {
		if (start[i] != byte) {
			count++;
			first = i;
		}
	}
	say("%zu %zu", count, number(words, 1) + first);
}

/* disconnect N; destroy N */
static void do_end(char **words)
{
	struct connection *c = find(words, 1);

	if (!c)
		return;
	if (!strcmp(words[0], "disconnect")) {
		if (rdma_disconnect(c->id))
			failed("disconnect");
		else
			say("disconnected");
		return;
	}
	if (c->id->qp)
		rdma_destroy_qp(c->id);
	rdma_destroy_id(c->id);
	if (c->cq)
		ibv_destroy_cq(c->cq);
	c->id = NULL;
	say("destroyed");
}

static const struct {
	const char *name;
	void (*run)(char **words);
	/* How many words it has at least. */
	int words;
} commands[] = {
	{ "connect", do_connect, 5 }, { "accept", do_accept, 4 }, { "reject", do_reject, 3 },
	{ "listen", do_listen, 3 }, { "request", do_request, 2 }, { "event", do_event, 3 },
	{ "reg", do_reg, 4 }, { "dereg", do_dereg, 2 }, { "recv", do_recv, 4 },
	{ "send", do_post, 4 }, { "sendinv", do_post, 5 }, { "sendimm", do_post, 4 },
	{ "write", do_post, 6 }, { "writeimm", do_post, 6 }, { "read", do_post, 6 },
	{ "poll", do_poll, 3 }, { "answer", do_answer, 9 },
	{ "put", do_memory, 4 }, { "get", do_memory, 3 }, { "fill", do_memory, 4 }, { "check", do_check, 4 },
	{ "disconnect", do_end, 2 }, { "destroy", do_end, 2 },
};

static void obey(char *line)
{
	char *words[WORDS + 1] = { NULL };
	int count = 0;

	for (char *w = strtok(line, " \n"); w && count < WORDS; w = strtok(NULL, " \n"))
		words[count++] = w;
	for (size_t i = 0; count && i < sizeof(commands) / sizeof(*commands); i++) {
		if (!strcmp(words[0], commands[i].name) && count >= commands[i].words) {
			commands[i].run(words);
			return;
		}
	}
	say("error no such command");
}

int main(int argc, char **argv)
{
	char *line = NULL;
	size_t room = 0;

	size = argc == 2 ? strtoull(argv[1], NULL, 0) : 0;
	memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	channel = rdma_create_event_channel();
	if (memory == MAP_FAILED || !channel)
		return failed("start") ? 1 : 0;
	say("ready %" PRIuPTR, (uintptr_t)memory);
	while (getline(&line, &room, stdin) > 0)
		obey(line);
	return 0;
}
