// SPDX-License-Identifier: GPL-2.0

//! Keeping a peer's private data beyond the event that has brought them.

#[cfg(not(mistake))]
use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
fn greeting(event: cm::Event<'_>) -> &'static [u8] {
    match event {
        //~^ lifetime may not live long enough
        cm::Event::Established { private_data } => private_data,
        _ => &[],
    }
}

#[cfg(not(mistake))]
fn greeting(event: cm::Event<'_>) -> Result<KVec<u8>> {
    let mut kept = KVec::new();
    if let cm::Event::Established { private_data } = event {
        kept.extend_from_slice(private_data, GFP_KERNEL)?;
    }
    Ok(kept)
}
