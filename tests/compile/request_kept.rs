// SPDX-License-Identifier: GPL-2.0

//! Keeping a connection request beyond the callback of its listener, which may be gone by then.

use kernel::{new_mutex, prelude::*, sync::Mutex};
use rdma::prelude::*;

#[pin_data]
struct Waiting<T> {
    #[pin]
    list: Mutex<KVec<T>>,
}

fn later<'a>(request: cm::Request<'a>, waiting: &Waiting<cm::Id>, cx: &Sleepable) -> Result {
    Ok(waiting.list.lock().push(request.into_id(cx)?, GFP_KERNEL)?)
}

#[cfg(mistake)]
fn keep(request: cm::Request<'_>, waiting: &Waiting<cm::Request<'static>>) -> Result {
    Ok(waiting.list.lock().push(request, GFP_KERNEL)?) //~ E0521 borrowed data escapes
}

fn waiting() -> impl PinInit<Waiting<cm::Id>> {
    pin_init!(Waiting {
        list <- new_mutex!(KVec::new()),
    })
}
