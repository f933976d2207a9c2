// SPDX-License-Identifier: GPL-2.0

//! Owners of requests: boxes, counted references, several callbacks in one struct.

use crate::fixture::{
    recv,
    send,
    CountDrop,
    Counter,
    Inbox,
    Link,
    OnDone, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::Chain, //
};

/// An owner that is counted and has two callbacks.
#[derive(HasCqe)]
struct Twin {
    before: [u8; 3],
    first: Cqe<Self>,
    second: Cqe<Self, 1>,
    firsts: Arc<Counter>,
    seconds: Arc<Counter>,
    _gone: CountDrop,
}

impl Twin {
    fn new(gone: &Arc<Counter>) -> Result<Arc<Self>> {
        let this = Self {
            before: [1, 2, 3],
            first: Cqe::new(),
            second: Cqe::new(),
            firsts: Counter::new()?,
            seconds: Counter::new()?,
            _gone: CountDrop(gone.clone()),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }
}

impl CqeHandler for Twin {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        if this.before == [1, 2, 3] {
            this.firsts.up();
        }
    }
}

impl CqeHandler<1> for Twin {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.seconds.up();
    }
}

/// A large owner whose callback is at its end.
#[derive(HasCqe)]
struct Large {
    bytes: [u8; 512],
    right: Arc<Counter>,
    cqe: Cqe<Self, 77>,
}

impl CqeHandler<77> for Large {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        if this.bytes.iter().all(|byte| *byte == 0x5a) {
            this.right.up();
        }
    }
}

fn send_nothing(link: &Link<Softirq>) -> Result {
    let nothing = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    Ok(link.a.qp.post_send(nothing, |_| Ok(SendWr::send([])))?)
}

#[kunit_tests(rdma_cqe)]
mod tests {
    use super::*;

    #[test]
    fn callback_is_as_small_as_in_c() -> Result {
        check_eq!(size_of::<Cqe<Twin>>(), size_of::<usize>());
        check_eq!(size_of::<Cqe<Twin, 1>>(), size_of::<usize>());
        Ok(())
    }

    #[test]
    fn counted_owner_comes_back_once() -> Result {
        let (link, gone) = (Link::<Softirq>::new()?, Counter::new()?);
        let twin = Twin::new(&gone)?;
        link.b.qp.post_recv(twin.clone(), |_| Ok(RecvWr::new([])))?;
        send_nothing(&link)?;
        link.wait(|| twin.firsts.get() == 1)?;
        link.b.qp.drain(&link.env.cx)?;
        check_eq!(twin.firsts.get(), 1);
        check_eq!(gone.get(), 0);
        drop(twin);
        crate::fixture::wait(|| gone.get() == 1)
    }

    #[test]
    fn queue_may_have_the_only_reference() -> Result {
        let (link, gone) = (Link::<Softirq>::new()?, Counter::new()?);
        link.b
            .qp
            .post_recv(Twin::new(&gone)?, |_| Ok(RecvWr::new([])))?;
        check_eq!(gone.get(), 0);
        send_nothing(&link)?;
        link.wait(|| gone.get() == 1)
    }

    #[test]
    fn callbacks_of_one_owner_are_told_apart() -> Result {
        let (link, gone) = (Link::<Softirq>::new()?, Counter::new()?);
        let twin = Twin::new(&gone)?;
        link.b
            .qp
            .post_recv(twin.clone(), |_| Ok(RecvWr::new([]).done_by::<1>()))?;
        link.b.qp.post_recv(twin.clone(), |_| Ok(RecvWr::new([])))?;
        send_nothing(&link)?;
        link.wait(|| twin.seconds.get() == 1)?;
        check_eq!(twin.firsts.get(), 0);
        send_nothing(&link)?;
        link.wait(|| twin.firsts.get() == 1)?;
        check_eq!(twin.seconds.get(), 1);
        drop(twin);
        crate::fixture::wait(|| gone.get() == 1)
    }

    #[test]
    fn requests_complete_to_the_handler_that_they_name() -> Result {
        let (link, gone) = (Link::<Softirq>::new()?, Counter::new()?);
        let (twin, qp) = (Twin::new(&gone)?, &link.a.qp);
        qp.post_send(twin.clone(), |_| Ok(SendWr::send([]).done_by::<1>()))?;
        qp.post_chain(twin.clone(), |_, chain: &mut Chain<'_, 2, 0, 1>| {
            chain.push(SendWr::send([]))?;
            chain.push(SendWr::send([]))
        })?;
        let mut batch = qp.batch(twin.clone());
        batch.post(|_, chain: &mut Chain<'_, 1, 0, 1>| chain.push(SendWr::send([])))?;
        batch.finish(|_, chain: &mut Chain<'_, 1, 0, 1>| chain.push(SendWr::send([])))?;
        let mut batch = qp.batch(twin.clone());
        batch.finish(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])))?;
        qp.post_chain(twin.clone(), |_, chain: &mut Chain<'_, 1>| {
            chain.push(SendWr::send([]))
        })?;
        qp.drain(&link.env.cx)?;
        check_eq!(twin.firsts.get(), 2);
        check_eq!(twin.seconds.get(), 3);
        drop(twin);
        crate::fixture::wait(|| gone.get() == 1)
    }

    #[test]
    fn one_owner_in_many_requests() -> Result {
        let (link, gone) = (Link::<Softirq>::new()?, Counter::new()?);
        let twin = Twin::new(&gone)?;
        for _ in 0..4 {
            link.b.qp.post_recv(twin.clone(), |_| Ok(RecvWr::new([])))?;
            link.b
                .qp
                .post_recv(twin.clone(), |_| Ok(RecvWr::new([]).done_by::<1>()))?;
        }
        link.b.qp.drain(&link.env.cx)?;
        check_eq!(twin.firsts.get(), 4);
        check_eq!(twin.seconds.get(), 4);
        check_eq!(gone.get(), 0);
        drop(twin);
        crate::fixture::wait(|| gone.get() == 1)
    }

    #[test]
    fn callback_may_be_anywhere_in_its_owner() -> Result {
        let (link, right) = (Link::<Softirq>::new()?, Counter::new()?);
        let large = Large {
            bytes: [0x5a; 512],
            right: right.clone(),
            cqe: Cqe::new(),
        };
        let large = KBox::pin(large, GFP_KERNEL)?;
        link.b
            .qp
            .post_recv(large, |_| Ok(RecvWr::new([]).done_by::<77>()))?;
        send_nothing(&link)?;
        link.wait(|| right.get() == 1)
    }

    #[test]
    fn owner_may_be_freed_by_its_handler() -> Result {
        let (link, gone) = (Link::<Softirq>::new()?, Counter::new()?);
        let owned = CountDrop(gone.clone());
        let frees = OnDone::<context::Atomic, _>::new(move |_, _| drop(owned))?;
        link.b.qp.post_recv(frees, |_| Ok(RecvWr::new([])))?;
        send_nothing(&link)?;
        link.wait(|| gone.get() == 1)
    }

    #[test]
    fn owner_is_posted_again_by_its_handler() -> Result {
        #[derive(HasCqe)]
        struct Again {
            cqe: Cqe<Self>,
            qp: Qp<Softirq>,
            calls: Arc<Counter>,
        }
        impl CqeHandler for Again {
            type Pointer = Arc<Self>;
            type Needs = context::Atomic;
            fn done(this: Arc<Self>, wc: &Wc, _cx: &context::Atomic) {
                let (qp, calls) = (this.qp.clone(), this.calls.clone());
                if wc.result().is_ok() && calls.get() < 4 {
                    let _ = qp.post_recv(this, |_| Ok(RecvWr::new([])));
                }
                // The next message is sent when this is counted, so there is a receive for it.
                calls.up();
            }
        }

        let (link, calls) = (Link::<Softirq>::new()?, Counter::new()?);
        let again = Again {
            cqe: Cqe::new(),
            qp: link.b.qp.clone(),
            calls: calls.clone(),
        };
        let again = Arc::new(again, GFP_KERNEL)?;
        link.b.qp.post_recv(again, |_| Ok(RecvWr::new([])))?;
        for i in 1..=5 {
            send_nothing(&link)?;
            link.wait(|| calls.get() == i)?;
        }
        Ok(())
    }

    #[test]
    fn memory_of_an_owner_may_be_taken_out() -> Result {
        let (link, inbox, sent) = (Link::<Softirq>::new()?, Inbox::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&inbox, &[0; 3])?)?;
        send(&link.a.qp, link.env.message(&sent, b"abc")?)?;
        link.wait(|| inbox.len() == 1 && sent.len() == 1)?;
        let mut message = inbox.pop()?.message;
        // The connection may go; the memory stays.
        drop(link);
        check_eq!(&*message.buf.cpu(), b"abc");
        Ok(())
    }
}
