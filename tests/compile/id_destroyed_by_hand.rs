// SPDX-License-Identifier: GPL-2.0

//! Destroying an id of the connection manager that others have, as in its own handler.

use rdma::prelude::*;

struct Connection {
    id: cm::Id,
}

impl cm::Handler for Connection {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, cx: &Sleepable) {
        #[cfg(mistake)]
        let _ = self.id.destroy(cx); //~ E0507 cannot move out of dereference of
        let _ = self.id.disconnect(cx);
    }
}
