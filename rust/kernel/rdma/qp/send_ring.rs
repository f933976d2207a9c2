// SPDX-License-Identifier: GPL-2.0

//! Sends of different owners of which few are signaled.

use super::{
    chain,
    post,
    Chain,
    Inner,
    OnEnd, //
};
use crate::{
    cq,
    cqe::{
        self,
        CqeHandler,
        CqePointer,
        Queue,
        Runs, //
    },
    debug,
    prelude::internal::*,
    qp::Qp,
    qp_id::QpId,
    sync::{
        Spsc,
        KEEPER,
        REQUEST, //
    },
    trace,
    wc,
    wr::PostError, //
};
use core::{
    any::type_name,
    cell::UnsafeCell,
    ops::Deref, //
};

/// The owners of sends that were posted, in the order of the send queue, of which one in a few is
/// signaled. Its completion gives back all owners up to its own, each to its handler.
///
/// In C a ULP that signals one in a few counts them (`sig_count`), and uses the memory of the
/// others again when a reply has come, which is before the device has done with it. Here it waits
/// for the next signaled one.
///
/// Threads that share the queue need a lock for the ring, so that its order is that of the queue.
/// It does not keep its QP. Owners that are in it come back in [`SendRing::reclaim`], or are
/// dropped when the QP was destroyed.
///
/// A ring that is full has a signaled request, whatever the driver has refused, so it has room
/// again when that has completed. There are two exceptions, after which only [`SendRing::reclaim`]
/// helps: a driver that does not say which request it has refused, and did not post the signaled
/// ones; and completions that are all dispatched from a [`WcArray`], which give nothing back by
/// themselves.
///
/// Documentation/qp.rst has an example.
///
/// [`WcArray`]: crate::cq::WcArray
///
/// # Invariants
///
/// This is invariant in `P`, as the ring, which others use too, has its owners in cells.
pub struct SendRing<P, const ID: u64 = 0> {
    ring: RingRef<P, ID, KEEPER>,
    /// The number of owners in the ring since the last signaled one; less than all that it takes.
    unsignaled: u32,
    /// Set if there may be an RDMA READ among the requests of these.
    reads: bool,
    reclaimed: bool,
}

/// An owner that is in the ring.
struct RingEntry<P> {
    owner: P,
    /// Set if its last request is signaled, so that a completion will come for it.
    signaled: bool,
}

/// A ring, which its handle, the QP, and each signaled request that has not completed keep. It is
/// empty when the QP is gone.
///
/// # Invariants
///
/// - `cqe` has the callback for this type.
/// - `entries` has a power of two.
/// - `inner` is that of the QP `qp`, and valid while there is a handle of that.
/// - The entries in use, by `places`, are initialised. The producer, which has the handle
///   exclusively, uses the others; a handler of the CQ of `poller`, of which one runs at a time,
///   uses these, or the producer once the QP was drained, or the keeper once it is destroyed.
#[repr(C)]
struct Ring<P, const ID: u64> {
    /// The first field, to get back from it.
    cqe: bindings::ib_cqe,
    places: Spsc,
    poller: cq::Poller,
    qp: QpId,
    inner: NonNull<Inner>,
    /// That of the QP: see [`Inner::names_first`].
    names_first: bool,
    /// One in so many is signaled.
    interval: u32,
    /// The number of owners at most.
    owners: u32,
    /// As many, up to a power of two.
    entries: KVec<UnsafeCell<MaybeUninit<RingEntry<P>>>>,
}

impl<P, const ID: u64> Ring<P, ID> {
    fn entry(&self, n: u32) -> *mut RingEntry<P> {
        let index = n as usize & (self.entries.len() - 1);
        // SAFETY: The number of entries is a power of two by the type invariant, so the mask brings
        // the index into their range.
        unsafe { self.entries.get_unchecked(index) }.get().cast()
    }

    /// Removes the oldest entry that is in use.
    ///
    /// # Safety
    ///
    /// The caller is the handler of the CQ, or the producer after a drain, or the keeper of a QP
    /// that is destroyed or was never posted to by this.
    unsafe fn pop(&self) -> Option<RingEntry<P>> {
        let n = self.places.first()?;
        // SAFETY: The entry is in use, so it is initialised, and the caller may use it. It is not
        // in use after this.
        let entry = unsafe { self.entry(n).read() };
        self.places.release();
        Some(entry)
    }
}

/// A counted reference to a ring, of a request or a keeper (`OF`).
///
/// # Invariants
///
/// The ring is valid, and counts this.
struct RingRef<P, const ID: u64, const OF: u32>(NonNull<Ring<P, ID>>);

// SAFETY: It gives access to owners, which are `Send`.
unsafe impl<P: Send, const ID: u64, const OF: u32> Send for RingRef<P, ID, OF> {}
// SAFETY: A shared one gives access to no owner.
unsafe impl<P: Send, const ID: u64, const OF: u32> Sync for RingRef<P, ID, OF> {}

impl<P, const ID: u64, const OF: u32> Deref for RingRef<P, ID, OF> {
    type Target = Ring<P, ID>;

    #[inline]
    fn deref(&self) -> &Ring<P, ID> {
        // SAFETY: By the type invariant the ring is valid.
        unsafe { self.0.as_ref() }
    }
}

impl<P, const ID: u64, const OF: u32> Drop for RingRef<P, ID, OF> {
    #[inline]
    fn drop(&mut self) {
        if self.places.put(OF) {
            // SAFETY: The ring is from `KBox::leak`, and this was the last reference.
            drop(unsafe { KBox::from_raw(self.0.as_ptr()) });
        }
    }
}

/// The `done` callback of a signaled request.
///
/// # Safety
///
/// Called as [`trace::completion`] requires, once for each request that was posted with a ring's
/// callback.
unsafe extern "C" fn done<P: CqePointer<ID>, const ID: u64>(
    cq: *mut bindings::ib_cq,
    wc: *mut bindings::ib_wc,
) {
    // SAFETY: As the caller promises, this is the callback of the request, and `wc` its completion,
    // which was not used yet.
    let Some(wc) = (unsafe { trace::completion(cq, wc) }) else {
        return;
    };
    if !debug::deactivate(wc.cqe()) {
        return debug::report(type_name::<P::Target>());
    }
    // SAFETY: The request was posted with the first field of a ring.
    // INVARIANT: This is the reference of the request.
    let ring = RingRef::<P, ID, REQUEST>(unsafe { NonNull::new_unchecked(wc.cqe()) }.cast());
    if ring.poller.is_at(wc) {
        let mut completed = 1 + ring.places.take_missed();
        // SAFETY: This is a handler of the CQ, which run one after the other.
        while let Some(RingEntry { owner, signaled }) = unsafe { ring.pop() } {
            // SAFETY: Posting checked that the completion queue is polled in a context that
            // provides this one. `cq` is the CQ, or null if a caller has polled the completion.
            let cx = unsafe { <P::Target as CqeHandler<ID>>::Needs::of_completion(cq, wc) };
            P::Target::done(owner, wc, &cx);
            completed -= u32::from(signaled);
            if completed == 0 {
                break;
            }
        }
    } else {
        // The next one gives back what this does not.
        wc::unlikely();
        ring.places.miss();
    }
}

impl<P: CqePointer<ID>, const ID: u64> SendRing<P, ID> {
    /// Makes a ring for `owners` owners of sends of a QP, of which one in `interval` is signaled.
    ///
    /// The send queue is to have room for the requests of as many owners, as one that is full of
    /// requests that are not signaled has none again before the end of the QP.
    ///
    /// Fails with `EINVAL` if the interval is not between 1 and half of the owners, so that a full
    /// ring waits for half of its owners at most, if there are more than 65,536, or if the QP's
    /// sends complete to a [shared](crate::cq::Cq::pool_get) CQ; `ENOMEM`.
    pub fn new<S, R>(qp: &Qp<S, R>, owners: u32, interval: u32, cx: &Sleepable) -> Result<Self>
    where
        S: Runs<P, ID>,
        R: PollContext,
    {
        if !(1..=owners / 2).contains(&interval) || owners > 1 << 16 {
            return Err(EINVAL);
        }
        // SAFETY: The QP keeps the ring, of which this is part, by a `Keeper`, whose drop forgets
        // the CQ.
        let poller = unsafe { qp.inner.send_poller() }.ok_or(EINVAL)?;
        let place = qp.place_of_table(cx)?;
        let len = owners.next_power_of_two();
        let mut entries = KVec::with_capacity(len as usize, GFP_KERNEL | __GFP_NOWARN)?;
        for _ in 0..len {
            entries.push_within_capacity(UnsafeCell::new(MaybeUninit::uninit()))?;
        }
        // INVARIANT: No entry is in use. The QP keeps `inner` in its place.
        let ring = Ring::<P, ID> {
            cqe: bindings::ib_cqe {
                done: Some(done::<P, ID>),
            },
            // The handle and the QP.
            places: Spsc::new(2),
            poller,
            qp: qp.id(),
            inner: NonNull::from(&*qp.inner),
            names_first: qp.inner.names_first(),
            interval,
            owners,
            entries,
        };
        let ring = NonNull::from(KBox::leak(KBox::new(ring, GFP_KERNEL)?));
        // INVARIANT: Both are counted.
        qp.keep_table(place, Keeper(RingRef(ring)));
        Ok(Self {
            ring: RingRef(ring),
            unsignaled: 0,
            reads: false,
            reclaimed: false,
        })
    }

    /// Posts the requests that `make` adds, as [`Qp::post_chain`], of which the last is signaled if
    /// it is its turn.
    ///
    /// The owner's handler is called after the next signaled one has completed, and gets that
    /// completion. If one before it has failed, that has failed, too.
    ///
    /// Any context. Fails as [`Qp::post_chain`]; gives the owner back also with `EAGAIN` if the
    /// ring is full, and with `EINVAL` if it is of another QP or was reclaimed.
    ///
    /// Requests that were posted before one that the driver has refused keep the owner, which comes
    /// back with the next. If it would fill the ring and none in that is signaled, as after many
    /// refusals in a row, the QP keeps it instead, and drops it when it was drained.
    #[inline]
    pub fn post<S, R, const LINKS: usize, const SGES: usize>(
        &mut self,
        qp: &Qp<S, R>,
        owner: P,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES, ID>) -> Result,
    ) -> Result<(), PostError<P>>
    where
        S: Runs<P, ID>,
        R: PollContext,
    {
        let ring = &*self.ring;
        let Some(place) = ring.places.next(ring.owners) else {
            return Err(PostError::new(owner, EAGAIN));
        };
        let may_post = owner.may_post_to(qp.id(), cqe::Sealed(()));
        if ring.qp != qp.id() || self.reclaimed || !may_post {
            return Err(PostError::new(owner, EINVAL));
        }
        let signaled = self.unsignaled + 1 >= ring.interval;
        let mut slots = MaybeUninit::uninit();
        // SAFETY: The slots outlive the chain. What the owner points to stays where it is.
        let made = unsafe { Chain::make(slots.as_mut_ptr(), &qp.inner.target, &*owner, make) };
        let mut chain = match made {
            Ok(chain) => chain,
            Err(error) => return Err(PostError::new(owner, error)),
        };
        chain.reads |= self.reads;
        let reads = chain.reads;
        // SAFETY: The producer has the place, which is free. Nobody reads it before `publish`.
        unsafe { ring.entry(place).write(RingEntry { owner, signaled }) };
        // INVARIANT: The entry is initialised.
        ring.places.publish(signaled);
        let tail = signaled.then(|| {
            let cqe = self.ring.0.as_ptr().cast();
            debug::activate(cqe, type_name::<P::Target>());
            cqe
        });
        // SAFETY: The owner stays where it is until a signaled request behind this one has
        // completed, or until the QP was drained. The callback is that of the ring, which the
        // request keeps.
        match unsafe { chain.post(tail, false) } {
            Ok(()) if signaled => (self.unsignaled, self.reads) = (0, false),
            Ok(()) => (self.unsignaled, self.reads) = (self.unsignaled + 1, reads),
            // SAFETY: These are the requests of the entry, and the last one was to be signaled if
            // `signaled` is set. The QP is borrowed, and is that of the ring, as was just checked.
            Err(refused) => return Err(unsafe { self.refused(refused, signaled, reads) }),
        }
        Ok(())
    }

    /// Takes the owner back of requests of which the driver has refused one.
    ///
    /// # Safety
    ///
    /// They are those of the last entry that was published, with this `signaled`, and the caller
    /// has a handle of the QP of the ring.
    unsafe fn refused<const SGES: usize>(
        &mut self,
        refused: chain::Refused<'_, SGES>,
        signaled: bool,
        reads: bool,
    ) -> PostError<P> {
        // SAFETY: The owner is valid: it is in the ring, and the last request, which would give it
        // back, was not posted, or the driver does not say so.
        let (error, posted) = unsafe { refused.take_back(self.ring.names_first) };
        let ring = &*self.ring;
        let owner = match posted {
            Some(n) => {
                if signaled {
                    debug::deactivate(self.ring.0.as_ptr().cast());
                }
                // No completion comes for the last entry, and none that does ends with it.
                let entry = ring.entry(ring.places.unpublish(signaled));
                // The place in which the ring would be full without a signaled one stays free.
                let has_place = n > 0 && self.unsignaled + 1 < ring.owners;
                if has_place {
                    // SAFETY: The entry was just taken back, so it is the producer's, and
                    // initialised.
                    unsafe { (*entry).signaled = false };
                    // INVARIANT: The entry is initialised.
                    ring.places.publish(false);
                    self.unsignaled += 1;
                    self.reads = reads;
                    None
                } else {
                    // SAFETY: The entry was just taken back, so it is the producer's, and
                    // initialised.
                    Some(unsafe { entry.read() }.owner)
                }
            }
            None => {
                post::unnamed();
                // If it is signaled, its completion may come.
                self.unsignaled += u32::from(!signaled);
                // An RDMA READ may be in the queue.
                self.reads |= reads;
                None
            }
        };
        let mut error = PostError::in_part(owner, posted.unwrap_or(0) as u32, error);
        if error.posted() > 0 {
            if let Some(owner) = error.owner.take() {
                // SAFETY: The caller has a handle of the QP of the ring, as it promises, so by the
                // invariant of the ring `inner` is valid.
                let inner = unsafe { ring.inner.as_ref() };
                inner.keep_until_drained::<P, P::Target>(owner);
            }
        }
        error
    }

    /// Drains the QP, and calls `back` with each owner that is left in the ring, in the order of
    /// the queue; what the QP keeps is dropped. Nothing is posted by the ring after this. Fails as
    /// [`Qp::drain`], and with `EINVAL` if the ring is of another QP.
    pub fn reclaim<S: PollContext, R: PollContext>(
        &mut self,
        qp: &Qp<S, R>,
        cx: &Sleepable,
        mut back: impl FnMut(P),
    ) -> Result {
        if self.ring.qp != qp.id() {
            return Err(EINVAL);
        }
        qp.drain(cx)?;
        // A completion of what is posted later could be taken for more of them.
        self.reclaimed = true;
        // SAFETY: The QP was drained, so no handler uses the ring; and this is the producer.
        while let Some(entry) = unsafe { self.ring.pop() } {
            back(entry.owner);
        }
        Ok(())
    }
}

/// The reference of the QP.
struct Keeper<P, const ID: u64>(RingRef<P, ID, KEEPER>);

impl<P: Send + 'static, const ID: u64> OnEnd for Keeper<P, ID> {
    fn needs_marker(&self, queue: Queue) -> bool {
        queue == Queue::Send && self.0.places.first().is_some()
    }

    fn is_out(&self) -> bool {
        self.0.places.requests() > 0
    }

    fn ended(&self) {
        // The owners are dropped with this.
        for _ in 0..self.0.places.end_requests() {
            debug::deactivate(self.0 .0.as_ptr().cast());
        }
    }
}

impl<P, const ID: u64> Drop for Keeper<P, ID> {
    fn drop(&mut self) {
        self.0.poller.forget();
        // SAFETY: The QP is destroyed. So no handler takes from the ring, nor does the producer,
        // who would need the QP. No request uses what the owners have.
        while unsafe { self.0.pop() }.is_some() {}
    }
}
