// SPDX-License-Identifier: GPL-2.0

//! Completion queues.
//!
//! The context that a [`Cq`] is polled in, and that handlers run in, is a parameter of its type:
//! see [`context`](crate::context) and Documentation/cq.rst.
//!
//! A CQ cannot overrun: a QP reserves as many entries as its queues can have outstanding when it is
//! created, and creation fails if there are not enough.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_cq`);
//! C source: `drivers/infiniband/core/cq.c`

mod array;
mod handler_cell;
mod waited;

pub use array::{
    Completion,
    Completions,
    WcArray, //
};
pub use handler_cell::HandlerCell;
use waited::{
    completed,
    Waiting, //
};
pub use waited::{
    Notify,
    Wait, //
};

use crate::{
    atomic::{
        AtomicBool,
        AtomicPtr,
        AtomicU32,
        AtomicUsize,
        Ordering, //
    },
    cqe,
    deferred,
    device::{
        self,
        Device, //
    },
    objects,
    prelude::internal::*,
    sync::{
        Empties,
        FreeCqes,
        PollLock, //
    },
    trace,
    wc::{
        self,
        Wc, //
    }, //
};
use core::{
    cell::UnsafeCell,
    mem, //
};
use kernel::{
    sync::{
        atomic,
        barrier::{
            self,
            smp_mb, //
        },
        rcu::synchronize_rcu, //
    },
    workqueue, //
};

/// A counted handle of a completion queue that is polled in context `C`. The CQ is freed, from a
/// work item, when the last handle and every QP that uses it are gone.
///
/// # Invariants
///
/// The CQ is polled in `C`, or `C` is [`AnyContext`]. Contexts are types of this crate without
/// parameters, so they have no supertypes.
pub struct Cq<C: PollContext> {
    pub(crate) inner: Shared,
    _context: PhantomData<fn() -> C>,
}

/// A reference to the CQ.
pub(crate) type Shared = deferred::Deferred<Inner>;

fn destroy(cq: Shared, cx: &Sleepable) -> Result {
    if cq.is_polled_by_current() {
        return Err(EDEADLK);
    }
    cq.destroy(cx)
}

impl<C: PollContext> Clone for Cq<C> {
    fn clone(&self) -> Self {
        Self::from_shared(self.inner.clone())
    }
}

impl<C: FixedContext> Cq<C> {
    const KIND: Kind = if C::WAITED {
        Kind::Created
    } else {
        Kind::Allocated
    };

    /// Allocates a CQ with at least `entries` entries on completion vector `vector`
    /// (`ib_alloc_cq`; `ib_create_cq` for a [`Waited`] one).
    ///
    /// Size it by [`Caps::entries`](crate::qp::Caps::entries) of the QPs that will use it. Fails
    /// with `EINVAL` if the device has no CQ of that size or no such vector; `ENODEV` for a
    /// `Waited` one if the device is being removed; `ENOMEM`, or the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Softirq}, cq::Cq, device::Device};
    /// fn make(dev: &Device, cx: &Sleepable) -> Result<Cq<Softirq>> {
    ///     let cq = Cq::alloc(dev, 128, 0, cx)?;
    ///     // Not all devices can.
    ///     let _ = cq.moderate(16, 10, cx);
    ///     Ok(cq)
    /// }
    /// ```
    pub fn alloc(dev: &Device, entries: u32, vector: u32, cx: &Sleepable) -> Result<Self> {
        Self::new(dev, entries, Some(vector), Self::KIND, cx)
    }

    /// Allocates a CQ on a completion vector of the core's choice (`ib_alloc_cq_any`). Fails as
    /// [`Cq::alloc`].
    pub fn alloc_any(dev: &Device, entries: u32, cx: &Sleepable) -> Result<Self> {
        Self::new(dev, entries, None, Self::KIND, cx)
    }

    fn new(
        dev: &Device,
        entries: u32,
        vector: Option<u32>,
        kind: Kind,
        cx: &Sleepable,
    ) -> Result<Self> {
        let attr = InitAttr {
            dev,
            entries,
            vector,
            context: C::RAW,
            kind,
        };
        create(attr, cx).map(Self::from_shared)
    }
}

impl<C: PollContext> Cq<C> {
    fn from_shared(shared: Shared) -> Self {
        // INVARIANT: Callers have made the CQ for this context, or clone a handle of it.
        Self {
            inner: shared,
            _context: PhantomData,
        }
    }

    /// Makes the device raise an event for every `count` completions, or `period_us` microseconds
    /// after the first (`rdma_set_cq_moderation`). Fails with `EOPNOTSUPP` if the device cannot, or
    /// if the CQ is shared; or the driver's error.
    pub fn moderate(&self, count: u16, period_us: u16, _cx: &Sleepable) -> Result {
        let cq = self.inner.raw.as_ptr();
        // SAFETY: The CQ is valid while `self` lives.
        to_result(unsafe { bindings::rdma_set_cq_moderation(cq, count, period_us) })
    }

    /// Frees the CQ and waits until that is done (`ib_free_cq`). The handle is consumed in any
    /// case. Fails with `EBUSY` if there is another one, a QP uses the CQ, or a work item waits for
    /// its handlers since [`Qp::release_recvs`](crate::qp::Qp::release_recvs) has failed: it is
    /// freed with the last of them; with `EDEADLK` in a handler of the CQ: a work item frees it;
    /// with `EIO` if it could not be destroyed: it is leaked, and was reported.
    pub fn destroy(self, cx: &Sleepable) -> Result {
        destroy(self.inner, cx)
    }

    /// Returns the number of entries: those that the driver gave or, of a shared CQ, those that
    /// were taken.
    pub fn entries(&self) -> u32 {
        self.inner.entries
    }

    /// Returns the number of entries that no QP has reserved.
    pub fn free_entries(&self) -> u32 {
        self.inner.free.free().try_into().unwrap_or(0)
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner.dev
    }

    /// Returns the CQ as one of any context, so that code is compiled once and the context chosen
    /// at run time, as the argument of `ib_alloc_cq` is. It is polled as before.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{device::Device, prelude::*};
    /// fn alloc(dev: &Device, in_softirq: bool, cx: &Sleepable) -> Result<Cq<AnyContext>> {
    ///     Ok(if in_softirq {
    ///         Cq::<Softirq>::alloc(dev, 128, 0, cx)?.into_any()
    ///     } else {
    ///         Cq::<Workqueue>::alloc(dev, 128, 0, cx)?.into_any()
    ///     })
    /// }
    /// ```
    pub fn into_any(self) -> Cq<AnyContext> {
        // INVARIANT: The context is `AnyContext`.
        Cq {
            inner: self.inner,
            _context: PhantomData,
        }
    }
}

/// The way in which a CQ was made, and is to be freed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Allocated,
    /// It can be waited for.
    Created,
    Pooled,
}

/// The attributes that a CQ is made with.
struct InitAttr<'a> {
    dev: &'a Device,
    entries: u32,
    /// `None` for a vector of the core's choice.
    vector: Option<u32>,
    context: bindings::ib_poll_context,
    kind: Kind,
}

impl InitAttr<'_> {
    /// Fails with `EINVAL` if the device has no CQ of that size, or no such vector.
    fn check(&self) -> Result {
        let dev = self.dev;
        let entries = self.entries;
        let max = dev.attrs().max_cqe;
        // For more entries than a CQ can have the core would search its pool for ever.
        if entries == 0 || entries > max {
            crate::pr_err_ratelimited!(
                "{dev}: a CQ of {entries} entries was asked for; 1 to {max} are possible\n"
            );
            return Err(EINVAL);
        }
        let is_hint = self.kind == Kind::Pooled;
        if !is_hint && self.vector.is_some_and(|n| n >= dev.num_comp_vectors()) {
            return Err(EINVAL);
        }
        Ok(())
    }

    /// Makes the CQ, or takes entries of a pooled one. Its callbacks are not set.
    fn create_raw(&self) -> Result<NonNull<bindings::ib_cq>> {
        let device = self.dev.as_raw();
        let caller = self.dev.client().name.as_char_ptr();
        let len = c_int::try_from(self.entries)?;
        let private = ptr::null_mut();
        // SAFETY: The device is registered while `dev` lives, the arguments are in range, and the
        // client's name outlives the CQ.
        let raw = unsafe {
            match (self.kind, self.vector) {
                (Kind::Allocated, Some(vector)) => {
                    let vector = vector.try_into()?;
                    bindings::__ib_alloc_cq(device, private, len, vector, self.context, caller)
                }
                (Kind::Allocated, None) => {
                    bindings::__ib_alloc_cq_any(device, private, len, self.context, caller)
                }
                (Kind::Created, _) => {
                    let attr = bindings::ib_cq_init_attr {
                        cqe: self.entries,
                        comp_vector: self.vector.unwrap_or_else(|| any_vector(self.dev)),
                        flags: 0,
                    };
                    bindings::__ib_create_cq(device, None, None, private, &attr, caller)
                }
                (Kind::Pooled, _) => {
                    let hint = self.vector.map_or(Ok(-1), c_int::try_from)?;
                    bindings::ib_cq_pool_get(device, self.entries, hint, self.context)
                }
            }
        };
        let raw = NonNull::new(from_err_ptr(raw)?).ok_or(ENOMEM)?;
        if self.kind == Kind::Allocated {
            // Drivers do not write the flags of a completion that has failed, which are looked at.
            //
            // SAFETY: The CQ was just made, with an array of so many entries that the core polls
            // into. No QP completes to it yet.
            unsafe { ptr::write_bytes((*raw.as_ptr()).wc, 0, wc::POLL_BATCH) };
        }
        Ok(raw)
    }

    /// Returns the name of the context, as the list of objects shows it.
    fn context_name(&self) -> &'static str {
        match self.context {
            Softirq::RAW => Softirq::NAME,
            Workqueue::RAW => Workqueue::NAME,
            UnboundWorkqueue::RAW => UnboundWorkqueue::NAME,
            _ if self.kind == Kind::Created => Waited::NAME,
            _ => Direct::NAME,
        }
    }
}

/// Makes a CQ, or takes entries of a pooled one. Neither generic nor inlined: see `Reserved::fill`.
#[inline(never)]
fn create(mut attr: InitAttr<'_>, _cx: &Sleepable) -> Result<Shared> {
    attr.check()?;
    // `irq_poll` keeps a list for each CPU without a lock, as softirqs of a CPU run one after the
    // other. On PREEMPT_RT they do not, and there a work item polls.
    let softirqs_run_together = cfg!(all(CONFIG_PREEMPT_RT, not(CONFIG_PREEMPT_RT_NEEDS_BH_LOCK)));
    if softirqs_run_together && attr.context == Softirq::RAW {
        attr.context = Workqueue::RAW;
    }
    let reserved = deferred::Deferred::reserve()?;
    let wcs = if attr.context == Direct::RAW {
        let wcs: Wcs = [const { MaybeUninit::uninit() }; wc::POLL_BATCH];
        Some(KBox::new(UnsafeCell::new(wcs), GFP_KERNEL)?)
    } else {
        None
    };
    let kind = attr.kind;
    let waiting = (kind == Kind::Created).then(Waiting::new).transpose()?;
    let dev = attr.dev;
    let mut object = dev.object(crate::refs::ObjectKind::Cq);
    // What is gone leaves nothing in a CQ that does not exist yet.
    let gone = match kind {
        Kind::Pooled => 0,
        _ => dev.inner().mrs.all_gone(),
    };
    let raw = attr.create_raw()?;
    // SAFETY: The CQ was just made or taken; its size and its number do not change.
    let (cqe, num) = unsafe { ((*raw.as_ptr()).cqe, (*raw.as_ptr()).res.id) };
    let entries = match kind {
        Kind::Pooled => attr.entries,
        // The driver may have given more than were asked for.
        _ => cqe.unsigned_abs(),
    };
    object.num = Some(num);
    object.summary = objects::Summary::Cq {
        context: attr.context_name(),
        entries,
    };
    const { assert!(deferred::VALUE_AT + mem::offset_of!(Inner, kind) <= 64) };
    // INVARIANT: Just made or taken.
    let Ok(shared) = reserved.init(init!(Inner {
        raw,
        empties: Empties::new(wcs.is_some()),
        wcs,
        poll_lock: PollLock::new(),
        failed: AtomicBool::new(false),
        arrays: AtomicU32::new(UNUSED),
        // More than a `c_int` can be was refused.
        free: FreeCqes::new(entries.try_into().unwrap_or(i32::MAX)),
        entries,
        quiet: AtomicUsize::new(gone),
        kind,
        waiting,
        dev: dev.clone(),
        object,
    }));
    if kind == Kind::Pooled {
        return Ok(shared);
    }
    // SAFETY: The CQ was just made. No QP uses it yet, and nobody asks for a notification, so the
    // driver calls nothing back, and the core reads none of these fields. Its context stays
    // until it is freed.
    unsafe {
        let cq = raw.as_ptr();
        (*cq).cq_context = ptr::from_ref::<Inner>(&shared).cast_mut().cast();
        (*cq).event_handler = Some(event);
        if kind == Kind::Created {
            (*cq).comp_handler = Some(completed);
            (*cq).poll_ctx = attr.context;
        }
    }
    if let Some(waiting) = &shared.waiting {
        dev.inner().removal.add(waiting.clone())?;
    }
    Ok(shared)
}

/// Chooses a completion vector as `ib_alloc_cq_any` does.
fn any_vector(dev: &Device) -> u32 {
    static NEXT: atomic::Atomic<u32> = atomic::Atomic::new(0);
    let vectors = dev.num_comp_vectors().min(kernel::cpu::nr_cpu_ids());
    let next = NEXT.fetch_add(1, atomic::Relaxed);
    next.checked_rem(vectors).unwrap_or(0)
}

impl<C: CorePolled + FixedContext> Cq<C> {
    /// Takes `entries` entries of a CQ that other users of the device share, other modules among
    /// them (`ib_cq_pool_get`). `vector` is a hint: the number of a completion vector or, modulo
    /// the number of vectors, of a CPU; or the core's choice.
    ///
    /// A failure of a shared CQ goes unseen. Such a CQ cannot be moderated, and is not for QPs on
    /// an SRQ, nor for those with a [context](crate::qp::Qp::set_context). Fails with `EINVAL` if
    /// the device has no CQ of that size; `ENOMEM`, or the driver's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::{Sleepable, Workqueue}, cq::Cq, device::Device};
    /// fn take(dev: &Device, cx: &Sleepable) -> Result<Cq<Workqueue>> {
    ///     Cq::pool_get(dev, 128, None, cx)
    /// }
    /// ```
    pub fn pool_get(
        dev: &Device,
        entries: u32,
        vector: Option<u32>,
        cx: &Sleepable,
    ) -> Result<Self> {
        Self::new(dev, entries, vector, Kind::Pooled, cx)
    }
}

/// A completion queue, which its handles share, and all that its end needs. It is the context of
/// the CQ's callbacks.
///
/// # Invariants
///
/// `raw` is a CQ of `dev` of this `kind`, and valid until `teardown`, the last call that uses it,
/// has freed it. `entries` are its own, or those taken of it where it is shared.
// What a poll reads comes first: in an item, behind the count of references, that is one cache
// line.
#[repr(C)]
pub(crate) struct Inner {
    pub(crate) raw: NonNull<bindings::ib_cq>,
    /// Used by the holder of `poll_lock`. `None` if the core polls the CQ.
    wcs: Option<KBox<UnsafeCell<Wcs>>>,
    poll_lock: PollLock,
    pub(crate) empties: Empties,
    /// What a poll into an array looks at: [`UNUSED`], and [`WATCH`] for each [`ArrayWatch`].
    arrays: AtomicU32,
    failed: AtomicBool,
    kind: Kind,
    free: FreeCqes,
    entries: u32,
    /// The number of the first MRs that were gone when the core's poller had nothing to do. No
    /// completion by a key of one of them is left.
    quiet: AtomicUsize,
    /// `None` unless the CQ can be waited for.
    waiting: Option<Arc<Waiting>>,
    pub(crate) dev: Device,
    // Dropped last: the ULP may be gone after that.
    object: objects::Object,
}

// SAFETY: `struct ib_cq` may be used from any thread, and the other fields are `Send`.
unsafe impl Send for Inner {}
// SAFETY: `struct ib_cq` may be used from any thread, `wcs` is used under `poll_lock` only, and the
// other fields are `Sync`.
unsafe impl Sync for Inner {}

/// Of [`Inner::arrays`]: no completion was polled into an array of a caller.
const UNUSED: u32 = 1;

/// Of [`Inner::arrays`]: one drain that waits for its markers, or a QP whose receives are ignored.
const WATCH: u32 = 2;

/// The callbacks of the markers of drains, as addresses; zero before there was a drain.
static MARKERS: [atomic::Atomic<usize>; 2] = [const { atomic::Atomic::new(0) }; 2];

/// Returns whether a request completes to a marker of a drain, or is [ignored](cqe::ignore).
///
/// # Safety
///
/// The callback is valid.
unsafe fn is_watched(cqe: *const bindings::ib_cqe) -> bool {
    // SAFETY: The callback is valid, as the caller promises.
    let (done, is_ignored) = unsafe { ((*cqe).done, cqe::is_ignored(cqe)) };
    let done = done.map_or(0, |done| done as usize);
    is_ignored || (MARKERS.iter()).any(|marker| marker.load(atomic::Relaxed) == done)
}

/// While it lives, markers of drains, and completions that are ignored, do not stay in an array
/// that they are polled into, but are handled at once. The holder of the array may keep what it has
/// for long: the drain would wait for it, and what is ignored is freed with its QP.
pub(crate) struct ArrayWatch(Shared);

impl ArrayWatch {
    /// The caller posts markers with these callbacks after this, so polls that find them see this.
    /// So do those after the poll lock was released, if the caller holds it.
    pub(crate) fn new(cq: &Shared, markers: [usize; 2]) -> Self {
        for (to, marker) in MARKERS.iter().zip(markers) {
            to.store(marker, atomic::Relaxed);
        }
        cq.arrays.fetch_add(WATCH, Ordering::Release);
        Self(cq.clone())
    }
}

impl Drop for ArrayWatch {
    fn drop(&mut self) {
        self.0.arrays.fetch_sub(WATCH, Ordering::Relaxed);
    }
}

/// The completions that are polled at once.
type Wcs = [MaybeUninit<bindings::ib_wc>; wc::POLL_BATCH];

impl Inner {
    /// Returns whether the current task is in a handler of this CQ, which must not wait for the CQ.
    pub(crate) fn is_polled_by_current(&self) -> bool {
        let holder = self.poll_lock.holder();
        // SAFETY: The CQ is valid while `self` lives; the helper only compares.
        unsafe { bindings::rdma_helper_cq_is_polled_by_current(self.raw.as_ptr(), holder) }
    }

    /// Takes the poll lock of a CQ. `None` if it is held, or if the core polls the CQ.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<PollGuard<'_>> {
        let here = MaybeUninit::<u8>::uninit();
        let wcs = self.wcs.as_ref()?.get();
        let is_locked = self.poll_lock.try_lock((&raw const here).addr());
        // INVARIANT: Just taken.
        is_locked.then(|| PollGuard { cq: self, wcs })
    }

    /// Returns the number that `rdma resource show cq` shows.
    pub(crate) fn num(&self) -> u32 {
        // SAFETY: The CQ is valid while `self` lives; the number does not change.
        unsafe { (*self.raw.as_ptr()).res.id }
    }

    /// Returns the array that the CQ's poller is dispatching completions from: meanwhile none is
    /// polled from the CQ. The RDMA core polls its own CQs by one softirq or work item, and others
    /// are polled by the holder of the poll lock. Null if the CQ is shared: C's drain of an SRQ may
    /// poll it.
    pub(crate) fn poller(&self) -> *const Wc {
        match &self.wcs {
            Some(wcs) => wcs.get().cast_const().cast(),
            None if self.is_shared() => ptr::null(),
            // SAFETY: The CQ is valid while `self` lives, and its array does not change.
            None => unsafe { wc::core_array(self.raw.as_ptr()) },
        }
    }

    /// Returns whether the CQ has lost completions.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Returns whether callers poll the CQ, and not the RDMA core.
    pub(crate) fn is_caller_polled(&self) -> bool {
        self.wcs.is_some()
    }

    /// Returns whether the core's poller of the CQ has nothing to do: what had completed before is
    /// processed. `true` if callers poll the CQ.
    pub(crate) fn is_idle(&self, _cx: &Sleepable) -> bool {
        // SAFETY: The CQ is valid while `self` lives.
        let context = unsafe { (*self.raw.as_ptr()).poll_ctx };
        // A poller that has just ended its turn may find that it has missed a completion. It is
        // scheduled again by the end of the softirq.
        self.is_idle_now()
            && (context != Softirq::RAW || {
                synchronize_rcu();
                self.is_idle_now()
            })
    }

    /// As [`Inner::is_idle`], by one look: a softirq may be about to find that it has missed a
    /// completion. Any context.
    fn is_idle_now(&self) -> bool {
        /// `IRQ_POLL_F_SCHED`.
        const SCHEDULED: c_ulong = 1 << 0;
        let cq = self.raw.as_ptr();
        // SAFETY: The CQ is valid while `self` lives, and the context selects the union's member.
        // The state of a poller is only looked at, as the core's own functions do.
        unsafe {
            match (*cq).poll_ctx {
                Direct::RAW => true,
                Softirq::RAW => {
                    let iop = (&raw const (*cq).__bindgen_anon_1.iop).cast::<bindings::irq_poll>();
                    (&raw const (*iop).state).read_volatile() & SCHEDULED == 0
                }
                _ => bindings::work_busy((&raw mut (*cq).__bindgen_anon_1.work).cast()) == 0,
            }
        }
    }

    /// Returns what [`Empties::since`] is to be told, for completions by keys of an MR, of which
    /// the one of this order in [`Ends`](crate::sync::Ends) may have had the same. Where the core
    /// polls, [`Empties::NEVER`] unless its poller has had nothing to do since that was gone: a
    /// handler may sleep for as long as it likes, and completions by those keys be in the CQ.
    pub(crate) fn mark(&self, before: usize) -> usize {
        if self.is_caller_polled() || self.quiet.load(Ordering::Acquire) >= before {
            return self.empties.mark();
        }
        let gone = self.dev.inner().mrs.all_gone();
        // As where a drain waits for handlers, what has happened comes before the look.
        smp_mb(barrier::Full);
        if gone < before || !self.is_idle_now() {
            return Empties::NEVER;
        }
        self.quiet.store(gone, Ordering::Release);
        self.empties.mark()
    }

    /// Waits until the core's poller of the CQ has handled what it has polled, even if it
    /// continues. As this may wait for a handler, it is for work items that nothing waits for. Does
    /// nothing if callers poll the CQ.
    pub(crate) fn flush(&self, _cx: &Sleepable) {
        let cq = self.raw.as_ptr();
        // SAFETY: The CQ is valid while `self` lives, and the context selects the union's member.
        unsafe {
            match (*cq).poll_ctx {
                Direct::RAW => {}
                // Softirqs are sections that RCU waits for.
                Softirq::RAW => synchronize_rcu(),
                _ => {
                    bindings::flush_work((&raw mut (*cq).__bindgen_anon_1.work).cast());
                }
            }
        }
    }

    /// Returns whether completions of the CQ are handled by its poller alone: no other module uses
    /// it, and none was ever polled into an array of a caller.
    pub(crate) fn has_only_poller(&self) -> bool {
        !self.is_shared() && self.arrays.load(Ordering::Relaxed) & UNUSED != 0
    }

    /// Returns whether a poller of the CQ has something to do: a handler is running, most likely.
    pub(crate) fn is_being_polled(&self, cx: &Sleepable) -> bool {
        self.poll_lock.holder() != 0 || !self.is_idle(cx)
    }

    /// Returns whether other modules may use, and poll, the CQ too.
    pub(crate) fn is_shared(&self) -> bool {
        self.kind == Kind::Pooled
    }
}

/// A work item that does [`Inner::flush`], again and again, for threads that wait for a limited
/// time.
#[pin_data]
pub(crate) struct Flush {
    #[pin]
    work: workqueue::Work<Self>,
    /// The number of flushes that were started, and of those that are done.
    started: atomic::Atomic<u32>,
    done: atomic::Atomic<u32>,
    // Dropped last: the ULP may be gone after that.
    cq: Shared,
}

kernel::impl_has_work! {
    impl HasWork<Self> for Flush { self.work }
}

impl Flush {
    /// Never inlined, so that all modules give the work item one name, as lockdep wants it.
    #[inline(never)]
    pub(crate) fn new(cq: &Shared) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            work <- kernel::new_work!("rdma::cq::Flush"),
            started: atomic::Atomic::new(0),
            done: atomic::Atomic::new(0),
            cq: cq.clone(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// As [`Inner::is_idle`].
    pub(crate) fn is_idle(&self, cx: &Sleepable) -> bool {
        self.cq.is_idle(cx)
    }

    /// Starts a flush, and returns its number. Needs no memory.
    pub(crate) fn start(this: &Arc<Self>) -> u32 {
        let number = this.started.fetch_add(1, atomic::Full).wrapping_add(1);
        // Where it is queued already, it has not begun, and then sees this one.
        let _ = this.cq.object.queue().enqueue(this.clone());
        number
    }

    /// Returns whether the flush of this number is done.
    pub(crate) fn is_done(&self, number: u32) -> bool {
        self.done.load(atomic::Acquire).wrapping_sub(number) <= u32::MAX / 2
    }
}

impl workqueue::WorkItem for Flush {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        let number = this.started.load(atomic::Acquire);
        // SAFETY: Work items run in process context.
        this.cq.flush(&unsafe { Sleepable::assume() });
        this.done.store(number, atomic::Release);
    }
}

/// The poller of a CQ, for objects that may outlive the CQ.
///
/// # Invariants
///
/// It is [`Inner::poller`] of a CQ that is not freed, or null.
pub(crate) struct Poller(AtomicPtr<Wc>);

impl Poller {
    /// # Safety
    ///
    /// `array` is [`Inner::poller`] of a CQ, and [`Poller::forget`] is called before that is freed,
    /// or what is returned is not used after that.
    pub(crate) unsafe fn new(array: *const Wc) -> Self {
        // INVARIANT: As the caller promises.
        Self(AtomicPtr::new(array.cast_mut()))
    }

    /// Returns whether it is dispatching this completion.
    #[inline]
    pub(crate) fn is_at(&self, wc: &Wc) -> bool {
        wc.is_in(self.0.load(Ordering::Relaxed))
    }

    /// Forgets the CQ, before that is freed. Relaxed is enough: memory of the CQ in which there are
    /// other completions later was allocated after it was freed, so this has happened for the
    /// thread that dispatches them.
    #[inline]
    pub(crate) fn forget(&self) {
        // INVARIANT: It is null.
        self.0.store(ptr::null_mut(), Ordering::Relaxed);
    }
}

/// A guard of the [`PollLock`] of a CQ, by which the CQ is polled.
///
/// # Invariants
///
/// The poll lock of `cq` is held, and protects the array at `wcs`, which is valid for `'a`.
pub(crate) struct PollGuard<'a> {
    cq: &'a Inner,
    wcs: *mut Wcs,
}

impl PollGuard<'_> {
    /// Gives at most `budget` completions to `handle`, and returns their number: see
    /// [`Cq::process_with`].
    #[inline]
    pub(crate) fn process(
        self,
        budget: u32,
        mut handle: impl FnMut(Completion<'_>),
    ) -> Result<u32> {
        // SAFETY: By the type invariant the lock of the array is held, and it is valid for `'a`.
        let wcs = unsafe { &mut *self.wcs };
        let mut left = budget;
        while left > 0 {
            let max = wc::POLL_BATCH.min(left as usize);
            let n = match self.poll(&mut wcs[..max]) {
                Ok(n) => n.min(max),
                Err(_) if left != budget => break,
                Err(e) => return Err(e),
            };
            for wc in &wcs[..n] {
                // SAFETY: The CQ has just given it, into the array that belongs to the lock, so its
                // owner is taken back here only.
                handle(unsafe { Completion::new(wc) });
            }
            left = left.saturating_sub(n as u32);
            if n < max {
                break;
            }
        }
        Ok(budget.saturating_sub(left))
    }

    /// Polls completions into `wcs`, and returns their number. Fails as [`Cq::process_with`].
    #[inline]
    fn poll(&self, wcs: &mut [MaybeUninit<bindings::ib_wc>]) -> Result<usize> {
        let cq = self.cq.raw.as_ptr();
        // SAFETY: The CQ is valid while `self.cq` lives, and `wcs` has that many entries.
        let n = unsafe { trace::poll_cq(cq, wcs.len() as c_int, wcs.as_mut_ptr().cast()) };
        match usize::try_from(n) {
            Ok(0) => {
                self.cq.empties.found();
                if self.cq.has_failed() {
                    return Err(EOVERFLOW);
                }
                Ok(0)
            }
            Ok(n) => Ok(n),
            Err(_) => Err(Error::from_errno(n)),
        }
    }

    /// Looks at completions that were polled into an array, for the first time or while there is an
    /// [`ArrayWatch`]: what is watched for does not wait in the array, but is handled here. Returns
    /// the number of others, which come first; if there is none, and there may be more, polls
    /// again.
    ///
    /// # Safety
    ///
    /// The first `n` completions are those that were just polled.
    unsafe fn take_watched(
        &self,
        wcs: &mut [MaybeUninit<bindings::ib_wc>],
        mut n: usize,
    ) -> Result<usize> {
        self.cq.arrays.fetch_and(!UNUSED, Ordering::Relaxed);
        loop {
            let mut others = 0;
            for at in 0..n {
                let Some(wc) = wcs.get(at) else { break };
                // SAFETY: The CQ has just given it, and its owner is taken back here or later.
                let completion = unsafe { Completion::new(wc) };
                let cqe = completion.wc.cqe();
                // SAFETY: The owner was not taken back, so the callback in it is valid.
                if !cqe.is_null() && unsafe { is_watched(cqe) } {
                    completion.dispatch();
                } else {
                    core::mem::forget(completion);
                    wcs.swap(others, at);
                    others += 1;
                }
            }
            if others > 0 || n < wcs.len() {
                return Ok(others);
            }
            n = self.poll(wcs)?;
        }
    }
}

impl Drop for PollGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.cq.poll_lock.unlock();
    }
}

impl deferred::Teardown for Inner {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn teardown(&self, cx: &Sleepable) -> Result {
        let cq = self.raw.as_ptr();
        match self.kind {
            // SAFETY: By the type invariant `raw` is from `ib_alloc_cq`; QPs have handles, so none
            // uses the CQ. No handler runs after this. The first call waits for the poll of a
            // softirq CQ, which the second one would free under its last steps; the second call
            // waits for that of others.
            Kind::Allocated => unsafe {
                bindings::rdma_helper_cq_end_poll(cq);
                bindings::ib_free_cq(cq);
            },
            Kind::Created => {
                if let Some(waiting) = &self.waiting {
                    self.dev.inner().removal.remove(&**waiting);
                }
                // SAFETY: By the type invariant `raw` is from `ib_create_cq`; QPs have handles, so
                // none uses the CQ, and there is no handle that it could be polled by. No
                // `comp_handler` runs after this.
                let ret = unsafe { bindings::ib_destroy_cq_user(cq, ptr::null_mut()) };
                return deferred::destroyed(fmt!("a CQ"), ret);
            }
            // Others go on using the CQ. The last drain has proved that all handlers of ours have
            // begun; the last of them may still have to return, to code of a module that is about
            // to be unloaded.
            Kind::Pooled => {
                self.flush(cx);
                // SAFETY: By the type invariant so many entries were taken of `raw`; QPs have
                // handles, so none of ours uses the CQ.
                unsafe { bindings::ib_cq_pool_put(cq, self.entries) };
            }
        }
        Ok(())
    }
}

/// Entries of a CQ that a QP has reserved; given back when dropped.
///
/// # Invariants
///
/// `entries` were taken from the free entries of `cq`.
pub(crate) struct Reservation {
    pub(crate) cq: Shared,
    entries: i32,
}

impl Reservation {
    pub(crate) fn entries(&self) -> u32 {
        self.entries.unsigned_abs()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.cq.free.release(self.entries);
        self.cq.object.add_count(-self.entries);
    }
}

/// Takes `entries` entries, all or nothing.
pub(crate) fn reserve(cq: &Shared, entries: u32) -> Result<Reservation> {
    let entries: i32 = entries.try_into()?;
    cq.free.reserve(entries).map_err(|free| {
        crate::pr_err_ratelimited!(
            "{}: a QP needs {entries} CQ entries, {free} of {} are free\n",
            cq.dev,
            cq.entries
        );
        ENOSPC
    })?;
    cq.object.add_count(entries);
    // INVARIANT: Just taken.
    Ok(Reservation {
        cq: cq.clone(),
        entries,
    })
}

/// Takes `entries` entries or, if there are not enough or `refused` is an error already, none.
pub(crate) fn reserve_or_none(cq: &Shared, entries: u32, refused: &mut Result) -> Reservation {
    let taken = refused.and_then(|()| reserve(cq, entries));
    taken.unwrap_or_else(|error| {
        *refused = Err(error);
        // INVARIANT: None is taken.
        Reservation {
            cq: cq.clone(),
            entries: 0,
        }
    })
}

/// `ib_cq.event_handler`.
///
/// # Safety
///
/// Called by the driver, in any context, with an event that is valid during the call, and with the
/// [`Inner`] of a CQ that is not destroyed.
unsafe extern "C" fn event(event: *mut bindings::ib_event, context: *mut c_void) {
    // SAFETY: The event is valid during this call, as the caller promises, and the context outlives
    // its CQ.
    let (event, inner) = unsafe { (&*event, &*context.cast::<Inner>()) };
    let is_error = event.event == bindings::ib_event_type_IB_EVENT_CQ_ERR;
    if !is_error || inner.failed.swap(true, Ordering::SeqCst) {
        return;
    }
    // SAFETY: The event is one of a CQ, whose handles keep its device, so this is valid.
    let device = unsafe { device::Name::of(event.device) };
    pr_err!("{device}: a CQ was overrun or failed: completions are lost\n");
    if let Some(waiting) = &inner.waiting {
        // A thread that has looked at `failed` before it was set sleeps when the lock is free, and
        // is woken up.
        drop(waiting.events.lock());
        waiting.changed.notify_all();
    }
}

impl<C: CallerPolled> Cq<C> {
    /// Runs the handlers of at most `budget` completions and returns their number
    /// (`ib_process_cq_direct`). Errors of the driver count as no completion.
    ///
    /// Any context. One thread at a time polls: while another one does, or a handler of this CQ
    /// runs, this returns 0. So handlers of the CQ run one after the other, in the order of the
    /// completions. Do not spin for a completion where that may keep the other thread from its CPU.
    #[inline]
    pub fn process(&self, budget: u32) -> u32 {
        self.process_with(budget, |completion| completion.dispatch())
            .unwrap_or(0)
    }

    /// Gives at most `budget` completions to `handle`, one after the other, and returns their
    /// number. Owners that `handle` [takes](Completion::take) are its own; others go to their
    /// handler. What is posted again here needs no reference to its QP ([`Qp::repost_send`]).
    ///
    /// Any context, as [`Cq::process`]. Fails with `EINVAL` if the budget is zero. `EOVERFLOW` if
    /// there is no completion and the CQ has lost some; or the driver's error.
    /// Documentation/cq.rst has an example.
    ///
    /// [`Qp::repost_send`]: crate::qp::Qp::repost_send
    #[inline]
    pub fn process_with(&self, budget: u32, handle: impl FnMut(Completion<'_>)) -> Result<u32> {
        if budget == 0 {
            return Err(EINVAL);
        }
        match self.inner.try_lock() {
            Some(guard) => guard.process(budget, handle),
            None => Ok(0),
        }
    }

    /// Polls at most `N` completions into the caller's array (`ib_poll_cq`), calls no handler, and
    /// returns their number. Completions that are left in it are dispatched first.
    ///
    /// Any context, any thread. While another thread polls, or [`Cq::process`] runs a handler, the
    /// CQ looks empty. Completions in arrays are not waited for: their handlers may run at the same
    /// time as others, and late. Fails with `EOVERFLOW` if there is no completion and the CQ has
    /// lost some; or the driver's error.
    #[inline]
    pub fn poll<const N: usize>(&self, array: &mut WcArray<N>) -> Result<usize> {
        array.dispatch();
        let n = match self.inner.try_lock() {
            Some(guard) => {
                let n = guard.poll(&mut array.wcs)?;
                match self.inner.arrays.load(Ordering::Relaxed) {
                    0 => n,
                    // SAFETY: The first `n` completions of the array were just polled.
                    _ => unsafe { guard.take_watched(&mut array.wcs, n) }?,
                }
            }
            None => 0,
        };
        // INVARIANT: The array was empty, and the CQ has just given its first `n` entries.
        array.next = 0;
        array.len = n;
        Ok(n)
    }
}
