// SPDX-License-Identifier: GPL-2.0

#include <linux/in6.h>
#include <linux/inet.h>
#include <linux/module.h>
#include <linux/nvme-rdma.h>
#include <linux/rcupdate.h>
#include <linux/timer.h>
#include <net/net_namespace.h>

#include "helpers.h"

/* Parameters that module! declares have no bounds, and are not in sysfs. */
static bool replace;
module_param(replace, bool, 0444);
MODULE_PARM_DESC(replace, "Be rdma, in place of nvme-rdma.");

static int sig_limit_set(const char *val, const struct kernel_param *kp)
{
	return param_set_uint_minmax(val, kp, 1, NVME_RDMA_MAX_QUEUE_SIZE);
}

static const struct kernel_param_ops sig_limit_ops = {
	.set = sig_limit_set,
	.get = param_get_uint,
};

static unsigned int sig_limit = 1;
module_param_cb(sig_limit, &sig_limit_ops, &sig_limit, 0644);
MODULE_PARM_DESC(sig_limit, "Signal one SEND in so many, 1 to 256 (default: 1)");

static int copied_data_size_set(const char *val, const struct kernel_param *kp)
{
	return param_set_uint_minmax(val, kp, 0, 16384);
}

static const struct kernel_param_ops copied_data_size_ops = {
	.set = copied_data_size_set,
	.get = param_get_uint,
};

static unsigned int copied_data_size;
module_param_cb(copied_data_size, &copied_data_size_ops, &copied_data_size, 0644);
MODULE_PARM_DESC(copied_data_size, "Copy the data of writes of so many bytes at most, 0 to 16384 (default: 0)");

bool nvme_helper_replace(void)
{
	return replace;
}

u32 nvme_helper_sig_limit(void)
{
	return READ_ONCE(sig_limit);
}

u32 nvme_helper_copied_data_size(void)
{
	return READ_ONCE(copied_data_size);
}

/* Each has its own lock class, as one of them waits for others. */
void nvme_helper_init_works(struct work_struct *reset, work_func_t reset_fn,
			    struct work_struct *err, work_func_t err_fn,
			    struct delayed_work *reconnect, work_func_t reconnect_fn)
{
	INIT_WORK(reset, reset_fn);
	INIT_WORK(err, err_fn);
	INIT_DELAYED_WORK(reconnect, reconnect_fn);
}

void nvme_helper_call_async(async_func_t fn, void *data, size_t times)
{
	ASYNC_DOMAIN_EXCLUSIVE(domain);

	while (times--)
		async_schedule_domain(fn, data, &domain);
	async_synchronize_full_domain(&domain);
}

void nvme_helper_synchronize_rcu_tasks(void)
{
	synchronize_rcu_tasks();
}

enum nvme_ctrl_state nvme_helper_ctrl_state(struct nvme_ctrl *ctrl)
{
	return nvme_ctrl_state(ctrl);
}

void nvme_helper_get_ctrl(struct nvme_ctrl *ctrl)
{
	nvme_get_ctrl(ctrl);
}

void nvme_helper_put_ctrl(struct nvme_ctrl *ctrl)
{
	nvme_put_ctrl(ctrl);
}

void nvme_helper_auth_stop(struct nvme_ctrl *ctrl)
{
	nvme_auth_stop(ctrl);
}

/*
 * nvme_mpath_stop() does nothing where the log of ANA states was given up, and scan_work, which
 * ends after that, may queue ana_work again. That may start the timer.
 */
void nvme_helper_mpath_stop(struct nvme_ctrl *ctrl)
{
#ifdef CONFIG_NVME_MULTIPATH
	cancel_work_sync(&ctrl->ana_work);
	timer_shutdown_sync(&ctrl->anatt_timer);
#endif
}

unsigned long nvme_helper_get_virt_boundary(struct nvme_ctrl *ctrl, bool is_admin)
{
	return nvme_get_virt_boundary(ctrl, is_admin);
}

/* Adds the attempts to connect to their sum, before they are forgotten. */
void nvme_helper_reconnected(struct nvme_ctrl *ctrl)
{
	atomic_long_add(ctrl->nr_reconnects, &ctrl->acc_reconnects);
	ctrl->nr_reconnects = 0;
}

unsigned int nvme_helper_nr_io_queues(struct nvmf_ctrl_options *opts)
{
	return nvmf_nr_io_queues(opts);
}

/* Whether requests of a CPU that is online go by this hardware context. */
bool nvme_helper_has_online_cpu(struct blk_mq_tag_set *set, unsigned int hctx)
{
	unsigned int i, cpu;

	for (i = 0; i < set->nr_maps; i++)
		for_each_online_cpu(cpu)
			if (set->map[i].mq_map[cpu] == hctx)
				return true;
	return false;
}

int nvme_helper_addr(const char *addr, const char *port, u8 ip[16], u16 *num, u32 *scope)
{
	struct sockaddr_storage parsed = {};
	struct sockaddr_in *v4 = (struct sockaddr_in *)&parsed;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&parsed;
	int ret;

	ret = inet_pton_with_scope(&init_net, AF_UNSPEC, addr, port, &parsed);
	if (ret)
		return ret;
	if (parsed.ss_family == AF_INET) {
		memcpy(ip, &v4->sin_addr, sizeof(v4->sin_addr));
		*num = be16_to_cpu(v4->sin_port);
		return 0;
	}
	memcpy(ip, &v6->sin6_addr, sizeof(v6->sin6_addr));
	*num = be16_to_cpu(v6->sin6_port);
	*scope = v6->sin6_scope_id;
	return 1;
}

/* Returns 0 if the request was started, NVME_HELPER_NOT_READY or a blk_status_t if not. */
int nvme_helper_begin_request(struct nvme_ctrl *ctrl, struct nvme_ns *ns, struct request *rq,
			      bool queue_live)
{
	blk_status_t status;

	if (!nvme_check_ready(ctrl, rq, queue_live))
		return NVME_HELPER_NOT_READY;
	status = nvme_setup_cmd(ns, rq);
	if (status == BLK_STS_OK)
		nvme_start_request(rq);
	return (__force int)status;
}

/*
 * A command that connects a queue, authenticates on it or accesses a property is not sent later:
 * who makes the queue, or ends the controller, waits for it.
 */
blk_status_t nvme_helper_fail_nonready_command(struct request *rq)
{
	if (blk_rq_is_passthrough(rq) && nvme_is_fabrics(nvme_req(rq)->cmd))
		return nvme_host_path_error(rq);
	return nvme_fail_nonready_command(nvme_req(rq)->ctrl, rq);
}

/*
 * nvme_try_complete_req() without blk_should_fake_timeout(), by which a request that nobody has
 * stays in flight.
 */
void nvme_helper_end_request(struct request *rq, __le16 status, __le64 result)
{
	struct nvme_request *req = nvme_req(rq);

	req->genctr++;
	req->status = le16_to_cpu(status) >> 1;
	req->result.u64 = result;
	nvme_should_fail(rq);
	if (!blk_mq_complete_request_remote(rq))
		nvme_complete_rq(rq);
}

/* A request without segments may have a length, as one that writes zeroes. */
unsigned int nvme_helper_rq_payload_bytes(struct request *rq)
{
	return blk_rq_nr_phys_segments(rq) ? blk_rq_payload_bytes(rq) : 0;
}

/* Copies at most as many bytes of a request's data. */
void nvme_helper_copy_data(struct request *rq, void *to, unsigned int len)
{
	struct req_iterator iter;
	struct bio_vec bvec;

	if (rq->rq_flags & RQF_SPECIAL_PAYLOAD) {
		bvec = rq->special_vec;
		bvec.bv_len = min(bvec.bv_len, len);
		memcpy_from_bvec(to, &bvec);
		return;
	}
	rq_for_each_segment(bvec, rq, iter) {
		bvec.bv_len = min(bvec.bv_len, len);
		memcpy_from_bvec(to, &bvec);
		to += bvec.bv_len;
		len -= bvec.bv_len;
	}
}

/* Returns the number of entries, one at least, or an error number. */
int nvme_helper_map_data(struct request *rq, struct sg_table *table, struct scatterlist *first)
{
	int ret = -EINVAL;

	table->sgl = first;
	if (blk_rq_nr_phys_segments(rq))
		ret = sg_alloc_table_chained(table, blk_rq_nr_phys_segments(rq), first,
					     NVME_INLINE_SG_CNT);
	return ret ?: blk_rq_map_sg(rq, table->sgl);
}
