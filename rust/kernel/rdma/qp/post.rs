// SPDX-License-Identifier: GPL-2.0

//! Posting requests.

use super::Qp;
use crate::{
    bindings,
    context::{
        PollContext,
        Provides, //
    },
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    ledger,
    wr::{
        end,
        sg_list,
        AtomicWr,
        PostError,
        RecvWr,
        SendWr, //
    }, //
};
use core::mem::{
    ManuallyDrop,
    MaybeUninit, //
};
use kernel::prelude::*;

/// Refuses a request with entries of another PD.
#[cold]
fn foreign<P>(owner: P) -> PostError<P> {
    PostError::new(owner, EINVAL)
}

/// Gives back the owner of a request that was not made. Not inlined, as the error would be loaded
/// before it is known whether there is one.
#[cold]
#[inline(never)]
fn unmade<P>(owner: P, error: Error) -> PostError<P> {
    PostError::new(owner, error)
}

/// What a driver has said when it did not post a request, which was the only one.
#[derive(Clone, Copy)]
pub(crate) struct Refusal {
    ret: c_int,
    /// Whether the driver has named the request. Otherwise it may have queued it before it failed,
    /// as siw does.
    pub(crate) named: bool,
}

impl Refusal {
    /// # Safety
    ///
    /// `wr` is valid, and `ret` is what [`send_raw`] has returned for it, and not 0.
    #[inline]
    pub(crate) unsafe fn of_send(ret: c_int, wr: *mut bindings::ib_send_wr) -> Self {
        // SAFETY: `wr` is valid, as the caller promises. `send_raw` was given it without a
        // successor, and has given the driver nothing to name but it.
        let named = !unsafe { (*wr).next }.is_null();
        Self { ret, named }
    }

    /// # Safety
    ///
    /// `wr` is valid and had no successor, which was the place for the driver to name it; `ret` is
    /// what the driver has returned for it, and not 0.
    #[inline]
    pub(crate) unsafe fn of_recv(ret: c_int, wr: *mut bindings::ib_recv_wr) -> Self {
        // SAFETY: `wr` is valid, as the caller promises. It had no successor, and the driver has
        // been given nothing to name but it.
        let named = !unsafe { (*wr).next }.is_null();
        Self { ret, named }
    }

    /// A request that no driver has seen.
    #[cold]
    pub(crate) fn new(error: Error) -> Self {
        Self {
            ret: error.to_errno(),
            named: true,
        }
    }

    pub(crate) fn error(self) -> Error {
        Error::from_errno(self.ret)
    }

    /// Takes the owner of the request back, if the request was not posted.
    ///
    /// Never inlined: what has to be kept meanwhile would be saved by each post.
    ///
    /// # Safety
    ///
    /// `cqe` is from its owner, and the request was to give the owner back when it completes.
    #[cold]
    #[inline(never)]
    pub(crate) unsafe fn take_back<P, const ID: u64>(
        self,
        cqe: *mut bindings::ib_cqe,
    ) -> PostError<P>
    where
        P: CqePointer<ID>,
    {
        let owner = if self.named {
            // SAFETY: The driver says that it did not post the only request, so nothing else will
            // take its owner back.
            Some(unsafe { P::take_back(cqe) })
        } else {
            unnamed();
            None
        };
        PostError {
            owner,
            error: self.error(),
        }
    }
}

/// Reports a driver that has failed and did not name a request.
#[cold]
#[inline(never)]
pub(crate) fn unnamed() {
    pr_err!("a driver did not say which request it refused: the owner is leaked\n");
}

/// Posts a list of requests to the send queue (`ib_post_send`).
///
/// # Safety
///
/// `qp` is valid. `first` is a valid list of requests, whose memory is kept until they have
/// completed. `bad` is valid for writes.
#[inline(always)]
pub(crate) unsafe fn post_list(
    qp: *mut bindings::ib_qp,
    first: *const bindings::ib_send_wr,
    bad: *mut *const bindings::ib_send_wr,
) -> c_int {
    // SAFETY: `qp`, the list and `bad` are valid, as the caller promises. Clients are only told of
    // devices that have all verbs (`kverbs_provider`), so the operation exists.
    unsafe { ((*(*qp).device).ops.post_send.unwrap_unchecked())(qp, first, bad) }
}

/// Posts a request to the send queue that is ready, and returns what the driver does.
///
/// The driver names a request that it refuses (`bad_send_wr`). That needs a place that says before
/// whether it was named: here the successor of the request itself, which is null as it has to be,
/// so that it costs nothing. Every driver names a request as the last thing that it does with it.
///
/// # Safety
///
/// `qp` is valid. `wr` is a valid request without a successor, whose memory is kept until it has
/// completed.
#[inline]
pub(crate) unsafe fn send_raw(qp: *mut bindings::ib_qp, wr: *mut bindings::ib_send_wr) -> c_int {
    // SAFETY: `qp` and `wr` are valid, and the memory is kept until the request has completed, as
    // the caller promises.
    unsafe {
        ledger::post_to(qp, *(*wr).__bindgen_anon_1.wr_cqe);
        let bad = (&raw mut (*wr).next).cast();
        post_list(qp, wr, bad)
    }
}

/// As [`send_raw`], to the receive queue.
///
/// # Safety
///
/// `qp` is valid. `wr` is a valid request without a successor, whose memory is kept until it has
/// completed.
#[inline]
pub(crate) unsafe fn recv_raw(qp: *mut bindings::ib_qp, wr: *mut bindings::ib_recv_wr) -> c_int {
    // SAFETY: `qp` and `wr` are valid, and the memory is kept until the request has completed, as
    // the caller promises. Clients are only told of devices that have all verbs
    // (`kverbs_provider`), so the operation exists.
    unsafe {
        ledger::post_to(qp, *(*wr).__bindgen_anon_1.wr_cqe);
        let bad = (&raw mut (*wr).next).cast();
        ((*(*qp).device).ops.post_recv.unwrap_unchecked())(qp, wr, bad)
    }
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Posts to the send queue what `make` makes of the owner and `write` writes, which is given
    /// room for the request and its entries.
    ///
    /// What can fail before is done outside of the scope of that room. Otherwise those failures and
    /// the success would leave the scope together, and the compiler test the result once more.
    ///
    /// # Safety
    ///
    /// `W` begins with a `struct ib_send_wr`. `write` writes a valid request, all but its callback
    /// and its successor, whose memory is kept by the owner. The owner's handler may run where
    /// sends of this QP complete.
    #[inline]
    pub(crate) unsafe fn post_written<P, X, W, const ID: u64, const N: usize>(
        &self,
        owner: P,
        make: impl FnOnce(&P::Target) -> Result<X>,
        write: impl FnOnce(X, *mut W, *mut [bindings::ib_sge; N]),
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
    {
        let made = match make(&owner) {
            Ok(made) => made,
            Err(error) => return Err(unmade(owner, error)),
        };
        let (cqe, refusal) = {
            let mut raw = MaybeUninit::<W>::uninit();
            let mut sges = MaybeUninit::uninit();
            write(made, raw.as_mut_ptr(), sges.as_mut_ptr());
            let (wr, cqe) = (
                raw.as_mut_ptr().cast(),
                owner.into_cqe(crate::cqe::Sealed::new()),
            );
            // SAFETY: The request was just written, and its memory is kept by the owner, which is
            // the queue's until `done`.
            let ret = unsafe {
                end(wr, cqe);
                send_raw(self.as_raw(), wr)
            };
            if ret == 0 {
                return Ok(());
            }
            // SAFETY: `wr` is valid, and `ret` is what `send_raw` has just returned for it.
            (cqe, unsafe { Refusal::of_send(ret, wr) })
        };
        // SAFETY: It is the callback of the owner, and the request's.
        Err(unsafe { refusal.take_back(cqe) })
    }

    /// Posts a request to the send queue (`ib_post_send`), moving its owner in.
    ///
    /// `wr` describes the request from what the owner has. After success the owner may already be
    /// in its handler.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// Gives the owner back with `EINVAL` if an entry is of another PD, `EOPNOTSUPP` if iWARP is to
    /// carry immediate data or to read into any but one entry, or with the driver's error: `ENOMEM`
    /// when the queue is full. See [`PostError`] for when it does not.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::Qp, wc::Wc, wr::SendWr};
    /// # #[derive(HasCqe)]
    /// # struct Message { cqe: Cqe<Self>, sge: Buf<ToDevice> }
    /// # impl CqeHandler for Message {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn send(qp: &Qp<Softirq>, message: Pin<KBox<Message>>) -> Result {
    ///     Ok(qp.post_send(message, |m| Ok(SendWr::send([m.sge.sge(0..16)?])))?)
    /// }
    /// ```
    #[inline]
    pub fn post_send<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<SendWr<'a, N>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: An RDMA request begins as required, there is room for it, its entries are memory
        // that the owner keeps, and `S` provides what the handler needs.
        unsafe {
            self.post_written(
                owner,
                |owner| wr(owner)?.check(&self.place),
                |wr, raw: *mut bindings::ib_rdma_wr, sges| wr.put(raw, sges),
            )
        }
    }

    /// Posts an atomic operation (`ib_post_send`), moving its owner in.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`]; `EINVAL` also if the local memory is not eight bytes, or the remote
    /// address not aligned to eight; `EOPNOTSUPP` on iWARP.
    #[inline]
    pub fn post_atomic<P, const ID: u64>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<AtomicWr<'a>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // SAFETY: An atomic request begins as required, there is room for it, its entry is memory
        // that the owner keeps, and `S` provides what the handler needs.
        unsafe {
            self.post_written(
                owner,
                |owner| wr(owner)?.check(&self.place),
                |wr, raw: *mut bindings::ib_atomic_wr, sges| wr.put(raw, sges),
            )
        }
    }

    /// Posts a request to the receive queue (`ib_post_recv`), moving its owner in.
    ///
    /// As [`Qp::post_send`]; `EINVAL` also if the QP takes its receives from an SRQ.
    #[inline]
    pub fn post_recv<P, const ID: u64, const N: usize>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> Result<RecvWr<'a, N>>,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        R: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let wr = match wr(&owner) {
            // Some drivers take receives of a QP on an SRQ. No entry is of such a QP's PD for them;
            // without an entry there is nothing else that would say so.
            Ok(_) if const { N == 0 } && self.recv_pd.is_none() => return Err(foreign(owner)),
            Ok(wr) if wr.sges.iter().all(|sge| sge.0.pd == self.recv_pd) => wr,
            Ok(_) => return Err(foreign(owner)),
            Err(error) => return Err(PostError::new(owner, error)),
        };
        let (cqe, refusal) = {
            let mut sges = wr.sges.map(|sge| sge.0.to_raw());
            let cqe = owner.into_cqe(crate::cqe::Sealed::new());
            let mut raw = bindings::ib_recv_wr {
                next: core::ptr::null_mut(),
                __bindgen_anon_1: bindings::ib_recv_wr__bindgen_ty_1 {
                    wr_cqe: ManuallyDrop::new(cqe),
                },
                sg_list: sg_list(&raw mut sges),
                num_sge: const { N as c_int },
            };
            // SAFETY: The request was just written, and its memory is kept by the owner, which is
            // the queue's until `done`.
            let ret = unsafe { recv_raw(self.as_raw(), &raw mut raw) };
            if ret == 0 {
                return Ok(());
            }
            // SAFETY: `raw` is valid, and `ret` is what `recv_raw` has just returned for it.
            (cqe, unsafe { Refusal::of_recv(ret, &raw mut raw) })
        };
        // SAFETY: It is the callback of the owner, and the request's.
        Err(unsafe { refusal.take_back(cqe) })
    }
}
