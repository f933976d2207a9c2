// SPDX-License-Identifier: GPL-2.0

//! What a QP is made of.

use super::{
    inner::Parts,
    owner::Origin,
    Caps,
    Events,
    Qp, //
};
use crate::{
    bindings,
    cm,
    context::{
        CorePolled,
        PollContext,
        Provides,
        Sleepable, //
    },
    cq::Cq,
    pd::Pd,
    srq::{
        Receive,
        Srq, //
    },
    ud, //
};
use core::marker::PhantomData;
use kernel::{
    prelude::*,
    sync::Arc, //
};

/// Room for transfers by `rdma_rw` contexts.
#[derive(Clone, Copy, Default)]
pub(crate) struct Rw {
    pub(crate) contexts: u32,
    pub(crate) port: u32,
}

/// What a reliable connected QP is to be made of, as `struct ib_qp_init_attr`.
///
/// # Examples
///
/// ```
/// # use rdma::{context::*, cq::Cq, pd::Pd, qp::{Caps, Init, Qp}};
/// fn create(pd: &Pd, cq: &Cq<Softirq>, cx: &Sleepable) -> Result<Qp<Softirq>> {
///     Init::new(pd, cq, cq, &Caps::new(16, 16))
///         .rw_contexts(4, 1)
///         .create(cx)
/// }
/// ```
#[must_use]
pub struct Init<'a, S: PollContext, R: PollContext = S> {
    parts: Parts<'a>,
    _contexts: PhantomData<fn() -> (S, R)>,
}

impl<'a, S: PollContext, R: PollContext> Init<'a, S, R> {
    /// A QP of this PD and these sizes, whose queues complete to these CQs.
    pub fn new(pd: &'a Pd, send_cq: &'a Cq<S>, recv_cq: &'a Cq<R>, caps: &Caps) -> Self {
        Self {
            parts: Parts {
                pd,
                send_cq: send_cq.inner(),
                recv_cq: recv_cq.inner(),
                srq: None,
                qp_type: bindings::ib_qp_type_IB_QPT_RC,
                caps: *caps,
                rw: None,
                events: None,
            },
            _contexts: PhantomData,
        }
    }

    /// Adds room for `contexts` transfers at once by `rdma_rw` contexts on `port`
    /// (`cap.max_rdma_ctxs`): the core enlarges the send queue, as far as the device can, and gives
    /// the QP a pool of MRs where the device needs them. The port of a connection manager id is its
    /// own, whatever is said here.
    pub fn rw_contexts(mut self, contexts: u32, port: u32) -> Self {
        self.parts.rw = Some(Rw { contexts, port });
        self
    }

    /// Tells `events` of the QP's events (`event_handler`), until the QP is destroyed.
    pub fn events(mut self, events: Arc<dyn Events>) -> Self {
        self.parts.events = Some(events);
        self
    }

    /// Creates the QP (`ib_create_qp`), in the reset state.
    ///
    /// # Errors
    ///
    /// As [`Qp::create_raw`].
    pub fn create(self, cx: &Sleepable) -> Result<Qp<S, R>> {
        Qp::new(&self.parts, Origin::Raw, cx)
    }

    /// Creates a QP for datagrams, in the reset state.
    pub(crate) fn create_ud(mut self, extra: ud::Extra, cx: &Sleepable) -> Result<Qp<S, R>> {
        self.parts.qp_type = bindings::ib_qp_type_IB_QPT_UD;
        let qp = Qp::new(&self.parts, Origin::Raw, cx)?;
        // Nobody else has the QP yet.
        qp.inner.ud.populate(extra);
        Ok(qp)
    }

    /// Creates the QP of a connection (`rdma_create_qp`), ready for receives.
    ///
    /// # Errors
    ///
    /// As [`Qp::create`].
    pub fn create_for(self, id: &cm::Id, cx: &Sleepable) -> Result<Qp<S, R>> {
        Qp::new(&self.parts, Origin::Id(id.inner()), cx)
    }
}

impl<'a, C: CorePolled> Init<'a, C, C> {
    /// A QP that takes its receives from an SRQ. Of `caps`, what is said about receives does not
    /// matter.
    ///
    /// Both queues complete to one CQ: the drain of such a QP is a request at the end of the send
    /// queue, which has to come after the last receive. The SRQ leases room for its slots from the
    /// CQ once, for all its QPs there.
    pub fn on_srq<T: Receive<N>, const N: usize>(
        pd: &'a Pd,
        cq: &'a Cq<C>,
        srq: &'a Srq<T, N>,
        caps: &Caps,
    ) -> Self
    where
        C: Provides<T::Needs>,
    {
        let mut init = Self::new(pd, cq, cq, caps);
        init.parts.srq = Some(srq.inner());
        init
    }
}
