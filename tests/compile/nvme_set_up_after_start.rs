// SPDX-License-Identifier: GPL-2.0

//! Changing the queues of a controller that was started.

use crate::{
    nvme::Setup,
    rdma::Rdma, //
};
use rdma::prelude::*;

fn start(mut setup: Setup<'_, Rdma>, cx: &Sleepable) {
    #[cfg(not(mistake))]
    setup.clear(1..2, cx);
    setup.start_ctrl(cx);
    #[cfg(mistake)]
    setup.clear(1..2, cx); //~ E0382 borrow of moved value: `setup`
}
