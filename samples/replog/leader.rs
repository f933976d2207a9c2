// SPDX-License-Identifier: GPL-2.0

//! The leader: appends records to the follower's memory.
//!
//! A record is written, and then flushed. When the flush has completed, it is acknowledged: it is
//! in the follower's memory, and so are all before it.

use crate::record::{
    make,
    Advertisement,
    ADVERTISEMENT,
    MAX_RECORD, //
};
use kernel::prelude::*;
use rdma::{
    op::{
        Done,
        Op,
        Outcome,
        Pad, //
    },
    prelude::*, //
};

/// The number of records that are under way at once.
pub(crate) const WINDOW: usize = 4;

/// For each record a write or a flush, and a receive for the advertisement.
const CAPS: Caps = Caps::new(WINDOW as u32, 1);

/// The longest time to resolve an address and a route, each, and for a completion, in milliseconds.
const PATIENCE_MS: u32 = 5_000;

/// A record under way.
#[derive(Clone, Copy, Default)]
struct Append {
    seq: u64,
    at: usize,
    len: usize,
}

type AppendOp = Op<Append, ToDevice>;

/// The writing end of a follower's log. The connection ends when this is dropped.
pub(crate) struct Leader {
    id: cm::Id,
    qp: Qp<Waited>,
    cq: Cq<Waited>,
    batch: WcArray<WINDOW>,
    pad: Arc<Pad>,
    log: Remote,
    log_len: usize,
    /// The last record that was posted, and where the next one goes.
    last: u64,
    end: usize,
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.id.disconnect_later();
    }
}

impl Leader {
    /// Connects to a follower and learns where its log is.
    pub(crate) fn connect(
        client: &ClientRef,
        addr: SocketAddr,
        pd: &Pd,
        cx: &Sleepable,
    ) -> Result<Self> {
        let id = cm::Id::resolve(client, addr, PATIENCE_MS, cx)?;
        let cq = Cq::<Waited>::alloc_any(pd.device(), CAPS.entries(), cx)?;
        let mut leader = Self {
            qp: Qp::create(&id, pd, &cq, &cq, &CAPS, cx)?,
            id,
            cq,
            batch: WcArray::new(),
            pad: Pad::alloc(pd, cx)?,
            log: Remote { addr: 0, rkey: 0 },
            log_len: 0,
            last: 0,
            end: 0,
        };
        let inbox = Op::<(), FromDevice>::new(Buf::alloc(pd, ADVERTISEMENT, cx)?, (), cx)?;
        inbox.recv(&leader.qp, 0..ADVERTISEMENT)?;
        let handler = Arc::new(leader.qp.clone(), GFP_KERNEL)?;
        (leader.id).connect(handler, &cm::ConnParam::default(), cx)?;

        let Ok(Done { mut op, result }) = Op::<(), FromDevice>::take(leader.next(cx)?) else {
            return Err(EPROTO);
        };
        result?;
        // Nothing of it but its length was checked.
        let log = Advertisement::read_from_bytes(&op.buf().cpu()).map_err(|_| EPROTO)?;
        (leader.log.addr, leader.log.rkey) = (log.addr.get(), log.rkey.get());
        leader.log_len = log.len.get() as usize;
        Ok(leader)
    }

    /// Waits for a completion.
    fn next(&mut self, cx: &Sleepable) -> Result<cq::Completion<'_>> {
        let completion = self.cq.next(&mut self.batch, PATIENCE_MS, cx)?;
        completion.ok_or(ETIMEDOUT)
    }

    /// Returns where a record goes. The address is the follower's, and may be any.
    fn place(&self, append: &Append) -> Result<Remote> {
        let addr = self.log.addr.checked_add(append.at as u64);
        Ok(Remote {
            addr: addr.ok_or(EPROTO)?,
            ..self.log
        })
    }

    /// Begins to append the next record, or only the first `part` bytes of it.
    fn append(&mut self, mut op: AppendOp, part: usize) -> Result {
        let seq = self.last.wrapping_add(1);
        let append = Append {
            seq,
            at: self.end,
            len: make(seq, &mut op.buf().cpu())?,
        };
        let end = append.at.checked_add(append.len);
        let end = end.filter(|end| *end <= self.log_len).ok_or(ENOSPC)?;
        *op.context() = append;
        op.write(&self.qp, 0..append.len.min(part), self.place(&append)?)?;
        (self.last, self.end) = (seq, end);
        Ok(())
    }

    /// Appends records until `count` of them are acknowledged, and crashes: with records under way,
    /// the last of them written in part.
    pub(crate) fn run(mut self, count: u64, pd: &Pd, cx: &Sleepable) -> Result<u64> {
        for _ in 0..WINDOW {
            let op = Op::new(Buf::alloc(pd, MAX_RECORD, cx)?, Append::default(), cx)?;
            self.append(op, MAX_RECORD)?;
        }
        let mut acknowledged = 0;
        while acknowledged < count {
            let Ok(Done { mut op, result }) = AppendOp::take(self.next(cx)?) else {
                return Err(EPROTO);
            };
            let append = *op.context();
            match result? {
                Outcome::Write => {
                    op.flush(&self.qp, &self.pad, self.place(&append)?, append.len)?;
                }
                _ => {
                    // Writes are executed in order, so all before it have arrived, too.
                    acknowledged = append.seq;
                    let all = acknowledged < count;
                    self.append(op, if all { MAX_RECORD } else { 40 })?;
                }
            }
        }
        // The QP goes to the error state, and whatever is under way stops where it is.
        self.qp.drain(cx)?;
        Ok(acknowledged)
    }
}
