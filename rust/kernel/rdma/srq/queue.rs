// SPDX-License-Identifier: GPL-2.0

//! The C object, and its end.

use super::{
    events::{
        self,
        Events, //
    },
    kept::Kept,
    share::Shares,
    slot::AnyEntries, //
};
use crate::{
    bindings,
    context::Sleepable,
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    device::Device,
    gate::Kind,
    objects::Listed,
    pd::{
        self,
        Pd, //
    },
    qp::post::Refusal, //
};
use core::ptr::NonNull;
use kernel::{
    error::from_err_ptr,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        rcu,
        Arc, //
    },
    time::msecs_to_jiffies,
    types::Opaque, //
};

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
pub(super) struct Queue {
    raw: NonNull<bindings::ib_srq>,
    pub(super) pd: pd::Id,
    closed: Atomic<bool>,
    kept: Kept,
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
            kept: Kept::new(),
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
    pub(super) fn is_closed(&self, _rcu: &rcu::Guard) -> bool {
        self.closed.load(Relaxed)
    }

    /// Posts a receive (`ib_post_srq_recv`).
    ///
    /// # Safety
    ///
    /// The SRQ is there, and `wr` is a valid request without a successor, whose memory stays until
    /// it has completed or the SRQ is gone.
    #[inline]
    pub(super) unsafe fn post(&self, wr: *mut bindings::ib_recv_wr) -> Result<(), Refusal> {
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
    pub(super) fn put_aside(&self, refusal: Refusal) {
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

    pub(super) fn set_aside(&self) -> u32 {
        self.aside.load(Relaxed)
    }

    /// A slot has come back after the queue was closed. The caller does not touch it any more.
    #[cold]
    #[inline(never)]
    pub(super) fn came_back(&self) {
        if self.kept.came_back() {
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
pub(super) struct State {
    raw: NonNull<bindings::ib_srq>,
    queue: Pin<KBox<Queue>>,
    entries: KBox<dyn AnyEntries>,
    _events: KBox<Events>,
    pd: Pd,
    // Dropped last: the ULP may be gone after that.
    _hold: Listed,
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
    pub(super) slots: u32,
    #[pin]
    pub(super) shares: Shares,
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

    pub(super) fn queue(&self) -> &Queue {
        &self.state.queue
    }
}

/// Says whether the device can have an SRQ of this size.
pub(super) fn check(pd: &Pd, slots: u32, sges: u32) -> Result {
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
pub(super) fn create(
    pd: &Pd,
    slots: u32,
    sges: u32,
    entries: KBox<dyn AnyEntries>,
    events: Events,
    _cx: &Sleepable,
) -> Result<Arc<Inner>> {
    let dev = pd.device();
    let reserved = Deferred::reserve()?;
    let hold = dev.list(Kind::Srq)?;
    let events = KBox::new(events, GFP_KERNEL)?;
    let mut attr = bindings::ib_srq_init_attr {
        event_handler: Some(events::event),
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
                core::mem::forget((hold, events, pd.clone()));
            }
            return Err(e);
        }
    };
    // SAFETY: Just created; the number does not change.
    hold.set_num(unsafe { raw.as_ref() }.res.id);
    // INVARIANT: As created.
    let state = reserved.fill(State {
        raw,
        queue,
        entries,
        _events: events,
        pd: pd.clone(),
        _hold: hold,
    });
    // SAFETY: The SRQ is new, these are its slots, and it goes before its queue does.
    unsafe { state.entries.post_all(NonNull::from(&*state.queue)) }?;
    Arc::pin_init(
        pin_init!(Inner {
            slots,
            shares <- Shares::new(),
            state,
        }),
        GFP_KERNEL,
    )
}
