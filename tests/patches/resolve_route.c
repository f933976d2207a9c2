// SPDX-License-Identifier: GPL-2.0
/* Asks for the route while the address is being found. */

#include "ends.h"
#include <rdma/rdma_cm.h>

static DECLARE_COMPLETION(resolved);

static int handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	if (event->event == RDMA_CM_EVENT_ADDR_RESOLVED || event->event == RDMA_CM_EVENT_ADDR_ERROR)
		complete(&resolved);
	return 0;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct rdma_cm_id *id;
	int i, ret = 0;

	addr.sin_addr.s_addr = htonl(0xc0000201);
	for (i = 0; i < 20 && !ret; i++) {
		reinit_completion(&resolved);
		id = rdma_create_id(&init_net, handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
		if (IS_ERR(id))
			return PTR_ERR(id);
		ret = rdma_resolve_addr(id, NULL, (struct sockaddr *)&addr, 2000);
		/* It is refused until the address is resolved. */
		while (!ret && rdma_resolve_route(id, 2000) && !completion_done(&resolved))
			cond_resched();
		if (!ret && !wait_for_completion_timeout(&resolved, PATIENCE))
			ret = -ETIMEDOUT;
		rdma_destroy_id(id);
	}
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a route is asked for before the device is known");
