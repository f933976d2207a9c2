// SPDX-License-Identifier: GPL-2.0

//! The attributes of a new QP (`struct ib_qp_init_attr`), and its creation.

use super::{
    attr,
    drain,
    events,
    refuse_recv,
    Caps,
    Events,
    Inner,
    Qp,
    QpPriv,
    Rest,
    Shared,
    State, //
};
use crate::{
    ah::Ah,
    cm,
    cq::{
        self,
        Cq, //
    },
    deferred,
    device::Device,
    identity,
    objects,
    pd::Pd,
    prelude::internal::*,
    refs,
    srq,
    trace,
    wr, //
};
use kernel::sync;

/// The attributes of a new reliable connected QP, as `struct ib_qp_init_attr`.
#[must_use]
pub struct InitAttr<'a, S: PollContext, R: PollContext = S> {
    init: RawInit<'a>,
    _contexts: PhantomData<fn() -> (S, R)>,
}

impl<'a, S: PollContext, R: PollContext> InitAttr<'a, S, R> {
    /// A QP of this PD and these sizes, whose queues complete to these CQs.
    pub fn new(pd: &'a Pd, send_cq: &'a Cq<S>, recv_cq: &'a Cq<R>, caps: &Caps) -> Self {
        Self {
            init: RawInit {
                pd,
                send_cq: &send_cq.inner,
                recv_cq: &recv_cq.inner,
                srq: None,
                qp_type: bindings::ib_qp_type_IB_QPT_RC,
                caps: *caps,
                rw_contexts: 0,
                port: 0,
                events: None,
            },
            _contexts: PhantomData,
        }
    }

    /// Adds room for `contexts` transfers at once by `rdma_rw` contexts on `port`
    /// (`cap.max_rdma_ctxs`), by a longer send queue and a pool of MRs where the device needs them.
    /// `port` must be one of the device's. A QP of a connection manager's id has the port of that
    /// instead.
    pub fn rw_contexts(mut self, contexts: u32, port: u32) -> Self {
        self.init.rw_contexts = contexts;
        self.init.port = port;
        self
    }

    /// Reports the QP's events to `events` (`event_handler`), until the QP is destroyed. The
    /// creation fails with `EPERM` if the PD is another module's.
    pub fn events<T: Events>(mut self, events: Arc<T>) -> Self {
        self.init.events = Some((events, identity::address_of::<T>()));
        self
    }

    /// As [`Qp::create_raw`].
    pub fn create(self, cx: &Sleepable) -> Result<Qp<S, R>> {
        Qp::new(self.init, None, cx)
    }

    /// Creates a QP for datagrams, in the reset state. The marker of its drain goes to `marker_ah`.
    pub(crate) fn create_ud(mut self, marker_ah: Ah, cx: &Sleepable) -> Result<Qp<S, R>> {
        self.init.qp_type = bindings::ib_qp_type_IB_QPT_UD;
        let qp = Qp::new(self.init, None, cx)?;
        // The QP was just created, so this is the first value.
        qp.inner.marker_ah.populate(marker_ah);
        Ok(qp)
    }

    /// As [`Qp::create`].
    pub fn create_for(self, id: &cm::Id, cx: &Sleepable) -> Result<Qp<S, R>> {
        Qp::new(self.init, Some(&id.state), cx)
    }
}

impl<'a, C: CorePolled> InitAttr<'a, C, C> {
    /// A QP that takes its receives from an SRQ, whatever `caps` has for receives. Both queues
    /// complete to one CQ, so that the marker of a drain completes after the last receive.
    pub fn on_srq<T: srq::Receive<N>, const N: usize>(
        pd: &'a Pd,
        cq: &'a Cq<C>,
        srq: &'a srq::Srq<T, N>,
        caps: &Caps,
    ) -> Self
    where
        C: Provides<T::Needs>,
    {
        let mut attr = Self::new(pd, cq, cq, caps);
        attr.init.srq = Some(&srq.inner);
        attr
    }
}

/// The part of an [`InitAttr`] that does not depend on the contexts.
pub(super) struct RawInit<'a> {
    pd: &'a Pd,
    send_cq: &'a cq::Shared,
    recv_cq: &'a cq::Shared,
    /// If there is one, the CQs are the same.
    srq: Option<&'a srq::Shared>,
    qp_type: bindings::ib_qp_type,
    caps: Caps,
    rw_contexts: u32,
    port: u32,
    /// With the address of code of their module.
    events: Option<(Arc<dyn Events>, usize)>,
}

impl RawInit<'_> {
    /// Fails with `EINVAL` if the QP would not be all of one device, or with `EPERM` if its events
    /// go to another module than the PD's.
    fn check(&self, id: Option<&cm::Shared>) -> Result {
        let dev = self.pd.device();
        if self.send_cq.dev != *dev
            || self.recv_cq.dev != *dev
            || self.srq.is_some_and(|srq| srq.pd != *self.pd)
            || id.is_some_and(|id| id.device.as_ref().map(Device::as_raw) != Some(dev.as_raw()))
        {
            return Err(EINVAL);
        }
        if let Some((_, code)) = self.events {
            dev.client().module.check(code)?;
        }
        Ok(())
    }

    fn to_raw(&self) -> Result<bindings::ib_qp_init_attr> {
        let dev = self.pd.device();
        // The marker of a drain needs a place of its own.
        let with_marker = |wr: u32| {
            wr.checked_add(1)
                .filter(|n| *n <= dev.attrs().max_qp_wr)
                .ok_or(EINVAL)
        };
        let contexts = self.rw_contexts;
        // The core adds up to three requests for each context, unchecked, and looks the port up.
        let needs_port = contexts != 0 || self.port != 0;
        let has_port = !needs_port || dev.port(self.port).is_some();
        if contexts > dev.attrs().max_qp_wr || !has_port {
            return Err(EINVAL);
        }
        let (srq, max_recv_wr, max_recv_sge) = match self.srq {
            Some(srq) => (srq.as_raw(), 0, 0),
            None => {
                let recv_wr = with_marker(self.caps.recv_wr)?;
                (ptr::null_mut(), recv_wr, self.caps.recv_sge)
            }
        };
        Ok(bindings::ib_qp_init_attr {
            send_cq: self.send_cq.raw.as_ptr(),
            recv_cq: self.recv_cq.raw.as_ptr(),
            srq,
            cap: bindings::ib_qp_cap {
                max_send_wr: with_marker(self.caps.send_wr)?,
                max_recv_wr,
                max_send_sge: self.caps.send_sge,
                max_recv_sge,
                max_rdma_ctxs: contexts,
                ..Default::default()
            },
            sq_sig_type: bindings::ib_sig_type_IB_SIGNAL_REQ_WR,
            qp_type: self.qp_type,
            port_num: self.port,
            ..Default::default()
        })
    }
}

impl Rest {
    /// Creates the QP. Once there is one, nothing fails, as it has to be destroyed: if a CQ or the
    /// SRQ has not what the QP needs, the error is in `refused`.
    fn new(
        init: RawInit<'_>,
        id: Option<&cm::Shared>,
        refused: &mut Result,
    ) -> Result<Pin<KBox<Self>>> {
        let pd = init.pd;
        let send_cq = init.send_cq;
        let recv_cq = init.recv_cq;
        let dev = pd.device();
        let mut attr = init.to_raw()?;
        let state = id.is_none().then_some(State::Reset);
        let draining = drain::Draining::new(send_cq.is_shared() || recv_cq.is_shared())?;
        let mut object = dev.object(refs::ObjectKind::Qp);
        let rest = try_pin_init!(Self {
            context <- QpPriv::new(
                init.events.map(|(events, _)| events),
                dev,
                init.rw_contexts > 0,
                draining,
                state,
            ),
            raw: {
                attr.qp_context = ptr::from_ref(&*context).cast_mut().cast();
                attr.event_handler = context.events.is_some().then_some(events::on_event);
                // SAFETY: The CQs, the SRQ and the id are of this device, as `RawInit::check` has
                // checked, and this keeps them and the context.
                let raw = unsafe { create_raw(id, pd, &mut attr) }?;
                // SAFETY: The QP was just created.
                unsafe { raise_sizes(raw, &mut attr.cap) };
                raw
            },
            // SAFETY: The QP was just created; its number does not change.
            num: unsafe { (*raw.as_ptr()).qp_num },
            id: id.cloned(),
            send: cq::reserve_or_none(send_cq, attr.cap.max_send_wr, refused),
            recv: {
                let is_on_srq = init.srq.is_some();
                let entries = if is_on_srq { 0 } else { attr.cap.max_recv_wr };
                cq::reserve_or_none(recv_cq, entries, refused)
            },
            srq: {
                let taken = init.srq.map(|srq| srq::SrqReservation::new(srq, recv_cq));
                taken.transpose().unwrap_or_else(|error| {
                    *refused = Err(error);
                    None
                })
            },
            marker_ah: sync::SetOnce::new(),
            pd: pd.clone(),
            object: {
                object.set_qp(*num, raw.as_ptr());
                if let Some(id) = id {
                    object.set_peer(id.object.peer());
                }
                object.summary = objects::Summary::Qp {
                    sends: (attr.cap.max_send_wr, send_cq.num()),
                    receives: match init.srq {
                        Some(_) => None,
                        None => Some((attr.cap.max_recv_wr, recv_cq.num())),
                    },
                };
                object
            },
        }? Error);
        KBox::pin_init(rest, GFP_KERNEL)
    }
}

/// Sets how many sends and receives the driver lets be outstanding, given the sizes that it has
/// returned at creation. Some drivers round up and report that only in a query; those without
/// queries are assumed to round up to a power of two.
///
/// # Safety
///
/// `qp` is valid.
unsafe fn raise_sizes(qp: NonNull<bindings::ib_qp>, returned: &mut bindings::ib_qp_cap) {
    // SAFETY: The caller promises that `qp` is valid.
    let asked = unsafe { attr::query(qp, bindings::ib_qp_attr_mask_IB_QP_CAP) };
    let most = |wr: fn(&bindings::ib_qp_cap) -> u32| match &asked {
        Ok((attr, cap)) => wr(returned).max(wr(&attr.cap)).max(wr(cap)),
        Err(_) => wr(returned).checked_next_power_of_two().unwrap_or(u32::MAX),
    };
    let max_send_wr = most(|cap| cap.max_send_wr);
    let max_recv_wr = most(|cap| cap.max_recv_wr);
    returned.max_send_wr = max_send_wr;
    returned.max_recv_wr = max_recv_wr;
}

/// Creates a QP. Fails as [`Qp::create`].
pub(super) fn create(init: RawInit<'_>, id: Option<&cm::Shared>, cx: &Sleepable) -> Result<Shared> {
    init.check(id)?;
    let is_on_srq = init.srq.is_some();
    let reserved = deferred::Deferred::reserve()?;
    let mut refused = Ok(());
    const { assert!(align_of::<Inner>() <= deferred::VALUE_AT) };
    const { assert!(Inner::READ_BY_POSTS <= 64) };
    let rest = Rest::new(init, id, &mut refused)?;
    let raw = rest.raw;
    // INVARIANT: The QP was just created with these, and `rest` keeps them.
    let inner = reserved.fill(Inner {
        send_array: rest.send.cq.poller(),
        recv_array: rest.recv.cq.poller(),
        post_recv: if is_on_srq {
            refuse_recv
        } else {
            // SAFETY: The QP was just created, and is destroyed by the end of `Inner`.
            unsafe { trace::PostVerb::op(raw.as_ptr()) }
        },
        // SAFETY: The QP was created for this PD and this CQ. `rest` keeps them and the lock until
        // the end of `Inner` has destroyed the QP, when there is no handle of it.
        target: unsafe {
            wr::PostTarget::new(
                raw,
                rest.context.head.id,
                &rest.pd,
                &rest.recv.cq,
                &rest.context.reg_lock,
            )
        },
        rest,
    });
    if let Err(error) = refused {
        // SAFETY: Nothing was posted to the QP, and there is no handle of it.
        let destroyed = unsafe { destroy_raw(id, inner.raw()) };
        inner.context.destroyed.populate(destroyed);
        // This reports it if the QP was not destroyed.
        let _ = inner.destroy(cx);
        return Err(error);
    }
    Ok(inner)
}

/// Creates a QP, for an id if there is one.
///
/// # Safety
///
/// The id, and the CQs and the SRQ of `attr`, are alive and of the device of `pd`, and live, as the
/// context of `attr` does, until the QP is destroyed.
unsafe fn create_raw(
    id: Option<&cm::Shared>,
    pd: &Pd,
    attr: &mut bindings::ib_qp_init_attr,
) -> Result<NonNull<bindings::ib_qp>> {
    if let Some(id) = id {
        // SAFETY: PD and CQs are alive, of the id's device, and id and context live as long as the
        // QP, as the caller promises.
        return unsafe { id.create_qp(pd, attr) };
    }
    let caller = pd.device().client().name.as_char_ptr();
    // SAFETY: PD and CQs are alive, and the client's name outlives the QP.
    let raw = unsafe { bindings::ib_create_qp_kernel(pd.as_raw(), attr, caller) };
    NonNull::new(from_err_ptr(raw)?).ok_or(EIO)
}

/// # Safety
///
/// `qp` is from [`create_raw`] with this id, has no request outstanding and is no longer
/// used, unless this fails.
pub(super) unsafe fn destroy_raw(id: Option<&cm::Shared>, qp: NonNull<bindings::ib_qp>) -> Result {
    match id {
        Some(id) => {
            // SAFETY: `qp` is the id's, has no request outstanding and is no longer used, as the
            // caller promises.
            unsafe { id.destroy_qp() };
            Ok(())
        }
        None => {
            let qp = qp.as_ptr();
            // SAFETY: `qp` was created by the verb, has no request outstanding and is no longer
            // used, as the caller promises.
            to_result(unsafe { bindings::ib_destroy_qp_user(qp, ptr::null_mut()) })
        }
    }
}
