// SPDX-License-Identifier: GPL-2.0

//! Receives of a QP that are posted again when their message was handled.

use crate::{
    atomic::{
        AtomicBool,
        AtomicU32,
        Ordering, //
    },
    context::Context,
    cqe::{
        self,
        Cqe,
        CqeHandler,
        Queue, //
    },
    debug,
    dma::{
        Buf,
        Bufs,
        FromDevice, //
    },
    message::RecvBytes,
    pd::Pd,
    prelude::internal::*,
    qp::{
        self,
        Qp, //
    },
    wc::{
        Success,
        Wc,
        WcError, //
    },
    wr::{
        PostError,
        RecvWr, //
    }, //
};
use core::{
    cell::UnsafeCell,
    ops::Deref, //
};

/// A connection whose receives are a [`RecvRing`].
///
/// Each receive has a reference to the connection and its QP until it is flushed: a connection must
/// be disconnected, or its QP drained, and not just dropped. A receive that the device loses is not
/// flushed; it drops both in [`Qp::drain`], unless a message is [kept](Kept), or completions
/// were polled into a [`WcArray`]. Where a drain fails, as a device completes nothing, all do in
/// [`Qp::release_recvs`].
///
/// [`WcArray`]: crate::cq::WcArray
pub trait RecvHandler: Send + Sync + Sized + 'static {
    /// The context that the QP's sends complete in.
    type Send: PollContext;
    /// The context that the QP's receives complete in.
    type Recv: Provides<Self::Needs>;
    /// The context that [`RecvHandler::received`] needs.
    type Needs: Context;

    /// Returns the QP of the connection.
    fn qp(&self) -> &Qp<Self::Send, Self::Recv>;

    /// Handles a message, whose receive is posted again when `message` is dropped.
    fn received(message: Received<'_, Self>, cx: &Self::Needs);

    /// A receive has failed, mostly as it was flushed: the connection is over. Called for each
    /// receive, in the context of the CQ. A work item that is started here gets a reference by
    /// `Arc::from(self)`.
    fn failed(self: ArcBorrow<'_, Self>, error: WcError);

    /// A receive could not be posted again: end the connection, by
    /// [`Id::disconnect_later`](crate::cm::Id::disconnect_later) for example. Any context. Not
    /// called if the driver does not say whether it has refused the receive: it may complete.
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
///     qp: Qp<Softirq>,
/// }
///
/// impl RecvHandler for Conn {
///     type Send = Softirq;
///     type Recv = Softirq;
///     type Needs = context::Atomic;
///
///     fn qp(&self) -> &Qp<Softirq> {
///         &self.qp
///     }
///
///     fn received(mut message: Received<'_, Self>, _cx: &context::Atomic) {
///         let (conn, bytes) = message.open();
///         if !matches!(bytes.header::<u8>(), Ok((1, _payload))) {
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
    ///
    /// [`Caps::recv_wr`]: crate::qp::Caps::recv_wr
    pub count: u32,
    /// The length of each buffer, in bytes.
    pub len: usize,
}

impl RecvRing<'_> {
    /// Allocates the receives and posts them, once, before the connection is made. Fails with
    /// `ENOMEM`, `EINVAL` for a length of zero, or `EIO`, and nothing is posted; or as
    /// [`Qp::post_recv`]: what was posted before stays so until the QP is drained.
    pub fn post<T: RecvHandler>(&self, conn: &Arc<T>, cx: &Sleepable) -> Result {
        let qp = conn.qp();
        let withheld = Arc::new(AtomicU32::new(self.count), GFP_KERNEL)?;
        let mut table = Table {
            recvs: KVVec::with_capacity(self.count as usize, GFP_KERNEL | __GFP_NOWARN)?,
            withheld: withheld.clone(),
            suspects: AtomicBool::new(false),
        };
        let mut bufs = Bufs::new(self.pd, self.count as usize, self.len, cx)?;
        for _ in 0..self.count {
            let recv = Recv {
                cqe: UnsafeCell::new(Cqe::new()),
                buf: bufs.take(cx)?,
                conn: UnsafeCell::new(ManuallyDrop::new(conn.clone())),
                qp: UnsafeCell::new(ManuallyDrop::new(qp.clone())),
                ended: AtomicBool::new(false),
                withheld: withheld.clone(),
            };
            table.recvs.push_within_capacity(UnsafeCell::new(recv))?;
        }
        let first = NonNull::from(&mut *table.recvs).cast::<Recv<T>>();
        qp.keep_table(qp.place_of_recvs(cx)?, table);
        let mut result = Ok(());
        for index in 0..self.count as usize {
            // INVARIANT: The QP has the table, and does not end before the receive has. This is the
            // only `RecvRef`.
            //
            // SAFETY: The table has `count` receives; a cell is laid out as its content.
            let recv = RecvRef(unsafe { first.add(index) });
            let unposted = match result {
                Ok(()) => {
                    // SAFETY: The handle is borrowed for longer than the copy is used.
                    let qp = unsafe { qp.uncounted() };
                    match Qp::post_recv_counted(qp, recv, Recv::wr) {
                        Ok(()) => None,
                        Err(e) => {
                            result = Err(e.error());
                            e.owner
                        }
                    }
                }
                Err(_) => Some(recv),
            };
            drop(unposted.and_then(RecvRef::end));
            withheld.fetch_sub(1, Ordering::Release);
        }
        result
    }
}

/// The QP of a connection.
type QpOf<T> = Qp<<T as RecvHandler>::Send, <T as RecvHandler>::Recv>;

/// A receive.
///
/// # Invariants
///
/// Both references exist until the receive has ended. They are used by its [`RecvRef`], or by
/// `Table::end_lost`.
struct Recv<T: RecvHandler> {
    /// In a cell for [`cqe::ignore`].
    cqe: UnsafeCell<Cqe<Self>>,
    buf: Buf<FromDevice>,
    conn: UnsafeCell<ManuallyDrop<Arc<T>>>,
    qp: UnsafeCell<ManuallyDrop<QpOf<T>>>,
    /// The receive was flushed, refused or lost.
    ended: AtomicBool,
    /// That of the [`Table`].
    withheld: Arc<AtomicU32>,
}

// SAFETY: The fields in cells are used by one thread at a time, and are `Send` and `Sync`.
unsafe impl<T: RecvHandler> Sync for Recv<T> {}

impl<T: RecvHandler> cqe::HasCqe for Recv<T> {
    const FIELD: cqe::Field<Self, 0> = {
        // SAFETY: Both are of the field `cqe`, which is a cell, and so where its content is.
        unsafe {
            cqe::Field::new(cqe::offset_of!(Self, cqe), |this: *mut Self| {
                (&raw mut (*this).cqe).cast()
            })
        }
    };
}

/// The right to use a receive that has not ended: it is not posted.
///
/// # Invariants
///
/// The receive is valid and has not ended, and this is its only `RecvRef`.
struct RecvRef<T: RecvHandler>(NonNull<Recv<T>>);

// SAFETY: It is exclusive access to a buffer, and to references that are `Send`.
unsafe impl<T: RecvHandler> Send for RecvRef<T> {}
// SAFETY: A shared one gives shared access to these.
unsafe impl<T: RecvHandler> Sync for RecvRef<T> {}

impl<T: RecvHandler> Deref for RecvRef<T> {
    type Target = Recv<T>;

    #[inline]
    fn deref(&self) -> &Recv<T> {
        // SAFETY: By the type invariant the receive is valid.
        unsafe { self.0.as_ref() }
    }
}

impl<T: RecvHandler> RecvRef<T> {
    #[inline]
    fn conn(&self) -> &Arc<T> {
        // SAFETY: By the type invariant the receive has not ended, and only this ends it.
        unsafe { self.deref().conn() }
    }

    /// Ends the receive.
    fn end(self) -> Option<Ended<T>> {
        // SAFETY: By the type invariant the receive is valid, and this, its only `RecvRef`, is
        // consumed.
        unsafe { Recv::end(self.0) }
    }
}

// SAFETY: The receive stays in place, as the QP has its table and does not end before it, and is
// not modified while it is posted.
unsafe impl<T: RecvHandler> cqe::CqePointer<0> for RecvRef<T> {
    #[inline]
    fn into_ptr(self, _: cqe::Sealed) -> *mut Recv<T> {
        self.0.as_ptr()
    }

    #[inline]
    unsafe fn from_ptr(ptr: *mut Recv<T>) -> Self {
        // SAFETY: `ptr` is from `into_ptr`, as the caller promises, so it is not null.
        // INVARIANT: `into_ptr` has consumed the only `RecvRef`.
        Self(unsafe { NonNull::new_unchecked(ptr) })
    }
}

/// The references of a receive that has ended, which may be freed when the second is dropped.
struct Ended<T: RecvHandler> {
    conn: Arc<T>,
    _qp: QpOf<T>,
}

/// The receives of a ring, side by side, which the QP keeps until it is destroyed.
struct Table<T: RecvHandler> {
    recvs: KVVec<UnsafeCell<Recv<T>>>,
    /// The number of receives that were not posted yet, or that a [`Kept`] has.
    withheld: Arc<AtomicU32>,
    /// Set if receives that are out are lost unless another drain finds them.
    suspects: AtomicBool,
}

// SAFETY: It gives buffers, and references that are `Send`.
unsafe impl<T: RecvHandler> Send for Table<T> {}
// SAFETY: Threads share atomics. `Recv::end` gives the references of a receive to one of them.
unsafe impl<T: RecvHandler> Sync for Table<T> {}

impl<T: RecvHandler> Table<T> {
    fn recvs_out(&self) -> impl Iterator<Item = NonNull<Recv<T>>> + '_ {
        let is_out = |recv: &NonNull<Recv<T>>| {
            // SAFETY: The receive is one of the table; only this field is borrowed.
            !unsafe { &(*recv.as_ptr()).ended }.load(Ordering::Acquire)
        };
        let recvs = self
            .recvs
            .iter()
            .filter_map(|recv| NonNull::new(recv.get()));
        recvs.filter(is_out)
    }

    /// Ends the receives that are out, and ignored, should the device complete one before the QP is
    /// destroyed.
    ///
    /// # Safety
    ///
    /// There is no `RecvRef` of them, nor one given back by a completion.
    unsafe fn end_lost(&self) {
        for recv in self.recvs_out() {
            // SAFETY: The receive is one of the table, and its callback is in a cell. It has no
            // `RecvRef`, as the caller promises.
            let ended = unsafe {
                debug::deactivate(UnsafeCell::raw_get(&raw const (*recv.as_ptr()).cqe).cast());
                Recv::end(recv)
            };
            drop(ended);
        }
    }
}

impl<T: RecvHandler> qp::OnEnd for Table<T> {
    fn suspect(&self) -> bool {
        let withholds = self.withheld.load(Ordering::Acquire) != 0;
        let suspects = !withholds && self.recvs_out().next().is_some();
        self.suspects.store(suspects, Ordering::Relaxed);
        suspects
    }

    fn needs_marker(&self, queue: Queue) -> bool {
        let suspects = self.is_suspect();
        queue == Queue::Recv && suspects && self.recvs_out().next().is_some()
    }

    fn is_suspect(&self) -> bool {
        self.suspects.load(Ordering::Relaxed)
    }

    fn ignore(&self) {
        for recv in self.recvs_out() {
            // The receive may complete, and be posted again by its handler: `release` ends it when
            // the handlers that had begun have returned. No completion is in an array, nor stays in
            // one later, and where callers poll, the poll lock is held.
            //
            // SAFETY: The receive is one of the table, and its callback is in a cell.
            unsafe { cqe::ignore(UnsafeCell::raw_get(&raw const (*recv.as_ptr()).cqe).cast()) };
        }
    }

    fn drained(&self) {
        // SAFETY: The receives that are out were posted before the drain, whose marker was behind
        // them, so they are lost: there is no `RecvRef`.
        unsafe { self.end_lost() };
    }

    fn release(&self) -> bool {
        if self.withheld.load(Ordering::Acquire) != 0 {
            return false;
        }
        // SAFETY: Since `ignore` no completion gives a receive back: none was in an array, and
        // where callers poll, the lock was held. The handlers that had begun before have returned:
        // they have ended their receive, kept it or posted it again. None is kept or about to be
        // posted, so there is no `RecvRef`.
        unsafe { self.end_lost() };
        true
    }
}

impl<T: RecvHandler> Drop for Table<T> {
    fn drop(&mut self) {
        for recv in self.recvs_out() {
            // SAFETY: The receive is one of the table. As it has not ended, it was never posted:
            // then it had a reference of the QP, which is destroyed.
            drop(unsafe { Recv::end(recv) });
        }
    }
}

impl<T: RecvHandler> CqeHandler for Recv<T> {
    type Pointer = RecvRef<T>;
    type Needs = T::Needs;

    #[inline]
    fn done(this: Self::Pointer, wc: &Wc, cx: &T::Needs) {
        match wc.result() {
            Ok(success) => {
                let len = success.recv_len();
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
    /// # Safety
    ///
    /// The receive does not end while the result is used.
    #[inline]
    unsafe fn conn(&self) -> &Arc<T> {
        // SAFETY: The receive has not ended, as the caller promises, so this is valid.
        unsafe { &*self.conn.get() }
    }

    /// # Safety
    ///
    /// The receive does not end while the result is used.
    #[inline]
    unsafe fn qp(&self) -> &QpOf<T> {
        // SAFETY: The receive has not ended, as the caller promises, so this is valid.
        unsafe { &*self.qp.get() }
    }

    /// Ends a receive, once: `None` if it has ended. It may be freed when what is returned is
    /// dropped.
    ///
    /// # Safety
    ///
    /// The receive is valid, and is not used by a `RecvRef` from here on.
    unsafe fn end(this: NonNull<Self>) -> Option<Ended<T>> {
        // SAFETY: The receive is valid, as the caller promises. Its reference to the QP, which has
        // the table, keeps it until that is dropped.
        let this = unsafe { this.as_ref() };
        if this.ended.swap(true, Ordering::AcqRel) {
            return None;
        }
        // SAFETY: The receive had not ended, so it has both, and only this thread has ended it.
        // No `RecvRef` uses them, as the caller promises.
        Some(unsafe {
            Ended {
                conn: ManuallyDrop::take(&mut *this.conn.get()),
                _qp: ManuallyDrop::take(&mut *this.qp.get()),
            }
        })
    }

    #[inline]
    fn wr(&self) -> Result<RecvWr<'_>> {
        Ok(RecvWr::new([self.buf.whole_mut()]))
    }
}

/// Tells the connection that a receive has failed. Not inlined, so that nothing is saved for it
/// when a message has come.
#[cold]
fn failed<T: RecvHandler>(recv: RecvRef<T>, error: WcError) {
    if let Some(ended) = recv.end() {
        ended.conn.as_arc_borrow().failed(error);
    }
}

/// Tells the connection that a receive was not posted again.
#[cold]
fn refused<T: RecvHandler>(refused: PostError<RecvRef<T>>) {
    let error = refused.error();
    if let Some(ended) = refused.owner.and_then(RecvRef::end) {
        ended.conn.as_arc_borrow().refused(error);
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
        this.message.recv.withheld.fetch_add(1, Ordering::Relaxed);
        // SAFETY: By the type invariant `message` is valid. `this` is not used or dropped again.
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
        // SAFETY: By the invariant of `RecvRef` the receive has not ended.
        let posted = Qp::repost_recv(recv, wc, |recv| unsafe { recv.qp() }, Recv::wr);
        posted.unwrap_or_else(refused);
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
    recv: ManuallyDrop<RecvRef<T>>,
    len: usize,
}

impl<T: RecvHandler> Kept<T> {
    /// Returns the connection.
    #[inline]
    pub fn conn(&self) -> &Arc<T> {
        self.recv.conn()
    }

    /// Returns the connection, and the bytes that were received.
    #[inline]
    pub fn open(&mut self) -> (&Arc<T>, RecvBytes<'_>) {
        let recv = self.recv.0.as_ptr();
        let len = self.len;
        // Before the buffer is borrowed exclusively, as this borrows all of the receive.
        let conn = self.recv.conn();
        // SAFETY: By the invariant of `RecvRef` the receive is valid, and this, which is borrowed
        // exclusively, has the right to use it.
        let view = unsafe { (*recv).buf.cpu() };
        (conn, RecvBytes::new(view, len))
    }
}

impl<T: RecvHandler> Drop for Kept<T> {
    fn drop(&mut self) {
        // SAFETY: `recv` was not taken, by the type invariant, and is not used after this.
        let recv = unsafe { ManuallyDrop::take(&mut self.recv) };
        // The receive takes its reference along, and may have completed before the call returns.
        //
        // SAFETY: By the invariant of `RecvRef` the receive has not ended.
        let qp = unsafe { recv.qp() }.clone();
        let withheld = Arc::as_ptr(&recv.withheld);
        qp.post_recv(recv, Recv::wr).unwrap_or_else(refused);
        // SAFETY: `qp` keeps the QP, and that keeps the table until it is destroyed. The table has
        // a reference to the count.
        unsafe { (*withheld).fetch_sub(1, Ordering::Release) };
    }
}
