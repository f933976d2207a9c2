// SPDX-License-Identifier: GPL-2.0

//! The parts of a QP for datagrams that other QPs lack.

use crate::{
    ah,
    bindings,
    context::Sleepable,
    device::Gid,
    pd::Pd, //
};
use core::mem::ManuallyDrop;
use kernel::{
    error::to_result,
    new_mutex,
    prelude::*,
    sync::Mutex, //
};

#[pin_data]
pub(crate) struct UdState {
    /// The destination of the drain's marker, which is flushed and never sent.
    pub(crate) marker_ah: ah::Ah,
    /// The GIDs and LIDs of the multicast groups that the QP is attached to.
    ///
    /// The list refuses a second attachment to a group: some drivers take it for the first, but the
    /// core counts both, and then the QP cannot be destroyed.
    #[pin]
    groups: Mutex<KVec<(Gid, u16)>>,
}

impl UdState {
    #[inline(never)]
    pub(crate) fn new(pd: &Pd, port: u32, cx: &Sleepable) -> Result<Pin<KBox<Self>>> {
        let gid = {
            let port = pd.device().port(port).ok_or(EINVAL)?;
            port.gids().next().ok_or(EADDRNOTAVAIL)?
        };
        let grh = ah::Grh::new(gid.gid(), gid.index().try_into()?);
        let init = pin_init!(Self {
            marker_ah: ah::Ah::create(pd, &ah::Attr::new(port).grh(grh), cx)?,
            groups <- new_mutex!(KVec::new()),
        }? Error);
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// Attaches the QP to a multicast group.
    ///
    /// # Safety
    ///
    /// `qp` is the valid QP that this is the state of.
    pub(crate) unsafe fn attach(
        &self,
        qp: *mut bindings::ib_qp,
        gid: Gid,
        lid: u16,
        _cx: &Sleepable,
    ) -> Result {
        let mut groups = self.groups.lock();
        if groups.iter().any(|group| group.0 == gid) {
            return Err(EEXIST);
        }
        groups.push((gid, lid), GFP_KERNEL)?;
        let mut raw = to_raw(gid);
        // SAFETY: The caller says that `qp` is valid.
        to_result(unsafe { bindings::ib_attach_mcast(qp, &raw mut raw, lid) }).inspect_err(|_| {
            groups.pop();
        })
    }

    /// Detaches the QP from a multicast group.
    ///
    /// # Safety
    ///
    /// `qp` is the valid QP that this is the state of.
    pub(crate) unsafe fn detach(
        &self,
        qp: *mut bindings::ib_qp,
        gid: Gid,
        _cx: &Sleepable,
    ) -> Result {
        let mut groups = self.groups.lock();
        let group = groups.iter().find(|group| group.0 == gid).ok_or(ENOENT)?;
        // SAFETY: The caller says that `qp` is valid.
        unsafe { detach(qp, *group) }?;
        groups.retain(|group| group.0 != gid);
        Ok(())
    }

    /// Detaches the QP from all multicast groups, as it has to be before it is destroyed.
    ///
    /// # Safety
    ///
    /// `qp` is the valid QP that this is the state of.
    pub(crate) unsafe fn detach_all(&self, qp: *mut bindings::ib_qp, _cx: &Sleepable) -> Result {
        let mut groups = self.groups.lock();
        while let Some(group) = groups.pop() {
            // SAFETY: The caller says that `qp` is valid.
            unsafe { detach(qp, group) }?;
        }
        Ok(())
    }
}

fn to_raw(gid: Gid) -> bindings::ib_gid {
    bindings::ib_gid {
        raw: ManuallyDrop::new(gid.0),
    }
}

/// # Safety
///
/// `qp` is valid.
unsafe fn detach(qp: *mut bindings::ib_qp, (gid, lid): (Gid, u16)) -> Result {
    let mut raw = to_raw(gid);
    // SAFETY: The caller says that `qp` is valid.
    to_result(unsafe { bindings::ib_detach_mcast(qp, &raw mut raw, lid) })
}
