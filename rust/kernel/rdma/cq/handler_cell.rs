// SPDX-License-Identifier: GPL-2.0

//! State that the handlers of a CQ share without a lock.

use super::{
    Cq,
    Shared, //
};
use crate::{
    prelude::internal::*,
    wc::{
        self,
        Wc, //
    }, //
};
use core::cell::{
    Cell,
    UnsafeCell, //
};

/// A value that only the handlers of one CQ use, which borrow it without a lock: the CQ's poller
/// runs them one after the other. An example is the list of free responses of a connection whose
/// queues complete to one CQ.
///
/// A handler passes the completion that it was called with, whose address is compared. It has no
/// access (`EINVAL`) if it is one of another CQ, or one that may run beside others of this CQ:
/// those of completions in a [`WcArray`](super::WcArray), of a transfer or a request that the
/// device has lost, and of what C's drain of an SRQ polls. Neither has that of a local invalidation
/// ([`InvWr`](crate::mr::InvWr)) which has failed, if a caller has polled it: it gets a copy of the
/// completion. Such a handler does without: it drops what it would have put into the list.
///
/// The cell has a handle of the CQ.
///
/// # Invariants
///
/// - `array` is the one that the poller of the CQ of `_cq` dispatches from, and is valid while that
///   handle is. The CQ is not shared.
/// - `borrowed` and `value` are used by handlers of completions in `array`, which run one after the
///   other.
/// - While `borrowed` is set, one call of [`HandlerCell::with`] has the only reference to `value`.
/// - This is invariant in `T`, as handlers that share the cell change the value.
///
/// # Examples
///
/// ```
/// use rdma::{cq::HandlerCell, prelude::*, qp::QpContext};
///
/// struct Conn {
///     qp: Qp<Softirq>,
///     /// Responses that are not in use.
///     free: HandlerCell<KVec<Pin<KBox<Response>>>>,
/// }
///
/// #[derive(HasCqe)]
/// struct Response {
///     cqe: Cqe<Self>,
///     buf: Buf<ToDevice>,
/// }
///
/// impl CqeHandler for Response {
///     type Pointer = Pin<KBox<Self>>;
///     type Needs = QpContext<Conn>;
///
///     fn done(this: Self::Pointer, wc: &Wc, cx: &QpContext<Conn>) {
///         let Some(conn) = cx.get() else { return };
///         // One that finds no room is freed.
///         let _ = conn.free.with(wc, |free| free.push_within_capacity(this));
///     }
/// }
///
/// impl Conn {
///     fn new(qp: Qp<Softirq>, cq: &Cq<Softirq>, free: KVec<Pin<KBox<Response>>>) -> Result<Self> {
///         let free = HandlerCell::new(cq, free)?;
///         Ok(Self { qp, free })
///     }
///
///     /// Called in the handler of a request, whose completion is `wc`.
///     fn respond(&self, wc: &Wc) -> Result {
///         let response = self.free.with(wc, |free| free.pop())?.ok_or(ENOMEM)?;
///         Ok(self.qp.post_send(response, |r| Ok(SendWr::send([r.buf.whole()])))?)
///     }
/// }
/// ```
pub struct HandlerCell<T> {
    array: *const Wc,
    borrowed: Cell<bool>,
    value: UnsafeCell<T>,
    // Dropped last: the value may have a QP that completes to the CQ.
    _cq: Shared,
}

// SAFETY: The array is only compared with, and the rest is `Send`.
unsafe impl<T: Send> Send for HandlerCell<T> {}
// SAFETY: By the type invariant the handlers of one CQ use what is in cells, one after the other:
// all that one has done happened before the next one begins. They may run in any thread, and the
// value is `Send`.
unsafe impl<T: Send> Sync for HandlerCell<T> {}

impl<T> HandlerCell<T> {
    /// Makes a cell for the handlers of a CQ. Fails with `EINVAL` if that is
    /// [shared](Cq::pool_get), as then handlers may run at the same time.
    pub fn new<C: PollContext>(cq: &Cq<C>, value: T) -> Result<Self> {
        let array = cq.inner.poller();
        if array.is_null() {
            return Err(EINVAL);
        }
        // INVARIANT: This is the array of the poller of a CQ that is not shared, whose handle keeps
        // it. Nothing has borrowed the value.
        Ok(Self {
            array,
            borrowed: Cell::new(false),
            value: UnsafeCell::new(value),
            _cq: cq.inner.clone(),
        })
    }

    /// Lends the value to `f`, in a handler of the CQ, whose completion is `wc`. Any context.
    ///
    /// Fails with `EINVAL` if `wc` is not a completion that the CQ's poller is handling; with
    /// `EBUSY` if the caller was called by an `f` that has the value. Then `f` is dropped, with
    /// what it owns.
    #[inline]
    pub fn with<R>(&self, wc: &Wc, f: impl FnOnce(&mut T) -> R) -> Result<R> {
        if !wc.is_in(self.array) {
            wc::unlikely();
            return Err(EINVAL);
        }
        if self.borrowed.get() {
            wc::unlikely();
            return Err(EBUSY);
        }
        // INVARIANT: The caller, which borrows a completion in the array, is, or was called by, the
        // handler of that completion. So it is the only thread that uses the cell, and no other
        // call has a reference.
        self.borrowed.set(true);
        // SAFETY: By the type invariant this is the only reference to the value, as nothing had
        // borrowed it.
        let output = f(unsafe { &mut *self.value.get() });
        self.borrowed.set(false);
        Ok(output)
    }
}
