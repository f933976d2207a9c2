// SPDX-License-Identifier: GPL-2.0

//! Completions that are polled before their CQ is destroyed, and dispatched after that, when CQs
//! which the RDMA core polls have taken its memory. All of it is done while the module is loaded.

use kernel::prelude::*;
use rdma::{
    context::Atomic,
    device::Device,
    prelude::*, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// The number of completions.
const COUNT: usize = 4;

/// Enough CQs for one to be where the first was.
const OTHERS: usize = 64;

#[derive(HasCqe)]
struct Request {
    cqe: Cqe<Self>,
}

impl CqeHandler for Request {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &Atomic) {}
}

fn late(dev: &Device, null: &NullDevice, cx: &Sleepable) -> Result {
    let caps = Caps::new(COUNT as u32, 0);
    let pd = Pd::alloc(dev, cx)?;
    let cq = Cq::<Direct>::alloc(dev, caps.entries(), 0, cx)?;
    let qp = Qp::create_raw(&pd, &cq, &cq, &caps, cx)?;
    null.inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    for _ in 0..COUNT {
        let request = KBox::pin(Request { cqe: Cqe::new() }, GFP_KERNEL)?;
        qp.post_send(request, |_| Ok(SendWr::send([])))?;
    }
    let mut array = WcArray::<COUNT>::new();
    if cq.poll(&mut array)? != COUNT {
        return Err(EIO);
    }
    qp.destroy(cx)?;
    cq.destroy(cx)?;
    let mut others = KVec::new();
    for _ in 0..OTHERS {
        let other = Cq::<Softirq>::alloc(dev, caps.entries(), 0, cx)?;
        others.push(other, GFP_KERNEL)?;
    }
    drop(array);
    Ok(())
}

struct Late;

impl Client for Late {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Late)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let null = NullDevice::new(c"late")?;
        let dev = client.device_by_name(null.name(), cx).ok_or(ENODEV)?;
        late(&dev, &null, cx)
    }
}

rdma::module_rdma_client! {
    type: Late,
    name: "rdma_late",
    authors: ["rdma-rs authors"],
    description: "Completions that are dispatched after their CQ was destroyed",
    license: "GPL",
}
