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
    CAPS,
    QKEY,
    SOFTIRQ_IS_WORK, //
};
use kernel::{
    impl_has_work,
    new_spinlock_irq,
    new_work,
    prelude::*,
    sync::rcu,
    workqueue::{
        Work,
        WorkItem, //
    }, //
};
use rdma::{
    cq::HandlerCell,
    device::{
        GidType,
        Port,
        Protocol, //
    },
    ibcm,
    mad::{
        Method,
        Peer, //
    },
    mr::LentRegion,
    op::{
        Op,
        Pad, //
    },
    prelude::*,
    qp::{
        Batch,
        Chain,
        Requests,
        SendRing, //
    },
    ratelimit::Ratelimit,
    rw::{
        Ctx,
        Rw, //
    },
    session::{
        tags::{
            Exchange,
            Tag,
            Tags, //
        },
        RecvCredits,
        Room,
        SendCredits, //
    },
    sg::{
        SgList,
        SgMap, //
    },
    ud::{
        UdQp,
        UdWr, //
    },
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

    /// Calls a function in the handler of a completion, and returns its result.
    fn call<T: Unpin + Send + 'static>(
        &self,
        call: impl FnOnce() -> Result<T> + Unpin + Send + 'static,
    ) -> Result<T> {
        let said = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        let answer = said.clone();
        let handler = OnDone::<context::Atomic, _>::new(move |_, _| {
            // A work item polls there, which may sleep.
            let _guard = SOFTIRQ_IS_WORK.then(rcu::read_lock);
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

/// A work item of the ULP's.
#[pin_data]
struct Works {
    ran: Arc<Counter>,
    #[pin]
    work: Work<Self>,
}

impl_has_work! {
    impl HasWork<Self> for Works { self.work }
}

impl WorkItem for Works {
    type Pointer = Arc<Self>;

    fn run(this: Arc<Self>) {
        this.ran.up();
    }
}

/// Requests that nobody answers.
struct Unanswered;

impl Exchange for Unanswered {
    type Request = Buf<ToDevice>;
    type Reply = ();
    type Connection = Arc<Counter>;
    type Needs = context::Atomic;
}

/// Pages on their way.
#[derive(HasCqe)]
struct Pages {
    cqe: Cqe<Self>,
    data: Ctx,
    back: Arc<Counter>,
}

impl CqeHandler for Pages {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.back.up();
    }
}

const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };

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
                for gid in Port::gids(&port) {
                    check!(gid.device() == &dev && gid.gid_type() == GidType::RoceV2);
                    check_eq!(Port::gid(&port, gid.index())?, Some(gid.gid()));
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
    fn work_item_is_queued() -> Result {
        let (client, ran) = (Env::new()?.client, Counter::new()?);
        let counts = ran.clone();
        let init = pin_init!(Works {
            ran: counts,
            work <- new_work!("Works"),
        });
        let works = Arc::pin_init(init, GFP_KERNEL)?;
        in_softirq(move || ClientRef::enqueue(&client, works))?;
        wait(|| ran.get() == 1)
    }

    #[test]
    fn connection_is_ended() -> Result {
        let link = Link::<Softirq>::new()?;
        let (a, b) = (link.a.id.clone(), link.b.id.clone());
        in_softirq(move || {
            check!(a.device()? == b.device()?);
            check_eq!(a.gids()?.0, b.gids()?.1);
            check_eq!(a.addrs()?.0, b.addrs()?.1);
            cm::Id::notify_established(&b);
            b.notify_established();
            cm::Id::disconnect_later(&a);
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
            ibcm::Connection::notify_established(&to);
            ibcm::Connection::disconnect_later(&from);
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
                Buf::write(&m.buf, 0, &[2])?;
                chain.push(SendWr::send([m.buf.whole()]))
            })?;
            let mut batch = a.batch(next()?);
            Batch::post(&mut batch, |m, chain: &mut Chain<'_, 1>| {
                chain.push(SendWr::send([m.buf.whole()]))
            })?;
            batch
                .finish(|m, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([m.buf.whole()])))?;
            let nowhere = NOWHERE;
            // Of no length, which nothing has to be registered for.
            Qp::post_send(&a, counted, |_| Ok(SendWr::rdma_write([], nowhere)))?;
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
        let handler = OnDone::<context::Atomic, _>::new(move |wc, _| {
            let Ok(wc) = wc.result() else { return };
            if wc.opcode() == Opcode::RdmaWrite {
                counts.up();
            }
        })?;
        (link.a.qp).post_send(handler, |_| Ok(SendWr::rdma_write([], NOWHERE)))?;
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
            drop(Region::into_parts(region).map_err(|_| EBUSY)?);
            Ok(())
        })
    }

    #[test]
    fn lent_region_gives_its_memory_back() -> Result {
        let (softirqs, env) = (Softirqs::new()?, Env::new()?);
        let mr = Mr::alloc(&env.pd, 2, &env.cx)?;
        let memory = Buf::<Bidirectional>::alloc(&env.pd, 64, &env.cx)?;
        let region = LentRegion::lend(mr, memory)?;
        softirqs.call(move || {
            let mut memory = LentRegion::take_memory(&region).ok_or(EINVAL)?;
            check_eq!(memory.cpu().len(), 64);
            check!(LentRegion::take_memory(&region).is_none());
            let (_mr, left) = LentRegion::into_mr(region).map_err(|_| EBUSY)?;
            check!(left.is_none());
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
        for way in 0..5 {
            let counted = Counted::new(&times)?;
            (link.a.qp).post_send(counted, |_| Ok(SendWr::rdma_write([], NOWHERE)))?;
            while times.get() <= way {
                let (cq, times) = (link.send_cq.clone(), times.clone());
                softirqs.call(move || {
                    let take = |completion: cq::Completion<'_>| {
                        if completion.take::<Counted, 0>().is_ok() {
                            times.up();
                        }
                    };
                    let mut batch = WcArray::<1>::new();
                    match way {
                        0 => drop(Cq::process(&cq, 1)),
                        1 => drop(cq.process_with(1, take)?),
                        2 => drop(cq.process_with(1, |completion| drop(completion))?),
                        3 => drop(Cq::poll(&cq, &mut batch)?),
                        _ => {
                            Cq::poll(&cq, &mut batch)?;
                            batch.completions().for_each(cq::Completion::dispatch);
                        }
                    }
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    #[test]
    fn request_is_in_flight() -> Result {
        let null = Null::<Direct>::new()?;
        let mut kept = Requests::new(&null.a, 2, |_| Counter::new(), &null.env.cx)?;
        in_softirq(move || {
            let in_flight = kept.take().ok_or(EBUSY)?;
            check!(kept.take_at(0).is_none() && kept.idle().count() == 1);
            drop(in_flight);
            let in_flight = kept.take_at(0).ok_or(EBUSY)?;
            drop(kept);
            drop(in_flight);
            Ok(())
        })
    }

    #[test]
    fn request_of_an_array_is_taken() -> Result {
        let null = Null::<Direct>::new()?;
        let mut requests = Requests::new(&null.a, 2, |_| Counter::new(), &null.env.cx)?;
        in_softirq(move || {
            let request = Requests::take(&mut requests).ok_or(EBUSY)?;
            check!(Requests::take_at(&mut requests, 0).is_none());
            check_eq!(requests.idle().count(), 1);
            drop(request);
            let request = requests.take_at(0).ok_or(EBUSY)?;
            drop(requests);
            drop(request);
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
            UdQp::post_send(&from.qp, out, |l| {
                let to = l.to.as_ref().ok_or(EINVAL)?;
                Ok(UdWr::new([l.buf.whole()], to, num, QKEY))
            })?;
            Ok(())
        })?;
        end.wait(|end| end.sent.len() == 1 && end.received.len() == 1)?;
        // The owners have the other references to the address handle.
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
            // These fail.
            read.read(&a, 0..8, NOWHERE)?;
            flush.flush(&a, &pad, NOWHERE, 8)?;
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
    fn credits_are_counted() -> Result {
        let sends = Arc::pin_init(SendCredits::new(1, 2), GFP_KERNEL)?;
        let recvs = RecvCredits::new(1, 2);
        in_softirq(move || {
            drop(SendCredits::take(&sends)?);
            SendCredits::give(&sends, 1)?;
            check_eq!(sends.available(), 2);
            SendCredits::close(&sends, ENOTCONN);
            check_err!(sends.take().map(drop), ENOTCONN);
            RecvCredits::received(&recvs)?;
            RecvCredits::posted(&recvs, 1)?;
            let grant = RecvCredits::grant(&recvs, 1);
            check_eq!(grant.count(), 1);
            check_err!(
                SendCredits::take_to_grant(&sends, &grant).map(drop),
                ENOTCONN
            );
            drop(grant);
            check_eq!(recvs.grant(1).count(), 1);
            Ok(())
        })
    }

    #[test]
    fn message_is_counted() -> Result {
        in_softirq(|| {
            check!(Ratelimit::check(&Ratelimit::new("any_context")));
            Ok(())
        })
    }

    #[test]
    fn list_is_mapped() -> Result {
        let Env { pd, cx, .. } = Env::new()?;
        let list = SgList::new(KVec::from_elem(7, 8000, GFP_KERNEL)?, &cx)?;
        in_softirq(move || {
            let memory = SgMap::<_, ToDevice>::new(&pd, list)?;
            let (owner, pd) = SgMap::into_parts(memory);
            let memory = SgMap::<_, ToDevice>::with_pd(pd, owner)?;
            let bytes = SgMap::into_owner(memory).into_inner();
            check_eq!(bytes.len(), 8000);
            Ok(())
        })
    }

    #[test]
    fn prepared_transfer_is_posted() -> Result {
        let (softirqs, env) = (Softirqs::new()?, Env::new()?);
        let requests = env.dev.port(1).ok_or(ENODEV)?.rw_requests(4);
        let cq = env.cq::<Softirq>(4 * (CAPS.entries() + requests))?;
        let caps = Caps {
            send_wr: CAPS.send_wr + requests,
            ..CAPS
        };
        let link = Link::connect(env, &cq, &cq, &caps, 4, &cm::ConnParam::default())?;
        let (qp, cx) = (link.a.qp.clone(), &link.env.cx);
        let back = Counter::new()?;
        let pages = Pages {
            cqe: Cqe::new(),
            data: Ctx::alloc(8000, cx)?,
            back: back.clone(),
        };
        let pages = KBox::pin(pages, GFP_KERNEL)?;
        let mut other = Ctx::<Bidirectional>::alloc(8000, cx)?;
        qp.prepare_rw(Rw::read(&pages.data, .., NOWHERE, cx))?;
        qp.prepare_rw(Rw::read(&other, .., NOWHERE, cx))?;
        softirqs.call(move || {
            Ctx::cancel(&mut other);
            let owner = Ctx::take(&mut other).ok_or(EINVAL)?;
            Ctx::fill(&mut other, owner)?;
            // It fails later.
            qp.post_rw(pages, |pages| Ok(Rw::prepared(&pages.data)))?;
            Ok(())
        })?;
        wait(|| back.get() == 1)
    }

    #[test]
    fn value_of_handlers_is_lent() -> Result {
        let (softirqs, link) = (Softirqs::new()?, Link::<Softirq>::new()?);
        let (cell, lent) = (HandlerCell::new(&link.send_cq, 0)?, Counter::new()?);
        let counts = lent.clone();
        let lends = OnDone::<context::Atomic, _>::new(move |wc, _| {
            if HandlerCell::with(&cell, wc, |value| *value += 1).is_ok() {
                counts.up();
            }
            // The cell is dropped here.
        })?;
        // It fails later.
        link.a
            .qp
            .post_send(lends, |_| Ok(SendWr::rdma_write([], NOWHERE)))?;
        wait(|| lent.get() == 1)?;
        softirqs.drop(HandlerCell::new(&link.send_cq, 0)?)
    }

    #[test]
    fn ring_is_posted_to() -> Result {
        let (softirqs, link) = (Softirqs::new()?, Link::<Softirq>::new()?);
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        recv(&link.b.qp, link.env.message(&received, &[0; 8])?)?;
        let mut ring = SendRing::new(&link.a.qp, 2, 1, &link.env.cx)?;
        let (qp, message) = (link.a.qp.clone(), link.env.message(&sent, &[1; 8])?);
        let ring = softirqs.call(move || {
            SendRing::post(&mut ring, &qp, message, |m, chain: &mut Chain<'_, 1>| {
                chain.push(SendWr::send([m.buf.whole()]))
            })?;
            Ok(ring)
        })?;
        wait(|| sent.len() == 1 && received.len() == 1)?;
        softirqs.drop(ring)
    }

    #[test]
    fn exchange_is_begun() -> Result {
        let (softirqs, env) = (Softirqs::new()?, Env::new()?);
        let cq = env.cq::<Softirq>(4 * CAPS.entries())?;
        let link = Link::on(env, &cq, &cq, &CAPS, &cm::ConnParam::default())?;
        let (qp, cx) = (link.a.qp.clone(), &link.env.cx);
        let received = Inbox::new()?;
        recv(&link.b.qp, link.env.message(&received, &[0; 8])?)?;
        let request = |_| Ok((Buf::alloc(&link.env.pd, 8, cx)?, ()));
        let tags = Tags::<Unanswered>::new(&qp, Counter::new()?, 2, 4, request, cx)?;
        let tags = softirqs.call(move || {
            let other = Tags::take_at(&tags, 0)?;
            check_eq!(other.connection().up(), 1);
            let tag = Tags::take(&tags)?;
            Tag::post(tag, &qp, |buf, chain: &mut Chain<'_, 1>| {
                chain.push(SendWr::send([buf.whole()]))
            })?;
            Tags::close(&tags, ENOTCONN);
            Ok(tags)
        })?;
        wait(|| received.len() == 1)?;
        tags.reclaim(&link.a.qp, cx)?;
        softirqs.drop(tags)
    }

    #[test]
    fn places_are_taken_and_given() -> Result {
        let (softirqs, link) = (Softirqs::new()?, Link::<Softirq>::new()?);
        let room = Room::new(&link.a.qp, 2, 4, &link.env.cx)?;
        let room = softirqs.call(move || {
            check_eq!(Room::take(&room, 2, 1)?, Some(1));
            check_eq!(Room::take(&room, 2, 2)?, None);
            let mut resumed = 0;
            Room::give(&room, 2, |owner| resumed = owner);
            check_eq!(resumed, 2);
            Room::close(&room, ENOTCONN, |_| ());
            Ok(room)
        })?;
        softirqs.drop(room)
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
