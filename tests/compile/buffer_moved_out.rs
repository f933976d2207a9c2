// SPDX-License-Identifier: GPL-2.0

//! Taking the buffer out of an owner that is posted.

mod ulp;

use kernel::prelude::*;
use rdma::prelude::*;

fn recv(owner: Arc<ulp::Shared>) -> Result<Arc<ulp::Shared>> {
    let posted = owner.clone();
    posted
        .qp
        .post_recv(owner, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?;
    #[cfg(mistake)]
    drop(posted.buf); //~ E0507 cannot move out of dereference of `kernel::sync::Arc<ulp::Shared>`
    Ok(posted)
}
