// SPDX-License-Identifier: GPL-2.0

//! Keeping what handlers of a CQ share beyond the call that lends it.

use kernel::prelude::*;
use rdma::{
    cq::HandlerCell,
    prelude::*, //
};

fn count(cell: &HandlerCell<u32>, wc: &Wc) -> Result {
    #[cfg(mistake)]
    {
        let count = cell.with(wc, |count| count)?; //~ lifetime may not live long enough
        *count += 1;
    }
    #[cfg(not(mistake))]
    cell.with(wc, |count| *count += 1)?;
    Ok(())
}
