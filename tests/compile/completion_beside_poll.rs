// SPDX-License-Identifier: GPL-2.0

//! Polling into a batch while a completion in it is still looked at.

use kernel::prelude::*;
use rdma::prelude::*;

fn poll(cq: &Cq<Direct>) -> Result<bool> {
    let mut batch = WcArray::<4>::new();
    cq.poll(&mut batch)?;
    let first = batch.completions().next();
    #[cfg(mistake)]
    cq.poll(&mut batch)?; //~ E0499 cannot borrow `batch` as mutable more than once
    Ok(first.is_some_and(|completion| completion.result().is_ok()))
}
