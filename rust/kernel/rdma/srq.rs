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
//!     qp::{Caps, Init, Qp},
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
//!     Init::on_srq(pd, cq, &srq, &Caps::new(16, 0)).create(cx)
//! }
//! ```
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_srq`)

mod events;
mod kept;
mod queue;
mod share;
mod slot;

pub use events::Event;
pub(crate) use queue::Inner;
pub(crate) use share::Share;
pub use slot::Slot;

use crate::{
    bindings,
    context::{
        Context,
        Sleepable, //
    },
    pd::Pd,
    wc::Wc,
    wr::RecvWr, //
};
use core::marker::PhantomData;
use events::Events;
use kernel::{
    error::to_result,
    prelude::*,
    sync::Arc, //
};
use slot::Entries;

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
        queue::check(pd, slots, sges)?;
        let entries = KBox::new(Entries::<T, N>::new(slots, init)?, GFP_KERNEL)?;
        let inner = queue::create(pd, slots, sges, entries, events, cx)?;
        Ok(Self {
            inner,
            _slots: PhantomData,
        })
    }

    /// Returns the number of slots: as many entries does the SRQ lease, once, from each CQ that its
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
