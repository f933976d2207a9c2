// SPDX-License-Identifier: GPL-2.0

//! Keeping the queue that blk-mq's call has lent.

use crate::{
    nvme::Transport,
    rdma::{
        Queue,
        Rdma, //
    }, //
};
#[cfg(not(mistake))]
use kernel::sync::Arc;
use kernel::sync::ArcBorrow;

#[cfg(mistake)]
fn keep(queue: ArcBorrow<'_, Queue>) -> ArcBorrow<'static, Queue> {
    queue //~ lifetime may not live long enough
}

#[cfg(not(mistake))]
fn keep(queue: ArcBorrow<'_, Queue>) -> Arc<Queue> {
    queue.into()
}

fn poll(queue: ArcBorrow<'_, Queue>) -> u32 {
    Rdma::poll(&keep(queue))
}
