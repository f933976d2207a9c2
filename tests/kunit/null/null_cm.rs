// SPDX-License-Identifier: GPL-2.0

//! Connections on null devices, made by the connection manager, and what can become of them.

use crate::fixture::{
    begin_removal,
    listen,
    port,
    recv,
    refuses,
    send,
    signal_current,
    wait,
    Counted,
    Counter,
    HeldGuard,
    Inbox,
    Link,
    NullEnv,
    OnDone,
    Place,
    CAPS,
    STEP_MS, //
};
use core::net::{
    IpAddr,
    Ipv4Addr,
    Ipv6Addr, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        Mutex,
        SetOnce, //
    },
    time::{
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::prelude::*;
use rdma_null::{
    Injection,
    NullDevice,
    Object,
    REJECTED, //
};

/// The IPv6 address of the loopback interface that whoever loads the module adds.
const LOOPBACK_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xff, 0, 0, 0, 0, 1);

/// An event that a handler was called with.
#[derive(Debug, PartialEq)]
enum Got {
    Established,
    Disconnected,
    Rejected(KVec<u8>),
    Failed(Error),
    Removed,
    AddrChange,
}

/// One end of a connection, which owns its QP.
#[pin_data]
struct Ulp {
    pd: Pd,
    qp: SetOnce<Qp<Softirq>>,
    #[pin]
    got: Mutex<KVec<Got>>,
}

impl Ulp {
    fn new(pd: &Pd) -> Result<Arc<Self>> {
        let pd = pd.clone();
        Arc::pin_init(
            pin_init!(Self {
                pd,
                qp: SetOnce::new(),
                got <- new_mutex!(KVec::new()),
            }),
            GFP_KERNEL,
        )
    }

    fn make_qp(&self, id: &cm::Id, cx: &Sleepable) -> Result {
        let cq = Cq::alloc_any(self.pd.device(), 64, cx)?;
        let qp = Qp::create(id, &self.pd, &cq, &cq, &Caps::new(4, 4), cx)?;
        self.qp.populate(qp);
        Ok(())
    }

    fn qp_num(&self) -> Result<u32> {
        Ok(self.qp.as_ref().ok_or(ENOTCONN)?.num())
    }

    /// Accepts a request.
    fn accept(self: Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result {
        self.make_qp(id, cx)?;
        id.accept(self, &cm::ConnParam::default(), cx)
    }

    fn count(&self) -> usize {
        self.got.lock().len()
    }

    /// Waits for so many events and takes them.
    #[track_caller]
    fn take(&self, count: usize) -> Result<KVec<Got>> {
        wait(|| self.count() >= count)?;
        Ok(core::mem::take(&mut *self.got.lock()))
    }

    /// Waits for one event and takes it. Fails if there are more.
    #[track_caller]
    fn one(&self) -> Result<Got> {
        let mut got = self.take(1)?;
        check_eq!(got.len(), 1);
        got.pop().ok_or(ENODATA)
    }
}

impl cm::Handler for Ulp {
    fn event(self: ArcBorrow<'_, Self>, event: cm::Event<'_>, _cx: &Sleepable) {
        let got = match event {
            cm::Event::Established { .. } => Got::Established,
            cm::Event::Disconnected => Got::Disconnected,
            cm::Event::DeviceRemoval => Got::Removed,
            cm::Event::Failed(e) => Got::Failed(e),
            cm::Event::AddrChange => Got::AddrChange,
            cm::Event::Rejected(rejected) => {
                let mut copy = KVec::new();
                let sent = rejected.private_data().unwrap_or(&[]);
                let copied = copy.extend_from_slice(sent, GFP_KERNEL);
                copied.map_or(Got::Failed(ENOMEM), |()| Got::Rejected(copy))
            }
            _ => return,
        };
        let _ = self.got.lock().push(got, GFP_KERNEL);
    }
}

impl cm::Connect for Ulp {
    fn resolved(self: &Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        self.make_qp(id, cx)?;
        Ok(cm::ConnParam::default())
    }
}

/// An active end that leaves its QP to the test, and hears nothing.
struct Asker {
    pd: Pd,
    qp: Arc<Place<Qp<Softirq>>>,
}

impl cm::Handler for Asker {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

impl cm::Connect for Asker {
    fn resolved(self: &Arc<Self>, id: &cm::Id, cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        let cq = Cq::alloc_any(self.pd.device(), 64, cx)?;
        let caps = Caps::new(4, 4);
        self.qp.put(Qp::create(id, &self.pd, &cq, &cq, &caps, cx)?);
        Ok(cm::ConnParam::default())
    }
}

/// A device and an address of it.
struct Net {
    null: NullEnv,
    addr: SocketAddr,
}

impl Net {
    fn new() -> Result<Self> {
        let null = NullEnv::with_cm()?;
        let addr = null.env.addr();
        Ok(Self { null, addr })
    }

    fn dev(&self) -> &NullDevice {
        &self.null.dev
    }

    fn listen(&self, accept: impl cm::Accept) -> Result<cm::Listener> {
        listen(&self.null.env, self.addr, accept)
    }

    /// Begins to connect, without waiting.
    fn begin(&self) -> Result<(cm::Id, Arc<Ulp>)> {
        self.begin_to(self.addr)
    }

    fn begin_to(&self, addr: SocketAddr) -> Result<(cm::Id, Arc<Ulp>)> {
        let env = &self.null.env;
        let (ulp, options) = (Ulp::new(&env.pd)?, cm::Options::default());
        let id = cm::Id::connect_to(&env.client, addr, STEP_MS, &options, ulp.clone(), &env.cx)?;
        Ok((id, ulp))
    }

    /// Begins to connect, and waits until the request is at the device.
    fn begin_asking(&self) -> Result<(cm::Id, Arc<Ulp>)> {
        let asking = self.begin()?;
        wait(|| self.dev().connections()[0] == 1)?;
        Ok(asking)
    }

    /// Connects, and waits for the first event, either in the call that connects or not.
    fn connect(&self, waiting: bool) -> Result<(cm::Id, Arc<Ulp>, Got)> {
        if !waiting {
            let (id, ulp) = self.begin()?;
            let got = ulp.one()?;
            return Ok((id, ulp, got));
        }
        let env = &self.null.env;
        let ulp = Ulp::new(&env.pd)?;
        let id = cm::Id::resolve(&env.client, self.addr, STEP_MS, &env.cx)?;
        ulp.make_qp(&id, &env.cx)?;
        let connected = id.connect(ulp.clone(), &cm::ConnParam::default(), &env.cx);
        let got = match connected {
            // The driver has refused to ask: there is no event.
            Err(e) if e == ENOSPC => Got::Failed(e),
            connected => {
                // The call may return before the handler is called.
                let got = ulp.one()?;
                check_eq!(connected.is_ok(), got == Got::Established);
                got
            }
        };
        Ok((id, ulp, got))
    }

    /// Connects in both ways, each of which `inject` precedes, and compares the first event.
    fn both(&self, inject: impl Fn(&NullDevice) -> Result, expected: &Got) -> Result {
        for waiting in [true, false] {
            inject(self.dev())?;
            let (_id, _ulp, got) = self.connect(waiting)?;
            check!(got == *expected);
        }
        Ok(())
    }

    /// Nothing is left, and the device goes.
    fn end(self) -> Result {
        let dev = self.null.dev.clone();
        drop(self);
        wait(|| dev.connections() == [0; 2] && dev.objects() == [0; 4])?;
        dev.remove();
        check!(dev.is_removed());
        Ok(())
    }
}

/// The place in which a listener leaves the passive end of a connection.
type Accepted = Arc<Place<(cm::Id, Arc<Ulp>)>>;

/// Returns a function that accepts requests, and the place where it leaves the passive end.
fn accepts(net: &Net) -> Result<(impl cm::Accept, Accepted)> {
    let (place, pd) = (Place::new()?, net.null.env.pd.clone());
    let left = place.clone();
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
        let (id, ulp) = (request.into_id(cx)?, Ulp::new(&pd)?);
        left.put((id.clone(), ulp.clone()));
        ulp.accept(&id, cx)
    };
    Ok((accept, place))
}

/// Returns a function that keeps requests, and the place where it leaves them.
fn keeps() -> Result<(impl cm::Accept, Arc<Place<cm::Id>>)> {
    let place = Place::new()?;
    let left = place.clone();
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
        left.put(request.into_id(cx)?);
        Ok(())
    };
    Ok((accept, place))
}

extern "C" {
    /// Has the loopback interface be a bond whose address changes. Defined in `failover.c`.
    fn rdma_kunit_failover();
}

fn fail_over() {
    // SAFETY: The calling thread may sleep, and holds no lock.
    unsafe { rdma_kunit_failover() };
}

/// A ULP that listens again when its address has changed.
struct Moves {
    client: ClientRef,
    addr: SocketAddr,
    listener: Arc<Place<cm::Listener>>,
    spawned: Arc<Place<Result>>,
    changes: Arc<Counter>,
    requests: Arc<Counter>,
}

impl Moves {
    fn new(net: &Net, addr: SocketAddr) -> Result<Arc<Self>> {
        let this = Self {
            client: net.null.env.client.clone(),
            addr,
            listener: Place::new()?,
            spawned: Place::new()?,
            changes: Counter::new()?,
            requests: Counter::new()?,
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    fn listen(self: &Arc<Self>, cx: &Sleepable) -> Result<cm::Listener> {
        cm::Listener::new(&self.client, self.addr, 8, self.clone(), cx)
    }

    fn listen_again(self: Arc<Self>, cx: &Sleepable) {
        let old = self.listener.take().map_or(Err(ENOENT), |l| l.destroy(cx));
        if let Ok(new) = old.and_then(|()| self.listen(cx)) {
            self.listener.put(new);
        }
        self.changes.up();
    }
}

impl cm::Accept for Moves {
    fn request(self: ArcBorrow<'_, Self>, _request: cm::Request<'_>, _cx: &Sleepable) {
        self.requests.up();
    }

    fn addr_changed(self: ArcBorrow<'_, Self>) {
        let this = Arc::from(self);
        let spawned = (self.client).spawn(GFP_KERNEL, move |cx| this.listen_again(cx));
        self.spawned.put(spawned);
    }
}

/// Waits a moment and stays on its processor, so that another thread runs on another one.
fn spin() {
    let start = Instant::<Monotonic>::now();
    while start.elapsed() < Delta::from_millis(10) {
        core::hint::spin_loop();
    }
}

fn create(object: Object) -> Injection {
    Injection::Create {
        object,
        after: 0,
        errno: ENOSPC.to_errno().unsigned_abs(),
    }
}

fn no_data() -> Got {
    Got::Rejected(KVec::new())
}

#[kunit_tests(rdma_null_cm)]
mod tests {
    use super::*;

    /// A ULP that is told listens again, and connections go on.
    #[test]
    fn address_of_a_listener_has_changed() -> Result {
        let net = Net::new()?;
        let (accept, accepted) = accepts(&net)?;
        let listener = net.listen(accept)?;
        let (_id, active, got) = net.connect(false)?;
        check!(got == Got::Established);
        let (_passive_id, passive) = accepted.wait()?;
        check!(passive.one()? == Got::Established);
        let cx = &net.null.env.cx;
        listener.destroy(cx)?;
        let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port());
        let (bound, any) = (Moves::new(&net, net.addr)?, Moves::new(&net, any)?);
        let _any = any.listen(cx)?;
        bound.listener.put(bound.listen(cx)?);
        let told = || {
            fail_over();
            wait(|| bound.changes.get() == 1)?;
            check!(bound.spawned.wait()?.is_ok());
            for end in [&active, &passive] {
                check!(end.one()? == Got::AddrChange);
            }
            // The new one listens.
            let (_id, refused) = net.begin()?;
            check!(refused.one()? == no_data());
            check_eq!((bound.requests.get(), any.changes.get()), (1, 0));
            Ok(())
        };
        let result = told();
        // It has the ULP, which has it.
        drop(bound.listener.take());
        result
    }

    /// The peer may send once it is accepted; that the connection is made is told later.
    #[test]
    fn data_come_before_the_connection_is_established() -> Result {
        let (net, held) = (Net::new()?, HeldGuard::new()?);
        let env = &net.null.env;
        let (accept, kept) = keeps()?;
        let _listener = net.listen(accept)?;
        // The events of all connections wait for the handler of this one.
        let _first = net.begin()?;
        let first = kept.wait()?;
        let (_second, active) = net.begin()?;
        let second = kept.wait()?;
        let cq = env.cq::<Softirq>(64)?;
        let _qp = Qp::create(&first, &env.pd, &cq, &cq, &CAPS, &env.cx)?;
        first.accept(held.handler(), &cm::ConnParam::default(), &env.cx)?;
        held.wait()?;

        // The receive, and what its handler uses, exist before the passive end accepts.
        let passive = Ulp::new(&env.pd)?;
        passive.make_qp(&second, &env.cx)?;
        let (answers, answered, sent) = (passive.clone(), Counter::new()?, Counter::new()?);
        let answer = Counted::new(&sent)?;
        let received = OnDone::<context::Atomic, _>::new(move |wc, _| {
            if let (Ok(_), Some(qp)) = (wc.result(), answers.qp.as_ref()) {
                let _ = qp.post_send(answer, |_| Ok(SendWr::send([])));
            }
        })?;
        let qp = passive.qp.as_ref().ok_or(ENOTCONN)?;
        qp.post_recv(received, |_| Ok(RecvWr::new([])))?;
        let qp = active.qp.as_ref().ok_or(ENOTCONN)?;
        qp.post_recv(Counted::new(&answered)?, |_| Ok(RecvWr::new([])))?;
        second.accept(passive.clone(), &cm::ConnParam::default(), &env.cx)?;
        qp.post_send(Counted::new(&sent)?, |_| Ok(SendWr::send([])))?;
        wait(|| answered.get() == 1 && sent.get() == 2)?;
        check_eq!(passive.count(), 0);
        drop(held);
        check!(passive.one()? == Got::Established);
        Ok(())
    }

    /// The peer's time is over. No more is asserted of it: it may be late.
    #[test]
    fn peer_does_not_answer_in_time() -> Result {
        let net = Net::new()?;
        let env = &net.null.env;
        net.dev().inject(Injection::Silence { count: 1 })?;
        let _listener = net.listen(refuses)?;
        let id = cm::Id::resolve(&env.client, net.addr, STEP_MS, &env.cx)?;
        let ulp = Ulp::new(&env.pd)?;
        ulp.make_qp(&id, &env.cx)?;
        let param = cm::ConnParam {
            timeout_ms: 20,
            ..Default::default()
        };
        check_err!(
            id.connect(ulp.clone(), &param, &env.cx).map(drop),
            ETIMEDOUT
        );
        check_eq!(ulp.count(), 0);
        net.dev().inject(Injection::Expire)
    }

    #[test]
    fn no_time_for_the_peer_is_refused() -> Result {
        let net = Net::new()?;
        let env = &net.null.env;
        net.dev().inject(Injection::Silence { count: 1 })?;
        let _listener = net.listen(refuses)?;
        let id = cm::Id::resolve(&env.client, net.addr, STEP_MS, &env.cx)?;
        let ulp = Ulp::new(&env.pd)?;
        ulp.make_qp(&id, &env.cx)?;
        let mut param = cm::ConnParam {
            timeout_ms: 0,
            ..Default::default()
        };
        check_err!(id.connect(ulp.clone(), &param, &env.cx).map(drop), EINVAL);
        // Nothing was asked.
        param.timeout_ms = 20;
        check_err!(
            id.connect(ulp.clone(), &param, &env.cx).map(drop),
            ETIMEDOUT
        );
        net.dev().inject(Injection::Expire)
    }

    #[test]
    fn sends_in_both_directions() -> Result {
        let NullEnv { dev, env } = NullEnv::with_cm()?;
        let cq = env.cq::<Softirq>(4 * CAPS.entries())?;
        let link = Link::on(env, &cq, &cq, &CAPS, &cm::ConnParam::default())?;
        let inbox = Inbox::new()?;
        for (from, to) in [(&link.a, &link.b), (&link.b, &link.a)] {
            recv(&to.qp, link.env.message(&inbox, &[0; 5])?)?;
            send(&from.qp, link.env.message(&inbox, b"hello")?)?;
            wait(|| inbox.len() == 2)?;
            for mut completed in inbox.take() {
                check_eq!(completed.bytes()?, b"hello");
            }
        }
        check_eq!(dev.connections(), [1, 0]);
        link.a.id.disconnect(&link.env.cx)?;
        wait(|| link.a.events.disconnected() == 1 && link.b.events.disconnected() == 1)?;
        drop((link, cq));
        wait(|| dev.connections() == [0; 2] && dev.objects() == [0; 4])
    }

    /// A request has them before it is accepted. A wildcard is the address that the peer has used.
    #[test]
    fn ends_know_both_addresses() -> Result {
        let net = Net::new()?;
        let env = &net.null.env;
        let (v4, v6) = (net.addr.ip(), IpAddr::V6(LOOPBACK_V6));
        for (listened, ip) in [
            (v4, v4),
            (Ipv4Addr::UNSPECIFIED.into(), v4),
            (v6, v6),
            (Ipv6Addr::UNSPECIFIED.into(), v6),
        ] {
            let asked = Place::new()?;
            let tell = asked.clone();
            let refuse = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
                tell.put(request.into_id(cx)?.addrs()?);
                Err(ECONNREFUSED)
            };
            let addr = SocketAddr::new(ip, port());
            let listener = listen(env, SocketAddr::new(listened, addr.port()), refuse)?;
            let (id, active) = net.begin_to(addr)?;
            let (own, peer) = asked.wait()?;
            check_eq!(own, addr);
            check!(peer.ip() == ip && peer.port() != 0 && peer.port() != addr.port());
            check!(active.one()? == no_data());
            check_eq!(id.addrs()?, (peer, own));
            listener.destroy(&env.cx)?;
        }
        let unresolved = cm::Id::create(&env.client, &env.cx)?;
        check_err!(unresolved.addrs(), ENOTCONN);
        drop(unresolved);
        net.end()
    }

    #[test]
    fn private_data_go_both_ways() -> Result {
        let net = Net::new()?;
        let pd = net.null.env.pd.clone();
        let accept = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
            check_eq!(request.private_data(), b"question");
            check_eq!(request.initiator_depth(), 3);
            check_eq!(request.responder_resources(), 5);
            crate::fixture::accept(&request.into_id(cx)?, &pd, b"answer", cx)
        };
        let listener = net.listen(accept)?;
        let (end, answer) = crate::fixture::connect_to(&net.null.env, net.addr, b"question")?;
        check_eq!(&*answer, b"answer");
        end.id.disconnect(&net.null.env.cx)?;
        wait(|| end.events.disconnected() == 1)?;
        drop((end, listener));
        net.end()
    }

    #[test]
    fn disconnects() -> Result {
        let net = Net::new()?;
        let (accept, place) = accepts(&net)?;
        let listener = net.listen(accept)?;
        for waiting in [true, false] {
            for by_active in [true, false] {
                let (active, a, got) = net.connect(waiting)?;
                check!(got == Got::Established);
                let (passive, b) = place.wait()?;
                check!(b.one()? == Got::Established);
                let id = if by_active { &active } else { &passive };
                id.disconnect(&net.null.env.cx)?;
                check!(a.one()? == Got::Disconnected);
                check!(b.one()? == Got::Disconnected);
            }
        }
        drop((listener, place));
        net.end()
    }

    #[test]
    fn nobody_listens() -> Result {
        let net = Net::new()?;
        net.both(|_| Ok(()), &no_data())?;
        net.end()
    }

    #[test]
    fn listener_refuses() -> Result {
        let net = Net::new()?;
        let listener = net.listen(refuses)?;
        net.both(|_| Ok(()), &no_data())?;
        listener.destroy(&net.null.env.cx)?;
        let rejects = |request: cm::Request<'_>, cx: &Sleepable| -> Result {
            request.into_id(cx)?.reject(b"no beer", cx)
        };
        let listener = net.listen(rejects)?;
        let mut data = KVec::new();
        data.extend_from_slice(b"no beer", GFP_KERNEL)?;
        net.both(|_| Ok(()), &Got::Rejected(data))?;
        drop(listener);
        net.end()
    }

    #[test]
    fn listens_on_any_address() -> Result {
        let net = Net::new()?;
        let (any, any_v6) = (Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into());
        let v6 = IpAddr::V6(LOOPBACK_V6);
        // The address that is listened on, and whether IPv4 and IPv6 are heard.
        for (ip, dual_stack, heard, heard_v6) in [
            (any, false, true, false),
            (any_v6, false, false, true),
            (any_v6, true, true, true),
            (net.addr.ip(), false, true, false),
            (v6, false, false, true),
        ] {
            let (env, port) = (&net.null.env, port());
            let (accept, place) = accepts(&net)?;
            let options = cm::Options {
                dual_stack,
                ..Default::default()
            };
            let listener = cm::Listener::new_with(
                &env.client,
                SocketAddr::new(ip, port),
                8,
                &options,
                Arc::new(accept, GFP_KERNEL)?,
                &env.cx,
            )?;
            check_eq!(net.dev().connections(), [0, 1]);
            for (to, heard) in [(net.addr.ip(), heard), (v6, heard_v6)] {
                let (id, a) = net.begin_to(SocketAddr::new(to, port))?;
                if !heard {
                    check!(a.one()? == no_data());
                    continue;
                }
                check!(a.one()? == Got::Established);
                let (_passive, b) = place.wait()?;
                check!(b.one()? == Got::Established);
                id.disconnect(&env.cx)?;
                check!(a.one()? == Got::Disconnected);
                check!(b.one()? == Got::Disconnected);
            }
            check!(!place.is_full());
            listener.destroy(&env.cx)?;
            wait(|| net.dev().connections() == [0; 2])?;
        }
        net.end()
    }

    #[test]
    fn backlog_is_full() -> Result {
        let net = Net::new()?;
        let (entered, may_leave) = (Place::new()?, Place::new()?);
        let (enters, leaves) = (entered.clone(), may_leave.clone());
        // While this waits, the requests behind it do.
        let rejects = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
            enters.put(());
            wait(|| leaves.is_full())?;
            request.into_id(cx)?.reject(b"late", cx)
        };
        let env = &net.null.env;
        let rejects = Arc::new(rejects, GFP_KERNEL)?;
        let listener = cm::Listener::new(&env.client, net.addr, 1, rejects, &env.cx)?;
        let handled = net.begin()?;
        entered.wait()?;
        let waiting = net.begin()?;
        wait(|| net.dev().requests() == 2)?;
        let refused = net.begin()?;
        wait(|| net.dev().requests() == 3 && net.dev().connections()[0] == 2)?;
        may_leave.put(());
        check!(refused.1.one()? == no_data());
        for (_id, ulp) in [handled, waiting] {
            let mut data = KVec::new();
            data.extend_from_slice(b"late", GFP_KERNEL)?;
            check!(ulp.one()? == Got::Rejected(data));
        }
        drop((listener, refused));
        net.end()
    }

    #[test]
    fn two_connections_at_once() -> Result {
        let net = Net::new()?;
        let (accept, place) = accepts(&net)?;
        let listener = net.listen(accept)?;
        let mut conns = KVec::new();
        for _ in 0..2 {
            let (active, a, got) = net.connect(false)?;
            check!(got == Got::Established);
            let (passive, b) = place.wait()?;
            check!(b.one()? == Got::Established);
            conns.push((active, a, passive, b), GFP_KERNEL)?;
        }
        check_eq!(net.dev().connections(), [2, 1]);
        // The one that has come first ends first, and the other lasts until it ends.
        for (i, (active, a, _passive, b)) in conns.iter().enumerate() {
            active.disconnect(&net.null.env.cx)?;
            check!(a.one()? == Got::Disconnected);
            check!(b.one()? == Got::Disconnected);
            wait(|| net.dev().connections() == [1 - i, 1])?;
            let others = conns.iter().skip(i + 1);
            check!(others
                .clone()
                .all(|(_, a, _, b)| a.count() + b.count() == 0));
        }
        drop((listener, conns, place));
        net.end()
    }

    #[test]
    fn rejected_by_injection() -> Result {
        let net = Net::new()?;
        let (accept, place) = accepts(&net)?;
        let listener = net.listen(accept)?;
        let mut data = KVec::new();
        data.extend_from_slice(REJECTED, GFP_KERNEL)?;
        let inject = |dev: &NullDevice| dev.inject(Injection::Reject { count: 1 });
        net.both(inject, &Got::Rejected(data))?;
        check!(!place.is_full());
        drop((listener, place));
        net.end()
    }

    #[test]
    fn no_answer() -> Result {
        let net = Net::new()?;
        net.dev().inject(Injection::Silence { count: 1 })?;
        let (id, ulp) = net.begin_asking()?;
        check_eq!(ulp.count(), 0);
        net.dev().inject(Injection::Expire)?;
        check!(ulp.one()? == Got::Failed(ETIMEDOUT));
        drop((id, ulp));
        net.end()
    }

    #[test]
    fn given_up_without_an_answer() -> Result {
        let net = Net::new()?;
        net.dev().inject(Injection::Silence { count: 1 })?;
        let (id, ulp) = net.begin_asking()?;
        // This waits for the answer, as C does on iWARP.
        id.disconnect_later();
        drop(id);
        net.dev().inject(Injection::Expire)?;
        wait(|| net.dev().connections() == [0; 2])?;
        drop(ulp);
        net.end()
    }

    #[test]
    fn silence_ends_with_the_device() -> Result {
        let net = Net::new()?;
        net.dev().inject(Injection::Silence { count: u32::MAX })?;
        let (id, ulp) = net.begin_asking()?;
        net.dev().inject(Injection::End)?;
        check!(ulp.one()? == Got::Failed(ETIMEDOUT));
        drop((id, ulp));
        // Those that come later are answered, and another injection does not change that.
        let (first, late) = net.begin()?;
        check!(late.one()? == no_data());
        net.dev().inject(Injection::Silence { count: 1 })?;
        let (second, later) = net.begin()?;
        check!(later.one()? == no_data());
        drop((first, late, second, later));
        net.end()
    }

    #[test]
    fn device_is_dropped_without_an_answer() -> Result {
        let net = Net::new()?;
        net.dev().inject(Injection::Silence { count: u32::MAX })?;
        let (id, ulp) = net.begin_asking()?;
        let NullEnv { dev, env } = net.null;
        let gone = Place::new()?;
        let left = gone.clone();
        env.client.spawn(GFP_KERNEL, move |_| {
            drop(dev);
            left.put(());
        })?;
        // The request has failed, or the device goes: whichever the handler is called with first.
        wait(|| ulp.count() != 0)?;
        drop((id, ulp, env));
        gone.wait()
    }

    #[test]
    fn qp_is_destroyed_while_it_asks() -> Result {
        let net = Net::new()?;
        let env = &net.null.env;
        let (accept, place) = keeps()?;
        let listener = net.listen(accept)?;
        let asks = || -> Result<(cm::Id, Qp<Softirq>)> {
            let (pd, qp) = (env.pd.clone(), Place::new()?);
            let asker = Arc::new(Asker { pd, qp: qp.clone() }, GFP_KERNEL)?;
            let options = cm::Options::default();
            let id = cm::Id::connect_to(&env.client, net.addr, STEP_MS, &options, asker, &env.cx)?;
            wait(|| net.dev().connections()[0] == 1)?;
            Ok((id, qp.wait()?))
        };
        // The request ends with the QP, and the last reference that `iw_cm` has.
        let is_over = || net.dev().connections() == [0, 1] && net.dev().objects()[1] == 0;
        net.dev().inject(Injection::Silence { count: 1 })?;
        let (id, qp) = asks()?;
        drop(qp);
        wait(is_over)?;
        drop(id);
        let (id, qp) = asks()?;
        let request = place.wait()?;
        drop(qp);
        wait(is_over)?;
        drop(id);
        let late = Ulp::new(&env.pd)?;
        check_err!(late.accept(&request, &env.cx), ECONNRESET);
        drop((listener, request));
        net.end()
    }

    /// `iw_cm_accept()` looks for the QP, and takes a reference after that.
    #[test]
    fn qp_is_not_destroyed_while_it_is_accepted() -> Result {
        let net = Net::new()?;
        let env = &net.null.env;
        let (accept, place) = keeps()?;
        let listener = net.listen(accept)?;
        let (id, asker) = net.begin_asking()?;
        let request = place.wait()?;
        let cq = env.cq::<Softirq>(64)?;
        let qp = Qp::create(&request, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
        net.dev()
            .inject_qp(qp.num(), Injection::Find { us: 1_000_000 })?;
        let (passive, begun, ended) = (request.clone(), Counter::new()?, Counter::new()?);
        let (begins, ends, ulp) = (begun.clone(), ended.clone(), Ulp::new(&env.pd)?);
        env.client.spawn(GFP_KERNEL, move |cx| {
            begins.up();
            // It fails or not: the QP fails meanwhile.
            let _ = passive.accept(ulp, &cm::ConnParam::default(), cx);
            ends.up();
        })?;
        wait(|| begun.get() == 1)?;
        spin();
        qp.destroy(&env.cx)?;
        wait(|| ended.get() == 1)?;
        wait(|| asker.count() != 0)?;
        drop((listener, id, asker, request, cq));
        net.end()
    }

    /// As the one above, of the active end.
    #[test]
    fn qp_is_not_destroyed_while_it_connects() -> Result {
        let net = Net::new()?;
        let env = &net.null.env;
        let listener = net.listen(refuses)?;
        let id = cm::Id::resolve(&env.client, net.addr, STEP_MS, &env.cx)?;
        let cq = env.cq::<Softirq>(64)?;
        let qp = Qp::create(&id, &env.pd, &cq, &cq, &Caps::new(4, 4), &env.cx)?;
        net.dev()
            .inject_qp(qp.num(), Injection::Find { us: 1_000_000 })?;
        let (active, begun, ended) = (id.clone(), Counter::new()?, Counter::new()?);
        let (begins, ends, ulp) = (begun.clone(), ended.clone(), Ulp::new(&env.pd)?);
        env.client.spawn(GFP_KERNEL, move |cx| {
            begins.up();
            let _ = active.connect(ulp, &cm::ConnParam::default(), cx);
            ends.up();
        })?;
        wait(|| begun.get() == 1)?;
        spin();
        qp.destroy(&env.cx)?;
        wait(|| ended.get() == 1)?;
        drop((listener, id, cq));
        net.end()
    }

    /// The work item of the removal destroys it, and whoever else does waits for that.
    #[test]
    fn listener_is_destroyed_while_its_device_goes() -> Result {
        let net = Net::new()?;
        let (dev, client, cx) = (
            net.null.dev.clone(),
            net.null.env.client.clone(),
            Sleepable::current()?,
        );
        let listener = net.listen(refuses)?;
        check_eq!(dev.connections(), [0, 1]);
        dev.inject(Injection::Unlisten { us: 300_000 })?;
        // Listeners are told when nothing else is left.
        drop(net);
        begin_removal(&dev, &client)?;
        wait(|| !dev.unlistens())?;
        listener.destroy(&cx)?;
        check_eq!(dev.connections(), [0; 2]);
        wait(|| dev.is_removed())
    }

    /// The call that connects has returned, so nothing hears that the connection is made.
    #[test]
    fn connection_is_ended_if_it_comes_after_a_signal() -> Result {
        let net = Net::new()?;
        let env = &net.null.env;
        let (accept, place) = keeps()?;
        let listener = net.listen(accept)?;
        let id = cm::Id::resolve(&env.client, net.addr, STEP_MS, &env.cx)?;
        let active = Ulp::new(&env.pd)?;
        active.make_qp(&id, &env.cx)?;
        signal_current();
        let connected = id.connect(active.clone(), &cm::ConnParam::default(), &env.cx);
        check_err!(connected, ERESTARTSYS);
        let (request, passive) = (place.wait()?, Ulp::new(&env.pd)?);
        passive.clone().accept(&request, &env.cx)?;
        check!(*passive.take(2)? == [Got::Established, Got::Disconnected]);
        check_eq!(active.count(), 0);
        drop((listener, id, active, request, passive));
        net.end()
    }

    /// A disconnection may come before, while or after a request is accepted: it ends the
    /// connection.
    #[test]
    fn disconnection_meets_acceptance() -> Result {
        let net = Net::new()?;
        let env = &net.null.env;
        let (accept, place) = keeps()?;
        let listener = net.listen(accept)?;
        for n in 0..200 {
            let (active, a) = net.begin_asking()?;
            let passive = place.wait()?;
            let b = Ulp::new(&env.pd)?;
            b.make_qp(&passive, &env.cx)?;
            let (ending, begun) = (passive.clone(), Counter::new()?);
            let begins = begun.clone();
            env.client.spawn(GFP_KERNEL, move |cx| {
                begins.up();
                let _ = ending.disconnect(cx);
            })?;
            if n % 2 == 0 {
                wait(|| begun.get() == 1)?;
            }
            passive.accept(b.clone(), &cm::ConnParam::default(), &env.cx)?;
            wait(|| b.got.lock().last() == Some(&Got::Disconnected))?;
            wait(|| a.got.lock().last() == Some(&Got::Disconnected))?;
            drop((active, a, passive, b));
            wait(|| net.dev().connections()[0] == 0)?;
        }
        drop((listener, place));
        net.end()
    }

    #[test]
    fn times_out_before_it_is_accepted() -> Result {
        let net = Net::new()?;
        let (accept, place) = keeps()?;
        let listener = net.listen(accept)?;
        let (id, ulp) = net.begin_asking()?;
        let request = place.wait()?;
        net.dev().inject(Injection::Expire)?;
        check!(ulp.one()? == Got::Failed(ETIMEDOUT));
        let late = Ulp::new(&net.null.env.pd)?;
        check_err!(late.accept(&request, &net.null.env.cx), ECONNRESET);
        drop((listener, id, ulp, request));
        net.end()
    }

    #[test]
    fn qp_fails_before_it_is_accepted() -> Result {
        let net = Net::new()?;
        let (accept, place) = keeps()?;
        let listener = net.listen(accept)?;
        let (id, ulp) = net.begin_asking()?;
        let request = place.wait()?;
        net.dev().inject_qp(ulp.qp_num()?, Injection::Fail)?;
        check!(ulp.one()? == no_data());
        let late = Ulp::new(&net.null.env.pd)?;
        check_err!(late.accept(&request, &net.null.env.cx), ECONNRESET);
        drop((listener, id, ulp, request));
        net.end()
    }

    #[test]
    fn lost_before_the_answer_arrives() -> Result {
        let net = Net::new()?;
        let (accept, place) = accepts(&net)?;
        let listener = net.listen(accept)?;
        for waiting in [true, false] {
            net.dev().inject(Injection::Lose { count: 1 })?;
            let (_id, _ulp, got) = net.connect(waiting)?;
            check!(got == no_data());
            let (_passive, b) = place.wait()?;
            wait(|| b.count() == 2)?;
            check!(*b.take(2)? == [Got::Established, Got::Disconnected]);
        }
        drop(listener);
        net.end()
    }

    #[test]
    fn lost_later() -> Result {
        let net = Net::new()?;
        let (accept, place) = accepts(&net)?;
        let listener = net.listen(accept)?;
        for of_active in [true, false] {
            let (_id, a, got) = net.connect(false)?;
            check!(got == Got::Established);
            let (_passive, b) = place.wait()?;
            check!(b.one()? == Got::Established);
            let failing = if of_active { &a } else { &b };
            net.dev().inject_qp(failing.qp_num()?, Injection::Fail)?;
            check!(a.one()? == Got::Disconnected);
            check!(b.one()? == Got::Disconnected);
        }
        drop(listener);
        net.end()
    }

    #[test]
    fn listener_ends_before_it_is_accepted() -> Result {
        let net = Net::new()?;
        let (accept, place) = keeps()?;
        let listener = net.listen(accept)?;
        let (id, ulp) = net.begin_asking()?;
        let request = place.wait()?;
        listener.destroy(&net.null.env.cx)?;
        check!(ulp.one()? == no_data());
        drop((id, ulp, request));
        net.end()
    }

    #[test]
    fn listening_fails() -> Result {
        let net = Net::new()?;
        net.dev().inject(create(Object::Listen))?;
        check_err!(net.listen(refuses).map(|_| ()), ENOSPC);
        net.end()
    }

    #[test]
    fn connecting_fails() -> Result {
        let net = Net::new()?;
        let inject = |dev: &NullDevice| dev.inject(create(Object::Connect));
        net.both(inject, &Got::Failed(ENOSPC))?;
        net.end()
    }

    #[test]
    fn accepting_fails() -> Result {
        let net = Net::new()?;
        let pd = net.null.env.pd.clone();
        let accept = move |request: cm::Request<'_>, cx: &Sleepable| -> Result {
            let ulp = Ulp::new(&pd)?;
            check_err!(ulp.accept(&request.into_id(cx)?, cx), ENOSPC);
            Ok(())
        };
        let listener = net.listen(accept)?;
        net.both(|dev| dev.inject(create(Object::Accept)), &no_data())?;
        drop(listener);
        net.end()
    }

    #[test]
    fn rejecting_fails() -> Result {
        let net = Net::new()?;
        let rejects = |request: cm::Request<'_>, cx: &Sleepable| -> Result {
            check_err!(request.into_id(cx)?.reject(b"data", cx), ENOSPC);
            Ok(())
        };
        let listener = net.listen(rejects)?;
        net.both(|dev| dev.inject(create(Object::Reject)), &no_data())?;
        drop(listener);
        net.end()
    }

    #[test]
    fn device_goes_without_an_answer() -> Result {
        let net = Net::new()?;
        net.dev().inject(Injection::Silence { count: 1 })?;
        let (id, ulp) = net.begin_asking()?;
        begin_removal(net.dev(), &net.null.env.client)?;
        check!(ulp.one()? == Got::Removed);
        net.dev().inject(Injection::Expire)?;
        drop((id, ulp));
        net.end()
    }

    #[test]
    fn device_goes_before_it_is_accepted() -> Result {
        let net = Net::new()?;
        let (accept, place) = keeps()?;
        let listener = net.listen(accept)?;
        let (id, ulp) = net.begin_asking()?;
        let request = place.wait()?;
        begin_removal(net.dev(), &net.null.env.client)?;
        check!(ulp.one()? == Got::Removed);
        drop((listener, id, ulp, request));
        net.end()
    }

    #[test]
    fn device_goes_with_a_connection() -> Result {
        let net = Net::new()?;
        let (accept, place) = accepts(&net)?;
        let listener = net.listen(accept)?;
        let (id, a, got) = net.connect(true)?;
        check!(got == Got::Established);
        let (passive, b) = place.wait()?;
        check!(b.one()? == Got::Established);
        begin_removal(net.dev(), &net.null.env.client)?;
        check!(a.one()? == Got::Removed);
        check!(b.one()? == Got::Removed);
        drop((listener, id, a, passive, b, place));
        net.end()
    }

    #[test]
    fn is_not_on_other_devices() -> Result {
        let null = NullEnv::iwarp()?;
        check_err!(null.dev.inject(Injection::Expire), EINVAL);
        check_eq!(null.dev.connections(), [0; 2]);
        Ok(())
    }
}
