// SPDX-License-Identifier: GPL-2.0

//! Which devices may be used, and which connections are there.
//!
//! The removal of a device and of the module wait until all that uses them is gone. So that it goes,
//! every connection is found here, from before it uses a device to its end.

use crate::{
    control::Control,
    instance::Instance,
    reason::Reason, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};
use rdma::prelude::*;

/// How many connections an instance may have at once.
const MAX_CONNECTIONS: usize = 256;

struct Lists {
    devices: KVec<Device>,
    connections: KVec<Arc<Control>>,
}

#[pin_data]
pub(crate) struct Registry {
    pub(crate) client: ClientRef,
    #[pin]
    lists: Mutex<Lists>,
}

impl Registry {
    pub(crate) fn new(client: ClientRef) -> Result<Arc<Self>> {
        let init = pin_init!(Self {
            client,
            lists <- new_mutex!(Lists {
                devices: KVec::new(),
                connections: KVec::new(),
            }),
        });
        Arc::pin_init(init, GFP_KERNEL)
    }

    pub(crate) fn add_device(&self, dev: &Device) -> Result {
        Ok(self.lists.lock().devices.push(dev.clone(), GFP_KERNEL)?)
    }

    /// Takes the permission to use a device away and ends every connection on it.
    pub(crate) fn remove_device(&self, dev: &Device, cx: &Sleepable) {
        self.lists.lock().devices.retain(|other| other != dev);
        self.stop(Reason::DeviceRemoved, cx, |c| c.id.device() == Ok(dev));
    }

    /// Ends every connection of an instance.
    pub(crate) fn stop_instance(&self, instance: &Instance, cx: &Sleepable) {
        self.stop(Reason::Stopped, cx, |c| c.is_of(instance));
    }

    fn stop(&self, reason: Reason, cx: &Sleepable, which: impl Fn(&Control) -> bool) {
        // One at a time: the lock is not held while a connection ends, which calls for it.
        while let Some(control) = self.take(&which) {
            control.stop(reason, cx);
        }
    }

    fn take(&self, which: impl Fn(&Control) -> bool) -> Option<Arc<Control>> {
        let connections = &mut self.lists.lock().connections;
        let index = connections.iter().position(|control| which(control))?;
        connections.remove(index).ok()
    }

    /// Adds a connection, which may not have a device yet.
    pub(crate) fn add(&self, control: &Arc<Control>) -> Result<(), Reason> {
        let connections = &mut self.lists.lock().connections;
        let of_instance = connections.iter().filter(|c| c.is_of(&control.instance));
        if of_instance.count() >= MAX_CONNECTIONS {
            return Err(Reason::TooMany);
        }
        connections
            .push(control.clone(), GFP_KERNEL)
            .map_err(|e| Reason::Failed(e.into()))
    }

    /// Says whether an added connection may use the device that it has got. From here on, the
    /// removal of the device ends the connection.
    pub(crate) fn admit(&self, control: &Control) -> Result {
        let dev = control.id.device()?;
        if self.lists.lock().devices.contains(dev) {
            Ok(())
        } else {
            Err(ENODEV)
        }
    }

    /// Forgets a connection that is over.
    pub(crate) fn remove(&self, control: &Control) {
        self.take(|other| core::ptr::eq(other, control));
    }
}
