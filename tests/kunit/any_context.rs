// SPDX-License-Identifier: GPL-2.0

//! Functions without a token may be called, and their objects dropped, in any context: called in
//! softirqs.

use crate::fixture::{
    both,
    gid,
    listen,
    own_class,
    recv,
    refuses,
    send,
    serve,
    wait,
    Carried,
    CmLink,
    Counted,
    Counter,
    Env,
    Events,
    Inbox,
    Link,
    Mads,
    Null,
    OnDone,
    RecvListGuard,
    SrqLink,
    UdEnd,
    UdMessage,
    QKEY, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*, //
};
use rdma::{
    device::{
        GidType,
        Protocol, //
    },
    flush::Pad,
    mad::{
        Method,
        Peer, //
    },
    op::Op,
    prelude::*,
    qp::Chain,
    rw::Ctx,
    ud::UdWr,
    wr::AtomicWr, //
};

/// An owner whose completions a softirq finds.
struct Softirqs(Null<Softirq>);

impl Softirqs {
    fn new() -> Result<Self> {
        let null = Null::new()?;
        null.disconnect()?;
        Ok(Self(null))
    }

    /// Calls a function in the handler of a completion, and returns what it says.
    fn call<T: Unpin + Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T> + Unpin + Send + 'static,
    ) -> Result<T> {
        let said = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        let answer = said.clone();
        let handler = OnDone::<Atomic, _>::new(move |_, _| {
            let atomic = Sleepable::current().is_err();
            let value = call();
            *answer.lock() = Some((value, atomic));
        })?;
        self.0.a.post_send(handler, |_| Ok(SendWr::send([])))?;
        let mut said_so = None;
        wait(|| {
            said_so = said.lock().take();
            said_so.is_some()
        })?;
        let (value, atomic) = said_so.ok_or(EIO)?;
        check!(atomic);
        value
    }

    /// Drops something there.
    fn drop<T: Send + 'static>(&self, value: T) -> Result {
        // A value that is pinned in it is not moved: it goes with the box.
        let value = KBox::new(value, GFP_KERNEL)?;
        self.call(move || {
            drop(value);
            Ok(())
        })
    }
}

/// As [`Softirqs::call`], once.
fn in_softirq(call: impl FnOnce() -> Result + Unpin + Send + 'static) -> Result {
    Softirqs::new()?.call(call)
}

#[kunit_tests(rdma_any_context)]
mod tests {
    use super::*;

    #[test]
    fn device_is_looked_at() -> Result {
        let Env {
            dev, client, ip, ..
        } = Env::new()?;
        in_softirq(move || {
            check!(dev.clone() == dev);
            check!(dev.name().to_bytes().starts_with(b"rxe"));
            check_eq!(client.clone().name().to_bytes(), b"rdma_kunit");
            check!(dev.num_comp_vectors() > 0);
            check!(
                dev.attrs().max_cqe > 0
                    && dev.attrs().max_qp_wr > 0
                    && dev.attrs().max_fast_reg_page_list_len > 0
            );
            check_eq!(dev.ip_addr(), Some(ip));
            for port in dev.ports() {
                check!(port.has(Protocol::Roce));
                check_eq!(port.find_pkey(0xffff)?, 0);
                check!(port.rw_contexts(4).is_ok_and(|n| port.rw_requests(n) > 0));
                for gid in port.gids() {
                    check!(gid.device() == &dev && gid.gid_type() == GidType::RoceV2);
                    check_eq!(port.gid(gid.index())?, Some(gid.gid()));
                    check!(gid.l2()?.vlan.is_none());
                }
            }
            Ok(())
        })
    }

    #[test]
    fn work_is_begun() -> Result {
        let (client, ran) = (Env::new()?.client, Counter::new()?);
        let counts = ran.clone();
        in_softirq(move || {
            client.spawn(GFP_ATOMIC, move |_| {
                counts.up();
            })
        })?;
        wait(|| ran.get() == 1)
    }

    #[test]
    fn connection_is_ended() -> Result {
        let link = Link::<Softirq>::new()?;
        let (a, b) = (link.a.id.clone(), link.b.id.clone());
        in_softirq(move || {
            check!(a.device()? == b.device()?);
            check_eq!(a.gids()?.0, b.gids()?.1);
            b.notify_established();
            b.notify_established();
            a.disconnect_later();
            a.disconnect_later();
            Ok(())
        })?;
        wait(|| link.a.events.disconnected() == 1 && link.b.events.disconnected() == 1)
    }

    #[test]
    fn connection_of_ibcm_is_ended() -> Result {
        let CmLink { a, b, env, .. } = CmLink::new()?;
        let (from, to) = (a.connection, b.connection);
        in_softirq(move || {
            to.notify_established();
            from.disconnect_later();
            from.disconnect_later();
            // Queued work finds them, or finds that they are destroyed.
            drop((from, to));
            Ok(())
        })?;
        let gone = [a.events.gone(), b.events.gone()];
        drop((a.events, b.events));
        wait(|| gone.iter().all(|gone| gone.get() == 1))?;
        drop(env);
        Ok(())
    }

    #[test]
    fn peer_of_ibcm_is_told_of_the_end() -> Result {
        let CmLink { a, b, .. } = CmLink::new()?;
        let connection = Arc::new(a.connection, GFP_KERNEL)?;
        let from = connection.clone();
        in_softirq(move || {
            from.disconnect_later();
            Ok(())
        })?;
        wait(|| a.events.disconnected() == 1 && b.events.disconnected() == 1)
    }

    #[test]
    fn requests_are_posted() -> Result {
        let link = Link::<Softirq>::new()?;
        let (sent, received, times) = (Inbox::new()?, Inbox::new()?, Counter::new()?);
        let mut sends = KVec::new();
        let mut recvs = KVec::new();
        for _ in 0..4 {
            sends.push(link.env.message(&sent, &[1; 8])?, GFP_KERNEL)?;
            recvs.push(link.env.message(&received, &[0; 8])?, GFP_KERNEL)?;
        }
        let read = link.env.message(&sent, &[0; 8])?;
        let counted = Counted::new(&times)?;
        let (a, b) = (link.a.qp.clone(), link.b.qp.clone());
        in_softirq(move || {
            for message in recvs {
                recv(&b, message)?;
            }
            let mut sends = sends.into_iter();
            let mut next = || sends.next().ok_or(EINVAL);
            send(&a, next()?)?;
            a.post_chain(next()?, |m, chain: &mut Chain<'_, 1>| {
                chain.push(SendWr::send([m.buf.whole()]))
            })?;
            let mut batch = a.batch(next()?);
            batch.post(|m, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([m.buf.whole()])))?;
            batch
                .finish(|m, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([m.buf.whole()])))?;
            let nowhere = Remote { addr: 0, rkey: 0 };
            // Of no length, which nothing has to be registered for.
            a.post_send(counted, |_| Ok(SendWr::rdma_write([], nowhere)))?;
            // The last one, as the peer refuses it.
            a.post_send(read, |m| {
                Ok(AtomicWr::fetch_add(m.buf.whole_mut(), nowhere, 1))
            })?;
            Ok(())
        })?;
        wait(|| sent.len() == 4 && received.len() >= 4 && times.get() == 1)
    }

    #[test]
    fn completion_is_looked_at() -> Result {
        let (link, right) = (Link::<Softirq>::new()?, Counter::new()?);
        let counts = right.clone();
        let handler = OnDone::<Atomic, _>::new(move |wc, _| {
            let Ok(wc) = wc.result() else { return };
            if wc.opcode() == Opcode::RdmaWrite {
                counts.up();
            }
        })?;
        let nowhere = Remote { addr: 0, rkey: 0 };
        (link.a.qp).post_send(handler, |_| Ok(SendWr::rdma_write([], nowhere)))?;
        wait(|| right.get() == 1)
    }

    #[test]
    fn region_goes_its_way() -> Result {
        let (softirqs, link) = (Softirqs::new()?, Link::<Softirq>::new()?);
        let mr = Mr::alloc(&link.env.pd, 2, &link.env.cx)?;
        let memory = SgBuf::<Bidirectional>::alloc(&link.env.pd, 8000, &link.env.cx)?;
        let region = softirqs.call(move || Ok(Region::map(mr, memory)?))?;

        let (carrier, registered) = Carried::new(region)?;
        let qp = link.b.qp.clone();
        softirqs.call(move || {
            qp.post_send(carrier, |c| Ok(both(&c.region)))?;
            Ok(())
        })?;
        let (region, outcome) = registered.wait(&link)?;
        check_eq!(outcome, Ok(Opcode::RegMr));

        let (carrier, invalidated) = Carried::new(region)?;
        let qp = link.b.qp.clone();
        softirqs.call(move || {
            qp.post_send(carrier, |c| Ok(InvWr::new(&c.region)))?;
            Ok(())
        })?;
        let (region, outcome) = invalidated.wait(&link)?;
        check_eq!(outcome, Ok(Opcode::LocalInv));

        softirqs.call(move || {
            check!(region.is_idle());
            region.write(7, b"as is")?;
            drop(region.into_parts().map_err(|_| EBUSY)?);
            Ok(())
        })
    }

    #[test]
    fn pages_are_accessed() -> Result {
        let Env { pd, cx, .. } = Env::new()?;
        let mut memory = SgBuf::<Bidirectional>::alloc(&pd, 8000, &cx)?;
        let pages = Ctx::alloc(8000, &cx)?;
        in_softirq(move || {
            memory.cpu().write(4090, b"across")?;
            let mut bytes = [0; 6];
            memory.cpu().read(4090, &mut bytes)?;
            check_eq!(&bytes, b"across");
            drop((memory, pages));
            Ok(())
        })
    }

    #[test]
    fn direct_cq_is_polled() -> Result {
        let (softirqs, link) = (Softirqs::new()?, Link::<Direct>::new()?);
        let times = Counter::new()?;
        let mut posted = 0;
        let ways: [fn(&Cq<Direct>, &Counter) -> Result; 5] = [
            |cq, _| {
                cq.process(1);
                Ok(())
            },
            |cq, times| {
                let take = |completion: Completion<'_>| {
                    if completion.take::<Counted, 0>().is_ok() {
                        times.up();
                    }
                };
                cq.process_with(1, take).map(drop)
            },
            |cq, _| cq.process_with(1, |completion| drop(completion)).map(drop),
            |cq, _| {
                let mut batch = WcArray::<1>::new();
                cq.poll(&mut batch)?;
                drop(batch);
                Ok(())
            },
            |cq, _| {
                let mut batch = WcArray::<1>::new();
                cq.poll(&mut batch)?;
                batch.completions().for_each(Completion::dispatch);
                Ok(())
            },
        ];
        for way in ways {
            let nowhere = Remote { addr: 0, rkey: 0 };
            let counted = Counted::new(&times)?;
            (link.a.qp).post_send(counted, |_| Ok(SendWr::rdma_write([], nowhere)))?;
            posted += 1;
            while times.get() < posted {
                let (cq, times) = (link.send_cq.clone(), times.clone());
                softirqs.call(move || way(&cq, &times))?;
            }
        }
        Ok(())
    }

    #[test]
    fn request_is_in_flight() -> Result {
        let mut kept = Reusable::new(Counter::new()?, GFP_KERNEL)?;
        in_softirq(move || {
            check!(kept.get().is_some());
            let in_flight = kept.start().ok_or(EBUSY)?;
            check!(kept.start().is_none() && kept.get().is_none());
            drop(in_flight);
            let in_flight = kept.start().ok_or(EBUSY)?;
            drop(kept);
            drop(in_flight);
            Ok(())
        })
    }

    #[test]
    fn datagram_is_sent() -> Result {
        let (softirqs, env) = (Softirqs::new()?, Env::new()?);
        let end = Arc::new(UdEnd::<Softirq>::new(&env, 0)?, GFP_KERNEL)?;
        let (from, to) = (end.clone(), env.own_ah()?);
        let out = UdMessage::new(&env.pd, &end.sent, b"hello", Some(to.clone()), &env.cx)?;
        let into = UdMessage::new(&env.pd, &end.received, &[0; 64], None, &env.cx)?;
        softirqs.call(move || {
            from.qp
                .post_recv(into, |l| Ok(RecvWr::new([l.buf.whole_mut()])))?;
            let num = from.qp.num();
            from.qp.post_send(out, |l| {
                let to = l.to.as_ref().ok_or(EINVAL)?;
                Ok(UdWr::new([l.buf.whole()], to, num, QKEY))
            })?;
            Ok(())
        })?;
        end.wait(|end| end.sent.len() == 1 && end.received.len() == 1)?;
        // The last reference to the address handle, which is no owner's any more.
        drop((end.sent.take(), end.received.take()));
        softirqs.drop(to)?;
        softirqs.drop(end)
    }

    #[test]
    fn slot_comes_home() -> Result {
        let (softirqs, env, recv_list) = (Softirqs::new()?, Env::new()?, RecvListGuard::new(true)?);
        let srq = env.srq(4, &recv_list)?;
        let cq = env.cq::<Softirq>(64)?;
        let link = SrqLink::new(&env, &srq, &cq, &cm::ConnParam::default())?;
        let sent = Inbox::new()?;
        for n in 1..=8 {
            send(&link.a.qp, env.message(&sent, &[n; 8])?)?;
            wait(|| recv_list.len() == 1 && sent.len() == n.into())?;
            let received = recv_list.pop()?;
            softirqs.drop(received.slot)?;
        }
        drop(link);
        softirqs.drop(srq)
    }

    #[test]
    fn operation_is_posted() -> Result {
        let link = Link::<Softirq>::new()?;
        let (pd, cx) = (&link.env.pd, &link.env.cx);
        let buf = || Buf::<Bidirectional>::alloc(pd, 8, cx);
        let op = || Op::<(), _>::new(buf()?, (), cx);
        let (ops, pad) = ([op()?, op()?, op()?, op()?], Pad::alloc(pd, cx)?);
        let (a, b) = (link.a.qp.clone(), link.b.qp.clone());
        in_softirq(move || {
            let [receive, message, read, flush] = ops;
            receive.recv(&b, 0..8)?;
            message.send_with_imm(&a, 0..8, 7)?;
            let nowhere = Remote { addr: 0, rkey: 0 };
            // These fail.
            read.read(&a, 0..8, nowhere)?;
            flush.flush(&a, &pad, nowhere, 8)?;
            Ok(())
        })?;
        link.a.qp.drain(cx)?;
        link.b.qp.drain(cx)
    }

    #[test]
    fn mads_are_dropped() -> Result {
        let (softirqs, mads) = (Softirqs::new()?, Mads::new()?);
        mads.tell(1)?;
        let mad = mads.server.recv(None, &mads.env.cx)?;
        softirqs.call(move || {
            check_eq!(mad.header().method, Method::SEND);
            check_eq!((mad.status(), mad.header().attr_mod.get()), (0, 1));
            drop(mad);
            Ok(())
        })?;
        let env = Env::new()?;
        let agent = serve(&env, own_class(), 1)?;
        let gid = gid(&env, env.ip)?;
        let peer = Peer::new(&agent, &gid, gid.gid(), &env.cx)?;
        softirqs.call(move || {
            check!(agent.device() == gid.device());
            drop((peer, agent, gid));
            Ok(())
        })
    }

    #[test]
    fn all_else_is_dropped() -> Result {
        let (softirqs, env) = (Softirqs::new()?, Env::new()?);
        let addr = env.addr();
        softirqs.drop(listen(&env, addr, refuses)?)?;
        softirqs.drop(env.id()?)?;
        softirqs.drop(env.region(64)?)?;
        softirqs.drop(Mr::alloc(&env.pd, 1, &env.cx)?)?;
        softirqs.drop(Pad::alloc(&env.pd, &env.cx)?)?;
        softirqs.drop(env.cq::<Waited>(8)?)?;
        softirqs.drop(Cq::<Workqueue>::pool_get(&env.dev, 8, None, &env.cx)?)?;
        let Link { a, b, .. } = Link::<Softirq>::new()?;
        softirqs.drop((a.qp, b.qp, a.id, b.id))?;
        softirqs.drop(Events::new()?)?;
        softirqs.drop((env.pd, env.dev, env.client))
    }
}
