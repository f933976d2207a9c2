// SPDX-License-Identifier: GPL-2.0

//! Receives of a QP that are posted again when their message was handled.

use crate::{
    context::Context,
    cqe,
    dma::CpuView,
    prelude::*,
    wc::Success, //
};
use core::ops::Deref;

/// A connection whose receives are a [`RecvRing`].
///
/// Each receive has a reference to the connection, which has its QP, until it is flushed: a
/// connection must be disconnected, or its QP drained, and not just dropped.
pub trait RecvHandler: Send + Sync + Sized + 'static {
    /// The context that the QP's sends complete in.
    type Send: PollContext;
    /// The context that the QP's receives complete in.
    type Recv: Provides<Self::Needs>;
    /// The context that [`RecvHandler::received`] needs.
    type Needs: Context;

    /// Returns the QP of the connection.
    fn qp(&self) -> &Arc<Qp<Self::Send, Self::Recv>>;

    /// Handles a message, whose receive is posted again when `message` is dropped.
    fn received(message: Received<'_, Self>, cx: &Self::Needs);

    /// A receive has failed, mostly as it was flushed: the connection is over. Called for each
    /// receive, in the context of the CQ. A work item that is started here gets a reference by
    /// `Arc::from(self)`.
    fn failed(self: ArcBorrow<'_, Self>, error: WcError);

    /// A receive could not be posted again: end the connection, by
    /// [`Id::disconnect_later`](cm::Id::disconnect_later) for example. Any context. Not called if
    /// the driver does not say whether it has refused the receive: it may complete.
    fn refused(self: ArcBorrow<'_, Self>, error: Error);
}

/// The receives of a connection: as many buffers of one length.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, session::{Received, RecvHandler, RecvRing}};
///
/// struct Conn {
///     id: cm::Id,
///     qp: Arc<Qp<Softirq>>,
/// }
///
/// impl RecvHandler for Conn {
///     type Send = Softirq;
///     type Recv = Softirq;
///     type Needs = Atomic;
///
///     fn qp(&self) -> &Arc<Qp<Softirq>> {
///         &self.qp
///     }
///
///     fn received(mut message: Received<'_, Self>, _cx: &Atomic) {
///         let (conn, bytes) = message.open();
///         if bytes.first() != Some(&1) {
///             conn.id.disconnect_later();
///         }
///     }
///
///     fn failed(self: ArcBorrow<'_, Self>, error: WcError) {
///         pr_info!("a receive has failed: {}\n", error.status);
///     }
///
///     fn refused(self: ArcBorrow<'_, Self>, _error: Error) {
///         self.id.disconnect_later();
///     }
/// }
///
/// /// Posts 32 receives, before the connection is made.
/// fn prepare(conn: &Arc<Conn>, pd: &Pd, cx: &Sleepable) -> Result {
///     RecvRing { pd, count: 32, len: 256 }.post(conn, cx)
/// }
/// ```
pub struct RecvRing<'a> {
    /// The PD of the QP.
    pub pd: &'a Pd,
    /// The number of receives: at most [`Caps::recv_wr`] of the QP.
    pub count: u32,
    /// The length of each buffer, in bytes.
    pub len: usize,
}

impl RecvRing<'_> {
    /// Allocates the receives and posts them, once, before the connection is made. Fails with
    /// `ENOMEM`, `EINVAL` for a length of zero, or `EIO`, and nothing is posted; or as
    /// [`Qp::post_recv`]: what was posted before stays so until the QP is drained.
    pub fn post<T: RecvHandler>(&self, conn: &Arc<T>, cx: &Sleepable) -> Result {
        let mut recvs = KVec::with_capacity(self.count as usize, GFP_KERNEL)?;
        for _ in 0..self.count {
            let recv = KBox::new_uninit(GFP_KERNEL)?;
            let buf = Buf::alloc(self.pd, self.len, cx)?;
            let recv = recv.write(Recv {
                cqe: Cqe::new(),
                buf,
                conn: conn.clone(),
            });
            recvs.push_within_capacity(Pin::from(recv))?;
        }
        for recv in recvs {
            conn.qp().post_recv(recv, Recv::wr)?;
        }
        Ok(())
    }
}

/// The owner of a receive.
struct Recv<T> {
    cqe: Cqe<Self>,
    buf: Buf<FromDevice>,
    conn: Arc<T>,
}

impl<T> cqe::HasCqe for Recv<T> {
    const FIELD: cqe::Field<Self, 0> = crate::cqe_field!(cqe);
}

impl<T: RecvHandler> CqeHandler for Recv<T> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = T::Needs;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, cx: &T::Needs) {
        match wc.result() {
            Ok(success) => {
                let len = match success.opcode() {
                    // The number of bytes that were written elsewhere.
                    Opcode::RecvRdmaWithImm => 0,
                    _ => success.byte_len(),
                };
                let recv = ManuallyDrop::new(this);
                // INVARIANT: The owner was just given back.
                let message = ManuallyDrop::new(Kept { recv, len });
                T::received(Received { message, success }, cx);
            }
            Err(error) => failed(this, error),
        }
    }
}

impl<T: RecvHandler> Recv<T> {
    #[inline]
    fn wr(&self) -> Result<RecvWr<'_>> {
        Ok(RecvWr::new([self.buf.whole_mut()]))
    }
}

/// Tells the connection that a receive has failed. Not inlined, so that nothing is saved for it
/// when a message has come.
#[cold]
#[inline(never)]
fn failed<T: RecvHandler>(recv: Pin<KBox<Recv<T>>>, error: WcError) {
    recv.conn.as_arc_borrow().failed(error);
}

/// Tells the connection that a receive was not posted again.
#[cold]
#[inline(never)]
fn refused<T: RecvHandler>(refused: PostError<Pin<KBox<Recv<T>>>>) {
    let error = refused.error();
    if let Some(recv) = refused.owner {
        recv.conn.as_arc_borrow().refused(error);
    }
}

/// The bytes of a message, for the CPU.
pub struct RecvBytes<'a> {
    view: CpuView<'a>,
    len: usize,
}

impl Deref for RecvBytes<'_> {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // A message is no longer than its buffer.
        self.view.get(..self.len).unwrap_or(&[])
    }
}

/// A message that has come. Dropping it posts its receive again ([`Qp::repost_recv`]).
///
/// # Invariants
///
/// `message` was not taken. This is invariant in `T`, as `Recv` embeds its callback.
pub struct Received<'a, T: RecvHandler> {
    message: ManuallyDrop<Kept<T>>,
    success: Success<'a>,
}

impl<'a, T: RecvHandler> Received<'a, T> {
    /// Returns the connection.
    #[inline]
    pub fn conn(&self) -> &Arc<T> {
        self.message.conn()
    }

    /// Returns the completion.
    #[inline]
    pub fn wc(&self) -> &Success<'a> {
        &self.success
    }

    /// Returns the connection, and the bytes that were received; none if the peer has written
    /// elsewhere, with immediate data.
    #[inline]
    pub fn open(&mut self) -> (&Arc<T>, RecvBytes<'_>) {
        self.message.open()
    }

    /// Keeps the message beyond the handler.
    #[inline]
    pub fn keep(self) -> Kept<T> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: By the type invariant `message` is there. `this` is not used or dropped again.
        unsafe { ManuallyDrop::take(&mut this.message) }
    }
}

impl<T: RecvHandler> Drop for Received<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: Neither `message` nor its `recv` was taken, by their invariants, and `message`,
        // which is not dropped, is not used after this.
        let recv = unsafe { ManuallyDrop::take(&mut self.message.recv) };
        let wc = self.success.wc;
        Qp::repost_recv(recv, wc, |recv| recv.conn.qp(), Recv::wr).unwrap_or_else(refused);
    }
}

/// A message that was kept beyond its handler. It withholds a receive from the peer; when it is
/// dropped, in any context and thread, the receive is posted again. Where a caller polls, the last
/// one is dropped before the QP is drained: what is posted to it afterwards stays in the CQ.
///
/// # Invariants
///
/// `recv` was not taken. This is invariant in `T`, as `Recv` embeds its callback.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, session::{Kept, Received, RecvHandler}};
///
/// /// Leaves what takes long to a work item.
/// fn later<T: RecvHandler>(client: &ClientRef, message: Received<'_, T>) -> Result {
///     let mut kept: Kept<T> = message.keep();
///     client.spawn(GFP_ATOMIC, move |_cx| {
///         let len = kept.open().1.len();
///         pr_info!("{} bytes on QP {}\n", len, kept.conn().qp().num());
///     })
/// }
/// ```
pub struct Kept<T: RecvHandler> {
    recv: ManuallyDrop<Pin<KBox<Recv<T>>>>,
    len: usize,
}

impl<T: RecvHandler> Kept<T> {
    /// Returns the connection.
    #[inline]
    pub fn conn(&self) -> &Arc<T> {
        &self.recv.conn
    }

    /// Returns the connection, and the bytes that were received.
    #[inline]
    pub fn open(&mut self) -> (&Arc<T>, RecvBytes<'_>) {
        let (recv, len) = (&mut **self.recv, self.len);
        let view = recv.buf.cpu();
        (&recv.conn, RecvBytes { view, len })
    }
}

impl<T: RecvHandler> Drop for Kept<T> {
    fn drop(&mut self) {
        // SAFETY: `recv` was not taken, by the type invariant, and is not used after this.
        let recv = unsafe { ManuallyDrop::take(&mut self.recv) };
        // The receive takes its reference along, and may have completed before the call returns.
        let qp = recv.conn.qp().clone();
        qp.post_recv(recv, Recv::wr).unwrap_or_else(refused);
    }
}
