// SPDX-License-Identifier: GPL-2.0

//! Sending memory that is mapped for the device to write only.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Direction = FromDevice;
#[cfg(not(mistake))]
type Direction = Bidirectional;

fn echo(qp: &Qp<Softirq>, owner: Pin<KBox<ulp::Message<Direction>>>) -> Result {
    qp.post_send(owner, |m| {
        Ok(SendWr::send([m.buf.sge(0..8)?]))
        //~^ E0599 for struct `Buf<FromDevice>`, but its trait bounds were not satisfied
    })?;
    Ok(())
}
