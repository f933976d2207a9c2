// SPDX-License-Identifier: GPL-2.0
/* Sends a message as soon as the connection is made: it must be received. */

#include <linux/in.h>
#include <net/net_namespace.h>

#include "siw.h"

static DECLARE_COMPLETION(received);
static struct rdma_cm_id *accepted;

static void receive_completes(struct ib_cq *cq, struct ib_wc *wc)
{
	if (wc->status == IB_WC_SUCCESS)
		complete(&received);
}

/* Not in a callback, which would keep the client's waiting. */
static void accept_with_receive(struct work_struct *work)
{
	static struct ib_cqe cqe = { .done = receive_completes };
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct ib_recv_wr receive = { .wr_cqe = &cqe };
	int ret;

	rdma_lock_handler(accepted);
	ret = qp_create(accepted) ?: ib_post_recv(accepted->qp, &receive, NULL) ?:
	      rdma_accept(accepted, &param);
	rdma_unlock_handler(accepted);
	if (ret)
		pr_err("siw_first: accept: %d\n", ret);
}

static DECLARE_WORK(accept, accept_with_receive);

static int accept_later(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		accepted = id;
		queue_work(system_dfl_wq, &accept);
	}
	return 0;
}

static int send_first(struct rdma_cm_id *client, struct sockaddr *addr)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct ib_send_wr send = { .opcode = IB_WR_SEND };
	int ret;

	ret = client_resolve(client, addr) ?: qp_create(client) ?: rdma_connect(client, &param) ?:
	      wait_event_of(client, RDMA_CM_EVENT_ESTABLISHED) ?: post_and_wait(client->qp, &send);
	if (!ret && !wait_for_completion_timeout(&received, PATIENCE))
		ret = -ETIMEDOUT;
	return ret;
}

static int run(struct ib_qp *qp)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7472) };
	struct rdma_cm_id *listener, *client;
	int ret;

	addr.sin_addr.s_addr = htonl(0xc6336401);
	listener = rdma_create_id(&init_net, accept_later, NULL, RDMA_PS_TCP, IB_QPT_RC);
	client = rdma_create_id(&init_net, client_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(listener) || IS_ERR(client))
		return -ENOMEM;
	ret = rdma_bind_addr(listener, (struct sockaddr *)&addr) ?: rdma_listen(listener, 1) ?:
	      send_first(client, (struct sockaddr *)&addr);
	if (ret)
		pr_err("siw_first: the first message: %d\n", ret);
	flush_work(&accept);
	id_end(client);
	if (accepted)
		id_end(accepted);
	rdma_destroy_id(listener);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: the first message of a connection is not received");
