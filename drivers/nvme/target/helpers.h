/* SPDX-License-Identifier: GPL-2.0 */
/*
 * C for what Rust cannot express: inline functions of nvmet.h.
 */
#ifndef NVMET_HELPERS_H
#define NVMET_HELPERS_H

#include "nvmet.h"

enum dma_data_direction nvmet_helper_data_dir(struct nvmet_req *req);

#endif
