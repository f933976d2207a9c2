// SPDX-License-Identifier: GPL-2.0

//! Queue pairs.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_qp`)

use crate::{
    bindings,
    cm,
    context::{
        PollContext,
        Provides,
        Sleepable, //
    },
    cq::{
        self,
        Cq,
        Lease, //
    },
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    drain::{
        drain,
        Markers, //
    },
    gate::{
        Hold,
        Kind, //
    },
    mr::RegWr,
    pd::Pd,
    wr::{
        PostError,
        RecvWr,
        Remote,
        SendWr,
        Sge, //
    }, //
};
use core::{
    marker::PhantomData,
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ptr::NonNull, //
};
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};

/// The sizes of a QP's queues.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Requests that can be outstanding on the send queue.
    pub send_wr: u32,
    /// Requests that can be outstanding on the receive queue.
    pub recv_wr: u32,
    /// Entries of a send request.
    pub send_sge: u32,
    /// Entries of a receive request.
    pub recv_sge: u32,
}

impl Caps {
    /// Returns the sizes of queues whose requests have one entry each.
    pub const fn new(send_wr: u32, recv_wr: u32) -> Self {
        Self {
            send_wr,
            recv_wr,
            send_sge: 1,
            recv_sge: 1,
        }
    }

    /// Returns how many CQ entries a QP of this size leases, at the most, from a CQ that serves
    /// both its queues.
    ///
    /// That is one for each request and one for the drain of each queue, rounded up as drivers do.
    pub const fn entries(&self) -> u32 {
        const fn round_up(wr: u32) -> u32 {
            match wr.saturating_add(2).checked_next_power_of_two() {
                Some(entries) => entries,
                None => u32::MAX,
            }
        }
        round_up(self.send_wr).saturating_add(round_up(self.recv_wr))
    }
}

/// What a QP needs at its end.
///
/// # Invariants
///
/// `raw` is the QP of `id`, completes to the CQs of the leases and belongs to `_pd`.
struct State {
    raw: NonNull<bindings::ib_qp>,
    send: Lease,
    recv: Lease,
    markers: Option<Markers>,
    id: cm::QpClaim,
    _pd: Pd,
    _hold: Hold,
}

// SAFETY: A QP may be drained and destroyed from any thread.
unsafe impl Send for State {}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        // SAFETY: By the type invariant.
        let drained = self.markers.take().ok_or(EIO).and_then(|markers| unsafe {
            drain(
                self.raw.as_ptr(),
                self.send.cq(),
                self.recv.cq(),
                markers,
                cx,
            )
        });
        if let Err(e) = drained {
            // SAFETY: As above.
            let num = unsafe { (*self.raw.as_ptr()).qp_num };
            let dev = &self.send.cq().dev;
            pr_err!("{dev}: QP {num} was not drained ({e:?}): it is leaked and holds its device\n");
            return Fate::Leak;
        }
        // SAFETY: The QP is the id's, is drained, and nobody can post to it any more.
        unsafe { bindings::rdma_destroy_qp(self.id.as_raw()) };
        Fate::Gone
    }
}

/// Returns how many requests the driver really lets be outstanding, given the sizes that it
/// returned.
///
/// Some round up and do not say so at creation, so they are asked again. Those that cannot tell are
/// taken to round up to a power of two.
///
/// # Safety
///
/// `qp` is valid.
unsafe fn given(qp: *mut bindings::ib_qp, returned: &bindings::ib_qp_cap) -> bindings::ib_qp_cap {
    let mut attr = bindings::ib_qp_attr::default();
    let mut init = bindings::ib_qp_init_attr::default();
    let mask = bindings::ib_qp_attr_mask_IB_QP_CAP as c_int;
    // SAFETY: By the caller's promise.
    let asked = unsafe { bindings::ib_query_qp(qp, &raw mut attr, mask, &raw mut init) } == 0;
    let more = |returned: u32, attr: u32, init: u32| {
        if asked {
            returned.max(attr).max(init)
        } else {
            returned.checked_next_power_of_two().unwrap_or(u32::MAX)
        }
    };
    bindings::ib_qp_cap {
        max_send_wr: more(
            returned.max_send_wr,
            attr.cap.max_send_wr,
            init.cap.max_send_wr,
        ),
        max_recv_wr: more(
            returned.max_recv_wr,
            attr.cap.max_recv_wr,
            init.cap.max_recv_wr,
        ),
        ..Default::default()
    }
}

/// Creates the QP of an id. Not generic, so that what the QP needs at its end is code of this
/// module.
#[inline(never)]
fn create(
    id: &Arc<cm::Inner>,
    pd: &Pd,
    send_cq: &Arc<cq::Inner>,
    recv_cq: &Arc<cq::Inner>,
    caps: &Caps,
    _cx: &Sleepable,
) -> Result<Deferred<State>> {
    let dev = pd.device();
    if send_cq.dev != *dev || recv_cq.dev != *dev || id.device_raw() != dev.as_raw() {
        return Err(EINVAL);
    }
    // The marker of a drain needs a place of its own.
    let with_marker = |wr: u32| {
        wr.checked_add(1)
            .filter(|n| *n <= dev.max_qp_wr())
            .ok_or(EINVAL)
    };
    let mut attr = bindings::ib_qp_init_attr {
        send_cq: send_cq.raw.as_ptr(),
        recv_cq: recv_cq.raw.as_ptr(),
        cap: bindings::ib_qp_cap {
            max_send_wr: with_marker(caps.send_wr)?,
            max_recv_wr: with_marker(caps.recv_wr)?,
            max_send_sge: caps.send_sge,
            max_recv_sge: caps.recv_sge,
            ..Default::default()
        },
        sq_sig_type: bindings::ib_sig_type_IB_SIGNAL_REQ_WR,
        qp_type: bindings::ib_qp_type_IB_QPT_RC,
        ..Default::default()
    };
    let reserved = Deferred::reserve()?;
    let markers = Markers::new()?;
    let hold = dev.hold(Kind::Qp);
    let claim = id.claim_qp()?;
    // SAFETY: The id is bound to this device and has no QP, and PD and CQs are alive.
    to_result(unsafe { bindings::rdma_create_qp(id.as_raw(), pd.as_raw(), &raw mut attr) })?;
    // SAFETY: Creation has set the id's QP.
    let raw = unsafe { (*id.as_raw()).qp };

    // SAFETY: The QP was just created.
    let given = unsafe { given(raw, &attr.cap) };
    let leases = cq::lease(send_cq, given.max_send_wr)
        .and_then(|send| Ok((send, cq::lease(recv_cq, given.max_recv_wr)?)));
    match (NonNull::new(raw), leases) {
        (Some(raw), Ok((send, recv))) => {
            // INVARIANT: As created.
            Ok(reserved.fill(State {
                raw,
                send,
                recv,
                markers: Some(markers),
                id: claim,
                _pd: pd.clone(),
                _hold: hold,
            }))
        }
        (_, leases) => {
            // SAFETY: Nothing was posted to the QP.
            unsafe { bindings::rdma_destroy_qp(id.as_raw()) };
            Err(leases.err().unwrap_or(ENOMEM))
        }
    }
}

/// Refuses a request with entries of another PD.
#[cold]
fn foreign<P>(owner: P) -> PostError<P> {
    PostError {
        owner,
        error: EINVAL,
    }
}

/// A reliable connected queue pair, whose queues complete in contexts `S` and `R`.
///
/// A `&Qp` proves that the QP exists, so posting checks nothing. When the last reference to it is
/// dropped, a work item moves it to the error state, waits until every request has completed, and
/// only then destroys it.
///
/// # Invariants
///
/// `raw` is the QP of `state`, its PD is `pd`, and its queues complete to CQs that are polled in
/// `S` and `R`.
pub struct Qp<S: PollContext, R: PollContext = S> {
    raw: NonNull<bindings::ib_qp>,
    pd: *const bindings::ib_pd,
    state: Deferred<State>,
    _contexts: PhantomData<(S, R)>,
}

// SAFETY: `struct ib_qp` may be used from any thread.
unsafe impl<S: PollContext, R: PollContext> Send for Qp<S, R> {}
// SAFETY: As above; drivers lock the queues.
unsafe impl<S: PollContext, R: PollContext> Sync for Qp<S, R> {}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Creates the QP of a connection (`rdma_create_qp`), ready for receives.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the device cannot have such queues, or if `id`, `pd` and the CQs are not all of
    /// one device; `EBUSY` if the id has a QP; `ENOSPC` if a CQ has not enough free entries: see
    /// [`Caps::entries`]; or the driver's error.
    pub fn create(
        id: &cm::Id,
        pd: &Pd,
        send_cq: &Cq<S>,
        recv_cq: &Cq<R>,
        caps: &Caps,
        cx: &Sleepable,
    ) -> Result<Self> {
        let state = create(id.inner(), pd, send_cq.inner(), recv_cq.inner(), caps, cx)?;
        // INVARIANT: As created.
        Ok(Self {
            raw: state.raw,
            pd: pd.as_raw(),
            state,
            _contexts: PhantomData,
        })
    }

    /// Returns the QP's number.
    pub fn num(&self) -> u32 {
        // SAFETY: By the type invariant; the number does not change.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// Says whether all entries are of the QP's PD, which also means of its device.
    #[inline]
    fn owns(&self, sges: &[Sge<'_>]) -> bool {
        sges.iter().all(|sge| sge.pd == self.pd)
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
    /// Gives the owner back with `EINVAL` if an entry is of another PD, or with the driver's error:
    /// `ENOMEM` when the queue is full.
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
        let wr = match wr(&owner) {
            Ok(wr) if self.owns(&wr.sges) => wr,
            Ok(_) => return Err(foreign(owner)),
            Err(error) => return Err(PostError { owner, error }),
        };
        let mut sges = wr.sges.map(Sge::to_raw);
        let SendWr {
            opcode,
            flags,
            imm_data,
            remote,
            ..
        } = wr;
        let cqe = owner.into_cqe();
        let mut raw = MaybeUninit::<bindings::ib_rdma_wr>::uninit();
        let ptr = raw.as_mut_ptr();
        // SAFETY: The fields are in bounds. A driver reads what follows `wr` of RDMA requests only.
        let wr = unsafe {
            (&raw mut (*ptr).wr).write(bindings::ib_send_wr {
                next: core::ptr::null_mut(),
                __bindgen_anon_1: bindings::ib_send_wr__bindgen_ty_1 {
                    wr_cqe: ManuallyDrop::new(cqe),
                },
                sg_list: sges.as_mut_ptr(),
                num_sge: const { N as c_int },
                opcode,
                send_flags: flags,
                ex: bindings::ib_send_wr__bindgen_ty_2 {
                    imm_data: ManuallyDrop::new(imm_data),
                },
            });
            if let Some(remote) = remote {
                (*ptr).remote_addr = remote.addr;
                (*ptr).rkey = remote.rkey;
            }
            &raw const (*ptr).wr
        };
        // SAFETY: The entries are memory that the owner keeps, and the owner is the queue's until
        // `done`.
        unsafe { self.post_send_raw(wr, cqe) }
    }

    /// Posts a request that is ready, and takes the owner back if the driver refuses it.
    ///
    /// # Safety
    ///
    /// `wr` is a valid request without a successor, whose memory is kept by the owner that `cqe` is
    /// from.
    #[inline]
    unsafe fn post_send_raw<P, const ID: u64>(
        &self,
        wr: *const bindings::ib_send_wr,
        cqe: *mut bindings::ib_cqe,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
    {
        let qp = self.raw.as_ptr();
        let mut bad = core::ptr::null();
        // SAFETY: By the type invariant and the caller's promise. Clients are only told of devices
        // that have all verbs (`kverbs_provider`), so the operation exists.
        let ret = unsafe { ((*(*qp).device).ops.post_send.unwrap_unchecked())(qp, wr, &mut bad) };
        if ret == 0 {
            return Ok(());
        }
        Err(PostError {
            // SAFETY: The only request was not posted, so nothing else will take its owner back.
            owner: unsafe { P::from_cqe(cqe) },
            error: Error::from_errno(ret),
        })
    }

    /// Posts a request to the receive queue (`ib_post_recv`), moving its owner in.
    ///
    /// As [`Qp::post_send`].
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
            Ok(wr) if wr.sges.iter().all(|sge| sge.0.pd == self.pd) => wr,
            Ok(_) => return Err(foreign(owner)),
            Err(error) => return Err(PostError { owner, error }),
        };
        let mut sges = wr.sges.map(|sge| sge.0.to_raw());
        let cqe = owner.into_cqe();
        let raw = bindings::ib_recv_wr {
            next: core::ptr::null_mut(),
            __bindgen_anon_1: bindings::ib_recv_wr__bindgen_ty_1 {
                wr_cqe: ManuallyDrop::new(cqe),
            },
            sg_list: sges.as_mut_ptr(),
            num_sge: const { N as c_int },
        };
        let qp = self.raw.as_ptr();
        let mut bad = core::ptr::null();
        // SAFETY: As in `post_send_raw`; the entries are memory that the owner keeps.
        let ret = unsafe { ((*(*qp).device).ops.post_recv.unwrap_unchecked())(qp, &raw, &mut bad) };
        if ret == 0 {
            return Ok(());
        }
        Err(PostError {
            // SAFETY: The only request was not posted, so nothing else will take its owner back.
            owner: unsafe { P::from_cqe(cqe) },
            error: Error::from_errno(ret),
        })
    }

    /// Posts a fast registration (`IB_WR_REG_MR`), moving the owner of the region in, and returns
    /// where a peer will find the region.
    ///
    /// Requests posted after this one see the registration, so the advertisement can be sent at
    /// once.
    ///
    /// Any context.
    ///
    /// # Errors
    ///
    /// As [`Qp::post_send`], and `EBUSY` if the region is registered.
    #[inline]
    pub fn post_reg<P, const ID: u64>(
        &self,
        owner: P,
        wr: impl for<'a> FnOnce(&'a P::Target) -> RegWr<'a>,
    ) -> Result<Remote, PostError<P>>
    where
        P: CqePointer<ID>,
        P::Target: CqeHandler<ID, Pointer = P> + Sized,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        let (mut raw, remote, registering) = match wr(&owner).prepare(self.pd) {
            Ok(prepared) => prepared,
            Err(error) => return Err(PostError { owner, error }),
        };
        let cqe = owner.into_cqe();
        raw.wr.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(cqe);
        // SAFETY: The region is kept by the owner, which is the queue's until `done`.
        match unsafe { self.post_send_raw(&raw.wr, cqe) } {
            Ok(()) => Ok(remote),
            Err(e) => {
                // SAFETY: The owner is back, and the region that it keeps has not moved.
                unsafe { registering.undo() };
                Err(e)
            }
        }
    }

    /// Moves the QP to the error state and waits until every request that was posted has completed
    /// (`ib_drain_qp`).
    ///
    /// Their handlers have then returned, too, but for those of a direct CQ that another thread, or a
    /// caller of this one, is processing. What is posted meanwhile is flushed as well, some time.
    ///
    /// # Errors
    ///
    /// Nothing is known to be drained on any error: `EDEADLK` in a handler of the QP's CQs,
    /// `EOVERFLOW` if a CQ has lost completions, `ETIMEDOUT` after a minute, `ENOMEM`, or what the
    /// driver said.
    pub fn drain(&self, cx: &Sleepable) -> Result {
        let state = &*self.state;
        let markers = Markers::new()?;
        // SAFETY: By the type invariant.
        unsafe {
            drain(
                self.raw.as_ptr(),
                state.send.cq(),
                state.recv.cq(),
                markers,
                cx,
            )
        }
    }

    /// Drains and destroys the QP and waits for that, where dropping it leaves it to a work item.
    ///
    /// # Errors
    ///
    /// `EDEADLK` in a handler of the QP's CQs: the QP is then destroyed by a work item. `EIO` if
    /// the QP could not be drained: it is leaked, and was reported.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        let state = &*self.state;
        if state.send.cq().is_polled_by_current() || state.recv.cq().is_polled_by_current() {
            return Err(EDEADLK);
        }
        match self.state.destroy(cx) {
            Fate::Gone => Ok(()),
            Fate::Leak => Err(EIO),
        }
    }
}
