// SPDX-License-Identifier: GPL-2.0

//! Setting the state of a region by hand, to take its memory back while peers have access to it.

use rdma::prelude::*;

#[cfg(mistake)]
use rdma::mr::{Exclusive, State};

fn end(region: Region<FromDevice>) -> bool {
    #[cfg(mistake)]
    region.state().set_idle(); //~ E0624 method `state` is private
    #[cfg(mistake)]
    Exclusive::new().set_idle(); //~ E0599 no function or associated item named `new` found
    region.into_parts().is_ok()
}
