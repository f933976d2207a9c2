// SPDX-License-Identifier: GPL-2.0

//! Ending a request of nvmet while a transfer of its pages is about to be prepared.

use crate::nvmet::Request;
use kernel::prelude::*;
use rdma::{
    prelude::*,
    rw::Rw, //
};

fn answer(request: &mut Request, to: Remote, cx: &Sleepable, send: fn(Rw<'_>) -> Result) {
    let rw = request.write(to, cx);
    #[cfg(mistake)]
    request.release(); //~ E0502 cannot borrow `*request` as mutable
    let _ = send(rw);
    #[cfg(not(mistake))]
    request.release();
}
