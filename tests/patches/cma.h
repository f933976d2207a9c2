/* SPDX-License-Identifier: GPL-2.0 */
/* Common part of the reproducers for rdma_cm: a listener, a client and the events of that. */

#include <linux/delay.h>
#include <rdma/rdma_cm.h>

#define PATIENCE (60 * HZ)

static DECLARE_COMPLETION(event_seen);

static inline int client_handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	id->context = (void *)(long)event->event;
	complete(&event_seen);
	return 0;
}

/* Waits for an event of the client. */
static inline int wait_event_of(struct rdma_cm_id *id, enum rdma_cm_event_type event)
{
	if (!wait_for_completion_timeout(&event_seen, PATIENCE))
		return -ETIMEDOUT;
	return (long)id->context == event ? 0 : -ECONNREFUSED;
}

static inline int client_resolve(struct rdma_cm_id *id, struct sockaddr *addr)
{
	int ret = rdma_resolve_addr(id, NULL, addr, 2000) ?:
		  wait_event_of(id, RDMA_CM_EVENT_ADDR_RESOLVED);

	return ret ?: rdma_resolve_route(id, 2000) ?:
	       wait_event_of(id, RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static inline struct rdma_cm_id *listen(rdma_cm_event_handler handler, struct sockaddr *addr)
{
	struct rdma_cm_id *id = rdma_create_id(&init_net, handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	int ret;

	if (IS_ERR(id))
		return id;
	/* The device has each address some time after the interface. */
	while ((ret = rdma_bind_addr(id, addr)) == -ENODEV)
		msleep(20);
	ret = ret ?: rdma_listen(id, 1);
	if (ret) {
		rdma_destroy_id(id);
		return ERR_PTR(ret);
	}
	return id;
}
