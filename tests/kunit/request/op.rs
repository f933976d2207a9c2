// SPDX-License-Identifier: GPL-2.0

//! Operations with a context of the caller's, and flushes.

use crate::fixture::{
    both,
    wait,
    CountDrop,
    Counter,
    Link,
    Polled,
    Registered, //
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

/// An operation whose completions are taken, with a number as its context.
type Taken = Op<u32>;

fn op<C: Polled>(link: &Link<C>, bytes: &[u8], context: u32) -> Result<Taken> {
    let mut buf = Buf::alloc(&link.env.pd, bytes.len(), &link.env.cx)?;
    buf.cpu().copy_from_slice(bytes);
    Op::new(buf, context, &link.env.cx)
}

/// Waits for the next operation that is over.
fn next<C: Polled + CallerPolled>(cq: &Cq<C>) -> Result<Done<u32>> {
    let (mut batch, mut done) = (WcArray::<1>::new(), None);
    wait(|| {
        if cq.poll(&mut batch).is_ok() {
            done = batch.completions().find_map(|c| Taken::take(c).ok());
        }
        done.is_some()
    })?;
    done.ok_or(EIO)
}

fn succeeded(done: Done<u32>, outcome: Outcome, context: u32) -> Result<Taken> {
    let mut op = done.op;
    check_eq!(done.result.map_err(Error::from)?, outcome);
    check_eq!(*op.context(), context);
    Ok(op)
}

/// All operations succeed, one after the other.
fn succeed<C: Polled + CallerPolled>() -> Result {
    let link = Link::<C>::new()?;
    let there = Registered::<Bidirectional>::new(&link, 64, both)?;
    let pad = Pad::alloc(&link.env.pd, &link.env.cx)?;
    let (qp, cq) = (&link.a.qp, &link.send_cq);

    let out = op(&link, b"written!", 7)?;
    out.write(qp, 0..8, there.remote)?;
    let out = succeeded(next(cq)?, Outcome::Write, 7)?;
    out.flush(qp, &pad, there.remote, 8)?;
    let mut out = succeeded(next(cq)?, Outcome::Flush, 7)?;
    check_eq!(&out.buf().cpu()[..], b"written!");
    check_eq!(&there.bytes()?[..8], b"written!");

    op(&link, &[0; 12], 8)?.read(qp, 2..10, there.remote)?;
    let mut read = succeeded(next(cq)?, Outcome::Read, 8)?;
    check_eq!(&read.buf().cpu()[..], b"\0\0written!\0\0");

    op(&link, &[0; 8], 9)?.recv(&link.b.qp, 0..8)?;
    out.send(qp, 0..5)?;
    let out = succeeded(next(cq)?, Outcome::Send, 7)?;
    let message = Outcome::Recv { len: 5, imm: None };
    let mut came = succeeded(next(&link.recv_cq)?, message, 9)?;
    check_eq!(&came.buf().cpu()[..5], b"writt");

    came.recv(&link.b.qp, 0..8)?;
    out.send_with_imm(qp, 5..8, 0x0102_0304)?;
    let out = succeeded(next(cq)?, Outcome::Send, 7)?;
    let message = Outcome::Recv {
        len: 3,
        imm: Some(0x0102_0304),
    };
    let mut came = succeeded(next(&link.recv_cq)?, message, 9)?;
    check_eq!(&came.buf().cpu()[..3], b"en!");

    came.recv(&link.b.qp, 0..8)?;
    out.write_with_imm(qp, 0..4, there.remote, 77)?;
    succeeded(next(cq)?, Outcome::Write, 7)?;
    let notice = Outcome::RecvWrite { len: 4, imm: 77 };
    let mut came = succeeded(next(&link.recv_cq)?, notice, 9)?;
    check_eq!(&came.buf().cpu()[..3], b"en!");
    Ok(())
}

#[kunit_tests(rdma_op)]
mod tests {
    use super::*;

    #[test]
    fn all_succeed_direct() -> Result {
        not_on_iwarp!(c"there are no immediate data");
        succeed::<Direct>()
    }

    #[test]
    fn all_succeed_waited() -> Result {
        not_on_iwarp!(c"there are no immediate data");
        succeed::<Waited>()
    }

    #[test]
    fn flush_completes_after_what_was_written() -> Result {
        const N: usize = 4096;
        let link = Link::<Waited>::new()?;
        let there = Registered::<Bidirectional>::new(&link, N, both)?;
        let pad = Pad::alloc(&link.env.pd, &link.env.cx)?;
        let mut batch = WcArray::<4>::new();
        for round in 1..8u8 {
            op(&link, &[round; N], 0)?.write(&link.a.qp, 0..N, there.remote)?;
            op(&link, &[0], 1)?.flush(&link.a.qp, &pad, there.remote, N)?;
            // The flush alone is looked at.
            loop {
                let completion = link.send_cq.next(&mut batch, 10_000, &link.env.cx)?;
                let completion = completion.ok_or(ETIMEDOUT)?;
                let Ok(mut done) = Taken::take(completion) else {
                    continue;
                };
                if *done.op.context() == 1 {
                    check_eq!(done.result.map_err(Error::from)?, Outcome::Flush);
                    break;
                }
            }
            check!(there.bytes()?.iter().all(|byte| *byte == round));
        }
        Ok(())
    }

    #[test]
    fn flush_reads_inside_of_the_range() -> Result {
        let link = Link::<Direct>::new()?;
        let there = Registered::<Bidirectional>::new(&link, 64, both)?;
        let pad = Pad::alloc(&link.env.pd, &link.env.cx)?;
        // The last byte is the region's.
        op(&link, &[0], 0)?.flush(&link.a.qp, &pad, there.remote, 64)?;
        succeeded(next(&link.send_cq)?, Outcome::Flush, 0)?;
        // One further it is not.
        op(&link, &[0], 0)?.flush(&link.a.qp, &pad, there.remote, 65)?;
        let done = next(&link.send_cq)?;
        // On iWARP it is not known which request it was.
        let status = match link.env.is_iwarp() {
            true => wc::Status::WR_FLUSH_ERR,
            false => wc::Status::REM_ACCESS_ERR,
        };
        check!(done.result.err().map(|e| e.status) == Some(status));
        Ok(())
    }

    #[test]
    fn ranges_are_checked() -> Result {
        let link = Link::<Direct>::new()?;
        let pad = Pad::alloc(&link.env.pd, &link.env.cx)?;
        let (qp, nowhere) = (&link.a.qp, Remote { addr: 2, rkey: 0 });
        let Err(e) = op(&link, &[0; 8], 5)?.write(qp, 4..9, nowhere) else {
            return Err(EINVAL);
        };
        check_eq!(e.error(), EINVAL);
        let mut back = e.owner.ok_or(EIO)?;
        check_eq!(*back.context(), 5);
        check_err!(back.read(qp, 3..3, nowhere), EINVAL);
        check_err!(op(&link, &[0; 8], 5)?.send(qp, 0..9), EINVAL);
        check_err!(op(&link, &[0; 8], 5)?.recv(qp, 8..9), EINVAL);
        check_err!(op(&link, &[0], 5)?.flush(qp, &pad, nowhere, 0), EINVAL);
        check_err!(
            op(&link, &[0], 5)?.flush(qp, &pad, nowhere, usize::MAX),
            EINVAL
        );
        Ok(())
    }

    #[test]
    fn failure_gives_the_operation_back() -> Result {
        let link = Link::<Direct>::new()?;
        op(&link, &[3; 8], 6)?.recv(&link.b.qp, 0..8)?;
        link.a.id.disconnect(&link.env.cx)?;
        let mut done = next(&link.recv_cq)?;
        check!(done.result.err().map(|e| e.status) == Some(wc::Status::WR_FLUSH_ERR));
        check_eq!(*done.op.context(), 6);
        check_eq!(done.op.buf().cpu()[0], 3);
        Ok(())
    }

    #[test]
    fn unclaimed_operation_is_dropped() -> Result {
        let link = Link::<Softirq>::new()?;
        let gone = Counter::new()?;
        let buf = Buf::<Bidirectional>::alloc(&link.env.pd, 8, &link.env.cx)?;
        let op = Op::<_>::new(buf, CountDrop(gone.clone()), &link.env.cx)?;
        op.recv(&link.a.qp, 0..8)?;
        check_eq!(gone.get(), 0);
        link.a.qp.drain(&link.env.cx)?;
        check_eq!(gone.get(), 1);
        Ok(())
    }
}
