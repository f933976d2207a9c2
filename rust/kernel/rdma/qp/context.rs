// SPDX-License-Identifier: GPL-2.0

//! Contexts of QPs (`ib_qp.qp_context`).

use crate::{
    atomic::{
        AtomicPtr,
        AtomicUsize,
        Ordering, //
    },
    context::Atomic,
    identity,
    prelude::internal::*,
    qp::Qp,
    wc::Wc, //
};

/// The context of the QP whose completion is handled (`wc->qp->qp_context`), and the proof of the
/// context `C`.
///
/// A handler asks for it by [`CqeHandler::Needs`], and borrows the context. It can be posted where
/// the RDMA core polls: there the drain of a QP waits until its handlers have returned.
///
/// [`CqeHandler::Needs`]: crate::cqe::CqeHandler::Needs
///
/// # Invariants
///
/// The context, if there is one, is valid while `self` lives, which a counted reference keeps; its
/// address is from [`Arc::as_ptr`]. This is covariant in `T`, as it gives shared references only.
///
/// # Examples
///
/// ```
/// use rdma::{prelude::*, qp::QpContext};
///
/// struct Conn {
///     qp: Qp<Softirq>,
///     credits: Atomic<u32>,
/// }
/// # use kernel::sync::atomic::{ordering::Relaxed, Atomic};
///
/// #[derive(HasCqe)]
/// struct Recv {
///     cqe: Cqe<Self>,
///     buf: Buf<FromDevice>,
/// }
///
/// impl CqeHandler for Recv {
///     type Pointer = Pin<KBox<Self>>;
///     type Needs = QpContext<Conn>;
///
///     fn done(this: Self::Pointer, wc: &Wc, cx: &QpContext<Conn>) {
///         if let (Some(conn), Ok(_)) = (cx.get(), wc.result()) {
///             conn.credits.add(1, Relaxed);
///             let _ = conn.qp.post_recv(this, |r| Ok(RecvWr::new([r.buf.whole_mut()])));
///         }
///     }
/// }
///
/// fn connected(qp: Qp<Softirq>, cx: &Sleepable) -> Result<Arc<Conn>> {
///     let credits = Atomic::new(0);
///     let conn = Arc::new(Conn { qp, credits }, GFP_KERNEL)?;
///     conn.qp.set_context(conn.clone(), cx)?;
///     Ok(conn)
/// }
/// ```
pub struct QpContext<T, C: Context = Atomic> {
    context: Option<NonNull<T>>,
    token: C,
}

impl<T, C: Context> QpContext<T, C> {
    /// Returns the context of the QP; `None` if that has none, has lost it
    /// ([`Qp::clear_context`]), has one of another type, or completes to a
    /// [shared](crate::cq::Cq::pool_get) queue.
    #[inline]
    pub fn get(&self) -> Option<&T> {
        // SAFETY: By the type invariant the context is valid while `self` lives.
        self.context.map(|context| unsafe { context.as_ref() })
    }

    /// Returns the context, as [`QpContext::get`], as what `Arc::from()` makes a counted reference
    /// of: for a work item that is started here.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{prelude::*, qp::QpContext};
    /// struct Conn {
    ///     qp: Qp<Softirq>,
    /// }
    ///
    /// fn failed(client: &ClientRef, cx: &QpContext<Conn>) -> Result {
    ///     let conn = Arc::from(cx.get_arc().ok_or(ENOTCONN)?);
    ///     client.spawn(GFP_ATOMIC, move |cx| {
    ///         let _ = conn.qp.drain(cx);
    ///     })
    /// }
    /// ```
    #[inline]
    pub fn get_arc(&self) -> Option<ArcBorrow<'_, T>> {
        let context = self.context?;
        // SAFETY: The address is from `Arc::as_ptr()`, by the type invariant, and a counted
        // reference keeps the context while `self` lives. So there is no exclusive access
        // meanwhile.
        Some(unsafe { ArcBorrow::from_raw(context.as_ptr()) })
    }
}

impl<T, C: Context> core::ops::Deref for QpContext<T, C> {
    type Target = C;

    #[inline]
    fn deref(&self) -> &C {
        &self.token
    }
}

impl<T: 'static, C: Context> crate::context::private::Sealed for QpContext<T, C> {}

impl<T: 'static, C: Context> Context for QpContext<T, C> {
    #[inline]
    unsafe fn assume() -> Self {
        // INVARIANT: There is no context.
        Self {
            context: None,
            // SAFETY: The caller runs in a context that allows what `C` allows, as it promises.
            token: unsafe { C::assume() },
        }
    }

    #[inline]
    unsafe fn of_completion(cq: *mut bindings::ib_cq, wc: &Wc) -> Self {
        // SAFETY: The caller runs in a context that allows what `C` allows, as it promises.
        let token = unsafe { C::assume() };
        // Other modules may poll a shared CQ when they drain. So the drain of a QP on it does not
        // wait for all handlers, and the QP may be gone.
        //
        // SAFETY: `Provides` below lets a handler with this token be posted only to QPs that
        // complete to a CQ that the core polls. So `cq` is not null but valid, as the caller
        // promises; the field does not change.
        let context = if unsafe { bindings::ib_cq::shared_raw(cq) } != 0 {
            None
        } else {
            // SAFETY: `Provides` below lets a handler with this token be posted only to QPs that
            // complete to a CQ that the core polls, and this one is not shared. So the core calls
            // handlers one after the other, in the order of the completions, and a QP is destroyed
            // after the marker of its drain, behind all its completions, was handled. Drivers set
            // `qp` in each completion. What is lost is completed after the QP was destroyed, with
            // a stand-in whose `qp_context` is the QP's, which exists until that has ended.
            unsafe { super::qp_priv(wc.0.qp) }.user_context.get()
        };
        // INVARIANT: The QP has a reference to the context. It is dropped after the QP, or by
        // `UserContext::clear`, which waits for this handler.
        Self { context, token }
    }
}

// Not for `AnyContext`, whose completions callers may keep for longer than there is the QP.
impl<T, C, P> Provides<QpContext<T, C>> for P
where
    T: 'static,
    C: Context,
    P: CorePolled + FixedContext + Provides<C>,
{
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Gives the QP its context (`qp_context`), which handlers of its completions borrow by
    /// [`QpContext`], until it is destroyed or [`Qp::clear_context`]: a context that owns the QP
    /// keeps it until then. Fails with `EBUSY` if the QP has a context; `EOPNOTSUPP` if it
    /// completes to a [shared](crate::cq::Cq::pool_get) queue, whose handlers could not borrow it;
    /// `EPERM` if the QP is another module's; `ENOMEM`.
    pub fn set_context<T: Send + Sync + 'static>(
        &self,
        context: Arc<T>,
        _cx: &Sleepable,
    ) -> Result {
        let inner = &self.inner;
        inner.context.head.module.check_type::<T>()?;
        // SAFETY: `address_of::<T>` is the address that tells the type of `context`, a `T`.
        unsafe { inner.set_context(identity::address_of::<T>(), context) }
    }

    /// Takes the context from the QP, and drops the reference when no handler borrows it:
    /// for that the QP is drained. Does nothing if the QP has no context, or while another thread
    /// does this. Fails as [`Qp::drain`], but not with `EBUSY`: the reference is kept then,
    /// handlers no longer find it, and this may be called again.
    pub fn clear_context(&self, cx: &Sleepable) -> Result {
        self.inner.clear_context(cx)
    }

    /// Takes the context from the QP without a drain, and drops the reference when no handler
    /// borrows it: for a QP that cannot be drained, as its device has lost completions,
    /// and that its context keeps. Does nothing if the QP has no context, or while another thread
    /// does this.
    ///
    /// Requests stay posted, and their handlers find no context. They come back at the end of the
    /// QP, when a reset ends those that the device does not complete, a minute after the last
    /// handle is gone. So their owners must not keep the QP either.
    ///
    /// Fails with `EDEADLK` in a handler of the QP's CQs; and if a handler does not return, with
    /// `ETIMEDOUT` after a minute, or `EOVERFLOW` at once if a CQ has lost completions. The
    /// reference is kept then, handlers no longer find it, and this may be called again. Allocates
    /// nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::prelude::*;
    /// struct Conn {
    ///     qp: Qp<Workqueue>,
    /// }
    ///
    /// /// Ends a connection, which its QP keeps as its context.
    /// fn end(conn: &Conn, cx: &Sleepable) -> Result {
    ///     let cleared = conn.qp.drain(cx).and_then(|()| conn.qp.clear_context(cx));
    ///     cleared.or_else(|_| conn.qp.release_context(cx))
    /// }
    /// ```
    pub fn release_context(&self, cx: &Sleepable) -> Result {
        self.inner.release_context(cx)
    }
}

impl super::Inner {
    /// Sets the context.
    ///
    /// # Safety
    ///
    /// `of` is the [address](identity::address_of) of its type.
    unsafe fn set_context(&self, of: usize, context: Arc<dyn Send + Sync>) -> Result {
        if self.send.cq.is_shared() || self.recv.cq.is_shared() {
            return Err(EOPNOTSUPP);
        }
        self.reserve_flushes()?;
        // SAFETY: `of` is the address of its type, as the caller promises.
        unsafe { self.context.user_context.set(of, context) }
    }

    fn clear_context(&self, cx: &Sleepable) -> Result {
        self.context.user_context.clear(|| {
            // A full send queue has no more completions, and receives are flushed there too.
            self.drain(super::drain::Drain::Posted, cx)?;
            self.end_lost_receives(cx)
        })
    }

    fn release_context(&self, cx: &Sleepable) -> Result {
        let wait = || self.handlers_returned(cx);
        self.context.user_context.clear(wait)
    }
}

/// The reference that keeps a context.
struct Owner {
    context: Option<Arc<dyn Send + Sync>>,
    /// Set while a thread that removes the context drains the QP.
    clearing: bool,
}

/// The context of a QP, and its type.
///
/// # Invariants
///
/// If `of` is not 0, it is the address of a type, and `value` is a valid one of that type, from
/// [`Arc::as_ptr`], which stays valid after `of` was changed until the handlers that had begun have
/// returned.
#[pin_data]
pub(super) struct UserContext {
    of: AtomicUsize,
    value: AtomicPtr<c_void>,
    #[pin]
    owner: kernel::sync::Mutex<Owner>,
}

impl UserContext {
    pub(super) fn new() -> impl PinInit<Self> {
        // INVARIANT: There is no context.
        pin_init!(Self {
            of: AtomicUsize::new(0),
            value: AtomicPtr::new(ptr::null_mut()),
            owner <- kernel::new_mutex!(
                Owner {
                    context: None,
                    clearing: false,
                },
                "rdma::Qp::context"
            ),
        })
    }

    /// Returns the context, if it is a `T`.
    #[inline]
    fn get<T: 'static>(&self) -> Option<NonNull<T>> {
        if self.of.load(Ordering::Acquire) != identity::address_of::<T>() {
            return None;
        }
        let value = self.value.load(Ordering::Relaxed);
        // SAFETY: By the type invariant `value` is a valid `T`, so it is not null.
        unsafe { core::hint::assert_unchecked(!value.is_null()) };
        NonNull::new(value.cast())
    }

    /// Sets the context.
    ///
    /// # Safety
    ///
    /// `of` is the [address](identity::address_of) of its type.
    unsafe fn set(&self, of: usize, context: Arc<dyn Send + Sync>) -> Result {
        let mut owner = self.owner.lock();
        if owner.context.is_some() || owner.clearing {
            return Err(EBUSY);
        }
        self.value
            .store(Arc::as_ptr(&context).cast_mut().cast(), Ordering::Relaxed);
        owner.context = Some(context);
        // INVARIANT: The value is of that type, as the caller promises, and `owner` keeps it until
        // `clear` has waited for the handlers.
        self.of.store(of, Ordering::Release);
        Ok(())
    }

    /// Removes the context, and drops it if `wait`, which waits for the handlers, succeeds.
    fn clear(&self, wait: impl FnOnce() -> Result) -> Result {
        let context = {
            let mut owner = self.owner.lock();
            let Some(context) = owner.context.take() else {
                return Ok(());
            };
            owner.clearing = true;
            context
        };
        // A handler that has found the context began before the drain's marker was posted to its
        // queue, or before the poller was looked at, behind a barrier: what comes later is handled
        // after this was stored.
        self.of.store(0, Ordering::Relaxed);
        let waited = wait();
        let mut owner = self.owner.lock();
        owner.clearing = false;
        if let Err(e) = waited {
            owner.context = Some(context);
            return Err(e);
        }
        // The context's destructor may lock what is locked while a context is set.
        drop(owner);
        drop(context);
        Ok(())
    }
}
