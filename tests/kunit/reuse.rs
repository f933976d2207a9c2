// SPDX-License-Identifier: GPL-2.0

//! Requests that are allocated once, and started again and again.

use crate::fixture::{
    both,
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
type Shelf = Arc<SpinLockIrq<KVec<InFlight<Request>>>>;

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
    type Pointer = InFlight<Self>;
    type Needs = context::Atomic;

    fn done(mut this: InFlight<Self>, _wc: &Wc, _cx: &context::Atomic) {
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

    fn request(&self, pd: &Pd, bytes: &[u8], cx: &Sleepable) -> Result<Reusable<Request>> {
        self.request_for(pd, bytes, None, cx)
    }

    fn request_for(
        &self,
        pd: &Pd,
        bytes: &[u8],
        shelf: Option<Shelf>,
        cx: &Sleepable,
    ) -> Result<Reusable<Request>> {
        let mut buf = Buf::alloc(pd, bytes.len(), cx)?;
        buf.cpu().copy_from_slice(bytes);
        let request = Request {
            before: [1, 2, 3],
            cqe: Cqe::new(),
            buf,
            uses: 0,
            completed: self.completed.clone(),
            shelf,
            _gone: CountDrop(self.gone.clone()),
        };
        Reusable::new(request, GFP_KERNEL)
    }

    fn get(&self) -> (i32, i32) {
        (self.completed.get(), self.gone.get())
    }
}

fn send<C: Provides<context::Atomic>>(qp: &Qp<C>, request: InFlight<Request>) -> Result {
    Ok(qp.post_send(request, |r| Ok(SendWr::send([r.buf.whole()])))?)
}

fn uses(request: &mut Reusable<Request>) -> Option<i32> {
    Some(request.get()?.uses)
}

/// A null device whose QP sends to no peer.
fn void() -> Result<Null<Direct>> {
    let null = Null::<Direct>::new()?;
    null.disconnect()?;
    Ok(null)
}

#[kunit_tests(rdma_reuse)]
mod tests {
    use super::*;

    #[test]
    fn request_is_used_again_and_again() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut request = counts.request(&null.env.pd, b"x", &null.env.cx)?;
        for turn in 1..=1000 {
            send(&null.a, request.start().ok_or(EBUSY)?)?;
            check!(uses(&mut request).is_none());
            check_eq!(null.cq.process(4), 1);
            check_eq!(uses(&mut request), Some(turn));
        }
        check_eq!(counts.get(), (1000, 0));
        drop(request);
        check_eq!(counts.get(), (1000, 1));
        Ok(())
    }

    #[test]
    fn request_is_in_flight_once_at_a_time() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut request = counts.request(&null.env.pd, b"x", &null.env.cx)?;
        let mut in_flight = request.start().ok_or(EBUSY)?;
        check!(request.start().is_none());
        check!(request.get().is_none());
        in_flight.uses = 7;
        in_flight.uses += 1;
        // Not posted: it comes back all the same.
        drop(in_flight);
        check_eq!(uses(&mut request), Some(8));
        check!(request.start().is_some());
        check_eq!(counts.get(), (0, 0));
        Ok(())
    }

    #[test]
    fn keeper_goes_before_the_completion() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut request = counts.request(&null.env.pd, b"x", &null.env.cx)?;
        send(&null.a, request.start().ok_or(EBUSY)?)?;
        drop(request);
        check_eq!(counts.get(), (0, 0));
        check_eq!(null.cq.process(4), 1);
        check_eq!(counts.get(), (1, 1));
        Ok(())
    }

    #[test]
    fn handler_may_keep_it_for_longer() -> Result {
        let (null, counts, shelf) = (void()?, Counts::new()?, shelf()?);
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        let mut request = counts.request_for(pd, b"x", Some(shelf.clone()), cx)?;
        send(&null.a, request.start().ok_or(EBUSY)?)?;
        check_eq!(null.cq.process(4), 1);
        null.a.drain(cx)?;
        check!(request.start().is_none());
        let in_flight = shelf.lock().pop().ok_or(ENOENT)?;
        // It can be posted from there, too.
        send(&null.b, in_flight)?;
        null.b.drain(cx)?;
        check_eq!(uses(&mut request), Some(2));
        check_eq!(counts.get(), (2, 0));
        Ok(())
    }

    #[test]
    fn keeper_goes_before_who_keeps_it_for_longer() -> Result {
        let (null, counts, shelf) = (void()?, Counts::new()?, shelf()?);
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        let mut request = counts.request_for(pd, b"x", Some(shelf.clone()), cx)?;
        send(&null.a, request.start().ok_or(EBUSY)?)?;
        check_eq!(null.cq.process(4), 1);
        drop(request);
        check_eq!(counts.get(), (1, 0));
        let in_flight = shelf.lock().pop();
        drop(in_flight);
        check_eq!(counts.get(), (1, 1));
        Ok(())
    }

    #[test]
    fn refused_request_comes_back_in_the_error() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut request = counts.request(&null.env.pd, b"x", &null.env.cx)?;
        null.inject(Injection::Refuse { after: 0, errno: 5 })?;
        let in_flight = request.start().ok_or(EBUSY)?;
        let posted = null
            .a
            .post_send(in_flight, |r| Ok(SendWr::send([r.buf.whole()])));
        let Err(refused) = posted else {
            return Err(crate::check::fail("it was posted"));
        };
        check_eq!(refused.error(), EIO);
        let in_flight = refused.owner.ok_or(EIO)?;
        check_eq!(in_flight.uses, 0);
        check!(request.start().is_none());
        drop(in_flight);
        check_eq!(uses(&mut request), Some(0));
        check_eq!(null.cq.process(4), 0);
        check_eq!(counts.get(), (0, 0));
        Ok(())
    }

    #[test]
    fn flushed_requests_come_home() -> Result {
        let (link, counts) = (Link::<Softirq>::new()?, Counts::new()?);
        let mut all = [
            counts.request(&link.env.pd, b"1", &link.env.cx)?,
            counts.request(&link.env.pd, b"2", &link.env.cx)?,
        ];
        for request in &mut all {
            let in_flight = request.start().ok_or(EBUSY)?;
            link.b
                .qp
                .post_recv(in_flight, |r| Ok(RecvWr::new([r.buf.whole_mut()])))?;
        }
        check_eq!(counts.get(), (0, 0));
        link.b.qp.drain(&link.env.cx)?;
        for request in &mut all {
            check_eq!(uses(request), Some(1));
        }
        drop(all);
        check_eq!(counts.get(), (2, 2));
        Ok(())
    }

    #[test]
    fn received_bytes_are_read_at_home() -> Result {
        let (link, counts, sent) = (Link::<Softirq>::new()?, Counts::new()?, Inbox::new()?);
        let mut request = counts.request(&link.env.pd, &[0; 4], &link.env.cx)?;
        for turn in 0..4 {
            let in_flight = request.start().ok_or(EBUSY)?;
            link.b
                .qp
                .post_recv(in_flight, |r| Ok(RecvWr::new([r.buf.whole_mut()])))?;
            let bytes = [turn, 1, 2, 3];
            crate::fixture::send(&link.a.qp, link.env.message(&sent, &bytes)?)?;
            link.wait(|| request.get().is_some())?;
            let request = request.get().ok_or(EBUSY)?;
            check_eq!(&*request.buf.cpu(), &bytes);
        }
        link.wait(|| sent.len() == 4)
    }

    #[test]
    fn chain_and_its_owner_come_home() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut request = counts.request(&null.env.pd, b"x", &null.env.cx)?;
        for turn in 1..=3 {
            let in_flight = request.start().ok_or(EBUSY)?;
            null.a
                .post_chain(in_flight, |r, chain: &mut Chain<'_, 2>| {
                    chain.push(SendWr::send([r.buf.whole()]))?;
                    chain.push(SendWr::send([r.buf.whole()]))
                })?;
            check_eq!(null.cq.process(4), 1);
            check_eq!(uses(&mut request), Some(turn));
        }
        Ok(())
    }

    #[test]
    fn batch_takes_what_was_lent() -> Result {
        let (null, counts) = (void()?, Counts::new()?);
        let mut request = counts.request(&null.env.pd, b"x", &null.env.cx)?;
        send(&null.a, request.start().ok_or(EBUSY)?)?;
        let polled = null.cq.process_with(4, |completion| {
            if let Ok((mut request, _wc)) = completion.take::<Request, 0>() {
                request.uses = 40;
            }
        })?;
        check_eq!(polled, 1);
        // The handler was not called.
        check_eq!(counts.get(), (0, 0));
        check_eq!(uses(&mut request), Some(40));
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
            type Pointer = InFlight<Self>;
            type Needs = context::Atomic;
            fn done(_this: InFlight<Self>, _wc: &Wc, _cx: &context::Atomic) {}
        }

        let null = Null::<Direct>::new()?;
        let region = Region::new(Buf::alloc(&null.env.pd, 64, &null.env.cx)?, &null.env.cx)?;
        let cqe = Cqe::new();
        let mut request = Reusable::new(Io { cqe, region }, GFP_KERNEL)?;
        for _ in 0..3 {
            let in_flight = request.start().ok_or(EBUSY)?;
            null.a.post_send(in_flight, |io| Ok(both(&io.region)))?;
            check_eq!(null.cq.process(4), 1);
            check!(request.get().is_some_and(|io| !io.region.is_idle()));
            let in_flight = request.start().ok_or(EBUSY)?;
            null.a
                .post_send(in_flight, |io| Ok(InvWr::new(&io.region)))?;
            check_eq!(null.cq.process(4), 1);
            check!(request.get().is_some_and(|io| io.region.is_idle()));
        }
        Ok(())
    }

    #[test]
    fn request_is_dropped_with_its_last_handle() -> Result {
        let gone = Counter::new()?;
        let mut request = Reusable::new(CountDrop(gone.clone()), GFP_KERNEL)?;
        let in_flight = request.start().ok_or(EBUSY)?;
        drop(request);
        check_eq!(gone.get(), 0);
        drop(in_flight);
        check_eq!(gone.get(), 1);
        Ok(())
    }
}
