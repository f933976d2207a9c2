// SPDX-License-Identifier: GPL-2.0

//! ULPs: what is told when devices come and go.
//!
//! A ULP implements [`Client`] and is made a module by
//! [`module_rdma_client!`](crate::module_rdma_client). The framework owns the registration, so no
//! code can leak it. When the module is unloaded, every device is removed from the ULP first: its
//! [`DeviceData`] lets go, connections that are still there are ended, and the removal waits until
//! no object of the device is left. Then the [`Client`] is dropped, and at last the unload waits
//! until what is left of listeners, ids and work items is gone.
//!
//! C header: [`include/rdma/ib_verbs.h`](srctree/include/rdma/ib_verbs.h) (`struct ib_client`)

mod handle;
mod module;
mod registration;

pub use handle::ClientRef;
pub(crate) use handle::Core;
#[doc(hidden)]
pub use registration::{
    Owned,
    Registration,
    Slot, //
};

/// The crates that the macros mean, under names that a ULP cannot take over.
#[doc(hidden)]
pub mod crates {
    pub use ::{
        core,
        kernel,
        pin_init, //
    };
}

use crate::{
    context::Sleepable,
    device::{
        Device,
        Event, //
    }, //
};
use kernel::prelude::*;

/// An upper-layer protocol, as `struct ib_client`.
pub trait Client: Sized + Send + Sync + 'static {
    /// What the ULP keeps for each device, if anything: `()`.
    type Data: DeviceData<Self>;

    /// Makes the ULP's state when the module is loaded, before any device is known.
    ///
    /// Keep a clone of `client` to create connection manager ids with.
    fn init(client: &ClientRef) -> impl PinInit<Self, Error>;

    /// Called once all devices that are present have been added. An error ends the loading of the
    /// module.
    ///
    /// Called in process context.
    fn ready(self: Pin<&Self>, _client: &ClientRef, _cx: &Sleepable) -> Result {
        Ok(())
    }
}

/// What a ULP keeps for one device, from the device's coming to its going.
pub trait DeviceData<C: Client>: Sized + Send + Sync + 'static {
    /// A device has come (`ib_client.add`). An error leaves the device unused; it is reported.
    ///
    /// Called in process context, with the RDMA core's device and client locks held: create PDs,
    /// CQs and the like here, but wait for no other device or connection.
    fn add(client: Pin<&C>, dev: &Device, cx: &Sleepable) -> impl PinInit<Self, Error>;

    /// The device goes (`ib_client.remove`): let go of everything that uses it.
    ///
    /// Called in process context. Before this call, everybody who waits for a CQ, a MAD or a
    /// connection of the device gets `ENODEV`, and from then on nobody waits and new connections
    /// are refused. After it returns, MAD agents and connections end, the client lets go of `self`,
    /// and the removal waits until the last handle of the device is gone.
    fn remove(self: Pin<&Self>, _client: Pin<&C>, _dev: &Device, _cx: &Sleepable) {}

    /// Something happened to the device or one of its ports (`ib_register_event_handler`).
    ///
    /// Called in process context, after `add` has returned and never once `remove` has been called;
    /// removal waits for the end of the call, in which waits for the device fail by then. Other
    /// events of the device wait too, and with [`Event::GidChange`] all updates of the port's GIDs,
    /// whose mutex is held: leave what takes long to [`ClientRef::spawn`].
    fn event(self: Pin<&Self>, _client: Pin<&C>, _dev: &Device, _event: Event, _cx: &Sleepable) {}
}

impl<C: Client> DeviceData<C> for () {
    fn add(_client: Pin<&C>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        Ok::<(), Error>(())
    }
}
