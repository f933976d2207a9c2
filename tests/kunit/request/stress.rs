// SPDX-License-Identifier: GPL-2.0

//! Many messages, from several threads, with owners that go round.

use crate::fixture::{
    wait,
    Counter,
    Link,
    OnDone,
    Polled, //
};
use kernel::{
    prelude::*,
    sync::atomic::{
        ordering::{
            Full,
            Relaxed, //
        },
        Atomic, //
    }, //
};
use rdma::prelude::*;

const MESSAGES: u32 = 250;
const WINDOW: u32 = 16;

/// The state that all messages of a run share.
struct Run<C: Polled> {
    /// The number of messages that are still to be sent; it may become negative.
    to_send: Atomic<i32>,
    received: Atomic<u32>,
    wrong: Atomic<u32>,
    from: Qp<C>,
    to: Qp<C>,
}

/// A message that its handler posts again until the run is over.
#[derive(HasCqe)]
struct Round<C: Polled> {
    cqe: Cqe<Self>,
    receive: Cqe<Self, 1>,
    buf: Buf<Bidirectional>,
    run: Arc<Run<C>>,
}

impl<C: Polled> CqeHandler for Round<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        match wc.result() {
            Ok(_) => this.send(),
            Err(_) => this.run.wrong.add(1, Relaxed),
        }
    }
}

impl<C: Polled> CqeHandler<1> for Round<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let Ok(wc) = wc.result() else { return };
        let whole = this.buf.cpu().iter().all(|byte| *byte == 0xa5);
        if !whole || wc.byte_len() != 64 {
            this.run.wrong.add(1, Relaxed);
        }
        this.buf.cpu().fill(0);
        this.run.received.fetch_add(1, Full);
        this.recv();
    }
}

impl<C: Polled> Round<C> {
    fn new(link: &Link<C>, run: &Arc<Run<C>>, byte: u8) -> Result<Pin<KBox<Self>>> {
        let mut buf = Buf::alloc(&link.env.pd, 64, &link.env.cx)?;
        buf.cpu().fill(byte);
        let this = Self {
            cqe: Cqe::new(),
            receive: Cqe::new(),
            buf,
            run: run.clone(),
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    fn send(self: Pin<KBox<Self>>) {
        let run = self.run.clone();
        if run.to_send.fetch_sub(1, Full) <= 0 {
            return;
        }
        let posted = run
            .from
            .post_send(self, |m| Ok(SendWr::send([m.buf.sge(0..64)?])));
        if posted.is_err() {
            run.wrong.add(1, Relaxed);
        }
    }

    fn recv(self: Pin<KBox<Self>>) {
        let run = self.run.clone();
        let posted = run.to.post_recv(self, |m| {
            Ok(RecvWr::new([m.buf.sge_mut(0..64)?]).done_by::<1>())
        });
        if posted.is_err() {
            run.wrong.add(1, Relaxed);
        }
    }
}

/// Sends all messages in context `C`.
fn run<C: Polled>() -> Result {
    not_on_iwarp!(c"no send waits for a receive");
    let param = cm::ConnParam {
        rnr_retry_count: 7,
        ..Default::default()
    };
    let link = Link::<C>::with(&Caps::new(WINDOW, 2 * WINDOW), &param)?;
    let ended = rounds(&link);
    // The receives keep the run, and the run the QP that they are posted to: until it is flushed.
    link.a.qp.drain(&link.env.cx)?;
    link.b.qp.drain(&link.env.cx)?;
    ended
}

fn rounds<C: Polled>(link: &Link<C>) -> Result {
    let run = Run {
        to_send: Atomic::new(MESSAGES as i32),
        received: Atomic::new(0),
        wrong: Atomic::new(0),
        from: link.a.qp.clone(),
        to: link.b.qp.clone(),
    };
    let run = Arc::new(run, GFP_KERNEL)?;
    for _ in 0..2 * WINDOW {
        Round::new(link, &run, 0)?.recv();
    }
    for _ in 0..WINDOW {
        Round::new(link, &run, 0xa5)?.send();
    }
    let mut received = 0;
    while received < MESSAGES {
        // It may go on for long, but it must go on.
        let before = received;
        link.wait(|| {
            received = run.received.load(Relaxed);
            received > before || run.wrong.load(Relaxed) != 0
        })?;
        check_eq!(run.wrong.load(Relaxed), 0);
    }
    check_eq!(received, MESSAGES);
    Ok(())
}

/// Two threads post to one QP at once; every request completes once.
fn two_threads<C: Polled>() -> Result {
    const EACH: i32 = 64;
    let link = Link::<C>::with(&Caps::new(2 * EACH as u32, 1), &cm::ConnParam::default())?;
    let (completed, refused) = (Counter::new()?, Counter::new()?);
    let posters = Counter::new()?;
    for _ in 0..2 {
        let (qp, completed, refused) = (link.a.qp.clone(), completed.clone(), refused.clone());
        let posters = posters.clone();
        link.env.client.spawn(GFP_KERNEL, move |_| {
            for _ in 0..EACH {
                let counts = completed.clone();
                let posted = OnDone::<context::Atomic, _>::new(move |_, _| {
                    counts.up();
                })
                .and_then(|counted| {
                    // An empty write asks nothing of the peer.
                    let nowhere = Remote { addr: 0, rkey: 0 };
                    Ok(qp.post_send(counted, |_| Ok(SendWr::rdma_write([], nowhere)))?)
                });
                if posted.is_err() {
                    refused.up();
                }
            }
            posters.up();
        })?;
    }
    link.wait(|| posters.get() == 2 && completed.get() == 2 * EACH)?;
    check_eq!(refused.get(), 0);
    link.a.qp.drain(&link.env.cx)?;
    check_eq!(completed.get(), 2 * EACH);
    Ok(())
}

#[kunit_tests(rdma_stress)]
mod tests {
    use super::*;

    #[test]
    fn many_messages_direct() -> Result {
        run::<Direct>()
    }

    #[test]
    fn many_messages_softirq() -> Result {
        run::<Softirq>()
    }

    #[test]
    fn many_messages_workqueue() -> Result {
        run::<Workqueue>()
    }

    #[test]
    fn many_messages_unbound_workqueue() -> Result {
        run::<UnboundWorkqueue>()
    }

    #[test]
    fn two_threads_direct() -> Result {
        two_threads::<Direct>()
    }

    #[test]
    fn two_threads_softirq() -> Result {
        two_threads::<Softirq>()
    }

    #[test]
    fn two_threads_workqueue() -> Result {
        two_threads::<Workqueue>()
    }

    #[test]
    fn two_threads_poll_one_cq() -> Result {
        const N: i32 = 100;
        let link = Link::<Direct>::with(&Caps::new(N as u32, 1), &cm::ConnParam::default())?;
        let (completed, pollers) = (Counter::new()?, Counter::new()?);
        for _ in 0..2 {
            let (cq, done, pollers) = (link.send_cq.clone(), completed.clone(), pollers.clone());
            link.env.client.spawn(GFP_KERNEL, move |_| {
                let _ = wait(|| {
                    cq.process(3);
                    done.get() >= N
                });
                pollers.up();
            })?;
        }
        for _ in 0..N {
            let counts = completed.clone();
            let counted = OnDone::<context::Atomic, _>::new(move |_, _| {
                counts.up();
            })?;
            let nowhere = Remote { addr: 0, rkey: 0 };
            link.a
                .qp
                .post_send(counted, |_| Ok(SendWr::rdma_write([], nowhere)))?;
        }
        wait(|| pollers.get() == 2)?;
        check_eq!(completed.get(), N);
        Ok(())
    }

    #[test]
    fn connections_come_and_go() -> Result {
        for _ in 0..8 {
            let link = Link::<Softirq>::new()?;
            link.a.id.disconnect(&link.env.cx)?;
        }
        Ok(())
    }
}
