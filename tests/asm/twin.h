/* SPDX-License-Identifier: GPL-2.0 */
#ifndef TWIN_H
#define TWIN_H

#include <rdma/ib_verbs.h>

struct message {
	struct ib_cqe cqe;
	u64 addr;
	u32 length;
};

struct conn {
	struct ib_qp *qp;
};

void message_completed(struct message *message, u32 byte_len);
void message_failed(struct message *message, int error);
void c_post_recv(struct conn *conn, struct message *message);
void c_post_send(struct conn *conn, struct message *message);
void c_post_write(struct conn *conn, struct message *message, u64 addr, u32 rkey);
void c_done(struct ib_cq *cq, struct ib_wc *wc);

#endif
