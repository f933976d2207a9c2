// SPDX-License-Identifier: GPL-2.0

//! A connection's id, of either connection manager.

use kernel::prelude::*;
use rdma::{
    ibcm,
    prelude::*, //
};

/// A counted handle.
#[derive(Clone)]
pub(crate) enum Link {
    Cm(cm::Id),
    Ib(Arc<ibcm::Connection>),
}

impl Link {
    pub(crate) fn disconnect(&self, cx: &Sleepable) -> Result {
        match self {
            Self::Cm(id) => id.disconnect(cx),
            Self::Ib(connection) => connection.disconnect(cx),
        }
    }

    pub(crate) fn disconnect_later(&self) {
        match self {
            Self::Cm(id) => id.disconnect_later(),
            Self::Ib(connection) => connection.disconnect_later(),
        }
    }

    pub(crate) fn notify_established(&self) {
        match self {
            Self::Cm(id) => id.notify_established(),
            Self::Ib(connection) => connection.notify_established(),
        }
    }

    pub(crate) fn release_handler(&self, cx: &Sleepable) {
        if let Self::Cm(id) = self {
            id.release_handler(cx);
        }
    }
}
