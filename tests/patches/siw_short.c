// SPDX-License-Identifier: GPL-2.0
/* Reads a few bytes across the end of a page: none may come that the peer has not registered. */

#include "siw.h"

#define TEXT "0123"
#define LEN (sizeof(TEXT) - 1)

static int run(struct ib_qp *qp)
{
	char *pages = kzalloc(2 * PAGE_SIZE, GFP_KERNEL), *sink = kzalloc(LEN + 1, GFP_KERNEL);
	char *text = pages + PAGE_SIZE - (LEN - 1);
	struct scatterlist sg;
	struct ib_mr *mr;
	int ret;

	if (!pages || !sink)
		return -ENOMEM;
	strscpy(pages, "secret", PAGE_SIZE);
	memcpy(text, TEXT, LEN);
	mr = page_register(&sg, text, 0, IB_ACCESS_REMOTE_READ);
	if (IS_ERR(mr))
		return PTR_ERR(mr);
	ret = read_and_wait(qp, mr, sink, LEN);
	if (!ret && request_status != IB_WC_SUCCESS)
		ret = -EIO;
	if (!ret && strcmp(sink, TEXT)) {
		pr_err("siw_short: the peer reads \"%s\" of \"%s\"\n", sink, TEXT);
		ret = -EIO;
	}
	page_deregister(&sg, mr);
	kfree(sink);
	kfree(pages);
	return ret;
}

MODULE_DESCRIPTION("Reproducer: a short message across the end of a page");
