// SPDX-License-Identifier: GPL-2.0

//! A module that passes handles of a client and a device from one ULP to another, and serves
//! objects of those that use it.

use core::net::Ipv4Addr;
use kernel::prelude::*;
use rdma::{
    device::Device,
    prelude::*,
    qp::{
        Access,
        Attr,
        Event,
        Events,
        InitAttr, //
    }, //
};

module! {
    type: Shelf,
    name: "rdma_twin_shelf",
    authors: ["rdma-rs authors"],
    description: "Passes handles between the RDMA twins",
    license: "GPL",
}

struct Shelf;

impl Events for Shelf {
    fn event(self: ArcBorrow<'_, Self>, _event: Event, _qp_num: u32, _cx: &context::Atomic) {}
}

impl kernel::Module for Shelf {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        // SAFETY: This is the module's init, so it is called once.
        unsafe { SLOT.init() };
        Ok(Shelf)
    }
}

kernel::sync::global_lock! {
    // SAFETY: The module's init initialises it before any other module can call into this one.
    unsafe(uninit) static SLOT: Mutex<Option<Handles>> = None;
}

/// Handles of a ULP.
pub type Handles = (ClientRef, Device);

/// Puts handles on the shelf, and returns what was there.
#[inline(never)]
pub fn put(handles: Option<Handles>) -> Option<Handles> {
    core::mem::replace(&mut *SLOT.lock(), handles)
}

/// An owner whose handler is code of this module.
#[derive(HasCqe)]
struct Recv {
    cqe: Cqe<Self>,
}

impl CqeHandler for Recv {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

/// Makes a QP that receives may be posted to.
#[inline(never)]
pub fn make_qp(dev: &Device, cx: &Sleepable) -> Result<Qp<Softirq>> {
    let pd = Pd::alloc(dev, cx)?;
    let cq = Cq::alloc(dev, 16, 0, cx)?;
    let init = InitAttr::new(&pd, &cq, &cq, &Caps::new(4, 4));
    let qp = init.events(Arc::new(Shelf, GFP_KERNEL)?).create(cx)?;
    let init = Attr::Init {
        port: 1,
        pkey_index: 0,
        access: Access::REMOTE_READ,
    };
    qp.modify(init, cx)?;
    Ok(qp)
}

/// Gives a QP of a ULP that uses this module what is code of this one.
#[inline(never)]
pub fn serve(qp: &Qp<Softirq>, cx: &Sleepable) -> Result {
    qp.set_context(Arc::new(Shelf, GFP_KERNEL)?, cx)?;
    let recv = KBox::pin(Recv { cqe: Cqe::new() }, GFP_KERNEL)?;
    Ok(qp.post_recv(recv, |_| Ok(RecvWr::new([])))?)
}

/// Listens as a ULP that uses this module, with a handler that is code of this one.
#[inline(never)]
pub fn listen(client: &ClientRef, cx: &Sleepable) -> Result {
    let accept = |_: cm::Request<'_>, _: &Sleepable| Ok(());
    let addr = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
    cm::Listener::new(client, addr, 1, Arc::new(accept, GFP_KERNEL)?, cx)?.destroy(cx)
}
