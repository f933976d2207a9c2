// SPDX-License-Identifier: GPL-2.0
/* Connects to a peer that reads the request and closes the connection at once, again and again. */

#include <linux/delay.h>
#include <linux/in.h>
#include <linux/net.h>
#include <net/net_namespace.h>

#include "siw.h"

static struct socket *listening;

/* The peer: any TCP socket. */
static void accept_and_close(struct work_struct *work)
{
	struct msghdr msg = {};
	struct kvec iov;
	struct socket *sock;
	char byte;

	iov = (struct kvec){ .iov_base = &byte, .iov_len = 1 };
	if (kernel_accept(listening, &sock, 0))
		return;
	kernel_recvmsg(sock, &msg, &iov, 1, 1, 0);
	/* Its end is handled while the call that connects wakes the waiters. */
	msleep(20);
	sock_release(sock);
}

static DECLARE_WORK(peer, accept_and_close);

static int listen_on(struct sockaddr_in *addr)
{
	int ret = sock_create_kern(&init_net, AF_INET, SOCK_STREAM, IPPROTO_TCP, &listening);

	if (ret)
		return ret;
	ret = kernel_bind(listening, (struct sockaddr_unsized *)addr, sizeof(*addr));
	return ret ?: kernel_listen(listening, 1);
}

static int connect_once(struct sockaddr *addr)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_cm_id *id = rdma_create_id(&init_net, client_handler, NULL, RDMA_PS_TCP,
					       IB_QPT_RC);
	int ret;

	if (IS_ERR(id))
		return PTR_ERR(id);
	ret = client_resolve(id, addr) ?: qp_create(id);
	if (!ret) {
		queue_work(system_dfl_wq, &peer);
		ret = rdma_connect(id, &param);
		if (!ret && !wait_for_completion_timeout(&event_seen, PATIENCE))
			ret = -ETIMEDOUT;
		flush_work(&peer);
	}
	if (id->qp)
		rdma_destroy_qp(id);
	rdma_destroy_id(id);
	return ret;
}

static int run(struct ib_qp *qp)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7472) };
	int i, ret;

	addr.sin_addr.s_addr = htonl(0xc6336401);
	ret = listen_on(&addr);
	for (i = 0; i < 20 && !ret; i++)
		ret = connect_once((struct sockaddr *)&addr);
	if (ret)
		pr_err("siw_closed: connection %d: %d\n", i, ret);
	if (listening)
		sock_release(listening);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: an endpoint is freed while it is set free");
