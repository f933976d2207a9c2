// SPDX-License-Identifier: GPL-2.0

//! Requests that are answered, many at once.
//!
//! An [`Exchange`] has two parts: its request, which is posted, and what waits for the reply. Each
//! tag of a [`Tags`] has one of them, made once. A [`Tag`] is taken, as a tag of blk-mq, and posted
//! ([`Tag::post`]); the peer's message names it by its [`TagId`], and [`Tags::reply`] finds it. A
//! tag names another exchange only when the send has completed and the reply was handled, in any
//! order: see Documentation/session.rst.
//!
//! A table may have only one in a few sends signaled ([`Tag::post_in_turn`]). Its completion ends
//! those before it, so a tag may be out for a while after its reply has come.
//!
//! # Examples
//!
//! ```
//! use rdma::{prelude::*, session::tags::*};
//!
//! struct Get;
//!
//! impl Exchange for Get {
//!     type Request = Buf<ToDevice>;
//!     type Reply = Option<u64>;
//!     type Connection = ();
//!     type Needs = context::Atomic;
//!
//!     /// Both are back, or the connection has ended.
//!     fn ended(mut tag: Tag<Self>) {
//!         pr_info!("the value, if there was a reply: {:?}\n", tag.parts().1.take());
//!     }
//! }
//!
//! fn get(tags: &Tags<Get>, qp: &Qp<Softirq>, key: u32, cx: &Sleepable) -> Result {
//!     let tag = tags.wait(1_000, cx)?;
//!     let id = tag.id().to_u32();
//!     let posted = tag.post(qp, |request, chain: &mut Chain<'_, 1>| {
//!         request.write(0, &id.to_le_bytes())?;
//!         request.write(4, &key.to_le_bytes())?;
//!         chain.push(SendWr::send([request.sge(0..8)?]))
//!     });
//!     posted.map_err(Error::from)
//! }
//! # use rdma::{qp::Chain, wc::Success};
//!
//! /// A message has come, whose handler has this completion.
//! fn received(tags: &Tags<Get>, wc: &Success<'_>, id: u32, value: u64) -> Result {
//!     *tags.reply(wc, TagId::from_u32(id))? = Some(value);
//!     Ok(())
//! }
//!
//! fn disconnected(tags: &Tags<Get>, qp: &Qp<Softirq>, cx: &Sleepable) -> Result {
//!     tags.close(ENOTCONN);
//!     tags.reclaim(qp, cx)
//! }
//! ```

mod header;
mod state;
mod turns;

use crate::{
    completion::Completion,
    context::Context,
    cqe::{
        self,
        Cqe,
        CqeHandler,
        Queue, //
    },
    debug,
    mr::{
        self,
        InvWr, //
    },
    prelude::internal::*,
    qp::{
        self,
        Qp, //
    },
    wc::{
        Success,
        Wc, //
    },
    wr::PostError, //
};
use core::{
    cell::UnsafeCell,
    mem::forget,
    ops, //
};
use header::Header;
use kernel::{
    sync,
    task::MAX_SCHEDULE_TIMEOUT,
    time::{
        msecs_to_jiffies,
        Jiffies, //
    },
    types::NotThreadSafe, //
};
use state::{
    BitmapWord,
    Half,
    State,
    TAGS, //
};
use turns::{
    Link,
    Turns, //
};

/// The part of a tag that is posted, and the part that waits for the reply.
pub trait Exchange: Sized + 'static {
    /// The part that is posted: buffers and regions. Only borrowed until both halves are back.
    type Request: Send;

    /// The part that waits for the reply. Its handler has it.
    type Reply: Send;

    /// The part of the connection that all exchanges need, such as the controller that is told of
    /// errors: see [`Tag::connection`]. The table has it, and drops it when the [`Tags`] and the QP
    /// are gone and no tag is held. So it must own neither, or they keep each other.
    type Connection: Send + Sync;

    /// The context that the handlers need.
    type Needs: Context;

    /// Set if sends may be posted by [`Tag::post_in_turn`].
    const IN_TURN: bool = false;

    /// The send has completed. The reply may have come before. `wc` may be that of a request behind
    /// it: see [`Tag::post_in_turn`].
    fn sent(request: &Self::Request, wc: &Wc, cx: &Self::Needs) {
        let _ = (request, wc, cx);
    }

    /// A region was invalidated locally that [`Reply::post`] has named. The reply is being
    /// handled until what this gets is dropped.
    fn invalidated(reply: Reply<'_, Self>, wc: &Wc, cx: &Self::Needs) {
        let _ = (reply, wc, cx);
    }

    /// The send has completed and the reply was handled, or does not come: what that has left in
    /// the [`Reply`](Exchange::Reply) tells which. Any context: a handler, [`Tags::reclaim`], or a
    /// work item when the QP is destroyed.
    ///
    /// Where the tag is that of a request of blk-mq ([`Tags::take_at`]), drop it before the request
    /// is ended: blk-mq may give the tag to the next request at once.
    fn ended(tag: Tag<Self>) {
        drop(tag);
    }
}

/// The name of an exchange, for the peer to return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagId {
    /// The number of the tag.
    pub index: u16,
    /// The number of the exchange among those of the tag, in the bits that [`Tags::new`] was told.
    pub generation: u16,
}

impl TagId {
    /// Returns both in one word, the index in the lower half.
    #[inline]
    pub fn to_u32(self) -> u32 {
        u32::from(self.generation) << 16 | u32::from(self.index)
    }

    /// Returns the id of which [`TagId::to_u32`] has returned this word.
    #[inline]
    pub fn from_u32(raw: u32) -> Self {
        Self {
            index: raw as u16,
            generation: (raw >> 16) as u16,
        }
    }
}

/// An exchange, its parts and its callbacks.
///
/// # Invariants
///
/// `table` is the table that this is part of, as number `index`, whose tag is free while `bit` of
/// `word` is set. The parts are used as `state` allows: `request` by references until both halves
/// are back.
struct Slot<X: Exchange> {
    cqe: Cqe<Self>,
    inv_cqe: Cqe<Self, INV>,
    state: State,
    /// The sends that complete with that of this one, or the next in the list of the table.
    link: Link,
    /// Those that complete with the invalidation.
    inv_link: Link,
    index: u16,
    table: NonNull<Table<X>>,
    word: NonNull<BitmapWord>,
    bit: usize,
    request: UnsafeCell<X::Request>,
    reply: UnsafeCell<X::Reply>,
}

/// The callback of a local invalidation.
const INV: u64 = 1;

impl<X: Exchange> cqe::HasCqe for Slot<X> {
    const FIELD: cqe::Field<Self, 0> = crate::cqe_field!(cqe);
}

impl<X: Exchange> cqe::HasCqe<INV> for Slot<X> {
    const FIELD: cqe::Field<Self, INV> = crate::cqe_field!(inv_cqe);
}

/// The slot of a tag that is held, or of which a half is out. A copy is not used after that, unless
/// the QP exists, whose keeper has the table. It owns the send while that is out, and an
/// invalidation while the reply is being handled.
///
/// # Invariants
///
/// The slot is valid: its table is freed after the last tag was put.
struct SlotRef<X: Exchange>(NonNull<Slot<X>>);

impl<X: Exchange> Clone for SlotRef<X> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<X: Exchange> Copy for SlotRef<X> {}

// SAFETY: The parts are `Send`, and are used by one thread at a time, as the state allows. The
// connection is `Send` and `Sync`.
unsafe impl<X: Exchange> Send for SlotRef<X> {}

impl<X: Exchange> ops::Deref for SlotRef<X> {
    type Target = Slot<X>;

    #[inline]
    fn deref(&self) -> &Slot<X> {
        // SAFETY: By the type invariant the slot is valid.
        unsafe { self.0.as_ref() }
    }
}

impl<X: Exchange> SlotRef<X> {
    #[inline]
    fn table(&self) -> &Table<X> {
        // SAFETY: This is the slot's table by the invariant of `Slot`, and valid by that of this
        // type.
        unsafe { self.table.as_ref() }
    }

    /// Notes a half that is back where handlers may run at the same time.
    #[cold]
    fn stray(self, half: Half) {
        if self.state.stray(half) {
            // INVARIANT: The caller holds the tag, as `State::stray` has returned `true`.
            X::ended(Tag(self));
        }
    }

    /// Returns the list that `link`, which is of this slot, begins.
    #[inline]
    fn sends(self, link: &Link) -> DoneSends<X> {
        let next = if X::IN_TURN { link.next() } else { None };
        DoneSends {
            table: self.table,
            next,
        }
    }

    /// The sends of a list have completed, in a handler of the CQ. Not inlined, as most lists have
    /// none.
    #[inline(never)]
    fn sent_all(sends: DoneSends<X>, wc: &Wc, cx: &X::Needs) {
        for slot in sends {
            slot.sent(wc, cx);
        }
    }

    /// Notes that the sends of a list are back, where handlers may run at the same time.
    fn stray_all(sends: DoneSends<X>) {
        for slot in sends {
            slot.stray(Half::Send);
        }
    }

    /// The send has completed, in a handler of the CQ.
    #[inline]
    fn sent(self, wc: &Wc, cx: &X::Needs) {
        // SAFETY: The send is out, so until `end_send` there are references only. Those are used in
        // handlers of the CQ, and this is one of them, which run one after the other.
        X::sent(unsafe { &*self.request.get() }, wc, cx);
        // The table is looked up again, so that nothing is kept while `sent` is called.
        if self.state.end_send(self.table().header.open().is_err()) {
            // INVARIANT: Both halves are back, for this handler.
            X::ended(Tag(self));
        }
    }
}

/// The sends of a list that is in no [`Turns`] any longer: they are out, and done.
///
/// # Invariants
///
/// The sends of the list are those of `table`, and out until the iterator returns them; while there
/// is one, the table is valid. A signaled request behind them has completed, or the QP was drained.
struct DoneSends<X: Exchange> {
    table: NonNull<Table<X>>,
    next: Option<u16>,
}

impl<X: Exchange> Iterator for DoneSends<X> {
    type Item = SlotRef<X>;

    #[inline]
    fn next(&mut self) -> Option<SlotRef<X>> {
        let index = usize::from(self.next?);
        // SAFETY: By the type invariant the send is out, so the table is valid. Only indices of its
        // slots are in a list.
        let slot = SlotRef(unsafe { self.table.as_ref().slots.get_unchecked(index) }.into());
        // INVARIANT: The next one is out, too. This one may end, and begin again, from now on.
        self.next = slot.link.next();
        Some(slot)
    }
}

impl<X: Exchange> CqeHandler for Slot<X> {
    type Pointer = SlotRef<X>;
    type Needs = X::Needs;

    #[inline]
    fn done(slot: SlotRef<X>, wc: &Wc, cx: &X::Needs) {
        // INVARIANT: The request that the list was given to has completed.
        let sends = slot.sends(&slot.link);
        if !slot.table().header.poller.is_at(wc) {
            slot.stray(Half::Send);
            return SlotRef::stray_all(sends);
        }
        slot.sent(wc, cx);
        if sends.next.is_some() {
            SlotRef::sent_all(sends, wc, cx);
        }
    }
}

impl<X: Exchange> CqeHandler<INV> for Slot<X> {
    type Pointer = SlotRef<X>;
    type Needs = X::Needs;

    #[inline]
    fn done(slot: SlotRef<X>, wc: &Wc, cx: &X::Needs) {
        // INVARIANT: The invalidation, to which the list was given, has completed.
        let sends = slot.sends(&slot.inv_link);
        if !slot.table().header.poller.is_at(wc) {
            if wc.result().is_ok() {
                // Handlers may run, so it is not known whether the registration came before.
                //
                // SAFETY: The region is one of the request, with a state for one thread, which
                // `Reply::post` has posted. Its reply is being handled, so nothing else uses it.
                unsafe { mr::undo_invalidated(wc) };
            }
            slot.stray(Half::Reply);
            return SlotRef::stray_all(sends);
        }
        // The send of this exchange may be one of them. It does not end, as its reply is handled.
        SlotRef::sent_all(sends, wc, cx);
        if wc.result().is_err() {
            return slot.stray(Half::Reply);
        }
        if slot.state.is_send_out() {
            // The queue is in order, so the invalidation came before the send, and before the
            // registration: the peer has answered what had not been posted. It did not if the send
            // was posted in turn: the lock is held from `start` on until that post has returned.
            //
            // SAFETY: It is that of a region of the request, with a state for one thread, which
            // `Reply::post` has posted, and only this handler uses it.
            unsafe { mr::undo_invalidated(wc) };
            return slot.stray(Half::Reply);
        }
        // INVARIANT: The reply is being handled, without an owner, by this handler of the CQ.
        X::invalidated(Reply(slot, PhantomData), wc, cx);
    }
}

// SAFETY: While a half is out the slot stays in place. It is only modified through cells.
unsafe impl<X: Exchange, const ID: u64> cqe::CqePointer<ID> for SlotRef<X>
where
    Slot<X>: CqeHandler<ID, Pointer = Self>,
{
    #[inline]
    fn into_ptr(self, _: cqe::Sealed) -> *mut Slot<X> {
        self.0.as_ptr()
    }

    #[inline]
    unsafe fn from_ptr(ptr: *mut Slot<X>) -> Self {
        // SAFETY: `ptr` is from `into_ptr`, as the caller promises, so it is not null.
        // INVARIANT: As it was given up.
        Self(unsafe { NonNull::new_unchecked(ptr) })
    }
}

/// The exchanges of a QP.
///
/// # Invariants
///
/// Each tag of the header's words has its slot in `slots`.
#[pin_data]
struct Table<X: Exchange> {
    #[pin]
    header: Header,
    slots: KVec<Slot<X>>,
    connection: X::Connection,
    /// Held while a request is posted, where sends are posted in turn.
    #[pin]
    turns: sync::SpinLockIrq<Turns>,
}

impl<X: Exchange> Table<X> {
    /// Frees the tag of this bit of a word, and the table with the last one.
    ///
    /// # Safety
    ///
    /// The caller holds the tag, which is of this table, and no longer uses it or the table.
    #[cold]
    unsafe fn put_locked(this: NonNull<Self>, word: &BitmapWord, bit: usize) {
        // SAFETY: The caller holds the tag until this puts it.
        unsafe { Self::free_if(this, Header::put_tag(Self::header(this), word, bit)) };
    }

    /// Returns the header, by its address alone: the table may be freed while this is used.
    ///
    /// # Safety
    ///
    /// The table is valid.
    unsafe fn header(this: NonNull<Self>) -> NonNull<Header> {
        // SAFETY: The table is valid, as the caller promises, so the address is not null.
        unsafe { NonNull::new_unchecked(&raw mut (*this.as_ptr()).header) }
    }

    /// Frees the table if the caller has given up the last part of it.
    ///
    /// # Safety
    ///
    /// `is_last` is from [`Header::put_tag`] or [`Header::put_handle`] of this table, which the
    /// caller no longer uses.
    unsafe fn free_if(this: NonNull<Self>, is_last: bool) {
        if is_last {
            // SAFETY: The table is from `KBox::leak`. There is no handle, and no tag is held or
            // out: once there was no handle, tags were put under the lock, so this was found once.
            drop(unsafe { Pin::new_unchecked(KBox::from_raw(this.as_ptr())) });
        }
    }

    /// Waits for posts that have not seen the table closed: there are none in turn after this.
    fn settle(&self) {
        if X::IN_TURN {
            drop(self.turns.lock());
        }
    }

    /// Notes that the sends are back which are not signaled, and which no request behind them has.
    /// The QP was drained after all of them were posted.
    fn drained(&self) {
        if X::IN_TURN {
            let next = self.turns.lock().take();
            let table = self.into();
            // INVARIANT: The QP was drained. The list is taken from the table.
            SlotRef::stray_all(DoneSends { table, next });
        }
    }

    /// Ends the exchanges of which `take` takes one.
    fn sweep(&self, take: impl Fn(&State) -> bool) {
        for slot in &self.slots {
            if take(&slot.state) {
                // INVARIANT: The caller holds the tag, as the sweeps of `State` say.
                X::ended(Tag(SlotRef(slot.into())));
            }
        }
    }
}

/// A handle of a table: that of the [`Tags`], or of the [`Keeper`].
///
/// # Invariants
///
/// The table is valid, and counts this handle.
struct Handle<X: Exchange>(NonNull<Table<X>>);

// SAFETY: The parts are used by one thread at a time, and are `Send`. The connection is `Send`.
unsafe impl<X: Exchange> Send for Handle<X> {}
// SAFETY: A tag is taken by one thread. Handlers of one CQ use the rest, one after the other. The
// connection is `Sync`.
unsafe impl<X: Exchange> Sync for Handle<X> {}

impl<X: Exchange> ops::Deref for Handle<X> {
    type Target = Table<X>;

    #[inline]
    fn deref(&self) -> &Table<X> {
        // SAFETY: By the type invariant the table is valid.
        unsafe { self.0.as_ref() }
    }
}

impl<X: Exchange> Drop for Handle<X> {
    fn drop(&mut self) {
        // SAFETY: By the type invariant the table is valid and counts this handle, until this gives
        // it up; it is not used again.
        unsafe { Table::free_if(self.0, Header::put_handle(Table::header(self.0))) };
    }
}

/// A tag that is not in use: exclusive access to its exchange. Dropped in any context, it is free.
///
/// # Invariants
///
/// This holds the tag: no half is out. It is invariant in `X`, as the slot is.
pub struct Tag<X: Exchange>(SlotRef<X>);

// SAFETY: A shared one gives no access to the parts, and a shared reference to the connection,
// which is `Sync`.
unsafe impl<X: Exchange> Sync for Tag<X> {}

impl<X: Exchange> Tag<X> {
    /// Returns the name of the exchange that [`Tag::post`] begins.
    #[inline]
    pub fn id(&self) -> TagId {
        TagId {
            index: self.0.index,
            generation: self.0.state.generation(self.0.table().header.mask),
        }
    }

    /// Returns both parts.
    #[inline]
    pub fn parts(&mut self) -> (&mut X::Request, &mut X::Reply) {
        // SAFETY: By the type invariant the tag is held, so nothing else uses the parts.
        unsafe { (&mut *self.0.request.get(), &mut *self.0.reply.get()) }
    }

    /// Returns the part of the connection that the exchanges share.
    #[inline]
    pub fn connection(&self) -> &X::Connection {
        &self.0.table().connection
    }

    /// Posts the request, and waits for its reply from then on: [`Qp::post_chain`] of what `make`
    /// adds, the last completes to [`Exchange::sent`]. The reply may come before this returns.
    ///
    /// Any context. Gives the tag back as [`Qp::post_chain`] gives an owner, with `EINVAL` if the
    /// table is that of another QP, and with the error of [`Tags::close`]; but not where the driver
    /// has refused it: the exchange ends in [`Tags::reclaim`] or, if requests before that were
    /// posted, when the QP is destroyed. Regions that were to be registered may be registered then.
    /// If the driver does not say which, and no completion comes, it ends when the QP is destroyed.
    #[inline]
    pub fn post<C, const LINKS: usize, const SGES: usize>(
        self,
        qp: &Qp<C>,
        make: impl for<'a> FnOnce(&'a X::Request, &mut qp::Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(), PostError<Self>>
    where
        C: Provides<X::Needs>,
    {
        let slot = self.0;
        if let Err(error) = slot.table().header.posts_to(qp) {
            return Err(PostError::new(self, error));
        }
        if X::IN_TURN {
            slot.link.end();
        }
        // SAFETY: By the type invariant the tag is held, so nothing else uses the request. From
        // `start` on there are references to it only. The owner is that of the callback.
        let posted = unsafe {
            let start = || {
                slot.state.start();
                cqe::CqePointer::<0>::into_cqe(slot, cqe::Sealed(()))
            };
            // The table is valid while `qp` is.
            let names_first = || slot.table().header.names_first;
            qp.inner
                .post_shared(slot.request.get(), start, names_first, make)
        };
        match posted {
            Ok(()) => {
                forget(self);
                Ok(())
            }
            Err(qp::ChainError::Unmade(error)) => Err(PostError::new(self, error)),
            Err(qp::ChainError::Refused(error, posted)) => {
                forget(self);
                Err(Self::refused(slot, true, error, posted))
            }
        }
    }

    /// As [`Tag::post`], but only one send in `interval` is signaled, and all in which there is an
    /// RDMA READ. For the others [`Exchange::sent`] is called when a signaled one behind them, or
    /// an invalidation of [`Reply::post`], has completed, with that completion: if one of them has
    /// failed, that has failed, too. A tag is out until then, so a table needs at least `interval`
    /// more tags than there are requests at a time, or [`Tags::take`] fails. The reply is handled
    /// when it comes, and [`Region::take_memory`] gives back what the peer has used.
    ///
    /// Sends that nothing follows are out until [`Tags::reclaim`], or the end of the QP. If the
    /// completion of a signaled one is lost, they end as that.
    ///
    /// Takes a lock for the post, so that the order is known: the list of sends that are not
    /// signaled goes to the signaled one behind them. Does not compile unless
    /// [`Exchange::IN_TURN`] is set.
    ///
    /// [`Region::take_memory`]: mr::Region::take_memory
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, qp::Chain, session::tags::{Exchange, Tag}};
    /// struct Put;
    ///
    /// impl Exchange for Put {
    ///     type Request = Buf<ToDevice>;
    ///     type Reply = ();
    ///     type Connection = ();
    ///     type Needs = context::Atomic;
    ///
    ///     const IN_TURN: bool = true;
    /// }
    ///
    /// fn put(tag: Tag<Put>, qp: &Qp<Softirq>) -> Result {
    ///     let posted = tag.post_in_turn(qp, 16, |request, chain: &mut Chain<'_, 1>| {
    ///         chain.push(SendWr::send([request.whole()]))
    ///     });
    ///     posted.map_err(Error::from)
    /// }
    /// ```
    #[inline]
    pub fn post_in_turn<C, const LINKS: usize, const SGES: usize>(
        self,
        qp: &Qp<C>,
        interval: u32,
        make: impl for<'a> FnOnce(&'a X::Request, &mut qp::Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(), PostError<Self>>
    where
        C: Provides<X::Needs>,
    {
        const { assert!(X::IN_TURN, "`Exchange::IN_TURN` is not set") };
        let slot = self.0;
        // The table is valid while `qp` is.
        let table = slot.table();
        if let Err(error) = table.header.posts_to(qp) {
            return Err(PostError::new(self, error));
        }
        let mut links = MaybeUninit::uninit();
        // SAFETY: The links outlive the chain. By the type invariant the tag is held, so nothing
        // else uses the request, and from `start` on there are references to it only.
        let made = unsafe {
            qp::Chain::make(
                links.as_mut_ptr(),
                &qp.inner.target,
                slot.request.get().cast_const(),
                make,
            )
        };
        let chain = match made {
            Ok(chain) => chain,
            Err(error) => return Err(PostError::new(self, error)),
        };
        let mut turns = table.turns.lock();
        // None is posted under the lock once `Table::settle` had it.
        if let Err(error) = table.header.open() {
            drop(turns);
            // SAFETY: The tag is held, and the chain made of its request.
            unsafe { chain.undo() };
            return Err(PostError::new(self, error));
        }
        let is_signaled = chain.reads || turns.is_due(interval);
        let given = is_signaled.then(|| turns.give(&slot.link));
        // The tag is given up.
        forget(self);
        slot.state.start();
        let tail = is_signaled.then(|| cqe::CqePointer::<0>::into_cqe(slot, cqe::Sealed(())));
        // SAFETY: The request stays until both halves are back: until the signaled send, or one
        // behind it, has completed, or the QP was drained. The callback is that of the slot.
        match unsafe { chain.post(tail, false) } {
            Ok(()) if is_signaled => {}
            // It does not end before a handler or a drain has found it in the list.
            Ok(()) => turns.add(slot.index, &slot.link),
            Err(refused) => {
                let (error, posted) = refused.why(table.header.names_first);
                drop(refused);
                if let (Some(count), Some(_)) = (given, posted) {
                    turns.take_back(&slot.link, count);
                }
                drop(turns);
                return Err(Self::refused(slot, is_signaled, error, posted));
            }
        }
        Ok(())
    }

    /// The driver has refused a request, after `posted` that it did not. If it does not say which,
    /// the last one may complete, if it `is_signaled`.
    #[cold]
    fn refused(
        slot: SlotRef<X>,
        is_signaled: bool,
        error: Error,
        posted: Option<usize>,
    ) -> PostError<Self> {
        if is_signaled && posted.is_some() {
            debug::deactivate((&raw const slot.cqe).cast_mut().cast());
        }
        match posted {
            Some(0) => slot.stray(Half::Send),
            Some(_) => slot.stray(Half::SentInPart),
            None => qp::post::unnamed(),
        }
        PostError::in_part(None, posted.unwrap_or(0) as u32, error)
    }
}

impl<X: Exchange> Drop for Tag<X> {
    #[inline]
    fn drop(&mut self) {
        let slot = self.0;
        let bit = self.0.bit;
        // SAFETY: By the invariant of `Slot` this is the tag's word, which is valid, as the tag is
        // held.
        let word = unsafe { slot.word.as_ref() };
        if !word.put(bit) {
            // SAFETY: The tag was not put, so it is held, and it is not used after this.
            unsafe { Table::put_locked(slot.table, word, bit) };
        }
    }
}

/// A reply that has come, in its handler: exclusive access to what waited for it.
///
/// # Invariants
///
/// The reply is being handled, by this, in a handler of the CQ, which `'w` does not outlive. This
/// is invariant in `X`, as the slot is.
pub struct Reply<'w, X: Exchange>(SlotRef<X>, PhantomData<(&'w Wc, NotThreadSafe)>);

impl<X: Exchange> Reply<'_, X> {
    /// Returns what was posted. The send may not have completed.
    #[inline]
    pub fn request(&self) -> &X::Request {
        // SAFETY: By the type invariant a half is out, so there are references only. Those are used
        // in handlers of the CQ, and this is one of them, which run one after the other.
        unsafe { &*self.0.request.get() }
    }

    /// Posts a local invalidation of a region of the request, where the reply did not prove that
    /// the peer has done that. The reply is being handled until [`Exchange::invalidated`]. That is
    /// not called, and the exchange ends in [`Tags::reclaim`] or when the QP is destroyed, if the
    /// invalidation fails, or comes before the registration, as the peer has guessed.
    ///
    /// Gives the reply back as [`Qp::post_send`] gives an owner, with `EINVAL` if the table is that
    /// of another QP, and with the error of [`Tags::close`]. If it is not given back, and no
    /// completion comes, the exchange ends when the QP is destroyed.
    pub fn post<C, const LENT: bool>(
        self,
        qp: &Qp<C>,
        wr: impl for<'a> FnOnce(&'a X::Request) -> Result<InvWr<'a, mr::Exclusive<LENT>>> + Send,
    ) -> Result<(), PostError<Self>>
    where
        C: Provides<X::Needs>,
    {
        // The table is valid while `qp` is.
        let slot = self.0;
        let table = slot.table();
        if let Err(error) = table.header.posts_to(qp) {
            return Err(PostError::new(self, error));
        }
        // SAFETY: The reply is handled by a handler of the CQ, the only one that runs, so nothing
        // else uses the request.
        let wr = match wr(unsafe { &*slot.request.get() }) {
            Ok(wr) => wr,
            Err(error) => return Err(PostError::new(self, error)),
        };
        let mut turns = X::IN_TURN.then(|| table.turns.lock());
        if turns.is_some() {
            // None is posted under the lock once `Table::settle` had it.
            if let Err(error) = table.header.open() {
                return Err(PostError::new(self, error));
            }
        }
        let given = turns.as_mut().map(|turns| turns.give(&slot.inv_link));
        // The reply is being handled by this from here on.
        let handling = ManuallyDrop::new(self).0;
        // SAFETY: A connected QP has these operations, and `C` provides what the handler needs.
        let posted = unsafe { qp.post_op(handling, |_| Ok(wr.done_by::<INV>())) };
        posted.map_err(|e| {
            if let (Some(turns), Some(count), Some(_)) = (&mut turns, given, &e.owner) {
                turns.take_back(&slot.inv_link, count);
            }
            // INVARIANT: The reply is handled by what comes back; the handler has not returned.
            e.map(|back| Reply(back, PhantomData))
        })
    }
}

impl<X: Exchange> ops::Deref for Reply<'_, X> {
    type Target = X::Reply;

    #[inline]
    fn deref(&self) -> &X::Reply {
        // SAFETY: By the type invariant the reply is being handled, by `self`.
        unsafe { &*self.0.reply.get() }
    }
}

impl<X: Exchange> ops::DerefMut for Reply<'_, X> {
    #[inline]
    fn deref_mut(&mut self) -> &mut X::Reply {
        // SAFETY: By the type invariant the reply is being handled, by `self`.
        unsafe { &mut *self.0.reply.get() }
    }
}

impl<X: Exchange> Drop for Reply<'_, X> {
    #[inline]
    fn drop(&mut self) {
        if self.0.state.end_reply() {
            // INVARIANT: Both halves are back, for this handler.
            X::ended(Tag(self.0));
        }
    }
}

/// The exchanges of a QP, and their tags.
///
/// When the QP is destroyed, the exchanges that are out end, also those that the device has lost.
/// If completions of the CQ were ever polled into a [`WcArray`], one whose send has not completed
/// ends when its completion is dispatched.
///
/// [`WcArray`]: crate::cq::WcArray
///
/// # Invariants
///
/// This is invariant in `X`: the parts of an exchange, which are in cells, are types of the trait.
pub struct Tags<X: Exchange>(Handle<X>);

impl<X: Exchange> Tags<X> {
    /// Makes `count` exchanges, whose parts `init` makes, for a QP. Peers return `generation_bits`
    /// bits, at most 16, of the number of an exchange.
    ///
    /// All exchanges share `connection`, which is dropped if this fails.
    ///
    /// Fails with `EINVAL` if both queues of the QP do not complete to one CQ, or that is
    /// [shared](crate::cq::Cq::pool_get), or if there are 0 or more than 65,536 exchanges, or too
    /// many bits; `ENOMEM`, as where all exchanges take more than `KMALLOC_MAX_SIZE` (4 MiB): put
    /// large parts into boxes; or the error of `init`.
    pub fn new<C>(
        qp: &Qp<C>,
        connection: X::Connection,
        count: u32,
        generation_bits: u32,
        mut init: impl FnMut(TagId) -> Result<(X::Request, X::Reply)>,
        cx: &Sleepable,
    ) -> Result<Self>
    where
        C: Provides<X::Needs>,
    {
        // First, so that there is little to drop where a step fails.
        let header = Header::new(&qp.inner, count, generation_bits)?;
        let place = qp.place_of_table(cx)?;
        let table = KBox::<Table<X>>::new_uninit(GFP_KERNEL)?;
        let mut slots = KVec::with_capacity(count as usize, GFP_KERNEL | __GFP_NOWARN)?;
        for index in 0..count {
            let bit = 1 << (index % TAGS);
            let index = index as u16;
            let generation = 0;
            let (request, reply) = init(TagId { index, generation })?;
            let room = slots.spare_capacity_mut().first_mut().ok_or(ENOMEM)?;
            room.write(Slot {
                cqe: Cqe::new(),
                inv_cqe: Cqe::new(),
                state: State::new(),
                link: Link::new(),
                inv_link: Link::new(),
                index,
                table: NonNull::dangling(),
                word: NonNull::dangling(),
                bit,
                request: UnsafeCell::new(request),
                reply: UnsafeCell::new(reply),
            });
            // SAFETY: There was room for the slot, which was just written.
            unsafe { slots.inc_len(1) };
        }
        let init = pin_init!(Table {
            header <- header,
            slots,
            connection,
            turns <- kernel::new_spinlock_irq!(Turns::new()),
        });
        let table = table.write_pin_init(init)?;
        // SAFETY: The table is not moved: it goes back into a pinned box.
        let table = NonNull::from(KBox::leak(unsafe { Pin::into_inner_unchecked(table) }));
        // SAFETY: The table was just made, and nothing else uses it.
        let Table { header, slots, .. } = unsafe { &mut *table.as_ptr() };
        for (word, slots) in header.words.iter().zip(slots.chunks_mut(TAGS as usize)) {
            for slot in slots {
                // INVARIANT: The slot is part of the table, and this is its word.
                (slot.table, slot.word) = (table, NonNull::from(word));
            }
        }
        // INVARIANT: Both are counted.
        qp.keep_table(place, Keeper(Handle(table)));
        Ok(Self(Handle(table)))
    }

    /// Takes a free tag. Any context. Fails with `EAGAIN` or with the error of [`Tags::close`].
    #[inline]
    pub fn take(&self) -> Result<Tag<X>> {
        let header = &self.0.header;
        header.open()?;
        let tag = match header.first().take() {
            Some(tag) => tag as usize,
            None => header.take_behind_first()?,
        };
        // SAFETY: The header has just given this tag to this call, and gives it to no other until
        // it is put.
        Ok(unsafe { self.tag(tag) })
    }

    /// Takes the tag of this index, if it is free: that of a request for which blk-mq has chosen it
    /// (`rq->tag`), so that it is not chosen twice; or one behind those of blk-mq, for commands
    /// that are no requests, as the asynchronous events of NVMe. Any context.
    ///
    /// Fails with `EINVAL` if there is no such tag; with `EBUSY` if it is held, or a half of its
    /// exchange is out; or with the error of [`Tags::close`].
    #[inline]
    pub fn take_at(&self, index: u16) -> Result<Tag<X>> {
        self.0.header.open()?;
        let slot = self.0.slots.get(usize::from(index)).ok_or(EINVAL)?;
        // SAFETY: By the invariant of `Slot` this is a word of the table, which `self` keeps.
        if !unsafe { slot.word.as_ref() }.take_at(slot.bit) {
            return Err(EBUSY);
        }
        // INVARIANT: The tag was free, so the caller holds it.
        Ok(Tag(SlotRef(slot.into())))
    }

    /// Returns a tag by its number.
    ///
    /// # Safety
    ///
    /// The caller has taken it.
    #[inline]
    unsafe fn tag(&self, tag: usize) -> Tag<X> {
        // SAFETY: By the invariant of `Table` each tag of the words has its slot.
        let slot = unsafe { self.0.slots.get_unchecked(tag) };
        // INVARIANT: The caller holds the tag.
        Tag(SlotRef(slot.into()))
    }

    /// Takes a free tag, and waits up to `timeout_ms` milliseconds for one. Fails with `ETIMEDOUT`,
    /// with `ERESTARTSYS` if a signal is pending, or with the error of [`Tags::close`].
    pub fn wait(&self, timeout_ms: u32, cx: &Sleepable) -> Result<Tag<X>> {
        let jiffies = msecs_to_jiffies(timeout_ms);
        self.wait_by(Completion::wait_interruptible, jiffies, cx)
    }

    /// As [`Tags::wait`], but without a limit, and only the end of the task ends it early: for
    /// requests of file systems, whose callers know of no signal that is not fatal.
    pub fn wait_killable(&self, cx: &Sleepable) -> Result<Tag<X>> {
        let forever = MAX_SCHEDULE_TIMEOUT as Jiffies;
        self.wait_by(Completion::wait_killable, forever, cx)
    }

    fn wait_by(&self, wait: header::WaitFn, jiffies: Jiffies, cx: &Sleepable) -> Result<Tag<X>> {
        match self.take() {
            // SAFETY: The header has just given this tag to this call, and gives it to no other
            // until it is put.
            Err(EAGAIN) => Ok(unsafe { self.tag(self.0.header.wait(wait, jiffies, cx)?) }),
            taken => taken,
        }
    }

    /// Finds what waits for a reply, in the handler of the message that has it, whose completion is
    /// `wc`. Fails with `EPROTO` if nothing waits for it: the peer does not keep to the protocol;
    /// with the error of [`Tags::close`]; or with `EINVAL` if `wc` is not a completion that the
    /// CQ's poller is handling, as those of a [`WcArray`] or of C's drain of a QP are not.
    ///
    /// [`WcArray`]: crate::cq::WcArray
    #[inline]
    pub fn reply<'w>(&'w self, wc: &Success<'w>, id: TagId) -> Result<Reply<'w, X>> {
        let table = &*self.0;
        if !table.header.poller.is_at(wc.wc) {
            return Err(EINVAL);
        }
        table.header.open()?;
        let slot = table.slots.get(usize::from(id.index)).ok_or(EPROTO)?;
        if !slot.state.take_reply(id.generation, table.header.mask) {
            return Err(EPROTO);
        }
        // INVARIANT: This handles the reply, in the handler of `wc`, which outlives `'w`.
        Ok(Reply(SlotRef(slot.into()), PhantomData))
    }

    /// Ends the waits for a tag, and fails later calls that take one or post, with `error`; only
    /// the first call does. Replies find nothing from now on. For the end of the connection. Any
    /// context.
    pub fn close(&self, error: Error) {
        self.0.header.close(error);
    }

    /// Closes the table, if it is not, with `ENOTCONN`, drains the QP, and ends the exchanges that
    /// are out. Those that [`Tag::post`] leaves to the end of the QP stay out, and those of which a
    /// completion is in a [`WcArray`]; requests that are posted meanwhile end in their handler.
    ///
    /// Fails as [`Qp::drain`], and with `EINVAL` if it is another QP.
    ///
    /// [`WcArray`]: crate::cq::WcArray
    pub fn reclaim<C: PollContext>(&self, qp: &Qp<C>, cx: &Sleepable) -> Result {
        let table = &*self.0;
        if table.header.qp != qp.id() {
            return Err(EINVAL);
        }
        table.header.close(ENOTCONN);
        // A reply's handler that did not see the table closed may post behind the first marker.
        for _ in 0..2 {
            table.settle();
            qp.drain(cx)?;
            table.drained();
            // One that strays between this and the sweep is left for the next turn.
            let is_any_out = table.slots.iter().any(|slot| slot.state.is_out());
            // The QP was drained after the table was closed.
            table.sweep(State::sweep);
            if !is_any_out {
                break;
            }
        }
        Ok(())
    }
}

impl<X: Exchange> Drop for Tags<X> {
    fn drop(&mut self) {
        self.0.header.close(ENOTCONN);
    }
}

/// The handle that the QP has.
struct Keeper<X: Exchange>(Handle<X>);

impl<X: Exchange> qp::OnEnd for Keeper<X> {
    fn closing(&self) {
        self.0.header.close(ENOTCONN);
    }

    fn is_out(&self) -> bool {
        // The last drain was after all posts.
        self.0.drained();
        self.0.slots.iter().any(|slot| slot.state.is_out())
    }

    fn needs_marker(&self, queue: Queue) -> bool {
        X::IN_TURN && queue == Queue::Send && !self.0.turns.lock().is_empty()
    }

    fn ended(&self) {
        // `is_out` was not called if a request of another owner was found before.
        self.0.drained();
        for slot in self.0.slots.iter().filter(|slot| slot.state.is_out()) {
            debug::deactivate((&raw const slot.cqe).cast_mut().cast());
            debug::deactivate((&raw const slot.inv_cqe).cast_mut().cast());
        }
        self.0.sweep(State::end_lost);
    }
}

impl<X: Exchange> Drop for Keeper<X> {
    fn drop(&mut self) {
        // INVARIANT: The QP is destroyed. Another CQ may be at this address later.
        self.0.header.poller.forget();
        // The QP was drained after `closing`, or nothing was posted to it; nothing is posted now.
        self.0.drained();
        self.0.sweep(State::last_sweep);
    }
}
