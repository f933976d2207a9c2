/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The headers from which bindgen makes the bindings of an NVMe host: what <linux/nvme*.h> and the
 * private headers of drivers/nvme/host declare is bound.
 */

#include "nvme.h"
#include "fabrics.h"
#include <linux/nvme-rdma.h>

#include "helpers.h"
