// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues.
//!
//! An [`Srq`] owns a fixed number of [`Slot`]s: receives that any of its QPs may consume. A
//! completion hands a slot out; dropping the slot posts it again.
//! See Documentation/srq.rst.
//!
//! # Examples
//!
//! ```
//! use rdma::{prelude::*, qp::InitAttr, srq::{Receive, Slot, Srq}};
//!
//! struct Request {
//!     buf: Buf<FromDevice>,
//! }
//!
//! impl Receive for Request {
//!     type Needs = context::Atomic;
//!
//!     fn recv(&self) -> RecvWr<'_> {
//!         RecvWr::new([self.buf.whole_mut()])
//!     }
//!
//!     fn done(slot: Slot<Self>, wc: &Wc, _cx: &context::Atomic) {
//!         if let Ok(wc) = wc.result() {
//!             pr_info!("received {} bytes\n", wc.byte_len());
//!         }
//!         drop(slot); // Posts it again.
//!     }
//! }
//!
//! fn make(pd: &Pd, cq: &Cq<Softirq>, cx: &Sleepable) -> Result<Qp<Softirq>> {
//!     let request = |_| Ok::<_, Error>(Request { buf: Buf::alloc(pd, 512, cx)? });
//!     let srq = Srq::create(pd, 64, request, cx)?;
//!     InitAttr::on_srq(pd, cq, &srq, &Caps::new(16, 0)).create(cx)
//! }
//! ```
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_srq`)

// What peers send is used here, and must not cause a panic.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

use crate::{
    completion::Completion,
    cq,
    cqe::{
        self,
        CqeHandler, //
    },
    deferred,
    device::{
        self,
        Device, //
    },
    objects,
    pd::{
        Pd,
        PdId, //
    },
    posted,
    prelude::internal::*,
    qp_id::QpId,
    refs,
    sync::SlotsOut,
    trace,
    wc::Wc,
    wr::{
        RecvWr,
        Refusal, //
    }, //
};
use core::{
    cell::UnsafeCell,
    ops, //
};
use kernel::sync::{
    atomic::{
        Atomic,
        Relaxed, //
    },
    rcu, //
};

/// The value of a slot of an SRQ, with the handler of its completions. Each has `N` scatter
/// entries.
pub trait Receive<const N: usize = 1>: Sized + Send + 'static {
    /// The context that the handler needs. A QP whose CQ is polled elsewhere cannot use the SRQ.
    type Needs: Context;

    /// Returns the request to be posted. Called each time that the slot is posted, in any context.
    fn recv(&self) -> RecvWr<'_, N>;

    /// Handles the completion of a slot's receive (`ib_cqe.done`), in the context of the CQ of the
    /// QP that received. Handlers of several CQs may run at the same time.
    fn done(slot: Slot<Self, N>, wc: &Wc, cx: &Self::Needs);
}

/// A counted handle of a shared receive queue with slots of type `T`. A work item destroys SRQ and
/// slots when the last handle, all QPs on it and every slot that was kept are gone.
///
/// # Invariants
///
/// The slots are of type `T`. This is invariant in `T`: a supertype may have another
/// [`Receive::Needs`], by which [`InitAttr::on_srq`](crate::qp::InitAttr::on_srq) would take a CQ
/// that does not provide what the handler of the slots needs.
pub struct Srq<T: Receive<N>, const N: usize = 1> {
    pub(crate) inner: Shared,
    _slots: PhantomData<fn(T) -> T>,
}

/// A reference to the SRQ.
pub(crate) type Shared = deferred::Deferred<Inner>;

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
    /// (`ib_post_srq_recv`). `init` makes the value of each. The SRQ reserves as many entries,
    /// once, of each CQ that its QPs complete to. Fails with `EOPNOTSUPP` if the device has no
    /// SRQs; `EINVAL` if it has none of that size, or if a slot describes memory of another PD;
    /// `EPERM` if the PD is another module's; what `init` returned; `ENOMEM`, or the driver's
    /// error.
    pub fn create<I: PinInit<T, Error>>(
        pd: &Pd,
        slots: u32,
        init: impl FnMut(u32) -> I,
        cx: &Sleepable,
    ) -> Result<Self> {
        let sges = const { N as u32 };
        pd.device().client().module.check_type::<T>()?;
        check(pd.device(), slots, sges)?;
        let all = KBox::new(Slots::<T, N>::new(slots, init)?, GFP_KERNEL)?;
        let inner = create(pd, slots, sges, all, cx)?;
        // INVARIANT: The slots were just made, of this type.
        Ok(Self {
            inner,
            _slots: PhantomData,
        })
    }
}

/// The `event_handler` of every SRQ, which reports that it has failed.
///
/// # Safety
///
/// Called by the driver, with an event that is valid during the call and of a registered device.
unsafe extern "C" fn event(event: *mut bindings::ib_event, _context: *mut c_void) {
    // SAFETY: The event is valid and its device registered, as the caller promises.
    let (kind, device) = unsafe { ((*event).event, device::Name::of((*event).device)) };
    if kind == bindings::ib_event_type_IB_EVENT_SRQ_ERR {
        pr_err!("{device}: an SRQ has failed\n");
    }
}

/// An SRQ, as its slots see it.
///
/// # Invariants
///
/// - `raw` is an SRQ that can be posted to, until an RCU grace period after `closed` was set.
/// - `out` counts the slots that are dropped after `closed` was set; `returned` completes with the
///   last.
#[pin_data]
struct SlotQueue {
    raw: NonNull<bindings::ib_srq>,
    pd: PdId,
    closed: Atomic<bool>,
    out: SlotsOut,
    #[pin]
    returned: Completion,
    /// Reservations of CQs that QPs on the SRQ complete to.
    #[pin]
    reservations: kernel::sync::Mutex<KVec<CqReservation>>,
}

// SAFETY: `struct ib_srq` may be used from any thread, and the rest is `Send`.
unsafe impl Send for SlotQueue {}
// SAFETY: `struct ib_srq` may be used by several threads at once, and the rest is `Sync`.
unsafe impl Sync for SlotQueue {}

/// Reports a slot that could not be posted again.
fn report(Refusal { error, named }: Refusal) {
    if named {
        pr_err!("a slot of an SRQ could not be posted ({error:?}): it is set aside\n");
    } else {
        // It may be in the queue, so it counts as posted: it is handed out when it completes.
        pr_err!(
            "a driver did not say that it refused a slot of an SRQ ({error:?}): taken for posted\n"
        );
    }
}

impl SlotQueue {
    /// Counts a slot that was dropped after the queue was closed. It may be gone after this.
    fn put(&self) {
        if self.out.put() {
            // The queue exists until `close`, which waits for this, returns.
            self.returned.complete();
        }
    }

    /// Closes the queue to slots that are dropped, and waits for those that are handed out.
    fn close(&self, slots: &dyn AnySlots, dev: &Device, cx: &Sleepable) {
        self.closed.store(true, Relaxed);
        // After this no thread is posting, and one that drops a slot sees that the queue is closed.
        rcu::synchronize_rcu();
        // There is no QP, so no slot is handed out, and those that were are marked.
        let states = (0..).map_while(|index| slots.entry(index));
        let handed_out = states.filter(|(_, state)| !state.is_idle()).count();
        // An SRQ has fewer than `i32::MAX` slots.
        if !self.out.wait_for(handed_out as i32) {
            return;
        }
        while !self.returned.wait_timeout(refs::REPORT_MS, cx) {
            let out = self.out.now();
            pr_warn!("{dev}: the end of an SRQ waits for {out} slot(s)\n");
        }
    }
}

/// An SRQ, which its handles and the QPs on it share.
///
/// # Invariants
///
/// The SRQ of `queue` has the slots `slots`, `count` of them.
pub(crate) struct Inner {
    queue: Pin<KBox<SlotQueue>>,
    slots: KBox<dyn AnySlots>,
    count: u32,
    pub(crate) pd: Pd,
    // Dropped last: the ULP may be gone after that.
    object: objects::Object,
}

impl deferred::Teardown for Inner {
    fn object(&self) -> Option<&objects::Object> {
        Some(&self.object)
    }

    fn teardown(&self, cx: &Sleepable) -> Result {
        let dev = self.pd.device();
        self.queue.close(&*self.slots, dev, cx);
        let raw = self.queue.raw.as_ptr();
        // SAFETY: The queue has an SRQ by its invariant, and was just closed. The QPs on it had
        // references to this, so they are gone.
        let ret = unsafe { bindings::ib_destroy_srq_user(raw, ptr::null_mut()) };
        deferred::destroyed(fmt!("{dev}: an SRQ with its slots"), ret)
    }
}

impl Inner {
    pub(crate) fn as_raw(&self) -> *mut bindings::ib_srq {
        self.queue.raw.as_ptr()
    }
}

fn check(dev: &Device, slots: u32, sges: u32) -> Result {
    let ops = dev.ops();
    if ops.create_srq.is_none() || ops.post_srq_recv.is_none() || ops.destroy_srq.is_none() {
        return Err(EOPNOTSUPP);
    }
    if slots == 0 || slots > dev.attrs().max_srq_wr || sges > dev.attrs().max_srq_sge {
        return Err(EINVAL);
    }
    Ok(())
}

/// Creates an SRQ, after [`check`]. Neither generic nor inlined: see `Reserved::fill`.
#[inline(never)]
fn create(
    pd: &Pd,
    count: u32,
    sges: u32,
    slots: KBox<dyn AnySlots>,
    _cx: &Sleepable,
) -> Result<Shared> {
    let dev = pd.device();
    let reserved = deferred::Deferred::reserve()?;
    let mut object = dev.object(refs::ObjectKind::Srq);
    let queue = KBox::new_uninit(GFP_KERNEL)?;
    let mut attr = bindings::ib_srq_init_attr {
        event_handler: Some(event),
        // See `code::Module::of`. The client has references while there is the SRQ.
        srq_context: ptr::from_ref(&dev.client().module).cast_mut().cast(),
        srq_type: bindings::ib_srq_type_IB_SRQT_BASIC,
        ..Default::default()
    };
    attr.attr.max_wr = count;
    attr.attr.max_sge = sges;
    // SAFETY: `pd` is a handle of the PD, which is not freed while it is borrowed, and the
    // attributes are initialised.
    let raw = from_err_ptr(unsafe {
        bindings::ib_create_srq_user(pd.as_raw(), &raw mut attr, ptr::null_mut(), ptr::null_mut())
    })?;
    let raw = NonNull::new(raw).ok_or(ENOMEM)?;
    // INVARIANT: The SRQ is new, and the queue not closed.
    let Ok(queue) = queue.write_pin_init(pin_init!(SlotQueue {
        raw,
        pd: pd.id(),
        closed: Atomic::new(false),
        out: SlotsOut::new(),
        returned <- Completion::new(),
        reservations <- kernel::new_mutex!(KVec::new(), "rdma::Srq::reservations"),
    }));
    // SAFETY: The SRQ was just created; the number does not change.
    object.num = Some(unsafe { (*raw.as_ptr()).res.id });
    object.summary = objects::Summary::Srq { slots: count };
    // INVARIANT: The queue was made for the SRQ.
    let inner = reserved.fill(Inner {
        queue,
        slots,
        count,
        pd: pd.clone(),
        object,
    });
    // SAFETY: The SRQ is new, these are its slots, and the queue is dropped after it was destroyed.
    unsafe { inner.slots.post_all(NonNull::from(&*inner.queue)) }?;
    Ok(inner)
}

/// A reservation that all QPs of an SRQ that complete to one CQ share: a slot has at most one
/// completion that was not handled.
///
/// # Invariants
///
/// `qps` is the number of [`SrqReservation`]s for the CQ of the reservation, and not zero.
struct CqReservation {
    reservation: cq::Reservation,
    qps: usize,
}

/// The reference of a QP to its SRQ, and to the SRQ's reservation of the QP's CQ.
pub(crate) struct SrqReservation {
    srq: Shared,
    cq: cq::Shared,
}

impl SrqReservation {
    /// Makes the reference of a QP that completes to `cq`. Fails with `EINVAL` if other modules or
    /// callers may poll the CQ, so that a drain proves nothing; with `ENOSPC` if it has not enough
    /// free entries.
    pub(crate) fn new(srq: &Shared, cq: &cq::Shared) -> Result<Self> {
        if cq.is_shared() || cq.is_caller_polled() {
            return Err(EINVAL);
        }
        let mut list = srq.queue.reservations.lock();
        let is_it = |shared: &&mut CqReservation| shared.reservation.cq == *cq;
        if let Some(shared) = list.iter_mut().find(is_it) {
            // INVARIANT: This is one more.
            shared.qps = shared.qps.saturating_add(1);
        } else {
            let reservation = cq::reserve(cq, srq.count)?;
            // INVARIANT: This is the first.
            let first = CqReservation {
                reservation,
                qps: 1,
            };
            list.push(first, GFP_KERNEL | __GFP_NOWARN)?;
        }
        Ok(Self {
            srq: srq.clone(),
            cq: cq.clone(),
        })
    }

    /// Returns the slots of the SRQ.
    pub(crate) fn slots(&self) -> &dyn posted::RequestArray {
        self.srq.slots.entries()
    }
}

impl Drop for SrqReservation {
    fn drop(&mut self) {
        self.srq.queue.reservations.lock().retain(|shared| {
            if shared.reservation.cq != self.cq {
                return true;
            }
            // INVARIANT: This one is dropped.
            shared.qps = shared.qps.saturating_sub(1);
            shared.qps != 0
        });
    }
}

/// The memory of a slot.
///
/// # Invariants
///
/// - `cqe.done` is the function [`done`] of the SRQ's type.
/// - `queue` is the SRQ's, from before the slot is posted.
/// - `state` is idle unless the slot is handed out: there is a [`Slot`] that is not being posted
///   again, or that owns another request.
#[pin_data]
#[repr(C)]
struct SlotInner<T> {
    /// The first field, so its address is that of the memory.
    cqe: bindings::ib_cqe,
    queue: NonNull<SlotQueue>,
    state: posted::State,
    #[pin]
    value: T,
}

/// The slots of an SRQ, without their type.
trait AnySlots: posted::RequestArray {
    /// Posts all slots.
    ///
    /// # Safety
    ///
    /// Called once, with the queue of the slots' SRQ, which lives longer than that.
    unsafe fn post_all(&self, queue: NonNull<SlotQueue>) -> Result;

    /// Returns the slots as entries, whose states can be read.
    fn entries(&self) -> &dyn posted::RequestArray;
}

/// All slots of an SRQ, side by side. Each is in a cell, as one that is posted or handed out is
/// used exclusively, beside the others.
///
/// # Invariants
///
/// The vector has all its slots, so that it does not move them: they stay in place until it is
/// dropped.
struct Slots<T, const N: usize>(KVVec<UnsafeCell<SlotInner<T>>>);

// SAFETY: It owns the values, which are `Send`; what `queue` points to is `Sync`.
unsafe impl<T: Send, const N: usize> Send for Slots<T, N> {}
// SAFETY: A shared reference gives access to atomics only, and to what is posted once.
unsafe impl<T: Send, const N: usize> Sync for Slots<T, N> {}

impl<T: Receive<N>, const N: usize> Slots<T, N> {
    fn new<I: PinInit<T, Error>>(slots: u32, mut init: impl FnMut(u32) -> I) -> Result<Self> {
        let flags = GFP_KERNEL | __GFP_NOWARN;
        let mut all = KVVec::<UnsafeCell<SlotInner<T>>>::with_capacity(slots as usize, flags)?;
        for i in 0..slots {
            let value = init(i);
            // INVARIANT: The slot is neither posted nor handed out.
            let memory = try_pin_init!(SlotInner {
                cqe: bindings::ib_cqe {
                    done: Some(done::<T, N>),
                },
                queue: NonNull::dangling(),
                state: posted::State::new(),
                value <- value,
            });
            let slot = all.spare_capacity_mut().first_mut().ok_or(ENOMEM)?;
            // SAFETY: The slot is spare capacity, so it is valid for writes; a cell has the layout
            // of its content. It is not moved, as the vector does not grow beyond its capacity. If
            // this fails, the slot is not counted, so nothing is dropped.
            unsafe { pin_init::raw_try_init(slot.as_mut_ptr().cast::<SlotInner<T>>(), memory)? };
            // SAFETY: The slot behind the last one was just initialised.
            unsafe { all.inc_len(1) };
        }
        // INVARIANT: These are all.
        Ok(Self(all))
    }
}

impl<T: Receive<N>, const N: usize> AnySlots for Slots<T, N> {
    unsafe fn post_all(&self, queue: NonNull<SlotQueue>) -> Result {
        for slot in &self.0 {
            let memory = NonNull::from(slot).cast::<SlotInner<T>>();
            // SAFETY: The slot was not posted yet, so its memory is unused; the caller promises
            // that this is its queue.
            unsafe {
                (*memory.as_ptr()).queue = queue;
                let value = &(*memory.as_ptr()).value;
                post(queue.as_ref(), memory, value.recv())
            }
            .map_err(|refused| refused.error)?;
        }
        Ok(())
    }

    fn entries(&self) -> &dyn posted::RequestArray {
        self
    }
}

impl<T: Receive<N>, const N: usize> posted::RequestArray for Slots<T, N> {
    fn entry(&self, index: usize) -> Option<(*mut c_void, &posted::State)> {
        let memory = self.0.get(index)?.get();
        // SAFETY: By the type invariant the slot is valid while `self` is borrowed. Its state, of
        // atomics, is shared with the owner of the slot; only this field is borrowed.
        Some(unsafe { ((&raw mut (*memory).value).cast(), &(*memory).state) })
    }
}

/// Posts a slot with its request.
///
/// # Safety
///
/// The SRQ of `queue` is valid; the slot is one of its own, is not posted, and its memory is not
/// used by anything else, nor after success. `wr` is of its value.
#[inline]
unsafe fn post<T, const N: usize>(
    queue: &SlotQueue,
    memory: NonNull<SlotInner<T>>,
    wr: RecvWr<'_, N>,
) -> Result<(), Refusal> {
    if !wr.is_of(queue.pd) {
        return Err(Refusal {
            error: EINVAL,
            named: true,
        });
    }
    let mut sges = MaybeUninit::uninit();
    let mut raw = wr.into_raw(&mut sges);
    raw.__bindgen_anon_1.wr_cqe = ManuallyDrop::new(memory.as_ptr().cast());
    let srq = queue.raw.as_ptr();
    let raw = &raw mut raw;
    // SAFETY: The caller promises that the SRQ is valid, and `check` has seen that the device has
    // the operation. The value keeps the buffers of the request. It is not accessed before a
    // completion hands the slot out again, and is dropped after the SRQ. The request has no
    // successor.
    unsafe {
        let ret = trace::PostVerb::post_one(trace::PostVerb::op(srq), srq, raw, false);
        Refusal::check(ret, (*raw).next)
    }
}

/// The `done` callback of every slot.
///
/// # Safety
///
/// Called as [`trace::completion`] requires, for a receive that was posted by [`post`].
unsafe extern "C" fn done<T: Receive<N>, const N: usize>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // SAFETY: As the caller promises, this is the callback of the request, and `wc` its completion,
    // which was not used yet.
    let Some(wc) = (unsafe { trace::completion(cq, wc) }) else {
        return;
    };
    // SAFETY: The caller promises that `post` has posted this: the first field of a slot's memory.
    let memory: NonNull<SlotInner<T>> = unsafe { NonNull::new_unchecked(wc.cqe()) }.cast();
    // SAFETY: The memory is freed after the SRQ, which waits for the completions of its QPs.
    unsafe { &(*memory.as_ptr()).state }.hold();
    // INVARIANT: A receive completes once for each post: this is the only `Slot` of the memory.
    let slot = Slot(memory, PhantomData);
    // SAFETY: `InitAttr::on_srq` makes QPs only of CQs that are polled in a context that provides
    // this one. The SRQ's type, which is invariant, is that of the slots. As `SrqReservation::new`
    // has seen, the core polls the CQ, and passes it.
    let cx = unsafe { T::Needs::of_completion(cq, wc) };
    T::done(slot, wc, &cx);
}

/// A receive of an SRQ that has completed: exclusive access to its value. Dropping it posts the
/// receive again (`ib_post_srq_recv`), in any context. It may also be kept, which withholds the
/// credit, or own another request, such as the response, if the value is `Unpin` (see
/// [`CqePointer`]). The SRQ's end waits for it.
///
/// [`CqePointer`]: crate::cqe::CqePointer
///
/// # Invariants
///
/// - The memory is valid, is not posted to the SRQ, and no other `Slot` has it.
/// - This is invariant in `T`: the value outlives the `Slot`, so a value of a supertype must not be
///   written through it.
pub struct Slot<T: Receive<N>, const N: usize = 1>(NonNull<SlotInner<T>>, PhantomData<fn(T) -> T>);

// SAFETY: A slot is exclusive access to its value, and an SRQ may be posted to from any thread.
unsafe impl<T: Receive<N>, const N: usize> Send for Slot<T, N> {}
// SAFETY: A shared slot gives shared access to its value only.
unsafe impl<T: Receive<N> + Sync, const N: usize> Sync for Slot<T, N> {}

impl<T: Receive<N>, const N: usize> Slot<T, N> {
    /// Returns the address of the memory of which this is the value.
    #[inline]
    fn memory(value: *mut T) -> *mut SlotInner<T> {
        let offset = core::mem::offset_of!(SlotInner<T>, value);
        value.wrapping_byte_sub(offset).cast()
    }
}

impl<T: Receive<N>, const N: usize> ops::Deref for Slot<T, N> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: By the type invariant the memory is valid, and this slot's alone.
        unsafe { &(*self.0.as_ptr()).value }
    }
}

impl<T: Receive<N> + Unpin, const N: usize> ops::DerefMut for Slot<T, N> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: By the type invariant the memory is valid, and this slot's alone; `T` is `Unpin`.
        unsafe { &mut (*self.0.as_ptr()).value }
    }
}

impl<T: Receive<N>, const N: usize> Drop for Slot<T, N> {
    #[inline]
    fn drop(&mut self) {
        let memory = self.0.as_ptr();
        // SAFETY: By the type invariant the memory is valid. `SlotQueue::close` waits for slots
        // that are handed out, so the queue is open.
        let (state, queue) = unsafe { (&(*memory).state, (*memory).queue.as_ref()) };
        // The ULP's code may sleep, where the caller may.
        //
        // SAFETY: By the type invariant nothing else uses the value.
        let wr = unsafe { &(*memory).value }.recv();
        let _rcu = rcu::read_lock();
        if queue.closed.load(Relaxed) {
            queue.put();
            return;
        }
        state.put();
        // SAFETY: The queue is not closed, and the RCU read lock is held, so the SRQ is valid. By
        // the type invariant nothing else uses the memory, nor does this slot after the post.
        if let Err(refused) = unsafe { post(queue, self.0, wr) } {
            report(refused);
        }
    }
}

// SAFETY: The value stays in place until the slot is dropped: its state is not idle, and
// `SlotQueue::close` waits for it. No other `Slot` has it; it is `Unpin`, so no other part of the
// kernel has its address.
unsafe impl<T, const N: usize, const ID: u64> cqe::CqePointer<ID> for Slot<T, N>
where
    T: Receive<N> + CqeHandler<ID, Pointer = Self> + Unpin,
{
    #[inline]
    fn into_ptr(self, _: cqe::Sealed) -> *mut T {
        let memory = ManuallyDrop::new(self).0.as_ptr();
        // SAFETY: By the type invariant the memory is valid.
        unsafe { &raw mut (*memory).value }
    }

    #[inline]
    unsafe fn from_ptr(ptr: *mut T) -> Self {
        // SAFETY: `ptr` is from `into_ptr`, as the caller promises. So it is the address of a
        // slot's memory, which is not null, plus this offset.
        // INVARIANT: `into_ptr` has consumed the only `Slot`.
        unsafe {
            let memory: *mut SlotInner<T> = Self::memory(ptr);
            (*memory).state.hold();
            Self(NonNull::new_unchecked(memory), PhantomData)
        }
    }

    #[inline]
    unsafe fn note_post(ptr: *mut T, id: QpId, queue: cqe::Queue, callback: *mut bindings::ib_cqe) {
        // SAFETY: `ptr` is from `into_ptr`, as the caller promises: the value of a slot, whose
        // memory is valid until the owner was taken back.
        unsafe { &(*Self::memory(ptr)).state }.post(id.get(), queue, posted::place(ptr, callback));
    }
}
