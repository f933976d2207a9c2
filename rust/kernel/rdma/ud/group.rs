// SPDX-License-Identifier: GPL-2.0

//! Multicast groups.

use crate::{
    bindings,
    context::Sleepable,
    device::Gid, //
};
use core::mem::ManuallyDrop;
use kernel::{
    error::to_result,
    new_mutex,
    prelude::*,
    sync::Mutex, //
};

struct Group {
    gid: Gid,
    lid: u16,
}

impl Group {
    fn raw_gid(&self) -> bindings::ib_gid {
        bindings::ib_gid {
            raw: ManuallyDrop::new(self.gid.0),
        }
    }

    /// # Safety
    ///
    /// `qp` is valid.
    unsafe fn detach(&self, qp: *mut bindings::ib_qp) -> Result {
        let mut gid = self.raw_gid();
        // SAFETY: The caller promises that `qp` is valid.
        to_result(unsafe { bindings::ib_detach_mcast(qp, &raw mut gid, self.lid) })
    }
}

/// The groups that a QP is in. A QP must leave them before it is destroyed.
///
/// The list is not for that alone: some drivers take a second attachment to a group for the first,
/// but the core counts both, and then the QP cannot be destroyed.
#[pin_data]
pub(crate) struct Groups {
    #[pin]
    list: Mutex<KVec<Group>>,
}

impl Groups {
    pub(super) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(KVec::new()),
        })
    }

    /// # Safety
    ///
    /// `qp` is the valid QP that these groups are for.
    pub(super) unsafe fn attach(
        &self,
        qp: *mut bindings::ib_qp,
        gid: Gid,
        lid: u16,
        _cx: &Sleepable,
    ) -> Result {
        let mut list = self.list.lock();
        if list.iter().any(|group| group.gid == gid) {
            return Err(EEXIST);
        }
        list.push(Group { gid, lid }, GFP_KERNEL)?;
        let mut raw = Group { gid, lid }.raw_gid();
        // SAFETY: The caller promises that `qp` is valid.
        to_result(unsafe { bindings::ib_attach_mcast(qp, &raw mut raw, lid) }).inspect_err(|_| {
            list.pop();
        })
    }

    /// # Safety
    ///
    /// `qp` is the valid QP that these groups are for.
    pub(super) unsafe fn detach(
        &self,
        qp: *mut bindings::ib_qp,
        gid: Gid,
        _cx: &Sleepable,
    ) -> Result {
        let mut list = self.list.lock();
        let group = list.iter().find(|group| group.gid == gid).ok_or(ENOENT)?;
        // SAFETY: The caller promises that `qp` is valid.
        unsafe { group.detach(qp) }?;
        list.retain(|group| group.gid != gid);
        Ok(())
    }

    /// Leaves all groups.
    ///
    /// # Safety
    ///
    /// `qp` is the valid QP that these groups are for.
    pub(crate) unsafe fn detach_all(&self, qp: *mut bindings::ib_qp, _cx: &Sleepable) -> Result {
        let mut list = self.list.lock();
        while let Some(group) = list.pop() {
            // SAFETY: The caller promises that `qp` is valid.
            unsafe { group.detach(qp) }?;
        }
        Ok(())
    }
}
