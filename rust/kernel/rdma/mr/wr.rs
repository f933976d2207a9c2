// SPDX-License-Identifier: GPL-2.0

//! Requests that change the state of an MR.

use super::{
    state::{
        Fmr,
        Registering, //
    },
    Memory,
    Mr,
    Region, //
};
use crate::{
    bindings,
    cqe::{
        CqeHandler,
        CqePointer, //
    },
    dma::{
        DeviceReads,
        DeviceWrites,
        Direction, //
    },
    qp::{
        Place,
        Serial, //
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
    fn has(&self, mr: &Mr) -> bool {
        core::ptr::from_ref(mr).addr().wrapping_sub(self.addr) < self.size
    }
}

/// A request to register a [`Region`], with the access that peers get.
pub struct RegWr<'a> {
    mr: &'a Mr,
    iova: u64,
    access: u32,
}

impl<'a> RegWr<'a> {
    #[inline]
    fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M>, access: u32) -> Self {
        Self {
            mr: &region.mr,
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
        !owner.has(self.mr)
    }

    /// Has the region note the QP at `place`. That is returned, so that it need not be kept over
    /// the call which a QP that is new to the region needs.
    ///
    /// # Safety
    ///
    /// `shared` is what [`RegWr::is_shared`] says of the owner.
    #[inline]
    pub(crate) unsafe fn come_to<'p>(&self, place: &'p Place, shared: bool) -> Result<&'p Place> {
        if shared {
            // That is for who has claimed the region.
            return Ok(place);
        }
        // SAFETY: A region that is not shared is a part of an owner that nobody else has.
        unsafe { self.mr.fmr.place_alone(place) }
    }

    /// Gives the region a new key and writes the C request, all but the callback and the successor,
    /// for the QP at `place`.
    ///
    /// # Safety
    ///
    /// `to` is valid for writes. `shared` is what [`RegWr::is_shared`] says of the owner, and
    /// `place` is from [`RegWr::come_to`]. If it is shared, [`Marked::register`] is called. If the
    /// request is not posted, what is returned is undone.
    #[inline]
    pub(crate) unsafe fn write(
        self,
        to: *mut bindings::ib_reg_wr,
        place: &Place,
        shared: bool,
    ) -> Result<(Remote, Marked)> {
        // SAFETY: `shared` is what `is_shared` says and `place` is from `come_to`, as the caller
        // promises, who also calls `register` and undoes what is not posted. A region that is not
        // shared is a part of an owner that nobody else has until the request has completed.
        let (mr, rkey, registering) = unsafe {
            if shared {
                self.mr.fmr.prepare(place)?
            } else {
                self.mr.fmr.prepare_alone()
            }
        };
        let (opcode, flags) = (
            bindings::ib_wr_opcode_IB_WR_REG_MR,
            bindings::ib_send_flags_IB_SEND_SIGNALED,
        );
        // SAFETY: The caller promises that `to` is valid for writes.
        unsafe {
            fill(
                &raw mut (*to).wr,
                opcode,
                flags,
                0,
                core::ptr::null_mut(),
                0,
            );
            (*to).mr = mr;
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
///
/// It is found by the MR's handle, which is in the region, so as a rule in the owner: its address
/// need not be kept during the post.
pub(crate) struct Marked(NonNull<Mr>, Registering);

impl Marked {
    /// Marks the region registered, if it is not.
    ///
    /// # Safety
    ///
    /// The region is alive. The request is about to be posted, and the caller has the turn of the
    /// QP that it was made for until that has returned.
    pub(crate) unsafe fn register(&self) {
        // SAFETY: The region is alive and the caller has the turn of the QP, as he promises. What
        // is not undone is from the last `prepare`.
        unsafe { self.0.as_ref().fmr.register(self.1) };
    }

    /// Takes the mark back.
    ///
    /// # Safety
    ///
    /// The region is alive and has not moved, and its registration was not posted.
    pub(crate) unsafe fn undo(self) {
        // SAFETY: The region is alive and has not moved, and its registration was not posted, as
        // the caller promises.
        unsafe { self.0.as_ref().fmr.undo(self.1) };
    }
}

/// A request to invalidate the key of a [`Region`] locally (`IB_WR_LOCAL_INV`).
pub struct InvWr<'a> {
    mr: &'a Mr,
}

impl<'a> InvWr<'a> {
    /// Ends the access of peers to the region.
    #[inline]
    pub fn new<D: Direction, M: Memory<D>>(region: &'a Region<D, M>) -> Self {
        Self { mr: &region.mr }
    }

    /// Says whether others may reach the region now.
    #[inline]
    pub(crate) fn is_shared(&self, owner: &Private) -> bool {
        !owner.has(self.mr)
    }

    /// Marks the region as being invalidated by a request for the QP with this number.
    ///
    /// # Safety
    ///
    /// `shared` is what [`InvWr::is_shared`] says of the owner. If so, the caller has the turn of
    /// the QP.
    #[inline]
    pub(crate) unsafe fn prepare(self, serial: Serial, shared: bool) -> Result<Invalidating> {
        // SAFETY: `shared` is what `is_shared` says and, if it is set, the caller has the turn of
        // the QP, as he promises. A region that is not shared is a part of an owner that nobody
        // else has.
        unsafe {
            if shared {
                self.mr.fmr.invalidate(serial)
            } else {
                self.mr.fmr.invalidate_alone(serial)
            }
        }?;
        Ok(Invalidating {
            fmr: NonNull::from(&**self.mr.fmr),
            mr: NonNull::from(self.mr),
        })
    }
}

/// A region that is marked as being invalidated, by a request that is not posted yet.
///
/// When it was refused, the MR is found again by its handle, as in [`Marked`].
pub(crate) struct Invalidating {
    fmr: NonNull<Fmr>,
    mr: NonNull<Mr>,
}

impl Invalidating {
    /// Makes the C request, whose completion gives the owner of `user` to its handler.
    ///
    /// # Safety
    ///
    /// The region lives until that completion. `user` is from an owner of type `T`, given up by its
    /// callback `ID`. `shared` is what [`InvWr::is_shared`] has said. If the request is not posted,
    /// [`Invalidating::undo`] is called.
    #[inline]
    pub(crate) unsafe fn request<T: CqeHandler<ID>, const ID: u64>(
        &self,
        user: *mut bindings::ib_cqe,
        shared: bool,
    ) -> bindings::ib_send_wr {
        // SAFETY: The type says that the region is marked. It lives until the completion, `user` is
        // from a `T`, and what is not posted is undone, as the caller promises.
        unsafe { self.fmr.as_ref().invalidation::<T, ID>(user, shared) }
    }

    /// Takes the mark back.
    ///
    /// # Safety
    ///
    /// The region is alive and has not moved, and the invalidation was not posted.
    #[inline]
    pub(crate) unsafe fn undo(self) {
        // SAFETY: The region is alive and has not moved, as the caller promises.
        unsafe { self.mr.as_ref() }.fmr.not_invalidated();
    }
}
