// SPDX-License-Identifier: GPL-2.0

#include "helpers.h"

enum dma_data_direction nvmet_helper_data_dir(struct nvmet_req *req)
{
	return nvmet_data_dir(req);
}
