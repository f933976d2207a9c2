// SPDX-License-Identifier: GPL-2.0

//! Looking at memory, as at a slice, that a peer may be writing.

use kernel::prelude::*;
use rdma::prelude::*;

fn peek(region: &mut Region<FromDevice>) -> Result<u8> {
    #[cfg(mistake)]
    let byte = region.cpu().first().copied().ok_or(EIO)?; //~ E0599 no method named `cpu`
    #[cfg(not(mistake))]
    let byte = {
        let mut byte = [0];
        region.read(0, &mut byte)?;
        byte[0]
    };
    Ok(byte)
}
