// SPDX-License-Identifier: GPL-2.0

//! Handles are dropped in any order, anywhere.

use crate::fixture::{
    recv,
    send,
    wait,
    Counter,
    Env,
    Inbox,
    Link,
    OnDone,
    Polled, //
};
use core::mem::ManuallyDrop;
use kernel::prelude::*;
use rdma::prelude::*;

const CAPS: Caps = Caps::new(2, 4);

/// Everything of a connection that can be dropped.
struct Handles<C: PollContext> {
    qp: Option<Qp<C>>,
    cq: Option<Cq<C>>,
    pd: Option<Pd>,
    id: Option<cm::Id>,
}

impl<C: Polled> Handles<C> {
    /// Makes a QP with four receives outstanding.
    fn new(inbox: &Arc<Inbox>) -> Result<Self> {
        let env = Env::new()?;
        let (cq, id) = (env.cq::<C>(64)?, env.id()?);
        let qp = Qp::create(&id, &env.pd, &cq, &cq, &CAPS, &env.cx)?;
        for _ in 0..4 {
            recv(&qp, env.message(inbox, &[0; 4])?)?;
        }
        Ok(Self {
            qp: Some(qp),
            cq: Some(cq),
            pd: Some(env.pd),
            id: Some(id),
        })
    }

    fn drop_one(&mut self, which: usize) {
        match which {
            0 => self.qp = None,
            1 => self.cq = None,
            2 => self.pd = None,
            _ => self.id = None,
        }
    }
}

/// The receives have come back, flushed.
fn flushed(inbox: &Inbox) -> Result {
    wait(|| inbox.len() == 4)?;
    check!(inbox.take().iter().all(|completed| completed.was_flushed()));
    wait(|| inbox.dropped() == 4)
}

fn in_order<C: Polled>(order: [usize; 4]) -> Result {
    let inbox = Inbox::new()?;
    let mut handles = Handles::<C>::new(&inbox)?;
    for which in order {
        handles.drop_one(which);
    }
    flushed(&inbox)
}

/// A handler in context `C` drops all handles of another connection on the same CQ, and of its own.
fn in_handler<C: Polled>() -> Result {
    let (env, inbox, calls) = (Env::new()?, Inbox::new()?, Counter::new()?);
    let cq = env.cq::<C>(64)?;
    let free = cq.free_entries();
    let id = env.id()?;
    let qp = Qp::create(&id, &env.pd, &cq, &cq, &CAPS, &env.cx)?;
    let handles = Handles::<C>::new(&inbox)?;
    let (keeps, counts) = (
        (qp.clone(), id.clone(), cq.clone(), env.pd.clone()),
        calls.clone(),
    );
    let handler = OnDone::<context::Atomic, _>::new(move |_, _| {
        drop(handles);
        drop(keeps);
        counts.up();
    })?;
    qp.post_recv(handler, |_| Ok(RecvWr::new([])))?;
    drop(id);
    qp.drain(&env.cx)?;
    check_eq!(calls.get(), 1);
    drop(qp);
    flushed(&inbox)?;
    wait(|| cq.free_entries() == free)
}

#[kunit_tests(rdma_teardown)]
mod tests {
    use super::*;

    #[test]
    fn qp_cq_pd_id() -> Result {
        in_order::<Softirq>([0, 1, 2, 3])
    }

    #[test]
    fn id_pd_cq_qp() -> Result {
        in_order::<Softirq>([3, 2, 1, 0])
    }

    #[test]
    fn every_order() -> Result {
        for first in 0..4 {
            for second in (0..4).filter(|n| *n != first) {
                for third in (0..4).filter(|n| ![first, second].contains(n)) {
                    let fourth = 6 - first - second - third;
                    in_order::<Workqueue>([first, second, third, fourth])?;
                }
            }
        }
        Ok(())
    }

    #[test]
    fn reverse_direct() -> Result {
        in_order::<Direct>([3, 2, 1, 0])
    }

    #[test]
    fn reverse_unbound_workqueue() -> Result {
        in_order::<UnboundWorkqueue>([3, 2, 1, 0])
    }

    #[test]
    fn in_a_softirq_handler() -> Result {
        in_handler::<Softirq>()
    }

    #[test]
    fn in_a_direct_handler() -> Result {
        in_handler::<Direct>()
    }

    #[test]
    fn in_a_workqueue_handler() -> Result {
        in_handler::<Workqueue>()
    }

    #[test]
    fn in_an_unbound_workqueue_handler() -> Result {
        in_handler::<UnboundWorkqueue>()
    }

    #[test]
    fn qp_keeps_all_that_it_uses() -> Result {
        let link = Link::<Softirq>::new()?;
        let Link {
            a,
            b,
            send_cq,
            recv_cq,
            env,
        } = link;
        drop((send_cq, recv_cq));
        let (qp_a, qp_b) = (a.qp.clone(), b.qp.clone());
        drop((a, b));
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        recv(&qp_b, env.message(&received, &[0; 4])?)?;
        send(&qp_a, env.message(&sent, b"data")?)?;
        wait(|| sent.len() == 1 && received.len() == 1)?;
        check_eq!(&received.pop()?.bytes()?[..], b"data");
        Ok(())
    }

    #[test]
    fn forgotten_for_a_while() -> Result {
        let inbox = Inbox::new()?;
        let mut handles = ManuallyDrop::new(Handles::<Softirq>::new(&inbox)?);
        for which in [2, 1, 3] {
            handles.drop_one(which);
        }
        // Forgetting a QP leaves its requests posted and all that they use in place.
        in_order::<Softirq>([0, 1, 2, 3])?;
        check_eq!(inbox.len(), 0);
        check_eq!(inbox.dropped(), 0);
        drop(ManuallyDrop::into_inner(handles));
        flushed(&inbox)
    }

    #[test]
    fn from_another_thread() -> Result {
        let inbox = Inbox::new()?;
        let handles = Handles::<Workqueue>::new(&inbox)?;
        Env::new()?
            .client
            .spawn(GFP_KERNEL, move |_| drop(handles))?;
        flushed(&inbox)
    }

    #[test]
    fn under_traffic() -> Result {
        for _ in 0..4 {
            let (link, sent, received) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
            for i in 0..8 {
                recv(&link.b.qp, link.env.message(&received, &[0; 64])?)?;
                send(&link.a.qp, link.env.message(&sent, &[i; 64])?)?;
            }
            drop(link);
            wait(|| sent.len() == 8 && received.len() == 8)?;
        }
        Ok(())
    }

    #[test]
    fn one_side_under_traffic() -> Result {
        let (link, sent, received) = (Link::<Workqueue>::new()?, Inbox::new()?, Inbox::new()?);
        for i in 0..8 {
            recv(&link.b.qp, link.env.message(&received, &[0; 64])?)?;
            send(&link.a.qp, link.env.message(&sent, &[i; 64])?)?;
        }
        let Link { a, b, .. } = link;
        drop(b);
        wait(|| received.len() == 8)?;
        drop(a);
        wait(|| sent.len() == 8)
    }
}
