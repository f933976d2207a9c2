/* SPDX-License-Identifier: GPL-2.0 */
/*
 * C for what Rust cannot express: inline functions of nvmet.h and of the
 * kernel, and module parameters that are in sysfs.
 */
#ifndef NVMET_HELPERS_H
#define NVMET_HELPERS_H

#include "nvmet.h"

/* percpu_ref_tryget_live(), percpu_ref_put() of a submission queue. */
bool nvmet_helper_sq_tryget(struct nvmet_sq *sq);
void nvmet_helper_sq_put(struct nvmet_sq *sq);

/*
 * Undoes a Connect command that has connected the queue of a request to a controller of another
 * port, or to one that has failed, and has it fail. Returns whether it has. May sleep.
 */
bool nvmet_helper_undo_connect(struct nvmet_req *req);

/* The number of receives of a shared receive queue, 0 if there are to be none. */
u32 nvmet_helper_srq_size(void);

/* One response in so many is signaled. */
u32 nvmet_helper_sig_limit(void);

/* The memory of reads of so many bytes at most is kept. */
u32 nvmet_helper_kept_data_size(void);

/* flush_workqueue(nvmet_wq) */
void nvmet_helper_flush_wq(void);

/*
 * Parses the address of a port (inet_pton_with_scope()): returns 1 if it is
 * one of IPv6, 0 if it is one of IPv4, of 4 bytes, or an error.
 */
int nvmet_helper_port_addr(const struct nvmet_port *port, u8 ip[16],
			   u16 *num, u32 *scope);

#endif
