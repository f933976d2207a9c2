/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The headers of the RDMA bindings. bindgen binds what they declare themselves; all other types are those of
 * `kernel::bindings`.
 */

#include <linux/completion.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_cm.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_cm.h>
#include <rdma/rw.h>

#include "helpers.h"
