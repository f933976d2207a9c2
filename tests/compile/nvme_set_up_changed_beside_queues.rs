// SPDX-License-Identifier: GPL-2.0

//! Changing what is set up of a controller while its queues are connected at the same time.

use crate::{
    nvme::{
        try_for_each,
        Failure,
        Setup, //
    },
    rdma::Rdma, //
};
use rdma::prelude::*;

fn set_up(setup: &mut Setup<'_, Rdma>, cx: &Sleepable) -> Result<(), Failure> {
    #[cfg(not(mistake))]
    setup.clear(1..3, cx);
    let connect = |qid: &u16, cx: &Sleepable| {
        //~^ E0525 expected a closure that implements the `Fn`
        #[cfg(mistake)]
        setup.clear(1..3, cx);
        setup.connect_io_queue(*qid, cx)
    };
    try_for_each(&[1, 2], connect, cx)
}
