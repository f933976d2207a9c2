// SPDX-License-Identifier: GPL-2.0

//! Devices that fail to post a request and do not say that they have refused it: it may be in the
//! queue all the same, so its owner stays there.

use crate::{
    check::{
        expect,
        fail, //
    },
    fixture::{
        both,
        CountDrop,
        Counted,
        Counter,
        Null,
        NullEnv,
        Polled, //
        RecvListGuard,
    }, //
};
use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::{
        Chain,
        InitAttr,
        State, //
    },
    rw::{
        Ctx,
        Rw, //
    }, //
};
use rdma_null::Injection;

const LAPSE: Injection = Injection::Lapse { after: 0, errno: 5 };
const TIMES: u32 = 4;

fn expect_leak() {
    expect(
        1,
        "did not say which request it refused: the owner is leaked",
    );
}

/// A QP that sends to no peer, on a device that will forget to say what it has posted.
fn ready<C: Polled>(injection: Injection) -> Result<(Null<C>, Arc<Counter>)> {
    let null = Null::new()?;
    null.disconnect()?;
    null.inject(injection)?;
    Ok((null, Counter::new()?))
}

/// The post has failed, and what it was to post is not back.
fn is_kept<P, T>(posted: core::result::Result<T, PostError<P>>) -> Result {
    match posted {
        Ok(_) => Err(fail("it was posted")),
        Err(e) => {
            check_eq!(e.error(), EIO);
            check!(e.owner.is_none());
            Ok(())
        }
    }
}

/// Has a region of its own, and reports whether that was idle in the handler.
#[derive(HasCqe)]
struct Own {
    reg: Cqe<Self, 0>,
    inv: Cqe<Self, 1>,
    region: Region<Bidirectional>,
    registered: Arc<Counter>,
    idle: Arc<Counter>,
    _gone: CountDrop,
}

impl CqeHandler<0> for Own {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        if !this.region.is_idle() {
            this.registered.up();
        }
    }
}

impl CqeHandler<1> for Own {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        if this.region.is_idle() {
            this.idle.up();
        }
    }
}

/// Pages on their way.
#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx,
    times: Arc<Counter>,
    _gone: CountDrop,
}

impl CqeHandler for Transfer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.times.up();
    }
}

#[kunit_tests(rdma_null_mute)]
mod tests {
    use super::*;

    #[test]
    fn send_that_was_queued_comes_back_once() -> Result {
        let (null, times) = ready::<Direct>(LAPSE)?;
        expect_leak();
        let counted = Counted::new(&times)?;
        is_kept(null.a.post_send(counted.clone(), |_| Ok(SendWr::send([]))))?;
        check_eq!(times.get(), 0);
        null.a.drain(&null.env.cx)?;
        check_eq!(times.get(), 1);
        check!(Arc::into_unique_or_drop(counted).is_some());
        Ok(())
    }

    #[test]
    fn receive_that_was_queued_comes_back_once() -> Result {
        let (null, times) = ready::<Direct>(LAPSE)?;
        expect_leak();
        let counted = Counted::new(&times)?;
        is_kept(null.a.post_recv(counted.clone(), |_| Ok(RecvWr::new([]))))?;
        check_eq!(times.get(), 0);
        null.a.drain(&null.env.cx)?;
        check_eq!(times.get(), 1);
        check!(Arc::into_unique_or_drop(counted).is_some());
        Ok(())
    }

    #[test]
    fn send_that_was_not_queued_is_not_freed() -> Result {
        let (null, times) = ready::<Direct>(Injection::Mute { after: 0, errno: 5 })?;
        expect_leak();
        let counted = Counted::new(&times)?;
        is_kept(null.a.post_send(counted.clone(), |_| Ok(SendWr::send([]))))?;
        null.a.drain(&null.env.cx)?;
        check_eq!(times.get(), 0);
        // SAFETY: The reference was given up for a request that is not there.
        let lost = unsafe { Arc::from_raw(Arc::as_ptr(&counted)) };
        drop(counted);
        check!(Arc::into_unique_or_drop(lost).is_some());
        Ok(())
    }

    /// Of requests that give nothing back the QP keeps the owner; the last one gives it back.
    #[test]
    fn the_same_several_times() -> Result {
        for after in 0..TIMES {
            let (null, times) = ready::<Direct>(Injection::Lapse { after, errno: 5 })?;
            let (counted, last) = (Counted::new(&times)?, after == TIMES - 1);
            if last {
                expect_leak();
            }
            let mut batch = null.a.batch(counted.clone());
            let mut result = Ok(());
            for _ in 1..TIMES {
                result = result.and_then(|()| {
                    batch.post(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])))
                });
            }
            let result = result.and_then(|()| {
                batch.finish(|_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])))
            });
            check_err!(result, EIO);
            check_eq!(batch.posted(), after + u32::from(!last));
            check!(batch.into_error(EIO).owner.is_none());
            null.a.drain(&null.env.cx)?;
            check_eq!(times.get(), i32::from(last));
            check!(Arc::into_unique_or_drop(counted).is_some());
        }
        Ok(())
    }

    #[test]
    fn registration_and_invalidation_keep_their_marks() -> Result {
        let (null, registered) = ready::<Direct>(LAPSE)?;
        let (idle, gone) = (Counter::new()?, Counter::new()?);
        let own = || -> Result<Pin<KBox<Own>>> {
            let buf = Buf::alloc(&null.env.pd, 8, &null.env.cx)?;
            let own = Own {
                reg: Cqe::new(),
                inv: Cqe::new(),
                region: Region::new(buf, &null.env.cx)?,
                registered: registered.clone(),
                idle: idle.clone(),
                _gone: CountDrop(gone.clone()),
            };
            Ok(KBox::pin(own, GFP_KERNEL)?)
        };
        expect_leak();
        is_kept(null.a.post_send(own()?, |o| Ok(both(&o.region))))?;
        null.wait(|| registered.get() == 1)?;
        check_eq!(gone.get(), 1);

        null.inject(Injection::Lapse { after: 1, errno: 5 })?;
        let mut batch = WcArray::<4>::new();
        null.a.post_send(own()?, |o| Ok(both(&o.region)))?;
        null.cq.poll(&mut batch)?;
        let completion = batch.completions().next().ok_or(EIO)?;
        let (own, _) = completion.take::<Own, 0>().map_err(|_| EIO)?;
        expect_leak();
        is_kept(
            null.a
                .post_send(own, |o| Ok(InvWr::new(&o.region).done_by::<1>())),
        )?;
        null.wait(|| idle.get() == 1)?;
        check_eq!(gone.get(), 2);
        Ok(())
    }

    #[test]
    fn transfer_ends_in_its_handler() -> Result {
        let null = NullEnv::new()?;
        let env = &null.env;
        let requests = env.dev.port(1).ok_or(ENODEV)?.rw_requests(1);
        let cq = env.cq::<Direct>(64 + requests)?;
        let qp = InitAttr::new(&env.pd, &cq, &cq, &Caps::new(4, 4))
            .rw_contexts(1, 1)
            .create(&env.cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
        null.dev.inject_qp(qp.num(), LAPSE)?;
        let (times, gone) = (Counter::new()?, Counter::new()?);
        let transfer = Transfer {
            cqe: Cqe::new(),
            data: Ctx::alloc(64, &env.cx)?,
            times: times.clone(),
            _gone: CountDrop(gone.clone()),
        };
        let nowhere = Remote { addr: 0, rkey: 0 };
        expect_leak();
        let posted = qp.post_rw(KBox::pin(transfer, GFP_KERNEL)?, |t| {
            Ok(Rw::write(&t.data, 0..64, nowhere, &env.cx))
        });
        let Err(e) = posted else {
            return Err(fail("it was posted"));
        };
        check_eq!(e.error(), EIO);
        check!(e.owner.is_none());
        qp.drain(&env.cx)?;
        check_eq!((times.get(), gone.get()), (1, 1));
        Ok(())
    }

    /// The marker of a drain that may be in the queue proves nothing, and does no harm.
    #[test]
    fn drain_fails_and_can_be_tried_again() -> Result {
        for after in 0..2 {
            let (null, times) = ready::<Direct>(Injection::Lapse { after, errno: 5 })?;
            expect(1, "did not say which request it refused");
            check_err!(null.a.drain(&null.env.cx), EIO);
            check_eq!(null.a.query(&null.env.cx)?.state, State::Error);
            null.a
                .post_recv(Counted::new(&times)?, |_| Ok(RecvWr::new([])))?;
            null.a.drain(&null.env.cx)?;
            check_eq!(times.get(), 1);
        }
        Ok(())
    }

    #[test]
    fn slot_that_was_queued_is_not_posted_again() -> Result {
        let (null, recv_list) = (NullEnv::new()?, RecvListGuard::new(false)?);
        let srq = null.env.srq(4, &recv_list)?;
        let cq = null.env.cq::<Softirq>(64)?;
        let caps = Caps::new(8, 0);
        let (a, b) = (
            null.env
                .raw_qp(&null.env.cq::<Softirq>(64)?, &Caps::new(8, 8))?,
            InitAttr::on_srq(&null.env.pd, &cq, &srq, &caps).create(&null.env.cx)?,
        );
        null.dev
            .inject_qp(a.num(), Injection::Connect { peer: b.num() })?;
        null.dev
            .inject_qp(b.num(), Injection::Connect { peer: a.num() })?;
        let times = Counter::new()?;
        for n in 0..8 {
            if n == 2 {
                // Of the next slot that is posted again.
                expect(1, "did not say that it refused a slot of an SRQ");
                null.dev.inject(Injection::Lapse { after: 1, errno: 5 })?;
            }
            a.post_send(Counted::new(&times)?, |_| Ok(SendWr::send([])))?;
            crate::fixture::wait(|| times.get() == n + 1 && recv_list.received() == n + 1)?;
        }
        Ok(())
    }
}
