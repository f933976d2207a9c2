// SPDX-License-Identifier: GPL-2.0

//! Changing the state of a QP.

use crate::{
    bindings,
    context::{
        PollContext,
        Sleepable, //
    },
    device::Gid,
    drain::{
        Markers,
        PATIENCE_MS, //
    },
    objects::Peer,
    qp::{
        Attr,
        AttrMask,
        Inner,
        Qp,
        Service,
        State,
        Transition, //
    }, //
};
use core::net::IpAddr;
use kernel::{
    error::to_result,
    fmt,
    prelude::*,
    sync::MutexGuard, //
};

/// Why a QP was not modified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModifyError {
    /// There is no such transition.
    Illegal {
        /// The state that the QP is in.
        from: State,
        /// The state that it was to go to.
        to: State,
    },
    /// The transition needs more attributes.
    Missing {
        /// The state that the QP is in.
        from: State,
        /// The state that it was to go to.
        to: State,
        /// What is missing.
        attrs: AttrMask,
    },
    /// The transition does not take all these attributes.
    Superfluous {
        /// The state that the QP is in.
        from: State,
        /// The state that it was to go to.
        to: State,
        /// What is too much.
        attrs: AttrMask,
    },
    /// Values are too large for their fields or for the device.
    OutOfRange {
        /// Which ones.
        attrs: AttrMask,
    },
    /// The connection manager moves the QP of an id.
    Managed,
    /// The driver said so.
    Failed(Error),
}

impl From<ModifyError> for Error {
    fn from(e: ModifyError) -> Self {
        match e {
            ModifyError::Managed => EPERM,
            ModifyError::Failed(e) => e,
            _ => EINVAL,
        }
    }
}

impl fmt::Display for ModifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Illegal { from, to } => write!(f, "{from:?} to {to:?}: no such transition"),
            Self::Missing { from, to, attrs } => {
                f.write_fmt(fmt!("{from:?} to {to:?}: needs {attrs}"))
            }
            Self::Superfluous { from, to, attrs } => {
                f.write_fmt(fmt!("{from:?} to {to:?}: does not take {attrs}"))
            }
            Self::OutOfRange { attrs } => f.write_fmt(fmt!("out of range: {attrs}")),
            Self::Managed => f.write_str("the connection manager moves the QP of an id"),
            Self::Failed(e) => write!(f, "the driver: {e:?}"),
        }
    }
}

impl Transition {
    /// Checks a change (`ib_modify_qp_is_ok`).
    pub fn check(
        service: Service,
        from: State,
        to: State,
        attrs: AttrMask,
    ) -> Result<(), ModifyError> {
        let Self { required, optional } =
            Self::find(service, from, to).ok_or(ModifyError::Illegal { from, to })?;
        let missing = required.without(attrs);
        if missing != AttrMask::NONE {
            let attrs = missing;
            return Err(ModifyError::Missing { from, to, attrs });
        }
        let attrs = attrs.without(required.or(optional));
        if attrs != AttrMask::NONE {
            return Err(ModifyError::Superfluous { from, to, attrs });
        }
        Ok(())
    }
}

/// The right to change the state and the attributes of a QP, which one has at a time.
///
/// `ib_modify_qp` takes no lock, and drivers need not have one: rxe frees an array in it. So
/// nothing here changes a QP but by this.
///
/// # Invariants
///
/// The lock of `inner` is held.
pub(crate) struct Modifier<'a> {
    inner: &'a Inner,
    _guard: MutexGuard<'a, ()>,
}

/// Returns the address in attributes that connect a QP, if they have one.
fn ip(attr: &bindings::ib_qp_attr) -> Option<IpAddr> {
    let has_grh = u32::from(attr.ah_attr.ah_flags) & bindings::ib_ah_flags_IB_AH_GRH != 0;
    has_grh.then(|| Gid::from_raw(&attr.ah_attr.grh.dgid).ip())
}

impl Modifier<'_> {
    /// Changes what `mask` says (`ib_modify_qp`).
    ///
    /// # Safety
    ///
    /// The attributes are complete for this mask, and what they point to is valid.
    pub(crate) unsafe fn modify(
        &self,
        attr: &mut bindings::ib_qp_attr,
        mask: bindings::ib_qp_attr_mask,
    ) -> Result {
        let qp = self.inner.raw.as_ptr();
        // SAFETY: The QP is valid by the invariant of `Inner`. The attributes are complete for the
        // mask, and what they point to is valid, as the caller promises.
        to_result(unsafe { bindings::ib_modify_qp(qp, attr, mask as c_int) })?;
        if mask & bindings::ib_qp_attr_mask_IB_QP_DEST_QPN != 0 {
            let peer = Peer::ToQp(attr.dest_qp_num, ip(attr));
            self.inner.listed.set_peer(peer);
        }
        Ok(())
    }

    /// Goes to a state that takes no other attributes.
    fn go_to(&self, state: bindings::ib_qp_state) -> Result {
        let mut attr = bindings::ib_qp_attr {
            qp_state: state,
            ..Default::default()
        };
        // SAFETY: Of the state alone, the attributes are complete.
        unsafe { self.modify(&mut attr, bindings::ib_qp_attr_mask_IB_QP_STATE) }
    }

    /// Says whether the QP is in the reset state.
    fn is_reset(&self) -> bool {
        let asked = self.inner.query(bindings::ib_qp_attr_mask_IB_QP_STATE);
        asked.is_ok_and(|(attr, _)| attr.qp_state == bindings::ib_qp_state_IB_QPS_RESET)
    }

    /// Goes to the error state.
    ///
    /// There is no way there from the reset state, so such a QP is initialised first: some drivers
    /// take receives in that state too, against the rules.
    pub(crate) fn to_error(&self) -> Result {
        let moved = self.go_to(bindings::ib_qp_state_IB_QPS_ERR);
        if moved.is_ok() || !self.is_reset() {
            return moved;
        }
        let mut init = bindings::ib_qp_attr {
            qp_state: bindings::ib_qp_state_IB_QPS_INIT,
            port_num: 1,
            ..Default::default()
        };
        let own = match self.inner.qp_type() {
            bindings::ib_qp_type_IB_QPT_UD => bindings::ib_qp_attr_mask_IB_QP_QKEY,
            _ => bindings::ib_qp_attr_mask_IB_QP_ACCESS_FLAGS,
        };
        let mask = bindings::ib_qp_attr_mask_IB_QP_STATE
            | bindings::ib_qp_attr_mask_IB_QP_PKEY_INDEX
            | bindings::ib_qp_attr_mask_IB_QP_PORT;
        // SAFETY: The attributes are those that this transition needs, and point to nothing.
        unsafe { self.modify(&mut init, mask | own) }?;
        self.go_to(bindings::ib_qp_state_IB_QPS_ERR)
    }
}

impl Modifier<'_> {
    /// Has rxe flush a QP in the error state although an earlier change has failed.
    ///
    /// With the change to RTR rxe replaces the array of the responder. It stops the receive task
    /// for that, and does not start it again when there is no memory for a new array
    /// (`rxe_qp_from_attr`), whoever asked for the change. Receives are then never flushed. An
    /// array of no entries needs no memory, and rxe takes this attribute alone, in any state. In
    /// the error state the responder does not look at the array.
    pub(crate) fn restart_receiver(&self) {
        if self.inner.qp_type() != bindings::ib_qp_type_IB_QPT_RC
            || self.inner.ops().driver_id != bindings::rdma_driver_id_RDMA_DRIVER_RXE
        {
            return;
        }
        let mut none = bindings::ib_qp_attr::default();
        let mask = bindings::ib_qp_attr_mask_IB_QP_MAX_DEST_RD_ATOMIC;
        // The drain finds out whether the task runs.
        // SAFETY: The attributes are complete for this mask, and point to nothing.
        let restarted = unsafe { self.modify(&mut none, mask) };
        // What was to be done while it was stopped is done when it is told again.
        let _ = restarted.and_then(|()| self.go_to(bindings::ib_qp_state_IB_QPS_ERR));
    }

    /// Goes to the reset state, where the device forgets all requests, and then to the error state,
    /// where new ones are flushed.
    pub(crate) fn restart(&self) -> Result {
        self.go_to(bindings::ib_qp_state_IB_QPS_RESET)?;
        self.to_error()
    }
}

impl Inner {
    /// Waits until nobody else modifies the QP.
    pub(crate) fn modifier(&self) -> Modifier<'_> {
        // INVARIANT: The lock was just taken.
        Modifier {
            inner: self,
            _guard: self.context.modifying.lock(),
        }
    }

    /// Modifies the QP, after everything about it was checked.
    pub(crate) fn modify(&self, attr: Attr, _cx: &Sleepable) -> Result<(), ModifyError> {
        if self.is_managed() && attr.to != State::Err {
            return Err(ModifyError::Managed);
        }
        let dev = self.pd.device();
        let mut attrs = attr.out_of_range(dev);
        let mut raw = attr.raw;
        match attr.path.map(|path| path.to_raw(dev)) {
            Some(Ok(path)) => raw.ah_attr = path,
            Some(Err(_)) => attrs = attrs.or(AttrMask::PATH),
            None => (),
        }
        if attrs != AttrMask::NONE {
            return Err(ModifyError::OutOfRange { attrs });
        }

        let modifier = self.modifier();
        let (from, service) = self.state().map_err(ModifyError::Failed)?;
        Transition::check(service, from, attr.to, attr.mask)?;
        let mask = attr.mask.as_raw() | bindings::ib_qp_attr_mask_IB_QP_STATE;
        // SAFETY: The attributes are complete for this mask, as just checked, and in range.
        unsafe { modifier.modify(&mut raw, mask) }.map_err(ModifyError::Failed)
    }

    fn state(&self) -> Result<(State, Service)> {
        let (attr, _) = self.query(bindings::ib_qp_attr_mask_IB_QP_STATE)?;
        let service = Service::from_raw(self.qp_type());
        State::from_raw(attr.qp_state).zip(service).ok_or(EIO)
    }

    /// Drains the QP and moves it to the reset state. What is posted meanwhile is lost with its
    /// owner: the caller excludes that.
    fn reset(&self, cx: &Sleepable) -> Result {
        // The core tells only once that a QP takes nothing more from its SRQ.
        if self.is_managed() || self.is_on_srq() {
            return Err(EPERM);
        }
        self.drain(Markers::new()?, PATIENCE_MS, cx)?;
        self.modifier().go_to(bindings::ib_qp_state_IB_QPS_RESET)
    }
}

impl<S: PollContext, R: PollContext> Qp<S, R> {
    /// Moves the QP to another state and changes attributes (`ib_modify_qp`).
    ///
    /// # Errors
    ///
    /// [`ModifyError`] says what is missing or wrong before the driver has seen any of it, or what
    /// the driver said. The QP of a connection manager's id goes to the error state only.
    ///
    /// # Examples
    ///
    /// ```
    /// # use rdma::{ah, context::*, qp::*};
    /// fn connect(qp: &Qp<Softirq>, path: &ah::Attr, peer: u32, cx: &Sleepable) -> Result {
    ///     let init = Attr::init().port(1).pkey_index(0).access(Access::NONE);
    ///     let rtr = Attr::rtr()
    ///         .path(path)
    ///         .path_mtu(Mtu::B1024)
    ///         .dest_qp(peer)
    ///         .rq_psn(0)
    ///         .max_dest_rd_atomic(1)
    ///         .min_rnr_timer(12);
    ///     let rts = Attr::rts()
    ///         .timeout(14)
    ///         .retry_count(6)
    ///         .rnr_retry(7)
    ///         .sq_psn(0)
    ///         .max_rd_atomic(1);
    ///     for attr in [init, rtr, rts] {
    ///         qp.modify(attr, cx)?;
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub fn modify(&self, attr: Attr, cx: &Sleepable) -> Result<(), ModifyError> {
        self.inner.modify(attr, cx)
    }

    /// Drains the QP and moves it to the reset state, from where it can be used again.
    ///
    /// The reset state forgets requests without completing them. The exclusive borrow means that
    /// nobody posts between the drain and that.
    ///
    /// # Errors
    ///
    /// As [`Qp::drain`]; `EPERM` if the QP is a connection manager's or on an SRQ; or the driver's
    /// error.
    pub fn reset(&mut self, cx: &Sleepable) -> Result {
        self.inner.reset(cx)
    }
}
