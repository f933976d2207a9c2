// SPDX-License-Identifier: GPL-2.0

//! Slots: the receives of an SRQ.

use crate::{
    bindings,
    context::Context,
    cqe::{
        self,
        CqeHandler,
        CqePointer, //
    },
    debug,
    qp::post::Refusal,
    srq::{
        Queue,
        Receive, //
    },
    wc::Wc,
    wr::{
        sg_list,
        RecvWr, //
    }, //
};
use core::{
    mem::{
        offset_of,
        ManuallyDrop, //
    },
    ops::{
        Deref,
        DerefMut, //
    },
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        rcu, //
    }, //
};

/// The memory of a slot.
///
/// # Invariants
///
/// - `cqe.done` is the function [`done`] of the SRQ's type.
/// - `queue` is the SRQ's, from before the slot is posted.
/// - `out` is 1 while there is a [`Slot`] that is not being posted again.
#[pin_data]
#[repr(C)]
struct Entry<T> {
    /// The first field: its address is the entry's.
    cqe: bindings::ib_cqe,
    queue: NonNull<Queue>,
    out: Atomic<u32>,
    #[pin]
    value: T,
}

/// The slots of an SRQ, without their type.
pub(super) trait AnyEntries: Send {
    /// Posts all slots.
    ///
    /// # Safety
    ///
    /// Called once, with the queue of the SRQ that these are for, which stays until `self` is
    /// dropped.
    unsafe fn post_all(&self, queue: NonNull<Queue>) -> Result;

    /// Returns the number of slots that are handed out.
    fn handed_out(&self) -> i32;
}

/// The memory of all slots of an SRQ.
///
/// # Invariants
///
/// The pointers are from `KBox::into_raw`.
pub(super) struct Entries<T, const N: usize>(KVec<NonNull<Entry<T>>>);

// SAFETY: It owns its entries, and drops them on whatever thread it is dropped.
unsafe impl<T: Send, const N: usize> Send for Entries<T, N> {}

impl<T: Receive<N>, const N: usize> Entries<T, N> {
    pub(super) fn new<I: PinInit<T, Error>>(
        slots: u32,
        mut init: impl FnMut(u32) -> I,
    ) -> Result<Self> {
        let mut entries = Self(KVec::with_capacity(slots as usize, GFP_KERNEL)?);
        for i in 0..slots {
            let value = init(i);
            // INVARIANT: Nobody has the slot yet.
            let entry = KBox::pin_init(
                try_pin_init!(Entry {
                    cqe: bindings::ib_cqe {
                        done: Some(done::<T, N>),
                    },
                    queue: NonNull::dangling(),
                    out: Atomic::new(0),
                    value <- value,
                }),
                GFP_KERNEL,
            )?;
            // SAFETY: The entry stays where it is until it is dropped.
            let entry = KBox::leak(unsafe { Pin::into_inner_unchecked(entry) });
            // INVARIANT: As leaked. There is room.
            entries.0.push(NonNull::from(entry), GFP_KERNEL)?;
        }
        Ok(entries)
    }
}

impl<T: Receive<N>, const N: usize> AnyEntries for Entries<T, N> {
    unsafe fn post_all(&self, queue: NonNull<Queue>) -> Result {
        for entry in &self.0 {
            // SAFETY: The entry was not posted yet, so nobody uses it; by the caller's promise this
            // is its queue.
            unsafe {
                (*entry.as_ptr()).queue = queue;
                post::<T, N>(queue.as_ref(), *entry).map_err(Refusal::error)
            }?;
        }
        Ok(())
    }

    fn handed_out(&self) -> i32 {
        let is_out = |entry: &&NonNull<Entry<T>>| {
            // SAFETY: The entry is there while `self` is; only this field is borrowed.
            unsafe { &(*entry.as_ptr()).out }.load(Relaxed) != 0
        };
        // An SRQ has fewer than `i32::MAX` slots.
        self.0.iter().filter(is_out).count() as i32
    }
}

impl<T, const N: usize> Drop for Entries<T, N> {
    fn drop(&mut self) {
        for entry in &self.0 {
            // SAFETY: By the type invariant the pointer is from `KBox::into_raw`. There is no SRQ
            // and no slot any more, so nobody uses the entry.
            drop(unsafe { KBox::from_raw(entry.as_ptr()) });
        }
    }
}

/// Posts a slot.
///
/// # Safety
///
/// The SRQ of `queue` is there; the entry is one of its own, is not posted, and nobody else uses it
/// until it is. After success it must not be touched.
#[inline]
unsafe fn post<T: Receive<N>, const N: usize>(
    queue: &Queue,
    entry: NonNull<Entry<T>>,
) -> Result<(), Refusal> {
    // SAFETY: The entry is one of the SRQ's, and nobody else uses it, as the caller promises.
    let RecvWr { sges } = unsafe { &(*entry.as_ptr()).value }.recv();
    if sges.iter().any(|sge| sge.0.pd != queue.pd) {
        return Err(Refusal::new(EINVAL));
    }
    let mut sges = sges.map(|sge| sge.0.to_raw());
    let mut raw = bindings::ib_recv_wr {
        next: core::ptr::null_mut(),
        __bindgen_anon_1: bindings::ib_recv_wr__bindgen_ty_1 {
            wr_cqe: ManuallyDrop::new(entry.as_ptr().cast()),
        },
        sg_list: sg_list(&raw mut sges),
        num_sge: const { N as c_int },
    };
    // SAFETY: The SRQ is there by the caller's promise. The memory is kept by the entry's value,
    // which nobody can reach until a completion hands the slot out again, and which is dropped only
    // after the SRQ.
    unsafe { queue.post(&raw mut raw) }
}

/// The `done` callback of every slot.
///
/// # Safety
///
/// Called by the RDMA core, for a receive that was posted by [`post`].
unsafe extern "C" fn done<T: Receive<N>, const N: usize>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // SAFETY: The core passes a completion that is valid during this call, and `Wc` is transparent.
    let wc = unsafe { &*wc.cast::<Wc>() };
    // SAFETY: The callback is the entry's first field, and a receive is never null.
    let entry: NonNull<Entry<T>> = unsafe { NonNull::new_unchecked(wc.cqe()) }.cast();
    // SAFETY: The entry stays until the SRQ is gone, and that waits for the completions of its QPs.
    // INVARIANT: Each receive completes once, so this is the only handle.
    unsafe { &(*entry.as_ptr()).out }.store(1, Relaxed);
    let slot = Slot(entry);
    // SAFETY: A QP is put on the SRQ only if its CQ, which the core passes, is polled in a context
    // that provides this one.
    let cx = unsafe { T::Needs::of_completion(cq, wc) };
    T::done(slot, wc, &cx);
}

/// A receive of an SRQ that has completed: exclusive access to its value.
///
/// Dropping it posts the receive again (`ib_post_srq_recv`), in any context. It may also be kept,
/// which withholds the credit, sent to another thread, or moved into another request as its owner:
/// an answer can go out from the slot that the question came in.
///
/// The SRQ's end waits for slots that are kept.
///
/// # Invariants
///
/// The entry is valid, is not posted to the SRQ, and no other slot has it.
pub struct Slot<T: Receive<N>, const N: usize = 1>(NonNull<Entry<T>>);

// SAFETY: A slot is exclusive access to its value, and an SRQ may be posted to from any thread.
unsafe impl<T: Receive<N>, const N: usize> Send for Slot<T, N> {}
// SAFETY: A shared slot gives shared access to its value only.
unsafe impl<T: Receive<N> + Sync, const N: usize> Sync for Slot<T, N> {}

impl<T: Receive<N>, const N: usize> Slot<T, N> {
    /// Gives exclusive access to a value that must not be moved.
    #[inline]
    pub fn as_mut(&mut self) -> Pin<&mut T> {
        // SAFETY: By the type invariant the entry is valid, and this slot's alone; the value is
        // never moved.
        unsafe { Pin::new_unchecked(&mut (*self.0.as_ptr()).value) }
    }
}

impl<T: Receive<N>, const N: usize> Deref for Slot<T, N> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: By the type invariant the entry is valid, and this slot's alone.
        unsafe { &(*self.0.as_ptr()).value }
    }
}

impl<T: Receive<N> + Unpin, const N: usize> DerefMut for Slot<T, N> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.as_mut().get_mut()
    }
}

impl<T: Receive<N>, const N: usize> Drop for Slot<T, N> {
    #[inline]
    fn drop(&mut self) {
        let entry = self.0;
        // SAFETY: By the type invariant the entry is valid. Its queue stays until the slot has come
        // back, as `Queue::close` waits for it.
        let (out, queue) = unsafe { (&(*entry.as_ptr()).out, (*entry.as_ptr()).queue.as_ref()) };
        let rcu = rcu::read_lock();
        if queue.is_closed(&rcu) {
            queue.put();
            return;
        }
        out.store(0, Relaxed);
        // SAFETY: The queue is not closed, and the RCU read lock is held, so the SRQ is there. The
        // slot is not used after this.
        if let Err(e) = unsafe { post::<T, N>(queue, entry) } {
            queue.put_aside(e);
        }
    }
}

// SAFETY: The entry stays in place, and is kept by the slot that was given up: `out` is still set.
// The address is that of the callback in the value.
unsafe impl<T, const N: usize, const ID: u64> CqePointer<ID> for Slot<T, N>
where
    T: Receive<N> + CqeHandler<ID, Pointer = Self>,
{
    #[inline]
    fn into_cqe(self, _: cqe::Sealed) -> *mut bindings::ib_cqe {
        let entry = ManuallyDrop::new(self).0.as_ptr();
        // SAFETY: The fields are inside of the entry.
        let cqe = unsafe { (&raw mut (*entry).value).byte_add(cqe::offset::<T, ID>()) }.cast();
        debug::activate(cqe, core::any::type_name::<T>());
        cqe
    }

    #[inline]
    unsafe fn from_cqe(cqe: *mut bindings::ib_cqe) -> Self {
        // SAFETY: `cqe` is from `into_cqe`, as the caller promises. So it is the address of an
        // entry, plus these offsets, and that is not null.
        // INVARIANT: As it was given up.
        unsafe {
            let value = cqe.byte_sub(cqe::offset::<T, ID>());
            let entry = value.byte_sub(offset_of!(Entry<T>, value));
            Self(NonNull::new_unchecked(entry).cast())
        }
    }
}
