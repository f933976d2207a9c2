// SPDX-License-Identifier: GPL-2.0

//! One end: what is made of a device.

use crate::{
    args::{
        Args,
        Context,
        Load, //
    },
    link,
    poll::{
        alloc_cq,
        process,
        Cq,
        Qp, //
    },
    run::{
        device,
        Report,
        Run, //
    }, //
};
use kernel::{
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    device::Device,
    prelude::*,
    qp::{
        Attr,
        InitAttr, //
    }, //
};

/// The interval between two looks for an event, and the longest time.
const NAP: Delta = Delta::from_micros(200);
const NAPS: u32 = 50_000;

/// Waits until a condition holds.
fn until(condition: &mut dyn FnMut() -> Result<bool>) -> Result {
    for _ in 0..NAPS {
        if condition()? {
            return Ok(());
        }
        fsleep(NAP);
    }
    Err(ETIME)
}

/// The operation of a request, and its range.
#[derive(Clone, Copy)]
pub(crate) enum Op {
    Send,
    Write(Remote),
    Read(Remote),
}

/// A PD, a CQ for all requests of this end, and QPs.
pub(crate) struct End {
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) qps: KVec<Qp>,
    memory: Option<Requests<Memory>>,
}

impl End {
    pub(crate) fn new(
        dev: &Device,
        qps: u32,
        caps: &Caps,
        transfers: u32,
        context: Context,
        cx: &Sleepable,
    ) -> Result<Self> {
        let pd = Pd::alloc(dev, cx)?;
        let requests = match transfers {
            0 => 0,
            n => dev.port(link::PORT).ok_or(EINVAL)?.rw_requests(n),
        };
        let entries = caps.entries().saturating_add(requests);
        let entries = entries.checked_mul(qps).ok_or(EINVAL)?;
        let cq = alloc_cq(dev, entries, context, cx)?;
        let mut end = Self {
            pd,
            cq,
            qps: KVec::with_capacity(qps as usize, GFP_KERNEL)?,
            memory: None,
        };
        for _ in 0..qps {
            let qp = InitAttr::new(&end.pd, &end.cq, &end.cq, caps)
                .rw_contexts(transfers, link::PORT)
                .create(cx)?;
            end.qps.push_within_capacity(qp)?;
        }
        Ok(end)
    }

    /// Returns the operation of a load whose peer this is.
    #[inline(never)]
    pub(crate) fn op(&mut self, args: &Args<'_>, cx: &Sleepable) -> Result<Op> {
        Ok(match args.load {
            Load::WriteLat | Load::WriteRate | Load::RwWriteRate => {
                Op::Write(self.lend(args.size, cx)?)
            }
            Load::ReadLat | Load::ReadRate | Load::RwReadRate => {
                Op::Read(self.lend(args.size, cx)?)
            }
            _ => Op::Send,
        })
    }

    /// Registers `size` bytes that the peer may read and write, and returns where it finds them.
    fn lend(&mut self, size: usize, cx: &Sleepable) -> Result<Remote> {
        let qp = self.qps.first().ok_or(EINVAL)?;
        let make = |_| {
            Ok(Memory {
                reg: Cqe::new(),
                region: Region::new(Buf::alloc(&self.pd, size, cx)?, cx)?,
                failed: false,
            })
        };
        let memory = self.memory.insert(Requests::new(qp, 1, make, cx)?);
        let posted = memory.take().ok_or(EIO)?;
        let remote = qp.post_send(posted, |m| Ok(RegWr::remote_read_write(&m.region)))?;
        until(&mut || {
            process(&self.cq, 1)?;
            match memory.take() {
                Some(memory) if memory.failed => Err(EIO),
                memory => Ok(memory.is_some()),
            }
        })?;
        Ok(remote)
    }

    /// Waits until nothing of this end is posted and its QPs are destroyed.
    fn end(&mut self, cx: &Sleepable) -> Result {
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
        self.qps.clear();
        until(&mut || Ok(self.cq.free_entries() == self.cq.entries()))
    }
}

/// A load between its ends.
pub(crate) type Body = fn(&Args<'_>, &mut [End], &Arc<Run>, &mut Report, &Sleepable) -> Result;

/// Makes the ends of a load, of so many QPs of these sizes each, and ends them, whatever has come
/// of it.
#[inline(never)]
pub(crate) fn between(
    client: &ClientRef,
    args: &Args<'_>,
    qps: u32,
    caps: &[Caps],
    body: Body,
    report: &mut Report,
    cx: &Sleepable,
) -> Result {
    let mut ends = KVec::with_capacity(2, GFP_KERNEL)?;
    for (name, caps) in [args.device, args.peer].into_iter().zip(caps) {
        let dev = device(client, name, cx)?;
        let end = End::new(&dev, qps, caps, args.transfers(), args.context, cx)?;
        ends.push_within_capacity(end)?;
    }
    // Requests in arrays, and those that the caller takes back, are not kept by the run.
    let kept = match args.load {
        Load::QueueRate | Load::PoolRate => 0,
        Load::VoidRate if args.context.is_polled() => 0,
        _ => qps.saturating_mul(args.depth),
    };
    let run = Run::new(kept as usize)?;
    let result = body(args, &mut ends, &run, report, cx);
    // Owners have references to their QPs. Those that are still posted come back flushed.
    run.dismiss();
    for end in ends.iter_mut() {
        end.end(cx)
            .inspect_err(|e| pr_err!("an end is not gone: {e:?}\n"))?;
    }
    result
}

/// Memory that the peer may read and write.
#[derive(HasCqe)]
#[repr(C)]
struct Memory {
    reg: Cqe<Self>,
    region: Region<Bidirectional>,
    /// Whether it could not be registered.
    failed: bool,
}

impl CqeHandler for Memory {
    type Pointer = Taken<Self>;
    type Needs = context::Atomic;

    #[inline]
    fn done(mut this: Taken<Self>, wc: &Wc, _cx: &context::Atomic) {
        this.failed = wc.result().is_err();
    }
}
