// SPDX-License-Identifier: GPL-2.0

//! A receive into memory that is mapped for the device to read only.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Direction = ToDevice;
#[cfg(not(mistake))]
type Direction = Bidirectional;

fn recv(qp: &Qp<Softirq>, owner: Pin<KBox<ulp::Message<Direction>>>) -> Result {
    qp.post_recv(owner, |m| {
        Ok(RecvWr::new([m.buf.sge_mut(0..8)?]))
        //~^ E0599 for struct `Buf<ToDevice>`, but its trait bounds were not satisfied
    })?;
    Ok(())
}
