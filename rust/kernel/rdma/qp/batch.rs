// SPDX-License-Identifier: GPL-2.0

//! Requests of which only the last is signaled.

use crate::{
    cqe::{
        self,
        CqePointer, //
    },
    prelude::*,
    qp::{
        chain,
        post,
        AnyQp,
        Chain, //
    }, //
};

/// Requests of one owner that are posted one after the other, with a signaled one at the end.
///
/// If it is dropped before [`Batch::finish`] has succeeded, and something was posted, the QP keeps
/// the owner until a drain has proved that it is out of use.
///
/// # Invariants
///
/// The owner is there until it is posted or lost.
pub struct Batch<'q, P: CqePointer<ID>, const ID: u64 = 0> {
    qp: &'q AnyQp,
    owner: Option<P>,
    /// In so many bits that it cannot wrap.
    posted: u64,
    /// Set if an RDMA READ may be among the requests that were posted.
    reads: bool,
}

/// A chain that was not posted by `Qp::post_shared`.
pub(crate) enum ChainError {
    /// It was not made.
    Unmade(Error),
    /// The driver has refused a request behind so many others, if it says so.
    Refused(Error, Option<usize>),
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Posts several requests in one call (`ib_post_send` of a linked list), moving their owner in.
    ///
    /// `make` adds the requests, made from what the owner has, to the chain, whose size its type
    /// says. Only the last one is signaled, and gives the owner to its handler.
    ///
    /// Any context. Fails as [`Qp::post_send`]. The driver may have posted some requests when it
    /// refuses one: see [`PostError`].
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, mr::*, qp::*, wc::Wc, wr::{Remote, SendWr}};
    /// # #[derive(HasCqe)]
    /// # struct Io { cqe: Cqe<Self>, message: Buf<ToDevice>, region: Region<FromDevice> }
    /// # impl CqeHandler for Io {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn submit(qp: &Qp<Softirq>, io: Pin<KBox<Io>>) -> Result {
    ///     Ok(qp.post_chain(io, |io, chain: &mut Chain<'_, 2>| {
    ///         let Remote { rkey, .. } = chain.push(RegWr::remote_write(&io.region))?;
    ///         io.message.write(0, &rkey.to_le_bytes())?;
    ///         chain.push(SendWr::send([io.message.whole()]))
    ///     })?)
    /// }
    /// ```
    #[inline]
    pub fn post_chain<P, const ID: u64, const LINKS: usize, const SGES: usize>(
        &self,
        owner: P,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        self.any
            .post_links(owner, false, make)
            .map_err(|e| self.any.keep_posted(e))
    }

    /// Begins a batch of requests of one owner. Nothing is posted yet. The queue has room again
    /// only when a signaled request completes, so do not fill it with requests that are not.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{context::*, cqe::*, dma::*, qp::*, wc::Wc, wr::*};
    /// # #[derive(HasCqe)]
    /// # struct Log { cqe: Cqe<Self>, record: Buf<ToDevice>, index: Buf<ToDevice> }
    /// # impl CqeHandler for Log {
    /// #     type Pointer = Pin<KBox<Self>>;
    /// #     type Needs = Atomic;
    /// #     fn done(_: Self::Pointer, _: &Wc, _: &Atomic) {}
    /// # }
    /// fn append(qp: &Qp<Softirq>, log: Pin<KBox<Log>>, to: [Remote; 2]) -> Result {
    ///     let mut batch = qp.batch(log);
    ///     batch.post(|log, chain: &mut Chain<'_, 1>| {
    ///         chain.push(SendWr::rdma_write([log.record.whole()], to[0]))
    ///     })?;
    ///     pr_debug!("{} records are on their way\n", batch.posted());
    ///     batch.finish(|log, chain: &mut Chain<'_, 1>| {
    ///         chain.push(SendWr::rdma_write([log.index.whole()], to[1]))
    ///     })
    /// }
    /// ```
    #[inline]
    pub fn batch<P, const ID: u64>(&self, owner: P) -> Batch<'_, P, ID>
    where
        P: CqePointer<ID>,
        S: Provides<<P::Target as CqeHandler<ID>>::Needs>,
    {
        // INVARIANT: The owner is there.
        Batch {
            qp: &self.any,
            owner: Some(owner),
            posted: 0,
            reads: false,
        }
    }
}

impl AnyQp {
    /// Posts a chain whose last request completes to the owner. `reads` is whether there may be
    /// RDMA READs before it. The error has the owner unless the last request may be in the queue.
    #[inline]
    fn post_links<P, const ID: u64, const LINKS: usize, const SGES: usize>(
        &self,
        owner: P,
        reads: bool,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(), PostError<P>>
    where
        P: CqePointer<ID>,
    {
        let mut slots = MaybeUninit::uninit();
        // SAFETY: The slots outlive the chain. The owner is given up before that is posted, and
        // stays where it is.
        let made = unsafe { Chain::make(slots.as_mut_ptr(), &self.target, &*owner, make) };
        let mut chain = match made {
            Ok(chain) => chain,
            Err(error) => return Err(PostError::new(owner, error)),
        };
        chain.reads |= reads;
        let cqe = owner.into_cqe(cqe::Sealed::new());
        // SAFETY: The owner is the queue's until `done`.
        let posted = unsafe { chain.post(Some(cqe)) };
        // SAFETY: The requests were made of the owner, and the last, signaled one has its callback.
        posted.map_err(|refused| unsafe { self.take_back(refused, cqe) })
    }

    /// Posts a chain that `make` makes of what `owner` has, and whose last request completes to the
    /// callback that `start` returns. Others may use the owner from `start` on, which is called
    /// when the chain is made. So what was prepared is not taken back if the driver refuses it.
    ///
    /// `names_first` is [`AnyQp::names_first`], without the QP, whose address each post would keep.
    ///
    /// # Safety
    ///
    /// The owner stays where it is until that request has completed or, if it was not posted, until
    /// the QP was drained; nobody has more than references to it until then, and the caller nothing
    /// else before `start` is called.
    #[inline]
    pub(crate) unsafe fn post_shared<T, const LINKS: usize, const SGES: usize>(
        &self,
        owner: *const T,
        start: impl FnOnce() -> *mut bindings::ib_cqe,
        names_first: impl FnOnce() -> bool,
        make: impl for<'a> FnOnce(&'a T, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result<(), ChainError> {
        let mut slots = MaybeUninit::uninit();
        // SAFETY: The slots outlive the chain. The owner stays where it is, as the caller promises,
        // and others use it only when the chain is made.
        let chain = unsafe { Chain::make(slots.as_mut_ptr(), &self.target, owner, make) }
            .map_err(ChainError::Unmade)?;
        // SAFETY: What the chain is made of stays until the QP was drained, as the caller promises.
        unsafe { chain.post(Some(start())) }.map_err(|refused| {
            let (error, posted) = refused.why(names_first());
            ChainError::Refused(error, posted)
        })
    }

    /// Finds out what was posted of a chain, and takes the owner back.
    ///
    /// # Safety
    ///
    /// The driver has refused requests that were made of what the owner has; the last of them was
    /// to complete to `cqe`, which is the owner's.
    #[cold]
    #[inline(never)]
    unsafe fn take_back<P, const ID: u64, const LINKS: usize, const SGES: usize>(
        &self,
        refused: chain::Refused<'_, LINKS, SGES>,
        cqe: *mut bindings::ib_cqe,
    ) -> PostError<P>
    where
        P: CqePointer<ID>,
    {
        // SAFETY: The owner that was given up is there unless all is posted, when nothing is marked
        // that has to be taken back.
        let (error, posted) = unsafe { refused.take_back(self.names_first()) };
        let owner = match posted {
            // SAFETY: The signaled request was not posted, so nothing else will take its owner
            // back.
            Some(_) => Some(unsafe { P::take_back(cqe) }),
            None => {
                post::unnamed();
                None
            }
        };
        PostError::in_part(owner, posted.unwrap_or(0) as u32, error)
    }

    /// Keeps the owner of requests that were posted until the QP was drained.
    #[cold]
    #[inline(never)]
    fn keep_posted<P: CqePointer<ID>, const ID: u64>(&self, mut e: PostError<P>) -> PostError<P> {
        if e.posted() > 0 {
            if let Some(owner) = e.owner.take() {
                self.inner.keep_until_drained::<P, P::Target>(owner);
            }
        }
        e
    }
}

impl<P: CqePointer<ID>, const ID: u64> Batch<'_, P, ID> {
    /// Returns the number of requests that were posted.
    #[inline]
    pub fn posted(&self) -> u32 {
        self.posted.try_into().unwrap_or(u32::MAX)
    }

    /// Gives the batch up, for this error.
    #[cold]
    #[inline(never)]
    pub fn into_error(mut self, error: Error) -> PostError<P> {
        let error = PostError::in_part(self.owner.take(), self.posted(), error);
        self.qp.keep_posted(error)
    }

    /// Posts requests that are not signaled, in one call. Any context. Fails as [`Qp::post_chain`];
    /// [`Batch::posted`] counts those that were posted all the same.
    #[inline]
    pub fn post<const LINKS: usize, const SGES: usize>(
        &mut self,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result {
        let (qp, owner) = (self.qp, self.owner.as_ref().ok_or(EIO)?);
        let mut slots = MaybeUninit::uninit();
        // SAFETY: The slots outlive the chain, and the owner does not move.
        let chain = unsafe { Chain::make(slots.as_mut_ptr(), &qp.target, &**owner, make) }?;
        let len = chain.len;
        self.reads |= chain.reads;
        // SAFETY: The owner is moved into a signaled request that is posted later, or kept until
        // the QP was drained.
        let (posted, result) = match unsafe { chain.post(None) } {
            Ok(()) => (len, Ok(())),
            Err(refused) => {
                // SAFETY: The owner, which is borrowed, keeps what the chain is made of.
                let (error, posted) = unsafe { refused.take_back(qp.names_first()) };
                // Without a word from the driver, take all for posted.
                (posted.unwrap_or(len), Err(error))
            }
        };
        self.posted = self.posted.wrapping_add(posted as u64);
        result
    }

    /// Posts the last requests, the very last signaled, and moves the owner in. Any context. Fails
    /// as [`Qp::post_chain`]. The batch can be finished again, or given up ([`Batch::into_error`]).
    #[inline]
    pub fn finish<const LINKS: usize, const SGES: usize>(
        &mut self,
        make: impl for<'a> FnOnce(&'a P::Target, &mut Chain<'a, LINKS, SGES>) -> Result,
    ) -> Result {
        let owner = self.owner.take().ok_or(EIO)?;
        self.qp.post_links(owner, self.reads, make).map_err(|e| {
            let error = e.error();
            self.posted = self.posted.wrapping_add(e.posted().into());
            // An RDMA READ may be among what was posted now.
            self.reads |= e.posted() > 0;
            self.owner = e.owner;
            error
        })
    }
}

impl<P: CqePointer<ID>, const ID: u64> Drop for Batch<'_, P, ID> {
    #[inline]
    fn drop(&mut self) {
        if let Some(owner) = self.owner.take() {
            if self.posted > 0 {
                self.qp.inner.keep_until_drained::<P, P::Target>(owner);
            }
        }
    }
}
