// SPDX-License-Identifier: GPL-2.0

//! What all kinds of QPs are made of: the C object, its leases, and its end.

use super::{
    events::{
        Events,
        QpContext, //
    },
    owner::{
        Origin,
        Owner, //
    },
    Caps,
    Rw, //
};
use crate::{
    bindings,
    context::Sleepable,
    cq::{
        self,
        Lease, //
    },
    deferred::{
        Deferred,
        Fate,
        Teardown, //
    },
    drain::{
        drain,
        Markers,
        PATIENCE_MS, //
    },
    gate::Kind,
    objects::Listed,
    pd::Pd,
    srq,
    ud, //
};
use core::ptr::NonNull;
use kernel::{
    prelude::*,
    sync::{
        Arc,
        SetOnce, //
    }, //
};

/// What a QP is created from, as `struct ib_qp_init_attr`.
pub(crate) struct Parts<'a> {
    pub(crate) pd: &'a Pd,
    pub(crate) send_cq: &'a Arc<cq::Inner>,
    pub(crate) recv_cq: &'a Arc<cq::Inner>,
    /// If there is one, the CQs are the same, and not a direct one.
    pub(crate) srq: Option<&'a Arc<srq::Inner>>,
    pub(crate) qp_type: bindings::ib_qp_type,
    pub(crate) caps: Caps,
    pub(crate) rw: Option<Rw>,
    pub(crate) events: Option<Arc<dyn Events>>,
}

impl Parts<'_> {
    fn to_raw(&self) -> Result<bindings::ib_qp_init_attr> {
        let dev = self.pd.device();
        // The marker of a drain needs a place of its own.
        let with_marker = |wr: u32| {
            wr.checked_add(1)
                .filter(|n| *n <= dev.max_qp_wr())
                .ok_or(EINVAL)
        };
        let rw = self.rw.unwrap_or_default();
        // The core adds up to three requests for each context, unchecked.
        if rw.contexts > dev.max_qp_wr() || (rw.contexts != 0 && dev.port(rw.port).is_none()) {
            return Err(EINVAL);
        }
        let (srq, max_recv_wr, max_recv_sge) = match self.srq {
            Some(srq) => (srq.as_raw(), 0, 0),
            None => {
                let recv_wr = with_marker(self.caps.recv_wr)?;
                (core::ptr::null_mut(), recv_wr, self.caps.recv_sge)
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
                max_rdma_ctxs: rw.contexts,
                ..Default::default()
            },
            sq_sig_type: bindings::ib_sig_type_IB_SIGNAL_REQ_WR,
            qp_type: self.qp_type,
            port_num: rw.port,
            ..Default::default()
        })
    }
}

/// Where the receives of a QP come from, with the room that they need in its CQ.
enum Recv {
    Own(Lease),
    Shared(srq::Share),
}

impl Recv {
    fn cq(&self) -> &Arc<cq::Inner> {
        match self {
            Self::Own(lease) => lease.cq(),
            Self::Shared(share) => share.cq(),
        }
    }
}

/// A QP, and what it needs at its end.
///
/// # Invariants
///
/// `raw` was created by `owner`, completes to the CQs of the leases and belongs to `pd`. Its
/// context is `context`, if it has one. If its receives are shared these CQs are the same, and not
/// a direct one.
pub(crate) struct Inner {
    pub(crate) raw: NonNull<bindings::ib_qp>,
    owner: Owner,
    send: Lease,
    recv: Recv,
    markers: Option<Arc<Markers>>,
    /// Of a QP for datagrams.
    pub(crate) ud: SetOnce<ud::Extra>,
    pub(super) context: Pin<KBox<QpContext>>,
    pub(crate) pd: Pd,
    // Dropped last: the ULP may be gone after that.
    pub(super) listed: Listed,
}

// SAFETY: A QP may be drained and destroyed from any thread.
unsafe impl Send for Inner {}
// SAFETY: A QP may be used from any thread; what needs a lock takes that of the context.
unsafe impl Sync for Inner {}

impl Inner {
    /// Moves the QP to the error state and waits until every request that was posted before has
    /// completed.
    pub(crate) fn drain(&self, markers: Arc<Markers>, patience_ms: u32, cx: &Sleepable) -> Result {
        let parked = self.context.parked.take();
        let kept = self.listed.take_kept();
        // SAFETY: By the type invariant the QP completes to these CQs, which are one, and not a
        // direct one, if it is on an SRQ. A QP for datagrams has its address handle before anybody
        // can post to it.
        unsafe {
            drain(
                self,
                self.send.cq(),
                self.recv.cq(),
                self.ud.as_ref().map(|ud| &ud.nowhere),
                markers,
                patience_ms,
                cx,
            )
        }
        .inspect_err(|_| self.listed.put_kept(kept))?;
        // SAFETY: What these owners are for was posted before they were parked.
        unsafe { parked.release() };
        Ok(())
    }

    /// Returns the type.
    pub(crate) fn qp_type(&self) -> bindings::ib_qp_type {
        // SAFETY: By the type invariant `raw` is a QP; its type does not change.
        unsafe { (*self.raw.as_ptr()).qp_type }
    }

    /// Says whether receives are taken from an SRQ.
    pub(crate) fn is_on_srq(&self) -> bool {
        // SAFETY: By the type invariant `raw` is a QP; its SRQ does not change.
        unsafe { !(*self.raw.as_ptr()).srq.is_null() }
    }

    /// Returns the operations of the device.
    pub(crate) fn ops(&self) -> &bindings::ib_device_ops {
        // SAFETY: By the type invariant `raw` is a QP of `pd`, so its device is there while `self`
        // is; its operations do not change.
        unsafe { &(*(*self.raw.as_ptr()).device).ops }
    }

    /// Keeps an owner, of which requests were posted whose completion does not give it back, until
    /// the QP was drained. It is called a `T` where the QP is shown.
    #[cold]
    #[inline(never)]
    pub(crate) fn park<P: Send + 'static, T: ?Sized>(&self, owner: P) {
        self.context.parked.park(owner);
        self.listed.keeps(core::any::type_name::<T>());
    }

    /// Says whether the connection manager moves the QP through its states.
    pub(super) fn is_managed(&self) -> bool {
        matches!(self.owner, Owner::Id(_))
    }

    /// Destroys a QP and waits for that. Not generic and not inlined, so that the code is here and
    /// not in each ULP.
    #[inline(never)]
    pub(super) fn destroy(this: Deferred<Self>, cx: &Sleepable) -> Result {
        if this.send.cq().is_polled_by_current() || this.recv.cq().is_polled_by_current() {
            return Err(EDEADLK);
        }
        match this.destroy(cx) {
            Fate::Gone => Ok(()),
            Fate::Leak => Err(EIO),
        }
    }
}

impl Teardown for Inner {
    fn teardown(&mut self, cx: &Sleepable) -> Fate {
        let markers = self.markers.take().ok_or(EIO);
        let left = match self.ud.as_ref() {
            // SAFETY: By the type invariant `raw` is a QP, and these are its groups.
            Some(ud) => unsafe { ud.groups.detach_all(self.raw.as_ptr(), cx) },
            None => Ok(()),
        };
        let destroyed = left
            .and(markers)
            .and_then(|markers| self.drain(markers, PATIENCE_MS, cx))
            .and_then(|()| self.context.transfers.wait(cx))
            .map_err(|e| (e, "drained"))
            .and_then(|()| {
                // SAFETY: The QP is drained, and nobody can post to it any more.
                unsafe { self.owner.destroy(self.raw) }.map_err(|e| (e, "destroyed"))
            });
        match destroyed {
            Ok(()) => Fate::Gone,
            Err((e, what)) => {
                // SAFETY: By the type invariant `raw` is a QP, which was not destroyed; its number
                // does not change.
                let num = unsafe { self.raw.as_ref() }.qp_num;
                let dev = self.pd.device();
                pr_err!(
                    "{dev}: QP {num} was not {what} ({e:?}): it is leaked and holds its device\n"
                );
                Fate::Leak
            }
        }
    }
}

/// Returns how many requests the driver really lets be outstanding, given the sizes that it
/// returned.
///
/// Some round up and do not say so at creation, so they are asked again. Those that cannot tell are
/// taken to round up to a power of two.
///
/// # Safety
///
/// `qp` is valid.
unsafe fn given(qp: *mut bindings::ib_qp, returned: &bindings::ib_qp_cap) -> bindings::ib_qp_cap {
    let mut attr = bindings::ib_qp_attr::default();
    let mut init = bindings::ib_qp_init_attr::default();
    let mask = bindings::ib_qp_attr_mask_IB_QP_CAP as c_int;
    // SAFETY: The caller promises that `qp` is valid.
    let asked = unsafe { bindings::ib_query_qp(qp, &raw mut attr, mask, &raw mut init) } == 0;
    let more = |returned: u32, attr: u32, init: u32| {
        if asked {
            returned.max(attr).max(init)
        } else {
            returned.checked_next_power_of_two().unwrap_or(u32::MAX)
        }
    };
    bindings::ib_qp_cap {
        max_send_wr: more(
            returned.max_send_wr,
            attr.cap.max_send_wr,
            init.cap.max_send_wr,
        ),
        max_recv_wr: more(
            returned.max_recv_wr,
            attr.cap.max_recv_wr,
            init.cap.max_recv_wr,
        ),
        ..Default::default()
    }
}

/// Creates a QP. Not generic, so that what the QP needs at its end is code of this module.
///
/// # Errors
///
/// See [`Qp::create`](super::Qp::create).
#[inline(never)]
pub(crate) fn create(
    parts: &Parts<'_>,
    origin: Origin<'_>,
    _cx: &Sleepable,
) -> Result<Deferred<Inner>> {
    let (pd, send_cq, recv_cq) = (parts.pd, parts.send_cq, parts.recv_cq);
    let dev = pd.device();
    if send_cq.dev != *dev || recv_cq.dev != *dev || parts.srq.is_some_and(|srq| srq.pd() != pd) {
        return Err(EINVAL);
    }
    let mut attr = parts.to_raw()?;
    let reserved = Deferred::reserve()?;
    let markers = Markers::new()?;
    let context = QpContext::new(parts.events.clone(), dev.is_iwarp())?;
    context.install(&mut attr);
    let hold = dev.list(Kind::Qp)?;
    let owner = Owner::of(&origin, pd)?;
    // SAFETY: The CQs are of this device, as just checked, and nothing below drops the context of a
    // QP that is there.
    let raw = unsafe { owner.create(pd, &mut attr) }?;

    // SAFETY: The QP was just created; its number does not change.
    hold.set_qp(unsafe { raw.as_ref() });
    if let Owner::Id(claim) = &owner {
        hold.set_peer(claim.peer());
    }
    // SAFETY: The QP was just created.
    let given = unsafe { given(raw.as_ptr(), &attr.cap) };
    let leases = cq::lease(send_cq, given.max_send_wr).and_then(|send| {
        let recv = match parts.srq {
            Some(srq) => Recv::Shared(srq::Share::new(srq, recv_cq)?),
            None => Recv::Own(cq::lease(recv_cq, given.max_recv_wr)?),
        };
        Ok((send, recv))
    });
    let e = match leases {
        Ok((send, recv)) => {
            // INVARIANT: As created.
            return Ok(reserved.fill(Inner {
                raw,
                owner,
                send,
                recv,
                markers: Some(markers),
                ud: SetOnce::new(),
                context,
                pd: pd.clone(),
                listed: hold,
            }));
        }
        Err(e) => e,
    };
    // SAFETY: Nothing was posted to the QP.
    if let Err(e) = unsafe { owner.destroy(raw) } {
        pr_err!("{dev}: a new QP was not destroyed ({e:?}): it is leaked and holds its device\n");
        let cqs = (send_cq.clone(), recv_cq.clone());
        core::mem::forget((hold, owner, context, pd.clone(), cqs, parts.srq.cloned()));
    }
    Err(e)
}
