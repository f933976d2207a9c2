// SPDX-License-Identifier: GPL-2.0

//! Lengths for which there is no memory in one piece: an error, and no warning of the kernel.

use crate::fixture::{
    Env,
    Gap,
    Null,
    NullEnv,
    CAPS, //
};
use core::mem::size_of;
use kernel::{
    page::PAGE_SIZE,
    prelude::*, //
};
use rdma::{
    dma::Bufs,
    prelude::*,
    qp::InitAttr,
    rw::{
        Ctx,
        Rw, //
    },
    session::{
        tags::{
            Exchange,
            Tags, //
        },
        Received,
        RecvHandler,
        RecvRing,
        Room, //
    }, //
};

/// What `kmalloc()` has at most.
const PIECE: usize = kernel::bindings::KMALLOC_MAX_SIZE as usize;

const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };

/// Exchanges of so many bytes.
struct Large;

impl Exchange for Large {
    type Request = [u8; 200];
    type Reply = ();
    type Connection = ();
    type Needs = context::Atomic;
}

/// Many entries on their way.
#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx<ToDevice, Gap>,
}

impl CqeHandler for Transfer {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(_this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {}
}

/// A connection with receives.
struct Receiver(Qp<Softirq>);

impl RecvHandler for Receiver {
    type Send = Softirq;
    type Recv = Softirq;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<Softirq> {
        &self.0
    }

    fn received(_message: Received<'_, Self>, _cx: &context::Atomic) {}

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {}

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {}
}

fn qp(null: &NullEnv, send_sge: u32) -> Result<Qp<Direct>> {
    let (env, caps) = (
        &null.env,
        Caps {
            send_sge,
            ..Caps::new(4, 4)
        },
    );
    let cq = env.cq::<Direct>(64)?;
    (InitAttr::new(&env.pd, &cq, &cq, &caps).rw_contexts(2, 1)).create(&env.cx)
}

#[kunit_tests(rdma_null_lengths)]
mod tests {
    use super::*;

    #[test]
    fn buffer() -> Result {
        let null = NullEnv::new()?;
        let buf = |len| Buf::<ToDevice>::alloc(&null.env.pd, len, &null.env.cx).map(drop);
        buf(PIECE)?;
        check_err!(buf(PIECE + 1), ENOMEM);
        check_err!(buf((1 << 32) - 1), ENOMEM);
        Ok(())
    }

    #[test]
    fn pages() -> Result {
        let null = NullEnv::new()?;
        // More than so many addresses of pages in one piece.
        let len = (PIECE / size_of::<usize>() + 1) * PAGE_SIZE;
        let alloc = SgBuf::<ToDevice>::alloc(&null.env.pd, len, &null.env.cx);
        check_err!(alloc, ENOMEM);
        Ok(())
    }

    #[test]
    fn context() -> Result {
        let cx = Sleepable::current()?;
        // As many `struct ib_sge`.
        let entries = PIECE / 16;
        for len in [entries * PAGE_SIZE + 1, (2 << 30) + (8 << 20), usize::MAX] {
            check_err!(Ctx::alloc(len, &cx), EINVAL);
        }
        let memory = Gap::many(entries as u32 + 1, 100)?;
        check_err!(Ctx::<ToDevice, _>::new(memory, GFP_KERNEL), EINVAL);
        Ok(())
    }

    /// As many requests as there is no memory for in one piece, if each has one entry.
    #[test]
    fn transfer() -> Result {
        let null = NullEnv::new()?;
        let (few, many, cx) = (qp(&null, 1)?, qp(&null, 32)?, &null.env.cx);
        // A `struct ib_rdma_wr` is longer.
        let entries = PIECE / 48;
        let mut data: Ctx<ToDevice, _> = Ctx::new(Gap::many(entries as u32, 100)?, GFP_KERNEL)?;
        // A part is not as long, and others have more entries in each request.
        for _ in 0..2 {
            check_err!(few.prepare_rw(Rw::write(&data, .., NOWHERE, cx)), EINVAL);
            few.prepare_rw(Rw::write(&data, 0..1000, NOWHERE, cx))?;
            data.cancel();
            many.prepare_rw(Rw::write(&data, .., NOWHERE, cx))?;
            check_err!(few.prepare_rw(Rw::write(&data, .., NOWHERE, cx)), EBUSY);
            data.cancel();
        }
        let transfer = Arc::new(
            Transfer {
                cqe: Cqe::new(),
                data,
            },
            GFP_KERNEL,
        )?;
        let posted = few.post_rw(transfer, |x| Ok(Rw::write(&x.data, .., NOWHERE, cx)));
        check_err!(posted, EINVAL);
        Ok(())
    }

    #[test]
    fn table() -> Result {
        let null = Null::<Softirq>::new()?;
        let new = |count| {
            let init = |_| Ok(([0; 200], ()));
            Tags::<Large>::new(&null.a, (), count, 0, init, &null.env.cx).map(drop)
        };
        check_err!(new(1 << 16), ENOMEM);
        new(1 << 10)
    }

    #[test]
    fn pieces() -> Result {
        let null = NullEnv::new()?;
        let (pd, cx) = (&null.env.pd, &null.env.cx);
        for len in [PIECE + 1, (1 << 32) - PAGE_SIZE] {
            check_err!(Bufs::<ToDevice>::new(pd, 2, len, cx), ENOMEM);
        }
        check_err!(Bufs::<ToDevice>::new(pd, 2, usize::MAX, cx), EINVAL);
        // As many are made when they are taken.
        Bufs::<ToDevice>::new(pd, usize::MAX, 1, cx)?.take(cx)?;
        Ok(())
    }

    /// As many as no vector has.
    #[test]
    fn requests() -> Result {
        let null = Null::<Softirq>::new()?;
        for count in [1 << 32, usize::MAX] {
            let init = |_| Ok::<_, Error>([0u8; 200]);
            check_err!(Requests::new(&null.a, count, init, &null.env.cx), ENOMEM);
        }
        Ok(())
    }

    #[test]
    fn waiters() -> Result {
        let null = Null::<Softirq>::new()?;
        for count in [1 << 16, u32::MAX] {
            check_err!(
                Room::<[u8; 200]>::new(&null.a, 1, count, &null.env.cx),
                ENOMEM
            );
        }
        Ok(())
    }

    #[test]
    fn receives() -> Result {
        let null = Null::<Softirq>::new()?;
        let Env { pd, cx, .. } = &null.env;
        let cq = null.env.cq::<Softirq>(CAPS.entries())?;
        let qp = null.env.raw_qp(&cq, &CAPS)?;
        let conn = Arc::new(Receiver(qp), GFP_KERNEL)?;
        let ring = |count, len| RecvRing { pd, count, len }.post(&conn, cx);
        check_err!(ring(u32::MAX, 1), ENOMEM);
        check_err!(ring(1, PIECE + 1), ENOMEM);
        Ok(())
    }
}
