// SPDX-License-Identifier: GPL-2.0

//! Completing a request that nvmet has been given to execute.

use crate::{
    nvmet::Request,
    target::Response, //
};
use rdma::{
    prelude::*,
    qp::Taken, //
};

fn execute(response: Taken<Response>, status: u16, cx: &Sleepable) {
    if status == 0 {
        Request::execute(response, cx);
        #[cfg(not(mistake))]
        return;
    }
    Request::complete(response, status, None); //~ E0382 use of moved value: `response`
}
