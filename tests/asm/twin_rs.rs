// SPDX-License-Identifier: GPL-2.0

//! The hot paths of a ULP: a post to each queue, and a completion. `twin_c.c` does the same in C;
//! `scripts/checks/asm` compares the machine code. Never loaded.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::{
        Chain,
        QpContext, //
    }, //
};

/// The owner of a request.
#[repr(C)]
#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
}

/// The owner of two messages.
#[repr(C)]
#[derive(HasCqe)]
struct Pair {
    cqe: Cqe<Self>,
    bufs: [Buf<Bidirectional>; 2],
}

/// The owner of a registration and of the message that advertises it.
#[repr(C)]
#[derive(HasCqe)]
struct Io {
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
    region: Region<Bidirectional>,
}

/// The owner of a request that finds its connection when it completes.
#[repr(C)]
#[derive(HasCqe)]
struct Answer {
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
}

/// The part of a connection that posts.
struct Conn {
    qp: Qp<Softirq>,
}

#[expect(improper_ctypes)]
extern "C" {
    fn message_completed(message: *mut Message, byte_len: u32);
    fn message_failed(message: *mut Message, error: c_int);
    fn pair_failed(owner: *mut Pair, error: c_int);
    fn io_failed(owner: *mut Io, error: c_int);
    fn answer_completed(conn: *const Conn, answer: *mut Answer);
    fn answer_failed(answer: *mut Answer);
}

/// Hands an owner over to code that both twins share.
fn into_raw<T: Unpin>(owner: Pin<KBox<T>>) -> *mut T {
    KBox::into_raw(Pin::into_inner(owner))
}

/// Hands a message over that has completed.
#[inline]
fn complete(message: Pin<KBox<Message>>, wc: &Wc) {
    match wc.result() {
        // SAFETY: Compared, never run.
        Ok(wc) => unsafe { message_completed(into_raw(message), wc.byte_len() as u32) },
        // SAFETY: Compared, never run.
        Err(e) => unsafe { message_failed(into_raw(message), e.status.as_raw() as c_int) },
    }
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        complete(this, wc);
    }
}

impl CqeHandler for Answer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = QpContext<Conn>;

    fn done(this: Self::Pointer, _wc: &Wc, cx: &QpContext<Conn>) {
        match cx.get() {
            // SAFETY: Compared, never run.
            Some(conn) => unsafe { answer_completed(conn, into_raw(this)) },
            // SAFETY: Compared, never run.
            None => unsafe { answer_failed(into_raw(this)) },
        }
    }
}

impl CqeHandler for Pair {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

impl CqeHandler for Io {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

/// Posts a receive.
#[no_mangle]
extern "C" fn rust_post_recv(conn: &Conn, message: Pin<KBox<Message>>) {
    if let Err(e) = conn
        .qp
        .post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))
    {
        let errno = e.error().to_errno();
        let owner = e.owner.map_or(core::ptr::null_mut(), into_raw);
        // SAFETY: Compared, never run.
        unsafe { message_failed(owner, errno) }
    }
}

/// Posts a send.
#[no_mangle]
extern "C" fn rust_post_send(conn: &Conn, message: Pin<KBox<Message>>) {
    if let Err(e) = conn
        .qp
        .post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))
    {
        let errno = e.error().to_errno();
        let owner = e.owner.map_or(core::ptr::null_mut(), into_raw);
        // SAFETY: Compared, never run.
        unsafe { message_failed(owner, errno) }
    }
}

/// Posts an RDMA WRITE.
#[no_mangle]
extern "C" fn rust_post_write(conn: &Conn, message: Pin<KBox<Message>>, addr: u64, rkey: u32) {
    let remote = Remote { addr, rkey };
    let posted = conn
        .qp
        .post_send(message, |m| Ok(SendWr::rdma_write([m.buf.whole()], remote)));
    if let Err(e) = posted {
        let errno = e.error().to_errno();
        let owner = e.owner.map_or(core::ptr::null_mut(), into_raw);
        // SAFETY: Compared, never run.
        unsafe { message_failed(owner, errno) }
    }
}

/// Posts a message several times.
#[no_mangle]
extern "C" fn rust_post_times(conn: &Conn, message: Pin<KBox<Message>>, times: u32) {
    let mut batch = conn.qp.batch(message);
    for _ in 1..times {
        let posted =
            batch.post(|m, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([m.buf.whole()])));
        if let Err(e) = posted {
            // SAFETY: Compared, never run.
            return unsafe { message_failed(core::ptr::null_mut(), e.to_errno()) };
        }
    }
    let posted =
        batch.finish(|m, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([m.buf.whole()])));
    if let Err(e) = posted {
        let owner = batch.into_error(e).owner;
        // SAFETY: Compared, never run.
        unsafe { message_failed(owner.map_or(core::ptr::null_mut(), into_raw), e.to_errno()) }
    }
}

/// Posts a chain of two messages.
#[no_mangle]
extern "C" fn rust_post_pair(conn: &Conn, pair: Pin<KBox<Pair>>) {
    let posted = conn.qp.post_chain(pair, |p, chain: &mut Chain<'_, 2>| {
        chain.push(SendWr::send([p.bufs[0].whole()]))?;
        chain.push(SendWr::send([p.bufs[1].whole()]))
    });
    if let Err(e) = posted {
        let errno = e.error().to_errno();
        let owner = e.owner.map_or(core::ptr::null_mut(), into_raw);
        // SAFETY: Compared, never run.
        unsafe { pair_failed(owner, errno) }
    }
}

/// Posts a chain of a registration and the message that tells of it.
#[no_mangle]
extern "C" fn rust_post_io(conn: &Conn, io: Pin<KBox<Io>>) {
    let posted = conn.qp.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
        chain.push(RegWr::remote_write(&io.region))?;
        chain.push(SendWr::send([io.buf.whole()]))
    });
    if let Err(e) = posted {
        let errno = e.error().to_errno();
        let owner = e.owner.map_or(core::ptr::null_mut(), into_raw);
        // SAFETY: Compared, never run.
        unsafe { io_failed(owner, errno) }
    }
}

/// As above, where the message has the key.
#[no_mangle]
extern "C" fn rust_post_key(conn: &Conn, io: Pin<KBox<Io>>) {
    let posted = conn.qp.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
        let remote = chain.push(RegWr::remote_write(&io.region))?;
        io.buf.write(0, &remote.rkey.to_le_bytes())?;
        chain.push(SendWr::send([io.buf.whole()]))
    });
    if let Err(e) = posted {
        let errno = e.error().to_errno();
        let owner = e.owner.map_or(core::ptr::null_mut(), into_raw);
        // SAFETY: Compared, never run.
        unsafe { io_failed(owner, errno) }
    }
}

/// Handles a completion, that of a message without an indirect call.
fn handle(completion: cq::Completion<'_>) {
    match completion.take::<Message, 0>() {
        Ok((message, wc)) => complete(message, wc),
        Err(other) => other.dispatch(),
    }
}

/// Processes completions in the order of a CQ.
#[no_mangle]
extern "C" fn rust_process(cq: &Cq<Direct>, budget: u32) -> u32 {
    cq.process_with(budget, handle).unwrap_or(0)
}

/// Polls without handlers.
#[no_mangle]
extern "C" fn rust_poll(cq: &Cq<Direct>) {
    let mut batch = WcArray::<16>::new();
    while cq.poll(&mut batch).is_ok_and(|n| n != 0) {
        batch.completions().for_each(handle);
    }
}

/// The callback that the RDMA core calls; see `Cqe`.
#[no_mangle]
static RUST_DONE: Cqe<Message> = Cqe::new();

/// That of an answer.
#[no_mangle]
static RUST_ANSWERED: Cqe<Answer> = Cqe::new();
