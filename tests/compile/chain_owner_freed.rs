// SPDX-License-Identifier: GPL-2.0

//! Freeing what a chain is made of when posting it has failed, though it was posted in part.

mod ulp;

use kernel::prelude::*;
use rdma::{prelude::*, qp::Chain};

type Owner = Pin<KBox<ulp::Message<ToDevice>>>;

fn send(qp: &Qp<Softirq>, owner: Owner) -> Result<Option<Owner>> {
    let posted = qp.post_chain(owner, |m, chain: &mut Chain<'_, 2>| {
        chain.push(SendWr::send([m.buf.sge(0..8)?]))?;
        chain.push(SendWr::send([m.buf.sge(8..16)?]))
    });
    let Err(refused) = posted else {
        return Ok(None);
    };
    #[cfg(mistake)]
    let owner: Owner = refused.owner; //~ E0308 mismatched types
    #[cfg(mistake)]
    let owner = Some(owner);
    #[cfg(not(mistake))]
    let owner: Option<Owner> = refused.owner; // None, if some are posted.
    Ok(owner)
}
