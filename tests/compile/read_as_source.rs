// SPDX-License-Identifier: GPL-2.0

//! An RDMA READ into an entry that was made for reading.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

type Owner = Pin<KBox<ulp::Message<Bidirectional>>>;

fn read(qp: &Qp<Softirq>, owner: Owner, from: Remote) -> Result {
    #[cfg(mistake)]
    qp.post_send(owner, |m| {
        Ok(SendWr::rdma_read([m.buf.whole()], from)) //~ E0277 is not a list of `SgeMut<'_>`
    })?;
    #[cfg(not(mistake))]
    qp.post_send(owner, |m| Ok(SendWr::rdma_read([m.buf.whole_mut()], from)))?;
    Ok(())
}
