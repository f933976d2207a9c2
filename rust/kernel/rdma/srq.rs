// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues.
//!
//! An [`Srq`] owns a fixed number of [`Slot`]s: receives that any of its QPs may consume. A
//! completion hands a slot out; dropping the slot posts it again. So no error path of the ULP loses
//! a receive credit (rxe may: see Documentation/srq.rst), and nobody can free a buffer that is
//! posted: the slots go only after the SRQ, and the SRQ only after its QPs.
//!
//! # Examples
//!
//! ```
//! use rdma::{
//!     context::{Atomic, Sleepable, Softirq},
//!     cq::Cq,
//!     dma::{Buf, FromDevice},
//!     pd::Pd,
//!     qp::{Caps, InitAttr, Qp},
//!     srq::{Receive, Slot, Srq},
//!     wc::Wc,
//!     wr::RecvWr,
//! };
//!
//! struct Request {
//!     buf: Buf<FromDevice>,
//! }
//!
//! impl Receive for Request {
//!     type Needs = Atomic;
//!
//!     fn recv(&self) -> RecvWr<'_> {
//!         RecvWr::new([self.buf.whole_mut()])
//!     }
//!
//!     fn done(slot: Slot<Self>, wc: &Wc, _cx: &Atomic) {
//!         if let Ok(wc) = wc.result() {
//!             pr_info!("received {} bytes\n", wc.byte_len());
//!         }
//!         drop(slot); // Posts it again.
//!     }
//! }
//!
//! fn make(pd: &Pd, cq: &Cq<Softirq>, cx: &Sleepable) -> Result<Qp<Softirq>> {
//!     let srq = Srq::create(
//!         pd,
//!         64,
//!         |_| Ok::<_, Error>(Request { buf: Buf::alloc(pd, 512, cx)? }),
//!         cx,
//!     )?;
//!     InitAttr::on_srq(pd, cq, &srq, &Caps::new(16, 0)).create(cx)
//! }
//! ```
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_srq`)

mod slot;

pub use slot::Slot;

use crate::{
    bindings,
    context::{
        Context,
        Sleepable, //
    },
    cq::{
        self,
        Reservation, //
    },
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    device::{
        Device,
        Name, //
    },
    objects::Object,
    pd::{
        self,
        Pd, //
    },
    qp::post::Refusal,
    refs::Kind,
    srq::slot::{
        AnyEntries,
        Entries, //
    },
    sync::SlotsOut,
    wc::Wc,
    wr::RecvWr, //
};
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};
use kernel::{
    error::{
        from_err_ptr,
        to_result, //
    },
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        rcu,
        Arc,
        Mutex, //
    },
    time::msecs_to_jiffies,
    types::Opaque, //
};

/// What a slot of an SRQ keeps, and what happens when it receives.
///
/// `N` is the number of scatter entries of each receive.
pub trait Receive<const N: usize = 1>: Sized + Send + 'static {
    /// The context that the handler needs. A QP whose CQ is polled elsewhere cannot be put on the
    /// SRQ.
    type Needs: Context;

    /// Describes where a message goes. Called each time that the slot is posted.
    ///
    /// Any context.
    fn recv(&self) -> RecvWr<'_, N>;

    /// Takes a slot whose receive has completed (`ib_cqe.done`), in the context of the CQ of the QP
    /// that received.
    ///
    /// Handlers of several CQs may run at the same time.
    fn done(slot: Slot<Self, N>, wc: &Wc, cx: &Self::Needs);
}

/// What an SRQ is like now, as `struct ib_srq_attr`.
#[derive(Clone, Copy, Debug)]
pub struct Attr {
    /// The number of receives that can be posted: at least the number of slots.
    pub max_wr: u32,
    /// The number of entries that a receive can have.
    pub max_sge: u32,
    /// The limit that is armed, or zero.
    pub limit: u32,
}

/// A shared receive queue with slots of type `T`.
///
/// A counted handle. The SRQ is destroyed, from a work item, when the last handle and all QPs on it
/// are gone and every slot that was kept is dropped; the values of its slots are dropped then.
pub struct Srq<T: Receive<N>, const N: usize = 1> {
    inner: Arc<Inner>,
    _slots: PhantomData<fn() -> T>,
}

impl<T: Receive<N>, const N: usize> Clone for Srq<T, N> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            _slots: PhantomData,
        }
    }
}

impl<T: Receive<N>, const N: usize> Srq<T, N> {
    /// Creates an SRQ with `slots` slots (`ib_create_srq`) and posts all of them
    /// (`ib_post_srq_recv`). `init` makes the value of each.
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device has no SRQs; `EINVAL` if it has none of that size, or if a slot
    /// describes memory of another PD; what `init` returned; `ENOMEM`, or the driver's error.
    pub fn create<I: PinInit<T, Error>>(
        pd: &Pd,
        slots: u32,
        init: impl FnMut(u32) -> I,
        cx: &Sleepable,
    ) -> Result<Self> {
        Self::with_events(pd, slots, init, Events::none(), cx)
    }

    /// As [`Srq::create`]; `events` is called for each event of the SRQ, in any context: it must
    /// not sleep.
    ///
    /// # Errors
    ///
    /// As [`Srq::create`].
    pub fn create_with_events<I: PinInit<T, Error>>(
        pd: &Pd,
        slots: u32,
        init: impl FnMut(u32) -> I,
        events: impl Fn(Event) + Send + Sync + 'static,
        cx: &Sleepable,
    ) -> Result<Self> {
        Self::with_events(pd, slots, init, Events::new(events)?, cx)
    }

    fn with_events<I: PinInit<T, Error>>(
        pd: &Pd,
        slots: u32,
        init: impl FnMut(u32) -> I,
        events: Events,
        cx: &Sleepable,
    ) -> Result<Self> {
        let sges = const { N as u32 };
        check(pd, slots, sges)?;
        let entries = KBox::new(Entries::<T, N>::new(slots, init)?, GFP_KERNEL)?;
        let inner = create(pd, slots, sges, entries, events, cx)?;
        Ok(Self {
            inner,
            _slots: PhantomData,
        })
    }

    /// Returns the number of slots: as many entries does the SRQ reserve, once, from each CQ that its
    /// QPs complete to.
    pub fn slots(&self) -> u32 {
        self.inner.slots
    }

    /// Returns the number of slots that could not be posted again, as the driver refused them: they
    /// were reported, and are dropped with the SRQ.
    pub fn set_aside(&self) -> u32 {
        self.inner.queue().set_aside()
    }

    /// Asks for [`Event::LimitReached`], once, as soon as fewer than `limit` receives are posted
    /// (`ib_modify_srq`, `IB_SRQ_LIMIT`). Zero asks for none.
    ///
    /// # Errors
    ///
    /// `EINVAL` for more than there are slots, or the driver's error.
    pub fn arm_limit(&self, limit: u32, _cx: &Sleepable) -> Result {
        if limit > self.slots() {
            return Err(EINVAL);
        }
        let mut attr = bindings::ib_srq_attr {
            srq_limit: limit,
            ..Default::default()
        };
        let mask = bindings::ib_srq_attr_mask_IB_SRQ_LIMIT;
        // SAFETY: The SRQ is there while `inner` lives; the attributes are complete for this mask.
        to_result(unsafe { bindings::ib_modify_srq(self.inner.as_raw(), &raw mut attr, mask) })
    }

    /// Asks the driver what the SRQ is like (`ib_query_srq`).
    ///
    /// # Errors
    ///
    /// The driver's error.
    pub fn query(&self, _cx: &Sleepable) -> Result<Attr> {
        let mut attr = bindings::ib_srq_attr::default();
        // SAFETY: The SRQ is there while `inner` lives.
        to_result(unsafe { bindings::ib_query_srq(self.inner.as_raw(), &raw mut attr) })?;
        Ok(Attr {
            max_wr: attr.max_wr,
            max_sge: attr.max_sge,
            limit: attr.srq_limit,
        })
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }
}

/// What happens to an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Fewer receives are posted than the limit that was armed says
    /// (`IB_EVENT_SRQ_LIMIT_REACHED`).
    LimitReached,
    /// The SRQ has failed and receives nothing any more (`IB_EVENT_SRQ_ERR`). This is reported in
    /// the log, too.
    Failed,
}

type Function = dyn Fn(Event) + Send + Sync;

/// Who is told of the events of an SRQ.
struct Events(Option<KBox<Function>>);

impl Events {
    const fn none() -> Self {
        Self(None)
    }

    fn new(function: impl Fn(Event) + Send + Sync + 'static) -> Result<Self> {
        Ok(Self(Some(
            KBox::new(function, GFP_KERNEL)? as KBox<Function>
        )))
    }
}

/// The `event_handler` of every SRQ.
///
/// # Safety
///
/// Called by the driver, with the SRQ's context, which is an [`Events`].
unsafe extern "C" fn event(event: *mut bindings::ib_event, context: *mut c_void) {
    // SAFETY: Both are valid during this call.
    let (kind, device, events) =
        unsafe { ((*event).event, (*event).device, &*context.cast::<Events>()) };
    let event = match kind {
        bindings::ib_event_type_IB_EVENT_SRQ_LIMIT_REACHED => Event::LimitReached,
        bindings::ib_event_type_IB_EVENT_SRQ_ERR => {
            // SAFETY: An event comes from a device that is there.
            pr_err!("{}: an SRQ has failed\n", unsafe { Name::of(device) });
            Event::Failed
        }
        _ => return,
    };
    if let Some(function) = &events.0 {
        function(event);
    }
}

/// How long to wait between two messages about slots that are kept, in milliseconds.
const REPORT_MS: u32 = 10_000;

/// What the slots of one SRQ share.
///
/// # Invariants
///
/// - `raw` is an SRQ that can be posted to, until `closed` was set and an RCU grace period has
///   passed.
/// - `kept` counts the slots that come back after `closed` was set; `back` is completed when the
///   last one comes.
#[pin_data]
struct Queue {
    raw: NonNull<bindings::ib_srq>,
    pd: pd::Id,
    closed: Atomic<bool>,
    kept: SlotsOut,
    aside: Atomic<u32>,
    #[pin]
    back: Opaque<bindings::completion>,
}

// SAFETY: `struct ib_srq` may be used from any thread, and the rest is atomics and a completion.
unsafe impl Send for Queue {}
// SAFETY: A shared reference gives the SRQ, atomics and a completion, which may be used from any
// thread.
unsafe impl Sync for Queue {}

impl Queue {
    fn new(raw: NonNull<bindings::ib_srq>, pd: &Pd) -> impl PinInit<Self> {
        let pd = pd.id();
        // INVARIANT: The SRQ is open.
        pin_init!(Self {
            raw,
            pd,
            closed: Atomic::new(false),
            kept: SlotsOut::new(),
            aside: Atomic::new(0),
            back <- Opaque::ffi_init(|slot| {
                // SAFETY: `slot` is valid for writes; a completion is initialised in place and
                // stays pinned.
                unsafe { bindings::init_completion(slot) }
            }),
        })
    }

    /// Says whether slots that are dropped are kept from the SRQ. While it says no, and the RCU
    /// read lock is held, the SRQ is there.
    #[inline]
    fn is_closed(&self, _rcu: &rcu::Guard) -> bool {
        self.closed.load(Relaxed)
    }

    /// Posts a receive (`ib_post_srq_recv`).
    ///
    /// # Safety
    ///
    /// The SRQ is there, and `wr` is a valid request without a successor, whose memory stays until
    /// it has completed or the SRQ is gone.
    #[inline]
    unsafe fn post(&self, wr: *mut bindings::ib_recv_wr) -> Result<(), Refusal> {
        let srq = self.raw.as_ptr();
        // SAFETY: The SRQ is there and `wr` valid, as the caller promises, and `check` has seen
        // that the device has the operation. It names what it refuses in the successor: see
        // `send_raw`.
        let ret = unsafe {
            let bad = (&raw mut (*wr).next).cast();
            ((*(*srq).device).ops.post_srq_recv.unwrap_unchecked())(srq, wr, bad)
        };
        if ret == 0 {
            return Ok(());
        }
        // SAFETY: `wr` is valid; the driver has just returned `ret` for it, and names it in its
        // successor.
        Err(unsafe { Refusal::of_recv(ret, wr) })
    }

    /// Counts a slot that cannot be posted. The caller holds the RCU read lock, or has the SRQ.
    #[cold]
    #[inline(never)]
    fn put_aside(&self, refusal: Refusal) {
        let e = refusal.error();
        if !refusal.named {
            // It may be in the queue, so it counts as posted: it is handed out when it completes.
            pr_err!(
                "a driver did not say that it refused a slot of an SRQ ({e:?}): taken for posted\n"
            );
            return;
        }
        let n = self.aside.fetch_add(1, Relaxed) + 1;
        pr_err!("a slot of an SRQ could not be posted ({e:?}): {n} set aside\n");
    }

    fn set_aside(&self) -> u32 {
        self.aside.load(Relaxed)
    }

    /// A slot has come back after the queue was closed. The caller does not touch it any more.
    #[cold]
    #[inline(never)]
    fn put(&self) {
        if self.kept.put() {
            // SAFETY: `close` cannot have returned: it waits for this completion, and returns only
            // after `complete` has done its last access.
            unsafe { bindings::complete(self.back.get()) };
        }
    }

    /// Closes the queue to slots that come back, and waits for those that are kept.
    fn close(&self, entries: &dyn AnyEntries, dev: &Device, _cx: &Sleepable) {
        self.closed.store(true, Relaxed);
        // After this nobody is posting, and who drops a slot sees that the queue is closed.
        rcu::synchronize_rcu();
        // No QP is there, so no slot is handed out any more, and each one that was when the queue
        // was closed still says so.
        if !self.kept.wait_for(entries.handed_out()) {
            return;
        }
        loop {
            // SAFETY: `back` is initialised and pinned; the token says that this task may sleep.
            let left = unsafe {
                bindings::wait_for_completion_timeout(self.back.get(), msecs_to_jiffies(REPORT_MS))
            };
            if left != 0 {
                return;
            }
            let kept = self.kept.now();
            pr_warn!("{dev}: the end of an SRQ waits for {kept} slot(s)\n");
        }
    }
}

/// What an SRQ needs at its end.
///
/// # Invariants
///
/// `raw` is the SRQ of `queue`, whose slots are `entries`.
struct State {
    raw: NonNull<bindings::ib_srq>,
    queue: Pin<KBox<Queue>>,
    entries: KBox<dyn AnyEntries>,
    _events: KBox<Events>,
    pd: Pd,
    // Dropped last: the ULP may be gone after that.
    _listed: Object,
}

// SAFETY: An SRQ may be destroyed from any thread; the rest is `Send`.
unsafe impl Send for State {}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        let dev = self.pd.device();
        self.queue.close(&*self.entries, dev, cx);
        // SAFETY: By the type invariant `raw` is the SRQ of `queue`. The QPs are gone, and nobody
        // posts any more.
        let ret =
            unsafe { bindings::ib_destroy_srq_user(self.raw.as_ptr(), core::ptr::null_mut()) };
        if ret != 0 {
            pr_err!("{dev}: an SRQ could not be destroyed ({ret}); it is leaked with its slots\n");
            return Fate::Leak;
        }
        Fate::Gone
    }
}

/// What the handles of one SRQ share.
#[pin_data]
pub(crate) struct Inner {
    slots: u32,
    #[pin]
    shares: Reservations,
    state: Deferred<State>,
}

// SAFETY: A shared reference gives the SRQ and its queue only, which may be used from any thread.
unsafe impl Sync for Inner {}
// SAFETY: All parts are `Send`.
unsafe impl Send for Inner {}

impl Inner {
    pub(crate) fn as_raw(&self) -> *mut bindings::ib_srq {
        self.state.raw.as_ptr()
    }

    pub(crate) fn pd(&self) -> &Pd {
        &self.state.pd
    }

    fn queue(&self) -> &Queue {
        &self.state.queue
    }
}

/// Says whether the device can have an SRQ of this size.
fn check(pd: &Pd, slots: u32, sges: u32) -> Result {
    let dev = pd.device();
    // SAFETY: The device is registered while `pd` lives; its operations do not change.
    let ops = unsafe { &(*dev.as_raw()).ops };
    if ops.create_srq.is_none() || ops.post_srq_recv.is_none() || ops.destroy_srq.is_none() {
        return Err(EOPNOTSUPP);
    }
    if slots == 0 || slots > dev.max_srq_wr() || sges > dev.max_srq_sge() {
        return Err(EINVAL);
    }
    Ok(())
}

/// Creates an SRQ, after [`check`]. Not generic, so that what it needs at its end is code of this
/// module.
#[inline(never)]
fn create(
    pd: &Pd,
    slots: u32,
    sges: u32,
    entries: KBox<dyn AnyEntries>,
    events: Events,
    _cx: &Sleepable,
) -> Result<Arc<Inner>> {
    let dev = pd.device();
    let reserved = Deferred::reserve()?;
    let listed = dev.list(Kind::Srq)?;
    let events = KBox::new(events, GFP_KERNEL)?;
    let mut attr = bindings::ib_srq_init_attr {
        event_handler: Some(event),
        srq_context: core::ptr::from_ref(&*events).cast_mut().cast(),
        attr: bindings::ib_srq_attr {
            max_wr: slots,
            max_sge: sges,
            srq_limit: 0,
        },
        srq_type: bindings::ib_srq_type_IB_SRQT_BASIC,
        ..Default::default()
    };
    // SAFETY: The PD is alive, and `events` outlives the SRQ.
    let raw = from_err_ptr(unsafe {
        bindings::ib_create_srq_user(
            pd.as_raw(),
            &raw mut attr,
            core::ptr::null_mut(),
            core::ptr::null_mut(),
        )
    })?;
    let raw = NonNull::new(raw).ok_or(ENOMEM)?;
    let queue = match KBox::pin_init(Queue::new(raw, pd), GFP_KERNEL) {
        Ok(queue) => queue,
        Err(e) => {
            // SAFETY: Just created; nothing was posted.
            let ret = unsafe { bindings::ib_destroy_srq_user(raw.as_ptr(), core::ptr::null_mut()) };
            if ret != 0 {
                core::mem::forget((listed, events, pd.clone()));
            }
            return Err(e);
        }
    };
    // SAFETY: Just created; the number does not change.
    listed.set_num(unsafe { raw.as_ref() }.res.id);
    // INVARIANT: As created.
    let state = reserved.fill(State {
        raw,
        queue,
        entries,
        _events: events,
        pd: pd.clone(),
        _listed: listed,
    });
    // SAFETY: The SRQ is new, these are its slots, and it goes before its queue does.
    unsafe { state.entries.post_all(NonNull::from(&*state.queue)) }?;
    Arc::pin_init(
        pin_init!(Inner {
            slots,
            shares <- Reservations::new(),
            state,
        }),
        GFP_KERNEL,
    )
}

// A slot has one completion at most that was not handled, as only its handler posts it again. So
// however many QPs on an SRQ share a CQ, the SRQ leases as many entries of it as there are slots,
// once.

/// The QPs of an SRQ that complete to one CQ.
///
/// # Invariants
///
/// `qps` is the number of [`SrqReservation`]s for the CQ of the reserve, and not zero.
struct Entry {
    reservation: Reservation,
    qps: usize,
}

#[pin_data]
struct Reservations {
    #[pin]
    list: Mutex<KVec<Entry>>,
}

impl Reservations {
    fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(KVec::new()),
        })
    }
}

/// A QP's part in an SRQ: keeps it, and its lease from the QP's CQ.
pub(crate) struct SrqReservation {
    srq: Arc<Inner>,
    cq: Arc<cq::Inner>,
}

impl SrqReservation {
    /// Takes part, for a QP that completes to `cq`.
    ///
    /// # Errors
    ///
    /// `EINVAL` if the CQ is shared with other modules: these may poll it, so that the QP's last
    /// receive would not be known to be over. `ENOSPC` if it has no room, or `ENOMEM`.
    pub(crate) fn new(srq: &Arc<Inner>, cq: &Arc<cq::Inner>) -> Result<Self> {
        if cq.is_shared() {
            return Err(EINVAL);
        }
        let mut list = srq.shares.list.lock();
        match list
            .iter_mut()
            .find(|entry| Arc::ptr_eq(entry.reservation.cq(), cq))
        {
            // INVARIANT: One more.
            Some(entry) => entry.qps += 1,
            None => {
                let reservation = cq::reserve(cq, srq.slots)?;
                // INVARIANT: The first.
                list.push(
                    Entry {
                        reservation,
                        qps: 1,
                    },
                    GFP_KERNEL,
                )?;
            }
        }
        Ok(Self {
            srq: srq.clone(),
            cq: cq.clone(),
        })
    }

    pub(crate) fn cq(&self) -> &Arc<cq::Inner> {
        &self.cq
    }
}

impl Drop for SrqReservation {
    fn drop(&mut self) {
        self.srq.shares.list.lock().retain(|entry| {
            if !Arc::ptr_eq(entry.reservation.cq(), &self.cq) {
                return true;
            }
            // INVARIANT: This one goes.
            entry.qps -= 1;
            entry.qps != 0
        });
    }
}
