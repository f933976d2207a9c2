// SPDX-License-Identifier: GPL-2.0

//! Sends of different owners of which few are signaled.

use crate::{
    check::{
        differ,
        expect, //
    },
    fixture::{
        order,
        wait,
        Inbox,
        Message,
        Null,
        NullEnv,
        Polled,
        CAPS, //
    },
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::{
    prelude::*,
    qp::{
        Chain,
        SendRing, //
    }, //
};
use rdma_null::Injection;

const OWNERS: u32 = 8;
const INTERVAL: u32 = 4;

type Owner = Pin<KBox<Message>>;
type Posted = Result<(), PostError<Owner>>;

/// A ring of a QP that is connected to no peer, so that what it sends completes and goes nowhere.
struct Sends<C: Polled> {
    ring: SendRing<Owner>,
    inbox: Arc<Inbox>,
    null: Null<C>,
}

impl<C: Polled + Provides<context::Atomic>> Sends<C> {
    fn new() -> Result<Self> {
        Self::with(OWNERS, INTERVAL)
    }

    fn with(owners: u32, interval: u32) -> Result<Self> {
        Self::on(NullEnv::new()?, owners, interval)
    }

    fn on(null: NullEnv, owners: u32, interval: u32) -> Result<Self> {
        let null = Null::<C>::on(null, &Caps::new(2 * OWNERS, 1))?;
        null.disconnect()?;
        Ok(Self {
            ring: SendRing::new(&null.a, owners, interval, &null.env.cx)?,
            inbox: Inbox::new()?,
            null,
        })
    }

    fn owner(&self, number: u8) -> Result<Owner> {
        self.null.env.message(&self.inbox, &[number])
    }

    fn post(&mut self, number: u8) -> Result<Posted> {
        let owner = self.owner(number)?;
        let qp = &self.null.a;
        Ok(self.ring.post(qp, owner, |m, chain: &mut Chain<'_, 1>| {
            chain.push(SendWr::send([m.buf.whole()]))
        }))
    }

    /// Posts a chain of two.
    fn post_two(&mut self, number: u8) -> Result<Posted> {
        let owner = self.owner(number)?;
        let qp = &self.null.a;
        Ok(self.ring.post(qp, owner, |m, chain: &mut Chain<'_, 2>| {
            chain.push(SendWr::send([m.buf.whole()]))?;
            chain.push(SendWr::send([m.buf.whole()]))
        }))
    }

    fn post_all(&mut self, numbers: core::ops::Range<u8>) -> Result {
        for number in numbers {
            self.post(number)??;
        }
        Ok(())
    }

    /// Waits until these owners have come back, in this order, and no others.
    #[track_caller]
    fn back(&self, numbers: core::ops::Range<u8>) -> Result {
        let all = self.null.take(&self.inbox, numbers.len())?;
        check!(order(all)?.iter().copied().eq(numbers));
        Ok(())
    }

    /// Takes back what is left, which are these.
    fn reclaim(&mut self, numbers: core::ops::Range<u8>) -> Result {
        let mut back = KVec::new();
        self.ring
            .reclaim(&self.null.a, &self.null.env.cx, |mut owner| {
                let number = owner.buf.cpu().first().copied();
                if back.push(number, GFP_KERNEL).is_err() {
                    pr_err!("FAILED: no memory for an owner\n");
                }
            })?;
        check!(back.iter().copied().eq(numbers.map(Some)));
        Ok(())
    }
}

fn in_order<C: Polled + Provides<context::Atomic>>() -> Result {
    let mut sends = Sends::<C>::new()?;
    let mut first = 0;
    for _ in 0..5 {
        sends.post_all(first..first + 3)?;
        C::poll(&sends.null.cq);
        check_eq!(sends.inbox.len(), 0);
        sends.post(first + 3)??;
        sends.back(first..first + 4)?;
        first += 4;
    }
    sends.post_all(first..first + 2)?;
    sends.reclaim(first..first + 2)
}

/// A response of an array, which a target sends behind its data.
#[derive(HasCqe)]
struct Response {
    cqe: Cqe<Self>,
    number: usize,
    buf: Buf<Bidirectional>,
    /// The numbers of the responses that have completed.
    sent: Arc<SpinLockIrq<KVec<usize>>>,
}

impl CqeHandler for Response {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    fn done(this: Taken<Self>, _wc: &Wc, _cx: &context::Atomic) {
        let lost = this.sent.lock().push(this.number, GFP_ATOMIC);
        if lost.is_err() {
            pr_err!("FAILED: no memory for a number\n");
        }
    }
}

/// Responses that are taken again when a signaled one has completed, or the ring was reclaimed, or
/// the QP is destroyed while the completion of a signaled one is lost and others have none.
fn responses<C: Polled + Provides<context::Atomic>>(reclaims: bool) -> Result {
    let null = Null::<C>::with(&Caps::new(4 * OWNERS, 1))?;
    null.disconnect()?;
    let (cx, all) = (&null.env.cx, OWNERS as usize);
    let sent = Arc::pin_init(new_spinlock_irq!(KVec::new()), GFP_KERNEL)?;
    let init = |number| {
        Ok(Response {
            cqe: Cqe::new(),
            number,
            buf: Buf::alloc(&null.env.pd, 8, cx)?,
            sent: sent.clone(),
        })
    };
    let mut requests = Requests::new(&null.a, all, init, cx)?;
    let mut ring = SendRing::new(&null.a, OWNERS, INTERVAL, cx)?;
    let mut post = |response| {
        let remote = Remote { addr: 0, rkey: 0 };
        ring.post(
            &null.a,
            response,
            |r: &Response, chain: &mut Chain<'_, 2>| {
                chain.push(SendWr::rdma_write([r.buf.whole()], remote))?;
                chain.push(SendWr::send([r.buf.whole()]))
            },
        )
    };
    // Twice round.
    for n in 1..=2 * all {
        post(requests.take().ok_or(EBUSY)?)?;
        let back = n - n % INTERVAL as usize;
        null.wait(|| sent.lock().len() >= back)?;
        check_eq!(sent.lock().len(), back);
    }
    let in_order = (0..2 * all).map(|n| n % all);
    check!(sent.lock().iter().copied().eq(in_order));
    null.inject(Injection::Vanish { count: 1 })?;
    for _ in 0..INTERVAL + 2 {
        post(requests.take().ok_or(EBUSY)?)?;
    }
    check_eq!(requests.idle().count(), 2);
    let (mut back, Null { a, env, .. }) = (KVec::with_capacity(all, GFP_KERNEL)?, null);
    if reclaims {
        ring.reclaim(&a, &env.cx, |response| {
            // There is room for all.
            let _ = back.push_within_capacity(response.number);
        })?;
        check!(back.iter().copied().eq(0..INTERVAL as usize + 2));
        check_eq!(requests.idle().count(), all);
    }
    drop((ring, a));
    wait(|| requests.idle().count() == all)?;
    check_eq!(sent.lock().len(), 2 * all);
    Ok(())
}

/// Returns the error of a post, and whether it has the owner.
fn failed(posted: Posted) -> Result<(Error, u32, bool)> {
    let e = posted.err().ok_or(ENODATA)?;
    Ok((e.error(), e.posted(), e.owner.is_some()))
}

#[kunit_tests(rdma_send_ring)]
mod tests {
    use super::*;

    #[test]
    fn owners_come_back_in_order_softirq() -> Result {
        in_order::<Softirq>()
    }

    #[test]
    fn owners_come_back_in_order_workqueue() -> Result {
        in_order::<Workqueue>()
    }

    #[test]
    fn owners_come_back_in_order_direct() -> Result {
        in_order::<Direct>()
    }

    #[test]
    fn responses_are_taken_again_softirq() -> Result {
        responses::<Softirq>(false)?;
        responses::<Softirq>(true)
    }

    #[test]
    fn responses_are_taken_again_workqueue() -> Result {
        responses::<Workqueue>(false)?;
        responses::<Workqueue>(true)
    }

    #[test]
    fn responses_are_taken_again_direct() -> Result {
        responses::<Direct>(false)?;
        responses::<Direct>(true)
    }

    #[test]
    fn full_ring_refuses() -> Result {
        let mut sends = Sends::<Softirq>::new()?;
        sends.null.inject(Injection::Hold { count: 2 })?;
        sends.post_all(0..OWNERS as u8)?;
        check_eq!(failed(sends.post(9)?)?, (EAGAIN, 0, true));
        check_eq!((sends.inbox.len(), sends.inbox.dropped()), (0, 1));
        sends.null.inject(Injection::Release {
            count: u32::MAX,
            reversed: false,
        })?;
        sends.back(0..OWNERS as u8)?;
        sends.post_all(8..12)?;
        sends.back(8..12)
    }

    /// One that is not signaled is refused, and one that is; then those behind them are posted.
    #[test]
    fn refused_owner_comes_back() -> Result {
        for before in [1, INTERVAL as u8 - 1] {
            let mut sends = Sends::<Workqueue>::new()?;
            sends.post_all(0..before)?;
            sends
                .null
                .inject(Injection::Refuse { after: 0, errno: 5 })?;
            check_eq!(failed(sends.post(99)?)?, (EIO, 0, true));
            sends.post_all(before..4)?;
            sends.back(0..4)?;
            sends.post_all(4..8)?;
            sends.back(4..8)?;
        }
        Ok(())
    }

    /// Requests that were posted before one that is refused keep the owner.
    #[test]
    fn owner_of_a_part_comes_back_with_the_next() -> Result {
        for before in [1, INTERVAL as u8 - 1] {
            let mut sends = Sends::<Softirq>::new()?;
            sends.post_all(0..before)?;
            sends
                .null
                .inject(Injection::Refuse { after: 1, errno: 5 })?;
            check_eq!(failed(sends.post_two(before)?)?, (EIO, 1, false));
            check_eq!(sends.inbox.len(), 0);
            let next = before + 1;
            sends.post_all(next..next.max(3) + 1)?;
            sends.back(0..next.max(3) + 1)?;
        }
        Ok(())
    }

    /// However many chains in a row are refused in part, the ring goes on: the place that would
    /// fill it without a signaled one is not taken, and the QP keeps these owners until it was
    /// drained.
    #[test]
    fn chains_refused_in_part_do_not_fill_the_ring() -> Result {
        let mut sends = Sends::<Direct>::new()?;
        let owners = OWNERS as u8;
        for number in 0..owners + 3 {
            sends
                .null
                .inject(Injection::Refuse { after: 1, errno: 5 })?;
            check_eq!(failed(sends.post_two(number)?)?, (EIO, 1, false));
        }
        check_eq!(sends.inbox.dropped(), 0);
        // The last place is for one that is signaled.
        sends.post(owners - 1)??;
        check_eq!(failed(sends.post(99)?)?, (EAGAIN, 0, true));
        sends.back(0..owners)?;
        check_eq!(sends.inbox.dropped(), 1 + i32::from(owners));
        sends.post_all(0..4)?;
        sends.back(0..4)?;
        let dropped = sends.inbox.dropped();
        sends.reclaim(0..0)?;
        check_eq!(sends.inbox.dropped(), dropped + 4);
        Ok(())
    }

    /// So it is if the driver does not say which request it has refused, but has posted it.
    #[test]
    fn unnamed_owners_do_not_fill_the_ring() -> Result {
        let mut sends = Sends::<Direct>::new()?;
        let owners = OWNERS as u8;
        expect(
            owners.into(),
            "did not say which request it refused: the owner is leaked",
        );
        for number in 0..owners {
            sends.null.inject(Injection::Lapse { after: 0, errno: 5 })?;
            check_eq!(failed(sends.post(number)?)?, (EIO, 0, false));
        }
        sends.back(0..owners)?;
        // The next one is signaled, as none is known to be.
        sends.post(0)??;
        sends.back(0..1)?;
        sends.post_all(1..5)?;
        sends.back(1..5)
    }

    /// Random posts and refusals: a full ring has room when its CQ was polled, and each owner goes
    /// back once.
    #[test]
    fn random_refusals_do_not_fill_the_ring() -> Result {
        for (seed, owners, interval) in [(1, 8, 4), (2, 2, 1), (3, 3, 1), (4, 7, 3), (5, 8, 1)] {
            let mut sends = Sends::<Direct>::with(owners, interval)?;
            let (mut state, mut made) = (seed, 0);
            let mut random = |below: u32| {
                state = u32::wrapping_mul(state, 1_664_525).wrapping_add(1_013_904_223);
                (state >> 16) % below
            };
            for _ in 0..2_000 {
                if random(4) != 0 {
                    let (after, errno) = (random(3), 5);
                    sends.null.inject(Injection::Refuse { after, errno })?;
                }
                let posted = match random(2) {
                    0 => sends.post(0)?,
                    _ => sends.post_two(0)?,
                };
                made += 1;
                let error = posted.err().map(|e| e.error());
                if error.is_some_and(|e| e != EAGAIN && e != EIO && e != ENOMEM) {
                    let expected = "EAGAIN, EIO or ENOMEM";
                    return Err(differ("the error of a post", &error, &expected));
                }
                if error == Some(EAGAIN) || random(8) == 0 {
                    sends.null.wait(|| true)?;
                    sends.null.inject(Injection::Refuse {
                        after: u32::MAX,
                        errno: 5,
                    })?;
                    let error = sends.post(0)?.err().map(|e| e.error());
                    check_eq!(error, None);
                    made += 1;
                }
                drop(sends.inbox.take());
            }
            // The marker of the drain is not refused.
            sends.null.inject(Injection::Refuse {
                after: u32::MAX,
                errno: 5,
            })?;
            let reclaimed = sends.ring.reclaim(&sends.null.a, &sends.null.env.cx, drop);
            check_eq!(reclaimed, Ok(()));
            drop(sends.inbox.take());
            check_eq!(sends.inbox.dropped(), made);
        }
        Ok(())
    }

    /// So it is where a driver names the first, whichever had no room.
    #[test]
    fn owner_of_what_may_be_a_part_comes_back_with_the_next() -> Result {
        for after in 0..2 {
            let mut sends = Sends::<Softirq>::on(NullEnv::erdma()?, OWNERS, INTERVAL)?;
            sends.post_all(0..1)?;
            sends.null.inject(Injection::Refuse { after, errno: 12 })?;
            check_eq!(failed(sends.post_two(1)?)?, (ENOMEM, 1, false));
            sends.post_all(2..4)?;
            sends.back(0..4)?;
        }
        Ok(())
    }

    /// The driver does not name the request that it has refused: one that is in the queue
    /// nevertheless, or one that never completes, behind which the ring is one interval late.
    #[test]
    fn unnamed_owner_stays_in_the_ring() -> Result {
        let mut sends = Sends::<Softirq>::new()?;
        sends.post_all(0..3)?;
        expect(
            2,
            "did not say which request it refused: the owner is leaked",
        );
        sends.null.inject(Injection::Lapse { after: 0, errno: 5 })?;
        check_eq!(failed(sends.post(3)?)?, (EIO, 0, false));
        sends.back(0..4)?;
        // The next one is signaled.
        sends.post(4)??;
        sends.back(4..5)?;
        sends.post_all(5..7)?;
        sends.null.inject(Injection::Mute { after: 0, errno: 5 })?;
        check_eq!(failed(sends.post(7)?)?, (EIO, 0, false));
        sends.reclaim(5..8)
    }

    /// The driver refuses the marker, and its own drain returns at once: the device may still have
    /// what no completion gives back.
    #[test]
    fn driver_s_own_drain_gives_nothing_back() -> Result {
        let mut sends = Sends::<Softirq>::on(NullEnv::with_drain()?, OWNERS, INTERVAL)?;
        sends.post_all(0..3)?;
        sends
            .null
            .inject(Injection::Refuse { after: 0, errno: 5 })?;
        let (qp, cx) = (&sends.null.a, &sends.null.env.cx);
        let mut back = 0;
        check_err!(sends.ring.reclaim(qp, cx, |_| back += 1), EIO);
        check_eq!(back, 0);
        sends.reclaim(0..3)
    }

    /// On iWARP, a READ that may be in the queue although the driver has refused it, without saying
    /// so: the next completion comes after it.
    #[test]
    fn unnamed_read_is_fenced() -> Result {
        let mut sends = Sends::<Softirq>::on(NullEnv::iwarp()?, OWNERS, INTERVAL)?;
        expect(
            1,
            "did not say which request it refused: the owner is leaked",
        );
        sends.null.inject(Injection::Lapse { after: 0, errno: 5 })?;
        let (owner, qp) = (sends.owner(0)?, &sends.null.a);
        let nowhere = Remote { addr: 0, rkey: 0 };
        let posted = sends.ring.post(qp, owner, |m, chain: &mut Chain<'_, 1>| {
            chain.push(SendWr::rdma_read([m.buf.whole_mut()], nowhere))
        });
        check_eq!(failed(posted)?, (EIO, 0, false));
        // So that the device looks at what is sent to no peer.
        sends.null.inject(Injection::Refuse {
            after: u32::MAX,
            errno: 5,
        })?;
        sends.post_all(1..3)?;
        check_eq!(sends.null.dev.fences(), 0);
        sends.post(3)??;
        check_eq!(sends.null.dev.fences(), 1);
        sends.back(0..4)
    }

    #[test]
    fn request_that_is_not_made_gives_the_owner_back() -> Result {
        let mut sends = Sends::<Softirq>::new()?;
        let (owner, qp) = (sends.owner(0)?, &sends.null.a);
        let posted = sends
            .ring
            .post(qp, owner, |_, _: &mut Chain<'_, 1>| Err(EDOM));
        check_eq!(failed(posted)?, (EDOM, 0, true));
        let owner = sends.owner(0)?;
        let posted = sends
            .ring
            .post(&sends.null.b, owner, |m, chain: &mut Chain<'_, 1>| {
                chain.push(SendWr::send([m.buf.whole()]))
            });
        check_eq!(failed(posted)?, (EINVAL, 0, true));
        check_err!(
            sends.ring.reclaim(&sends.null.b, &sends.null.env.cx, drop),
            EINVAL
        );
        Ok(())
    }

    #[test]
    fn failed_request_flushes_the_others() -> Result {
        let mut sends = Sends::<Workqueue>::new()?;
        sends.null.inject_fatal(wc::Status::LOC_PROT_ERR)?;
        sends.post_all(0..6)?;
        let all = sends.null.take(&sends.inbox, 4)?;
        for completed in &all {
            check_eq!(completed.status(), Some(wc::Status::WR_FLUSH_ERR));
        }
        sends.reclaim(4..6)?;
        check_eq!(failed(sends.post(6)?)?, (EINVAL, 0, true));
        Ok(())
    }

    /// The ring goes first, or the QP does.
    #[test]
    fn owners_are_dropped_with_the_qp() -> Result {
        for ring_first in [false, true] {
            let mut sends = Sends::<Softirq>::new()?;
            sends.post_all(0..6)?;
            sends.back(0..4)?;
            let Sends { ring, inbox, null } = sends;
            let Null { a, b, cq, env, dev } = null;
            let null = NullEnv { env, dev };
            drop((b, cq));
            let dropped = || inbox.dropped();
            let mut ring = Some(ring);
            if ring_first {
                ring = None;
                check_eq!(dropped(), 4);
            }
            drop(a);
            wait(|| null.dev.objects()[1] == 0)?;
            wait(|| dropped() == 6)?;
            drop(ring);
            check_eq!(dropped(), 6);
            drop(null);
        }
        Ok(())
    }

    /// A completion in an array gives nothing back; the next one does it for both.
    #[test]
    fn completion_in_an_array_is_made_up_for() -> Result {
        for late in [false, true] {
            let mut sends = Sends::<Direct>::new()?;
            sends.post_all(0..4)?;
            let mut array = WcArray::<4>::new();
            check_eq!(sends.null.cq.poll(&mut array)?, 1);
            if !late {
                array.completions().for_each(cq::Completion::dispatch);
            }
            check_eq!(sends.inbox.len(), 0);
            sends.post_all(4..8)?;
            sends.back(0..if late { 4 } else { 8 })?;
            array.completions().for_each(cq::Completion::dispatch);
            sends.post_all(8..12)?;
            sends.back(if late { 4 } else { 8 }..12)?;
            // One that is handled after the end of all.
            sends.post_all(12..16)?;
            check_eq!(sends.null.cq.poll(&mut array)?, 1);
            sends.reclaim(12..16)?;
            drop(sends.ring);
            drop(sends.null.a);
            drop(array);
        }
        Ok(())
    }

    #[test]
    fn ring_is_refused() -> Result {
        let null = Null::<Softirq>::new()?;
        let (env, qp) = (&null.env, &null.a);
        let new = |qp: &Qp<Softirq>, owners, interval| {
            SendRing::<Owner>::new(qp, owners, interval, &env.cx).map(drop)
        };
        for (owners, interval) in [(0, 0), (8, 0), (8, 5), (1, 1), (1 << 17, 2)] {
            check_err!(new(qp, owners, interval), EINVAL);
        }
        new(qp, 2, 1)?;
        new(qp, 3, 1)?;
        let pooled = Cq::<Softirq>::pool_get(&env.dev, 64, None, &env.cx)?;
        check_err!(new(&env.raw_qp(&pooled, &CAPS)?, 8, 4), EINVAL);
        Ok(())
    }

    /// The handler and the thread that posts work at the same time.
    #[test]
    fn many_owners_go_through() -> Result {
        let mut sends = Sends::<Softirq>::with(6, 3)?;
        let mut posted = 0_u32;
        while posted < 3000 {
            match sends.post(posted as u8)? {
                Ok(()) => posted += 1,
                Err(e) if e.error() == EAGAIN => {}
                Err(e) => return Err(e.error()),
            }
            if posted % 255 == 0 {
                let all = sends.inbox.take();
                drop(all);
            }
        }
        sends.reclaim(0..0)?;
        wait(|| sends.inbox.dropped() as u32 + sends.inbox.len() as u32 >= 3000)
    }
}
