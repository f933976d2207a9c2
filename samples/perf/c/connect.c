// SPDX-License-Identifier: GPL-2.0
/*
 * Connections by the connection manager: so many at once are set up, each before
 * the next one, and then taken down. The caller drives the client from step to step; the server
 * does what it is told to in its handler.
 */

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/nsproxy.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <rdma/rdma_cm.h>

#include "perf.h"

#define PERF_RESOLVE_MS	2000

struct perf_connector {
	struct perf_run *run;
	struct sockaddr_storage addr;
	struct rdma_cm_id *listener;
	struct rdma_cm_id *server;	/* of the connection that is being set up */
	struct perf_connection {
		struct rdma_cm_id *client;
		struct rdma_cm_id *server;
	} *connections;
	struct completion server_gone;
	/* The last event of the client. */
	struct completion client_event;
	enum rdma_cm_event_type event;
	int status;
};

static const struct rdma_conn_param perf_conn_param = {
	.responder_resources = 1,
	.initiator_depth = 1,
	.retry_count = 7,
	.rnr_retry_count = 7,
};

static int perf_create_cm_qp(struct rdma_cm_id *id, const struct perf_end *end)
{
	struct ib_qp_init_attr attr = {
		.send_cq = end->cq,
		.recv_cq = end->cq,
		.cap = {
			/* One, and one for the mark at the end. */
			.max_send_wr = 2,
			.max_recv_wr = 2,
			.max_send_sge = 1,
			.max_recv_sge = 1,
		},
		.sq_sig_type = IB_SIGNAL_REQ_WR,
		.qp_type = IB_QPT_RC,
	};

	/* The address may be that of another device than the one that was named. */
	if (id->device != end->dev)
		return -ENODEV;
	return rdma_create_qp(id, end->pd, &attr);
}

static void perf_destroy_cm_id(struct perf_run *run, struct rdma_cm_id *id)
{
	if (id->qp) {
		perf_qp_drain(run, id->qp);
		rdma_destroy_qp(id);
	}
	rdma_destroy_id(id);
}

/* A non-zero return destroys the id, which is a new one. */
static int perf_accept(struct perf_connector *connector, struct rdma_cm_id *id)
{
	struct rdma_conn_param param = perf_conn_param;
	int ret;

	if (connector->server)
		return -EBUSY;
	ret = perf_create_cm_qp(id, &connector->run->b);
	if (ret)
		return ret;
	connector->server = id;
	ret = rdma_accept(id, &param);
	if (ret) {
		connector->server = NULL;
		rdma_destroy_qp(id);
	}
	return ret;
}

static int perf_server_event(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	struct perf_connector *connector = id->context;

	switch (event->event) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		return perf_accept(connector, id);
	case RDMA_CM_EVENT_DISCONNECTED:
		rdma_disconnect(id);
		complete(&connector->server_gone);
		return 0;
	default:
		return 0;
	}
}

static int perf_client_event(struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	struct perf_connector *connector = id->context;

	connector->event = event->event;
	connector->status = event->status;
	complete(&connector->client_event);
	return 0;
}

/* Waits for the event that a step, which has returned @ret, ends with. */
static int perf_step(struct perf_connector *connector, int ret, enum rdma_cm_event_type wanted)
{
	if (ret)
		return ret;
	if (!wait_for_completion_timeout(&connector->client_event, PERF_STUCK))
		return -ETIME;
	if (connector->event == wanted)
		return 0;
	pr_err("connect_rate: %s, status %d\n", rdma_event_msg(connector->event),
	       connector->status);
	return -EIO;
}

static int perf_connect_client(struct perf_connector *connector, struct rdma_cm_id *id)
{
	struct sockaddr *addr = (struct sockaddr *)&connector->addr;
	struct rdma_conn_param param = perf_conn_param;
	int ret;

	ret = rdma_resolve_addr(id, NULL, addr, PERF_RESOLVE_MS);
	ret = perf_step(connector, ret, RDMA_CM_EVENT_ADDR_RESOLVED);
	if (ret)
		return ret;
	ret = rdma_resolve_route(id, PERF_RESOLVE_MS);
	ret = perf_step(connector, ret, RDMA_CM_EVENT_ROUTE_RESOLVED);
	if (ret)
		return ret;
	ret = perf_create_cm_qp(id, &connector->run->a);
	if (ret)
		return ret;
	ret = rdma_connect(id, &param);
	return perf_step(connector, ret, RDMA_CM_EVENT_ESTABLISHED);
}

static int perf_connection_up(struct perf_run *run, u32 i)
{
	struct perf_connector *connector = run->priv;
	struct perf_connection *connection = &connector->connections[i];
	struct rdma_cm_id *id;
	int ret;

	id = rdma_create_id(current->nsproxy->net_ns, perf_client_event, connector,
			    RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(id))
		return PTR_ERR(id);
	connection->client = id;
	ret = perf_connect_client(connector, id);
	if (ret)
		return ret;
	connection->server = connector->server;
	connector->server = NULL;
	return 0;
}

static void perf_connection_destroy(struct perf_run *run, struct perf_connection *connection)
{
	if (connection->server)
		perf_destroy_cm_id(run, connection->server);
	connection->server = NULL;
	if (connection->client)
		perf_destroy_cm_id(run, connection->client);
	connection->client = NULL;
}

static int perf_connection_down(struct perf_run *run, u32 i)
{
	struct perf_connector *connector = run->priv;
	struct perf_connection *connection = &connector->connections[i];
	int ret = rdma_disconnect(connection->client);

	ret = perf_step(connector, ret, RDMA_CM_EVENT_DISCONNECTED);
	if (ret)
		return ret;
	if (!wait_for_completion_timeout(&connector->server_gone, PERF_STUCK))
		return -ETIME;
	perf_connection_destroy(run, connection);
	return 0;
}

static int perf_connect_go(struct perf_run *run, u32 ops)
{
	return perf_setup_go(run, ops, perf_connection_up, perf_connection_down);
}

static int perf_listen(struct perf_connector *connector)
{
	struct rdma_cm_id *id;
	int ret;

	id = rdma_create_id(current->nsproxy->net_ns, perf_server_event, connector,
			    RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(id))
		return PTR_ERR(id);
	connector->listener = id;
	ret = rdma_bind_addr(id, (struct sockaddr *)&connector->addr);
	return ret ?: rdma_listen(id, 1);
}

static int perf_connect_init(struct perf_run *run)
{
	struct perf_connector *connector = kzalloc_obj(*connector);

	if (!connector)
		return -ENOMEM;
	run->priv = connector;
	connector->run = run;
	init_completion(&connector->server_gone);
	init_completion(&connector->client_event);
	connector->addr = run->args->addr;
	connector->connections = kvzalloc_objs(*connector->connections, run->args->qps);
	if (!connector->connections)
		return -ENOMEM;
	return perf_listen(connector);
}

/* Without a listener there are no new servers. */
static void perf_connect_exit(struct perf_run *run)
{
	struct perf_connector *connector = run->priv;
	u32 i;

	if (!connector)
		return;
	if (connector->listener)
		rdma_destroy_id(connector->listener);
	if (connector->server)
		perf_destroy_cm_id(run, connector->server);
	for (i = 0; connector->connections && i < run->args->qps; i++)
		perf_connection_destroy(run, &connector->connections[i]);
	kvfree(connector->connections);
	kfree(connector);
}

static void perf_connect_shape(struct perf_run *run)
{
	run->nr_qps = run->args->qps + 1;	/* at once, if the last one is still going */
	run->a.sends = 1;
	run->a.recvs = 1;
	run->b.sends = 1;
	run->b.recvs = 1;
}

const struct perf_load perf_connect_rate = {
	.name = "connect_rate",
	.pair = true,
	.by_load = true,
	.holds = true,
	.max_size = SZ_1M,
	.shape = perf_connect_shape,
	.init = perf_connect_init,
	.go = perf_connect_go,
	.exit = perf_connect_exit,
};
