/* SPDX-License-Identifier: GPL-2.0 */
#ifndef TWIN_H
#define TWIN_H

#include <rdma/ib_verbs.h>

struct message {
	struct ib_cqe cqe;
	u64 addr;
	u32 length;
};

struct pair {
	struct ib_cqe cqe;
	u64 addr[2];
	u32 length[2];
};

struct io {
	struct ib_cqe cqe;
	u64 addr;
	u32 length;
	__le32 *message;
	struct ib_mr *mr;
};

struct conn {
	struct ib_qp *qp;
};

struct answer {
	struct ib_cqe cqe;
	u64 addr;
};

void message_completed(struct message *message, u32 byte_len);
void message_failed(struct message *message, int error);
void c_post_recv(struct conn *conn, struct message *message);
void c_post_send(struct conn *conn, struct message *message);
void c_post_write(struct conn *conn, struct message *message, u64 addr, u32 rkey);
void c_post_times(struct conn *conn, struct message *message, u32 times);
void pair_failed(struct pair *pair, int error);
void c_post_pair(struct conn *conn, struct pair *pair);
void io_failed(struct io *io, int error);
void c_post_io(struct conn *conn, struct io *io);
void c_post_key(struct conn *conn, struct io *io);
void answer_completed(struct conn *conn, struct answer *answer);
void c_answered(struct ib_cq *cq, struct ib_wc *wc);
void c_done(struct ib_cq *cq, struct ib_wc *wc);
int c_process(struct ib_cq *cq, int budget);
void c_poll(struct ib_cq *cq);

#endif
