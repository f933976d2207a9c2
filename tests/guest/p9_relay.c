// SPDX-License-Identifier: GPL-2.0
/*
 * A 9P server for RDMA: what it receives goes to a server of TCP, and what that replies goes back. Or it
 * does not keep to the protocol.
 *
 *   p9_relay ADDR PORT SERVER_PORT [HOW [COUNT]]
 *
 * Serves one connection to its end, or with "deaf" keeps who asks for one waiting. From the COUNTth reply on, which is
 * the first one otherwise, it misbehaves by HOW: see misbehave(). Or it does not relay what it should: see keep().
 */
#include <arpa/inet.h>
#include <endian.h>
#include <err.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <rdma/rdma_verbs.h>

#define DEPTH 64
#define MAX_REQUEST (256 * 1024)
#define MAX_MESSAGE (1024 * 1024)
#define MAX_READS 8

enum { HEADER = 7, TVERSION = 100, TFLUSH = 108, TREAD = 116 };

static char (*requests)[MAX_REQUEST], *reply;
/* Whoever sends a reply has its memory, and the next completion. */
static pthread_mutex_t replying = PTHREAD_MUTEX_INITIALIZER;
static struct ibv_mr *requests_mr, *reply_mr;
static struct rdma_cm_id *id;
static const char *how = "";
static int count, reads, server = -1;

static int is(const char *name)
{
	return !strcmp(how, name);
}

static void check(int rc, const char *what)
{
	if (rc)
		err(1, "%s", what);
}

static uint32_t size_of(const char *message)
{
	uint32_t size;

	memcpy(&size, message, sizeof(size));
	return le32toh(size);
}

static void set_size(char *message, uint32_t size)
{
	size = htole32(size);
	memcpy(message, &size, sizeof(size));
}

static void set_tag(char *message, uint16_t tag)
{
	tag = htole16(tag);
	memcpy(message + 5, &tag, sizeof(tag));
}

static uint16_t tag_of(const char *message)
{
	uint16_t tag;

	memcpy(&tag, message + 5, sizeof(tag));
	return le16toh(tag);
}

/* Returns whether all were transferred: if not, that end is gone. */
static int write_all(const char *bytes, size_t len)
{
	for (ssize_t n; len; bytes += n, len -= n) {
		n = send(server, bytes, len, MSG_NOSIGNAL);
		if (n <= 0)
			return 0;
	}
	return 1;
}

static int read_all(char *bytes, size_t len)
{
	return recv(server, bytes, len, MSG_WAITALL) == (ssize_t)len;
}

/* Returns the tag of what a flush names. */
static uint16_t flushed_by(const char *message)
{
	uint16_t tag;

	memcpy(&tag, message + HEADER, sizeof(tag));
	return le16toh(tag);
}

static int send_reply(size_t len)
{
	struct ibv_wc wc;

	if (rdma_post_send(id, NULL, reply, len, reply_mr, IBV_SEND_SIGNALED))
		return 0;
	return rdma_get_send_comp(id, &wc) > 0 && wc.status == IBV_WC_SUCCESS;
}

/* Sends a reply by HOW; returns 0 if the connection is over. */
static int misbehave(uint32_t size)
{
	uint16_t tag = tag_of(reply);

	if (is("silent")) {
		warnx("silent");
		return 1;
	}
	if (is("vanish"))
		_exit(0);
	if (is("disconnect")) {
		rdma_disconnect(id);
		return 0;
	}
	if (is("twice"))
		return send_reply(size) && send_reply(size);
	/* Until the peer has had enough of it. */
	if (is("flood")) {
		while (send_reply(size))
			;
		return 0;
	}
	if (is("unknown"))
		set_tag(reply, tag ^ 0x155);
	/* Of "untagged", where the tag is that of the first request, which has had none. */
	if (is("notag") || (is("untagged") && !tag))
		set_tag(reply, 0xffff);
	if (is("type"))
		reply[4] = 1;
	if (is("header"))
		size = 5;
	if (is("empty"))
		size = 0;
	if (is("shorter"))
		set_size(reply, size + 1);
	if (is("longer"))
		set_size(reply, size - 1);
	/* More than the request has room for. */
	if (is("long")) {
		memset(reply + size, 0, 100000);
		size += 100000;
		set_size(reply, size);
	}
	/* More than there is room for at all. */
	if (is("huge")) {
		size = MAX_MESSAGE;
		set_size(reply, size);
	}
	return send_reply(size);
}

/* Relays the replies. */
static void *replies(void *unused)
{
	char begin[4];
	int sent = 1;

	while (sent && read_all(begin, sizeof(begin))) {
		uint32_t size = size_of(begin);

		if (size < HEADER || size > MAX_MESSAGE)
			break;
		pthread_mutex_lock(&replying);
		memcpy(reply, begin, sizeof(begin));
		sent = read_all(reply + sizeof(begin), size - sizeof(begin)) &&
		       (*how && --count < 0 ? misbehave(size) : send_reply(size));
		pthread_mutex_unlock(&replying);
	}
	rdma_disconnect(id);
	return unused;
}

/* Flushes the queues when the peer disconnects. */
static void *watch(void *unused)
{
	int over = id->event->event == RDMA_CM_EVENT_DISCONNECTED;
	struct rdma_cm_event *event;

	while (!over && !rdma_get_cm_event(id->channel, &event)) {
		over = event->event == RDMA_CM_EVENT_DISCONNECTED;
		rdma_ack_cm_event(event);
	}
	rdma_disconnect(id);
	return unused;
}

/* Answers a request with so many zeroes. */
static void answer(const char *request, uint32_t len)
{
	pthread_mutex_lock(&replying);
	memset(reply, 0, HEADER + len);
	set_size(reply, HEADER + len);
	reply[4] = request[4] + 1;
	set_tag(reply, tag_of(request));
	if (!send_reply(HEADER + len))
		warnx("no reply was sent");
	pthread_mutex_unlock(&replying);
}

/*
 * As many reads are held as COUNT has, of which the peer flushes all but one, as many as it can at once, and then the
 * last one. When the next request comes, that read is answered. The first flush is answered only when that read's tag
 * was used again: the request that has it is held until the last flush has come, which must not name it. Returns
 * whether the request was held or answered here.
 */
static int overtake(const char *request)
{
	static char held[MAX_READS][64], flushes[MAX_READS][64], again[256];
	static int read_count, flush_count, is_answered, is_over;
	const char *other;

	if (is_over)
		return 0;
	if (request[4] == TREAD && read_count < reads) {
		memcpy(held[read_count++], request, HEADER);
		warnx("held");
		return 1;
	}
	if (request[4] == TFLUSH && flush_count < reads - 1) {
		memcpy(flushes[flush_count++], request, HEADER + 2);
		warnx("flushes");
		return 1;
	}
	if (flush_count < reads - 1)
		return 0;
	/* All but the last one were flushed. */
	other = held[reads - 1];
	if (request[4] == TFLUSH) {
		warnx(flushed_by(request) == tag_of(other) ? "another request is flushed" : "nothing is flushed");
		for (int i = 1; i < flush_count; i++)
			answer(flushes[i], 0);
		answer(request, 0);
		is_over = 1;
		if (size_of(again) && !write_all(again, size_of(again)))
			warnx("no request was sent");
		return 1;
	}
	if (!is_answered) {
		answer(other, 4);
		is_answered = 1;
	} else if (tag_of(request) == tag_of(other) && size_of(request) <= sizeof(again)) {
		memcpy(again, request, size_of(request));
		warnx("held again");
		answer(flushes[0], 0);
		return 1;
	}
	return 0;
}

/* A read is held until it was flushed, and is answered when the next request comes. */
static int answer_late(const char *request)
{
	static char held[64];
	static int is_flushed;

	if (request[4] == TREAD && !size_of(held)) {
		memcpy(held, request, HEADER);
		warnx("held");
		return 1;
	}
	if (is_flushed) {
		answer(held, 4);
		is_flushed = 0;
	}
	if (request[4] == TFLUSH)
		is_flushed = 1;
	return 0;
}

/* Reads are held, and the first flush. */
static int lose_flush(const char *request)
{
	static int is_lost;

	if (request[4] == TREAD) {
		warnx("held");
		return 1;
	}
	if (request[4] != TFLUSH || is_lost)
		return 0;
	is_lost = 1;
	warnx("lost");
	return 1;
}

/* Returns whether a request is not to be relayed, so that its reply never comes, unless it is flushed. */
static int keep(const char *request)
{
	if (is("mute") && request[4] == TFLUSH)
		warnx("flushes %u", flushed_by(request));
	if ((is("hold") && request[4] == TREAD) || (is("mute") && request[4] == TVERSION)) {
		warnx("held");
		return 1;
	}
	return (is("overtake") && overtake(request)) || (is("late") && answer_late(request)) ||
	       (is("noflush") && lose_flush(request));
}

static void post_recv(void *request)
{
	if (rdma_post_recv(id, request, request, MAX_REQUEST, requests_mr))
		warn("post receive");
}

static void serve(int port)
{
	struct sockaddr_in addr = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	struct rdma_conn_param param = { .retry_count = 3, .rnr_retry_count = 7 };
	pthread_t watcher, replier;
	struct ibv_wc wc;
	int on = 1;

	server = socket(AF_INET, SOCK_STREAM, 0);
	check(connect(server, (void *)&addr, sizeof(addr)), "connect to the server");
	setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	requests_mr = rdma_reg_msgs(id, requests, (size_t)DEPTH * MAX_REQUEST);
	reply_mr = rdma_reg_msgs(id, reply, MAX_MESSAGE + 100000);
	if (!requests_mr || !reply_mr)
		err(1, "register memory");
	for (int i = 0; i < DEPTH; i++)
		post_recv(requests[i]);
	check(rdma_accept(id, &param), "accept");
	check(pthread_create(&watcher, NULL, watch, NULL), "watch");
	check(pthread_create(&replier, NULL, replies, NULL), "replies");
	while (rdma_get_recv_comp(id, &wc) > 0 && wc.status == IBV_WC_SUCCESS) {
		char *request = (char *)(uintptr_t)wc.wr_id;

		if (size_of(request) != wc.byte_len)
			errx(1, "a request of %u bytes that says %u", wc.byte_len, size_of(request));
		if (!keep(request) && !write_all(request, wc.byte_len))
			break;
		post_recv(request);
	}
	shutdown(server, SHUT_RDWR);
	rdma_disconnect(id);
	pthread_join(replier, NULL);
}

int main(int argc, char **argv)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *res;
	struct ibv_qp_init_attr attr = {
		.cap = {
			.max_send_wr = 8, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1,
		},
	};
	struct rdma_cm_id *listener;

	if (argc < 4)
		errx(1, "usage: p9_relay ADDR PORT SERVER_PORT [HOW [COUNT]]");
	if (argc > 4)
		how = argv[4];
	if (argc > 5)
		count = reads = atoi(argv[5]);
	if (reads > MAX_READS && is("overtake"))
		errx(1, "at most %d reads", MAX_READS);
	requests = malloc((size_t)DEPTH * MAX_REQUEST);
	reply = malloc(MAX_MESSAGE + 100000);
	if (!requests || !reply)
		err(1, "memory");
	check(rdma_getaddrinfo(argv[1], argv[2], &hints, &res), "address");
	check(rdma_create_ep(&listener, res, NULL, &attr), "create endpoint");
	check(rdma_listen(listener, 4), "listen");
	check(rdma_get_request(listener, &id), "connect request");
	if (is("deaf")) {
		warnx("asked");
		pause();
	}
	serve(atoi(argv[3]));
	return 0;
}
