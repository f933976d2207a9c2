// SPDX-License-Identifier: GPL-2.0

//! Writing a value that does not live long enough into a request, which another handle reads later.

use rdma::prelude::*;

fn set<'a>(mut request: InFlight<&'a [u8]>, bytes: &'a [u8]) {
    *request = bytes;
}

fn set_idle<'a>(mut request: Reusable<&'a [u8]>, bytes: &'a [u8]) {
    if let Some(value) = request.get() {
        *value = bytes;
    }
}

fn started(request: &mut Reusable<&'static [u8]>) {
    #[cfg(mistake)]
    let bytes = [1, 2, 3];
    #[cfg(not(mistake))]
    let bytes = b"abc";
    if let Some(in_flight) = request.start() {
        set(in_flight, &bytes[..]); //~ E0597 `bytes` does not live long enough
    }
}

fn idle(request: Reusable<&'static [u8]>) {
    #[cfg(mistake)]
    let bytes = [1, 2, 3];
    #[cfg(not(mistake))]
    let bytes = b"abc";
    set_idle(request, &bytes[..]); //~ E0597 `bytes` does not live long enough
}
