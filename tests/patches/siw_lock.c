// SPDX-License-Identifier: GPL-2.0
/* Closes a TCP listener that has not accepted, where siw has connections: lockdep compares. */

#include <linux/delay.h>
#include <linux/in.h>
#include <linux/net.h>
#include <net/inet_connection_sock.h>

#include "siw.h"

/* Locks of sockets that are the kernel's are others to lockdep. siw's are not. */
static int tcp_socket(struct socket **sock)
{
	return sock_create(AF_INET, SOCK_STREAM, IPPROTO_TCP, sock);
}

/* Data come while a socket's owner sends: then they are looked at when it is released. */
static int write_both_ways(struct ib_qp *qp)
{
	struct ib_rdma_wr write = { .wr = { .opcode = IB_WR_RDMA_WRITE } };
	struct ib_qp *ends[] = { qp, server->qp };
	int i, ret = 0;

	for (i = 0; i < 1000 && !ret; i++) {
		write.wr.send_flags = 0;
		ret = ib_post_send(ends[i % 2], &write.wr, NULL);
		if (ret == -ENOMEM)
			ret = post_and_wait(ends[0], &write.wr) ?:
			      post_and_wait(ends[1], &write.wr);
		if (ret == -ENOMEM)
			ret = 0;
	}
	return ret;
}

static int run(struct ib_qp *qp)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7472) };
	struct sockaddr_unsized *name = (struct sockaddr_unsized *)&addr;
	struct socket *listener, *client;
	int i, ret = write_both_ways(qp) ?: tcp_socket(&listener);

	if (ret)
		return ret;
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	ret = kernel_bind(listener, name, sizeof(addr)) ?: kernel_listen(listener, 1) ?:
		tcp_socket(&client);
	if (ret) {
		sock_release(listener);
		return ret;
	}
	ret = kernel_connect(client, name, sizeof(addr), 0);
	/* The listener has the connection once a softirq has taken the client's answer. */
	for (i = 0; i < 1000 && reqsk_queue_empty(&inet_csk(listener->sk)->icsk_accept_queue); i++)
		usleep_range(1000, 2000);
	sock_release(listener);
	sock_release(client);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a lock is taken with softirqs on and off");
