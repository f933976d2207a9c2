// SPDX-License-Identifier: GPL-2.0

//! What hardware would do by an interrupt: a work item in softirq context calls the CQ's handlers.

use core::{
    mem::{
        offset_of,
        ManuallyDrop, //
    },
    ptr::NonNull, //
};
use kernel::{
    prelude::*,
    static_lock_class,
    sync::atomic::{
        ordering::{
            Full,
            Release, //
        },
        Atomic, //
    },
    types::Opaque, //
};
use rdma_bindings as bindings;

/// The driver's part of a CQ that concerns interrupts.
#[repr(C)]
pub(crate) struct Line {
    /// The workqueue changes it while others have a reference to the line.
    work: Opaque<bindings::work_struct>,
    /// Whether the handler of completions is to be called.
    completed: Atomic<u32>,
    /// Whether `IB_EVENT_CQ_ERR` is to be raised.
    failed: Atomic<u32>,
    cq: *mut bindings::ib_cq,
}

/// Raises the interrupt of a CQ.
///
/// # Invariants
///
/// The line is initialised, and stays until [`stop`] was called on it, before which whoever owns
/// this has stopped to raise it.
pub(crate) struct Irq(NonNull<Line>);

// SAFETY: Work may be queued from any thread.
unsafe impl Send for Irq {}

impl Irq {
    /// Prepares a line.
    ///
    /// # Safety
    ///
    /// `line` is memory for a line, pinned, of the valid `cq`; the invariant of the type is the
    /// caller's to keep.
    pub(crate) unsafe fn new(line: *mut Line, cq: *mut bindings::ib_cq) -> Result<Self> {
        // SAFETY: The caller says that this is memory for a line, which nobody else uses yet.
        unsafe {
            (&raw mut (*line).completed).write(Atomic::new(0));
            (&raw mut (*line).failed).write(Atomic::new(0));
            (&raw mut (*line).cq).write(cq);
            bindings::init_work_with_key(
                Opaque::cast_into(&raw const (*line).work),
                Some(interrupt),
                false,
                c"rdma_null".as_char_ptr(),
                static_lock_class!().as_ptr(),
            );
        }
        // INVARIANT: The line was just initialised, and the caller keeps the rest.
        Ok(Self(NonNull::new(line).ok_or(EINVAL)?))
    }

    /// Has the handler of completions called.
    #[inline]
    pub(crate) fn complete(&self) {
        self.line().completed.store(1, Release);
        self.queue();
    }

    /// Has the handler of events called.
    pub(crate) fn fail(&self) {
        self.line().failed.store(1, Release);
        self.queue();
    }

    fn line(&self) -> &Line {
        // SAFETY: The line is initialised and stays by the type invariant; what changes in it is
        // atomic or opaque.
        unsafe { self.0.as_ref() }
    }

    fn queue(&self) {
        // SAFETY: The line is initialised and stays by the type invariant.
        unsafe {
            bindings::queue_work_on(
                bindings::wq_misc_consts_WORK_CPU_UNBOUND as c_int,
                bindings::system_bh_wq,
                Opaque::cast_into(&raw const (*self.0.as_ptr()).work),
            )
        };
    }
}

/// Waits until no handler runs.
///
/// # Safety
///
/// The line is initialised, and not raised any more.
pub(crate) unsafe fn stop(line: *mut Line) {
    // SAFETY: The caller says that the work is initialised, and that nobody queues it any more.
    unsafe { bindings::cancel_work_sync(Opaque::cast_into(&raw const (*line).work)) };
}

/// # Safety
///
/// Called by the workqueue with the work of a line.
unsafe extern "C" fn interrupt(work: *mut bindings::work_struct) {
    // SAFETY: The work is that of a line, which `stop` keeps until this has returned.
    let (line, cq) = unsafe {
        let line = work.byte_sub(offset_of!(Line, work)).cast::<Line>();
        (&*line, (*line).cq)
    };
    // SAFETY: The line is a part of the CQ, which is freed only after `stop` has returned.
    let (device, context, comp, event) = unsafe {
        (
            (*cq).device,
            (*cq).cq_context,
            (*cq).comp_handler,
            (*cq).event_handler,
        )
    };
    if line.failed.xchg(0, Full) != 0 {
        if let Some(handler) = event {
            let mut event = bindings::ib_event {
                device,
                element: bindings::ib_event__bindgen_ty_1 {
                    cq: ManuallyDrop::new(cq),
                },
                event: bindings::ib_event_type_IB_EVENT_CQ_ERR,
            };
            // SAFETY: The consumer's handler, called with an event of the CQ and its context.
            unsafe { handler(&raw mut event, context) };
        }
    }
    if line.completed.xchg(0, Full) == 0 {
        return;
    }
    if let Some(handler) = comp {
        // SAFETY: The consumer's handler, called in softirq context with the CQ and its context.
        unsafe { handler(cq, context) };
    }
}
