// SPDX-License-Identifier: GPL-2.0

//! Arrays of requests that are taken again and again.

use crate::fixture::{
    both,
    wait,
    CountDrop,
    Counter,
    Inbox,
    Link,
    Null, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::{
    prelude::*,
    qp::Chain, //
};
use rdma_null::Injection;

/// The list of requests that handlers do not give back at once.
type Shelf = Arc<SpinLockIrq<KVec<Taken<Request>>>>;

fn shelf() -> Result<Shelf> {
    Arc::pin_init(new_spinlock_irq!(KVec::new()), GFP_KERNEL)
}

/// A request that counts. Its callback is neither at its beginning nor at that of the memory that
/// it is kept in.
#[derive(HasCqe)]
#[repr(C, align(64))]
struct Request {
    before: [u8; 3],
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
    /// The number of times that it has completed.
    uses: i32,
    /// The number of times that all of them have.
    completed: Arc<Counter>,
    shelf: Option<Shelf>,
    _gone: CountDrop,
}

impl CqeHandler for Request {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    fn done(mut this: Taken<Self>, _wc: &Wc, _cx: &context::Atomic) {
        if this.before == [1, 2, 3] {
            this.uses += 1;
            this.completed.up();
        }
        if let Some(shelf) = this.shelf.take() {
            let lost = shelf.lock().push(this, GFP_ATOMIC);
            if lost.is_err() {
                pr_err!("FAILED: no memory for a request\n");
            }
        }
    }
}

/// The counts of requests.
struct Counts {
    completed: Arc<Counter>,
    gone: Arc<Counter>,
}

impl Counts {
    fn new() -> Result<Self> {
        Ok(Self {
            completed: Counter::new()?,
            gone: Counter::new()?,
        })
    }

    /// Returns `count` requests of this QP.
    fn requests<S: PollContext, R: PollContext>(
        &self,
        qp: &Qp<S, R>,
        pd: &Pd,
        count: usize,
        cx: &Sleepable,
    ) -> Result<Requests<Request>> {
        Requests::new(qp, count, |_| self.request(pd, b"x", None, cx), cx)
    }

    fn request(
        &self,
        pd: &Pd,
        bytes: &[u8],
        shelf: Option<Shelf>,
        cx: &Sleepable,
    ) -> Result<Request> {
        let mut buf = Buf::alloc(pd, bytes.len(), cx)?;
        buf.cpu().copy_from_slice(bytes);
        Ok(Request {
            before: [1, 2, 3],
            cqe: Cqe::new(),
            buf,
            uses: 0,
            completed: self.completed.clone(),
            shelf,
            _gone: CountDrop(self.gone.clone()),
        })
    }

    fn get(&self) -> (i32, i32) {
        (self.completed.get(), self.gone.get())
    }
}

fn send<C: Provides<context::Atomic>>(qp: &Qp<C>, request: Taken<Request>) -> Result {
    Ok(qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?)
}

fn take<T>(requests: &mut Requests<T>) -> Result<Taken<T>> {
    requests.take().ok_or(EBUSY)
}

fn uses(requests: &mut Requests<Request>) -> Option<i32> {
    Some(requests.take_at(0)?.uses)
}

/// A null device whose QP sends to no peer.
fn void() -> Result<Null<Direct>> {
    let null = Null::<Direct>::new()?;
    null.disconnect()?;
    Ok(null)
}

#[kunit_tests(rdma_requests)]
mod tests {
    use super::*;

    #[test]
    fn request_is_used_again_and_again() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut requests = counts.requests(&null.a, &null.env.pd, 1, &null.env.cx)?;
        for turn in 1..=1000 {
            send(&null.a, take(&mut requests)?)?;
            check!(uses(&mut requests).is_none());
            check_eq!(null.cq.process(4), 1);
            check_eq!(uses(&mut requests), Some(turn));
        }
        check_eq!(counts.get(), (1000, 0));
        drop(requests);
        wait(|| counts.get() == (1000, 1))
    }

    #[test]
    fn request_is_in_flight_once_at_a_time() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut requests = counts.requests(&null.a, &null.env.pd, 1, &null.env.cx)?;
        let mut in_flight = take(&mut requests)?;
        check!(requests.take().is_none());
        check!(requests.take_at(0).is_none());
        check!(requests.idle().next().is_none());
        in_flight.uses = 7;
        in_flight.uses += 1;
        // Not posted: it comes back nevertheless.
        drop(in_flight);
        check_eq!(uses(&mut requests), Some(8));
        check!(requests.take().is_some());
        check!(requests.take_at(1).is_none());
        check_eq!(counts.get(), (0, 0));
        Ok(())
    }

    #[test]
    fn requests_are_taken_in_their_order() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut requests = counts.requests(&null.a, &null.env.pd, 3, &null.env.cx)?;
        check_eq!(requests.count(), 3);
        for (number, mut request) in requests.idle().enumerate() {
            request.uses = 10 * number as i32;
        }
        let mut next = || -> Result<i32> { Ok(take(&mut requests)?.uses) };
        for number in [0, 1, 2, 0, 1] {
            check_eq!(next()?, 10 * number);
        }
        // Number 2 is out, so the one behind it is next.
        let second = requests.take_at(2).ok_or(EBUSY)?;
        check_eq!(take(&mut requests)?.uses, 0);
        check_eq!(take(&mut requests)?.uses, 10);
        drop(second);
        check_eq!(take(&mut requests)?.uses, 20);
        Ok(())
    }

    #[test]
    fn array_goes_before_the_completion() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut requests = counts.requests(&null.a, &null.env.pd, 2, &null.env.cx)?;
        send(&null.a, take(&mut requests)?)?;
        drop(requests);
        check_eq!(counts.get(), (0, 0));
        check_eq!(null.cq.process(4), 1);
        wait(|| counts.get() == (1, 2))
    }

    #[test]
    fn handler_may_keep_it_for_longer() -> Result {
        let (null, counts, shelf) = (void()?, Counts::new()?, shelf()?);
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        let kept = |_| counts.request(pd, b"x", Some(shelf.clone()), cx);
        let mut requests = Requests::new(&null.a, 1, kept, cx)?;
        send(&null.a, take(&mut requests)?)?;
        check_eq!(null.cq.process(4), 1);
        null.b.drain(cx)?;
        check!(requests.take().is_none());
        let in_flight = shelf.lock().pop().ok_or(ENOENT)?;
        // It can be posted from there, too.
        send(&null.a, in_flight)?;
        check_eq!(null.cq.process(4), 1);
        check_eq!(uses(&mut requests), Some(2));
        check_eq!(counts.get(), (2, 0));
        Ok(())
    }

    #[test]
    fn array_goes_before_who_keeps_a_request_for_longer() -> Result {
        let (null, counts, shelf) = (void()?, Counts::new()?, shelf()?);
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        let kept = |_| counts.request(pd, b"x", Some(shelf.clone()), cx);
        let mut requests = Requests::new(&null.a, 1, kept, cx)?;
        send(&null.a, take(&mut requests)?)?;
        check_eq!(null.cq.process(4), 1);
        drop(requests);
        check_eq!(counts.get(), (1, 0));
        let in_flight = shelf.lock().pop();
        // The QP may be gone by then.
        let Null { a, env, .. } = null;
        a.destroy(&env.cx)?;
        check_eq!(counts.get(), (1, 0));
        drop(in_flight);
        wait(|| counts.get() == (1, 1))
    }

    #[test]
    #[cfg(debug_assertions)]
    fn request_of_another_qp_is_refused() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut requests = counts.requests(&null.a, &null.env.pd, 1, &null.env.cx)?;
        let refused = |posted: core::result::Result<(), PostError<Taken<Request>>>| {
            check_eq!(posted.map_err(|e| e.error()), Err(EINVAL));
            Ok(())
        };
        refused(
            null.b
                .post_send(take(&mut requests)?, |r| Ok(SendWr::send([r.buf.whole()]))),
        )?;
        refused(null.b.post_recv(take(&mut requests)?, |r| {
            Ok(RecvWr::new([r.buf.whole_mut()]))
        }))?;
        let mut batch = null.b.batch(take(&mut requests)?);
        check_eq!(batch.post(|_, _: &mut Chain<'_, 1>| Ok(())), Err(EINVAL));
        drop(batch);
        refused(
            null.b
                .post_chain(take(&mut requests)?, |r, chain: &mut Chain<'_, 1>| {
                    chain.push(SendWr::send([r.buf.whole()]))
                }),
        )?;
        // Each has come back, and nothing was posted.
        check_eq!(null.cq.process(4), 0);
        check_eq!(uses(&mut requests), Some(0));
        Ok(())
    }

    #[test]
    #[cfg(not(debug_assertions))]
    fn request_of_another_qp_is_not_that_of_its_own() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let Null {
            env, dev, cq, a, b, ..
        } = null;
        let mut requests = counts.requests(&a, &env.pd, 2, &env.cx)?;
        send(&a, take(&mut requests)?)?;
        check_eq!(cq.process(4), 1);
        dev.inject_qp(b.num(), Injection::Hold { count: 1 })?;
        send(&b, take(&mut requests)?)?;
        // The end of A leaves it to B.
        a.destroy(&env.cx)?;
        check_eq!(counts.get(), (1, 0));
        let all = Injection::Release {
            count: u32::MAX,
            reversed: false,
        };
        dev.inject_qp(b.num(), all)?;
        check_eq!(cq.process(4), 1);
        check_eq!(counts.get(), (2, 0));
        check_eq!(requests.idle().count(), 2);
        Ok(())
    }

    #[test]
    fn several_qps_share_an_array() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        let qps = [&null.a, &null.a, &null.b, &null.a];
        let make = |index: usize| {
            let qp = qps.get(index).ok_or(EINVAL)?;
            Ok((*qp, counts.request(pd, b"x", None, cx)?))
        };
        let mut requests = Requests::of_qps(qps.len(), make, cx)?;
        for (qp, request) in qps.iter().zip(requests.idle()) {
            send(qp, request)?;
        }
        check_eq!(null.cq.process(8), 4);
        check_eq!(requests.idle().filter(|r| r.uses == 1).count(), 4);
        Ok(())
    }

    #[test]
    fn array_has_a_request() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let none = counts.requests(&null.a, &null.env.pd, 0, &null.env.cx);
        check_eq!(none.err(), Some(EINVAL));
        Ok(())
    }

    #[test]
    fn failing_init_leaves_nothing() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        let make = |index| match index {
            3 => Err(EDOM),
            _ => counts.request(pd, b"x", None, cx),
        };
        check_eq!(Requests::new(&null.a, 8, make, cx).err(), Some(EDOM));
        check_eq!(counts.get(), (0, 3));
        Ok(())
    }

    #[test]
    fn requests_are_initialised_in_place() -> Result {
        let (null, counts) = (void()?, &Counts::new()?);
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        // One of them fails behind other fields of it.
        let make = |index| {
            try_init!(Request {
                before: [1, 2, 3],
                cqe: Cqe::new(),
                uses: 0,
                completed: counts.completed.clone(),
                shelf: None,
                _gone: CountDrop(counts.gone.clone()),
                buf: if index == 3 { Err(EDOM) } else { Buf::alloc(pd, 1, cx) }?,
            }? Error)
        };
        check_eq!(Requests::new(&null.a, 8, make, cx).err(), Some(EDOM));
        check_eq!(counts.get(), (0, 4));
        let mut requests = Requests::new(&null.a, 3, make, cx)?;
        check_eq!(uses(&mut requests), Some(0));
        drop(requests);
        wait(|| counts.get() == (0, 7))
    }

    #[test]
    fn refused_request_comes_back_in_the_error() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut requests = counts.requests(&null.a, &null.env.pd, 1, &null.env.cx)?;
        null.inject(Injection::Refuse { after: 0, errno: 5 })?;
        let posted = null
            .a
            .post_send(take(&mut requests)?, |r| Ok(SendWr::send([r.buf.whole()])));
        let Err(refused) = posted else {
            return Err(crate::check::fail("it was posted"));
        };
        check_eq!(refused.error(), EIO);
        let in_flight = refused.owner.ok_or(EIO)?;
        check_eq!(in_flight.uses, 0);
        check!(requests.take().is_none());
        drop(in_flight);
        check_eq!(uses(&mut requests), Some(0));
        check_eq!(null.cq.process(4), 0);
        check_eq!(counts.get(), (0, 0));
        Ok(())
    }

    #[test]
    fn flushed_requests_come_home() -> Result {
        let (link, counts) = (Link::<Softirq>::new()?, Counts::new()?);
        let mut requests = counts.requests(&link.b.qp, &link.env.pd, 2, &link.env.cx)?;
        for in_flight in requests.idle() {
            link.b
                .qp
                .post_recv(in_flight, |r| Ok(RecvWr::new([r.buf.whole_mut()])))?;
        }
        check_eq!(counts.get(), (0, 0));
        link.b.qp.drain(&link.env.cx)?;
        check_eq!(requests.idle().filter(|r| r.uses == 1).count(), 2);
        drop(requests);
        wait(|| counts.get() == (2, 2))
    }

    #[test]
    fn received_bytes_are_read_at_home() -> Result {
        let (link, counts, sent) = (Link::<Softirq>::new()?, Counts::new()?, Inbox::new()?);
        let (pd, cx) = (&link.env.pd, &link.env.cx);
        let make = |_| counts.request(pd, &[0; 4], None, cx);
        let mut requests = Requests::new(&link.b.qp, 1, make, cx)?;
        for turn in 0..4 {
            link.b.qp.post_recv(take(&mut requests)?, |r| {
                Ok(RecvWr::new([r.buf.whole_mut()]))
            })?;
            let bytes = [turn, 1, 2, 3];
            crate::fixture::send(&link.a.qp, link.env.message(&sent, &bytes)?)?;
            link.wait(|| requests.take_at(0).is_some())?;
            check_eq!(&*take(&mut requests)?.buf.cpu(), &bytes);
        }
        link.wait(|| sent.len() == 4)
    }

    #[test]
    fn chain_and_its_owner_come_home() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut requests = counts.requests(&null.a, &null.env.pd, 1, &null.env.cx)?;
        for turn in 1..=3 {
            null.a
                .post_chain(take(&mut requests)?, |r, chain: &mut Chain<'_, 2>| {
                    chain.push(SendWr::send([r.buf.whole()]))?;
                    chain.push(SendWr::send([r.buf.whole()]))
                })?;
            check_eq!(null.cq.process(4), 1);
            check_eq!(uses(&mut requests), Some(turn));
        }
        Ok(())
    }

    #[test]
    fn batch_takes_what_was_lent() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut requests = counts.requests(&null.a, &null.env.pd, 1, &null.env.cx)?;
        send(&null.a, take(&mut requests)?)?;
        let polled = null.cq.process_with(4, |completion| {
            if let Ok((mut request, _wc)) = completion.take::<Request, 0>() {
                request.uses = 40;
            }
        })?;
        check_eq!(polled, 1);
        // The handler was not called.
        check_eq!(counts.get(), (0, 0));
        check_eq!(uses(&mut requests), Some(40));
        Ok(())
    }

    #[test]
    fn region_of_what_was_lent_is_registered() -> Result {
        #[derive(HasCqe)]
        struct Io {
            cqe: Cqe<Self>,
            region: Region<Bidirectional>,
        }
        impl CqeHandler for Io {
            type Pointer = Taken<Self>;
            type Needs = context::Atomic;
            fn done(_this: Taken<Self>, _wc: &Wc, _cx: &context::Atomic) {}
        }

        let null = Null::<Direct>::new()?;
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        let make = |_| {
            Ok(Io {
                cqe: Cqe::new(),
                region: Region::new(Buf::alloc(pd, 64, cx)?, cx)?,
            })
        };
        let mut requests = Requests::new(&null.a, 1, make, cx)?;
        for _ in 0..3 {
            null.a
                .post_send(take(&mut requests)?, |io| Ok(both(&io.region)))?;
            check_eq!(null.cq.process(4), 1);
            check!(requests.take().is_some_and(|io| !io.region.is_idle()));
            null.a
                .post_send(take(&mut requests)?, |io| Ok(InvWr::new(&io.region)))?;
            check_eq!(null.cq.process(4), 1);
            check!(requests.take().is_some_and(|io| io.region.is_idle()));
        }
        Ok(())
    }
}
