// SPDX-License-Identifier: GPL-2.0

//! Using the memory of a send that is not signaled again, and posting by one ring from two threads.

use kernel::prelude::*;
use rdma::{
    prelude::*,
    qp::{
        Chain,
        SendRing, //
    }, //
};

#[derive(HasCqe)]
struct Capsule {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
}

impl CqeHandler for Capsule {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

type Ring = SendRing<Pin<KBox<Capsule>>>;

fn send(ring: &mut Ring, qp: &Qp<Softirq>, mut capsule: Pin<KBox<Capsule>>) -> Result {
    #[cfg(not(mistake))]
    capsule.buf.cpu().fill(0);
    ring.post(qp, capsule, |c, chain: &mut Chain<'_, 1>| {
        chain.push(SendWr::send([c.buf.whole()]))
    })?;
    // The reply has come.
    #[cfg(mistake)]
    capsule.buf.cpu().fill(0); //~ E0382 borrow of moved value
    Ok(())
}

fn send_from_any_thread(ring: &Ring, qp: &Qp<Softirq>, capsule: Pin<KBox<Capsule>>) -> Result {
    #[cfg(mistake)]
    send(ring, qp, capsule)?; //~ E0308 mismatched types
    let _ = (ring, qp, capsule);
    Ok(())
}
