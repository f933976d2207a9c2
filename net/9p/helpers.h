/* SPDX-License-Identifier: GPL-2.0 */
/*
 * C for what Rust cannot express: inline functions, and members of types that are not bound.
 */
#ifndef NET_9P_HELPERS_H
#define NET_9P_HELPERS_H

#include <linux/fs.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/seq_file.h>

#include <net/9p/9p.h>
#include <net/9p/client.h>
#include <net/9p/transport.h>

struct fs_context;

const char *p9_helper_source(struct fs_context *fc);
const struct p9_rdma_opts *p9_helper_rdma_opts(struct fs_context *fc);
void p9_helper_req_get(struct p9_req_t *req);

#endif
