// SPDX-License-Identifier: GPL-2.0

//! A ULP that asks another one's device handle for data of its own, and gives objects of that what
//! they would call or drop when this module may be gone. Its types have the names of the other's,
//! and so has its file.

use core::net::Ipv4Addr;
use kernel::prelude::*;
use rdma::{
    device::Device,
    ibcm,
    prelude::*,
    qp::{
        Event,
        Events,
        InitAttr,
        SendRing, //
    },
    session::Room,
    srq::{
        Receive,
        Slot,
        Srq, //
    }, //
};

struct Ulp;

/// As large as the other's.
struct Data {
    address: usize,
}

/// An owner whose handler is code of this module.
#[derive(HasCqe)]
struct Recv {
    cqe: Cqe<Self>,
}

impl CqeHandler for Recv {
    type Pointer = Pin<KBox<Self>>;
    type Needs = rdma::context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &rdma::context::Atomic) {}
}

/// A handler of events that is code of this module.
struct Log;

impl Events for Log {
    fn event(self: ArcBorrow<'_, Self>, _event: Event, _num: u32, _cx: &rdma::context::Atomic) {}
}

/// A handler of a connection that is code of this module.
struct Quiet;

impl cm::Handler for Quiet {
    fn event(self: ArcBorrow<'_, Self>, _event: cm::Event<'_>, _cx: &Sleepable) {}
}

impl cm::Connect for Quiet {
    fn resolved(self: &Arc<Self>, _id: &cm::Id, _cx: &Sleepable) -> Result<cm::ConnParam<'_>> {
        Err(ECANCELED)
    }
}

/// The value of a slot whose handler is code of this module.
struct Question;

impl Receive<0> for Question {
    type Needs = rdma::context::Atomic;

    fn recv(&self) -> RecvWr<'_, 0> {
        RecvWr::new([])
    }

    fn done(_slot: Slot<Self, 0>, _wc: &Wc, _cx: &rdma::context::Atomic) {}
}

/// Fails unless `result` is `EPERM`.
fn refused<T>(what: &str, result: Result<T>) -> Result {
    match result {
        Err(EPERM) => Ok(()),
        other => {
            pr_err!("{what} for another ULP's object: {:?}\n", other.map(drop));
            Err(EBADF)
        }
    }
}

/// Gives a QP of another ULP's device what that would call or drop.
fn intrude(dev: &Device, cx: &Sleepable) -> Result {
    let qp = shelf::make_qp(dev, cx)?;
    let context = Arc::new(Data { address: 0 }, GFP_KERNEL)?;
    refused("a context", qp.set_context(context, cx))?;
    let ring = SendRing::<Pin<KBox<Recv>>>::new(&qp, 4, 2, cx);
    refused("a ring of sends", ring)?;
    let requests = Requests::new(&qp, 1, |_| Ok::<_, Error>(Data { address: 0 }), cx);
    refused("an array of requests", requests)?;
    let room = Room::<Data>::new(&qp, 1, 1, cx);
    refused("a room for requests that wait", room)?;
    let pd = Pd::alloc(dev, cx)?;
    let cq = Cq::<Softirq>::alloc(dev, 16, 0, cx)?;
    let init = InitAttr::new(&pd, &cq, &cq, &Caps::new(4, 4));
    let events = Arc::new(Log, GFP_KERNEL)?;
    refused("a handler of events", init.events(events).create(cx))?;
    let srq = Srq::create(&pd, 2, |_| Ok::<_, Error>(Question), cx);
    refused("an SRQ", srq)?;
    if cfg!(debug_assertions) {
        let recv = KBox::pin(Recv { cqe: Cqe::new() }, GFP_KERNEL)?;
        let posted = qp.post_recv(recv, |_| Ok(RecvWr::new([])));
        let kept = posted.as_ref().is_err_and(|e| e.owner.is_some());
        refused("an owner", posted.map_err(Error::from))?;
        if !kept {
            pr_err!("the owner of a refused request has not come back\n");
            return Err(EBADF);
        }
    }
    Ok(())
}

/// Gives connections and listeners of another ULP handlers, and its workqueue a work item.
fn intercept(client: &ClientRef, dev: &Device, cx: &Sleepable) -> Result {
    let begun = client.spawn(GFP_KERNEL, |_: &Sleepable| pr_err!("this ran\n"));
    refused("a work item", begun)?;
    let addr = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
    let accept = Arc::new(|_: cm::Request<'_>, _: &Sleepable| Ok(()), GFP_KERNEL)?;
    let listener = cm::Listener::new(client, addr, 1, accept, cx);
    refused("a handler of requests", listener)?;
    let accept = Arc::new(|_: ibcm::Request<'_>, _: &Sleepable| Ok(()), GFP_KERNEL)?;
    let listener = ibcm::Listener::new(dev, 0x123, 1, accept, cx);
    refused("a handler of requests to a service id", listener)?;
    let (id, quiet) = (cm::Id::create(client, cx)?, Arc::new(Quiet, GFP_KERNEL)?);
    let param = cm::ConnParam::default();
    let connected = id.connect(quiet.clone(), &param, cx);
    refused("a handler of an active connection", connected)?;
    let accepted = id.accept(quiet.clone(), &param, cx);
    refused("a handler of a passive connection", accepted)?;
    let options = cm::Options::default();
    let begun = cm::Id::connect_to(client, addr, 1_000, &options, quiet, cx);
    refused("a handler that makes a QP", begun)
}

impl Client for Ulp {
    type Data = Data;

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Ulp)
    }

    fn ready(self: Pin<&Self>, _client: &ClientRef, cx: &Sleepable) -> Result {
        let (client, dev) = shelf::put(None).ok_or(ENODEV)?;
        if let Some(data) = dev.data::<Ulp>(cx) {
            pr_err!("data of another ULP: {:#x}\n", data.address);
            return Err(EBADF);
        }
        intrude(&dev, cx)?;
        intercept(&client, &dev, cx)
    }
}

impl DeviceData<Ulp> for Data {
    fn add(_client: Pin<&Ulp>, _dev: &Device, _cx: &Sleepable) -> impl PinInit<Self, Error> {
        Ok::<_, Error>(Data { address: 0 })
    }
}

rdma::module_rdma_client! {
    type: Ulp,
    name: "rdma_twin_second",
    authors: ["rdma-rs authors"],
    description: "ULP with the file and type names of another",
    license: "GPL",
}
