// SPDX-License-Identifier: GPL-2.0

//! Freeing an address handle while a datagram that goes there is posted.

use kernel::prelude::*;
use rdma::{
    ah::Ah,
    prelude::*,
    ud::{UdQp, UdWr}, //
};

#[derive(HasCqe)]
struct Datagram {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    to: Arc<Ah>,
}

impl CqeHandler for Datagram {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn send(qp: &UdQp<Softirq>, datagram: Pin<KBox<Datagram>>, to: Ah) -> Result {
    #[cfg(mistake)]
    qp.post_send(datagram, |d| {
        Ok(UdWr::new([d.buf.whole()], &to, 2, 1)) //~ E0597 does not live
    })?;
    #[cfg(not(mistake))]
    qp.post_send(datagram, |d| Ok(UdWr::new([d.buf.whole()], &d.to, 2, 1)))?;
    #[cfg(not(mistake))]
    drop(to);
    Ok(())
}
