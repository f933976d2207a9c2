// SPDX-License-Identifier: GPL-2.0

//! Destroying an id of the connection manager, perhaps in its own handler or before its QP.

use rdma::prelude::*;

struct Connection {
    id: cm::Id,
}

impl cm::Handler for Connection {
    fn event(&self, _event: cm::Event<'_>, cx: &Sleepable) {
        #[cfg(mistake)]
        self.id.destroy(); //~ E0599 no method named `destroy`
        let _ = self.id.disconnect(cx);
    }
}
