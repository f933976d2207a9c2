// SPDX-License-Identifier: GPL-2.0

//! Receives of an SRQ that a device takes and does not give back.

use crate::fixture::{
    to_init,
    to_rtr,
    to_rts_with,
    wait,
    CountDrop,
    Counter,
    Env, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::InitAttr,
    srq::{
        Receive,
        Slot,
        Srq, //
    }, //
};

/// The slots of the SRQ.
const SLOTS: u32 = 4;
/// The length of a message: rxe sends 128 packets of 1,024 bytes and then waits to hear of them.
const LONG: usize = 256 * 1024;
/// A QP that there is not.
const NOBODY: u32 = 0xff_fff0;

struct Incoming {
    buf: Buf<FromDevice>,
    received: Arc<Counter>,
    flushed: Arc<Counter>,
    _gone: CountDrop,
}

impl Receive for Incoming {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(slot: Slot<Self>, wc: &Wc, _cx: &context::Atomic) {
        match wc.result() {
            Ok(_) => slot.received.up(),
            Err(_) => slot.flushed.up(),
        };
    }
}

#[derive(HasCqe)]
struct Outgoing {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    given_up: Arc<Counter>,
}

impl CqeHandler for Outgoing {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        if wc.result().is_err() {
            this.given_up.up();
        }
    }
}

/// An SRQ, a CQ for its QPs, and what becomes of its slots.
struct Shared {
    env: Env,
    cq: Cq<Softirq>,
    srq: Srq<Incoming>,
    received: Arc<Counter>,
    flushed: Arc<Counter>,
    gone: Arc<Counter>,
}

const CAPS: Caps = Caps::new(2, 0);

impl Shared {
    fn new() -> Result<Self> {
        let env = Env::new()?;
        let (received, flushed, gone) = (Counter::new()?, Counter::new()?, Counter::new()?);
        let slot = |_| {
            Ok::<_, Error>(Incoming {
                buf: Buf::alloc(&env.pd, LONG, &env.cx)?,
                received: received.clone(),
                flushed: flushed.clone(),
                _gone: CountDrop(gone.clone()),
            })
        };
        let srq = Srq::create(&env.pd, SLOTS, slot, &env.cx)?;
        Ok(Self {
            cq: env.cq(64)?,
            srq,
            received,
            flushed,
            gone,
            env,
        })
    }

    fn connect(&self, qp: &Qp<Softirq>, peer: u32) -> Result {
        qp.modify(to_init(), &self.env.cx)?;
        qp.modify(to_rtr(&self.env, peer)?, &self.env.cx)?;
        qp.modify(to_rts_with(14, 1), &self.env.cx)?;
        Ok(())
    }

    /// Has a QP take a slot for a message that does not end, as its sender hears of none of the
    /// packets: it sends them again until it gives up. Then drains both.
    fn break_off(&self) -> Result {
        let (pd, cq, cx) = (&self.env.pd, &self.cq, &self.env.cx);
        let sender = Qp::create_raw(pd, cq, cq, &CAPS, cx)?;
        let receiver = InitAttr::on_srq(pd, cq, &self.srq, &CAPS).create(cx)?;
        self.connect(&receiver, NOBODY)?;
        self.connect(&sender, receiver.num())?;
        let given_up = Counter::new()?;
        let message = Outgoing {
            cqe: Cqe::new(),
            buf: Buf::alloc(pd, LONG, cx)?,
            given_up: given_up.clone(),
        };
        sender.post_send(KBox::pin(message, GFP_KERNEL)?, |message| {
            Ok(SendWr::send([message.buf.whole()]))
        })?;
        wait(|| given_up.get() == 1)?;
        receiver.drain(cx)?;
        sender.drain(cx)
    }
}

#[kunit_tests(rdma_srq_lost)]
mod tests {
    use super::*;

    #[test]
    fn message_that_breaks_off() -> Result {
        let shared = Shared::new()?;
        for _ in 0..SLOTS {
            shared.break_off()?;
        }
        check_eq!(shared.received.get(), 0);
        // rxe forgets them. Other devices flush them.
        let flushed = shared.flushed.get();
        check!(flushed == 0 || flushed == SLOTS as i32);
        pr_info!("{flushed} of {SLOTS} receives came back from messages that broke off\n");
        let gone = shared.gone.clone();
        drop(shared);
        wait(|| gone.get() == SLOTS as i32)
    }
}
