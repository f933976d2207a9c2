/* SPDX-License-Identifier: GPL-2.0 */
/*
 * C for what Rust cannot express: inline functions of nvme.h, fabrics.h and blk-mq.h, some of which
 * are others with other options of the kernel.
 */
#ifndef NVME_HELPERS_H
#define NVME_HELPERS_H

#include <linux/blk-mq.h>
#include <linux/scatterlist.h>

#include "nvme.h"
#include "fabrics.h"

enum nvme_ctrl_state nvme_helper_ctrl_state(struct nvme_ctrl *ctrl);
void nvme_helper_get_ctrl(struct nvme_ctrl *ctrl);
void nvme_helper_put_ctrl(struct nvme_ctrl *ctrl);
void nvme_helper_auth_stop(struct nvme_ctrl *ctrl);
unsigned int nvme_helper_nr_io_queues(struct nvmf_ctrl_options *opts);

struct nvme_request *nvme_helper_req(struct request *rq);
bool nvme_helper_check_ready(struct nvme_ctrl *ctrl, struct request *rq, bool queue_live);
void nvme_helper_start_request(struct request *rq);
bool nvme_helper_try_complete_req(struct request *rq, __le16 status, union nvme_result result);
void nvme_helper_complete_timed_out_request(struct request *rq);
bool nvme_helper_is_aen_req(u16 qid, u16 command_id);

enum dma_data_direction nvme_helper_rq_dma_dir(struct request *rq);
unsigned int nvme_helper_rq_payload_bytes(struct request *rq);
unsigned short nvme_helper_rq_nr_phys_segments(struct request *rq);
int nvme_helper_rq_map_sg(struct request *rq, struct scatterlist *list);

#endif
