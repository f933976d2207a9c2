// SPDX-License-Identifier: GPL-2.0

//! One end: what is made of a device.

use crate::{
    args::Context,
    poll::{
        alloc_cq,
        Cq,
        Qp, //
    },
    run::Run, //
};
use kernel::{
    prelude::*,
    sync::atomic::{
        Acquire,
        Atomic as AtomicCell,
        Release, //
    },
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    prelude::*,
    qp::Attr, //
};

/// The interval between two looks for an event, and the longest time.
const NAP: Delta = Delta::from_micros(200);
const NAPS: u32 = 50_000;

/// Waits until a condition holds.
fn until(mut condition: impl FnMut() -> Result<bool>) -> Result {
    for _ in 0..NAPS {
        if condition()? {
            return Ok(());
        }
        fsleep(NAP);
    }
    Err(ETIME)
}

/// A PD, a CQ for all requests of this end, and QPs.
pub(crate) struct End {
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) qps: KVec<Arc<Qp>>,
    region: Option<Arc<Memory>>,
}

impl End {
    pub(crate) fn new(
        dev: &Device,
        qps: u32,
        caps: &Caps,
        context: Context,
        cx: &Sleepable,
    ) -> Result<Self> {
        let pd = Pd::alloc(dev, cx)?;
        let entries = caps.entries().checked_mul(qps).ok_or(EINVAL)?;
        let cq = alloc_cq(dev, entries, context, cx)?;
        let mut end = Self {
            pd,
            cq,
            qps: KVec::with_capacity(qps as usize, GFP_KERNEL)?,
            region: None,
        };
        for _ in 0..qps {
            let qp = Qp::create_raw(&end.pd, &end.cq, &end.cq, caps, cx)?;
            end.qps.push(Arc::new(qp, GFP_KERNEL)?, GFP_KERNEL)?;
        }
        Ok(end)
    }

    /// Registers `size` bytes that the peer may read and write, and returns where it finds them.
    pub(crate) fn lend(&mut self, size: usize, cx: &Sleepable) -> Result<Remote> {
        let qp = self.qps.first().ok_or(EINVAL)?;
        let memory = Memory {
            reg: Cqe::new(),
            region: Region::new(SgBuf::alloc(&self.pd, size, cx)?, cx)?.into_shared(),
            registered: AtomicCell::new(PENDING),
        };
        let memory = Arc::new(memory, GFP_KERNEL)?;
        self.region = Some(memory.clone());
        let remote = qp.post_send(memory.clone(), |m| Ok(RegWr::remote_read_write(&m.region)))?;
        until(|| {
            self.cq.process(1);
            match memory.registered.load(Acquire) {
                FAILED => Err(EIO),
                registered => Ok(registered != PENDING),
            }
        })?;
        Ok(remote)
    }

    /// Waits until nothing of this end is posted any more, and its QPs are gone.
    fn end(self, cx: &Sleepable) -> Result {
        // All at once, so that they flush at the same time.
        for qp in self.qps.iter() {
            qp.modify(Attr::Error, cx)?;
        }
        // Twice: while the first one waits, a send that was done may post its slot as a receive,
        // behind what the first one waits for.
        for _ in 0..2 {
            for qp in self.qps.iter() {
                qp.drain(cx)?;
            }
        }
        drop(self.qps);
        until(|| Ok(self.cq.free_entries() == self.cq.entries()))
    }
}

/// Ends both ends of a run, whatever has come of it.
#[inline(never)]
pub(crate) fn finish<P, T>(
    run: &Run<P>,
    ends: impl IntoIterator<Item = End>,
    result: Result<T>,
    cx: &Sleepable,
) -> Result<T>
where
    P: Send,
{
    // Owners have references to their QPs. Those that are still posted come back flushed.
    run.dismiss();
    for end in ends {
        end.end(cx)
            .inspect_err(|e| pr_err!("an end is not gone: {e:?}\n"))?;
    }
    result
}

/// The result of a registration.
const PENDING: u32 = 0;
const DONE: u32 = 1;
const FAILED: u32 = 2;

/// Memory that the peer may read and write.
#[derive(HasCqe)]
struct Memory {
    reg: Cqe<Self>,
    region: SharedRegion<Bidirectional, SgBuf<Bidirectional>>,
    registered: AtomicCell<u32>,
}

impl CqeHandler for Memory {
    type Pointer = Arc<Self>;
    type Needs = Atomic;

    fn done(this: Arc<Self>, wc: &Wc, _cx: &Atomic) {
        let registered = wc.result().map_or(FAILED, |_| DONE);
        this.registered.store(registered, Release);
    }
}
