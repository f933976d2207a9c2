// SPDX-License-Identifier: GPL-2.0

//! Whom MADs are sent to.

use super::{
    Agent,
    Received, //
};
use crate::{
    ah,
    bindings,
    context::Sleepable,
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    device::{
        Device,
        Gid,
        GidAttr, //
    },
    gate::{
        Hold,
        Kind, //
    },
    way::{
        is_ipv4,
        Datagram, //
    }, //
};
use core::ptr::NonNull;
use kernel::{
    error::from_err_ptr,
    prelude::*,
    sync::Arc, //
};

/// # Invariants
///
/// `raw` is an address handle.
struct State {
    raw: NonNull<bindings::ib_ah>,
    _hold: Hold,
}

// SAFETY: An address handle may be destroyed from any thread.
unsafe impl Send for State {}
// SAFETY: An address handle does not change.
unsafe impl Sync for State {}

impl Teardown for State {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        // SAFETY: `raw` is an address handle by the type invariant. Whatever was sent to it had a
        // reference to its peer, and is gone.
        unsafe { ah::destroy(self.raw, cx) }
    }
}

/// # Invariants
///
/// `raw` is the address handle that `_state` has.
struct Inner {
    raw: NonNull<bindings::ib_ah>,
    _state: Deferred<State>,
    device: Device,
    port: u32,
    qpn: u32,
    pkey_index: u16,
    matches: bool,
}

// SAFETY: An address handle may be used from any thread, and the rest is `Send`.
unsafe impl Send for Inner {}
// SAFETY: An address handle does not change, and the rest is `Sync`.
unsafe impl Sync for Inner {}

/// Where MADs go: QP 1 of a port as seen from a port of this host, or whoever sent a MAD.
///
/// A counted handle. What is being sent to it keeps it.
#[derive(Clone)]
pub struct Peer {
    inner: Arc<Inner>,
}

impl Peer {
    /// Makes the address of QP 1 at the GID `to`, as seen from the GID `from`, which is one of the
    /// agent's port (`rdma_create_ah`). That asks the network for the way, which may take a second.
    ///
    /// # Errors
    ///
    /// `EINVAL` if `from` is not the agent's port's; `EPROTONOSUPPORT` if it is not of RoCE:
    /// elsewhere a GID is not enough of an address; `EHOSTUNREACH`, `ENETUNREACH` or `ETIMEDOUT`
    /// without a way; `ENODEV` or `ECANCELED` if the agent has ended; or the driver's error.
    pub fn new(agent: &Agent, from: &GidAttr, to: Gid, cx: &Sleepable) -> Result<Self> {
        if from.device().as_raw() != agent.device().as_raw() || from.port_num() != agent.port() {
            return Err(EINVAL);
        }
        let datagram = Datagram::new(from, to)?;
        create(agent, &datagram.wc, datagram.header(), !is_ipv4(from), cx)
    }

    /// Makes the address of whoever sent a MAD (`ib_create_ah_from_wc`).
    ///
    /// # Errors
    ///
    /// As [`Peer::new`].
    pub(super) fn sender(agent: &Agent, mad: &Received, cx: &Sleepable) -> Result<Self> {
        create(agent, mad.wc(), mad.grh(), false, cx)
    }

    pub(super) fn as_raw(&self) -> *mut bindings::ib_ah {
        self.inner.raw.as_ptr()
    }

    pub(super) fn qpn(&self) -> u32 {
        self.inner.qpn
    }

    pub(super) fn pkey_index(&self) -> u16 {
        self.inner.pkey_index
    }

    /// Says whether the MAD layer can match replies of this peer to requests. It compares GIDs, but
    /// finds an IPv4 header where the GIDs of the reply should be.
    pub(super) fn matches_replies(&self) -> bool {
        self.inner.matches
    }

    pub(super) fn is_seen_from(&self, device: &Device, port: u32) -> bool {
        self.inner.device.as_raw() == device.as_raw() && self.inner.port == port
    }
}

/// Creates an address handle. Not generic and never inlined: see `Reserved::fill`.
#[inline(never)]
fn create(
    agent: &Agent,
    wc: &bindings::ib_wc,
    header: *const bindings::ib_grh,
    matches: bool,
    _cx: &Sleepable,
) -> Result<Peer> {
    let (device, port) = (agent.device(), agent.port());
    let reserved = Deferred::reserve()?;
    let hold = device.hold(Kind::Ah);
    let live = agent.enter()?;
    // SAFETY: The agent is registered, so it has a QP with a PD, which stay until the device goes.
    // Completion and header belong together.
    let raw = from_err_ptr(unsafe {
        let pd = (*(*live.as_raw()).qp).pd;
        bindings::ib_create_ah_from_wc(pd, wc, header, port)
    })?;
    let raw = NonNull::new(raw).ok_or(ENOMEM)?;
    // INVARIANT: Just created.
    let state = reserved.fill(State { raw, _hold: hold });
    // INVARIANT: The same address handle.
    let inner = Inner {
        raw,
        _state: state,
        device: device.clone(),
        port,
        qpn: wc.src_qp,
        pkey_index: wc.pkey_index,
        matches,
    };
    Ok(Peer {
        inner: Arc::new(inner, GFP_KERNEL)?,
    })
}
