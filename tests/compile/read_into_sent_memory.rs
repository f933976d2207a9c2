// SPDX-License-Identifier: GPL-2.0

//! An RDMA READ into memory that is mapped for the device to read only.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Direction = ToDevice;
#[cfg(not(mistake))]
type Direction = FromDevice;

fn read(qp: &Qp<Softirq>, owner: Pin<KBox<ulp::Message<Direction>>>, from: Remote) -> Result {
    qp.post_send(owner, |m| {
        Ok(SendWr::rdma_read([m.buf.whole_mut()], from))
        //~^ E0599 for struct `Buf<ToDevice>`, but its trait bounds were not satisfied
    })?;
    Ok(())
}
