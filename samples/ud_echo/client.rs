// SPDX-License-Identifier: GPL-2.0

//! The client: asks, waits a while, and looks whether what comes back is what it sent.

use crate::{
    LEN,
    PORT,
    QKEY, //
};
use kernel::{
    fmt,
    io::poll::read_poll_timeout,
    prelude::*,
    sync::atomic::{
        Atomic as AtomicCell,
        Relaxed, //
    },
    time::Delta, //
};
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
        UdWr,
        HEADER, //
    }, //
};

/// After this time an answer is lost.
const PATIENCE: Delta = Delta::from_millis(500);
/// How many receives are posted: late answers take some.
const DEPTH: u32 = 8;

/// What has happened since the device came.
pub(crate) struct Stats {
    echoes: AtomicCell<u64>,
    bytes_verified: AtomicCell<u64>,
    lost: AtomicCell<u64>,
    errors: AtomicCell<u64>,
    stopped: AtomicCell<bool>,
}

impl Default for Stats {
    fn default() -> Self {
        Self {
            echoes: AtomicCell::new(0),
            bytes_verified: AtomicCell::new(0),
            lost: AtomicCell::new(0),
            errors: AtomicCell::new(0),
            stopped: AtomicCell::new(false),
        }
    }
}

impl Stats {
    /// Ends all asking.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let get = |counter: &AtomicCell<u64>| counter.load(Relaxed);
        f.write_fmt(fmt!("echoes {}\n", get(&self.echoes)))?;
        f.write_fmt(fmt!("bytes_verified {}\n", get(&self.bytes_verified)))?;
        f.write_fmt(fmt!("lost {}\n", get(&self.lost)))?;
        f.write_fmt(fmt!("errors {}\n", get(&self.errors)))
    }
}

/// What one round of asking knows.
struct Round {
    stats: Arc<Stats>,
    /// The number of the question that waits for its answer.
    number: AtomicCell<u32>,
    answered: AtomicCell<bool>,
    /// How many receives are posted.
    receives: AtomicCell<u32>,
}

/// A datagram. All of them are different.
fn pattern(number: u32) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = number.to_le_bytes()[i % 4] ^ i as u8;
    }
    bytes
}

#[derive(HasCqe)]
struct Question {
    cqe: Cqe<Self>,
    buf: Buf<ToDevice>,
    to: Arc<Ah>,
    round: Arc<Round>,
}

impl CqeHandler for Question {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        if wc.result().is_err() {
            this.round.stats.errors.add(1, Relaxed);
        }
    }
}

#[derive(HasCqe)]
struct Answer {
    cqe: Cqe<Self>,
    buf: Buf<FromDevice>,
    round: Arc<Round>,
}

impl CqeHandler for Answer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &Atomic) {
        let round = this.round.clone();
        round.receives.fetch_sub(1, Relaxed);
        // Flushed: the round is over.
        let Ok(wc) = wc.result() else { return };
        let bytes = this.buf.cpu();
        let is = |number| Datagram::new(wc, &bytes).is_ok_and(|d| *d.payload() == pattern(number));
        let number = round.number.load(Relaxed);
        if is(number) {
            round.answered.store(true, Relaxed);
        } else if !(0..number).any(is) {
            // Nor is it one that comes too late.
            round.stats.errors.add(1, Relaxed);
        }
    }
}

/// Asks the server `qpn` at `to`, one question after the other. An answer that does not come is
/// counted; anything else that goes wrong is the end.
pub(crate) fn ask(
    pd: &Pd,
    from: &GidAttr,
    to: Gid,
    qpn: u32,
    count: u32,
    stats: &Arc<Stats>,
    cx: &Sleepable,
) -> Result {
    let caps = Caps::new(DEPTH, DEPTH);
    // Whoever asks waits anyhow, and so polls the CQ too.
    let cq = Cq::<Direct>::alloc_any(pd.device(), caps.entries(), cx)?;
    let qp = UdQp::create(pd, &cq, &cq, &caps, PORT, QKEY, cx)?;
    let to = Arc::new(Ah::resolve(pd, from, to, cx)?, GFP_KERNEL)?;
    let round = Round {
        stats: stats.clone(),
        number: AtomicCell::new(0),
        answered: AtomicCell::new(false),
        receives: AtomicCell::new(0),
    };
    let round = Arc::new(round, GFP_KERNEL)?;

    for number in 0..count {
        if stats.stopped.load(Relaxed) {
            return Err(ENODEV);
        }
        round.number.store(number, Relaxed);
        round.answered.store(false, Relaxed);
        while round.receives.load(Relaxed) < DEPTH {
            let answer = Answer {
                cqe: Cqe::new(),
                buf: Buf::alloc(pd, HEADER + LEN, cx)?,
                round: round.clone(),
            };
            let answer = KBox::pin(answer, GFP_KERNEL)?;
            qp.post_recv(answer, |a| Ok(RecvWr::new([a.buf.whole_mut()])))?;
            round.receives.add(1, Relaxed);
        }

        let mut question = Question {
            cqe: Cqe::new(),
            buf: Buf::alloc(pd, LEN, cx)?,
            to: to.clone(),
            round: round.clone(),
        };
        question.buf.cpu().copy_from_slice(&pattern(number));
        let question = KBox::pin(question, GFP_KERNEL)?;
        qp.post_send(question, |q| {
            Ok(UdWr::send([q.buf.whole()], &q.to, qpn, QKEY))
        })?;

        let poll = || {
            cq.process(2 * DEPTH);
            Ok(round.answered.load(Relaxed))
        };
        match read_poll_timeout(poll, |it| *it, Delta::from_micros(50), PATIENCE) {
            Ok(_) => {
                stats.echoes.add(1, Relaxed);
                stats.bytes_verified.add(LEN as u64, Relaxed);
            }
            Err(_) => stats.lost.add(1, Relaxed),
        }
    }
    // The receives that are left come back.
    qp.destroy(cx)
}
