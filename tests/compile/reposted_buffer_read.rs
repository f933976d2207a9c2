// SPDX-License-Identifier: GPL-2.0

//! Using a receive buffer after it was posted again.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn again(qp: &Qp<Softirq>, mut message: Pin<KBox<ulp::Message<FromDevice>>>) -> Result<u8> {
    #[cfg(not(mistake))]
    let first = message.buf.cpu().first().copied();
    qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?;
    #[cfg(mistake)]
    let first = message.buf.cpu().first().copied(); //~ E0382 borrow of moved value: `message`
    first.ok_or(EIO)
}
