// SPDX-License-Identifier: GPL-2.0

//! Completions that are polled into a batch, one at a time, or dispatched without an indirect call.

use crate::check::fail;
use crate::fixture::{
    received,
    recv,
    send,
    wait,
    CountDrop,
    Counter,
    Inbox,
    Link,
    Message,
    OnDone,
    Polled, //
};
use core::marker::PhantomData;
use kernel::prelude::*;
use rdma::prelude::*;

/// A request without memory. All of these types have the same code.
#[derive(HasCqe)]
struct Same<T: Send + Unpin + 'static> {
    cqe: Cqe<Self>,
    other: Cqe<Self, 1>,
    handled: Arc<Counter>,
    _gone: CountDrop,
    _type: PhantomData<T>,
}

impl<T: Send + Unpin + 'static> CqeHandler for Same<T> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.handled.up();
    }
}

impl<T: Send + Unpin + 'static> CqeHandler<1> for Same<T> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.handled.up();
    }
}

/// A counted owner.
#[derive(HasCqe)]
struct Shared {
    cqe: Cqe<Self>,
    handled: Arc<Counter>,
}

impl CqeHandler for Shared {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.handled.up();
    }
}

/// The fates of owners.
struct Fates {
    handled: Arc<Counter>,
    gone: Arc<Counter>,
}

impl Fates {
    fn new() -> Result<Self> {
        Ok(Self {
            handled: Counter::new()?,
            gone: Counter::new()?,
        })
    }

    fn owner<T: Send + Unpin + 'static>(&self) -> Result<Pin<KBox<Same<T>>>> {
        let this = Same {
            cqe: Cqe::new(),
            other: Cqe::new(),
            handled: self.handled.clone(),
            _gone: CountDrop(self.gone.clone()),
            _type: PhantomData,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    fn both(&self) -> (i32, i32) {
        (self.handled.get(), self.gone.get())
    }
}

/// Makes `n` completions of receives wait in the receive CQ.
fn complete<C: Polled, T: Send + Unpin + 'static>(
    link: &Link<C>,
    fates: &Fates,
    n: usize,
) -> Result {
    for _ in 0..n {
        link.b
            .qp
            .post_recv(fates.owner::<T>()?, |_| Ok(RecvWr::new([])))?;
    }
    messages(link, n)
}

/// Sends `n` messages, and returns when they have been received.
fn messages<C: Polled>(link: &Link<C>, n: usize) -> Result {
    let sent = Counter::new()?;
    for _ in 0..n {
        let counts = sent.clone();
        let nothing = OnDone::<context::Atomic, _>::new(move |_, _| {
            counts.up();
        })?;
        link.a.qp.post_send(nothing, |_| Ok(SendWr::send([])))?;
    }
    wait(|| {
        C::poll(&link.send_cq);
        sent.get() == n as i32
    })?;
    received(&link.env, &link.a.qp, &link.b.qp, || C::poll(&link.send_cq))
}

/// Polls into batches until `n` completions were seen.
fn collect<C: Polled + CallerPolled, const N: usize>(
    cq: &Cq<C>,
    n: usize,
    mut each: impl FnMut(cq::Completion<'_>) -> Result,
) -> Result {
    let (mut batch, mut seen) = (WcArray::<N>::new(), 0);
    wait(|| {
        while cq.poll(&mut batch).is_ok_and(|n| n > 0) {
            for completion in batch.completions() {
                seen += 1;
                if each(completion).is_err() {
                    return true;
                }
            }
        }
        seen >= n
    })?;
    check_eq!(seen, n);
    Ok(())
}

fn batches_are_bounded<C: Polled + CallerPolled>() -> Result {
    let (link, fates) = (Link::<C>::new()?, Fates::new()?);
    complete::<_, u8>(&link, &fates, 5)?;
    let mut batch = WcArray::<2>::new();
    let mut sizes = [0; 4];
    for size in &mut sizes {
        *size = link.recv_cq.poll(&mut batch)?;
        for completion in batch.completions() {
            completion.result().map_err(Error::from)?;
        }
        check!(batch.completions().next().is_none());
    }
    check_eq!(sizes, [2, 2, 1, 0]);
    check_eq!(fates.both(), (5, 5));
    Ok(())
}

fn taken_owners_are_not_handled<C: Polled + CallerPolled>() -> Result {
    let (link, sent) = (Link::<C>::new()?, Inbox::new()?);
    let received = Inbox::new()?;
    for i in 0..4 {
        recv(&link.b.qp, link.env.message(&received, &[0; 8])?)?;
        send(&link.a.qp, link.env.message(&sent, &[i; 8])?)?;
    }
    let mut i = 0;
    collect::<_, 3>(&link.recv_cq, 4, |completion| {
        let Ok((mut message, wc)) = completion.take::<Message, 0>() else {
            return Err(EINVAL);
        };
        check_eq!(wc.result().map_err(Error::from)?.byte_len(), 8);
        check_eq!(message.buf.cpu()[7], i);
        i += 1;
        Ok(())
    })?;
    check_eq!(i, 4);
    check_eq!(received.len(), 0);
    check_eq!(received.dropped(), 4);
    // Those that are not taken go to their handler.
    collect::<_, 3>(&link.send_cq, 4, |completion| {
        drop(completion);
        Ok(())
    })?;
    check_eq!(sent.len(), 4);
    check_eq!(sent.dropped(), 0);
    Ok(())
}

/// Takes owners of type `T`, and calls the handlers of others.
fn take<T: Send + Unpin + 'static, C: CallerPolled>(
    cq: &Cq<C>,
    budget: u32,
    mut done: impl FnMut(Pin<KBox<Same<T>>>, &Wc),
) -> Result<u32> {
    cq.process_with(budget, |completion| match completion.take::<Same<T>, 0>() {
        Ok((owner, wc)) => done(owner, wc),
        Err(other) => other.dispatch(),
    })
}

fn owners_are_dispatched<C: Polled + CallerPolled>() -> Result {
    let (link, fates) = (Link::<C>::new()?, Fates::new()?);
    let process = |budget| link.recv_cq.process_with(budget, |c| c.dispatch());
    check_eq!(process(1)?, 0);
    complete::<_, u8>(&link, &fates, 5)?;
    check_err!(process(0), EINVAL);
    check_eq!(fates.both(), (0, 0));
    check_eq!(process(2)?, 2);
    check_eq!(fates.both(), (2, 2));
    check_eq!(process(u32::MAX)?, 3);
    check_eq!(fates.both(), (5, 5));
    // Those that are dropped go to their handlers too.
    complete::<_, i8>(&link, &fates, 4)?;
    check_eq!(
        link.recv_cq
            .process_with(100, |completion| drop(completion))?,
        4
    );
    check_eq!(fates.both(), (9, 9));
    Ok(())
}

fn owners_are_given<C: Polled + CallerPolled>() -> Result {
    let (link, fates) = (Link::<C>::new()?, Fates::new()?);
    check_err!(take::<u8, _>(&link.recv_cq, 0, |_, _| ()), EINVAL);
    complete::<_, u8>(&link, &fates, 3)?;
    let mut kept = KVec::with_capacity(3, GFP_KERNEL)?;
    let n = take::<u8, _>(&link.recv_cq, 2, |owner, wc| {
        if wc.result().is_ok() {
            let _ = kept.push_within_capacity(owner);
        }
    })?;
    check_eq!((n, kept.len()), (2, 2));
    check_eq!(fates.both(), (0, 0));
    drop(kept);
    check_eq!(fates.both(), (0, 2));
    // Owners of other types go to their own handlers.
    let n = take::<i8, _>(&link.recv_cq, 100, |_, _| ())?;
    check_eq!(n, 1);
    check_eq!(fates.both(), (1, 3));
    Ok(())
}

/// A drain ends while another thread takes completions, the drain's own among them.
fn drains_meanwhile<C: Polled + CallerPolled>() -> Result {
    const N: usize = 8;
    let (link, fates, ended) = (Link::<C>::new()?, Fates::new()?, Counter::new()?);
    let (cq, end, done) = (link.recv_cq.clone(), ended.clone(), Counter::new()?);
    let thread_done = done.clone();
    link.env.client.spawn(GFP_KERNEL, move |_| {
        let mut batch = WcArray::<4>::new();
        let _ = wait(|| {
            while cq.poll(&mut batch).is_ok_and(|n| n > 0) {
                for completion in batch.completions() {
                    let _ = completion.take::<Same<u8>, 0>();
                }
            }
            end.get() == 1
        });
        thread_done.up();
    })?;
    for _ in 0..N {
        link.b
            .qp
            .post_recv(fates.owner::<u8>()?, |_| Ok(RecvWr::new([])))?;
    }
    let drained = link.b.qp.drain(&link.env.cx);
    ended.up();
    wait(|| done.get() == 1)?;
    drained?;
    check_eq!(fates.gone.get(), N as i32);
    Ok(())
}

#[kunit_tests(rdma_cq_poll)]
mod tests {
    use super::*;

    #[test]
    fn nothing_yet() -> Result {
        let link = Link::<Direct>::new()?;
        let mut batch = WcArray::<4>::new();
        check_eq!(link.recv_cq.poll(&mut batch)?, 0);
        check!(batch.completions().next().is_none());
        Ok(())
    }

    #[test]
    fn batches_are_bounded_direct() -> Result {
        batches_are_bounded::<Direct>()
    }

    #[test]
    fn batches_are_bounded_waited() -> Result {
        batches_are_bounded::<Waited>()
    }

    #[test]
    fn taken_owners_are_not_handled_direct() -> Result {
        taken_owners_are_not_handled::<Direct>()
    }

    #[test]
    fn taken_owners_are_not_handled_waited() -> Result {
        taken_owners_are_not_handled::<Waited>()
    }

    #[test]
    fn owners_are_dispatched_direct() -> Result {
        owners_are_dispatched::<Direct>()
    }

    #[test]
    fn owners_are_dispatched_waited() -> Result {
        owners_are_dispatched::<Waited>()
    }

    #[test]
    fn owners_are_given_direct() -> Result {
        owners_are_given::<Direct>()
    }

    #[test]
    fn owners_are_given_waited() -> Result {
        owners_are_given::<Waited>()
    }

    #[test]
    fn drains_meanwhile_direct() -> Result {
        drains_meanwhile::<Direct>()
    }

    #[test]
    fn drains_meanwhile_waited() -> Result {
        drains_meanwhile::<Waited>()
    }

    #[test]
    fn one_at_a_time() -> Result {
        let (link, fates) = (Link::<Direct>::new()?, Fates::new()?);
        complete::<_, u8>(&link, &fates, 3)?;
        let mut one = WcArray::<1>::new();
        for n in 1..4 {
            check_eq!(link.recv_cq.poll(&mut one)?, 1);
            let completion = one.completions().next().ok_or(EIO)?;
            let taken = completion.take::<Same<u8>, 0>().is_ok();
            check!(taken);
            check_eq!(fates.both(), (0, n));
        }
        check_eq!(link.recv_cq.poll(&mut one)?, 0);
        Ok(())
    }

    #[test]
    fn dropped_batch_calls_the_handlers() -> Result {
        let (link, fates) = (Link::<Direct>::new()?, Fates::new()?);
        complete::<_, u8>(&link, &fates, 4)?;
        let mut batch = WcArray::<8>::new();
        check_eq!(link.recv_cq.poll(&mut batch)?, 4);
        drop(batch.completions().next());
        check_eq!(fates.both(), (1, 1));
        drop(batch);
        check_eq!(fates.both(), (4, 4));
        Ok(())
    }

    #[test]
    fn completions_that_are_left_stay() -> Result {
        let (link, fates) = (Link::<Direct>::new()?, Fates::new()?);
        complete::<_, u8>(&link, &fates, 4)?;
        let mut batch = WcArray::<8>::new();
        check_eq!(link.recv_cq.poll(&mut batch)?, 4);
        check_eq!(batch.completions().take(2).map(drop).count(), 2);
        check_eq!(fates.both(), (2, 2));
        drop(batch.completions());
        check_eq!(fates.both(), (2, 2));
        for completion in batch.completions() {
            let taken = completion.take::<Same<u8>, 0>().is_ok();
            check!(taken);
        }
        check_eq!(fates.both(), (2, 4));
        check!(batch.completions().next().is_none());
        // Completions that are left when the batch is filled again are not lost either.
        complete::<_, u8>(&link, &fates, 3)?;
        check_eq!(link.recv_cq.poll(&mut batch)?, 3);
        drop(batch.completions().next());
        check_eq!(link.recv_cq.poll(&mut batch)?, 0);
        check_eq!(fates.both(), (5, 7));
        Ok(())
    }

    #[test]
    fn batch_may_outlive_all_else() -> Result {
        let (link, fates) = (Link::<Direct>::new()?, Fates::new()?);
        complete::<_, u8>(&link, &fates, 4)?;
        let mut batch = WcArray::<8>::new();
        check_eq!(link.recv_cq.poll(&mut batch)?, 4);
        link.b.qp.drain(&link.env.cx)?;
        drop(link);
        check_eq!(fates.both(), (0, 0));
        drop(batch);
        check_eq!(fates.both(), (4, 4));
        Ok(())
    }

    #[test]
    fn refilled_batch_calls_the_handlers() -> Result {
        let (link, fates) = (Link::<Direct>::new()?, Fates::new()?);
        complete::<_, u8>(&link, &fates, 5)?;
        let mut batch = WcArray::<3>::new();
        check_eq!(link.recv_cq.poll(&mut batch)?, 3);
        check_eq!(fates.both(), (0, 0));
        check_eq!(link.recv_cq.poll(&mut batch)?, 2);
        check_eq!(fates.both(), (3, 3));
        check_eq!(link.recv_cq.poll(&mut batch)?, 0);
        check_eq!(fates.both(), (5, 5));
        Ok(())
    }

    #[test]
    fn owner_of_another_type_is_not_taken() -> Result {
        let (link, fates) = (Link::<Direct>::new()?, Fates::new()?);
        complete::<_, u8>(&link, &fates, 1)?;
        let mut one = WcArray::<1>::new();
        check_eq!(link.recv_cq.poll(&mut one)?, 1);
        let completion = one.completions().next().ok_or(EIO)?;
        // The machine code of all these callbacks is the same.
        let mistaken = || fail("the owner was taken as another type");
        let Err(completion) = completion.take::<Same<i8>, 0>() else {
            return Err(mistaken());
        };
        let Err(completion) = completion.take::<Same<u8>, 1>() else {
            return Err(mistaken());
        };
        let Err(completion) = completion.take::<Shared, 0>() else {
            return Err(mistaken());
        };
        check_eq!(fates.both(), (0, 0));
        check!(completion.take::<Same<u8>, 0>().is_ok());
        check_eq!(fates.both(), (0, 1));
        Ok(())
    }

    #[test]
    fn counted_owner_is_taken() -> Result {
        let link = Link::<Direct>::new()?;
        let shared = Shared {
            cqe: Cqe::new(),
            handled: Counter::new()?,
        };
        let shared = Arc::new(shared, GFP_KERNEL)?;
        for _ in 0..3 {
            link.b
                .qp
                .post_recv(shared.clone(), |_| Ok(RecvWr::new([])))?;
        }
        link.a.id.disconnect(&link.env.cx)?;
        let mut taken = 0;
        collect::<_, 8>(&link.recv_cq, 3, |completion| {
            check!(completion.result().err().map(|e| e.status) == Some(wc::Status::WR_FLUSH_ERR));
            let Ok((owner, wc)) = completion.take::<Shared, 0>() else {
                return Err(EINVAL);
            };
            check!(wc.result().is_err());
            check!(Arc::ptr_eq(&owner, &shared));
            taken += 1;
            Ok(())
        })?;
        check_eq!(taken, 3);
        check_eq!(shared.handled.get(), 0);
        Ok(())
    }

    #[test]
    fn two_threads_take_each_completion_once() -> Result {
        const N: i32 = 120;
        let link = Link::<Direct>::with(&Caps::new(N as u32, 1), &cm::ConnParam::default())?;
        let (fates, taken) = (Fates::new()?, Counter::new()?);
        let threads = Counter::new()?;
        for _ in 0..2 {
            let (cq, taken) = (link.send_cq.clone(), taken.clone());
            let threads = threads.clone();
            link.env.client.spawn(GFP_KERNEL, move |_| {
                let mut batch = WcArray::<5>::new();
                let _ = wait(|| {
                    while cq.poll(&mut batch).is_ok_and(|n| n > 0) {
                        for completion in batch.completions() {
                            if completion.take::<Same<u8>, 0>().is_ok() {
                                taken.up();
                            }
                        }
                    }
                    taken.get() >= N
                });
                threads.up();
            })?;
        }
        let nowhere = Remote { addr: 0, rkey: 0 };
        for _ in 0..N {
            link.a.qp.post_send(fates.owner::<u8>()?, |_| {
                Ok(SendWr::rdma_write([], nowhere))
            })?;
        }
        wait(|| threads.get() == 2)?;
        check_eq!(taken.get(), N);
        check_eq!(fates.both(), (0, N));
        Ok(())
    }

    #[test]
    fn two_threads_dispatch_each_completion_once() -> Result {
        const N: i32 = 120;
        let link = Link::<Direct>::with(&Caps::new(N as u32, 1), &cm::ConnParam::default())?;
        let (fates, threads) = (Fates::new()?, Counter::new()?);
        for _ in 0..2 {
            let (cq, handled) = (link.send_cq.clone(), fates.handled.clone());
            let threads = threads.clone();
            link.env.client.spawn(GFP_KERNEL, move |_| {
                let _ = wait(|| {
                    let _ = cq.process_with(7, |c| c.dispatch());
                    handled.get() >= N
                });
                threads.up();
            })?;
        }
        let nowhere = Remote { addr: 0, rkey: 0 };
        for _ in 0..N {
            link.a.qp.post_send(fates.owner::<u8>()?, |_| {
                Ok(SendWr::rdma_write([], nowhere))
            })?;
        }
        wait(|| threads.get() == 2)?;
        check_eq!(fates.both(), (N, N));
        Ok(())
    }
}
