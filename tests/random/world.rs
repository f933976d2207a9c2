// SPDX-License-Identifier: GPL-2.0

//! What the threads of a round share.

use crate::{
    owners::{
        Memory,
        Ticket, //
    },
    rng::Rng,
    tally::{
        Life,
        Tally, //
    },
    way::Way, //
};
use kernel::{
    new_mutex,
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Mutex, //
    }, //
};
use rdma::{
    ah::{
        self,
        Ah, //
    },
    context,
    mr::Pool,
    prelude::*,
    qp::{
        Event,
        Events,
        Init, //
    },
    srq::Srq,
    ud::UdQp, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// The length of each buffer and region; with room for the header of a datagram.
pub(crate) const LEN: usize = 64;
pub(crate) const PORT: u32 = 1;
pub(crate) const QKEY: u32 = 0x1234;
const CAPS: Caps = Caps {
    send_sge: 4,
    ..Caps::new(8, 8)
};
/// How many pairs there are at a time.
const PAIRS: usize = 3;
/// The entries of the CQ of all of them, with room for those that are ending.
const ENTRIES: u32 = 2048;

/// Nothing is done in the event but to be told of it.
struct Told;

impl Events for Told {
    fn event(&self, _event: Event, _qp_num: u32, _cx: &context::Atomic) {}
}

/// Two QPs that are connected to each other, and a region of each.
pub(crate) struct Pair<C: PollContext> {
    pub(crate) ends: [Arc<Qp<C>>; 2],
    pub(crate) regions: [Arc<Region<Bidirectional>>; 2],
    /// Whether owners have their QP. Nothing but a drain ends that.
    held: Atomic<bool>,
    null: Arc<NullDevice>,
}

impl<C: Way> Pair<C> {
    fn new(null: &Arc<NullDevice>, pd: &Pd, cq: &Cq<C>, cx: &Sleepable) -> Result<Arc<Self>> {
        let qp = || {
            let qp = Init::new(pd, cq, cq, &CAPS)
                .rw_contexts(2, PORT)
                .events(Arc::new(Told, GFP_KERNEL)?)
                .create(cx)?;
            Ok::<_, Error>(Arc::new(qp, GFP_KERNEL)?)
        };
        let region = || {
            let region = Region::new(Memory::alloc(pd, LEN, cx)?, cx)?;
            Ok::<_, Error>(Arc::new(region, GFP_KERNEL)?)
        };
        let this = Self {
            ends: [qp()?, qp()?],
            regions: [region()?, region()?],
            held: Atomic::new(false),
            null: null.clone(),
        };
        let [a, b] = &this.ends;
        connect(null, a, b)?;
        Ok(Arc::new(this, GFP_KERNEL)?)
    }
}

impl<C: PollContext> Pair<C> {
    /// An owner is about to have one of the QPs.
    pub(crate) fn hold(&self) {
        self.held.store(true, Relaxed);
    }
}

impl<C: PollContext> Drop for Pair<C> {
    /// What is still to go wrong must not go wrong with the last drain: that would be a leak.
    fn drop(&mut self) {
        for qp in &self.ends {
            calm(&self.null, qp.num());
            if self.held.load(Relaxed) {
                // Allocations may be made to fail.
                while Sleepable::current().and_then(|cx| qp.drain(&cx)) == Err(ENOMEM) {}
            }
        }
    }
}

/// A QP, and one on an SRQ that it sends to.
pub(crate) struct Line<C: PollContext> {
    pub(crate) from: Arc<Qp<C>>,
    pub(crate) to: Arc<Qp<Softirq>>,
    null: Arc<NullDevice>,
}

impl<C: PollContext> Drop for Line<C> {
    fn drop(&mut self) {
        calm(&self.null, self.from.num());
        calm(&self.null, self.to.num());
    }
}

/// Has nothing more go wrong with a QP, and what was held back come, as it would be lost with the QP.
pub(crate) fn calm(null: &NullDevice, num: u32) {
    let never = u32::MAX;
    for injection in [
        Injection::Status {
            status: 0,
            vendor_err: 0,
            count: 0,
            fatal: false,
        },
        Injection::Refuse {
            after: never,
            errno: 5,
        },
        Injection::Lapse {
            after: never,
            errno: 5,
        },
        Injection::Modify { errno: 5, count: 0 },
        Injection::Release {
            count: never,
            reversed: true,
        },
    ] {
        let _ = null.inject_qp(num, injection);
    }
}

fn connect<A: PollContext, B: PollContext>(null: &NullDevice, a: &Qp<A>, b: &Qp<B>) -> Result {
    null.inject_qp(a.num(), Injection::Connect { peer: b.num() })?;
    null.inject_qp(b.num(), Injection::Connect { peer: a.num() })
}

/// A device and what is on it.
#[pin_data]
pub(crate) struct World<C: Way> {
    #[pin]
    pairs: Mutex<[Option<Arc<Pair<C>>>; PAIRS]>,
    #[pin]
    line: Mutex<Option<Arc<Line<C>>>>,
    pub(crate) datagrams: UdQp<C>,
    pub(crate) to: Arc<Ah>,
    srq: Srq<Ticket>,
    srq_cq: Cq<Softirq>,
    pub(crate) pool: Pool,
    pub(crate) cq: Cq<C>,
    pub(crate) pd: Pd,
    pub(crate) dev: Device,
    pub(crate) null: Arc<NullDevice>,
    pub(crate) tally: Arc<Tally>,
    /// Whether what may be posted in part is posted.
    pub(crate) parts: bool,
}

impl<C: Way> World<C> {
    pub(crate) fn new(
        dev: &Device,
        null: &Arc<NullDevice>,
        tally: &Arc<Tally>,
        parts: bool,
        rng: &mut Rng,
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let pd = Pd::alloc(dev, cx)?;
        let cq = C::make(dev, ENTRIES, rng, cx)?;
        let srq_cq = match rng.once_in(2) {
            true => Cq::<Softirq>::alloc_any(dev, 256, cx)?,
            false => Cq::<Workqueue>::alloc_any(dev, 256, cx)?.into_atomic(),
        };
        let ticket = |_| {
            Ok::<_, Error>(Ticket {
                buf: Memory::alloc(&pd, LEN, cx)?,
                _life: Life::new(tally),
            })
        };
        let srq = Srq::create_with_events(&pd, 6, ticket, |_| (), cx)?;
        let to = Ah::create(&pd, &ah::Attr::new(PORT).dlid(1), cx)?;
        let datagrams = UdQp::create(&pd, &cq, &cq, &CAPS, PORT, QKEY, cx)?;
        let pool = Pool::new(&pd, 4, 2, cx)?;
        let init = pin_init!(Self {
            pairs <- new_mutex!([const { None }; PAIRS]),
            line <- new_mutex!(None),
            datagrams,
            to: Arc::new(to, GFP_KERNEL)?,
            srq,
            srq_cq,
            pool,
            cq,
            pd,
            dev: dev.clone(),
            null: null.clone(),
            tally: tally.clone(),
            parts,
        }? Error);
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Returns one of the pairs, a new one where there is none.
    pub(crate) fn pair(&self, rng: &mut Rng, cx: &Sleepable) -> Result<Arc<Pair<C>>> {
        let index = rng.below(PAIRS as u32) as usize;
        if let Some(Some(pair)) = self.pairs.lock().get(index) {
            return Ok(pair.clone());
        }
        let pair = Pair::new(&self.null, &self.pd, &self.cq, cx)?;
        self.replace(index, Some(pair.clone()));
        Ok(pair)
    }

    /// Lets go of one of the pairs.
    pub(crate) fn forget_pair(&self, rng: &mut Rng) {
        self.replace(rng.below(PAIRS as u32) as usize, None);
    }

    fn replace(&self, index: usize, pair: Option<Arc<Pair<C>>>) {
        let before = match self.pairs.lock().get_mut(index) {
            Some(place) => core::mem::replace(place, pair),
            None => None,
        };
        // Not under the lock.
        drop(before);
    }

    /// Returns the line to the SRQ, a new one if there is none.
    pub(crate) fn line(&self, cx: &Sleepable) -> Result<Arc<Line<C>>> {
        if let Some(line) = &*self.line.lock() {
            return Ok(line.clone());
        }
        let from = Qp::create_raw(&self.pd, &self.cq, &self.cq, &CAPS, cx)?;
        let to = Init::on_srq(&self.pd, &self.srq_cq, &self.srq, &CAPS).create(cx)?;
        connect(&self.null, &from, &to)?;
        let line = Line {
            from: Arc::new(from, GFP_KERNEL)?,
            to: Arc::new(to, GFP_KERNEL)?,
            null: self.null.clone(),
        };
        let line = Arc::new(line, GFP_KERNEL)?;
        let before = self.line.lock().replace(line.clone());
        drop(before);
        Ok(line)
    }

    /// Lets go of the line to the SRQ.
    pub(crate) fn forget_line(&self) {
        let before = self.line.lock().take();
        drop(before);
    }
}
