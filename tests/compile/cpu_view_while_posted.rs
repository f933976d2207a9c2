// SPDX-License-Identifier: GPL-2.0

//! Keeping the CPU's view of a buffer while the device uses it.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn recv(qp: &Qp<Softirq>, mut message: Pin<KBox<ulp::Message<FromDevice>>>) -> Result {
    let mut view = message.buf.cpu();
    view.fill(0);
    #[cfg(not(mistake))]
    drop(view);
    qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?;
    //~^ E0505 cannot move out of `message` because it is borrowed
    #[cfg(mistake)]
    view.fill(1);
    Ok(())
}
