// SPDX-License-Identifier: GPL-2.0

#include "helpers.h"

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

unsigned int nvme_helper_nr_io_queues(struct nvmf_ctrl_options *opts)
{
	return nvmf_nr_io_queues(opts);
}

struct nvme_request *nvme_helper_req(struct request *rq)
{
	return nvme_req(rq);
}

bool nvme_helper_check_ready(struct nvme_ctrl *ctrl, struct request *rq, bool queue_live)
{
	return nvme_check_ready(ctrl, rq, queue_live);
}

void nvme_helper_start_request(struct request *rq)
{
	nvme_start_request(rq);
}

bool nvme_helper_try_complete_req(struct request *rq, __le16 status, union nvme_result result)
{
	return nvme_try_complete_req(rq, status, result);
}

void nvme_helper_complete_timed_out_request(struct request *rq)
{
	nvmf_complete_timed_out_request(rq);
}

bool nvme_helper_is_aen_req(u16 qid, u16 command_id)
{
	return nvme_is_aen_req(qid, command_id);
}

enum dma_data_direction nvme_helper_rq_dma_dir(struct request *rq)
{
	return rq_dma_dir(rq);
}

unsigned int nvme_helper_rq_payload_bytes(struct request *rq)
{
	return blk_rq_payload_bytes(rq);
}

unsigned short nvme_helper_rq_nr_phys_segments(struct request *rq)
{
	return blk_rq_nr_phys_segments(rq);
}

int nvme_helper_rq_map_sg(struct request *rq, struct scatterlist *list)
{
	return blk_rq_map_sg(rq, list);
}
