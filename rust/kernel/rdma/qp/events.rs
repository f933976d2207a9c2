// SPDX-License-Identifier: GPL-2.0

//! What happens to a QP besides the completions of its requests.

use super::QpPriv;
use crate::{
    context,
    prelude::internal::*,
    wc, //
};

wc::named_values! {
    /// Something that has happened to a QP, as `enum ib_event_type`. It prints the text that C has
    /// for it (`ib_event_msg`).
    Event(ib_event_type), ib_event_msg;

    /// The QP has failed and is in the error state.
    FATAL = ib_event_type_IB_EVENT_QP_FATAL,
    /// The peer has sent what makes no sense, and the QP is in the error state.
    REQUEST_ERROR = ib_event_type_IB_EVENT_QP_REQ_ERR,
    /// The peer has asked for memory that it may not access, and the QP is in the error state.
    ACCESS_ERROR = ib_event_type_IB_EVENT_QP_ACCESS_ERR,
    /// A message has arrived before the connection was told to be established.
    COMM_EST = ib_event_type_IB_EVENT_COMM_EST,
    /// The QP is in the error state and takes nothing more from its shared receive queue.
    LAST_WQE_REACHED = ib_event_type_IB_EVENT_QP_LAST_WQE_REACHED,
}

/// The handler of the events of a QP (`ib_qp_init_attr.event_handler`), which it must not own.
///
/// # Examples
///
/// ```
/// # use rdma::{context::*, cq::Cq, pd::Pd, qp::*};
/// # use kernel::sync::{Arc, ArcBorrow};
/// struct Log;
///
/// impl Events for Log {
///     fn event(self: ArcBorrow<'_, Self>, event: Event, qp_num: u32, _cx: &Atomic) {
///         pr_info!("QP {qp_num}: {event} ({})\n", event.as_raw());
///     }
/// }
///
/// fn create(pd: &Pd, cq: &Cq<Softirq>, cx: &Sleepable) -> Result<Qp<Softirq>> {
///     let log = Arc::new(Log, GFP_KERNEL)?;
///     InitAttr::new(pd, cq, cq, &Caps::new(16, 16)).events(log).create(cx)
/// }
/// ```
pub trait Events: Send + Sync + 'static {
    /// Something has happened to the QP of this number. Any context; events may come at the same
    /// time, and the first before the creation of the QP returns. A handler answers
    /// [`Event::COMM_EST`] by [`Id::notify_established`](crate::cm::Id::notify_established). A work
    /// item that is started here gets a reference by `Arc::from(self)`.
    fn event(self: ArcBorrow<'_, Self>, event: Event, qp_num: u32, cx: &context::Atomic);
}

/// `ib_qp_init_attr.event_handler`.
///
/// # Safety
///
/// Called by the RDMA core for a QP whose context is a [`QpPriv`], with an event of that QP.
pub(super) unsafe extern "C" fn on_event(event: *mut bindings::ib_event, context: *mut c_void) {
    // SAFETY: The context lives until the QP is destroyed, which waits for this callback.
    let context = unsafe { &*context.cast::<QpPriv>() };
    // SAFETY: The event is valid during this call, and one of a QP, as the caller promises.
    let (event, num) = unsafe { (Event((*event).event), (**(*event).element.qp).qp_num) };
    // SAFETY: Every context allows what this token does.
    let cx = unsafe { context::Atomic::assume() };
    if let Some(events) = &context.events {
        events.as_arc_borrow().event(event, num, &cx);
    }
}
