// SPDX-License-Identifier: GPL-2.0
/* Connects to a listener as soon as its socket listens: the request must reach it. */

#include <linux/delay.h>
#include <linux/in.h>
#include <linux/net.h>
#include <net/net_namespace.h>

#include "siw.h"

/* A request of MPA: the key, flags, the revision and the length of the private data. */
static const char mpa_request[] = "MPA ID Req Frame\0\1\0";

static DECLARE_COMPLETION(request_seen);
static struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(7472) };

static int refuse(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST)
		return 0;
	complete(&request_seen);
	return -ECONNREFUSED;
}

static struct socket *sock;
static int connect_error;

static void connect_early(struct work_struct *work)
{
	struct kvec iov = { .iov_base = (void *)mpa_request, .iov_len = sizeof(mpa_request) };
	struct msghdr msg = {};

	do {
		msleep(20);
		connect_error = kernel_connect(sock, (struct sockaddr_unsized *)&address,
					       sizeof(address), 0);
	} while (connect_error == -ECONNREFUSED);
	if (!connect_error)
		connect_error = min(kernel_sendmsg(sock, &msg, &iov, 1, iov.iov_len), 0);
}

static DECLARE_WORK(peer, connect_early);

static int run(struct ib_qp *qp)
{
	struct rdma_cm_id *listener = rdma_create_id(&init_net, refuse, NULL, RDMA_PS_TCP,
						     IB_QPT_RC);
	int ret;

	if (IS_ERR(listener))
		return PTR_ERR(listener);
	address.sin_addr.s_addr = htonl(0xc6336401);
	ret = sock_create_kern(&init_net, AF_INET, SOCK_STREAM, IPPROTO_TCP, &sock) ?:
	      rdma_bind_addr(listener, (struct sockaddr *)&address);
	if (!ret) {
		queue_work(system_dfl_wq, &peer);
		ret = rdma_listen(listener, 1);
		flush_work(&peer);
		ret = ret ?: connect_error;
	}
	if (!ret && !wait_for_completion_timeout(&request_seen, PATIENCE))
		ret = -ETIMEDOUT;
	if (ret)
		pr_err("siw_early: the request: %d\n", ret);
	if (sock)
		sock_release(sock);
	rdma_destroy_id(listener);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a connection that comes early is forgotten");
