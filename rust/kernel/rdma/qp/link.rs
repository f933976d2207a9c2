// SPDX-License-Identifier: GPL-2.0

//! What can be a link of a chain.

use crate::{
    bindings,
    mr::{
        Marked,
        RegWr, //
    },
    wr::{
        AtomicWr,
        Remote,
        SendWr, //
    }, //
};
use core::mem::MaybeUninit;
use kernel::prelude::*;

/// A C request of any kind.
///
/// # Invariants
///
/// Every member begins with its `struct ib_send_wr`.
#[repr(C)]
union AnyWr {
    send: core::mem::ManuallyDrop<bindings::ib_send_wr>,
    rdma: core::mem::ManuallyDrop<bindings::ib_rdma_wr>,
    atomic: core::mem::ManuallyDrop<bindings::ib_atomic_wr>,
    reg: core::mem::ManuallyDrop<bindings::ib_reg_wr>,
}

/// The place of a C request with up to `SGES` entries.
#[doc(hidden)]
pub struct Slot<const SGES: usize> {
    wr: MaybeUninit<AnyWr>,
    sges: [MaybeUninit<bindings::ib_sge>; SGES],
}

impl<const SGES: usize> Slot<SGES> {
    pub(super) const fn new() -> Self {
        Self {
            wr: MaybeUninit::uninit(),
            sges: [const { MaybeUninit::uninit() }; SGES],
        }
    }

    pub(super) fn wr(&mut self) -> *mut bindings::ib_send_wr {
        self.wr.as_mut_ptr().cast()
    }
}

/// What has to be undone if a link is not posted.
#[doc(hidden)]
pub struct Undo(Option<Marked>);

impl Undo {
    pub(super) const NOTHING: Self = Self(None);

    /// # Safety
    ///
    /// The link was not posted, and what it is made of is alive.
    pub(super) unsafe fn undo(&mut self) {
        if let Some(marked) = self.0.take() {
            // SAFETY: By the caller's promise.
            unsafe { marked.undo() };
        }
    }
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
        /// `qp` is valid. If the request is not posted, what is returned is undone.
        unsafe fn write(
            self,
            slot: &mut Slot<SGES>,
            qp: *mut bindings::ib_qp,
        ) -> Result<(Self::Output, Undo)>;
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
    unsafe fn write(self, slot: &mut Slot<SGES>, qp: *mut bindings::ib_qp) -> Result<((), Undo)> {
        const { assert!(N <= SGES, "the chain has no room for so many entries") };
        let sges = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for the entries, and for a request of every kind; `qp` is valid.
        unsafe { self.write(slot.wr().cast(), sges, (*qp).pd) }?;
        Ok(((), Undo::NOTHING))
    }
}

impl<'a, const SGES: usize> Link<'a, SGES> for AtomicWr<'a> {}
impl<const SGES: usize> Write<SGES> for AtomicWr<'_> {
    type Output = ();

    #[inline]
    unsafe fn write(self, slot: &mut Slot<SGES>, qp: *mut bindings::ib_qp) -> Result<((), Undo)> {
        const { assert!(1 <= SGES, "the chain has no room for an entry") };
        let sge = slot.sges.as_mut_ptr().cast();
        // SAFETY: There is room for the entry, and for a request of every kind; `qp` is valid.
        unsafe { self.write(slot.wr().cast(), sge, (*qp).pd) }?;
        Ok(((), Undo::NOTHING))
    }
}

impl<'a, const SGES: usize> Link<'a, SGES> for RegWr<'a> {}
impl<const SGES: usize> Write<SGES> for RegWr<'_> {
    type Output = Remote;

    #[inline]
    unsafe fn write(
        self,
        slot: &mut Slot<SGES>,
        qp: *mut bindings::ib_qp,
    ) -> Result<(Remote, Undo)> {
        // SAFETY: By the caller's promise. The mark is undone if the request is not posted.
        let (raw, remote, marked) = unsafe { self.prepare(qp) }?;
        // SAFETY: There is room for a request of every kind.
        unsafe { slot.wr().cast::<bindings::ib_reg_wr>().write(raw) };
        Ok((remote, Undo(Some(marked))))
    }
}
