// SPDX-License-Identifier: GPL-2.0

//! Single owners that a device loses, in each context. It is not loaded if one has not ended with
//! its QP: where posts are not noted.

use kernel::{
    prelude::*,
    sync::atomic::{
        Acquire,
        Atomic,
        Full, //
    }, //
};
use rdma::{
    context,
    device::Device,
    prelude::*, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// The number of requests of each queue.
const COUNT: u32 = 4;

/// The owners that are there.
static OWNERS: Atomic<u32> = Atomic::new(0);

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
}

impl Request {
    fn new() -> Result<Pin<KBox<Self>>> {
        let request = KBox::pin(Self { cqe: Cqe::new() }, GFP_KERNEL)?;
        OWNERS.fetch_add(1, Full);
        Ok(request)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        OWNERS.fetch_sub(1, Full);
    }
}

impl CqeHandler for Request {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn lost<C>(dev: &Device, null: &NullDevice, cx: &Sleepable) -> Result
where
    C: FixedContext + Provides<context::Atomic>,
{
    let caps = Caps::new(COUNT, COUNT);
    let pd = Pd::alloc(dev, cx)?;
    let cq = Cq::<C>::alloc(dev, caps.entries(), 0, cx)?;
    let qp = Qp::create_raw(&pd, &cq, &cq, &caps, cx)?;
    null.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    null.inject_qp(qp.num(), Injection::Hold { count: 2 })?;
    for _ in 0..COUNT {
        qp.post_send(Request::new()?, |_| Ok(SendWr::send([])))?;
        qp.post_recv(Request::new()?, |_| Ok(RecvWr::new([])))?;
    }
    qp.destroy(cx)?;
    match OWNERS.load(Acquire) {
        0 => Ok(()),
        owners => {
            pr_info!("{owners} owners have not ended\n");
            Err(EIO)
        }
    }
}

struct Lost;

impl Client for Lost {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Lost)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let null = NullDevice::new(c"lost")?;
        let dev = client.device_by_name(null.name(), cx).ok_or(ENODEV)?;
        lost::<Direct>(&dev, &null, cx)?;
        lost::<Softirq>(&dev, &null, cx)?;
        lost::<Workqueue>(&dev, &null, cx)?;
        lost::<UnboundWorkqueue>(&dev, &null, cx)
    }
}

rdma::module_rdma_client! {
    type: Lost,
    name: "rdma_lost",
    authors: ["rdma-rs authors"],
    description: "Owners that end with their QP, as posts are noted",
    license: "GPL",
}
