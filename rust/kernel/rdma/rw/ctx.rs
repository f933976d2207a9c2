// SPDX-License-Identifier: GPL-2.0

//! Pages, and what it takes to transfer them.

use super::Plan;
use crate::{
    bindings,
    cqe::hand_on,
    qp::Transfers,
    sg::{
        CpuPages,
        Pages, //
    }, //
};
use core::{
    cell::UnsafeCell,
    ops::Range,
    ptr::NonNull, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::atomic::{
        ordering::{
            Full,
            Relaxed,
            Release, //
        },
        Atomic, //
    }, //
};

const FREE: u32 = 0;
const POSTED: u32 = 1;

/// Pages, and what it takes to transfer them (`struct rdma_rw_ctx`).
///
/// # Invariants
///
/// While `state` is `POSTED`, the post that has set it and then the completion have `own` for
/// themselves, and this stays where it is. From a successful `Ctx::start` to `Ctx::finish`,
/// `own.job` is what was begun, counted by its QP.
#[repr(C)]
pub struct Ctx {
    /// What the last request completes to. The first field, to get back from it.
    pub(super) cqe: bindings::ib_cqe,
    state: Atomic<u32>,
    own: UnsafeCell<Own>,
    /// How long `own.pages` is: zero if there are none.
    len: Atomic<usize>,
}

struct Own {
    /// Until a peer may write to them.
    pages: Option<Pages>,
    raw: bindings::rdma_rw_ctx,
    job: Option<Job>,
}

/// A transfer that has begun.
struct Job {
    user: *mut bindings::ib_cqe,
    transfers: NonNull<Transfers>,
    qp: NonNull<bindings::ib_qp>,
    port: u32,
    dir: bindings::dma_data_direction,
    first: *mut bindings::scatterlist,
    count: u32,
    /// Whether peers can write to the pages, by the key of an MR, until a READ has succeeded.
    exposed: bool,
    /// The first and the last entry, as they were before they were made to begin and to end with
    /// the range.
    ends: [Entry; 2],
}

/// What an entry of a list was.
struct Entry {
    sg: *mut bindings::scatterlist,
    offset: u32,
    length: u32,
}

impl Entry {
    /// # Safety
    ///
    /// `sg` is valid.
    unsafe fn of(sg: *mut bindings::scatterlist) -> Self {
        // SAFETY: The caller promises that `sg` is valid.
        let (offset, length) = unsafe { ((*sg).offset, (*sg).length) };
        Self { sg, offset, length }
    }
}

/// Pages that peers may write to, still mapped.
///
/// # Invariants
///
/// - `count` entries from `first` on of the table of `_pages` are mapped for `device` in direction
///   `dir`.
/// - This is dropped when the MRs that may have the pages are gone, and before `device` is.
struct Exposed {
    _pages: Pages,
    device: *mut bindings::ib_device,
    first: *mut bindings::scatterlist,
    count: u32,
    dir: bindings::dma_data_direction,
}

// SAFETY: It is memory that nobody looks at, and DMA may be unmapped from any thread.
unsafe impl Send for Exposed {}

impl Drop for Exposed {
    fn drop(&mut self) {
        let mut table = bindings::sg_table {
            sgl: self.first,
            nents: self.count,
            orig_nents: self.count,
        };
        // SAFETY: By the type invariant the device is there, the entries are mapped for it in this
        // direction, and no key gives access to them any more.
        unsafe {
            bindings::rdma_helper_dma_unmap_sgtable(self.device, &raw mut table, self.dir);
        }
    }
}

// SAFETY: A transfer may be begun and end on any thread.
unsafe impl Send for Ctx {}
// SAFETY: What is not atomic has one user at a time by the invariants.
unsafe impl Sync for Ctx {}

impl Ctx {
    /// Makes transfers of these pages possible.
    pub fn new(pages: Pages) -> Self {
        // INVARIANT: Nothing is posted.
        Self {
            cqe: bindings::ib_cqe {
                done: Some(transferred),
            },
            state: Atomic::new(FREE),
            len: Atomic::new(pages.len()),
            own: UnsafeCell::new(Own {
                pages: Some(pages),
                raw: Default::default(),
                job: None,
            }),
        }
    }

    /// Returns the length of the pages, in bytes: zero when they are lost, see
    /// [`Qp::post_rw`](crate::qp::Qp::post_rw).
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len.load(Relaxed)
    }

    /// Lets the CPU see the bytes.
    pub fn cpu(&mut self) -> CpuPages<'_> {
        CpuPages::of(self.own.get_mut().pages.as_mut())
    }

    /// Maps the pages and makes the requests (`rdma_rw_ctx_init`). May sleep.
    ///
    /// # Safety
    ///
    /// The caller has set the state to `POSTED`. `qp` is valid and `transfers` counts for it.
    pub(super) unsafe fn start(
        &self,
        plan: &Plan,
        qp: NonNull<bindings::ib_qp>,
        transfers: &Transfers,
        user: *mut bindings::ib_cqe,
    ) -> Result {
        // SAFETY: The state makes this the only user.
        let own = unsafe { &mut *self.own.get() };
        let pages = own.pages.as_ref().ok_or(EINVAL)?;
        let Range { start, end } = plan.range;
        if start >= end || end > pages.len() {
            return Err(EINVAL);
        }
        // SAFETY: The caller promises that the QP is valid.
        let (sges, port) = unsafe {
            let qp = qp.as_ref();
            (qp.max_write_sge.min(qp.max_read_sge), qp.port)
        };
        // C divides by the number of entries that a request can have, and looks the port up.
        if sges == 0 || port == 0 {
            return Err(EINVAL);
        }
        // One entry a page, by the invariant of `Pages`.
        let (skipped, count) = (
            start / PAGE_SIZE,
            end.div_ceil(PAGE_SIZE) - start / PAGE_SIZE,
        );
        // SAFETY: The range is inside of the pages, so the list is long enough.
        let nth = |mut sg: *mut bindings::scatterlist, n: usize| unsafe {
            for _ in 0..n {
                sg = bindings::sg_next(sg);
            }
            sg
        };
        let first = nth(pages.table.sgl, skipped);
        let last = nth(first, count - 1);
        // SAFETY: The state makes this the only user of the list. C transfers all of an entry, so
        // the last one has to end where the range does. It would take an offset into the first one,
        // which siw then forgets (`siw_map_mr_sg()`).
        let ends = unsafe {
            let ends = [Entry::of(first), Entry::of(last)];
            let offset = (start % PAGE_SIZE) as u32;
            (*last).length = (end - (skipped + count - 1) * PAGE_SIZE) as u32;
            (*first).offset += offset;
            (*first).length -= offset;
            ends
        };
        own.job = Some(Job {
            user,
            transfers: NonNull::from(transfers),
            qp,
            port,
            dir: plan.dir,
            first,
            count: count as u32,
            exposed: false,
            ends,
        });
        // SAFETY: The QP is valid, and the list is as long as said and not mapped.
        let ret = unsafe {
            bindings::rdma_rw_ctx_init(
                &raw mut own.raw,
                qp.as_ptr(),
                port,
                first,
                count as u32,
                0,
                plan.remote.addr,
                plan.remote.rkey,
                plan.dir,
            )
        };
        if ret < 0 {
            if let Some(job) = own.job.take() {
                job.restore();
            }
            return Err(Error::from_errno(ret));
        }
        transfers.begin();
        Ok(())
    }

    /// Undoes [`Ctx::start`], and returns the callback of the owner (`rdma_rw_ctx_destroy`).
    /// `succeeded` says whether all of the transfer was done.
    ///
    /// On iWARP, where a READ writes to an MR that peers have the key of, only the READ that has
    /// succeeded has invalidated that (`IB_WR_RDMA_READ_WITH_INV`). `rdma_rw` keeps the MR all the
    /// same, for another transfer, until the QP is destroyed. So does the QP with the pages.
    ///
    /// Any context.
    ///
    /// # Safety
    ///
    /// No request of a transfer is outstanding, and nobody else uses this.
    pub(super) unsafe fn finish(&self, succeeded: bool) -> Option<*mut bindings::ib_cqe> {
        // SAFETY: The caller promises that nobody else uses this.
        let own = unsafe { &mut *self.own.get() };
        let job = own.job.take()?;
        let read = job.dir == bindings::dma_data_direction::DMA_FROM_DEVICE;
        let ended = !job.exposed || (succeeded && read);
        // SAFETY: The transfer was begun with these. The QP is not destroyed while it counts this
        // transfer. What has no entries is not unmapped.
        unsafe {
            let count = if ended { job.count } else { 0 };
            let (qp, port) = (job.qp.as_ptr(), job.port);
            bindings::rdma_rw_ctx_destroy(&raw mut own.raw, qp, port, job.first, count, job.dir);
        }
        job.restore();
        // SAFETY: The QP is not destroyed while it counts this transfer.
        let transfers = unsafe { job.transfers.as_ref() };
        if !ended {
            self.len.store(0, Relaxed);
            if let Some(pages) = own.pages.take() {
                // INVARIANT: As `rdma_rw_ctx_init` has mapped them. The QP drops them when it was
                // destroyed with its MRs, and before its PD.
                transfers.keep(Exposed {
                    _pages: pages,
                    // SAFETY: The QP is not destroyed while it counts this transfer.
                    device: unsafe { job.qp.as_ref() }.device,
                    first: job.first,
                    count: job.count,
                    dir: job.dir,
                });
            }
        }
        transfers.end();
        Some(job.user)
    }

    /// Undoes [`Ctx::start`], when nothing was posted.
    ///
    /// Any context.
    ///
    /// # Safety
    ///
    /// The transfer was begun, none of its requests was posted, and nobody else uses this.
    pub(super) unsafe fn cancel(&self) {
        // SAFETY: The caller promises that nobody else uses this.
        if let Some(job) = unsafe { &mut (*self.own.get()).job } {
            job.exposed = false;
        }
        // SAFETY: None of the transfer's requests was posted, so none is outstanding, and nobody
        // else uses this, as the caller promises.
        unsafe { self.finish(false) };
    }

    /// Returns the first of the requests, of which the last completes to this context, or is
    /// followed by `then` (`rdma_rw_ctx_wrs`).
    ///
    /// # Safety
    ///
    /// The transfer was begun, and nobody else uses this.
    pub(super) unsafe fn requests(
        &self,
        then: *mut bindings::ib_send_wr,
    ) -> *mut bindings::ib_send_wr {
        // SAFETY: The transfer was begun, so `own.raw` was made for this QP and port, and nobody
        // else uses it, as the caller promises. The callback is only read.
        unsafe {
            let own = &mut *self.own.get();
            let Some(job) = &mut own.job else { return then };
            let cqe = (&raw const self.cqe).cast_mut();
            let (qp, port) = (job.qp.as_ptr(), job.port);
            let first = bindings::rdma_rw_ctx_wrs(&raw mut own.raw, qp, port, cqe, then);
            // With an MR, the first registers it, or invalidates it before that.
            job.exposed = job.transfers.as_ref().iwarp
                && matches!(
                    (*first).opcode,
                    bindings::ib_wr_opcode_IB_WR_REG_MR | bindings::ib_wr_opcode_IB_WR_LOCAL_INV
                );
            first
        }
    }

    pub(super) fn claim(&self) -> Result {
        // INVARIANT: Whoever changes the state has the rest for himself.
        match self.state.cmpxchg(FREE, POSTED, Full) {
            Ok(_) => Ok(()),
            Err(_) => Err(EBUSY),
        }
    }

    pub(super) fn release(&self) {
        self.state.store(FREE, Release);
    }
}

impl Job {
    /// Makes the entries what they were.
    fn restore(&self) {
        for &Entry { sg, offset, length } in &self.ends {
            // SAFETY: The entry is one of the context's, which nobody else uses.
            unsafe {
                (*sg).offset = offset;
                (*sg).length = length;
            }
        }
    }
}

impl Drop for Ctx {
    fn drop(&mut self) {
        // SAFETY: Whoever drops this owns it, so no request is outstanding: what is posted is the
        // queue's, and what was posted in part is the QP's until it was drained.
        unsafe { self.finish(false) };
    }
}

/// The `done` callback of every transfer.
///
/// # Safety
///
/// Called by the RDMA core for the last request of a transfer.
unsafe extern "C" fn transferred(cq: *mut bindings::ib_cq, wc: *mut bindings::ib_wc) {
    // SAFETY: `wc` is valid during this call. The request was posted with the address of a
    // context's first field; its owner keeps the context until its callback has it back. This is
    // the last request, so none is outstanding.
    unsafe {
        let ctx = &*(*(*wc).__bindgen_anon_1.wr_cqe).cast_const().cast::<Ctx>();
        if let Some(user) = ctx.finish((*wc).status == bindings::ib_wc_status_IB_WC_SUCCESS) {
            ctx.release();
            hand_on(user, cq, wc);
        }
    }
}
