// SPDX-License-Identifier: GPL-2.0

//! Chains and batches that the device refuses at each position: what was posted completes, what was
//! not is undone, and the owner comes back when that is proved.

#[cfg(has_faults)]
use crate::fixture::with_fault;
use crate::{
    check::{
        expect,
        fail, //
    },
    fixture::{
        both,
        send,
        CountDrop,
        Counted,
        Counter,
        Inbox,
        Message,
        Null,
        NullEnv,
        Polled,
        RegOwner,
        CAPS, //
    }, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::Chain, //
};
use rdma_null::Injection;

const LINKS: u32 = 4;

/// Adds the message as many times as there is room.
fn full<'a, const LINKS: usize>(m: &'a Message, chain: &mut Chain<'a, LINKS>) -> Result {
    (0..LINKS).try_for_each(|_| chain.push(SendWr::send([m.buf.whole()])))
}

/// Two QPs, one of which has receives for all links, and inboxes for what is sent and received.
fn ready<C: Polled>() -> Result<(Null<C>, Arc<Inbox>, Arc<Inbox>)> {
    let (null, sent, received) = (Null::new()?, Inbox::new()?, Inbox::new()?);
    for _ in 0..LINKS + 1 {
        null.recv(&received, 1)?;
    }
    Ok((null, sent, received))
}

type Shared = Arc<SharedRegion<Bidirectional>>;

/// Two registrations, each followed by a message.
#[derive(HasCqe)]
struct Io {
    cqe: Cqe<Self>,
    regions: [Shared; 2],
    _gone: CountDrop,
}

impl Io {
    fn new(regions: &[Shared; 2], gone: &Arc<Counter>) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            regions: regions.clone(),
            _gone: CountDrop(gone.clone()),
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    fn fill<'a>(&'a self, chain: &mut Chain<'a, 4>) -> Result {
        self.regions.iter().try_for_each(|region| {
            chain.push(both(region))?;
            chain.push(SendWr::send([]))
        })
    }
}

impl CqeHandler for Io {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

/// Registrations of a region of its own, behind a box, and of one that others have too.
#[derive(HasCqe)]
struct Mixed {
    cqe: Cqe<Self>,
    own: KBox<Region<Bidirectional>>,
    shared: Shared,
}

impl Mixed {
    fn new(null: &Null<Softirq>) -> Result<Pin<KBox<Self>>> {
        let buf = Buf::alloc(&null.env.pd, 64, &null.env.cx)?;
        let this = Self {
            cqe: Cqe::new(),
            own: KBox::new(Region::new(buf, &null.env.cx)?, GFP_KERNEL)?,
            shared: null.env.region(64)?,
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }

    fn fill<'a>(&'a self, chain: &mut Chain<'a, 4>) -> Result {
        chain.push(both(&self.own))?;
        chain.push(both(&self.shared))?;
        chain.push(SendWr::send([]))
    }
}

impl CqeHandler for Mixed {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

#[kunit_tests(rdma_null_chain)]
mod tests {
    use super::*;

    #[test]
    fn is_refused_at_each_position() -> Result {
        for after in 0..LINKS {
            let (null, sent, received) = ready::<Softirq>()?;
            null.inject(Injection::Refuse { after, errno: 5 })?;
            let message = null.env.message(&sent, b"x")?;
            let Err(e) = null
                .a
                .post_chain(message, |m, chain: &mut Chain<'_, 4>| full(m, chain))
            else {
                return Err(fail("it was posted"));
            };
            check_eq!(e.error(), EIO);
            check_eq!(e.posted(), after);
            // Those before it arrive.
            null.take(&received, after as usize)?;
            check_eq!(sent.len() + sent.dropped() as usize, 0);
            match e.owner {
                Some(owner) => {
                    check_eq!(after, 0);
                    send(&null.a, owner)?;
                    null.one(&sent)?.ok()?;
                }
                None => {
                    check!(after > 0);
                    null.a.drain(&null.env.cx)?;
                    check_eq!(sent.len(), 0);
                }
            }
            check_eq!(sent.dropped(), 1);
        }
        Ok(())
    }

    /// A driver that names the first request of a list, whichever had no room: what it may have
    /// posted keeps the owner, and the registrations, until the QP was drained.
    #[test]
    fn driver_that_names_the_first_may_have_posted_some() -> Result {
        for after in 0..LINKS {
            let (null, gone) = (
                Null::<Softirq>::on(NullEnv::erdma()?, &CAPS)?,
                Counter::new()?,
            );
            let regions = [null.env.region(64)?, null.env.region(64)?];
            null.disconnect()?;
            null.inject(Injection::Refuse { after, errno: 12 })?;
            let Err(e) = null.a.post_chain(Io::new(&regions, &gone)?, Io::fill) else {
                return Err(fail("it was posted"));
            };
            check_eq!((e.error(), e.posted()), (ENOMEM, LINKS - 1));
            check!(e.owner.is_none());
            check_eq!(gone.get(), 0);
            check!(regions.iter().all(|region| !region.is_idle()));
            null.a.drain(&null.env.cx)?;
            check_eq!(gone.get(), 1);
        }
        Ok(())
    }

    /// So may it have of a batch. One request is the one that it names, and so is any that is not
    /// refused for want of room.
    #[test]
    fn driver_that_names_the_first_may_have_posted_some_of_a_batch() -> Result {
        let null = Null::<Workqueue>::on(NullEnv::erdma()?, &CAPS)?;
        let sent = Inbox::new()?;
        null.disconnect()?;
        for (errno, posted) in [(12, 3), (5, 1)] {
            null.inject(Injection::Refuse { after: 1, errno })?;
            let mut batch = null.a.batch(null.env.message(&sent, b"x")?);
            check!(batch
                .post(|m, chain: &mut Chain<'_, 4>| full(m, chain))
                .is_err());
            check_eq!(batch.posted(), posted);
            null.inject(Injection::Refuse { after: 0, errno })?;
            check!(batch
                .finish(|m, chain: &mut Chain<'_, 1>| full(m, chain))
                .is_err());
            check_eq!(batch.posted(), posted);
            batch.finish(|m, chain: &mut Chain<'_, 1>| full(m, chain))?;
            null.one(&sent)?.ok()?;
        }
        Ok(())
    }

    #[test]
    fn batch_is_refused_at_each_position() -> Result {
        for after in 0..LINKS {
            let (null, sent, received) = ready::<Workqueue>()?;
            null.inject(Injection::Refuse { after, errno: 5 })?;
            let mut batch = null.a.batch(null.env.message(&sent, b"x")?);
            let first = batch.post(|m, chain: &mut Chain<'_, 2>| full(m, chain));
            check_eq!(first.is_err(), after < 2);
            check_eq!(batch.posted(), after.min(2));
            if let Err(e) = batch.finish(|m, chain: &mut Chain<'_, 2>| full(m, chain)) {
                check!(after >= 2);
                check_eq!(e, EIO);
                check_eq!(batch.posted(), after);
                check_eq!(sent.len(), 0);
                batch.finish(|m, chain: &mut Chain<'_, 2>| full(m, chain))?;
            } else {
                check!(after < 2);
            }
            null.one(&sent)?.ok()?;
            null.take(&received, after as usize + 2)?;
            null.a.drain(&null.env.cx)?;
            check_eq!(sent.len(), 0);
            check_eq!(sent.dropped(), 1);
        }
        Ok(())
    }

    #[test]
    fn registrations_that_were_not_posted_are_undone() -> Result {
        for after in 0..LINKS {
            let (null, gone) = (Null::<Softirq>::new()?, Counter::new()?);
            let regions = [null.env.region(64)?, null.env.region(64)?];
            null.disconnect()?;
            null.inject(Injection::Refuse { after, errno: 5 })?;
            let io = Io::new(&regions, &gone)?;
            check_err!(null.a.post_chain(io, Io::fill), EIO);
            null.a.drain(&null.env.cx)?;
            check_eq!(gone.get(), 1);
            for (region, at) in regions.iter().zip([0, 2]) {
                let was_posted = after > at;
                check_eq!(region.is_idle(), !was_posted);
                let again = null
                    .b
                    .post_send(RegOwner::new(region)?, |o| Ok(both(&o.region)));
                match was_posted {
                    true => check_err!(again, EBUSY),
                    false => drop(again?),
                }
            }
        }
        Ok(())
    }

    #[test]
    fn flush_completes_each_request_and_the_owner_once() -> Result {
        let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
        null.inject(Injection::Fail)?;
        let message = null.env.message(&sent, b"x")?;
        null.a
            .post_chain(message, |m, chain: &mut Chain<'_, 4>| full(m, chain))?;
        check_eq!(null.cq.process(16), LINKS);
        check!(null.one(&sent)?.was_flushed());
        null.a.drain(&null.env.cx)?;
        check_eq!((sent.len(), sent.dropped()), (0, 1));
        Ok(())
    }

    #[test]
    fn failure_of_each_request_flushes_those_behind_it() -> Result {
        for position in 0..LINKS {
            let (null, sent) = (Null::<Direct>::new()?, Inbox::new()?);
            null.disconnect()?;
            let message = null.env.message(&sent, b"x")?;
            let mut batch = null.a.batch(message);
            for n in 0..LINKS - 1 {
                if n == position {
                    null.inject_fatal(wc::Status::LOC_PROT_ERR)?;
                }
                batch.post(|m, chain: &mut Chain<'_, 1>| full(m, chain))?;
            }
            if position == LINKS - 1 {
                null.inject_fatal(wc::Status::LOC_PROT_ERR)?;
            }
            batch.finish(|m, chain: &mut Chain<'_, 1>| full(m, chain))?;
            // A request that has succeeded without a signal does not complete.
            check_eq!(null.cq.process(16), LINKS - position);
            let status = if position == LINKS - 1 {
                wc::Status::LOC_PROT_ERR
            } else {
                wc::Status::WR_FLUSH_ERR
            };
            check_eq!(null.one(&sent)?.status(), Some(status));
            null.a.drain(&null.env.cx)?;
            check_eq!((sent.len(), sent.dropped()), (0, 1));
        }
        Ok(())
    }

    #[test]
    fn owner_stays_where_it_is_if_the_device_does_not_say_what_it_refused() -> Result {
        for after in 0..LINKS {
            let (null, times) = (Null::<Softirq>::new()?, Counter::new()?);
            null.disconnect()?;
            let counted = Counted::new(&times)?;
            null.inject(Injection::Mute { after, errno: 5 })?;
            expect(
                1,
                "did not say which request it refused: the owner is leaked",
            );
            let posted = null
                .a
                .post_chain(counted.clone(), |_, chain: &mut Chain<'_, 4>| {
                    (0..LINKS).try_for_each(|_| chain.push(SendWr::send([])))
                });
            let Err(e) = posted else {
                return Err(fail("it was posted"));
            };
            check_eq!(e.error(), EIO);
            check!(e.owner.is_none());
            // It may complete yet, for all that is known, and here it does: as the second
            // completion of another request of the same owner.
            check_eq!(times.get(), 0);
            // SAFETY: It takes the reference of the chain, which was leaked.
            unsafe { null.dev.duplicate(null.a.num(), 1) }?;
            null.a
                .post_send(counted.clone(), |_| Ok(SendWr::send([])))?;
            null.a.drain(&null.env.cx)?;
            check_eq!(times.get(), 2);
            check!(Arc::into_unique_or_drop(counted).is_some());
        }
        Ok(())
    }

    #[test]
    fn exclusive_and_shared_region_in_one_chain() -> Result {
        let null = Null::<Softirq>::new()?;
        null.disconnect()?;
        let mut owner = Mixed::new(&null)?;
        // It is refused, and has an error in its making, and all is as before.
        for _ in 0..2 {
            null.inject(Injection::Refuse { after: 0, errno: 5 })?;
            let Err(e) = null.a.post_chain(owner, Mixed::fill) else {
                return Err(fail("it was posted"));
            };
            check_eq!(e.error(), EIO);
            owner = e.owner.ok_or(EIO)?;
            check!(owner.own.is_idle() && owner.shared.is_idle());
            let posted = null.a.post_chain(owner, |m, chain: &mut Chain<'_, 4>| {
                m.fill(chain)?;
                // Each one is registered once.
                check_err!(chain.push(both(&m.own)), EBUSY);
                check_err!(chain.push(both(&m.shared)), EBUSY);
                Err(EDOM)
            });
            let Err(e) = posted else {
                return Err(fail("it was posted"));
            };
            check_eq!(e.error(), EDOM);
            owner = e.owner.ok_or(EIO)?;
            check!(owner.own.is_idle() && owner.shared.is_idle());
        }
        let shared = owner.shared.clone();
        null.a.post_chain(owner, Mixed::fill)?;
        check!(!shared.is_idle());
        null.a.drain(&null.env.cx)?;
        check!(!shared.is_idle());
        Ok(())
    }

    #[test]
    fn all_of_a_batch_counts_as_posted_if_the_device_does_not_say() -> Result {
        let (null, gone) = (Null::<Softirq>::new()?, Counter::new()?);
        let regions = [null.env.region(64)?, null.env.region(64)?];
        null.disconnect()?;
        null.inject(Injection::Mute { after: 1, errno: 5 })?;
        let mut batch = null.a.batch(Io::new(&regions, &gone)?);
        check_err!(batch.post(Io::fill), EIO);
        check_eq!(batch.posted(), 4);
        check!(batch.into_error(EIO).owner.is_none());
        check_eq!(gone.get(), 0);
        null.a.drain(&null.env.cx)?;
        check_eq!(gone.get(), 1);
        check!(regions.iter().all(|region| !region.is_idle()));
        Ok(())
    }

    #[cfg(has_faults)]
    #[test]
    fn owner_is_not_freed_if_there_is_no_memory_to_keep_it() -> Result {
        let (null, times) = (Null::<Softirq>::new()?, Counter::new()?);
        null.disconnect()?;
        let counted = Counted::new(&times)?;
        let mut batch = null.a.batch(counted.clone());
        batch.post(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])))?;
        expect(
            1,
            "no memory to keep the owner of posted requests: it is leaked",
        );
        let ((), has_failed) = with_fault(1, || drop(batch));
        check!(has_failed);
        null.a.drain(&null.env.cx)?;
        // SAFETY: The batch's reference was forgotten, and the QP is drained.
        let lost = unsafe { Arc::from_raw(Arc::as_ptr(&counted)) };
        drop(counted);
        check!(Arc::into_unique_or_drop(lost).is_some());
        Ok(())
    }
}
