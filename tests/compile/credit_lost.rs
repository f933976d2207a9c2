// SPDX-License-Identifier: GPL-2.0

//! Losing a receive whose post has failed, and the credit that goes with it.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn refill(
    qp: &Qp<Softirq>,
    message: Pin<KBox<ulp::Message<FromDevice>>>,
    spare: &mut Option<Pin<KBox<ulp::Message<FromDevice>>>>,
) {
    #[cfg(mistake)]
    qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()]))); //~ unused `Result` that must
    #[cfg(not(mistake))]
    let posted = qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])));
    #[cfg(mistake)]
    let _kept = spare;
    #[cfg(not(mistake))]
    if let Err(refused) = posted {
        *spare = refused.owner;
    }
}
