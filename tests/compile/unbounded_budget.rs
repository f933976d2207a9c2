// SPDX-License-Identifier: GPL-2.0

//! Processing completions without a bound, as C does with a budget of -1.

use rdma::prelude::*;

fn poll(cq: &Cq<Direct>) -> u32 {
    #[cfg(mistake)]
    let done = cq.process(-1); //~ E0600 cannot apply unary operator `-` to type `u32`
    #[cfg(not(mistake))]
    let done = cq.process(16);
    done
}
