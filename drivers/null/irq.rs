// SPDX-License-Identifier: GPL-2.0

//! Interrupts of CQs: a work item in softirq context calls the handlers.

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

/// The work item of a CQ.
#[repr(C)]
pub(crate) struct CqWork {
    /// The workqueue changes it while there are references to the structure.
    work: Opaque<bindings::work_struct>,
    /// Not 0 if `comp_handler` is to be called.
    completed: Atomic<u32>,
    /// Not 0 if `IB_EVENT_CQ_ERR` is to be raised.
    failed: Atomic<u32>,
    cq: *mut bindings::ib_cq,
}

/// Raises the interrupt of a CQ.
///
/// # Invariants
///
/// The work is initialised, and stays until [`stop`] was called on it. The owner of this raises no
/// interrupt after that.
pub(crate) struct Irq(NonNull<CqWork>);

// SAFETY: By the type invariant the work is initialised, and any thread may queue it.
unsafe impl Send for Irq {}

impl Irq {
    /// Initialises a work item.
    ///
    /// # Safety
    ///
    /// `work` is pinned memory for the work item of the valid `cq`, and the caller upholds the
    /// invariant of the type.
    pub(crate) unsafe fn new(work: *mut CqWork, cq: *mut bindings::ib_cq) -> Result<Self> {
        // SAFETY: The caller promises that this is memory for a work item, which is not in use yet.
        unsafe {
            (&raw mut (*work).completed).write(Atomic::new(0));
            (&raw mut (*work).failed).write(Atomic::new(0));
            (&raw mut (*work).cq).write(cq);
            bindings::init_work_with_key(
                Opaque::cast_into(&raw const (*work).work),
                Some(interrupt),
                false,
                c"rdma_null".as_char_ptr(),
                static_lock_class!().as_ptr(),
            );
        }
        // INVARIANT: The work was just initialised, and the caller upholds the rest.
        Ok(Self(NonNull::new(work).ok_or(EINVAL)?))
    }

    /// Calls the handler of completions, from the work item.
    #[inline]
    pub(crate) fn complete(&self) {
        self.work().completed.store(1, Release);
        self.queue();
    }

    /// Calls the handler of events, from the work item.
    pub(crate) fn fail(&self) {
        self.work().failed.store(1, Release);
        self.queue();
    }

    fn work(&self) -> &CqWork {
        // SAFETY: The work is initialised and stays by the type invariant; its fields that change
        // are atomic or opaque.
        unsafe { self.0.as_ref() }
    }

    fn queue(&self) {
        // SAFETY: The work is initialised and stays by the type invariant.
        unsafe {
            bindings::queue_work_on(
                bindings::wq_misc_consts_WORK_CPU_UNBOUND as c_int,
                bindings::system_bh_wq,
                Opaque::cast_into(&raw const (*self.0.as_ptr()).work),
            )
        };
    }
}

/// Waits until the handlers have returned.
///
/// # Safety
///
/// The work is initialised, and no longer queued.
pub(crate) unsafe fn stop(work: *mut CqWork) {
    // SAFETY: The caller promises that the work is initialised and is no longer queued.
    unsafe { bindings::cancel_work_sync(Opaque::cast_into(&raw const (*work).work)) };
}

/// # Safety
///
/// Called by the workqueue with the `work` of a [`CqWork`].
unsafe extern "C" fn interrupt(work: *mut bindings::work_struct) {
    // SAFETY: The work is that of a `CqWork`, which stays until `stop` has waited for this.
    let (pending, cq) = unsafe {
        let pending = work.byte_sub(offset_of!(CqWork, work)).cast::<CqWork>();
        (&*pending, (*pending).cq)
    };
    // SAFETY: The work is a part of the CQ, which is freed only after `stop` has returned.
    let (device, context, comp, event) = unsafe {
        (
            (*cq).device,
            (*cq).cq_context,
            (*cq).comp_handler,
            (*cq).event_handler,
        )
    };
    if pending.failed.xchg(0, Full) != 0 {
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
    if pending.completed.xchg(0, Full) == 0 {
        return;
    }
    if let Some(handler) = comp {
        // SAFETY: The consumer's handler, called in softirq context with the CQ and its context.
        unsafe { handler(cq, context) };
    }
}
