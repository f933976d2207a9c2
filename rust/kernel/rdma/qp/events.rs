// SPDX-License-Identifier: GPL-2.0

//! Events of QPs.

use super::{
    parked::Parked,
    transfers::Transfers, //
};
use crate::{
    bindings,
    context::{
        self,
        Context, //
    }, //
};
use kernel::{
    fmt,
    new_mutex,
    new_spinlock_irq,
    prelude::*,
    str::CStr,
    sync::{
        Arc,
        Mutex,
        SpinLockIrq, //
    }, //
};

/// Something that has happened to a QP, as `enum ib_event_type`. It can be printed
/// (`ib_event_msg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event(bindings::ib_event_type);

macro_rules! events {
    ($($(#[$doc:meta])* $name:ident = $raw:ident;)*) => {
        impl Event {
            $($(#[$doc])* pub const $name: Self = Self(bindings::$raw);)*
        }
    };
}

events! {
    /// The QP has failed and is in the error state.
    FATAL = ib_event_type_IB_EVENT_QP_FATAL;
    /// The peer has sent what makes no sense, and the QP is in the error state.
    REQUEST_ERROR = ib_event_type_IB_EVENT_QP_REQ_ERR;
    /// The peer has asked for memory that it may not access, and the QP is in the error state.
    ACCESS_ERROR = ib_event_type_IB_EVENT_QP_ACCESS_ERR;
    /// A message has arrived before the connection was told to be established.
    COMM_EST = ib_event_type_IB_EVENT_COMM_EST;
    /// The send queue is drained: see [`Attr::sqd_notify`](super::Attr::sqd_notify).
    SQ_DRAINED = ib_event_type_IB_EVENT_SQ_DRAINED;
    /// The QP has moved to its alternate path.
    PATH_MIGRATED = ib_event_type_IB_EVENT_PATH_MIG;
    /// The QP could not move to its alternate path.
    PATH_MIGRATION_ERROR = ib_event_type_IB_EVENT_PATH_MIG_ERR;
    /// The QP is in the error state and takes nothing more from its shared receive queue.
    LAST_WQE_REACHED = ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED;
}

impl Event {
    /// Returns the C value.
    pub fn as_raw(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: The function takes any value and returns a string that lives for ever.
        let text = unsafe { CStr::from_char_ptr(bindings::ib_event_msg(self.0)) };
        fmt::Display::fmt(text, f)
    }
}

/// What is told of the events of a QP (`ib_qp_init_attr.event_handler`).
///
/// The QP keeps it until the QP is destroyed, so it must not own the QP.
pub trait Events: Send + Sync + 'static {
    /// Something has happened to the QP of this number.
    ///
    /// Any context; events may come at the same time, and the first before the creation of the QP
    /// returns. To [`Event::COMM_EST`] the answer is
    /// [`Id::notify_established_later`](crate::cm::Id::notify_established_later).
    fn event(&self, event: Event, qp_num: u32, cx: &context::Atomic);
}

/// What the crate keeps for a QP besides C's own, as its `qp_context`.
#[pin_data]
pub(super) struct QpContext {
    /// Held while the QP is modified: see [`Modifier`](super::modify::Modifier).
    #[pin]
    pub(super) modifying: Mutex<()>,
    /// Held while registrations of shared regions are posted: see [`Qp::turn`](super::Qp::turn).
    #[pin]
    pub(super) turn: SpinLockIrq<()>,
    pub(super) parked: Parked,
    pub(super) transfers: Transfers,
    events: Option<Arc<dyn Events>>,
}

impl QpContext {
    /// Never inlined, so that all QPs give a lock one name, as lockdep wants it.
    #[inline(never)]
    pub(super) fn new(events: Option<Arc<dyn Events>>, iwarp: bool) -> Result<Pin<KBox<Self>>> {
        let init = pin_init!(Self {
            modifying <- new_mutex!(()),
            turn <- new_spinlock_irq!((), "rdma::Qp::turn"),
            parked: Parked::new(),
            transfers: Transfers::new(iwarp),
            events,
        });
        KBox::pin_init(init, GFP_KERNEL)
    }

    /// Has the QP that is created from these attributes tell this context of its events.
    pub(super) fn install(&self, attr: &mut bindings::ib_qp_init_attr) {
        if self.events.is_some() {
            attr.event_handler = Some(on_event);
            attr.qp_context = core::ptr::from_ref(self).cast_mut().cast();
        }
    }
}

/// `ib_qp_init_attr.event_handler`.
///
/// # Safety
///
/// Called by the RDMA core for a QP whose context is a [`QpContext`].
unsafe extern "C" fn on_event(event: *mut bindings::ib_event, context: *mut c_void) {
    // SAFETY: The context lives until the QP is destroyed, which waits for this callback.
    let context = unsafe { &*context.cast::<QpContext>() };
    // SAFETY: The event is valid during this call, and one of a QP.
    let (event, num) = unsafe { (Event((*event).event), (**(*event).element.qp).qp_num) };
    // SAFETY: Every context allows what this token does.
    let cx = unsafe { context::Atomic::assume() };
    if let Some(events) = &context.events {
        events.event(event, num, &cx);
    }
}
