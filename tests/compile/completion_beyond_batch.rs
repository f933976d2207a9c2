// SPDX-License-Identifier: GPL-2.0

//! Keeping a polled completion when its array is filled again.

use kernel::prelude::*;
use rdma::{cq::WcArray, prelude::*};

fn poll(cq: &Cq<Direct>) -> Result<usize> {
    let mut batch = WcArray::<4>::new();
    cq.poll(&mut batch)?;
    let first = batch.completions().next();
    #[cfg(not(mistake))]
    drop(first);
    let n = cq.poll(&mut batch)?; //~ E0499 cannot borrow `batch` as mutable more than once
    #[cfg(mistake)]
    drop(first);
    Ok(n)
}
