// SPDX-License-Identifier: GPL-2.0
/* There is no memory for a connection that comes: its id is destroyed, and the peer refused. */

#include "ends.h"
#include "cma.h"

static int listener_handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	return -ECONNREFUSED;
}

static int request(struct rdma_cm_id *id, struct sockaddr *addr)
{
	struct rdma_conn_param param = { .qp_num = 0x123 };

	return client_resolve(id, addr) ?: rdma_connect(id, &param) ?:
	       wait_event_of(id, RDMA_CM_EVENT_REJECTED);
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct rdma_cm_id *listener, *client;
	int ret;

	addr.sin_addr.s_addr = htonl(0xc0000201);
	listener = listen(listener_handler, (struct sockaddr *)&addr);
	if (IS_ERR(listener))
		return PTR_ERR(listener);
	client = rdma_create_id(&init_net, client_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(client)) {
		rdma_destroy_id(listener);
		return PTR_ERR(client);
	}
	ret = request(client, (struct sockaddr *)&addr);
	rdma_destroy_id(client);
	rdma_destroy_id(listener);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a connection for which there is no memory");
