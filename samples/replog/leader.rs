// SPDX-License-Identifier: GPL-2.0

//! The leader: appends records to the follower's memory.
//!
//! A record is written, and then flushed. When the flush has completed, it is acknowledged: it is
//! in the follower's memory, and so are all before it.

use crate::record::{
    make,
    parse,
    ADVERTISEMENT,
    MAX_RECORD, //
};
use kernel::prelude::*;
use rdma::{
    cq::Wait,
    flush::Pad,
    op::{
        Done,
        Op,
        Outcome, //
    },
    prelude::*, //
};

/// How many records are under way at once.
const WINDOW: usize = 4;

/// For each record a write or a flush, and a receive for the advertisement.
const CAPS: Caps = Caps::new(WINDOW as u32, 1);

/// How long to look for an address and for a route, each, and for a completion, in milliseconds.
const PATIENCE_MS: u32 = 5_000;

/// A record under way.
#[derive(Clone, Copy, Default)]
struct Append {
    seq: u64,
    at: usize,
    len: usize,
}

type AppendOp = Op<Append, ToDevice>;

/// A connection, which ends when this is dropped.
struct Connection {
    id: cm::Id,
    qp: Arc<Qp<Waited>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.id.disconnect_later();
    }
}

/// What appends to a follower's log.
pub(crate) struct Leader {
    connection: Connection,
    cq: Cq<Waited>,
    batch: Batch<WINDOW>,
    pad: Arc<Pad>,
    idle: KVec<AppendOp>,
    log: Remote,
    log_len: usize,
    /// The last record that was posted, and where the next one goes.
    last: u64,
    end: usize,
    /// The last record that was acknowledged.
    acknowledged: u64,
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
        let qp = Arc::new(Qp::create(&id, pd, &cq, &cq, &CAPS, cx)?, GFP_KERNEL)?;
        let inbox = Op::<(), FromDevice>::new(Buf::alloc(pd, ADVERTISEMENT, cx)?, ())?;
        inbox.recv(&qp, 0..ADVERTISEMENT)?;
        id.connect(qp.clone(), &cm::ConnParam::default(), cx)?;
        let connection = Connection { id, qp };

        let mut batch = Batch::new();
        let completion = next(&cq, &mut batch, cx)?;
        let Ok(Done { mut op, result }) = Op::<(), FromDevice>::take(completion) else {
            return Err(EPROTO);
        };
        result?;
        let (log, log_len) = parse(&op.buf().cpu()).ok_or(EPROTO)?;

        let mut idle = KVec::with_capacity(WINDOW, GFP_KERNEL)?;
        for _ in 0..WINDOW {
            let buf = Buf::alloc(pd, MAX_RECORD, cx)?;
            idle.push(Op::new(buf, Append::default())?, GFP_KERNEL)?;
        }
        Ok(Self {
            connection,
            cq,
            batch,
            pad: Pad::alloc(pd, cx)?,
            idle,
            log,
            log_len,
            last: 0,
            end: 0,
            acknowledged: 0,
        })
    }

    fn place(&self, append: &Append) -> Remote {
        Remote {
            addr: self.log.addr + append.at as u64,
            ..self.log
        }
    }

    /// Begins to append the next record, or only the first `part` bytes of it.
    fn append(&mut self, mut op: AppendOp, part: usize) -> Result {
        let len = make(self.last + 1, &mut op.buf().cpu())?;
        if len > self.log_len - self.end {
            return Err(ENOSPC);
        }
        let append = Append {
            seq: self.last + 1,
            at: self.end,
            len,
        };
        *op.context() = append;
        op.write(&self.connection.qp, 0..len.min(part), self.place(&append))?;
        self.last = append.seq;
        self.end += len;
        Ok(())
    }

    /// Goes on with a record.
    fn progress(&mut self, done: Done<Append, ToDevice>) -> Result {
        let mut op = done.op;
        let append = *op.context();
        match done.result? {
            Outcome::Write => {
                let place = self.place(&append);
                op.flush(&self.connection.qp, &self.pad, place, append.len)?;
            }
            _ => {
                // Writes are executed in order, so all before it are there, too.
                self.acknowledged = self.acknowledged.max(append.seq);
                self.idle.push(op, GFP_KERNEL)?;
            }
        }
        Ok(())
    }

    /// Appends records until `count` of them are acknowledged.
    pub(crate) fn run(&mut self, count: u64, cx: &Sleepable) -> Result {
        while self.acknowledged < count {
            while let Some(op) = self.idle.pop() {
                self.append(op, MAX_RECORD)?;
            }
            let completion = next(&self.cq, &mut self.batch, cx)?;
            // Anything else goes to its handler.
            let done = AppendOp::take(completion).ok();
            if let Some(done) = done {
                self.progress(done)?;
            }
        }
        Ok(())
    }

    /// Ends in the middle: with records under way, the last of them in part. Returns how many were
    /// acknowledged.
    pub(crate) fn crash(mut self, cx: &Sleepable) -> Result<u64> {
        if let Some(op) = self.idle.pop() {
            self.append(op, 40)?;
        }
        // The QP goes to the error state, and whatever is under way stops where it is.
        self.connection.qp.drain(cx)?;
        Ok(self.acknowledged)
    }
}

/// Waits for a completion.
fn next<'a, const N: usize>(
    cq: &Cq<Waited>,
    batch: &'a mut Batch<N>,
    cx: &Sleepable,
) -> Result<Completion<'a>> {
    while batch.is_empty() && cq.poll(batch)? == 0 {
        if cq.wait(PATIENCE_MS, cx)? == Wait::TimedOut {
            return Err(ETIMEDOUT);
        }
    }
    batch.next().ok_or(EIO)
}
