// SPDX-License-Identifier: GPL-2.0

#include <linux/fs_context.h>

#include "helpers.h"

const char *p9_helper_source(struct fs_context *fc)
{
	return fc->source;
}

const struct p9_rdma_opts *p9_helper_rdma_opts(struct fs_context *fc)
{
	struct v9fs_context *ctx = fc->fs_private;

	return &ctx->rdma_opts;
}

void p9_helper_req_get(struct p9_req_t *req)
{
	p9_req_get(req);
}
