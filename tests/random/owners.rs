// SPDX-License-Identifier: GPL-2.0

//! Owners of requests: a type for each way to own them.

use crate::{
    tally::Life,
    way::Way, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            self,
            ordering::{
                Acquire,
                Relaxed,
                Release, //
            }, //
        },
        SpinLockIrq, //
    },
    time::{
        delay::{
            fsleep,
            udelay, //
        },
        Delta, //
    }, //
};
use rdma::{
    ah::Ah,
    prelude::*,
    rw::{
        Ctx,
        Rw, //
    },
    srq::{
        Receive,
        Slot, //
    }, //
};

/// The memory of each.
pub(crate) type Memory = Buf<Bidirectional>;

/// Counts an owner that was not posted, and drops it.
pub(crate) fn refused<P>(e: PostError<P>, life: impl Fn(&P) -> &Life) -> Error {
    if let Some(owner) = &e.owner {
        life(owner).refused();
    }
    e.error()
}

/// Counts an owner of several requests of which none was posted.
pub(crate) fn none_posted<P>(owner: Option<P>, life: impl Fn(&P) -> &Life) {
    if let Some(owner) = &owner {
        life(owner).refused();
    }
}

/// Has a handler take so many microseconds, at most a thousand. It sleeps where it may.
pub(crate) fn nap(us: u32) {
    if us == 0 {
        return;
    }
    let time = Delta::from_micros(us.into());
    match Sleepable::current() {
        Ok(_) => fsleep(time),
        Err(_) => udelay(time),
    }
}

/// A box.
#[derive(HasCqe)]
pub(crate) struct Message {
    cqe: Cqe<Self>,
    pub(crate) buf: Memory,
    /// The destination of a datagram.
    pub(crate) to: Option<Arc<Ah>>,
    pub(crate) life: Life,
}

impl Message {
    pub(crate) fn new(buf: Memory, to: Option<Arc<Ah>>, life: Life) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            buf,
            to,
            life,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    pub(crate) fn send(&self) -> Result<SendWr<'_>> {
        Ok(SendWr::send([self.buf.whole()]))
    }
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let sent = wc.result().ok().filter(|wc| wc.opcode() == Opcode::Send);
        if sent.is_some_and(|wc| wc.invalidated_rkey().is_some()) {
            this.life.wrong("a send has proved that a key is invalid");
        }
        this.life.back();
    }
}

/// The numbers of some boxes that were posted, came back, and were dropped.
pub(crate) struct Back {
    posted: atomic::Atomic<u32>,
    back: atomic::Atomic<u32>,
    dropped: atomic::Atomic<u32>,
}

impl Back {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let this = Self {
            posted: atomic::Atomic::new(0),
            back: atomic::Atomic::new(0),
            dropped: atomic::Atomic::new(0),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    pub(crate) fn post(&self) {
        self.posted.fetch_add(1, Relaxed);
    }

    pub(crate) fn is_all(&self) -> bool {
        self.back.load(Acquire) >= self.posted.load(Relaxed)
    }

    pub(crate) fn is_any_dropped(&self) -> bool {
        self.dropped.load(Acquire) > 0
    }
}

/// Counts the end of a box.
struct Ends(Arc<Back>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.dropped.fetch_add(1, Release);
    }
}

/// A box that a thread waits for.
#[derive(HasCqe)]
pub(crate) struct Awaited {
    cqe: Cqe<Self>,
    pub(crate) buf: Memory,
    back: Ends,
    pub(crate) life: Life,
}

impl Awaited {
    pub(crate) fn new(buf: Memory, back: &Arc<Back>, life: Life) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            buf,
            back: Ends(back.clone()),
            life,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }
}

impl CqeHandler for Awaited {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
        this.back.0.back.fetch_add(1, Release);
    }
}

/// A counted reference, of which others may be posted, too.
#[derive(HasCqe)]
pub(crate) struct Shared {
    cqe: Cqe<Self>,
    pub(crate) region: Arc<SharedRegion<Bidirectional>>,
    pub(crate) life: Life,
}

impl Shared {
    pub(crate) fn new(region: &Arc<SharedRegion<Bidirectional>>, life: Life) -> Result<Arc<Self>> {
        let this = Self {
            cqe: Cqe::new(),
            region: region.clone(),
            life,
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }
}

impl CqeHandler for Shared {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
    }
}

/// A request that is used again.
#[derive(HasCqe)]
pub(crate) struct Reused {
    cqe: Cqe<Self>,
    pub(crate) buf: Memory,
    pub(crate) life: Life,
}

impl Reused {
    pub(crate) fn new(buf: Memory, life: Life) -> Self {
        Self {
            cqe: Cqe::new(),
            buf,
            life,
        }
    }
}

impl CqeHandler for Reused {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    fn done(this: Taken<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
    }
}

/// A box that posts itself again in its handler, and may have the last reference to its QP: so not
/// in part, where both would stay until a drain of the QP.
#[derive(HasCqe)]
pub(crate) struct Again<C: PollContext> {
    cqe: Cqe<Self>,
    buf: Memory,
    pub(crate) qp: Qp<C>,
    /// The number of posts.
    left: u32,
    how: How,
    pub(crate) life: Life,
}

#[derive(Clone, Copy)]
pub(crate) enum How {
    Send,
    Recv,
}

impl<C: Way> Again<C> {
    pub(crate) fn new(
        buf: Memory,
        qp: &Qp<C>,
        left: u32,
        how: How,
        life: Life,
    ) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            buf,
            qp: qp.clone(),
            left,
            how,
            life,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    pub(crate) fn send(&self) -> Result<SendWr<'_>> {
        Ok(SendWr::send([self.buf.whole()]))
    }

    pub(crate) fn recv(&self) -> Result<RecvWr<'_>> {
        Ok(RecvWr::new([self.buf.whole_mut()]))
    }
}

impl<C: Way> CqeHandler for Again<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
        if this.left == 0 || wc.result().is_err() {
            return;
        }
        this.left -= 1;
        let refused = match this.how {
            How::Send => {
                this.life.post();
                let posted = Qp::repost_send(this, wc, |o| &o.qp, Self::send);
                posted.err().and_then(|e| e.owner)
            }
            How::Recv => {
                this.life.post();
                let posted = Qp::repost_recv(this, wc, |o| &o.qp, Self::recv);
                posted.err().and_then(|e| e.owner)
            }
        };
        if let Some(owner) = refused {
            owner.life.refused();
        }
    }
}

/// A box with a region of its own, which its handler invalidates.
#[derive(HasCqe)]
pub(crate) struct Own<C: PollContext> {
    cqe: Cqe<Self>,
    qp: Qp<C>,
    pub(crate) region: Region<Bidirectional>,
    pub(crate) life: Life,
}

impl<C: Way> Own<C> {
    pub(crate) fn new(
        region: Region<Bidirectional>,
        qp: &Qp<C>,
        life: Life,
    ) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            qp: qp.clone(),
            region,
            life,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }
}

impl<C: Way> CqeHandler for Own<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
        if wc.result().is_ok_and(|wc| wc.opcode() == Opcode::RegMr) {
            this.life.post();
            let posted = Qp::repost_send(this, wc, |o| &o.qp, |o| Ok(InvWr::new(&o.region)));
            if let Some(owner) = posted.err().and_then(|e| e.owner) {
                owner.life.refused();
            }
        }
    }
}

/// The pages of a transfer.
#[derive(HasCqe)]
pub(crate) struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx,
    pub(crate) life: Life,
}

impl Transfer {
    pub(crate) fn new(len: usize, life: Life, cx: &Sleepable) -> Result<Arc<Self>> {
        let this = Self {
            cqe: Cqe::new(),
            data: Ctx::alloc(len, cx)?,
            life,
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    pub(crate) fn write<'a>(&'a self, to: Remote, cx: &Sleepable) -> Result<Rw<'a>> {
        Ok(Rw::write(&self.data, 0..self.data.len(), to, cx))
    }
}

impl CqeHandler for Transfer {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
    }
}

/// Slots that are kept for a while, until the round ends.
#[pin_data]
pub(crate) struct Shelf {
    #[pin]
    slots: SpinLockIrq<Option<KVec<Slot<RecvBuf>>>>,
}

impl Shelf {
    /// Makes room for so many.
    pub(crate) fn new(slots: usize) -> Result<Arc<Self>> {
        let room = KVec::with_capacity(slots, GFP_KERNEL)?;
        let init = pin_init!(Self {
            slots <- new_spinlock_irq!(Some(room)),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    fn put(&self, slot: Slot<RecvBuf>) {
        let refused = match &mut *self.slots.lock() {
            Some(slots) => slots.push_within_capacity(slot).err().map(|e| e.0),
            None => Some(slot),
        };
        drop(refused);
    }

    pub(crate) fn take(&self) -> Option<Slot<RecvBuf>> {
        match &mut *self.slots.lock() {
            Some(slots) => slots.pop(),
            None => None,
        }
    }

    pub(crate) fn close(&self) {
        let slots = self.slots.lock().take();
        drop(slots);
    }
}

/// The value of a slot of an SRQ. The slot comes back by itself, so only its end is counted.
pub(crate) struct RecvBuf {
    pub(crate) buf: Memory,
    /// Of transfers that are prepared while the slot is kept, and left so.
    pub(crate) data: Ctx,
    pub(crate) shelf: Arc<Shelf>,
    pub(crate) _life: Life,
}

impl Receive for RecvBuf {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(mut slot: Slot<Self>, wc: &Wc, _cx: &context::Atomic) {
        let keep = wc.result().is_ok() && slot.buf.cpu().first() == Some(&1);
        if keep {
            let shelf = slot.shelf.clone();
            shelf.put(slot);
        }
    }
}
