// SPDX-License-Identifier: GPL-2.0

//! Requests that are not posted: their owners come back in the error.

use crate::fixture::{
    recv,
    send,
    Env,
    Inbox,
    Link, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    wr::PostError, //
};

/// An owner that is counted.
#[derive(HasCqe)]
struct Counted {
    cqe: Cqe<Self>,
    value: u32,
}

impl CqeHandler for Counted {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

/// The owner is back, untouched, with this error.
fn given_back(
    result: core::result::Result<(), PostError<Pin<KBox<crate::fixture::Message>>>>,
    error: Error,
    bytes: &[u8],
) -> Result {
    match result {
        Ok(()) => Err(crate::check::fail("it was posted")),
        Err(e) => {
            check_eq!((e.error(), e.posted()), (error, 0));
            check_eq!(&*e.owner.ok_or(EIO)?.buf.cpu(), bytes);
            Ok(())
        }
    }
}

#[kunit_tests(rdma_post)]
mod tests {
    use super::*;

    #[test]
    fn send_from_a_foreign_pd() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        let foreign = Env::new()?;
        given_back(
            send(&link.a.qp, foreign.message(&inbox, b"mine")?),
            EINVAL,
            b"mine",
        )?;
        check_eq!(inbox.len(), 0);
        check_eq!(inbox.dropped(), 1);
        Ok(())
    }

    #[test]
    fn receive_to_a_foreign_pd() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        let foreign = Env::new()?;
        given_back(
            recv(&link.b.qp, foreign.message(&inbox, b"mine")?),
            EINVAL,
            b"mine",
        )?;
        check_eq!(inbox.dropped(), 1);
        Ok(())
    }

    #[test]
    fn foreign_entry_among_others() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        let foreign = Env::new()?;

        #[derive(HasCqe)]
        struct Two {
            cqe: Cqe<Self>,
            own: Buf<ToDevice>,
            foreign: Buf<ToDevice>,
        }
        impl CqeHandler for Two {
            type Pointer = Pin<KBox<Self>>;
            type Needs = context::Atomic;
            fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
        }

        let two = Two {
            cqe: Cqe::new(),
            own: Buf::alloc(&link.env.pd, 4, &link.env.cx)?,
            foreign: Buf::alloc(&foreign.pd, 4, &link.env.cx)?,
        };
        let two = KBox::pin(two, GFP_KERNEL)?;
        let posted = link.a.qp.post_send(two, |m| {
            Ok(SendWr::send([m.own.sge(0..4)?, m.foreign.sge(0..4)?]))
        });
        check_err!(posted, EINVAL);
        // Nothing was sent: the connection is as it was.
        let sent = Inbox::new()?;
        recv(&link.b.qp, link.env.message(&inbox, &[0; 2])?)?;
        send(&link.a.qp, link.env.message(&sent, b"ok")?)?;
        link.wait(|| inbox.len() == 1)?;
        check_eq!(&inbox.pop()?.bytes()?[..], b"ok");
        Ok(())
    }

    #[test]
    fn error_of_the_closure() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        let message = link.env.message(&inbox, b"abc")?;
        let posted = link
            .a
            .qp
            .post_send(message, |_| Err::<SendWr<'_, 1>, _>(ERANGE));
        given_back(posted, ERANGE, b"abc")?;
        let message = link.env.message(&inbox, b"def")?;
        let posted = link
            .a
            .qp
            .post_recv(message, |_| Err::<RecvWr<'_, 1>, _>(EDOM));
        given_back(posted, EDOM, b"def")?;
        check_eq!(inbox.dropped(), 2);
        Ok(())
    }

    #[test]
    fn range_outside_of_the_owner() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        let message = link.env.message(&inbox, b"abc")?;
        let posted = link
            .a
            .qp
            .post_send(message, |m| Ok(SendWr::send([m.buf.sge(0..4)?])));
        given_back(posted, EINVAL, b"abc")
    }

    #[test]
    fn send_before_the_connection() -> Result {
        not_on_iwarp!(c"siw refuses it with another error");
        let (env, inbox) = (Env::new()?, Inbox::new()?);
        let qp = env.qp(&env.cq::<Softirq>(64)?, &Caps::new(4, 4))?;
        given_back(send(&qp, env.message(&inbox, b"early")?), EINVAL, b"early")
    }

    #[test]
    fn too_many_send_entries() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        let message = link.env.message(&inbox, b"abc")?;
        let posted = link.a.qp.post_send(message, |m| {
            Ok(SendWr::send([
                m.buf.sge(0..1)?,
                m.buf.sge(1..2)?,
                m.buf.sge(2..3)?,
            ]))
        });
        given_back(posted, EINVAL, b"abc")
    }

    #[test]
    fn too_many_receive_entries() -> Result {
        let (link, inbox) = (Link::<Softirq>::new()?, Inbox::new()?);
        let message = link.env.message(&inbox, b"abc")?;
        let posted = link.b.qp.post_recv(message, |m| {
            Ok(RecvWr::new([
                m.buf.sge_mut(0..1)?,
                m.buf.sge_mut(1..2)?,
                m.buf.sge_mut(2..3)?,
            ]))
        });
        given_back(posted, EINVAL, b"abc")
    }

    #[test]
    fn receive_queue_full() -> Result {
        let (env, inbox) = (Env::new()?, Inbox::new()?);
        let qp = env.qp(&env.cq::<Direct>(64)?, &Caps::new(1, 5))?;
        let mut posted = 0;
        loop {
            match recv(&qp, env.message(&inbox, b"full")?) {
                Ok(()) => posted += 1,
                Err(e) => break given_back(Err(e), ENOMEM, b"full")?,
            }
            check!(posted < 64);
        }
        check!(posted >= 5);
        qp.destroy(&env.cx)?;
        // All came back but the one that was refused, which is gone.
        check_eq!(inbox.len(), posted);
        check_eq!(inbox.dropped(), 1);
        Ok(())
    }

    #[test]
    fn send_queue_full() -> Result {
        not_on_iwarp!(c"a message that finds no receive ends the connection");
        let (link, inbox) = (Link::<Direct>::new()?, Inbox::new()?);
        let mut posted = 0;
        // There is no receive, so nothing completes for a while.
        loop {
            match send(&link.a.qp, link.env.message(&inbox, b"full")?) {
                Ok(()) => posted += 1,
                Err(e) => break given_back(Err(e), ENOMEM, b"full")?,
            }
            check!(posted < 64);
        }
        check!(posted >= 8);
        link.a.qp.drain(&link.env.cx)?;
        check_eq!(inbox.len(), posted);
        check_eq!(inbox.dropped(), 1);
        Ok(())
    }

    #[test]
    fn counted_owner_comes_back_as_it_was() -> Result {
        let env = Env::new()?;
        let qp = env.qp(&env.cq::<Softirq>(64)?, &Caps::new(4, 4))?;
        let cqe = Cqe::new();
        let owner = Arc::new(Counted { cqe, value: 42 }, GFP_KERNEL)?;
        for _ in 0..3 {
            match qp.post_send(owner.clone(), |_| Ok(SendWr::send([]))) {
                Ok(()) => return Err(crate::check::fail("it was posted")),
                Err(e) => {
                    let back = e.owner.ok_or(EIO)?;
                    check!(Arc::ptr_eq(&back, &owner));
                    check_eq!(back.value, 42);
                }
            }
        }
        // No reference was lost or made.
        check!(Arc::into_unique_or_drop(owner).is_some());
        Ok(())
    }
}
