/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The headers from which bindgen makes the RDMA bindings. Everything that they declare themselves
 * is bound; every other type is the one that `kernel::bindings` already has.
 */

#include <linux/completion.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_cm.h>
#include <rdma/ib_verbs.h>
#include <rdma/iw_cm.h>
#include <rdma/rdma_cm.h>
#include <rdma/rw.h>

#include "helpers.h"
