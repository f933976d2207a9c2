// SPDX-License-Identifier: GPL-2.0

//! Messages that are sent and received.

use crate::{
    tally::Life,
    world::World, //
};
use kernel::prelude::*;
use rdma::prelude::*;

const LEN: usize = 64;

#[derive(HasCqe)]
pub(crate) struct Message {
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
    life: Life,
    /// Its end shows whether every message came back.
    _world: Arc<World>,
}

impl Message {
    fn new(pd: &Pd, world: &Arc<World>, cx: &Sleepable) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            buf: Buf::alloc(pd, LEN, cx)?,
            life: Life::new(&world.tally),
            _world: world.clone(),
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    pub(crate) fn send(qp: &Qp<Softirq>, pd: &Pd, world: &Arc<World>, cx: &Sleepable) -> Result {
        let message = Self::new(pd, world, cx)?;
        message.life.post();
        let posted = qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])));
        posted.map_err(Self::refused)
    }

    pub(crate) fn recv(qp: &Qp<Softirq>, pd: &Pd, world: &Arc<World>, cx: &Sleepable) -> Result {
        let message = Self::new(pd, world, cx)?;
        message.life.post();
        let posted = qp.post_recv(message, |m| Ok(RecvWr::new([m.buf.whole_mut()])));
        posted.map_err(Self::refused)
    }

    fn refused(e: PostError<Pin<KBox<Self>>>) -> Error {
        if let Some(message) = &e.owner {
            message.life.refused();
        }
        e.error()
    }
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.life.back();
    }
}
