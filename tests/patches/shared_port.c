// SPDX-License-Identifier: GPL-2.0
/* Destroys a listener whose port another one has, too, while a request has come to it. */

#include "ends.h"
#include <rdma/rdma_cm.h>

#define PORT htons(7471)

static DECLARE_COMPLETION(event_seen);
static DECLARE_COMPLETION(locked);
static DECLARE_COMPLETION(requested);
static enum rdma_cm_event_type client_event;
static struct rdma_cm_id *listener;

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

static struct rdma_cm_id *listen(struct sockaddr *addr)
{
	struct rdma_cm_id *id;
	int ret;

	id = rdma_create_id(&init_net, listener_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
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

static int request(struct rdma_cm_id *id, struct sockaddr *addr)
{
	struct rdma_conn_param param = { .qp_num = 0x123 };

	return rdma_resolve_addr(id, NULL, addr, 2000) ?:
		wait_event_of_client(RDMA_CM_EVENT_ADDR_RESOLVED) ?:
		rdma_resolve_route(id, 2000) ?:
		wait_event_of_client(RDMA_CM_EVENT_ROUTE_RESOLVED) ?:
		rdma_connect(id, &param);
}

/* No callback of the listener begins until the request has come. */
static void hold(struct work_struct *work)
{
	rdma_lock_handler(listener);
	complete(&locked);
	wait_for_completion(&requested);
	rdma_unlock_handler(listener);
}

static void destroy(struct work_struct *work)
{
	rdma_destroy_id(listener);
}

static DECLARE_WORK(hold_work, hold);
static DECLARE_WORK(destroy_work, destroy);

/* Gives the request some time to wait for the callback behind the listener's destruction. */
static int try(struct sockaddr *addr, unsigned int ms)
{
	struct rdma_cm_id *client;
	int ret;

	client = rdma_create_id(&init_net, client_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(client))
		return PTR_ERR(client);
	listener = listen(addr);
	if (IS_ERR(listener)) {
		rdma_destroy_id(client);
		return PTR_ERR(listener);
	}
	queue_work(system_dfl_wq, &hold_work);
	wait_for_completion(&locked);
	queue_work(system_dfl_wq, &destroy_work);
	ret = request(client, addr);
	msleep(ms);
	complete(&requested);
	flush_work(&destroy_work);
	rdma_destroy_id(client);
	reinit_completion(&event_seen);
	return ret;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct sockaddr_in6 addr6 = {
		.sin6_family = AF_INET6,
		.sin6_port = PORT,
		.sin6_addr.s6_addr = { 0x20, 0x01, 0x0d, 0xb8, [15] = 1 },
	};
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = PORT };
	struct rdma_cm_id *other = listen((struct sockaddr *)&addr6);
	unsigned int ms;
	int ret = 0;

	if (IS_ERR(other))
		return PTR_ERR(other);
	addr.sin_addr.s_addr = htonl(0xc0000201);
	for (ms = 25; ms < 2000 && !ret; ms *= 2)
		ret = try((struct sockaddr *)&addr, ms);
	rdma_destroy_id(other);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: one of two listeners of a port is destroyed when a request comes");
