// SPDX-License-Identifier: GPL-2.0
/*
 * An rping peer that misbehaves.
 *
 *   hostile client|server ADDR PORT HOW
 *   hostile requests ADDR PORT COUNT	asks for that many connections, each of which has to be refused
 *
 * The protocol is that of rdma-core's librdmacm/examples/rping.c: the client advertises a buffer,
 * the server reads it and says go ahead; the client advertises a second one, the server writes it
 * and says go ahead. Exits with 0 once the misdeed is done, with 1 if it could not be.
 */
#include <endian.h>
#include <err.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <rdma/rdma_verbs.h>

#define SIZE 65536

struct adv {
	uint64_t addr;
	uint32_t rkey;
	uint32_t size;
};

static struct rdma_cm_id *id;
static struct ibv_mr *msg_mr, *data_mr;
static struct adv msg[8];
static char data[SIZE];
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

/* The data of the first ping, as rping makes them. */
static void fill(size_t size)
{
	size_t i = sprintf(data, "rdma-ping-0: ");
	char c = 'A';

	for (; i < size; i++) {
		data[i] = c;
		c = c == 'z' ? 'A' : c + 1;
	}
	data[size - 1] = 0;
}

static void prepare(void)
{
	msg_mr = rdma_reg_msgs(id, msg, sizeof(msg));
	data_mr = ibv_reg_mr(id->pd, data, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
			     IBV_ACCESS_REMOTE_WRITE);
	if (!msg_mr || !data_mr)
		err(1, "register memory");
	/* The go-ahead, or the first advertisement, comes into the second half. */
	check(rdma_post_recv(id, NULL, &msg[4], sizeof(*msg), msg_mr), "post receive");
}

static void send_msg(size_t len)
{
	struct ibv_wc wc;

	check(rdma_post_send(id, NULL, msg, len, msg_mr, IBV_SEND_SIGNALED), "post send");
	if (rdma_get_send_comp(id, &wc) < 0)
		err(1, "send completion");
}

static void advertise(uint32_t rkey, uint32_t size, size_t len)
{
	if (size)
		fill(size);
	msg[0].addr = htobe64((uintptr_t)data);
	msg[0].rkey = htobe32(rkey);
	msg[0].size = htobe32(size);
	send_msg(len);
}

static void receive(void)
{
	struct ibv_wc wc;

	if (rdma_get_recv_comp(id, &wc) < 0)
		err(1, "no message");
	rdma_post_recv(id, NULL, &msg[4], sizeof(*msg), msg_mr);
}

/* Until the other side ends the connection. */
static void wait_end(void)
{
	struct rdma_cm_event *event;

	while (!rdma_get_cm_event(id->channel, &event)) {
		if (event->event == RDMA_CM_EVENT_DISCONNECTED)
			return;
		rdma_ack_cm_event(event);
	}
}

static void client(void)
{
	uint32_t rkey = data_mr->rkey;

	if (is("garbage")) {
		memset(msg, 0xa5, sizeof(msg));
		send_msg(sizeof(*msg));
	} else if (is("short")) {
		advertise(rkey, 64, 7);
	} else if (is("long")) {
		advertise(rkey, 64, 64);
	} else if (is("empty")) {
		advertise(rkey, 0, sizeof(*msg));
	} else if (is("badkey")) {
		advertise(rkey ^ 0x5a00, 64, sizeof(*msg));
	} else if (is("beyond")) {
		/* Memory past the registered region. */
		msg[0].addr = htobe64((uintptr_t)data + SIZE - 32);
		msg[0].rkey = htobe32(rkey);
		msg[0].size = htobe32(64);
		send_msg(sizeof(*msg));
	} else if (is("resize")) {
		/* The sink is smaller than the source was. */
		advertise(rkey, 64, sizeof(*msg));
		receive();
		advertise(rkey, 32, sizeof(*msg));
	} else if (is("badsink")) {
		advertise(rkey, 64, sizeof(*msg));
		receive();
		advertise(rkey ^ 0x5a00, 64, sizeof(*msg));
	} else if (is("vanish")) {
		/* Ends in mid-transfer, without a word. */
		advertise(rkey, SIZE, sizeof(*msg));
		_exit(0);
	} else if (is("disconnect")) {
		advertise(rkey, SIZE, sizeof(*msg));
		rdma_disconnect(id);
		return;
	} else if (is("flood")) {
		/* More than the server has posted receives for. */
		for (int i = 0; i < 64; i++)
			check(rdma_post_send(id, NULL, msg, 16, msg_mr, 0), "post send");
	} else if (!is("silent")) {
		errx(1, "unknown misdeed %s", how);
	}
	wait_end();
}

static void server(void)
{
	if (is("silent")) {
		wait_end();
	} else if (is("short")) {
		receive();
		send_msg(3);
		wait_end();
	} else if (is("early")) {
		/* Reports that all is done before it wrote anything. */
		receive();
		send_msg(sizeof(*msg));
		receive();
		send_msg(sizeof(*msg));
		wait_end();
	} else if (is("vanish")) {
		receive();
		_exit(0);
	} else if (is("disconnect")) {
		receive();
		rdma_disconnect(id);
	} else {
		errx(1, "unknown misdeed %s", how);
	}
}

/* Asks for connections, and has each refused. */
static void requests(struct rdma_addrinfo *res, const struct ibv_qp_init_attr *attr, int count)
{
	while (count--) {
		/* librdmacm sets the CQs in it. */
		struct ibv_qp_init_attr copy = *attr;

		check(rdma_create_ep(&id, res, NULL, &copy), "create endpoint");
		if (!rdma_connect(id, NULL) || errno != ECONNREFUSED)
			err(1, "it was not refused");
		rdma_destroy_ep(id);
	}
}

int main(int argc, char **argv)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *res;
	struct ibv_qp_init_attr attr = {
		.cap = {
			.max_send_wr = 80, .max_recv_wr = 4,
			.max_send_sge = 1, .max_recv_sge = 1,
		},
		.sq_sig_all = 0,
	};
	struct rdma_conn_param param = {
		.responder_resources = 1, .initiator_depth = 1, .retry_count = 3,
	};
	int serve;

	if (argc != 5)
		errx(1, "usage: hostile client|server|requests ADDR PORT HOW");
	serve = !strcmp(argv[1], "server");
	how = argv[4];
	/* A bound for everything below. */
	alarm(60);

	if (serve)
		hints.ai_flags = RAI_PASSIVE;
	check(rdma_getaddrinfo(argv[2], argv[3], &hints, &res), "address");
	if (!strcmp(argv[1], "requests")) {
		requests(res, &attr, atoi(how));
		return 0;
	}
	check(rdma_create_ep(&id, res, NULL, &attr), "create endpoint");
	if (serve) {
		struct rdma_cm_id *listener = id;

		check(rdma_listen(listener, 4), "listen");
		check(rdma_get_request(listener, &id), "connect request");
		if (is("reject"))
			return rdma_reject(id, NULL, 0) ? 1 : 0;
		prepare();
		check(rdma_accept(id, &param), "accept");
		server();
	} else {
		prepare();
		check(rdma_connect(id, &param), "connect");
		client();
	}
	return 0;
}
