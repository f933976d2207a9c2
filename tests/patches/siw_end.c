// SPDX-License-Identifier: GPL-2.0
/* Destroys the QP of a connection while its socket tells that the peer has ended it. */

#include "siw.h"

static void destroy(struct work_struct *work)
{
	wait_for_completion_timeout(&server_disconnected, PATIENCE);
	rdma_destroy_qp(server);
}

static DECLARE_WORK(destruction, destroy);

static int run(struct ib_qp *qp)
{
	queue_work(system_dfl_wq, &destruction);
	/* The socket is closed, and the peer's callback runs here. */
	ib_drain_qp(qp);
	flush_work(&destruction);
	return 0;
}

MODULE_DESCRIPTION("Reproducer: a QP is freed while a callback of its socket uses it");
