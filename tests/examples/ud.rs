// SPDX-License-Identifier: GPL-2.0

//! Examples of Documentation/ud.rst.

use kernel::prelude::*;
use rdma::{
    ah::Ah,
    device::{
        Gid,
        GidAttr, //
    },
    prelude::*,
    ud::{
        Datagram,
        UdQp,
        UdWr, //
    }, //
};

fn parse(_payload: &[u8]) {}

#[derive(HasCqe)]
struct Question {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    to: Ah,
}

impl CqeHandler for Question {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

impl Question {
    fn new(buf: Buf<ToDevice>, to: Ah) -> Result<Pin<KBox<Self>>> {
        let cqe = Cqe::new();
        Ok(KBox::pin(Self { cqe, buf, to }, GFP_KERNEL)?)
    }
}

fn ask(
    (pd, cq, buf): (Pd, Cq<Softirq>, Buf<ToDevice>),
    (from, peer_gid, peer_qpn): (GidAttr, Gid, u32),
    (port, qkey): (u32, u32),
    cx: &Sleepable,
) -> Result {
    let qp = UdQp::create(&pd, &cq, &cq, &Caps::new(16, 16), port, qkey, cx)?;

    // A question. The request owns its buffer and its address handle.
    let to = Ah::resolve(&pd, &from, peer_gid, cx)?;
    qp.post_send(Question::new(buf, to)?, |q| {
        Ok(UdWr::new([q.buf.whole()], &q.to, peer_qpn, qkey))
    })?;
    Ok(())
}

struct Answer {
    buf: Buf<FromDevice>,
}

fn answer(this: &mut Answer, wc: &Wc, (pd, port): (Pd, u32), cx: &Sleepable) -> Result {
    // In the handler of a receive.
    let bytes = this.buf.cpu();
    let datagram = Datagram::new(wc.result()?, &bytes)?;
    parse(datagram.payload());

    // The way back.
    let to = Ah::reply(&pd, &datagram.source(port), cx)?;
    Ok(())
}
