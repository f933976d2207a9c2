// SPDX-License-Identifier: GPL-2.0
/* Makes TCP connections to a listener, and gives each up at once: the listener must not end. */

#include <linux/in.h>
#include <linux/net.h>
#include <net/net_namespace.h>

#include "siw.h"

static int refuse(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	return event->event == RDMA_CM_EVENT_CONNECT_REQUEST ? -ECONNREFUSED : 0;
}

static int connect_and_close(struct sockaddr_in *addr)
{
	struct socket *sock;
	int ret = sock_create_kern(&init_net, AF_INET, SOCK_STREAM, IPPROTO_TCP, &sock);

	if (ret)
		return ret;
	ret = kernel_connect(sock, (struct sockaddr_unsized *)addr, sizeof(*addr), 0);
	sock_release(sock);
	return ret;
}

static int run(struct ib_qp *qp)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7472) };
	struct rdma_cm_id *listener = rdma_create_id(&init_net, refuse, NULL, RDMA_PS_TCP,
						     IB_QPT_RC);
	int i, ret;

	if (IS_ERR(listener))
		return PTR_ERR(listener);
	addr.sin_addr.s_addr = htonl(0xc6336401);
	ret = rdma_bind_addr(listener, (struct sockaddr *)&addr) ?: rdma_listen(listener, 64);
	for (i = 0; i < 500 && !ret; i++)
		ret = connect_and_close(&addr);
	if (ret)
		pr_err("siw_given_up: connection %d: %d\n", i, ret);
	rdma_destroy_id(listener);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a connection that is given up ends the listener");
