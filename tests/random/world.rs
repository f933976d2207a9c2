// SPDX-License-Identifier: GPL-2.0

//! The state that the threads of a round share.

use crate::{
    net::{
        Link,
        Net,
        Parts,
        Sort,
        Transport,
        CAPS,
        PORT, //
    },
    owners::{
        Memory,
        RecvBuf,
        Shelf, //
    },
    rng::Rng,
    round::Plan,
    session::Session,
    tally::{
        Life,
        Tally, //
    },
    way::{
        Batch,
        Way, //
    },
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
    device::Device,
    prelude::*,
    qp::State,
    rw::Ctx,
    srq::Srq,
    ud::UdQp, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

/// The length of each buffer and region; with room for the header of a datagram.
pub(crate) const LEN: usize = 64;
pub(crate) const QKEY: u32 = 0x1234;
/// The number of pairs there that are at a time.
const PAIRS: usize = 3;
/// The number of sessions.
const SESSIONS: usize = 2;
/// The entries of the CQ of all of them, with room for those that are ending.
const ENTRIES: u32 = 2048;
/// The slots of the SRQ.
const SLOTS: u32 = 6;
/// The number of arrays of completions that no thread has, at the most.
const BATCHES: usize = 3;

/// Two QPs that are connected to each other, and a region of each.
pub(crate) struct Pair<C: PollContext> {
    pub(crate) ends: [Qp<C>; 2],
    pub(crate) regions: [Arc<SharedRegion<Bidirectional>>; 2],
    /// The address and the key of each region, once it was registered.
    remotes: [(Atomic<u64>, Atomic<u32>); 2],
    /// `true` if owners have their QP. Nothing but a drain ends that.
    held: Atomic<bool>,
    /// `true` if what may be posted in part is posted. A queue that is full of that is emptied at
    /// the end of its QP only, so owners do not have such a QP.
    pub(crate) in_part: bool,
    null: Option<Arc<NullDevice>>,
}

impl<C: Way> Pair<C> {
    fn new(world: &World<C>, rng: &mut Rng, cx: &Sleepable) -> Result<Arc<Self>> {
        let region = || {
            let region = Region::new(Memory::alloc(&world.parts.pd, LEN, cx)?, cx)?;
            Ok::<_, Error>(Arc::new(region.into_shared(), GFP_KERNEL)?)
        };
        let this = Self {
            ends: world.net.pair(&world.parts, Sort::Pair, rng, cx)?,
            regions: [region()?, region()?],
            remotes: [const { (Atomic::new(0), Atomic::new(0)) }; 2],
            held: Atomic::new(false),
            in_part: world.in_part && rng.once_in(2),
            null: world.null().ok().cloned(),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// Returns whether one of the QPs has failed.
    fn is_broken(&self, cx: &Sleepable) -> bool {
        let broken = |qp: &Qp<C>| qp.query(cx).map_or(true, |info| info.state != State::Rts);
        self.ends.iter().any(broken)
    }
}

impl<C: PollContext> Pair<C> {
    pub(crate) fn set_remote(&self, end: usize, remote: Remote) {
        if let Some((addr, rkey)) = self.remotes.get(end) {
            addr.store(remote.addr, Relaxed);
            rkey.store(remote.rkey, Relaxed);
        }
    }

    /// Returns where the region of an end was registered last.
    pub(crate) fn remote(&self, end: usize) -> Option<Remote> {
        let (addr, rkey) = self.remotes.get(end)?;
        Some(Remote {
            addr: addr.load(Relaxed),
            rkey: rkey.load(Relaxed),
        })
    }

    /// An owner is about to have one of the QPs.
    pub(crate) fn hold(&self) -> Result {
        if self.in_part {
            return Err(EOPNOTSUPP);
        }
        self.held.store(true, Relaxed);
        Ok(())
    }
}

impl<C: PollContext> Drop for Pair<C> {
    /// Injections that are left must not hit the last drain: that would be a leak.
    fn drop(&mut self) {
        for qp in &self.ends {
            if let Some(null) = &self.null {
                calm(null, qp.num());
            }
            if self.held.load(Relaxed) {
                let _ = Sleepable::current().and_then(|cx| qp.drain(&cx));
            }
        }
    }
}

/// A QP, and one on an SRQ that it sends to.
pub(crate) struct SrqPair<C: PollContext> {
    pub(crate) from: Qp<C>,
    pub(crate) to: Qp<AnyContext>,
    null: Option<Arc<NullDevice>>,
}

impl<C: PollContext> Drop for SrqPair<C> {
    fn drop(&mut self) {
        if let Some(null) = &self.null {
            calm(null, self.from.num());
            calm(null, self.to.num());
        }
    }
}

/// Has nothing more go wrong with a QP, and what was held back come, as it would be lost with the
/// QP.
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
        Injection::Vanish { count: 0 },
        Injection::Release {
            count: never,
            reversed: true,
        },
    ] {
        let _ = null.inject_qp(num, injection);
    }
}

/// Makes the value of a slot.
fn recv_buf(pd: &Pd, shelf: &Arc<Shelf>, tally: &Arc<Tally>, cx: &Sleepable) -> Result<RecvBuf> {
    Ok(RecvBuf {
        buf: Memory::alloc(pd, LEN, cx)?,
        data: Ctx::alloc(LEN, cx)?,
        shelf: shelf.clone(),
        _life: Life::new(tally),
    })
}

/// Returns the way of a device to itself.
fn own_ah(dev: &Device, pd: &Pd, null: bool, cx: &Sleepable) -> Result<Ah> {
    if null {
        let attr = ah::Attr {
            dlid: 1,
            ..ah::Attr::new(PORT)
        };
        return Ah::create(pd, &attr, cx);
    }
    let port = dev.port(PORT).ok_or(ENODEV)?;
    let from = port.gids().next().ok_or(ENODEV)?;
    Ah::resolve(pd, &from, from.gid(), cx)
}

/// The slots that are kept, until this is dropped.
pub(crate) struct KeptSlots(Arc<Shelf>);

impl core::ops::Deref for KeptSlots {
    type Target = Arc<Shelf>;

    fn deref(&self) -> &Arc<Shelf> {
        &self.0
    }
}

impl Drop for KeptSlots {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A device and what is on it.
#[pin_data]
pub(crate) struct World<C: Way> {
    #[pin]
    pairs: Mutex<[Option<Arc<Pair<C>>>; PAIRS]>,
    #[pin]
    sessions: Mutex<[Option<Arc<Session<C>>>; SESSIONS]>,
    #[pin]
    srq_pair: Mutex<Option<Arc<SrqPair<C>>>>,
    /// Arrays of completions that any thread may dispatch.
    #[pin]
    batches: Mutex<KVec<Batch>>,
    pub(crate) shelf: KeptSlots,
    /// The QP for datagrams, if there are any, and the address of all of them.
    pub(crate) datagrams: Option<(UdQp<C>, Arc<Ah>)>,
    net: Net<C>,
    pub(crate) parts: Arc<Parts<C>>,
    pub(crate) dev: Device,
    pub(crate) tally: Arc<Tally>,
    /// `true` if what may be posted in part is posted.
    pub(crate) in_part: bool,
    /// `true` if CQs may be shared ones.
    pub(crate) pools: bool,
}

impl<C: Way> World<C> {
    pub(crate) fn new(
        client: &ClientRef,
        dev: &Device,
        null: Option<&Arc<NullDevice>>,
        tally: &Arc<Tally>,
        plan: &Plan,
        rng: &mut Rng,
        cx: &Sleepable,
    ) -> Result<Arc<Self>> {
        let pd = Pd::alloc(dev, cx)?;
        let cq = C::make(dev, ENTRIES, plan.pool, rng, cx)?;
        let session_cq = C::make(dev, ENTRIES, false, rng, cx)?;
        let srq_cq = match rng.once_in(2) {
            true => Cq::<Softirq>::alloc_any(dev, 256, cx)?.into_any(),
            false => Cq::<Workqueue>::alloc_any(dev, 256, cx)?.into_any(),
        };
        let shelf = KeptSlots(Shelf::new(SLOTS as usize / 2)?);
        let srq = Srq::create(&pd, SLOTS, |_| recv_buf(&pd, &shelf, tally, cx), cx)?;
        let datagrams = match plan.transport {
            // iWARP has none.
            Transport::Siw => None,
            _ => Some((
                UdQp::create(&pd, &cq, &cq, &CAPS, PORT, QKEY, cx)?,
                Arc::new(own_ah(dev, &pd, null.is_some(), cx)?, GFP_KERNEL)?,
            )),
        };
        let parts = Parts {
            pd,
            cq,
            session_cq,
            srq,
            srq_cq,
        };
        let parts = Arc::new(parts, GFP_KERNEL)?;
        let init = pin_init!(Self {
            pairs <- new_mutex!([const { None }; PAIRS]),
            sessions <- new_mutex!([const { None }; SESSIONS]),
            srq_pair <- new_mutex!(None),
            batches <- new_mutex!(KVec::new()),
            shelf,
            datagrams,
            net: match null {
                Some(null) => Net::Null(null.clone()),
                None => Net::Link(Link::new(client, &parts, cx)?),
            },
            parts,
            dev: dev.clone(),
            tally: tally.clone(),
            in_part: plan.parts,
            pools: plan.pool,
        }? Error);
        Arc::pin_init(init, GFP_KERNEL)
    }

    /// Returns the null device, which has things go wrong.
    pub(crate) fn null(&self) -> Result<&Arc<NullDevice>> {
        match &self.net {
            Net::Null(null) => Ok(null),
            Net::Link(_) => Err(EOPNOTSUPP),
        }
    }

    /// Returns one of the pairs, a new one where there is none.
    pub(crate) fn pair(&self, rng: &mut Rng, cx: &Sleepable) -> Result<Arc<Pair<C>>> {
        let index = rng.below(PAIRS as u32) as usize;
        let found = self.pairs.lock().get(index).cloned().flatten();
        if let Some(pair) = found {
            // Without a null device there is more that fails than steps that replace it.
            let replace = self.null().is_err() && pair.is_broken(cx) && rng.once_in(4);
            if !replace {
                return Ok(pair);
            }
        }
        let pair = Pair::new(self, rng, cx)?;
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

    /// Returns one of the sessions, a new one where there is none, or it is over.
    pub(crate) fn session(&self, rng: &mut Rng, cx: &Sleepable) -> Result<Arc<Session<C>>> {
        let index = rng.below(SESSIONS as u32) as usize;
        let found = self.sessions.lock().get(index).cloned().flatten();
        if let Some(session) = found {
            if !session.is_broken(cx) || rng.once_in(2) {
                return Ok(session);
            }
        }
        let qps = self.net.pair(&self.parts, Sort::Session, rng, cx)?;
        let session = Session::new(&qps, rng.once_in(2), self, cx)?;
        self.replace_session(index, Some(session.clone()));
        Ok(session)
    }

    /// Lets go of one of the sessions.
    pub(crate) fn forget_session(&self, rng: &mut Rng) {
        self.replace_session(rng.below(SESSIONS as u32) as usize, None);
    }

    fn replace_session(&self, index: usize, session: Option<Arc<Session<C>>>) {
        let before = match self.sessions.lock().get_mut(index) {
            Some(place) => core::mem::replace(place, session),
            None => None,
        };
        // Not under the lock.
        drop(before);
    }

    /// Makes the value of a slot.
    pub(crate) fn recv_buf(&self, cx: &Sleepable) -> Result<RecvBuf> {
        recv_buf(&self.parts.pd, &self.shelf, &self.tally, cx)
    }

    /// Leaves completions to other threads, or dispatches those that others have left.
    pub(crate) fn put_batch(&self, batch: Batch) -> Result {
        let mut batches = self.batches.lock();
        let before = match batches.len() < BATCHES {
            true => None,
            false => batches.remove(0).ok(),
        };
        let put = batches.push(batch, GFP_KERNEL);
        drop(batches);
        // Not under the lock.
        drop(before);
        Ok(put?)
    }

    /// Takes completions that a thread has left.
    pub(crate) fn take_batch(&self) -> Option<Batch> {
        self.batches.lock().pop()
    }

    /// Returns the pair on the SRQ, a new one if there is none.
    pub(crate) fn srq_pair(&self, rng: &mut Rng, cx: &Sleepable) -> Result<Arc<SrqPair<C>>> {
        if let Some(srq_pair) = &*self.srq_pair.lock() {
            return Ok(srq_pair.clone());
        }
        let (from, to) = self.net.srq_pair(&self.parts, rng, cx)?;
        let srq_pair = SrqPair {
            from,
            to,
            null: self.null().ok().cloned(),
        };
        let srq_pair = Arc::new(srq_pair, GFP_KERNEL)?;
        let before = self.srq_pair.lock().replace(srq_pair.clone());
        drop(before);
        Ok(srq_pair)
    }

    /// Lets go of the pair on the SRQ.
    pub(crate) fn forget_srq_pair(&self) {
        let before = self.srq_pair.lock().take();
        drop(before);
    }
}
