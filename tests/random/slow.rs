// SPDX-License-Identifier: GPL-2.0

//! The steps of handlers that take long.

use crate::{
    owners::{
        nap,
        refused,
        Memory,
        Message, //
    },
    session::NOWHERE,
    steps::Turn,
    tally::Life,
    way::Way, //
};
use kernel::prelude::*;
use rdma::prelude::*;
use rdma_null::Injection;

/// A message whose handler takes some time.
#[derive(HasCqe)]
struct Slow {
    cqe: Cqe<Self>,
    buf: Memory,
    us: u32,
    life: Life,
}

impl CqeHandler for Slow {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        nap(this.us);
        this.life.back();
    }
}

pub(crate) fn handler<C: Way>(t: &mut Turn<'_, C>) -> Result {
    let qp = t.end()?;
    let slow = Slow {
        cqe: Cqe::new(),
        buf: t.memory()?,
        us: 1 + t.rng.below(500),
        life: t.life(),
    };
    let (slow, sends) = (KBox::pin(slow, GFP_KERNEL)?, t.rng.once_in(2));
    slow.life.post();
    match sends {
        true => qp.post_send(slow, |s| Ok(SendWr::send([s.buf.whole()]))),
        false => qp.post_recv(slow, |s| Ok(RecvWr::new([s.buf.whole_mut()]))),
    }
    .map_err(|e| refused(e, |s| &s.life))
}

/// A request whose handler ends another QP, and waits for that.
#[derive(HasCqe)]
struct Ender<C: Way> {
    cqe: Cqe<Self>,
    other: Option<Qp<C>>,
    life: Life,
}

impl<C: Way + Provides<Sleepable>> CqeHandler for Ender<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Sleepable;

    fn done(mut this: Self::Pointer, _wc: &Wc, cx: &Sleepable) {
        this.life.back();
        if let Some(Err(_)) = this.other.take().map(|qp| qp.destroy(cx)) {
            this.life.wrong("a QP was not destroyed by a handler");
        }
    }
}

/// Has a handler of the one CQ end a QP of the other.
pub(crate) fn end<C: Way + Provides<Sleepable>>(t: &mut Turn<'_, C>) -> Result {
    let (parts, caps) = (&t.world.parts, Caps::new(2, 2));
    let (pd, cq) = (&parts.pd, &parts.session_cq);
    let other = Qp::create_raw(pd, cq, cq, &caps, t.cx)?;
    if let Ok(null) = t.world.null() {
        null.inject_qp(other.num(), Injection::Connect { peer: 0 })?;
        let message = t.message()?;
        message.life.post();
        other
            .post_send(message, Message::send)
            .map_err(|e| refused(e, |m| &m.life))?;
    }
    let ender = Ender {
        cqe: Cqe::new(),
        other: Some(other),
        life: t.life(),
    };
    let (ender, qp) = (KBox::pin(ender, GFP_KERNEL)?, t.end()?);
    ender.life.post();
    qp.post_send(ender, |_| Ok(SendWr::rdma_write([], NOWHERE)))
        .map_err(|e| refused(e, |e| &e.life))
}
