// SPDX-License-Identifier: GPL-2.0

//! What is told of a CQ: that completions come, that it has failed, that its device goes.

use crate::{
    bindings,
    device::Name,
    removal::OnRemoval, //
};
use kernel::{
    new_condvar,
    new_spinlock_irq,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Arc,
        CondVar,
        SpinLockIrq, //
    }, //
};

/// What is waited for.
pub(super) struct Events {
    /// How often the driver has said that completions come.
    pub(super) completions: u32,
    /// Whether the device is being removed.
    pub(super) gone: bool,
}

/// The context of a CQ's C callbacks.
#[pin_data]
pub(crate) struct Watch {
    failed: Atomic<bool>,
    #[pin]
    pub(super) events: SpinLockIrq<Events>,
    #[pin]
    pub(super) changed: CondVar,
}

impl Watch {
    /// Never inlined, so that all modules give the lock one name, as lockdep wants it.
    #[inline(never)]
    pub(super) fn new() -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            failed: Atomic::new(false),
            events <- new_spinlock_irq!(Events {
                completions: 0,
                gone: false,
            }),
            changed <- new_condvar!(),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    #[inline]
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Relaxed)
    }
}

impl OnRemoval for Watch {
    fn gone(self: Arc<Self>) {
        self.events.lock().gone = true;
        self.changed.notify_all();
    }
}

/// `ib_cq.comp_handler` of a CQ that can be waited for.
///
/// # Safety
///
/// Called by the driver, in any context, with the [`Watch`] of a CQ that is not destroyed.
pub(super) unsafe extern "C" fn completed(_cq: *mut bindings::ib_cq, watch: *mut c_void) {
    // SAFETY: The watch outlives its CQ.
    let watch = unsafe { &*watch.cast::<Watch>() };
    {
        let mut events = watch.events.lock();
        events.completions = events.completions.wrapping_add(1);
    }
    watch.changed.notify_all();
}

/// `ib_cq.event_handler`.
///
/// # Safety
///
/// Called by the driver, in any context, with an event that is valid during the call, and with the
/// [`Watch`] of a CQ that is not destroyed.
pub(super) unsafe extern "C" fn event(event: *mut bindings::ib_event, watch: *mut c_void) {
    // SAFETY: The event is valid during this call, as the caller promises, and the watch outlives
    // its CQ.
    let (event, watch) = unsafe { (&*event, &*watch.cast::<Watch>()) };
    if event.event != bindings::ib_event_type_IB_EVENT_CQ_ERR || watch.failed.xchg(true, Full) {
        return;
    }
    // SAFETY: A device that has a CQ is there.
    let device = unsafe { Name::of(event.device) };
    pr_err!("{device}: a CQ was overrun or failed: completions are lost\n");
    // Taking the lock makes those who have looked before wait in time.
    drop(watch.events.lock());
    watch.changed.notify_all();
}
