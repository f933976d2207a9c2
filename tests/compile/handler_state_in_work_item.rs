// SPDX-License-Identifier: GPL-2.0

//! Using what handlers of a CQ share in a work item, by the completion of the handler that has
//! started it.

use kernel::prelude::*;
use rdma::{
    cq::HandlerCell,
    prelude::*, //
};

fn count(cell: Arc<HandlerCell<u32>>, client: &ClientRef, wc: &Wc) -> Result {
    #[cfg(mistake)]
    client.spawn(GFP_ATOMIC, move |_| {
        //~^ E0277 cannot be shared between threads safely
        let _ = cell.with(wc, |count| *count += 1);
    })?;
    #[cfg(not(mistake))]
    cell.with(wc, |count| *count += 1)?;
    let _ = client;
    Ok(())
}
