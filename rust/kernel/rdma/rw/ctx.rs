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
/// While `state` is `POSTED`, the post that has set it and then the completion have `own` and the
/// scatter list of `pages` for themselves, and this stays where it is. From a successful
/// `Ctx::start` to `Ctx::finish`, `own.job` is what was begun, counted by its QP.
#[repr(C)]
pub struct Ctx {
    /// What the last request completes to. The first field, to get back from it.
    pub(super) cqe: bindings::ib_cqe,
    state: Atomic<u32>,
    own: UnsafeCell<Own>,
    pages: Pages,
}

struct Own {
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
    /// The last entry, and how long it was before it was made to end with the range.
    last: (*mut bindings::scatterlist, u32),
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
            own: UnsafeCell::new(Own {
                raw: Default::default(),
                job: None,
            }),
            pages,
        }
    }

    /// Returns the length of the pages, in bytes.
    #[expect(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Lets the CPU see the bytes.
    pub fn cpu(&mut self) -> CpuPages<'_> {
        self.pages.cpu()
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
        let Range { start, end } = plan.range;
        if start >= end || end > self.pages.len() {
            return Err(EINVAL);
        }
        // SAFETY: The QP is valid.
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
        let first = nth(self.pages.table.sgl, skipped);
        let last = nth(first, count - 1);
        // SAFETY: The state makes this the only user of the list and of `own`. C transfers all of
        // an entry, so the last one has to end where the range does.
        let own = unsafe {
            let len = (*last).length;
            (*last).length = (end - (skipped + count - 1) * PAGE_SIZE) as u32;
            let own = &mut *self.own.get();
            own.job = Some(Job {
                user,
                transfers: NonNull::from(transfers),
                qp,
                port,
                dir: plan.dir,
                first,
                count: count as u32,
                last: (last, len),
            });
            own
        };
        // SAFETY: The QP is valid, the list is as long as said, not mapped, and its first entry is
        // longer than the offset.
        let ret = unsafe {
            bindings::rdma_rw_ctx_init(
                &raw mut own.raw,
                qp.as_ptr(),
                port,
                first,
                count as u32,
                (start % PAGE_SIZE) as u32,
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
    ///
    /// Any context.
    ///
    /// # Safety
    ///
    /// The transfer was begun and has no request outstanding, and nobody else uses this.
    pub(super) unsafe fn finish(&self) -> Option<*mut bindings::ib_cqe> {
        // SAFETY: By the caller's promise this is the only user. The QP is not destroyed while it
        // counts this transfer.
        unsafe {
            let own = &mut *self.own.get();
            let job = own.job.take()?;
            bindings::rdma_rw_ctx_destroy(
                &raw mut own.raw,
                job.qp.as_ptr(),
                job.port,
                job.first,
                job.count,
                job.dir,
            );
            job.restore();
            job.transfers.as_ref().end();
            Some(job.user)
        }
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
        // SAFETY: By the caller's promise. The callback is only read.
        unsafe {
            let own = &mut *self.own.get();
            let Some(job) = &own.job else { return then };
            let cqe = (&raw const self.cqe).cast_mut();
            bindings::rdma_rw_ctx_wrs(&raw mut own.raw, job.qp.as_ptr(), job.port, cqe, then)
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
    /// Gives the last entry its length back.
    fn restore(&self) {
        let (sg, len) = self.last;
        // SAFETY: The entry is one of the context's, which nobody else uses.
        unsafe { (*sg).length = len };
    }
}

impl Drop for Ctx {
    fn drop(&mut self) {
        // SAFETY: Whoever drops this owns it, so no request is outstanding: what is posted is the
        // queue's, and what was posted in part is the QP's until it was drained.
        unsafe { self.finish() };
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
        if let Some(user) = ctx.finish() {
            ctx.release();
            hand_on(user, cq, wc);
        }
    }
}
