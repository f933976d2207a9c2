// SPDX-License-Identifier: GPL-2.0

//! What can be a link of a chain.

use crate::{
    bindings,
    mr::{
        Marked,
        Private,
        RegWr, //
    },
    qp::Place,
    wr::{
        AtomicWr,
        Remote,
        SendWr, //
    }, //
};
use core::{
    mem::{
        ManuallyDrop,
        MaybeUninit, //
    },
    ptr::NonNull, //
};
use kernel::prelude::*;

/// A C request of any kind.
///
/// # Invariants
///
/// Every member begins with its `struct ib_send_wr`.
#[repr(C)]
union AnyWr {
    send: ManuallyDrop<bindings::ib_send_wr>,
    rdma: ManuallyDrop<bindings::ib_rdma_wr>,
    atomic: ManuallyDrop<bindings::ib_atomic_wr>,
    reg: ManuallyDrop<bindings::ib_reg_wr>,
}

/// The place of a C request with up to `SGES` entries.
///
/// # Invariants
///
/// When the request is written and is a registration, so is its mark.
#[doc(hidden)]
#[repr(C)]
pub struct Slot<const SGES: usize> {
    marked: MaybeUninit<Marked>,
    wr: MaybeUninit<AnyWr>,
    sges: [MaybeUninit<bindings::ib_sge>; SGES],
}

impl<const SGES: usize> Slot<SGES> {
    pub(super) const fn new() -> Self {
        // INVARIANT: No request is written.
        Self {
            marked: MaybeUninit::uninit(),
            wr: MaybeUninit::uninit(),
            sges: [const { MaybeUninit::uninit() }; SGES],
        }
    }

    #[inline]
    pub(super) fn wr(&mut self) -> *mut bindings::ib_send_wr {
        self.wr.as_mut_ptr().cast()
    }

    /// Marks the region registered, if the link is a registration.
    ///
    /// # Safety
    ///
    /// The request is written. If it registers a region, that is alive; the request is about to be
    /// posted, and the caller has the turn of its QP until that has returned.
    pub(super) unsafe fn register(&mut self) {
        // SAFETY: The request is written, as the caller promises, so by the type invariant the mark
        // of a registration is. Its region is alive, and the caller has the turn, as he promises,
        // too.
        unsafe {
            if (*self.wr()).opcode == bindings::ib_wr_opcode_IB_WR_REG_MR {
                self.marked.assume_init_ref().register();
            }
        }
    }

    /// Takes back what the link has marked.
    ///
    /// # Safety
    ///
    /// The request is written and was not posted, what it is made of is alive, and this was not
    /// called for it before.
    pub(super) unsafe fn undo(&mut self) {
        // SAFETY: The request is written, as the caller promises, so by the type invariant the mark
        // of a registration is. It was not posted, its region is alive, and the mark is read once.
        unsafe {
            if (*self.wr()).opcode == bindings::ib_wr_opcode_IB_WR_REG_MR {
                self.marked.assume_init_read().undo();
            }
        }
    }
}

/// How links are posted.
#[doc(hidden)]
pub struct Posting {
    pub(super) place: NonNull<Place>,
    pub(super) private: Private,
    /// Whether it has to be in turn, as a link registers a region that others may reach.
    pub(super) in_turn: bool,
    /// Whether a link is an RDMA READ.
    pub(super) reads: bool,
}

mod private {
    use super::*;

    /// What a [`Link`](super::Link) has to do.
    pub trait Write<const SGES: usize>: Sized {
        type Output;

        /// Writes the C request, without callback and successor.
        ///
        /// # Safety
        ///
        /// The place in `posting` is there. [`Slot::register`] is called in turn if `posting` says
        /// so then. If the request is not posted, [`Slot::undo`] is called.
        unsafe fn write(self, slot: &mut Slot<SGES>, posting: &mut Posting)
            -> Result<Self::Output>;
    }
}
pub(super) use private::Write;

/// A request of up to `SGES` entries that can be a link of a [`Chain`](super::Chain): a
/// [`SendWr`], an [`AtomicWr`] or a [`RegWr`].
pub trait Link<'a, const SGES: usize>: Write<SGES> {}

impl<'a, const N: usize, const SGES: usize> Link<'a, SGES> for SendWr<'a, N> {}
impl<const N: usize, const SGES: usize> Write<SGES> for SendWr<'_, N> {
    type Output = ();

    #[inline]
    unsafe fn write(self, slot: &mut Slot<SGES>, posting: &mut Posting) -> Result {
        const { assert!(N <= SGES, "the chain has no room for so many entries") };
        posting.reads |= self.is_read();
        let sges = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for the entries, and for a request of every kind; the place is
        // there.
        unsafe { self.write(slot.wr().cast(), sges, posting.place.as_ref()) }
    }
}

impl<'a, const SGES: usize> Link<'a, SGES> for AtomicWr<'a> {}
impl<const SGES: usize> Write<SGES> for AtomicWr<'_> {
    type Output = ();

    #[inline]
    unsafe fn write(self, slot: &mut Slot<SGES>, posting: &mut Posting) -> Result {
        const { assert!(1 <= SGES, "the chain has no room for an entry") };
        let sge = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for the entry, and for a request of every kind; the place is there.
        unsafe { self.write(slot.wr().cast(), sge, posting.place.as_ref()) }
    }
}

impl<'a, const SGES: usize> Link<'a, SGES> for RegWr<'a> {}
impl<const SGES: usize> Write<SGES> for RegWr<'_> {
    type Output = Remote;

    #[inline]
    unsafe fn write(self, slot: &mut Slot<SGES>, posting: &mut Posting) -> Result<Remote> {
        let shared = self.is_shared(&posting.private);
        posting.in_turn |= shared;
        // SAFETY: There is room for a request of every kind; the place is there. In turn, the
        // region is marked before it is posted. If the request is not posted, that is taken back.
        let (remote, marked) = unsafe {
            let place = self.come_to(posting.place.as_ref(), shared)?;
            self.write(slot.wr().cast(), place, shared)?
        };
        // INVARIANT: The request was just written.
        slot.marked.write(marked);
        Ok(remote)
    }
}
