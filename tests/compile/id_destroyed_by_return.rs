// SPDX-License-Identifier: GPL-2.0

//! Returning an error from a handler of the connection manager, so that C destroys the id as well.

use rdma::prelude::*;

struct Connection {
    id: cm::Id,
}

impl cm::Handler for Connection {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, cx: &Sleepable) {
        if let cm::Event::Failed(error) = event {
            let _ = (self.id.disconnect(cx), error);
            #[cfg(mistake)]
            return Err(error); //~ E0308 mismatched types
        }
    }
}
