// SPDX-License-Identifier: GPL-2.0

//! The hot paths of a ULP: a post to each queue, and a completion. `twin_c.c` does the same in C;
//! `scripts/asm` compares the machine code. Never loaded.

use kernel::prelude::*;
use rdma::prelude::*;

/// What is posted.
#[repr(C)]
#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
}

/// What a connection posts with.
struct Conn {
    qp: Qp<Softirq>,
}

#[expect(improper_ctypes)]
extern "C" {
    fn message_completed(message: *mut Message, byte_len: u32);
    fn message_failed(message: *mut Message, error: c_int);
}

/// Hands a message over to code that both twins share.
fn into_raw(message: Pin<KBox<Message>>) -> *mut Message {
    KBox::into_raw(Pin::into_inner(message))
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        match wc.result() {
            // SAFETY: Compared, never run.
            Ok(wc) => unsafe { message_completed(into_raw(this), wc.byte_len() as u32) },
            // SAFETY: As above.
            Err(e) => unsafe { message_failed(into_raw(this), e.status.as_raw() as c_int) },
        }
    }
}

/// Posts a receive.
#[no_mangle]
extern "C" fn rust_post_recv(conn: &Conn, message: Pin<KBox<Message>>) {
    if let Err(e) = conn
        .qp
        .post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))
    {
        // SAFETY: As above.
        unsafe { message_failed(into_raw(e.owner), e.error.to_errno()) }
    }
}

/// Posts a send.
#[no_mangle]
extern "C" fn rust_post_send(conn: &Conn, message: Pin<KBox<Message>>) {
    if let Err(e) = conn
        .qp
        .post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))
    {
        // SAFETY: As above.
        unsafe { message_failed(into_raw(e.owner), e.error.to_errno()) }
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
        // SAFETY: As above.
        unsafe { message_failed(into_raw(e.owner), e.error.to_errno()) }
    }
}

/// The callback that the RDMA core calls; see `Cqe`.
#[no_mangle]
static RUST_DONE: Cqe<Message> = Cqe::new();
