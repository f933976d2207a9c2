// SPDX-License-Identifier: GPL-2.0
/* Reads memory that its owner has registered for remote writing only: no byte of it may come. */

#include "siw.h"

#define SECRET "what a peer may not read"

static int run(struct ib_qp *qp)
{
	char *page = kzalloc(PAGE_SIZE, GFP_KERNEL), *sink = kzalloc(sizeof(SECRET), GFP_KERNEL);
	struct scatterlist sg;
	struct ib_mr *mr;
	int ret;

	if (!page || !sink)
		return -ENOMEM;
	strscpy(page, SECRET, PAGE_SIZE);
	mr = page_register(&sg, page, 0, IB_ACCESS_REMOTE_WRITE | IB_ACCESS_LOCAL_WRITE);
	if (IS_ERR(mr))
		return PTR_ERR(mr);
	ret = read_and_wait(qp, mr, sink, sizeof(SECRET));
	pr_info("siw_read: the READ completes with status %d\n", request_status);
	if (!ret && (request_status == IB_WC_SUCCESS || *sink)) {
		pr_err("siw_read: the peer has read \"%s\"\n", sink);
		ret = -EIO;
	}
	page_deregister(&sg, mr);
	kfree(sink);
	kfree(page);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a peer reads what is registered for writing");
