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
    cqe::CqePointer,
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

/// The memory of a request's owner, if nobody else can have a reference to it.
///
/// A region that lies there is out of everybody's reach until the owner is back: it need not be
/// marked and posted in turn. A region that the owner only refers to may be shared.
pub(crate) struct Private {
    addr: usize,
    size: usize,
}

impl Private {
    #[inline]
    pub(crate) fn of<P, const ID: u64>(owner: &P) -> Self
    where
        P: CqePointer<ID>,
        P::Target: Sized,
    {
        let owner: *const P::Target = &**owner;
        Self {
            addr: owner.addr(),
            size: const {
                if P::EXCLUSIVE {
                    size_of::<P::Target>()
                } else {
                    0
                }
            },
        }
    }

    /// Says whether the region lies in this memory. If it does, the compiler knows its offset, and
    /// nothing is left of this.
    #[inline]
    fn has(&self, region: *const ()) -> bool {
        region.addr().wrapping_sub(self.addr) < self.size
    }
}

/// A request to register a [`Region`], with the access that peers get.
pub struct RegWr<'a> {
    mr: &'a Fmr,
    region: *const (),
    iova: u64,
    access: u32,
}

impl<'a> RegWr<'a> {
    #[inline]
    fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M>, access: u32) -> Self {
        Self {
            mr: &region.mr.fmr,
            region: core::ptr::from_ref(region).cast(),
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

    /// Says whether others may reach the region before `owner` is back.
    #[inline]
    pub(crate) fn is_shared(&self, owner: &Private) -> bool {
        !owner.has(self.region)
    }

    /// Gives the region a new key and writes the C request, all but the callback and the successor,
    /// for `qp`.
    ///
    /// # Safety
    ///
    /// `to` is valid for writes, and `qp` is valid. `shared` is what [`RegWr::is_shared`] says of
    /// the owner; if so, [`Marked::register`] is called. If the request is not posted, what is
    /// returned is undone.
    #[inline]
    pub(crate) unsafe fn write(
        self,
        to: *mut bindings::ib_reg_wr,
        qp: *const bindings::ib_qp,
        shared: bool,
    ) -> Result<(Remote, Marked)> {
        // SAFETY: By the caller's promise.
        if unsafe { (*qp).pd } != self.mr.pd.as_raw() {
            return Err(EINVAL);
        }
        // SAFETY: As above. A region that is not shared is a part of an owner that nobody else has,
        // and the owner is in the queue from the post on, to the end of the request.
        let (rkey, registering) = unsafe {
            if shared {
                self.mr.prepare(qp)
            } else {
                self.mr.prepare_alone(qp)
            }
        }?;
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

/// A region that has a new key, by a request that is not posted yet.
pub(crate) struct Marked(NonNull<Fmr>, Registering);

impl Marked {
    /// Marks the region registered, if it is not.
    ///
    /// # Safety
    ///
    /// The region is alive. The request is about to be posted, and the caller has the turn of the
    /// QP that it was made for until that has returned.
    pub(crate) unsafe fn register(&self) {
        // SAFETY: By the caller's promise. What is not undone is from the last `prepare`.
        unsafe { self.0.as_ref().register(&self.1) };
    }

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
    region: *const (),
}

impl<'a> InvWr<'a> {
    /// Ends the access of peers to the region.
    #[inline]
    pub fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M>) -> Self {
        Self {
            mr: &region.mr.fmr,
            region: core::ptr::from_ref(region).cast(),
        }
    }

    /// Says whether others may reach the region now.
    #[inline]
    pub(crate) fn is_shared(&self, owner: &Private) -> bool {
        !owner.has(self.region)
    }

    /// Marks the region as being invalidated by a request for `qp`.
    ///
    /// # Safety
    ///
    /// `shared` is what [`InvWr::is_shared`] says of the owner. If so, the caller has the turn of
    /// `qp`.
    #[inline]
    pub(crate) unsafe fn prepare(
        self,
        qp: *const bindings::ib_qp,
        shared: bool,
    ) -> Result<Invalidating> {
        // SAFETY: By the caller's promise. A region that is not shared is a part of an owner that
        // nobody else has.
        unsafe {
            if shared {
                self.mr.invalidate(qp)
            } else {
                self.mr.invalidate_alone(qp)
            }
        }?;
        Ok(Invalidating(NonNull::from(self.mr)))
    }
}

/// A region that is marked as being invalidated, by a request that is not posted yet.
pub(crate) struct Invalidating(NonNull<Fmr>);

impl Invalidating {
    /// Makes the C request, which gives its completion to `user`. `alone` says that the region is
    /// not shared, and that the RDMA core polls where the request completes.
    ///
    /// # Safety
    ///
    /// The region lives until that completion, and what `alone` says is true.
    #[inline]
    pub(crate) unsafe fn request(
        &self,
        user: *mut bindings::ib_cqe,
        alone: bool,
    ) -> bindings::ib_send_wr {
        // SAFETY: By the caller's promise, and the type says that the region is marked.
        unsafe { self.0.as_ref().invalidation(user, alone) }
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
