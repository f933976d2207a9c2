// SPDX-License-Identifier: GPL-2.0

//! The connections of an instance.

use crate::{
    control::Control,
    reason::Reason, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::Mutex, //
};
use rdma::{
    context::Sleepable,
    prelude::Arc, //
};

/// The number of connections that an instance may have at once.
const MAX: usize = 256;

/// A list of connections, to end them all. Each takes itself out when it is over.
#[pin_data]
pub(crate) struct Connections {
    #[pin]
    list: Mutex<KVec<Arc<Control>>>,
}

impl Connections {
    pub(crate) fn new() -> impl PinInit<Self> {
        pin_init!(Self {
            list <- new_mutex!(KVec::new()),
        })
    }

    pub(crate) fn add(&self, control: &Arc<Control>) -> Result<(), Reason> {
        let mut list = self.list.lock();
        if list.len() >= MAX {
            return Err(Reason::TooMany);
        }
        Ok(list.push(control.clone(), GFP_KERNEL)?)
    }

    /// Takes a connection out.
    pub(crate) fn remove(&self, control: &Control) {
        let mut list = self.list.lock();
        let index = list
            .iter()
            .position(|other| core::ptr::eq(&**other, control));
        let removed = index.and_then(|index| list.remove(index).ok());
        drop(list);
        drop(removed);
    }

    /// Ends all connections.
    pub(crate) fn stop(&self, cx: &Sleepable) {
        loop {
            // One at a time: a connection that ends takes itself out.
            let control = self.list.lock().pop();
            let Some(control) = control else { return };
            control.stop(Reason::Stopped, cx);
        }
    }
}
