// SPDX-License-Identifier: GPL-2.0

//! Using a queue of a controller after it was taken from there.

use crate::{
    nvme::{
        Setup,
        Transport, //
    },
    rdma::Rdma, //
};
use rdma::prelude::*;

fn stop(setup: &mut Setup<'_, Rdma>, cx: &Sleepable) {
    let Some(queue) = setup.queue(1) else {
        return;
    };
    #[cfg(mistake)]
    setup.clear(1..2, cx); //~ E0502 cannot borrow `*setup` as mutable
    Rdma::timed_out(queue, cx);
    #[cfg(not(mistake))]
    setup.clear(1..2, cx);
}
