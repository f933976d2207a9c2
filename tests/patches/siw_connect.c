// SPDX-License-Identifier: GPL-2.0
/* Destroys the QP of an id that another thread connects. */

#include <linux/delay.h>

#include "siw.h"

static struct rdma_cm_id *id;
static DECLARE_COMPLETION(begun);

/* Nobody listens there. */
static void connect(struct work_struct *work)
{
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };

	complete(&begun);
	rdma_connect(id, &param);
}

static DECLARE_WORK(connection, connect);

static int run(struct ib_qp *qp)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(7472) };
	int ret;

	addr.sin_addr.s_addr = htonl(0xc6336401);
	id = rdma_create_id(&init_net, client_handler, NULL, RDMA_PS_TCP, IB_QPT_RC);
	if (IS_ERR(id))
		return PTR_ERR(id);
	ret = client_resolve(id, (struct sockaddr *)&addr) ?: qp_create(id);
	if (!ret) {
		schedule_work_on(cpumask_any_but(cpu_online_mask, raw_smp_processor_id()),
				 &connection);
		while (!try_wait_for_completion(&begun))
			cpu_relax();
		mdelay(50);
		rdma_destroy_qp(id);
		flush_work(&connection);
	}
	rdma_destroy_id(id);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a QP is freed between its lookup and the reference to it");
