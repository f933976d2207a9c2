// SPDX-License-Identifier: GPL-2.0
/* Each allocation of a disconnection fails once: all the same it must be reported, and once. */

#include "ends.h"
#include "cma.h"

static struct rdma_cm_id *server;
static unsigned int disconnected;
/* There are no QPs. A number that was used lately would be that of a stale connection. */
static u32 qp_num = 0x123;

static int server_handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	struct rdma_conn_param param = { .qp_num = qp_num++ };
	int ret;

	/* Answers. */
	if (event->event == RDMA_CM_EVENT_DISCONNECTED)
		rdma_disconnect(id);
	if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST)
		return 0;
	server = id;
	ret = rdma_accept(id, &param);
	if (ret)
		server = NULL;
	return ret;
}

static int count_handler(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	if (event->event != RDMA_CM_EVENT_DISCONNECTED)
		return client_handler(id, event);
	disconnected++;
	return 0;
}

static int connect(struct rdma_cm_id *id, struct sockaddr *addr)
{
	struct rdma_conn_param param = { .qp_num = qp_num++ };
	int ret;

	ret = client_resolve(id, addr) ?: rdma_connect(id, &param) ?:
	      wait_event_of(id, RDMA_CM_EVENT_CONNECT_RESPONSE);
	rdma_lock_handler(id);
	ret = ret ?: rdma_accept(id, NULL);
	rdma_unlock_handler(id);
	return ret;
}

/* Returns 1 if the nth allocation of the disconnection has failed, 0 if it has not so many. */
static int turn(struct sockaddr *addr, int nth)
{
	struct rdma_cm_id *client;
	int ret, seen, failed = 0;

	client = rdma_create_id(&init_net, count_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(client))
		return PTR_ERR(client);
	disconnected = 0;
	reinit_completion(&event_seen);
	ret = connect(client, addr);
	if (!ret) {
		current->fail_nth = nth;
		ret = rdma_disconnect(client);
		failed = !current->fail_nth;
		current->fail_nth = 0;
	}
	if (!ret) {
		seen = wait_event_of(client, RDMA_CM_EVENT_TIMEWAIT_EXIT);
		if (seen || disconnected != 1) {
			pr_err("dreq_nomem: %d: DISCONNECTED %u times, then %d\n", nth,
			       disconnected, seen);
			ret = -EIO;
		}
	}
	rdma_destroy_id(client);
	if (server)
		rdma_destroy_id(server);
	server = NULL;
	return ret ?: failed;
}

static int run(struct ib_pd *pd, struct ib_cq *cq)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7471) };
	struct rdma_cm_id *listener;
	int nth = 1, ret;

	addr.sin_addr.s_addr = htonl(0xc0000201);
	listener = listen(server_handler, (struct sockaddr *)&addr);
	if (IS_ERR(listener))
		return PTR_ERR(listener);
	do
		ret = turn((struct sockaddr *)&addr, nth++);
	while (ret > 0);
	if (!ret)
		pr_info("dreq_nomem: %d allocations\n", nth - 2);
	rdma_destroy_id(listener);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a disconnection for which there is no memory");
