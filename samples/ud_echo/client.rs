// SPDX-License-Identifier: GPL-2.0

//! The client: asks, waits a while, and looks whether what comes back is what it sent.

use crate::{
    add,
    Stats,
    LEN,
    PORT,
    QKEY, //
};
use kernel::{
    prelude::*,
    sync::Mutex, //
};
use rdma::{
    ah::Ah,
    prelude::*,
    ud::{
        Datagram,
        UdQp,
        UdWr,
        HEADER, //
    }, //
};

/// After this time without a datagram an answer is lost.
const PATIENCE_MS: u32 = 3_000;
/// The number of receives that are posted: late answers take some.
const DEPTH: usize = 8;
const CAPS: Caps = Caps::new(DEPTH as u32, DEPTH as u32);

/// A datagram. All of them are different.
fn pattern(number: u32) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    let number = number.to_le_bytes().into_iter().cycle();
    for ((at, byte), part) in (0u8..).zip(&mut bytes).zip(number) {
        *byte = part ^ at;
    }
    bytes
}

/// Returns the number of a datagram, if it is one of this client's.
fn number_of(payload: &[u8]) -> Option<u32> {
    let mut number = [0; 4];
    for ((at, byte), part) in (0u8..).zip(&mut number).zip(payload) {
        *byte = part ^ at;
    }
    let number = u32::from_le_bytes(number);
    (payload == pattern(number)).then_some(number)
}

#[derive(HasCqe)]
struct Question {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    to: Arc<Ah>,
}

impl CqeHandler for Question {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

#[derive(HasCqe)]
struct Answer {
    cqe: Cqe<Self>,
    buf: Buf<FromDevice>,
}

impl CqeHandler for Answer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    /// The caller no longer waits for it.
    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

/// Asks the server `qpn` at `to`, one question after the other. An answer that does not come is
/// counted; anything else that goes wrong is the end.
pub(crate) fn ask(
    pd: &Pd,
    to: &Arc<Ah>,
    qpn: u32,
    count: u32,
    stats: &Mutex<Stats>,
    cx: &Sleepable,
) -> Result {
    let cq = Cq::<Waited>::alloc_any(pd.device(), CAPS.entries(), cx)?;
    let qp = UdQp::create(pd, &cq, &cq, &CAPS, PORT, QKEY, cx)?;
    let mut batch = WcArray::<DEPTH>::new();
    let mut receives = 0;
    for number in 0..count {
        while receives < DEPTH {
            let cqe = Cqe::new();
            let buf = Buf::alloc(pd, HEADER + LEN, cx)?;
            let answer = KBox::pin(Answer { cqe, buf }, GFP_KERNEL)?;
            qp.post_recv(answer, |a| Ok(RecvWr::new([a.buf.whole_mut()])))?;
            receives = receives.saturating_add(1);
        }
        let cqe = Cqe::new();
        let to = to.clone();
        let mut buf = Buf::alloc(pd, LEN, cx)?;
        buf.cpu().copy_from_slice(&pattern(number));
        let question = KBox::pin(Question { cqe, buf, to }, GFP_KERNEL)?;
        qp.post_send(question, |q| {
            Ok(UdWr::new([q.buf.whole()], &q.to, qpn, QKEY))
        })?;

        loop {
            // The caller waits anyhow, so it polls the completions too.
            let Some(completion) = cq.next(&mut batch, PATIENCE_MS, cx)? else {
                add(&mut stats.lock().lost, 1);
                break;
            };
            let wc = completion.result()?;
            let Ok((mut answer, _)) = completion.take::<Answer, 0>() else {
                continue; // The question has gone.
            };
            receives = receives.saturating_sub(1);
            let datagram = answer.buf.cpu();
            let payload = Datagram::new(wc, &datagram)?.payload();
            match number_of(payload) {
                Some(echo) if echo == number => {
                    let mut stats = stats.lock();
                    add(&mut stats.echoes, 1);
                    add(&mut stats.bytes_verified, LEN as u64);
                    break;
                }
                Some(late) if late < number => {}
                _ => add(&mut stats.lock().errors, 1),
            }
        }
    }
    // The receives that are left come back.
    qp.destroy(cx)
}
