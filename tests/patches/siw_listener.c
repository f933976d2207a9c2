// SPDX-License-Identifier: GPL-2.0
/* Destroys a listener while a request waits for its handler: it must be rejected. */

#include <linux/delay.h>

#include "siw.h"

static int run(struct ib_qp *qp)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7472) };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_cm_id *listener, *client;
	int ret;

	addr.sin_addr.s_addr = htonl(0xc6336401);
	listener = rdma_create_id(&init_net, server_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	client = rdma_create_id(&init_net, client_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(listener) || IS_ERR(client))
		return -ENOMEM;
	ret = rdma_bind_addr(listener, (struct sockaddr *)&addr) ?: rdma_listen(listener, 1);
	ret = ret ?: client_resolve(client, (struct sockaddr *)&addr);
	ret = ret ?: qp_create(client) ?: rdma_connect(client, &param);
	msleep(100);
	rdma_destroy_id(listener);
	ret = ret ?: wait_event_of(client, RDMA_CM_EVENT_REJECTED);
	if (ret)
		pr_err("siw_listener: the answer: %d\n", ret);
	id_end(client);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a request whose listener is destroyed is not rejected");
