/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The cost of an RDMA ULP: the twin in C of the benchmark in Rust beside it. Same
 * loads, same buffers, same posting pattern, same control files.
 */

#ifndef PERF_H
#define PERF_H

#include <linux/completion.h>
#include <linux/if_ether.h>
#include <linux/socket.h>
#include <linux/timekeeping.h>
#include <linux/types.h>
#include <rdma/ib_verbs.h>

#define PERF_NAME	"rdma_perf_c"
#define PERF_PORT	1		/* of the device */
#define PERF_SAMPLES	65536		/* that are kept of a run */
#define PERF_STUCK	(10 * HZ)	/* without progress, before a run is given up */
#define PERF_TIMEOUT	20		/* 4.3 s: late is not lost */

/* The polling contexts. The caller polls in the first three. */
enum perf_context {
	PERF_DIRECT,
	PERF_STATIC,	/* as PERF_DIRECT: C knows no other dispatch */
	PERF_BATCH,
	PERF_SOFTIRQ,
	PERF_WORKQUEUE,
	PERF_UNBOUND_WORKQUEUE,
};

struct perf_args {
	const struct perf_load *load;
	enum perf_context context;
	char device[IB_DEVICE_NAME_MAX];
	char peer[IB_DEVICE_NAME_MAX];
	u32 size;
	u32 depth;
	u32 signal;
	u32 qps;
	u32 count;
	u32 warmup;
	u32 timeout;
	u32 port;
	u32 hold;
	struct sockaddr_storage addr;	/* with its port */
};

struct perf_result {
	u64 ops;
	u64 ns;
	u64 post_ns;
	u64 poll_ns;
	u64 posts;
	u64 setup_ns;
	u64 teardown_ns;
	u64 completions;
	u64 errors;
};

/* A buffer that is mapped until it is freed. */
struct perf_buf {
	void *mem;
	struct ib_sge sge;
	enum dma_data_direction dir;
};

/* Waits for so many completions of requests whose callback is @cqe. */
struct perf_mark {
	struct ib_cqe cqe;
	atomic_t left;
	struct completion done;
};

/* One of the two ends. Its CQ serves all its QPs, for sends and receives. */
struct perf_end {
	struct ib_device *dev;
	struct ib_pd *pd;
	struct ib_cq *cq;
	struct ib_qp **qps;
	u32 sends;		/* requests that a QP can have outstanding */
	u32 recvs;
	u32 transfers;		/* by rdma_rw, so many at once */
	struct perf_buf buf;	/* what the other end may read and write by the MR */
	struct ib_mr *mr;
	struct perf_mark registered;
};

struct perf_run {
	/*
	 * Of the phase that is running. Written by handlers of a.cq only,
	 * which never run at the same time.
	 */
	u32 left;		/* requests that are to be posted again */
	u32 progress;		/* changes now and then */
	u64 end;

	u64 *samples;
	u32 *held;		/* while it is not 0, everything is kept */
	bool measuring;		/* not warming up */
	void *priv;		/* the load's */
	enum ib_wr_opcode opcode;
	u32 signal;
	u64 remote_addr;
	u32 rkey;

	const struct perf_args *args;
	u32 nr_qps;
	struct perf_end a;
	struct perf_end b;
	struct completion finished;
	int error;
	bool linked;		/* all QPs are connected: something may be posted */
	bool draining;
	atomic_t errors;
	struct perf_mark drained;
	struct perf_result *result;
};

struct perf_load {
	const char *name;
	enum ib_wr_opcode opcode;
	bool pair;		/* B is there */
	bool by_load;		/* the load makes and connects QPs */
	bool holds;		/* it can keep everything */
	bool samples;		/* each operation is timed */
	u32 max_size;

	/* Sets the number of QPs and their size. */
	void (*shape)(struct perf_run *run);
	/* The QPs are connected: make what is posted, post receives. */
	int (*init)(struct perf_run *run);
	/* Do so many operations and wait for them; fill in the result. */
	int (*go)(struct perf_run *run, u32 ops);
	/* The QPs are drained. Called whether or not @init has been, or was successful. */
	void (*exit)(struct perf_run *run);
};

extern const struct perf_load perf_send_lat, perf_write_lat, perf_read_lat;
extern const struct perf_load perf_send_rate, perf_write_rate, perf_read_rate;
extern const struct perf_load perf_void_rate, perf_bare_rate, perf_reg_rate;
extern const struct perf_load perf_queue_rate, perf_pool_rate;
extern const struct perf_load perf_call_rate, perf_tag_rate, perf_rw_read_rate, perf_rw_write_rate;
extern const struct perf_load perf_connect_rate, perf_qp_rate, perf_cq_rate;

int perf_args_parse(struct perf_args *args, char *text);

int perf_devices_init(void);
void perf_devices_exit(void);
struct ib_device *perf_device_get(const char *name);
void perf_device_put(struct ib_device *dev);

int perf_end_init(struct perf_run *run, struct perf_end *end, struct ib_device *dev);
void perf_end_exit(struct perf_end *end);
int perf_buf_init(struct perf_buf *buf, const struct perf_end *end, u32 size,
		  enum dma_data_direction dir);
void perf_buf_exit(struct perf_buf *buf, const struct perf_end *end);
struct ib_mr *perf_mr_alloc(const struct perf_end *end, const struct perf_buf *buf);
int perf_region_init(struct perf_run *run, struct perf_end *end, u32 size);
void perf_region_exit(struct perf_end *end);

struct ib_cq *perf_cq_alloc(struct perf_run *run, struct ib_device *dev, u32 cqes);

/* The addresses of packets to and from an end. */
struct perf_way {
	union ib_gid gid;
	u8 mac[ETH_ALEN];
	int index;
	bool roce;
};

int perf_find_way(struct ib_device *dev, struct perf_way *way);
struct ib_qp *perf_create_qp(const struct perf_end *end);
int perf_connect_to_none(struct ib_qp *qp, const struct perf_way *way);
int perf_link_init(struct perf_run *run);
void perf_qp_drain(struct perf_run *run, struct ib_qp *qp);
void perf_link_drain(struct perf_run *run);
void perf_link_exit(struct perf_run *run);

int perf_run(const struct perf_args *args, struct perf_result *result, u64 *samples, u32 *held);
int perf_hold(struct perf_run *run);
int perf_setup_go(struct perf_run *run, u32 ops, int (*set_up)(struct perf_run *run, u32 i),
		  int (*take_down)(struct perf_run *run, u32 i));
void perf_fail(struct perf_run *run, const char *what, int error);
void perf_failed_wc(struct perf_run *run, const struct ib_wc *wc);

void perf_mark_init(struct perf_mark *mark, int left,
		    void (*done)(struct ib_cq *cq, struct ib_wc *wc));
void perf_mark_hit(struct perf_mark *mark);
int perf_mark_wait(struct perf_run *run, struct perf_mark *mark, unsigned long timeout);

static inline bool perf_caller_polls(const struct perf_run *run)
{
	return run->args->context <= PERF_BATCH;
}

/*
 * Returns whether a request is to be posted again, of which @left are left.
 * The last one of all ends the phase.
 */
static inline bool perf_goes_on(struct perf_run *run, u32 *left)
{
	if (likely(--*left % 64))
		return true;
	WRITE_ONCE(run->progress, run->progress + 1);
	if (*left)
		return true;
	if (!--run->left) {
		run->end = ktime_get_ns();
		complete(&run->finished);
	}
	return false;
}

/* The range of request @i of @nr within @total. */
static inline u32 perf_share(u32 total, u32 i, u32 nr)
{
	return total / nr + (i < total % nr);
}

#endif
