// SPDX-License-Identifier: GPL-2.0

//! Keeping the list of a request's pages when the request has ended.

use crate::nvme::Payload;
use kernel::prelude::*;
use rdma::sg::SgOwner;

fn reply(mut payload: Payload, send: fn(&mut Payload) -> Result) {
    let _ = payload.sgl();
    #[cfg(not(mistake))]
    let _ = send(&mut payload);
    payload.into_rq().end(0, 0);
    #[cfg(mistake)]
    let _ = send(&mut payload); //~ E0382 borrow of moved value: `payload`
}
