// SPDX-License-Identifier: GPL-2.0

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/inet.h>
#include <linux/module.h>
#include <linux/percpu-refcount.h>
#include <linux/workqueue.h>
#include <net/ipv6.h>

#include "helpers.h"

/* Parameters that module! declares are not in sysfs. */
static bool use_srq;
module_param(use_srq, bool, 0444);
MODULE_PARM_DESC(use_srq, "Use shared receive queue.");

static int srq_size_set(const char *val, const struct kernel_param *kp)
{
	return param_set_uint_minmax(val, kp, 256, UINT_MAX);
}

static const struct kernel_param_ops srq_size_ops = {
	.set = srq_size_set,
	.get = param_get_uint,
};

static unsigned int srq_size = 1024;
module_param_cb(srq_size, &srq_size_ops, &srq_size, 0644);
MODULE_PARM_DESC(srq_size, "set Shared Receive Queue (SRQ) size, should >= 256 (default: 1024)");

static int sig_limit_set(const char *val, const struct kernel_param *kp)
{
	return param_set_uint_minmax(val, kp, 1, 128);
}

static const struct kernel_param_ops sig_limit_ops = {
	.set = sig_limit_set,
	.get = param_get_uint,
};

static unsigned int sig_limit = 16;
module_param_cb(sig_limit, &sig_limit_ops, &sig_limit, 0644);
MODULE_PARM_DESC(sig_limit, "Signal one response in so many, 1 to 128 (default: 16)");

static int kept_data_size_set(const char *val, const struct kernel_param *kp)
{
	return param_set_uint_minmax(val, kp, 0, 16384);
}

static const struct kernel_param_ops kept_data_size_ops = {
	.set = kept_data_size_set,
	.get = param_get_uint,
};

static unsigned int kept_data_size = 4096;
module_param_cb(kept_data_size, &kept_data_size_ops, &kept_data_size, 0644);
MODULE_PARM_DESC(kept_data_size, "Keep the memory of reads of so many bytes at most, 0 to 16384 (default: 4096)");

u32 nvmet_helper_sig_limit(void)
{
	return READ_ONCE(sig_limit);
}

u32 nvmet_helper_kept_data_size(void)
{
	return READ_ONCE(kept_data_size);
}

u32 nvmet_helper_srq_size(void)
{
	return use_srq ? READ_ONCE(srq_size) : 0;
}

bool nvmet_helper_sq_tryget(struct nvmet_sq *sq)
{
	return percpu_ref_tryget_live(&sq->ref);
}

void nvmet_helper_sq_put(struct nvmet_sq *sq)
{
	percpu_ref_put(&sq->ref);
}

bool nvmet_helper_undo_connect(struct nvmet_req *req)
{
	struct nvmet_ctrl *ctrl = req->sq->ctrl;

	if (!ctrl)
		return false;
	/* nvmet_ctrl_fatal_error() has ended the queues that there were. */
	if (ctrl->port == req->port && !(READ_ONCE(ctrl->csts) & NVME_CSTS_CFS))
		return false;
	/* As nvmet_cq_destroy() and nvmet_sq_destroy(), each of which has a reference. */
	ctrl->cqs[req->cq->qid] = NULL;
	req->cq->ctrl = NULL;
	nvmet_ctrl_put(ctrl);
	ctrl->sqs[req->sq->qid] = NULL;
	req->sq->ctrl = NULL;
	nvmet_ctrl_put(ctrl);
	req->cqe->result.u32 = 0;
	req->cqe->status = cpu_to_le16((NVME_SC_CONNECT_INVALID_PARAM | NVME_STATUS_DNR) << 1);
	return true;
}

void nvmet_helper_flush_wq(void)
{
	flush_workqueue(nvmet_wq);
}

int nvmet_helper_port_addr(const struct nvmet_port *port, u8 ip[16],
			   u16 *num, u32 *scope)
{
	struct sockaddr_storage addr = {};
	struct sockaddr_in *v4 = (struct sockaddr_in *)&addr;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&addr;
	int af, ret;

	switch (port->disc_addr.adrfam) {
	case NVMF_ADDR_FAMILY_IP4:
		af = AF_INET;
		break;
	case NVMF_ADDR_FAMILY_IP6:
		af = AF_INET6;
		break;
	default:
		pr_err("address family %d not supported\n",
		       port->disc_addr.adrfam);
		return -EINVAL;
	}
	ret = inet_pton_with_scope(&init_net, af, port->disc_addr.traddr,
				   port->disc_addr.trsvcid, &addr);
	if (ret) {
		pr_err("malformed ip/port passed: %s:%s\n",
		       port->disc_addr.traddr, port->disc_addr.trsvcid);
		return ret;
	}
	if (af == AF_INET) {
		memcpy(ip, &v4->sin_addr, sizeof(v4->sin_addr));
		*num = be16_to_cpu(v4->sin_port);
	} else {
		memcpy(ip, &v6->sin6_addr, sizeof(v6->sin6_addr));
		*num = be16_to_cpu(v6->sin6_port);
		*scope = v6->sin6_scope_id;
	}
	return af == AF_INET6;
}
