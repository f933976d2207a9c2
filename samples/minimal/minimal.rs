// SPDX-License-Identifier: GPL-2.0

//! The smallest ULP: it connects a device to itself, and one side says hello to the other.

// A panic by a number of a peer would end the machine.
#![warn(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::unwrap_used
)]

use core::net::IpAddr;
use kernel::{
    prelude::*,
    sync::Completion,
    time::{
        delay::fsleep,
        Delta,
        Instant,
        Monotonic, //
    }, //
};
use rdma::{
    device::Device,
    prelude::*, //
};

const CAPS: Caps = Caps::new(1, 1);
const ENTRIES: u32 = 2 * CAPS.entries();

/// A message, in or out. While it is posted, the queue owns it.
#[derive(HasCqe)]
struct Message {
    cqe: Cqe<Self>,
    buf: Buf<Bidirectional>,
    done: Arc<Completion>,
}

impl Message {
    fn new(text: &[u8; 5], pd: &Pd, done: Arc<Completion>) -> Result<Pin<KBox<Self>>> {
        let (cqe, mut buf) = (Cqe::new(), Buf::alloc(pd, 5, &Sleepable::current()?)?);
        buf.cpu().copy_from_slice(text);
        Ok(KBox::pin(Self { cqe, buf, done }, GFP_KERNEL)?)
    }
}

impl CqeHandler for Message {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic; // So it can be posted in every polling context.

    /// The request has completed, and the message is ours again.
    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        match wc.result().map(|wc| wc.opcode()) {
            Ok(op) => pr_info!("{op:?}: {:?}\n", core::str::from_utf8(&this.buf.cpu())),
            Err(e) => pr_err!("{}\n", e.status),
        }
        this.done.complete_all();
    }
}

/// Connects a device to itself and sends one message.
fn hello<C: FixedContext + Provides<context::Atomic>>(
    client: &ClientRef,
    (dev, ip): (Device, IpAddr),
    wait: fn(&Cq<C>, &Completion),
) -> Result {
    let (cx, addr) = (&Sleepable::current()?, SocketAddr::new(ip, 7175));
    let pd = Pd::alloc(&dev, cx)?;
    let cq = Cq::alloc_any(&dev, ENTRIES, cx)?;
    let sent = Arc::pin_init(Completion::new(), GFP_KERNEL)?;

    // The passive side. Its connection owns the QP, and is over when the peer disconnects.
    let (pd2, cq2) = (pd.clone(), cq.clone());
    let accept = move |request: cm::Request<'_>, cx: &Sleepable| {
        let id = request.into_id(cx)?;
        let qp = Qp::create(&id, &pd2, &cq2, &cq2, &CAPS, cx)?;
        let empty = Message::new(&[0; 5], &pd2, Arc::pin_init(Completion::new(), GFP_KERNEL)?)?;
        qp.post_recv(empty, |m| Ok(RecvWr::new([m.buf.whole_mut()])))?;
        id.accept(Arc::new(qp, GFP_KERNEL)?, &cm::ConnParam::default(), cx)
    };
    let _listener = cm::Listener::new(client, addr, 8, Arc::new(accept, GFP_KERNEL)?, cx)?;

    // The active side.
    let id = cm::Id::resolve(client, addr, 1000, cx)?;
    let qp = Qp::create(&id, &pd, &cq, &cq, &CAPS, cx)?;
    let handler = Arc::new(qp.clone(), GFP_KERNEL)?; // Until the connection's last event.
    id.connect(handler, &cm::ConnParam::default(), cx)?;
    let hello = Message::new(b"hello", &pd, sent.clone())?;
    qp.post_send(hello, |m| Ok(SendWr::send([m.buf.whole()])))?;
    wait(&cq, &sent); // By then the message has been received, too.
    id.disconnect(cx) // The rest is dropped, in any order, and ends in the right one.
}

/// Polls until both requests have completed, for five seconds at most: a send that fails leaves the
/// receive where it is.
fn poll(cq: &Cq<Direct>, _sent: &Completion) {
    let (begin, mut left) = (Instant::<Monotonic>::now(), 2_u32);
    while left != 0 && begin.elapsed() < Delta::from_secs(5) {
        left = left.saturating_sub(cq.process(left));
        fsleep(Delta::from_micros(20));
    }
}

struct Minimal;

impl Client for Minimal {
    type Data = ();

    fn init(_client: &ClientRef) -> impl PinInit<Self, Error> {
        Ok(Minimal)
    }

    fn ready(self: Pin<&Self>, client: &ClientRef, cx: &Sleepable) -> Result {
        let at = client.first_device_with_addr(cx)?;
        match module_parameters::context.value() {
            0 => hello::<Direct>(client, at, poll),
            1 => hello::<Softirq>(client, at, |_, sent| sent.wait_for_completion()),
            2 => hello::<Workqueue>(client, at, |_, sent| sent.wait_for_completion()),
            3 => hello::<UnboundWorkqueue>(client, at, |_, sent| sent.wait_for_completion()),
            context => {
                pr_err!("context={context}: 0 to 3, for direct, softirq, workqueue, unbound\n");
                Err(EINVAL)
            }
        }
    }
}

rdma::module_rdma_client! {
    type: Minimal,
    name: "rdma_minimal",
    authors: ["rdma-rs authors"],
    description: "The smallest RDMA ULP in Rust",
    license: "GPL",
    params: { context: u8 { default: 1, description: "direct, softirq, workqueue, unbound", }, },
}
