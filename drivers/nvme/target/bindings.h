/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The headers from which bindgen makes the bindings of an NVMe target: what <linux/nvme*.h> and the
 * private header of drivers/nvme/target declare is bound.
 */

#include "nvmet.h"
#include <linux/nvme-rdma.h>

#include "helpers.h"
