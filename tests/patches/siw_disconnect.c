// SPDX-License-Identifier: GPL-2.0
/* Destroys the QP of an id that another thread disconnects. */

#include <linux/delay.h>

#include "siw.h"

static void disconnect(struct work_struct *work)
{
	rdma_disconnect(server);
}

static DECLARE_WORK(disconnection, disconnect);

static int run(struct ib_qp *qp)
{
	schedule_work(&disconnection);
	msleep(50);
	ib_drain_qp(server->qp);
	rdma_destroy_qp(server);
	flush_work(&disconnection);
	return 0;
}

MODULE_DESCRIPTION("Reproducer: a QP that is disconnected is used after it was freed");
