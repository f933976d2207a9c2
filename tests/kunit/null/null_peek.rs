// SPDX-License-Identifier: GPL-2.0

//! Requests without entries, on a device that looks at the first one all the same.

use crate::fixture::{
    send,
    wait,
    Counted,
    Counter,
    Inbox,
    Null,
    NullEnv, //
};
use kernel::prelude::*;
use rdma::{
    ah::{
        Ah,
        Attr, //
    },
    prelude::*,
    qp::Chain,
    srq::{
        Receive,
        Slot,
        Srq, //
    },
    ud::{
        UdQp,
        UdWr, //
    }, //
};
use rdma_null::NullDevice;

const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };

fn peek(dev: &NullDevice) -> Result {
    // SAFETY: All requests to the device are the crate's, whose list has an entry in any case.
    unsafe { dev.peek(true) }
}

/// Two QPs of such a device, of which `a` sends to no peer.
fn ready() -> Result<(Null<Softirq>, Arc<Counter>)> {
    let null = Null::new()?;
    null.disconnect()?;
    peek(&null.dev)?;
    Ok((null, Counter::new()?))
}

/// A slot without memory.
struct Bell;

impl Receive<0> for Bell {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_, 0> {
        RecvWr::new([])
    }

    fn done(_slot: Slot<Self, 0>, _wc: &Wc, _cx: &context::Atomic) {}
}

#[kunit_tests(rdma_null_peek)]
mod tests {
    use super::*;

    #[test]
    fn sends_have_no_entry() -> Result {
        let (null, times) = ready()?;
        let counted = Counted::new(&times)?;
        null.a
            .post_send(counted.clone(), |_| Ok(SendWr::send([])))?;
        null.a.post_send(counted.clone(), |_| {
            Ok(SendWr::rdma_write([], NOWHERE).with_imm(1))
        })?;
        null.a
            .post_send(counted, |_| Ok(SendWr::rdma_read([], NOWHERE)))?;
        null.wait(|| times.get() == 3)
    }

    #[test]
    fn receives_have_no_entry() -> Result {
        let (null, times) = ready()?;
        null.b
            .post_recv(Counted::new(&times)?, |_| Ok(RecvWr::new([])))?;
        null.b.drain(&null.env.cx)?;
        check_eq!(times.get(), 1);
        Ok(())
    }

    #[test]
    fn links_have_no_entry() -> Result {
        let (null, times) = ready()?;
        for _ in 0..2 {
            null.a
                .post_chain(Counted::new(&times)?, |_, chain: &mut Chain<'_, 2, 2>| {
                    chain.push(SendWr::rdma_write([], NOWHERE))?;
                    chain.push(SendWr::send([]))
                })?;
        }
        let mut batch = null.a.batch(Counted::new(&times)?);
        batch.post(|_, chain: &mut Chain<'_, 1, 1>| chain.push(SendWr::send([])))?;
        batch.finish(|_, chain: &mut Chain<'_, 1, 1>| chain.push(SendWr::send([])))?;
        null.wait(|| times.get() == 3)
    }

    #[test]
    fn datagrams_have_no_entry() -> Result {
        let null = NullEnv::new()?;
        peek(&null.dev)?;
        let (env, times) = (&null.env, Counter::new()?);
        let (cq, caps) = (env.cq::<Softirq>(64)?, Caps::new(4, 4));
        let qp = UdQp::create(&env.pd, &cq, &cq, &caps, 1, 7, &env.cx)?;
        let attr = Attr {
            dlid: 1,
            ..Attr::new(1)
        };
        let ah = Arc::new(Ah::create(&env.pd, &attr, &env.cx)?, GFP_KERNEL)?;
        let knock = Knock {
            cqe: Cqe::new(),
            ah,
            times: times.clone(),
        };
        let knock = Arc::new(knock, GFP_KERNEL)?;
        qp.post_recv(knock.clone(), |_| Ok(RecvWr::new([])))?;
        qp.post_send(knock, |k| Ok(UdWr::new([], &k.ah, 5, 7)))?;
        qp.drain(&env.cx)?;
        check_eq!(times.get(), 2);
        Ok(())
    }

    #[test]
    fn slots_have_no_entry() -> Result {
        let null = NullEnv::new()?;
        peek(&null.dev)?;
        let _srq = Srq::<Bell, 0>::create(&null.env.pd, 4, |_| Ok(Bell), &null.env.cx)?;
        Ok(())
    }

    /// The device reports it where it is not so.
    #[test]
    fn memory_is_no_entry_either() -> Result {
        let (null, sent) = (Null::<Softirq>::new()?, Inbox::new()?);
        null.disconnect()?;
        peek(&null.dev)?;
        send(&null.a, null.env.message(&sent, b"x")?)?;
        wait(|| sent.len() == 1)
    }
}

/// A datagram without a payload.
#[derive(HasCqe)]
struct Knock {
    cqe: Cqe<Self>,
    ah: Arc<Ah>,
    times: Arc<Counter>,
}

impl CqeHandler for Knock {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.times.up();
    }
}
