// SPDX-License-Identifier: GPL-2.0

//! An array of completions that is larger than the stack.

use kernel::prelude::*;
use rdma::{cq::WcArray, prelude::*};

#[cfg(mistake)]
const LEN: usize = 65_536; //~0 E0080 evaluation of
#[cfg(not(mistake))]
const LEN: usize = 64;

/// Polls.
pub fn poll(cq: &Cq<Direct>) -> Result<usize> {
    let mut array = WcArray::<LEN>::new();
    cq.poll(&mut array)
}
