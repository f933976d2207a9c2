// SPDX-License-Identifier: GPL-2.0

//! Looking at a buffer through a counted owner, while another reference to it may be posted.

mod ulp;

#[cfg(not(mistake))]
use kernel::prelude::*;
use rdma::prelude::*;

#[cfg(mistake)]
type Owner = Arc<ulp::Shared>;
#[cfg(not(mistake))]
type Owner = Pin<KBox<ulp::Message<FromDevice>>>;

fn first(owner: &mut Owner) -> Option<u8> {
    owner.buf.cpu().first().copied() //~ E0596 as mutable: cannot borrow as mutable
}
