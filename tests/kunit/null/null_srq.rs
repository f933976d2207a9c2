// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues on a device that does what it is told.

use crate::{
    check::{
        expect,
        fail, //
    },
    fixture::{
        both,
        nothing,
        recv,
        removal_waits_for,
        send,
        wait,
        Counted,
        Counter,
        Inbox,
        NullEnv,
        Polled,
        RecvBuf,
        RecvListGuard,
        RegOwner,
        CAPS, //
    }, //
};
use core::ptr;
use kernel::{
    prelude::*,
    sync::SetOnce, //
};
use rdma::{
    context::CorePolled,
    prelude::*,
    qp::{
        InitAttr,
        State, //
    },
    srq::Srq, //
};
use rdma_null::{
    Injection,
    NullDevice,
    Object, //
};

const ALL: u32 = u32::MAX;

/// A QP that sends to one on an SRQ.
struct Shared<C: PollContext> {
    a: Qp<Softirq>,
    b: Qp<C>,
    srq: Srq<RecvBuf>,
    recv_list: RecvListGuard,
    sent: Arc<Inbox>,
    null: NullEnv,
}

impl<C: CorePolled + Polled> Shared<C> {
    fn new(slots: u32, keep: bool) -> Result<Self> {
        let (null, recv_list) = (NullEnv::new()?, RecvListGuard::new(keep)?);
        let srq = null.env.srq(slots, &recv_list)?;
        let (own, cq) = (null.env.cq::<Softirq>(64)?, null.env.cq::<C>(64)?);
        let a = null.env.raw_qp(&own, &CAPS)?;
        let b = on(&null, &cq, &srq)?;
        connect(&null.dev, &a, &b)?;
        Ok(Self {
            a,
            b,
            srq,
            recv_list,
            sent: Inbox::new()?,
            null,
        })
    }

    fn send(&self, bytes: &[u8]) -> Result {
        Ok(send(&self.a, self.null.env.message(&self.sent, bytes)?)?)
    }

    fn inject(&self, injection: Injection) -> Result {
        self.null.dev.inject_qp(self.b.num(), injection)
    }
}

fn on<C: CorePolled + Provides<context::Atomic>>(
    null: &NullEnv,
    cq: &Cq<C>,
    srq: &Srq<RecvBuf>,
) -> Result<Qp<C>> {
    InitAttr::on_srq(&null.env.pd, cq, srq, &CAPS).create(&null.env.cx)
}

fn connect<C: PollContext>(dev: &NullDevice, a: &Qp<Softirq>, b: &Qp<C>) -> Result {
    dev.inject_qp(a.num(), Injection::Connect { peer: b.num() })?;
    dev.inject_qp(b.num(), Injection::Connect { peer: a.num() })
}

/// More messages than there are slots.
fn many<C: CorePolled + Polled>() -> Result {
    let shared = Shared::<C>::new(3, false)?;
    for n in 1..=20 {
        shared.send(&[0; 64])?;
        wait(|| shared.recv_list.received() == n && shared.sent.len() as i32 == n)?;
    }
    shared.a.drain(&shared.null.env.cx)?;
    check!(shared.sent.take().iter().all(|sent| sent.ok().is_ok()));
    Ok(())
}

/// A slot owns an answer that the device loses.
fn answer_is_lost<C: CorePolled + Polled>() -> Result {
    let shared = Shared::<C>::new(2, true)?;
    shared.send(b"x")?;
    wait(|| shared.recv_list.len() == 1)?;
    shared.inject(Injection::Hold { count: 1 })?;
    let slot = shared.recv_list.pop()?.slot;
    let posted = (shared.b).post_send(slot, |r| Ok(SendWr::send([r.buf.whole()])));
    posted.map_err(|e| e.error())?;
    let Shared {
        a,
        b,
        srq,
        recv_list,
        sent: _sent,
        null,
    } = shared;
    b.destroy(&null.env.cx)?;
    check_eq!(recv_list.answered(), 0);
    // The SRQ waits for slots that are handed out.
    drop((a, srq));
    wait(|| recv_list.gone() == 2)
}

#[kunit_tests(rdma_null_srq)]
mod tests {
    use super::*;

    #[test]
    fn answer_that_is_lost_gives_its_slot_back_softirq() -> Result {
        answer_is_lost::<Softirq>()
    }

    #[test]
    fn answer_that_is_lost_gives_its_slot_back_workqueue() -> Result {
        answer_is_lost::<Workqueue>()
    }

    /// The type does not say it, so it is found out when the QP is created.
    #[test]
    fn is_not_for_a_cq_that_callers_poll() -> Result {
        let (null, recv_list) = (NullEnv::new()?, RecvListGuard::new(false)?);
        let srq = null.env.srq(4, &recv_list)?;
        let direct = null.env.cq::<Direct>(64)?.into_any();
        check_err!(on(&null, &direct, &srq), EINVAL);
        drop(on(&null, &null.env.cq::<Softirq>(64)?.into_any(), &srq)?);
        Ok(())
    }

    /// Not all drivers refuse it, and none is asked.
    #[test]
    fn receives_are_not_posted_to_a_qp_on_an_srq() -> Result {
        let shared = Shared::<Softirq>::new(4, false)?;
        let (env, times) = (&shared.null.env, Counter::new()?);
        let refuse = |after| {
            let injection = Injection::Refuse { after, errno: 5 };
            shared.null.dev.inject_qp(shared.b.num(), injection)
        };
        refuse(0)?;
        let whole = recv(&shared.b, env.message(&shared.sent, b"x")?);
        refuse(0)?;
        let empty = shared
            .b
            .post_recv(Counted::new(&times)?, |_| Ok(RecvWr::new([])));
        // Not the marker of the drain.
        refuse(ALL)?;
        check_err!(whole, EINVAL);
        check_err!(empty, EINVAL);
        Ok(())
    }

    #[test]
    fn slots_post_themselves_again_softirq() -> Result {
        many::<Softirq>()
    }

    #[test]
    fn slots_post_themselves_again_workqueue() -> Result {
        many::<Workqueue>()
    }

    #[test]
    fn slots_post_themselves_again_unbound_workqueue() -> Result {
        many::<UnboundWorkqueue>()
    }

    /// A slot is behind the one before it, and stays there when it is posted again.
    #[test]
    fn slots_are_side_by_side() -> Result {
        // The callback, the queue and the state.
        const STRIDE: usize = size_of::<RecvBuf>() + 4 * size_of::<u64>();
        let shared = Shared::<Softirq>::new(4, true)?;
        let places = || -> Result<KVec<usize>> {
            for byte in 0..4 {
                shared.send(&[byte])?;
            }
            wait(|| shared.recv_list.len() == 4)?;
            let mut places = KVec::new();
            for received in shared.recv_list.take() {
                places.push(ptr::from_ref(&*received.slot).addr(), GFP_KERNEL)?;
            }
            places.sort_unstable();
            Ok(places)
        };
        let first = places()?;
        for pair in first.windows(2) {
            check_eq!(pair[1] - pair[0], STRIDE);
        }
        check_eq!(places()?, first);
        Ok(())
    }

    #[test]
    fn no_slot_is_left() -> Result {
        let shared = Shared::<Softirq>::new(2, true)?;
        for byte in 0..3 {
            shared.send(&[byte])?;
        }
        wait(|| shared.recv_list.len() == 2 && shared.sent.len() == 3)?;
        let last = shared.sent.pop()?.status();
        check_eq!(last, Some(wc::Status::RNR_RETRY_EXC_ERR));
        Ok(())
    }

    #[test]
    fn creation_is_refused_at_each_slot() -> Result {
        for after in 0..4 {
            let (null, recv_list) = (NullEnv::new()?, RecvListGuard::new(false)?);
            null.dev.inject(Injection::Refuse { after, errno: 5 })?;
            check_err!(null.env.srq(4, &recv_list).map(drop), EIO);
            wait(|| recv_list.gone() == 4)?;
            check_eq!(null.dev.objects(), [0; 4]);
        }
        Ok(())
    }

    #[test]
    fn creation_fails() -> Result {
        let (null, recv_list) = (NullEnv::new()?, RecvListGuard::new(false)?);
        null.dev.inject(Injection::Create {
            object: Object::Srq,
            after: 0,
            errno: 28,
        })?;
        check_err!(null.env.srq(4, &recv_list).map(drop), ENOSPC);
        check_eq!(recv_list.gone(), 4);
        Ok(())
    }

    #[test]
    fn slot_that_cannot_be_posted_again_is_set_aside() -> Result {
        let shared = Shared::<Workqueue>::new(2, false)?;
        let refusal = Injection::Refuse { after: 0, errno: 5 };
        shared.send(b"1")?;
        wait(|| shared.recv_list.received() == 1)?;
        shared.recv_list.keep(true);
        shared.send(b"2")?;
        wait(|| shared.recv_list.len() == 1)?;
        shared.null.dev.inject(refusal)?;
        expect(1, "a slot of an SRQ could not be posted");
        drop(shared.recv_list.take());
        // The other one goes on, and both go with the SRQ.
        shared.recv_list.keep(false);
        shared.send(b"3")?;
        wait(|| shared.recv_list.received() == 3)?;
        let Shared {
            a,
            b,
            srq,
            recv_list,
            sent,
            null,
        } = shared;
        check_eq!(recv_list.gone(), 0);
        drop((sent, a, b, srq));
        wait(|| recv_list.gone() == 2)?;
        drop(null);
        Ok(())
    }

    #[test]
    fn slot_comes_back_from_a_receive_that_failed() -> Result {
        let shared = Shared::<Softirq>::new(1, true)?;
        for status in [wc::Status::LOC_LEN_ERR, wc::Status::GENERAL_ERR] {
            shared.inject(Injection::Status {
                status: status.as_raw(),
                vendor_err: 7,
                count: 1,
                fatal: false,
            })?;
            shared.send(b"1")?;
            wait(|| shared.recv_list.len() == 1)?;
            let Err(e) = shared.recv_list.pop()?.result else {
                return Err(fail("it succeeded"));
            };
            check_eq!((e.status, e.vendor_err), (status, 7));
        }
        // Its only slot was posted again each time.
        shared.send(b"2")?;
        wait(|| shared.recv_list.len() == 1)?;
        check_eq!(&shared.recv_list.pop()?.bytes()?[..], b"2");
        Ok(())
    }

    #[test]
    fn message_invalidates_a_key_of_the_receiver() -> Result {
        let shared = Shared::<Softirq>::new(1, true)?;
        let region = shared.null.env.region(64)?;
        let owner = RegOwner::new(&region)?;
        let registered = owner.registered.clone();
        let remote = shared.b.post_send(owner, |o| Ok(both(&o.region)))?;
        wait(|| registered.get() == 1)?;
        let message = shared.null.env.message(&shared.sent, b"x")?;
        shared.a.post_send(message, |m| {
            Ok(SendWr::send([m.buf.whole()]).invalidating(remote.rkey))
        })?;
        wait(|| shared.recv_list.len() == 1)?;
        let done = shared.recv_list.pop()?.result.map_err(Error::from)?;
        check_eq!(done.invalidated, Some(remote.rkey));

        let message = shared.null.env.message(&shared.sent, b"x")?;
        shared
            .a
            .post_send(message, |m| Ok(SendWr::rdma_write([m.buf.whole()], remote)))?;
        wait(|| shared.sent.len() == 2)?;
        check_eq!(
            shared.sent.pop()?.status(),
            Some(wc::Status::REM_ACCESS_ERR)
        );
        Ok(())
    }

    #[test]
    fn message_does_not_invalidate_what_is_not_valid() -> Result {
        let shared = Shared::<Softirq>::new(1, true)?;
        let message = shared.null.env.message(&shared.sent, b"x")?;
        shared.a.post_send(message, |m| {
            Ok(SendWr::send([m.buf.whole()]).invalidating(0x1234))
        })?;
        wait(|| shared.recv_list.len() == 1 && shared.sent.len() == 1)?;
        let Err(e) = shared.recv_list.pop()?.result else {
            return Err(fail("it succeeded"));
        };
        check_eq!(e.status, wc::Status::REM_INV_REQ_ERR);
        check_eq!(
            shared.sent.pop()?.status(),
            Some(wc::Status::REM_INV_REQ_ERR)
        );
        Ok(())
    }

    #[test]
    fn drain_waits_for_what_is_late() -> Result {
        let shared = Shared::<Softirq>::new(2, true)?;
        shared.inject(Injection::Hold { count: ALL })?;
        shared.send(b"late")?;
        let (cx, num) = (&shared.null.env.cx, shared.b.num());
        let (qp, drained) = (
            Arc::new(shared.b, GFP_KERNEL)?,
            Arc::new(SetOnce::new(), GFP_KERNEL)?,
        );
        let (own, result) = (qp.clone(), drained.clone());
        shared.null.env.client.spawn(GFP_KERNEL, move |cx| {
            let ok = own.drain(cx).is_ok();
            drop(own);
            result.populate(ok);
        })?;
        wait(|| qp.query(cx).is_ok_and(|info| info.state == State::Error))?;
        let early = (drained.copy(), shared.recv_list.received());
        shared.null.dev.inject_qp(
            num,
            Injection::Release {
                count: ALL,
                reversed: false,
            },
        )?;
        wait(|| drained.copy().is_some())?;
        check_eq!(early, (None, 0));
        check_eq!(drained.copy(), Some(true));
        check_eq!(&shared.recv_list.pop()?.bytes()?[..], b"late");
        Ok(())
    }

    #[test]
    fn failure_of_a_qp_leaves_the_others_alone() -> Result {
        let shared = Shared::<Workqueue>::new(2, true)?;
        let cq = shared.null.env.cq::<Workqueue>(64)?;
        let other = on(&shared.null, &cq, &shared.srq)?;
        shared.inject(Injection::Fail)?;
        shared.b.drain(&shared.null.env.cx)?;
        check_eq!(shared.recv_list.received(), 0);
        connect(&shared.null.dev, &shared.a, &other)?;
        shared.send(b"1")?;
        shared.send(b"2")?;
        wait(|| shared.recv_list.len() == 2)
    }

    #[test]
    fn removal_waits_for_a_kept_slot() -> Result {
        let make = |null: &NullEnv| {
            let (recv_list, sent) = (RecvListGuard::new(true)?, Inbox::new()?);
            let srq = null.env.srq(2, &recv_list)?;
            let cq = null.env.cq::<Softirq>(64)?;
            let (a, b) = (null.env.raw_qp(&cq, &CAPS)?, on(null, &cq, &srq)?);
            connect(&null.dev, &a, &b)?;
            send(&a, null.env.message(&sent, b"kept")?)?;
            wait(|| recv_list.len() == 1)?;
            a.drain(&null.env.cx)?;
            let mut kept = recv_list.pop()?;
            check_eq!(&kept.bytes()?[..], b"kept");
            Ok(kept)
        };
        removal_waits_for(make, nothing)
    }
}
