// SPDX-License-Identifier: GPL-2.0

//! Queue pairs.
//!
//! A [`Qp`] belongs to an id of the connection manager ([`Qp::create`]), which takes it through its
//! states, or to none ([`Qp::create_raw`]): then the ULP does that ([`Qp::modify`]). Posting a
//! request moves its owner into the queue, until its completion: [`Qp::post_send`],
//! [`Qp::post_recv`]. See Documentation/qp.rst.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_qp`)

mod attr;
mod chain;
mod context;
mod create;
mod drain;
mod events;
mod keep;
pub(crate) mod post;
mod requests;
mod send_ring;
mod transfers;

pub use crate::rnr_timer::RnrTimer;
pub use attr::{
    Access,
    Attr,
    Caps,
    Mtu,
    QpAttr,
    State, //
};
pub(crate) use chain::ChainError;
pub use chain::{
    Batch,
    Chain,
    ChainOp, //
};
pub use context::QpContext;
pub use create::InitAttr;
use create::{
    create,
    destroy_raw,
    RawInit, //
};
pub use events::{
    Event,
    Events, //
};
pub(crate) use keep::{
    OnEnd,
    TablePlace, //
};
pub use requests::{
    Requests,
    Taken, //
};
pub use send_ring::SendRing;
pub(crate) use transfers::Transfers;

use crate::{
    ah::Ah,
    cm,
    cq::{
        self,
        Cq, //
    },
    cqe::Queue,
    deferred,
    device::Device,
    lost,
    noted,
    objects,
    pd::Pd,
    prelude::internal::*,
    qp_id::{
        QpHead,
        QpId, //
    },
    srq,
    trace,
    wc::{
        self,
        Wc, //
    },
    wr, //
};
use kernel::{
    new_mutex,
    new_spinlock_irq,
    sync::{
        self,
        atomic::{
            Atomic,
            Full,
            Release, //
        }, //
    },
    time, //
};

/// A counted handle of a reliable connected queue pair, whose queues complete in contexts `S` and
/// `R`.
///
/// When the last handle is dropped, a work item moves the QP to the error state, waits until every
/// request has completed, and only then destroys it.
///
/// # Invariants
///
/// The queues of the QP complete to CQs that are polled in `S` and `R`. As for [`Cq`], these have
/// no supertypes.
pub struct Qp<S: PollContext, R: PollContext = S> {
    pub(crate) inner: Shared,
    _contexts: PhantomData<fn() -> (S, R)>,
}

/// A reference to the QP. As long as there is one, the QP is not destroyed.
pub(crate) type Shared = deferred::Deferred<Inner>;

/// Refuses a receive of a QP that takes its receives from an SRQ, which some drivers do not.
///
/// # Safety
///
/// `bad` is valid for writes.
unsafe extern "C" fn refuse_recv(
    _qp: *mut bindings::ib_qp,
    wr: *const bindings::ib_recv_wr,
    bad: *mut *const bindings::ib_recv_wr,
) -> c_int {
    // SAFETY: `bad` is valid for writes, as the caller promises.
    unsafe { *bad = wr };
    EINVAL.to_errno()
}

/// See [`Qp::destroy`]. Not generic, so that it is not in each ULP.
fn destroy(qp: Shared, cx: &Sleepable) -> Result {
    // iWARP waits for a later event of the connection.
    let waits_for_callback = qp.id.is_some() && qp.pd.device().is_iwarp();
    if qp.is_polled_by_current() || waits_for_callback && cm::InCallback::is_current() {
        return Err(EDEADLK);
    }
    qp.destroy(cx)
}

impl<S: PollContext, R: PollContext> Clone for Qp<S, R> {
    fn clone(&self) -> Self {
        // INVARIANT: It is the same QP.
        Self {
            inner: self.inner.clone(),
            _contexts: PhantomData,
        }
    }
}

/// A QP as the handler of its own connection: it is kept until the connection's last event.
impl<S: PollContext, R: PollContext> cm::Handler for Qp<S, R> {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Creates the QP of a connection (`rdma_create_qp`), ready for receives. Fails with `EINVAL`
    /// if the device cannot have such queues, or if `id`, `pd` and the CQs are not all of one
    /// device; `EBUSY` if the id has a QP; `ENOSPC` if a CQ has not enough free entries: see
    /// [`Caps::entries`]; or the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{cm, context::*, cq::Cq, pd::Pd, qp::{Caps, Qp}};
    /// # use kernel::sync::Arc;
    /// const CAPS: Caps = Caps::new(16, 16);
    ///
    /// fn connect(id: &cm::Id, pd: &Pd, cq: &Cq<Softirq>, cx: &Sleepable) -> Result<Qp<Softirq>> {
    ///     let qp = Qp::create(id, pd, cq, cq, &CAPS, cx)?;
    ///     // Receives are posted here, before the peer can send.
    ///     let handler = Arc::new(qp.clone(), GFP_KERNEL)?;
    ///     id.connect(handler, &cm::ConnParam::default(), cx)?;
    ///     Ok(qp)
    /// }
    /// ```
    pub fn create(
        id: &cm::Id,
        pd: &Pd,
        send_cq: &Cq<S>,
        recv_cq: &Cq<R>,
        caps: &Caps,
        cx: &Sleepable,
    ) -> Result<Self> {
        InitAttr::new(pd, send_cq, recv_cq, caps).create_for(id, cx)
    }

    /// Creates a QP that belongs to no connection manager's id (`ib_create_qp`), in the reset
    /// state: nothing can be posted to it yet. Fails as [`Qp::create`].
    pub fn create_raw(
        pd: &Pd,
        send_cq: &Cq<S>,
        recv_cq: &Cq<R>,
        caps: &Caps,
        cx: &Sleepable,
    ) -> Result<Self> {
        InitAttr::new(pd, send_cq, recv_cq, caps).create(cx)
    }

    fn new(init: RawInit<'_>, id: Option<&cm::Shared>, cx: &Sleepable) -> Result<Self> {
        // INVARIANT: `init` is that of an `InitAttr<'_, S, R>`, so its CQs are polled in these
        // contexts.
        Ok(Self {
            inner: create(init, id, cx)?,
            _contexts: PhantomData,
        })
    }

    #[inline]
    pub(crate) fn id(&self) -> QpId {
        self.inner.target.qp_id
    }

    /// Returns the CQ of the receives, if its poller is handling this completion.
    #[inline]
    pub(crate) fn recv_cq_at(&self, wc: &Wc) -> Option<&cq::Inner> {
        let cq = self.inner.target.recv_cq();
        // A shared CQ, which the drain of an SRQ may poll, too, has no poller here.
        //
        // SAFETY: By the invariant of `cq::Inner` its CQ is valid while it is.
        let of_core = || unsafe { wc::core_array(cq.raw.as_ptr()) };
        (wc.is_in(self.inner.recv_array) || wc.is_in(of_core())).then_some(cq)
    }

    /// Allocates the place of a table, before there is a table to drop where this fails. Fails with
    /// `ENOMEM`; `EPERM` if the QP is another module's.
    pub(crate) fn place_of_table<T: OnEnd + 'static>(
        &self,
        _cx: &Sleepable,
    ) -> Result<TablePlace<T>> {
        self.inner.context.head.module.check_type::<T>()?;
        TablePlace::new()
    }

    /// As [`Qp::place_of_table`], for receives, which [`Qp::release_recvs`] releases.
    pub(crate) fn place_of_recvs<T: OnEnd + 'static>(
        &self,
        cx: &Sleepable,
    ) -> Result<TablePlace<T>> {
        self.inner.reserve_flushes()?;
        self.place_of_table(cx)
    }

    /// Keeps a table until the QP, which has given its place, is destroyed.
    pub(crate) fn keep_table<T: OnEnd + 'static>(&self, place: TablePlace<T>, table: T) {
        self.inner.context.kept.add(Some(place.put(table)));
    }

    /// Returns the QP's number.
    pub fn num(&self) -> u32 {
        self.inner.num()
    }

    /// Moves the QP to the error state and waits until all posted requests have completed
    /// (`ib_drain_qp`) and their handlers have returned. Handlers of a direct CQ that another
    /// thread, or a caller of this function, is processing are not waited for. What these post
    /// meanwhile is flushed later; a second drain waits for it if the caller polls the CQ.
    ///
    /// Fails with `EDEADLK` in a handler of the QP's CQs; `EOVERFLOW` if a CQ has lost completions;
    /// `ETIMEDOUT` after a minute, for example if a handler of these CQs waits for the caller;
    /// `EBUSY` if the send queue stays full of unsignaled requests, which only the end of the QP
    /// gives back; or the driver's error. Requests may then still be outstanding, and the drain may
    /// be repeated. Every ten seconds a message in the log states what it waits for. Allocates
    /// nothing, unless an earlier drain has failed.
    pub fn drain(&self, cx: &Sleepable) -> Result {
        self.inner.drain_posted(cx)
    }

    /// Makes the receives of a [`RecvRing`] drop their references to the QP and to their connection
    /// without a drain, for a QP that cannot be drained because its device completes nothing. No
    /// message is received after this. The device keeps the memory until the QP is destroyed: a
    /// minute after the last handle is gone a reset ends the requests that the device does not
    /// complete.
    ///
    /// Fails with `EDEADLK` in a handler of the QP's CQs; `EBUSY` if a message is
    /// [kept](crate::session::Kept); `EOPNOTSUPP` if completions of the CQ were ever polled into a
    /// [`WcArray`](crate::cq::WcArray), or it is [shared](crate::cq::Cq::pool_get). If a handler
    /// does not return: with `ETIMEDOUT` after a minute, or `EOVERFLOW` at once if a CQ has lost
    /// completions. May be called again. Allocates nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::prelude::*;
    /// /// Ends a connection, which its receives keep.
    /// fn end(qp: &Qp<Softirq>, cx: &Sleepable) -> Result {
    ///     qp.drain(cx).or_else(|_| qp.release_recvs(cx))
    /// }
    /// ```
    ///
    /// [`RecvRing`]: crate::session::RecvRing
    pub fn release_recvs(&self, cx: &Sleepable) -> Result {
        self.inner.release_recvs(cx)
    }

    /// Drains and destroys the QP, and waits until that is done; a drop leaves it to a work item.
    /// The handle is consumed in any case.
    ///
    /// Fails with `EBUSY` if there is another one: the QP is destroyed with the last of them; with
    /// `EDEADLK` in a handler of the QP's CQs, and on iWARP in a callback of the connection
    /// manager; with `ETIMEDOUT` after a minute, for example if a handler of these CQs waits for
    /// the caller; or with an error of the drain. A work item then continues, with a message every
    /// ten seconds that states what it waits for. Fails with `EIO` if the driver has not destroyed
    /// the QP: it is leaked, and was reported.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        destroy(self.inner, cx)
    }
}

/// A QP, which its handles share, and what it needs at its end.
///
/// # Invariants
///
/// - `target` is the QP. It is valid until `context.destroyed` is set, and is not used after that.
/// - The QP was created for `id`, if there is one, belongs to `pd`, has `context` as its context,
///   and completes to the CQs of `send` and `recv`. `send_array` and `recv_array` are what
///   [`cq::Inner::poller`] returns of these. If it is on an SRQ both are one CQ, and not a direct
///   one.
/// - `post_recv` is the driver's operation or, if the QP is on an SRQ, [`refuse_recv`].
// Posts, and handlers that post again, read the first fields only: behind the count of references
// these are one cache line. The others are apart, as with them the item would be 1 KiB of kmalloc,
// so that these lines of many QPs would share few sets of a cache.
#[repr(C)]
pub(crate) struct Inner {
    send_array: *const Wc,
    recv_array: *const Wc,
    post_recv: trace::Post<bindings::ib_qp, bindings::ib_recv_wr>,
    /// Not used once the QP is destroyed.
    pub(crate) target: wr::PostTarget,
    rest: Pin<KBox<Rest>>,
}

/// What posts do not read of an [`Inner`], which has the invariants of both.
#[pin_data]
pub(crate) struct Rest {
    /// The QP, from which `target` is made.
    raw: NonNull<bindings::ib_qp>,
    num: u32,
    id: Option<cm::Shared>,
    // Dropped before the CQs: tables look for their poller.
    #[pin]
    context: QpPriv,
    send: cq::Reservation,
    /// Of no entry if the QP is on an SRQ.
    recv: cq::Reservation,
    srq: Option<srq::SrqReservation>,
    /// Of a QP for datagrams.
    marker_ah: sync::SetOnce<Ah>,
    pub(crate) pd: Pd,
    // Dropped last: the ULP may be gone after that.
    object: objects::Object,
}

// SAFETY: `struct ib_qp` may be drained and destroyed from any thread, as the CQ and the lock of
// `target` may be used from any. The arrays are only compared, and the other fields are `Send`.
unsafe impl Send for Inner {}
// SAFETY: `struct ib_qp` may be used from any thread, and drivers lock its queues, so several
// threads may post at once. What else needs a lock takes that of the context. The arrays are only
// compared, the CQ and the lock of `target` are `Sync`, as the other fields are.
unsafe impl Sync for Inner {}

impl core::ops::Deref for Inner {
    type Target = Rest;

    #[inline]
    fn deref(&self) -> &Rest {
        &self.rest
    }
}

impl Inner {
    /// The end of what a post reads, behind the count of references.
    const READ_BY_POSTS: usize =
        deferred::VALUE_AT + core::mem::offset_of!(Self, target) + wr::PostTarget::READ_BY_POSTS;

    /// Returns the QP, which is valid while there is a handle, and until its end destroys it.
    pub(crate) fn raw(&self) -> NonNull<bindings::ib_qp> {
        self.target.raw
    }

    /// See [`post::names_first`].
    pub(crate) fn names_first(&self) -> bool {
        // SAFETY: By the type invariant the QP is valid, as the caller has a handle of it.
        unsafe { post::names_first(self.raw().as_ptr()) }
    }

    /// Returns the poller of the CQ of the sends, if that is not shared.
    ///
    /// # Safety
    ///
    /// What is returned is part of a table that is given to [`Qp::keep_table`], and whose drop
    /// [forgets](cq::Poller::forget) the CQ, or is not used.
    unsafe fn send_poller(&self) -> Option<cq::Poller> {
        let array = self.send_array;
        // SAFETY: By the type invariant `array` is the poller of the CQ of the sends. The QP drops
        // its tables, which forget the CQ, as the caller promises, before its handle of that.
        (!array.is_null()).then(|| unsafe { cq::Poller::new(array) })
    }

    /// Returns the poller of the CQ of both queues, if they complete to one CQ that is not shared.
    ///
    /// # Safety
    ///
    /// As of [`Inner::send_poller`].
    pub(crate) unsafe fn only_poller(&self) -> Option<cq::Poller> {
        // SAFETY: What is returned is part of a table that forgets the CQ, or is not used, as the
        // caller promises.
        unsafe { self.send_poller() }.filter(|_| self.send_array == self.recv_array)
    }

    /// See [`Qp::num`].
    #[inline]
    pub(crate) fn num(&self) -> u32 {
        self.num
    }

    /// See [`Qp::drain`].
    pub(crate) fn drain_posted(&self, cx: &Sleepable) -> Result {
        match self.drain(drain::Drain::Posted, cx)? {
            drain::End::Drained => self.end_lost_receives(cx),
            drain::End::Full => Err(EBUSY),
        }
    }

    /// Returns the number of sends that may be outstanding besides the marker of a drain.
    pub(crate) fn max_sends(&self) -> u32 {
        self.send.entries().saturating_sub(1)
    }

    /// Ends receives that the device has lost, after a drain, as they keep the QP. In the error
    /// state no receive succeeds, so no handler has posted another since the first drain: those
    /// that are out were posted before the marker of the second. Does nothing while another thread
    /// does this.
    fn end_lost_receives(&self, cx: &Sleepable) -> Result {
        let looks = &self.context.looks_for_lost;
        if looks.xchg(true, Full) {
            return Ok(());
        }
        let ended = self.end_suspects(cx);
        looks.store(false, Release);
        ended
    }

    fn end_suspects(&self, cx: &Sleepable) -> Result {
        let kept = &self.context.kept;
        let mut found = false;
        for kept in kept.iter() {
            found |= kept.suspect();
        }
        if found && self.recv.cq.has_only_poller() {
            self.drain(drain::Drain::Posted, cx)?;
            self.end_recvs(kept.iter().filter(|kept| kept.is_suspect()), cx)?;
        }
        Ok(())
    }

    /// Ends the transfers that the device has lost, after the last drain, as they keep the QP: in
    /// the reset state the device has no requests. A driver that refuses this state has the end of
    /// the QP wait.
    fn end_lost_transfers(&self, waiter: deferred::Waiter, cx: &Sleepable) -> Result {
        let qp = self.raw().as_ptr();
        if self.context.transfers.count() == 0
            || !self.send.cq.has_only_poller()
            || !lost::is_out(qp)
            || !self.reset(waiter, cx)?
            || !self.send.cq.has_only_poller()
        {
            return Ok(());
        }
        // SAFETY: By the type invariant the QP is valid. It was drained and is in the reset state,
        // and the pollers of its CQs have idled since.
        unsafe { lost::end(qp, self.send.cq.raw.as_ptr(), cx) };
        Ok(())
    }

    /// Completes the requests that the device has lost, once the QP is destroyed and the pollers of
    /// its CQs have handled all that they had polled before: the device no longer uses the memory.
    /// Requests whose completions may be in the array of a caller are left to that. Fails with
    /// `ETIMEDOUT` while a handler has not returned.
    fn end_lost(&self, waiter: deferred::Waiter, cx: &Sleepable) -> Result {
        let id = self.context.head.id;
        let kept = &self.context.kept;
        let is_destroyed = self.context.destroyed.copy() == Some(Ok(()));
        let is_known = |queue| self.queue(queue).has_only_poller();
        // Tables have sends out only, and replies to them on the same CQ.
        let is_kept = || is_known(Queue::Send) && kept.iter().any(|kept| kept.is_out());
        let requests = self.context.requests.as_ref();
        let slots = self.srq.as_ref().map(|srq| srq.slots());
        let queues = requests::Queues {
            qp: id,
            send: is_known(Queue::Send),
            recv: is_known(Queue::Recv),
        };
        // Completions in arrays are no longer noted. Where the CQ is shared, another module may be
        // about to dispatch one.
        let is_noted = |queue| !self.queue(queue).is_shared();
        let is_posted = || {
            noted::is_any(id, is_noted)
                || requests.is_some_and(|list| list.is_posted(queues))
                || slots.is_some_and(|slots| queues.have_any(requests::all(slots)))
        };
        if !is_destroyed || !is_kept() && !is_posted() {
            return Ok(());
        }
        self.settle(waiter, cx)?;
        if is_kept() {
            kept.iter().for_each(|kept| kept.ended());
        }
        // SAFETY: The QP is destroyed, as just checked. Each `take_lost()` below returns callbacks
        // of requests that were posted and have not completed, and each of them once.
        let complete = |cqe, queue| unsafe { self.complete_lost(cqe, queue) };
        if let Some(list) = requests {
            // SAFETY: As `settle()` has succeeded, the pollers have handled all that they had
            // polled before the QP was destroyed. One thread ends the QP.
            unsafe { list.take_lost(queues, complete) };
        }
        if let Some(slots) = slots {
            let mut slots = requests::all(slots);
            // SAFETY: As `settle()` has succeeded, the pollers have handled all that they had
            // polled before the QP was destroyed. One thread ends the QP.
            while let Some((cqe, queue)) = unsafe { queues.take_lost(&mut slots) } {
                complete(cqe, queue);
            }
        }
        // SAFETY: As `settle()` has succeeded, the pollers of these CQs have handled all that they
        // had polled before the QP was destroyed.
        while let Some((cqe, queue)) = unsafe { noted::take_lost(id, is_noted) } {
            complete(cqe, queue);
        }
        Ok(())
    }

    /// Returns the CQ of a queue.
    fn queue(&self, queue: Queue) -> &cq::Shared {
        match queue {
            Queue::Send => &self.send.cq,
            Queue::Recv => &self.recv.cq,
        }
    }

    /// Completes a request that was lost, as flushed: its handler gets the owner.
    ///
    /// # Safety
    ///
    /// The QP is destroyed. A request of it was posted with this callback, and does not complete
    /// otherwise.
    unsafe fn complete_lost(&self, cqe: *mut bindings::ib_cqe, queue: Queue) {
        let cq = self.queue(queue).raw.as_ptr();
        // The QP is gone. Handlers find its context in this.
        let mut qp = MaybeUninit::<bindings::ib_qp>::zeroed();
        let context = ptr::from_ref(&self.context).cast_mut().cast();
        let mut wc = wc::flushed(qp.as_mut_ptr(), cqe);
        // SAFETY: Both fields are of the memory above. The request is lost, as the caller promises,
        // so this completes it alone. The reservation keeps the CQ. The helper provides the context
        // in which its handlers run.
        unsafe {
            (*qp.as_mut_ptr()).qp_context = context;
            (*qp.as_mut_ptr()).qp_num = self.num;
            bindings::rdma_helper_complete(cq, &raw mut wc);
        }
    }

    fn qp_type(&self) -> bindings::ib_qp_type {
        // SAFETY: By the type invariant the QP is valid; its type does not change.
        unsafe { (*self.raw().as_ptr()).qp_type }
    }

    fn is_ud(&self) -> bool {
        self.qp_type() == bindings::ib_qp_type_IB_QPT_UD
    }

    fn ops(&self) -> &bindings::ib_device_ops {
        self.pd.device().ops()
    }

    /// Keeps an owner, of which requests were posted whose completion does not give it back, until
    /// the QP was drained. It is called a `T` where the QP is shown.
    pub(crate) fn keep_until_drained<P: Send + 'static, T: ?Sized>(&self, owner: P) {
        self.keep(keep::Node::new(owner), core::any::type_name::<T>());
    }

    fn keep(&self, node: Option<KBox<keep::Node>>, name: &'static str) {
        self.context.drain_list.add(node);
        self.object.add_undrained(name);
    }

    /// Allocates the work items by which the QP waits for the pollers of its CQs, so that it needs
    /// no memory when its device has failed.
    fn reserve_flushes(&self) -> Result {
        if self.context.flushes.as_ref().is_some() {
            return Ok(());
        }
        let send = cq::Flush::new(&self.send.cq)?;
        let recv = if self.send.cq == self.recv.cq {
            send.clone()
        } else {
            cq::Flush::new(&self.recv.cq)?
        };
        // The lock makes a thread that finds them being set wait. Memory reclaim may wait for a
        // drain, which takes this lock, so nothing is allocated under it.
        let _locked = self.context.state.lock();
        self.context.flushes.populate([send, recv]);
        Ok(())
    }

    /// Returns whether the current task is in a handler of the QP's CQs.
    fn is_polled_by_current(&self) -> bool {
        self.send.cq.is_polled_by_current() || self.recv.cq.is_polled_by_current()
    }
}

impl deferred::Teardown for Inner {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn quiesce(&self, waiter: deferred::Waiter, cx: &Sleepable) -> Result {
        let Err(e) = self.end_use(waiter, cx) else {
            return Ok(());
        };
        let dev = self.pd.device();
        let num = self.num;
        match self.context.ending.report() {
            Some(secs) if e == ETIMEDOUT => self.report_wait(secs, cx),
            Some(secs) => {
                pr_err!("{dev}: QP {num} could not be drained for {secs} s ({e:?}); trying again\n")
            }
            None => {}
        }
        if waiter == deferred::Waiter::WorkItem {
            // Some errors come at once.
            time::delay::fsleep(time::Delta::from_millis(20));
        }
        Err(e)
    }

    fn teardown(&self, _cx: &Sleepable) -> Result {
        let Some(Err(e)) = self.context.destroyed.copy() else {
            return Ok(());
        };
        let dev = self.pd.device();
        let num = self.num;
        pr_err!("{dev}: QP {num} was not destroyed ({e:?}): it is leaked and holds its device\n");
        Err(EIO)
    }
}

impl Inner {
    /// Ends all use of the QP, by drivers and handlers, and destroys it.
    ///
    /// Requests that the device has lost are found in four ways, as each post pays for what it
    /// leaves to be found:
    ///
    /// - transfers in a list of all contexts ([`lost`]), before the QP is destroyed, as
    ///   `rdma_rw_ctx_destroy()` needs it;
    /// - receives and tags in the tables that the QP keeps ([`OnEnd`]);
    /// - requests of arrays by their state ([`posted`](crate::posted)), which a post stores;
    /// - single owners by their notes ([`noted`]), which take memory and a lock, so that there are
    ///   some with `note_posts=1` only.
    fn end_use(&self, waiter: deferred::Waiter, cx: &Sleepable) -> Result {
        for kept in self.context.kept.iter() {
            kept.closing();
        }
        if self.context.destroyed.as_ref().is_none() {
            self.drain(drain::Drain::Last(waiter), cx)?;
            // Those that were posted have ended, so there are few to look for.
            //
            // SAFETY: By the type invariant the QP is valid. This is called when its last handle is
            // gone.
            unsafe { self.context.transfers.close(self.raw().as_ptr()) };
            self.end_lost_transfers(waiter, cx)?;
            self.context.transfers.wait(waiter, cx)?;
            // SAFETY: The QP is drained, and there is no handle of it, so nobody posts to it. This
            // is done once.
            let destroyed = unsafe { destroy_raw(self.id.as_ref(), self.raw()) };
            self.context.destroyed.populate(destroyed);
        }
        self.end_lost(waiter, cx)
    }
}

/// The private data of a QP, as its `qp_context`.
#[pin_data]
#[repr(C)]
struct QpPriv {
    /// The first field: see [`QpHead`].
    head: QpHead,
    /// Held while the QP is modified: see [`attr::Modifier`]. The state that the last change has
    /// moved it to, if that is known: devices and connection managers move QPs by themselves, too.
    #[pin]
    state: sync::Mutex<Option<State>>,
    /// Held while the QP is drained.
    #[pin]
    draining: sync::Mutex<drain::Draining>,
    /// The markers of the first drain, unless a CQ is shared.
    #[pin]
    markers: drain::Markers,
    /// The time for which the end of the QP has waited.
    ending: drain::WaitTime,
    /// What destroying the QP has returned.
    destroyed: sync::SetOnce<Result>,
    /// See [`wr::PostTarget::lock_regs`].
    #[pin]
    reg_lock: sync::SpinLockIrq<()>,
    #[pin]
    drain_list: keep::KeepList,
    #[pin]
    kept: keep::Tables,
    /// Set while a thread looks for receives that the device has lost.
    looks_for_lost: Atomic<bool>,
    /// The requests that belong to the QP, if there were ever any. Set with `state` locked.
    requests: sync::SetOnce<Arc<requests::RequestList>>,
    #[pin]
    transfers: Transfers,
    events: Option<Arc<dyn Events>>,
    /// See [`Inner::reserve_flushes`].
    flushes: sync::SetOnce<[Arc<cq::Flush>; 2]>,
    /// There once receives are ignored, whose memory goes with this.
    ignores: sync::SetOnce<[cq::ArrayWatch; 2]>,
    #[pin]
    user_context: context::UserContext,
}

impl QpPriv {
    fn new<'a>(
        events: Option<Arc<dyn Events>>,
        dev: &'a Device,
        has_contexts: bool,
        draining: drain::Draining,
        state: Option<State>,
    ) -> impl PinInit<Self> + 'a {
        pin_init!(Self {
            head: QpHead {
                module: dev.client().module,
                id: QpId::next(),
            },
            state <- new_mutex!(state, "rdma::Qp::state"),
            draining <- new_mutex!(draining, "rdma::Qp::draining"),
            markers <- drain::Markers::new(),
            ending: drain::WaitTime::new(),
            destroyed: sync::SetOnce::new(),
            reg_lock <- new_spinlock_irq!((), "rdma::Qp::reg_lock"),
            drain_list <- keep::KeepList::new(),
            kept <- keep::Tables::new(),
            looks_for_lost: Atomic::new(false),
            requests: sync::SetOnce::new(),
            transfers <- Transfers::new(has_contexts, dev.is_iwarp()),
            events,
            flushes: sync::SetOnce::new(),
            ignores: sync::SetOnce::new(),
            user_context <- context::UserContext::new(),
        })
    }

    /// Returns the list of the requests that belong to the QP.
    fn requests(&self) -> Result<Arc<requests::RequestList>> {
        if self.requests.as_ref().is_none() {
            let list = requests::RequestList::new()?;
            // As in `Inner::reserve_flushes`, nothing is allocated under the lock. If another
            // thread was faster, this list goes.
            let _locked = self.state.lock();
            self.requests.populate(list);
        }
        self.requests.as_ref().cloned().ok_or(EINVAL)
    }
}

/// Returns the private data of a QP.
///
/// # Safety
///
/// `qp` is a QP of this crate, and is not destroyed while what is returned is used.
#[inline]
unsafe fn qp_priv<'a>(qp: *mut bindings::ib_qp) -> &'a QpPriv {
    // SAFETY: The QP is valid, as the caller promises. `create` has set its context to a `QpPriv`
    // that outlives it.
    unsafe { &*(*qp).qp_context.cast() }
}

/// Returns the transfers of a QP.
///
/// # Safety
///
/// `qp` is a QP of this crate, and is not destroyed while what is returned is used.
#[inline]
pub(crate) unsafe fn transfers<'a>(qp: *mut bindings::ib_qp) -> &'a Transfers {
    // SAFETY: The QP is as the caller promises.
    unsafe { &qp_priv(qp).transfers }
}

/// Keeps memory to which peers have a key, until the QP is destroyed, and its MRs with it. Any
/// context.
///
/// # Safety
///
/// `qp` is a QP of this crate, and is not destroyed meanwhile.
pub(crate) unsafe fn keep_until_destroyed<T: Send + 'static>(qp: *mut bindings::ib_qp, left: T) {
    // SAFETY: The QP is as the caller promises.
    let kept = unsafe { &qp_priv(qp).kept };
    kept.add(keep::Node::new(left));
}
