// SPDX-License-Identifier: GPL-2.0

//! Taking memory back from an MR without proof that its registration has ended.

use kernel::prelude::*;
use rdma::prelude::*;

fn take(region: Region<FromDevice>) -> Result<Buf<FromDevice>> {
    #[cfg(mistake)]
    let (_mr, memory) = region.into_parts(); //~ E0308 mismatched types
    #[cfg(not(mistake))]
    let (_mr, memory) = region.into_parts().map_err(|_| EBUSY)?;
    Ok(memory)
}
