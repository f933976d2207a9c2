/* SPDX-License-Identifier: GPL-2.0 */
/*
 * C for what Rust cannot express: inline functions and macros of nvme.h, fabrics.h, blk-mq.h,
 * async.h and workqueue.h, some of which are others with other options of the kernel, and module
 * parameters that have bounds and are in sysfs.
 */
#ifndef NVME_HELPERS_H
#define NVME_HELPERS_H

#include <linux/async.h>
#include <linux/blk-mq.h>
#include <linux/scatterlist.h>
#include <linux/workqueue.h>

#include "nvme.h"
#include "fabrics.h"

/* These have a type that bindgen does not evaluate. */
enum {
	NVME_HELPER_STS_OK = (__force int)BLK_STS_OK,
	NVME_HELPER_STS_RESOURCE = (__force int)BLK_STS_RESOURCE,
	NVME_HELPER_STS_IOERR = (__force int)BLK_STS_IOERR,
	NVME_HELPER_NOT_READY = -1,
};

/* The transport is "rdma", in place of nvme-rdma's. */
bool nvme_helper_replace(void);

/* One SEND in so many is signaled. */
u32 nvme_helper_sig_limit(void);

/* Data of writes of so many bytes at most are copied. */
u32 nvme_helper_copied_data_size(void);

void nvme_helper_init_works(struct work_struct *reset, work_func_t reset_fn,
			    struct work_struct *err, work_func_t err_fn,
			    struct delayed_work *reconnect, work_func_t reconnect_fn);

/*
 * Calls a function so many times, at the same time or, without memory for that, one after another.
 * Returns when all calls have returned.
 */
void nvme_helper_call_async(async_func_t fn, void *data, size_t times);

enum nvme_ctrl_state nvme_helper_ctrl_state(struct nvme_ctrl *ctrl);
void nvme_helper_get_ctrl(struct nvme_ctrl *ctrl);
void nvme_helper_put_ctrl(struct nvme_ctrl *ctrl);
void nvme_helper_synchronize_rcu_tasks(void);
void nvme_helper_auth_stop(struct nvme_ctrl *ctrl);
void nvme_helper_mpath_stop(struct nvme_ctrl *ctrl);
unsigned long nvme_helper_get_virt_boundary(struct nvme_ctrl *ctrl, bool is_admin);
void nvme_helper_reconnected(struct nvme_ctrl *ctrl);
unsigned int nvme_helper_nr_io_queues(struct nvmf_ctrl_options *opts);
bool nvme_helper_has_online_cpu(struct blk_mq_tag_set *set, unsigned int hctx);

/*
 * Parses an address, and a port unless that is NULL (inet_pton_with_scope()): returns 1 if it is
 * one of IPv6, 0 if it is one of IPv4, of 4 bytes, or an error.
 */
int nvme_helper_addr(const char *addr, const char *port, u8 ip[16], u16 *num, u32 *scope);

int nvme_helper_begin_request(struct nvme_ctrl *ctrl, struct nvme_ns *ns, struct request *rq,
			      bool queue_live);
blk_status_t nvme_helper_fail_nonready_command(struct request *rq);
void nvme_helper_end_request(struct request *rq, __le16 status, __le64 result);

unsigned int nvme_helper_rq_payload_bytes(struct request *rq);
void nvme_helper_copy_data(struct request *rq, void *to, unsigned int len);
int nvme_helper_map_data(struct request *rq, struct sg_table *table, struct scatterlist *first);

#endif
