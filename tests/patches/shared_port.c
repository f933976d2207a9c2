// SPDX-License-Identifier: GPL-2.0
/* Destroys a listener whose port another one has, too, while a request has come to it. */

#include "ends.h"
#include "cma.h"

#define PORT htons(7471)

static DECLARE_COMPLETION(locked);
static DECLARE_COMPLETION(requested);
static struct rdma_cm_id *listener;

static int listener_handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	return -ECONNREFUSED;
}

static int request(struct rdma_cm_id *id, struct sockaddr *addr)
{
	struct rdma_conn_param param = { .qp_num = 0x123 };

	return client_resolve(id, addr) ?: rdma_connect(id, &param);
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
	listener = listen(listener_handler, addr);
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
	struct rdma_cm_id *other = listen(listener_handler, (struct sockaddr *)&addr6);
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
