// SPDX-License-Identifier: GPL-2.0

//! Writing a value that does not live long enough into a request, which is read later.

use rdma::prelude::*;

fn set<'a>(mut request: Taken<&'a [u8]>, bytes: &'a [u8]) {
    *request = bytes;
}

fn set_idle<'a>(mut requests: Requests<&'a [u8]>, bytes: &'a [u8]) {
    if let Some(mut value) = requests.take() {
        *value = bytes;
    }
}

fn taken(requests: &mut Requests<&'static [u8]>) {
    #[cfg(mistake)]
    let bytes = [1, 2, 3];
    #[cfg(not(mistake))]
    let bytes = b"abc";
    if let Some(in_flight) = requests.take() {
        set(in_flight, &bytes[..]); //~ E0597 `bytes` does not live long enough
    }
}

fn idle(requests: Requests<&'static [u8]>) {
    #[cfg(mistake)]
    let bytes = [1, 2, 3];
    #[cfg(not(mistake))]
    let bytes = b"abc";
    set_idle(requests, &bytes[..]); //~ E0597 `bytes` does not live long enough
}
