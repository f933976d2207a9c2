// SPDX-License-Identifier: GPL-2.0

//! Requests that change the state of an MR.

use super::{
    state::{
        Fmr,
        Registering, //
    },
    Memory,
    Region, //
};
use crate::{
    bindings,
    dma::{
        DeviceReads,
        DeviceWrites,
        Direction, //
    },
    wr::{
        fill,
        Remote, //
    }, //
};
use core::ptr::NonNull;
use kernel::prelude::*;

const LOCAL_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_LOCAL_WRITE;
const REMOTE_READ: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_READ;
const REMOTE_WRITE: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_WRITE;
const REMOTE_ATOMIC: u32 = bindings::ib_access_flags_IB_ACCESS_REMOTE_ATOMIC;

/// A request to register a [`Region`], with the access that peers get.
pub struct RegWr<'a> {
    mr: &'a Fmr,
    iova: u64,
    access: u32,
}

impl<'a> RegWr<'a> {
    #[inline]
    fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M>, access: u32) -> Self {
        Self {
            mr: &region.mr.fmr,
            iova: region.iova,
            access,
        }
    }

    /// Lets peers read the region (`IB_ACCESS_REMOTE_READ`).
    #[inline]
    pub fn remote_read<D: DeviceReads, M: Memory<D>>(region: &'a Region<D, M>) -> Self {
        Self::new(region, REMOTE_READ)
    }

    /// Lets peers write the region (`IB_ACCESS_REMOTE_WRITE`, which needs `IB_ACCESS_LOCAL_WRITE`).
    #[inline]
    pub fn remote_write<D: DeviceWrites, M: Memory<D>>(region: &'a Region<D, M>) -> Self {
        Self::new(region, LOCAL_WRITE | REMOTE_WRITE)
    }

    /// Lets peers read and write the region.
    #[inline]
    pub fn remote_read_write<D, M>(region: &'a Region<D, M>) -> Self
    where
        D: DeviceReads + DeviceWrites,
        M: Memory<D>,
    {
        Self::new(region, LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ)
    }

    /// Lets peers change words of the region atomically (`IB_ACCESS_REMOTE_ATOMIC`, which needs
    /// `IB_ACCESS_LOCAL_WRITE`). They can neither read nor write it otherwise.
    #[inline]
    pub fn remote_atomic<D, M>(region: &'a Region<D, M>) -> Self
    where
        D: DeviceReads + DeviceWrites,
        M: Memory<D>,
    {
        Self::new(region, LOCAL_WRITE | REMOTE_ATOMIC)
    }

    /// Marks the region registered under a new key and writes the C request, all but the callback
    /// and the successor, for `qp`.
    ///
    /// # Safety
    ///
    /// `to` is valid for writes, and `qp` is valid. If the request is not posted, what is returned
    /// is undone.
    #[inline]
    pub(crate) unsafe fn write(
        self,
        to: *mut bindings::ib_reg_wr,
        qp: *const bindings::ib_qp,
    ) -> Result<(Remote, Marked)> {
        // SAFETY: By the caller's promise.
        if unsafe { (*qp).pd } != self.mr.pd.as_raw() {
            return Err(EINVAL);
        }
        // SAFETY: As above.
        let (rkey, registering) = unsafe { self.mr.register(qp) }?;
        let (opcode, flags) = (
            bindings::ib_wr_opcode_IB_WR_REG_MR,
            bindings::ib_send_flags_IB_SEND_SIGNALED,
        );
        // SAFETY: By the caller's promise.
        unsafe {
            fill(
                &raw mut (*to).wr,
                opcode,
                flags,
                0,
                core::ptr::null_mut(),
                0,
            );
            (*to).mr = self.mr.raw.as_ptr();
            (*to).key = rkey;
            (*to).access = self.access as c_int;
        }
        let remote = Remote {
            addr: self.iova,
            rkey,
        };
        Ok((remote, Marked(NonNull::from(self.mr), registering)))
    }
}

/// A region that is marked registered, by a request that is not posted yet.
pub(crate) struct Marked(NonNull<Fmr>, Registering);

impl Marked {
    /// Takes the mark back.
    ///
    /// # Safety
    ///
    /// The region is alive, and its registration was not posted.
    pub(crate) unsafe fn undo(self) {
        // SAFETY: By the caller's promise.
        unsafe { self.0.as_ref() }.undo(self.1);
    }
}

/// A request to invalidate the key of a [`Region`] locally (`IB_WR_LOCAL_INV`).
pub struct InvWr<'a> {
    mr: &'a Fmr,
}

impl<'a> InvWr<'a> {
    /// Ends the access of peers to the region.
    #[inline]
    pub fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M>) -> Self {
        Self { mr: &region.mr.fmr }
    }

    /// Marks the region as being invalidated by a request for `qp`.
    #[inline]
    pub(crate) fn prepare(self, qp: *const bindings::ib_qp) -> Result<Invalidating> {
        self.mr.invalidate(qp)?;
        Ok(Invalidating(NonNull::from(self.mr)))
    }
}

/// A region that is marked as being invalidated, by a request that is not posted yet.
pub(crate) struct Invalidating(NonNull<Fmr>);

impl Invalidating {
    /// Makes the C request, which gives its completion to `user`.
    ///
    /// # Safety
    ///
    /// The region lives until that completion.
    #[inline]
    pub(crate) unsafe fn request(&self, user: *mut bindings::ib_cqe) -> bindings::ib_send_wr {
        // SAFETY: By the caller's promise, and the type says that the region is marked.
        unsafe { self.0.as_ref().invalidation(user) }
    }

    /// Takes the mark back.
    ///
    /// # Safety
    ///
    /// The region is alive, and the invalidation was not posted.
    pub(crate) unsafe fn undo(self) {
        // SAFETY: By the caller's promise.
        unsafe { self.0.as_ref() }.valid_still();
    }
}
