// SPDX-License-Identifier: GPL-2.0
/*
 * A target of samples/kv that does not keep to the protocol, or does.
 *
 *   kv_target ADDR PORT HOW
 *
 * Serves one connection to its end, and replies to a request in the manner HOW. Exits with 0 when the
 * peer has ended the connection.
 */
#include <endian.h>
#include <err.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <rdma/rdma_verbs.h>

#define DEPTH 32
#define INLINE 512
#define MAX_VALUE (128 * 1024)
#define KEYS 256

struct request {
	uint32_t id;
	uint16_t op;
	uint16_t lent;
	uint64_t key;
	uint32_t len;
	uint32_t rkey;
	uint64_t addr;
	char value[INLINE];
};

struct reply {
	uint32_t id;
	uint16_t status;
	uint16_t credits;
	uint32_t len;
	char value[INLINE];
};

enum { HEADER = 12, GET = 1, PUT = 2 };

static struct value {
	uint64_t key;
	uint32_t len;
	char bytes[MAX_VALUE];
} values[KEYS];

static struct request requests[DEPTH];
static struct reply reply;
static struct ibv_mr *request_mr, *reply_mr, *value_mr;
static struct rdma_cm_id *id;
static const char *how;

static int is(const char *name)
{
	return !strcmp(how, name);
}

static void check(int rc, const char *what)
{
	if (rc)
		err(1, "%s", what);
}

/* Returns whether it has completed: if not, the peer has ended the connection. */
static int sent(void)
{
	struct ibv_wc wc;

	return rdma_get_send_comp(id, &wc) > 0 && wc.status == IBV_WC_SUCCESS;
}

static int receive(struct request **request)
{
	struct ibv_wc wc;

	if (rdma_get_recv_comp(id, &wc) <= 0 || wc.status != IBV_WC_SUCCESS)
		return 0;
	*request = (void *)(uintptr_t)wc.wr_id;
	return 1;
}

static void post_recv(struct request *request)
{
	check(rdma_post_recv(id, request, request, sizeof(*request), request_mr), "post receive");
}

static int send_reply(size_t len, uint32_t rkey)
{
	struct ibv_sge sge = { .addr = (uintptr_t)&reply, .length = len, .lkey = reply_mr->lkey };
	struct ibv_send_wr *bad, wr = {
		.sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
		.opcode = rkey ? IBV_WR_SEND_WITH_INV : IBV_WR_SEND,
		.invalidate_rkey = rkey,
	};

	check(ibv_post_send(id->qp, &wr, &bad), "post send");
	return sent();
}

static struct value *find(uint64_t key)
{
	struct value *free = NULL;

	for (int i = 0; i < KEYS; i++) {
		if (values[i].len && values[i].key == key)
			return &values[i];
		if (!values[i].len)
			free = &values[i];
	}
	if (!free)
		errx(1, "too many keys");
	free->key = key;
	return free;
}

/* Transfers a value; returns 0 if the connection is over. */
static int transfer(struct request *request, struct value *value, uint32_t len)
{
	uint64_t addr = be64toh(request->addr);
	uint32_t rkey = be32toh(request->rkey);

	if (be16toh(request->op) == PUT)
		check(rdma_post_read(id, NULL, value->bytes, len, value_mr, IBV_SEND_SIGNALED, addr, rkey),
		      "post read");
	else
		check(rdma_post_write(id, NULL, value->bytes, len, value_mr, IBV_SEND_SIGNALED, addr, rkey),
		      "post write");
	return sent();
}

/* Serves a request; returns 0 if the connection is over. */
static int serve(struct request *request)
{
	struct value *value = find(request->key);
	uint32_t id_then = request->id, rkey = 0, len = be32toh(request->len);
	int put = be16toh(request->op) == PUT, lent = request->lent;
	struct request copy = *request;
	static int done;
	size_t bytes = HEADER;

	if (lent) {
		rkey = be32toh(request->rkey);
		if (!transfer(request, value, put ? len : value->len))
			return 0;
	} else if (put) {
		memcpy(value->bytes, request->value, len);
	}
	if (put)
		value->len = len;
	post_recv(request);
	memset(&reply, 0, HEADER);
	reply.id = id_then;
	reply.credits = htobe16(1);
	reply.len = htobe32(put ? 0 : value->len);
	if (!put && !lent) {
		memcpy(reply.value, value->bytes, value->len);
		bytes += value->len;
	}
	/* The peer has to invalidate its keys itself. */
	if (is("keep"))
		rkey = 0;
	if (done || (is("late") && !lent))
		return send_reply(bytes, rkey);

	done = 1;
	if (is("range"))
		reply.id = htobe32((be32toh(reply.id) & 0xffff0000) | 40000);
	else if (is("idle"))
		reply.id = htobe32(be32toh(reply.id) + 7);
	else if (is("generation"))
		reply.id = htobe32(be32toh(reply.id) + 0x10000);
	else if (is("credits"))
		reply.credits = 0xffff;
	else if (is("status"))
		reply.status = htobe16(99);
	else if (is("length"))
		reply.len = htobe32(be32toh(reply.len) + 2), bytes++;
	else if (is("short"))
		bytes = 5;
	if (!send_reply(bytes, rkey))
		return 0;
	if (is("twice"))
		return send_reply(bytes, 0);
	/* After the end of the registration. */
	if (is("late"))
		return transfer(&copy, value, len);
	return 1;
}

/* Flushes the queues when the peer disconnects. */
static void *watch(void *unused)
{
	/* A DREQ may overtake the RTU: it is the disconnection then that rdma_accept() has waited for. */
	int over = id->event->event == RDMA_CM_EVENT_DISCONNECTED;
	struct rdma_cm_event *event;

	while (!over && !rdma_get_cm_event(id->channel, &event)) {
		over = event->event == RDMA_CM_EVENT_DISCONNECTED;
		rdma_ack_cm_event(event);
	}
	rdma_disconnect(id);
	return unused;
}

int main(int argc, char **argv)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res;
	struct ibv_qp_init_attr attr = {
		.cap = {
			.max_send_wr = 8, .max_recv_wr = DEPTH + 1,
			.max_send_sge = 1, .max_recv_sge = 1,
		},
	};
	uint64_t hello = htobe64(0x6b760001ull << 32 | DEPTH);
	struct rdma_conn_param param = {
		.responder_resources = 1, .initiator_depth = 1, .retry_count = 3, .rnr_retry_count = 7,
		.private_data = &hello, .private_data_len = sizeof(hello),
	};
	struct rdma_cm_id *listener;
	struct request *request;
	pthread_t watcher;

	if (argc != 4)
		errx(1, "usage: kv_target ADDR PORT HOW");
	how = argv[3];
	/* A bound for everything below. */
	alarm(60);
	check(rdma_getaddrinfo(argv[1], argv[2], &hints, &res), "address");
	check(rdma_create_ep(&listener, res, NULL, &attr), "create endpoint");
	check(rdma_listen(listener, 4), "listen");
	check(rdma_get_request(listener, &id), "connect request");
	request_mr = rdma_reg_msgs(id, requests, sizeof(requests));
	reply_mr = rdma_reg_msgs(id, &reply, sizeof(reply));
	value_mr = rdma_reg_msgs(id, values, sizeof(values));
	if (!request_mr || !reply_mr || !value_mr)
		err(1, "register memory");
	for (int i = 0; i < DEPTH; i++)
		post_recv(&requests[i]);
	if (is("stingy"))
		hello = htobe64(0x6b760001ull << 32);
	check(rdma_accept(id, &param), "accept");
	check(pthread_create(&watcher, NULL, watch, NULL), "watch");
	while (receive(&request) && serve(request))
		;
	return 0;
}
