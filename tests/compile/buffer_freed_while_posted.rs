// SPDX-License-Identifier: GPL-2.0

//! Freeing a buffer that the device may be reading.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn send(qp: &Qp<Softirq>, message: Pin<KBox<ulp::Message<ToDevice>>>) -> Result {
    let posted = qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])));
    #[cfg(mistake)]
    drop(message); //~ E0382 use of moved value: `message`
    #[cfg(not(mistake))]
    if let Err(refused) = posted {
        let error = refused.error();
        drop(refused.owner);
        return Err(error);
    }
    #[cfg(mistake)]
    posted?;
    Ok(())
}
