// SPDX-License-Identifier: GPL-2.0

//! Taking immediate data, or an invalidated key, from a completion that failed.

use rdma::prelude::*;

fn immediate(wc: &Wc) -> Option<u32> {
    match wc.result() {
        Ok(wc) => wc.imm_data(),
        #[cfg(mistake)]
        Err(e) => e.imm_data(), //~ E0599 no method named `imm_data`
        #[cfg(not(mistake))]
        Err(_) => None,
    }
}
