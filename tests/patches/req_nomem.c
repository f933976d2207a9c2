// SPDX-License-Identifier: GPL-2.0
/* There is no memory for a connection that comes: its id is destroyed, and the peer refused. */

#include "ends.h"
#include <rdma/rdma_cm.h>

static DECLARE_COMPLETION(event_seen);
static enum rdma_cm_event_type client_event;

static int listener_handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	return -ECONNREFUSED;
}

static int client_handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	client_event = event->event;
	complete(&event_seen);
	return 0;
}

static int wait_event_of_client(enum rdma_cm_event_type event)
{
	if (!wait_for_completion_timeout(&event_seen, PATIENCE))
		return -ETIMEDOUT;
	return client_event == event ? 0 : -ENETUNREACH;
}

static int request(struct rdma_cm_id *id, struct sockaddr *addr)
{
	struct rdma_conn_param param = { .qp_num = 0x123 };

	return rdma_resolve_addr(id, NULL, addr, 2000) ?:
		wait_event_of_client(RDMA_CM_EVENT_ADDR_RESOLVED) ?:
		rdma_resolve_route(id, 2000) ?:
		wait_event_of_client(RDMA_CM_EVENT_ROUTE_RESOLVED) ?:
		rdma_connect(id, &param) ?:
		wait_event_of_client(RDMA_CM_EVENT_REJECTED);
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct rdma_cm_id *listener, *client;
	int ret;

	addr.sin_addr.s_addr = htonl(0xc0000201);
	listener = rdma_create_id(&init_net, listener_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(listener))
		return PTR_ERR(listener);
	client = rdma_create_id(&init_net, client_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(client)) {
		rdma_destroy_id(listener);
		return PTR_ERR(client);
	}
	/* The device has the address some time after the interface. */
	while ((ret = rdma_bind_addr(listener, (struct sockaddr *)&addr)) == -ENODEV)
		msleep(20);
	ret = ret ?: rdma_listen(listener, 1) ?: request(client, (struct sockaddr *)&addr);
	rdma_destroy_id(client);
	rdma_destroy_id(listener);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a connection for which there is no memory");
