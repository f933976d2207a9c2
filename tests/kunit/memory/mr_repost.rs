// SPDX-License-Identifier: GPL-2.0

//! Owners that have their QP and their region, and register it again and again.

use crate::fixture::{
    wait,
    Counter,
    Env,
    Link,
    Polled, //
};
use kernel::prelude::*;
use rdma::prelude::*;

const REG: u64 = 0;
const INV: u64 = 1;

/// Registers its region and invalidates it, in turns.
#[derive(HasCqe)]
struct Turns<C: Polled> {
    reg: Cqe<Self, REG>,
    inv: Cqe<Self, INV>,
    region: Region<Bidirectional>,
    left: u32,
    qp: Qp<C>,
    /// Counts when the region was as it should be.
    right: Arc<Counter>,
    /// Counts when this is over.
    over: Arc<Counter>,
}

type Owned<C> = Pin<KBox<Turns<C>>>;

impl<C: Polled> CqeHandler<REG> for Turns<C> {
    type Pointer = Owned<C>;
    type Needs = context::Atomic;

    fn done(this: Owned<C>, wc: &Wc, _cx: &context::Atomic) {
        let was_registered = wc.result().is_ok_and(|wc| wc.opcode() == Opcode::RegMr);
        if was_registered && !this.region.is_idle() {
            this.right.up();
        }
        // Only what is idle can be registered.
        let posted = Qp::repost_send(
            this,
            wc,
            |t| &t.qp,
            |t| Ok(both(&t.region).done_by::<REG>()),
        );
        let Err(e) = posted else { return };
        let error = e.error();
        let Some(this) = e.owner.filter(|_| error == EBUSY) else {
            return;
        };
        let posted = Qp::repost_send(
            this,
            wc,
            |t| &t.qp,
            |t| Ok(InvWr::new(&t.region).done_by::<INV>()),
        );
        if let Some(this) = posted.err().and_then(|e| e.owner) {
            this.over.up();
        }
    }
}

impl<C: Polled> CqeHandler<INV> for Turns<C> {
    type Pointer = Owned<C>;
    type Needs = context::Atomic;

    fn done(mut this: Owned<C>, wc: &Wc, _cx: &context::Atomic) {
        let was_invalidated = wc.result().is_ok_and(|wc| wc.opcode() == Opcode::LocalInv);
        if was_invalidated && this.region.is_idle() {
            this.right.up();
        }
        this.left -= 1;
        if this.left == 0 {
            this.over.up();
            return;
        }
        // Only what is registered can be invalidated.
        let posted = Qp::repost_send(
            this,
            wc,
            |t| &t.qp,
            |t| Ok(InvWr::new(&t.region).done_by::<INV>()),
        );
        let Err(e) = posted else { return };
        let error = e.error();
        let Some(this) = e.owner.filter(|_| error == EBUSY) else {
            return;
        };
        let posted = Qp::repost_send(
            this,
            wc,
            |t| &t.qp,
            |t| Ok(both(&t.region).done_by::<REG>()),
        );
        if let Some(this) = posted.err().and_then(|e| e.owner) {
            this.over.up();
        }
    }
}

fn both(region: &Region<Bidirectional>) -> RegWr<'_> {
    RegWr::remote_read_write(region)
}

fn turns<C: Polled>(
    env: &Env,
    link: &Link<C>,
    left: u32,
    counts: &[Arc<Counter>; 2],
) -> Result<Owned<C>> {
    let turns = Turns {
        reg: Cqe::new(),
        inv: Cqe::new(),
        region: Region::new(Buf::alloc(&env.pd, 100, &env.cx)?, &env.cx)?,
        left,
        qp: link.a.qp.clone(),
        right: counts[0].clone(),
        over: counts[1].clone(),
    };
    Ok(KBox::pin(turns, GFP_KERNEL)?)
}

/// A region takes many turns: each time it is in the state that it should be in.
fn many<C: Polled>() -> Result {
    let (link, counts) = (Link::<C>::new()?, [Counter::new()?, Counter::new()?]);
    let turns = turns(&link.env, &link, 300, &counts)?;
    link.a
        .qp
        .post_send(turns, |t| Ok(both(&t.region).done_by::<REG>()))?;
    let ended = goes_on(&link, &counts);
    // If it has not ended it has the QP still: until it was flushed in each of its turns.
    link.a.qp.drain(&link.env.cx)?;
    link.wait(|| counts[1].get() == 1)?;
    ended?;
    check_eq!(counts[0].get(), 600);
    Ok(())
}

/// Waits for the last turn. It may be long until then, but not until the next one.
fn goes_on<C: Polled>(link: &Link<C>, [right, over]: &[Arc<Counter>; 2]) -> Result {
    while over.get() == 0 {
        let before = right.get();
        link.wait(|| over.get() == 1 || right.get() > before)?;
    }
    Ok(())
}

#[kunit_tests(rdma_mr_repost)]
mod tests {
    use super::*;

    #[test]
    fn many_direct() -> Result {
        many::<Direct>()
    }

    #[test]
    fn many_softirq() -> Result {
        many::<Softirq>()
    }

    #[test]
    fn many_workqueue() -> Result {
        many::<Workqueue>()
    }

    #[test]
    fn many_unbound_workqueue() -> Result {
        many::<UnboundWorkqueue>()
    }

    #[test]
    fn flushed_invalidation_leaves_it_registered() -> Result {
        let (link, counts) = (Link::<Softirq>::new()?, [Counter::new()?, Counter::new()?]);
        // It ends with its first invalidation.
        let turns = turns(&link.env, &link, 1, &counts)?;
        link.a.qp.drain(&link.env.cx)?;
        link.a
            .qp
            .post_send(turns, |t| Ok(both(&t.region).done_by::<REG>()))?;
        wait(|| counts[1].get() == 1)?;
        check_eq!(counts[0].get(), 0);
        Ok(())
    }
}
