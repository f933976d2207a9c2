// SPDX-License-Identifier: GPL-2.0

//! Transfers of pages to and from a peer, in as many requests as that takes.
//!
//! A target moves bulk data by RDMA READ and WRITE between its own pages and memory that the
//! initiator has registered. `rdma_rw` maps the pages, makes the requests (on some devices with
//! registrations of its own), and cleans up after them. Here a [`Ctx`] owns the pages, and is a
//! part of the owner that is moved into the send queue.
//!
//! # Examples
//!
//! ```
//! use rdma::{context::*, cqe::*, qp::Qp, rw::{Ctx, Rw}, sg::Pages, wc::Wc, wr::Remote};
//!
//! #[derive(HasCqe)]
//! struct Fetch {
//!     cqe: Cqe<Self>,
//!     data: Ctx,
//! }
//!
//! impl CqeHandler for Fetch {
//!     type Pointer = Pin<KBox<Self>>;
//!     type Needs = Atomic;
//!
//!     fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
//!         let mut first = [0; 4];
//!         if wc.result().is_ok() && this.data.cpu().read(0, &mut first).is_ok() {
//!             pr_info!("the peer has {first:?}\n");
//!         }
//!     }
//! }
//!
//! fn fetch(qp: &Qp<Workqueue>, remote: Remote, cx: &Sleepable) -> Result {
//!     let fetch = Fetch { cqe: Cqe::new(), data: Ctx::new(Pages::alloc(100_000, cx)?) };
//!     let fetch = KBox::pin(fetch, GFP_KERNEL)?;
//!     Ok(qp.post_rw(fetch, |f| Ok(Rw::read(&f.data, 0..100_000, remote)), cx)?)
//! }
//! ```
//!
//! C header: [`include/rdma/rw.h`](srctree/include/rdma/rw.h); C source:
//! `drivers/infiniband/core/rw.c`

mod ctx;
mod post;

pub use ctx::Ctx;
pub use post::RwError;

use crate::{
    bindings,
    device::Port,
    wr::Remote, //
};
use core::{
    marker::PhantomData,
    ops::Range,
    ptr::NonNull, //
};
use kernel::prelude::*;

/// What is to be transferred.
struct Plan {
    ctx: NonNull<Ctx>,
    range: Range<usize>,
    remote: Remote,
    dir: bindings::dma_data_direction,
}

impl Plan {
    /// Says whether the peer's memory is read.
    fn reads(&self) -> bool {
        self.dir == bindings::dma_data_direction::DMA_FROM_DEVICE
    }
}

/// A transfer between the pages of a [`Ctx`] and a peer's memory.
///
/// # Invariants
///
/// The context of `plan` lives for `'a`.
pub struct Rw<'a> {
    plan: Plan,
    _ctx: PhantomData<&'a Ctx>,
}

impl<'a> Rw<'a> {
    fn new(
        ctx: &'a Ctx,
        range: Range<usize>,
        remote: Remote,
        dir: bindings::dma_data_direction,
    ) -> Self {
        // INVARIANT: It is borrowed for that long.
        Self {
            plan: Plan {
                ctx: NonNull::from(ctx),
                range,
                remote,
                dir,
            },
            _ctx: PhantomData,
        }
    }

    /// Reads as many bytes of the peer, from `remote` on, as `range` is long, into that range of
    /// the pages (RDMA READ).
    pub fn read(ctx: &'a Ctx, range: Range<usize>, remote: Remote) -> Self {
        let dir = bindings::dma_data_direction::DMA_FROM_DEVICE;
        Self::new(ctx, range, remote, dir)
    }

    /// Writes the bytes in `range` of the pages to the peer, from `remote` on (RDMA WRITE).
    pub fn write(ctx: &'a Ctx, range: Range<usize>, remote: Remote) -> Self {
        let dir = bindings::dma_data_direction::DMA_TO_DEVICE;
        Self::new(ctx, range, remote, dir)
    }
}

impl Port<'_> {
    /// Returns how many contexts' worth of room in a QP a transfer of up to `pages` pages takes
    /// (`rdma_rw_mr_factor`).
    ///
    /// # Errors
    ///
    /// `EOPNOTSUPP` if the device does not say how many pages one request can have.
    pub fn rw_contexts(&self, pages: u32) -> Result<u32> {
        let dev = self.device();
        // C divides by one of them, and it is told to which by a parameter of its module, too.
        if dev.max_fast_reg_pages() == 0 || dev.max_sge_rd() == 0 {
            return Err(EOPNOTSUPP);
        }
        // SAFETY: The device is registered while there is a handle, and has the port by the
        // invariant of `Port`.
        Ok(unsafe { bindings::rdma_rw_mr_factor(dev.as_raw(), self.num(), pages) })
    }

    /// Returns how many requests of the send queue so many contexts take at the most
    /// (`rdma_rw_max_send_wr`).
    pub fn rw_requests(&self, contexts: u32) -> u32 {
        // SAFETY: The device is registered while there is a handle, and has the port by the
        // invariant of `Port`.
        unsafe { bindings::rdma_rw_max_send_wr(self.device().as_raw(), self.num(), contexts, 0) }
    }
}
