// SPDX-License-Identifier: GPL-2.0

//! Reading how many bytes have come without looking at the status.

use kernel::prelude::*;
use rdma::prelude::*;

fn received(wc: &Wc) -> Result<usize> {
    #[cfg(mistake)]
    let len = wc.byte_len(); //~ E0599 no method named `byte_len`
    #[cfg(not(mistake))]
    let len = wc.result()?.byte_len();
    Ok(len)
}
