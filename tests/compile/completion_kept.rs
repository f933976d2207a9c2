// SPDX-License-Identifier: GPL-2.0

//! Keeping a completion beyond its handler, when the core uses its memory for the next one.

use rdma::{prelude::*, wc::Success};

struct Statistics<'a> {
    last: Option<Success<'a>>,
    bytes: usize,
}

impl Statistics<'_> {
    fn count(&mut self, wc: &Wc) {
        let Ok(wc) = wc.result() else { return };
        self.bytes += wc.byte_len();
        #[cfg(mistake)]
        {
            self.last = Some(wc); //~ lifetime may not live long enough
        }
    }
}
