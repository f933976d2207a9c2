/* SPDX-License-Identifier: GPL-2.0 */
/* Common part of the reproducers for ib_cm: a request. */

#include "ends.h"
#include <rdma/ib_cm.h>

#define SERVICE cpu_to_be64(0x1000000012345678ULL)

/* Requests go to the device itself or, with a HOST, to that one in the device's network. */
static u8 request_host;

/* Sends a request: again RETRIES times, after 4 us * 2^TIMEOUT each. */
static inline int request(struct ib_cm_id *id, u8 timeout, u8 retries)
{
	const struct ib_gid_attr *gid = device_gid(id->device);
	static u32 qp_num = 0x123;
	struct sa_path_rec path = {
		.rec_type = SA_PATH_REC_TYPE_ROCE_V2,
		.dgid = gid->gid,
		.sgid = gid->gid,
		.service_id = SERVICE,
		.hop_limit = 64,
		.reversible = 1,
		.numb_path = 1,
		.pkey = cpu_to_be16(0xffff),
		.mtu_selector = IB_SA_EQ,
		.mtu = IB_MTU_1024,
		.rate_selector = IB_SA_EQ,
		.rate = IB_RATE_10_GBPS,
		.packet_life_time_selector = IB_SA_EQ,
	};
	struct ib_cm_req_param param = {
		.primary_path = &path,
		.ppath_sgid_attr = gid,
		.service_id = SERVICE,
		.qp_num = qp_num++,
		.qp_type = IB_QPT_RC,
		.remote_cm_response_timeout = timeout,
		.local_cm_response_timeout = timeout,
		.retry_count = 7,
		.rnr_retry_count = 7,
		.max_cm_retries = retries,
	};
	int ret = rdma_read_gid_l2_fields(gid, NULL, path.roce.dmac);

	if (request_host)
		path.dgid.raw[15] = request_host;
	path.roce.dmac[5] ^= request_host;
	ret = ret ?: ib_send_cm_req(id, &param);
	rdma_put_gid_attr(gid);
	return ret;
}
