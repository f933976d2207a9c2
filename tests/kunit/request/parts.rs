// SPDX-License-Identifier: GPL-2.0

//! Requests of several parts, which are over when the last of them has come back: a counted owner,
//! posted once for each part.

use crate::fixture::{
    recv,
    send,
    wait,
    Counter,
    Inbox,
    Link, //
};
use kernel::prelude::*;
use rdma::prelude::*;

/// The completions that the handlers of a request have seen.
struct Seen {
    parts: Arc<Counter>,
    over: Arc<Counter>,
    right: Arc<Counter>,
}

/// A question that is over when it was sent and the answer has come, in whichever order.
#[derive(HasCqe)]
struct Request {
    sent: Cqe<Self>,
    answered: Cqe<Self, 1>,
    question: Buf<ToDevice>,
    answer: Buf<FromDevice>,
    seen: Arc<Seen>,
}

impl Request {
    fn new(link: &Link<Direct>) -> Result<Arc<Self>> {
        let (pd, cx) = (&link.env.pd, &link.env.cx);
        let seen = Seen {
            parts: Counter::new()?,
            over: Counter::new()?,
            right: Counter::new()?,
        };
        let mut this = Self {
            sent: Cqe::new(),
            answered: Cqe::new(),
            question: Buf::alloc(pd, 4, cx)?,
            answer: Buf::alloc(pd, 4, cx)?,
            seen: Arc::new(seen, GFP_KERNEL)?,
        };
        this.question.cpu().copy_from_slice(b"ping");
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// Posts both parts, and keeps neither.
    fn ask(self: Arc<Self>, qp: &Qp<Direct>) -> Result {
        qp.post_recv(self.clone(), |r| {
            Ok(RecvWr::new([r.answer.whole_mut()]).done_by::<1>())
        })?;
        qp.post_send(self, |r| Ok(SendWr::send([r.question.whole()])))?;
        Ok(())
    }

    /// The last part has the request to itself, and may look at the answer.
    fn part_done(this: Arc<Self>) {
        this.seen.parts.up();
        if let Some(mut request) = Arc::into_unique_or_drop(this) {
            if *request.answer.cpu() == *b"pong" {
                request.seen.right.up();
            }
            request.seen.over.up();
        }
    }
}

impl CqeHandler for Request {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        Self::part_done(this);
    }
}

impl CqeHandler<1> for Request {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        Self::part_done(this);
    }
}

/// Asks, and has the peer answer. Completions are waiting in both CQs then.
fn asked(link: &Link<Direct>) -> Result<Arc<Seen>> {
    let inbox = Inbox::new()?;
    recv(&link.b.qp, link.env.message(&inbox, b"....")?)?;
    let request = Request::new(link)?;
    let seen = request.seen.clone();
    request.ask(&link.a.qp)?;
    wait(|| {
        link.recv_cq.process(1);
        inbox.len() == 1
    })?;
    send(&link.b.qp, link.env.message(&inbox, b"pong")?)?;
    check_eq!(seen.parts.get(), 0);
    Ok(seen)
}

/// Polls one CQ, until its part of the request has come back.
fn part(cq: &Cq<Direct>, seen: &Seen) -> Result {
    let before = seen.parts.get();
    wait(|| {
        cq.process(1);
        seen.parts.get() > before
    })
}

#[kunit_tests(rdma_parts)]
mod tests {
    use super::*;

    #[test]
    fn answer_comes_last() -> Result {
        let link = Link::<Direct>::new()?;
        let seen = asked(&link)?;
        part(&link.send_cq, &seen)?;
        check_eq!(seen.over.get(), 0);
        part(&link.recv_cq, &seen)?;
        check_eq!(seen.over.get(), 1);
        check_eq!(seen.right.get(), 1);
        Ok(())
    }

    #[test]
    fn answer_overtakes_the_completion_of_the_send() -> Result {
        let link = Link::<Direct>::new()?;
        let seen = asked(&link)?;
        part(&link.recv_cq, &seen)?;
        check_eq!(seen.over.get(), 0);
        part(&link.send_cq, &seen)?;
        check_eq!(seen.over.get(), 1);
        check_eq!(seen.right.get(), 1);
        Ok(())
    }

    #[test]
    fn answer_that_never_comes() -> Result {
        let link = Link::<Direct>::new()?;
        let (request, inbox) = (Request::new(&link)?, Inbox::new()?);
        let seen = request.seen.clone();
        recv(&link.b.qp, link.env.message(&inbox, b"....")?)?;
        request.ask(&link.a.qp)?;
        part(&link.send_cq, &seen)?;
        check_eq!(seen.over.get(), 0);
        link.a.qp.drain(&link.env.cx)?;
        check_eq!(seen.parts.get(), 2);
        check_eq!(seen.over.get(), 1);
        check_eq!(seen.right.get(), 0);
        Ok(())
    }
}
