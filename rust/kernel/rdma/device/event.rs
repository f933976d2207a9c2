// SPDX-License-Identifier: GPL-2.0

//! Events of devices and ports.

use super::Inner;
use crate::{
    bindings,
    removal::Step, //
};
use core::ptr::NonNull;
use kernel::{
    container_of,
    fmt,
    prelude::*,
    str::CStr,
    types::Opaque, //
};

/// What happened to a device or one of its ports, as `struct ib_event`.
///
/// What happens to a queue is told to its owner. Can be printed (`ib_event_msg`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The device has failed, and will not work again (`IB_EVENT_DEVICE_FATAL`).
    DeviceFatal,
    /// The link of this port is there (`IB_EVENT_PORT_ACTIVE`).
    PortActive(u32),
    /// The link of this port is gone (`IB_EVENT_PORT_ERR`).
    PortError(u32),
    /// This port has another LID (`IB_EVENT_LID_CHANGE`).
    LidChange(u32),
    /// The P_Key table of this port has changed (`IB_EVENT_PKEY_CHANGE`).
    PkeyChange(u32),
    /// The GID table of this port has changed (`IB_EVENT_GID_CHANGE`).
    GidChange(u32),
    /// The subnet of this port has another manager (`IB_EVENT_SM_CHANGE`).
    SmChange(u32),
    /// The subnet manager of this port asks clients to register again
    /// (`IB_EVENT_CLIENT_REREGISTER`).
    ClientReregister(u32),
    /// Anything else, by its C value.
    Other(u32),
}

impl Event {
    pub(crate) fn from_raw(raw: &bindings::ib_event) -> Self {
        // SAFETY: Any value is one of this member, and it is the one that events of ports have set.
        let port = || unsafe { *raw.element.port_num };
        match raw.event {
            bindings::ib_event_type_IB_EVENT_DEVICE_FATAL => Self::DeviceFatal,
            bindings::ib_event_type_IB_EVENT_PORT_ACTIVE => Self::PortActive(port()),
            bindings::ib_event_type_IB_EVENT_PORT_ERR => Self::PortError(port()),
            bindings::ib_event_type_IB_EVENT_LID_CHANGE => Self::LidChange(port()),
            bindings::ib_event_type_IB_EVENT_PKEY_CHANGE => Self::PkeyChange(port()),
            bindings::ib_event_type_IB_EVENT_GID_CHANGE => Self::GidChange(port()),
            bindings::ib_event_type_IB_EVENT_SM_CHANGE => Self::SmChange(port()),
            bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER => Self::ClientReregister(port()),
            other => Self::Other(other),
        }
    }

    fn raw(&self) -> bindings::ib_event_type {
        match *self {
            Self::DeviceFatal => bindings::ib_event_type_IB_EVENT_DEVICE_FATAL,
            Self::PortActive(_) => bindings::ib_event_type_IB_EVENT_PORT_ACTIVE,
            Self::PortError(_) => bindings::ib_event_type_IB_EVENT_PORT_ERR,
            Self::LidChange(_) => bindings::ib_event_type_IB_EVENT_LID_CHANGE,
            Self::PkeyChange(_) => bindings::ib_event_type_IB_EVENT_PKEY_CHANGE,
            Self::GidChange(_) => bindings::ib_event_type_IB_EVENT_GID_CHANGE,
            Self::SmChange(_) => bindings::ib_event_type_IB_EVENT_SM_CHANGE,
            Self::ClientReregister(_) => bindings::ib_event_type_IB_EVENT_CLIENT_REREGISTER,
            Self::Other(raw) => raw,
        }
    }

    /// Returns the number of the port, if the event is one of a port.
    pub fn port(&self) -> Option<u32> {
        match *self {
            Self::DeviceFatal | Self::Other(_) => None,
            Self::PortActive(port)
            | Self::PortError(port)
            | Self::LidChange(port)
            | Self::PkeyChange(port)
            | Self::GidChange(port)
            | Self::SmChange(port)
            | Self::ClientReregister(port) => Some(port),
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: The function returns a string that is never freed, for any value.
        let text = unsafe { CStr::from_char_ptr(bindings::ib_event_msg(self.raw())) };
        fmt::Display::fmt(text, f)?;
        match self.port() {
            Some(port) => f.write_fmt(fmt!(", port {port}")),
            None => Ok(()),
        }
    }
}

/// A C function that is told of events.
type Handler = unsafe extern "C" fn(*mut bindings::ib_event_handler, *mut bindings::ib_event);

impl Inner {
    /// Has `handler` told of the device's events (`ib_register_event_handler`).
    ///
    /// # Safety
    ///
    /// To be called once, and [`Inner::unwatch`] before `self` goes or moves.
    pub(crate) unsafe fn watch(&self, handler: Handler) {
        let events = self.events.get();
        // SAFETY: The caller calls this once, so nobody else uses `events` yet; it has its device
        // since `Inner::new`, and stays in place until the caller has called `unwatch`.
        unsafe {
            (*events).handler = Some(handler);
            bindings::ib_register_event_handler(events);
        }
    }

    /// Ends [`Inner::watch`], and waits for a call that has begun (`ib_unregister_event_handler`).
    ///
    /// # Safety
    ///
    /// To be called once, after [`Inner::watch`], in process context and not by the handler.
    #[inline(never)]
    pub(crate) unsafe fn unwatch(self: Pin<&Self>) {
        self.progress().during(Step::Event, &mut || {
            // SAFETY: The caller says that `watch` has registered it, that this is the only end of
            // that, and that it may sleep.
            unsafe { bindings::ib_unregister_event_handler(self.events.get()) };
        });
    }

    /// Returns what a handler belongs to.
    ///
    /// # Safety
    ///
    /// The handler is one that [`Inner::watch`] has registered.
    pub(crate) unsafe fn of_handler(handler: *mut bindings::ib_event_handler) -> NonNull<Self> {
        let events: *mut Opaque<bindings::ib_event_handler> = handler.cast();
        // SAFETY: `watch` registers the field `events` of an `Inner`, and the caller says that this
        // is one that it has registered.
        unsafe { NonNull::new_unchecked(container_of!(events, Self, events)) }
    }
}
