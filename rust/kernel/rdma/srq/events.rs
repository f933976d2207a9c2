// SPDX-License-Identifier: GPL-2.0

//! Events of an SRQ.

use crate::{
    bindings,
    device::Name, //
};
use kernel::prelude::*;

/// What happens to an SRQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Fewer receives are posted than the limit that was armed says
    /// (`IB_EVENT_SRQ_LIMIT_REACHED`).
    LimitReached,
    /// The SRQ has failed and receives nothing any more (`IB_EVENT_SRQ_ERR`). This is reported in
    /// the log, too.
    Failed,
}

type Function = dyn Fn(Event) + Send + Sync;

/// Who is told of the events of an SRQ.
pub(super) struct Events(Option<KBox<Function>>);

impl Events {
    pub(super) const fn none() -> Self {
        Self(None)
    }

    pub(super) fn new(function: impl Fn(Event) + Send + Sync + 'static) -> Result<Self> {
        Ok(Self(Some(
            KBox::new(function, GFP_KERNEL)? as KBox<Function>
        )))
    }
}

/// The `event_handler` of every SRQ.
///
/// # Safety
///
/// Called by the driver, with the SRQ's context, which is an [`Events`].
pub(super) unsafe extern "C" fn event(event: *mut bindings::ib_event, context: *mut c_void) {
    // SAFETY: Both are valid during this call.
    let (kind, device, events) =
        unsafe { ((*event).event, (*event).device, &*context.cast::<Events>()) };
    let event = match kind {
        bindings::ib_event_type_IB_EVENT_SRQ_LIMIT_REACHED => Event::LimitReached,
        bindings::ib_event_type_IB_EVENT_SRQ_ERR => {
            // SAFETY: An event comes from a device that is there.
            pr_err!("{}: an SRQ has failed\n", unsafe { Name::of(device) });
            Event::Failed
        }
        _ => return,
    };
    if let Some(function) = &events.0 {
        function(event);
    }
}
