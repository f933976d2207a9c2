// SPDX-License-Identifier: GPL-2.0

//! Shared receive queues: what their slots receive.

use crate::{
    check::expect,
    fixture::{
        recv,
        send,
        wait,
        Counter,
        Env,
        Inbox,
        RecvBuf,
        RecvListGuard,
        SrqLink,
        SLOT, //
    }, //
};
use kernel::prelude::*;
use rdma::{
    context::CorePolled,
    prelude::*,
    qp::QpContext,
    srq::{
        Receive,
        Slot,
        Srq, //
    }, //
};

/// Tries again for a receive as long as it takes.
fn patient() -> cm::ConnParam<'static> {
    cm::ConnParam {
        rnr_retry_count: 7,
        ..Default::default()
    }
}

/// An SRQ, a CQ and a connection to a QP on both.
struct Shared<C: PollContext> {
    link: SrqLink<C>,
    cq: Cq<C>,
    srq: Srq<RecvBuf>,
    recv_list: RecvListGuard,
    sent: Arc<Inbox>,
    env: Env,
}

impl<C: CorePolled + FixedContext + Provides<context::Atomic>> Shared<C> {
    fn new(slots: u32, keep: bool) -> Result<Self> {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(keep)?);
        let (srq, cq) = (env.srq(slots, &recv_list)?, env.cq(64)?);
        Ok(Self {
            link: SrqLink::new(&env, &srq, &cq, &patient())?,
            cq,
            srq,
            recv_list,
            sent: Inbox::new()?,
            env,
        })
    }

    fn send(&self, bytes: &[u8]) -> Result {
        Ok(send(&self.link.a.qp, self.env.message(&self.sent, bytes)?)?)
    }
}

/// Sends many messages through few slots, which post themselves again.
fn many<C: CorePolled + FixedContext + Provides<context::Atomic>>() -> Result {
    const N: i32 = 50;
    let shared = Shared::<C>::new(4, false)?;
    for i in 0..N {
        // No more than there are slots, so that none waits for the timer of a sender without a
        // receive, and no more than the send queue has room for, which each is in until it is
        // acknowledged.
        wait(|| i < 4 + shared.recv_list.received() && i < 32 + shared.sent.len() as i32)?;
        shared.send(&[i as u8; SLOT])?;
    }
    wait(|| shared.sent.len() == N as usize && shared.recv_list.received() == N)?;
    for done in shared.sent.take() {
        done.ok()?;
    }
    Ok(())
}

/// A slot with several entries, in two buffers.
struct Split<const N: usize> {
    head: Buf<FromDevice>,
    tail: Buf<FromDevice>,
    received: Arc<Counter>,
}

impl<const N: usize> Split<N> {
    fn srq(env: &Env, received: &Arc<Counter>) -> Result<Srq<Self, N>> {
        let slot = |_| -> Result<_> {
            Ok(Self {
                head: Buf::alloc(&env.pd, 3, &env.cx)?,
                tail: Buf::alloc(&env.pd, 64, &env.cx)?,
                received: received.clone(),
            })
        };
        Srq::create(&env.pd, 2, slot, &env.cx)
    }
}

impl<const N: usize> Receive<N> for Split<N> {
    type Needs = Sleepable;

    fn recv(&self) -> RecvWr<'_, N> {
        // Slots are posted where the caller may sleep.
        drop(KBox::new([0u8; 8], GFP_KERNEL));
        let mut sges = [self.tail.whole_mut(); N];
        if let Some(first) = sges.first_mut() {
            *first = self.head.whole_mut();
        }
        RecvWr::new(sges)
    }

    fn done(mut slot: Slot<Self, N>, _wc: &Wc, _cx: &Sleepable) {
        if *slot.head.cpu() == *b"abc" && slot.tail.cpu().starts_with(b"def") {
            slot.received.up();
        }
    }
}

/// Receives that count at the context of their QP.
struct CountedReceive {
    buf: Buf<FromDevice>,
}

impl Receive for CountedReceive {
    type Needs = QpContext<Counter, Sleepable>;

    fn recv(&self) -> RecvWr<'_> {
        RecvWr::new([self.buf.whole_mut()])
    }

    fn done(_slot: Slot<Self>, wc: &Wc, cx: &QpContext<Counter, Sleepable>) {
        if let (Ok(_), Some(count)) = (wc.result(), cx.get()) {
            count.up();
        }
    }
}

#[kunit_tests(rdma_srq)]
mod tests {
    use super::*;

    #[test]
    fn receives_for_several_qps() -> Result {
        let shared = Shared::<Softirq>::new(8, true)?;
        let other = SrqLink::new(&shared.env, &shared.srq, &shared.cq, &patient())?;
        shared.send(b"one")?;
        send(&other.a.qp, shared.env.message(&shared.sent, b"two")?)?;
        wait(|| shared.recv_list.len() == 2 && shared.sent.len() == 2)?;
        let mut found = [false; 2];
        for mut received in shared.recv_list.take() {
            match &received.bytes()?[..] {
                b"one" => found[0] = true,
                b"two" => found[1] = true,
                _ => return Err(EBADMSG),
            }
        }
        check_eq!(found, [true; 2]);
        Ok(())
    }

    #[test]
    fn receives_find_the_context_of_their_qp() -> Result {
        let (env, sent) = (Env::new()?, Inbox::new()?);
        let counts = [Counter::new()?, Counter::new()?];
        let slot = |_| -> Result<_> {
            Ok(CountedReceive {
                buf: Buf::alloc(&env.pd, 4, &env.cx)?,
            })
        };
        let (srq, cq) = (Srq::create(&env.pd, 4, slot, &env.cx)?, env.cq(64)?);
        let one = SrqLink::<Workqueue>::new(&env, &srq, &cq, &patient())?;
        let two = SrqLink::new(&env, &srq, &cq, &patient())?;
        for (link, count) in [&one, &two].into_iter().zip(&counts) {
            link.b.qp.set_context(count.clone(), &env.cx)?;
        }
        for link in [&one, &two, &two] {
            send(&link.a.qp, env.message(&sent, b"mine")?)?;
        }
        wait(|| counts[0].get() + counts[1].get() == 3)?;
        check_eq!((counts[0].get(), counts[1].get()), (1, 2));
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

    #[test]
    fn kept_slots_withhold_their_credit() -> Result {
        not_on_iwarp!(c"no send waits for a receive");
        let shared = Shared::<Softirq>::new(2, true)?;
        for byte in 0..3 {
            shared.send(&[byte; 4])?;
        }
        // The third has no receive, and goes on trying.
        wait(|| shared.recv_list.len() == 2 && shared.sent.len() == 2)?;
        let mut first = shared.recv_list.pop()?;
        check_eq!(first.bytes()?.len(), 4);
        drop(first);
        wait(|| shared.recv_list.received() == 3 && shared.sent.len() == 3)?;
        Ok(())
    }

    #[test]
    fn sender_gives_up_when_all_are_kept() -> Result {
        not_on_iwarp!(c"no send waits for a receive");
        let (env, recv_list, sent) = (Env::new()?, RecvListGuard::new(true)?, Inbox::new()?);
        let (srq, cq) = (env.srq(1, &recv_list)?, env.cq::<Softirq>(64)?);
        let param = cm::ConnParam {
            rnr_retry_count: 0,
            ..Default::default()
        };
        let link = SrqLink::new(&env, &srq, &cq, &param)?;
        send(&link.a.qp, env.message(&sent, b"one")?)?;
        send(&link.a.qp, env.message(&sent, b"two")?)?;
        wait(|| sent.len() == 2)?;
        check!(sent.pop()?.status() == Some(wc::Status::RNR_RETRY_EXC_ERR));
        sent.pop()?.ok()?;
        wait(|| recv_list.len() == 1)
    }

    #[test]
    fn answer_goes_out_from_the_slot() -> Result {
        let (shared, answers) = (Shared::<Softirq>::new(2, true)?, Inbox::new()?);
        recv(&shared.link.a.qp, shared.env.message(&answers, &[0; SLOT])?)?;
        shared.send(b"ping")?;
        wait(|| shared.recv_list.len() == 1)?;
        let mut slot = shared.recv_list.pop()?.slot;
        slot.buf.cpu()[..4].copy_from_slice(b"pong");
        shared
            .link
            .b
            .qp
            .post_send(slot, |s| Ok(SendWr::send([s.buf.sge(0..4)?])))?;
        wait(|| answers.len() == 1 && shared.recv_list.answered() == 1)?;
        check!(answers.pop()?.bytes()?.starts_with(b"pong"));
        Ok(())
    }

    #[test]
    fn refused_answer_gives_the_slot_back() -> Result {
        let shared = Shared::<Softirq>::new(1, true)?;
        shared.send(b"ping")?;
        wait(|| shared.recv_list.len() == 1)?;
        let slot = shared.recv_list.pop()?.slot;
        let Err(e) = shared
            .link
            .b
            .qp
            .post_send(slot, |s| Ok(SendWr::send([s.buf.sge(0..SLOT + 1)?])))
        else {
            return Err(EINVAL);
        };
        check_eq!(e.error(), EINVAL);
        drop(e);
        // The only slot is posted again.
        shared.send(b"ping")?;
        wait(|| shared.recv_list.received() == 2)
    }

    #[test]
    fn several_entries() -> Result {
        let (env, sent, received) = (Env::new()?, Inbox::new()?, Counter::new()?);
        let (srq, cq) = (Split::<2>::srq(&env, &received)?, env.cq::<Workqueue>(64)?);
        let link = SrqLink::new(&env, &srq, &cq, &patient())?;
        send(&link.a.qp, env.message(&sent, b"abcdef")?)?;
        wait(|| received.get() == 1)
    }

    #[test]
    fn as_many_entries_as_the_device_has() -> Result {
        let (env, received) = (Env::new()?, Counter::new()?);
        let max = env.dev.attrs().max_srq_sge;
        check!(max >= 1);
        check_eq!(Split::<27>::srq(&env, &received).is_ok(), max >= 27);
        check_eq!(Split::<28>::srq(&env, &received).is_ok(), max >= 28);
        Ok(())
    }

    #[test]
    fn immediate_data_and_empty_messages() -> Result {
        not_on_iwarp!(c"there are no immediate data");
        let shared = Shared::<Softirq>::new(2, true)?;
        let message = shared.env.message(&shared.sent, b"x")?;
        shared
            .link
            .a
            .qp
            .post_send(message, |_| Ok(SendWr::send([]).with_imm(0x0102_0304)))?;
        wait(|| shared.recv_list.len() == 1)?;
        let received = shared.recv_list.pop()?;
        let done = received.result.map_err(Error::from)?;
        check_eq!(done.byte_len, 0);
        check_eq!(done.imm_data, Some(0x0102_0304));
        Ok(())
    }

    #[test]
    fn message_that_does_not_fit() -> Result {
        not_on_iwarp!(c"a send completes before the peer has refused it");
        let shared = Shared::<Softirq>::new(2, true)?;
        shared.send(&[1; SLOT + 1])?;
        wait(|| shared.recv_list.len() == 1 && shared.sent.len() == 1)?;
        check!(shared.recv_list.pop()?.result.is_err());
        check!(shared.sent.pop()?.status().is_some());
        Ok(())
    }

    #[test]
    fn receives_cannot_be_posted_to_its_qps() -> Result {
        let shared = Shared::<Softirq>::new(2, true)?;
        let inbox = Inbox::new()?;
        let posted = recv(&shared.link.b.qp, shared.env.message(&inbox, &[0; 4])?);
        check!(posted.is_err());
        drop(posted);
        check_eq!(inbox.dropped(), 1);
        Ok(())
    }

    #[test]
    fn sizes_are_checked() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        check_err!(env.srq(0, &recv_list), EINVAL);
        check_err!(
            Srq::<RecvBuf>::create(&env.pd, u32::MAX, |_| Err::<RecvBuf, _>(EIO), &env.cx),
            EINVAL
        );
        Ok(())
    }

    #[test]
    fn all_is_of_one_pd() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        let other = Pd::alloc(&env.dev, &env.cx)?;
        let slot = |_| RecvBuf::new(&other, &recv_list.0, &env.cx);
        check_err!(Srq::create(&env.pd, 2, slot, &env.cx), EINVAL);
        wait(|| recv_list.gone() == 2)?;
        let (srq, cq) = (env.srq(2, &recv_list)?, env.cq::<Softirq>(64)?);
        let init = rdma::qp::InitAttr::on_srq(&other, &cq, &srq, &Caps::new(2, 0));
        check_err!(init.create(&env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn slot_with_foreign_memory_is_set_aside() -> Result {
        let shared = Shared::<Softirq>::new(2, true)?;
        let other = Pd::alloc(&shared.env.dev, &shared.env.cx)?;
        shared.send(b"one")?;
        wait(|| shared.recv_list.len() == 1)?;
        let mut slot = shared.recv_list.pop()?.slot;
        slot.buf = Buf::alloc(&other, SLOT, &shared.env.cx)?;
        expect(1, "a slot of an SRQ could not be posted");
        drop(slot);
        // The other one goes on.
        shared.send(b"two")?;
        wait(|| shared.recv_list.len() == 1)
    }

    #[test]
    fn leases_once_for_all_qps_on_a_cq() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        let (srq, cq) = (env.srq(16, &recv_list)?, env.cq::<Softirq>(127)?);
        let init = || rdma::qp::InitAttr::on_srq(&env.pd, &cq, &srq, &Caps::new(2, 0));
        let a = init().create(&env.cx)?;
        let first = cq.entries() - cq.free_entries();
        let b = init().create(&env.cx)?;
        let second = cq.entries() - cq.free_entries() - first;
        check_eq!(first, second + 16);
        a.destroy(&env.cx)?;
        check_eq!(cq.entries() - cq.free_entries(), first);
        b.destroy(&env.cx)?;
        check_eq!(cq.entries(), cq.free_entries());
        Ok(())
    }

    #[test]
    fn cq_without_room_for_the_slots() -> Result {
        let (env, recv_list) = (Env::new()?, RecvListGuard::new(false)?);
        let (srq, cq) = (env.srq(64, &recv_list)?, env.cq::<Softirq>(31)?);
        let init = rdma::qp::InitAttr::on_srq(&env.pd, &cq, &srq, &Caps::new(2, 0));
        check_err!(init.create(&env.cx), ENOSPC);
        check_eq!(cq.entries(), cq.free_entries());
        Ok(())
    }
}
