// SPDX-License-Identifier: GPL-2.0

//! Atomics, and registrations and invalidations that do not succeed.

use crate::fixture::{
    both,
    Carried,
    Completed,
    Inbox,
    Null,
    Outcome,
    RegOwner, //
};
use kernel::prelude::*;
use rdma::{
    mr::Shared,
    prelude::*,
    wr::{
        AtomicWr,
        SgeMut, //
    }, //
};
use rdma_null::Injection;

type Ours = Arc<SharedRegion<Bidirectional>>;

/// A region of side `b` with the words 3 and 7, registered for access by side `a`.
fn words(
    null: &Null<Softirq>,
    wr: impl for<'a> FnOnce(&'a SharedRegion<Bidirectional>) -> RegWr<'a, Shared> + Send,
) -> Result<(Ours, Remote)> {
    let region = null.env.region(16)?;
    region.write(0, &3u64.to_ne_bytes())?;
    region.write(8, &7u64.to_ne_bytes())?;
    let owner = RegOwner::new(&region)?;
    let registered = owner.registered.clone();
    let remote = null.b.post_send(owner, |o| Ok(wr(&o.region)))?;
    null.wait(|| registered.get() == 1)?;
    Ok((region, remote))
}

fn atomic(region: &SharedRegion<Bidirectional>) -> RegWr<'_, Shared> {
    RegWr::remote_atomic(region)
}

fn word(region: &Ours, offset: usize) -> Result<u64> {
    let mut bytes = [0; 8];
    region.read(offset, &mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}

fn at(remote: Remote, offset: u64) -> Remote {
    Remote {
        addr: remote.addr + offset,
        ..remote
    }
}

/// Does an atomic operation.
fn run(
    null: &Null<Softirq>,
    wr: impl for<'a> FnOnce(SgeMut<'a>) -> AtomicWr<'a> + Send,
) -> Result<Completed> {
    let inbox = Inbox::new()?;
    let message = null.env.message(&inbox, &[0xff; 8])?;
    null.a
        .post_send(message, |m| Ok(wr(m.buf.sge_mut(0..8)?)))?;
    null.one(&inbox)
}

/// Returns what an atomic operation has found, as `opcode`.
fn old(mut done: Completed, opcode: Opcode) -> Result<u64> {
    check_eq!(done.ok()?.opcode, opcode);
    let bytes = done.bytes()?;
    Ok(u64::from_ne_bytes(
        (&bytes[..]).try_into().map_err(|_| EINVAL)?,
    ))
}

type Alone = Region<Bidirectional>;

/// Registers a region that has no other user, or invalidates it, with side `b`.
fn carry(null: &Null<Softirq>, region: Alone, invalidate: bool) -> Result<(Alone, Outcome, bool)> {
    let (carrier, carried) = Carried::new(region)?;
    if invalidate {
        null.b.post_send(carrier, |c| Ok(InvWr::new(&c.region)))?;
    } else {
        null.b.post_send(carrier, |c| Ok(both(&c.region)))?;
    }
    let mut back = None;
    null.wait(|| {
        back = carried.take();
        back.is_some()
    })?;
    back.ok_or(EIO)
}

/// Has the next request of side `b` fail.
fn fail_next(null: &Null<Softirq>, status: wc::Status) -> Result {
    null.dev.inject_qp(
        null.b.num(),
        Injection::Status {
            status: status.as_raw(),
            vendor_err: 0,
            count: 1,
            fatal: false,
        },
    )
}

fn alone(null: &Null<Softirq>) -> Result<Alone> {
    Region::new(Buf::alloc(&null.env.pd, 64, &null.env.cx)?, &null.env.cx)
}

#[kunit_tests(rdma_null_operations)]
mod tests {
    use super::*;

    #[test]
    fn fetch_and_add() -> Result {
        let null = Null::new()?;
        let (region, remote) = words(&null, atomic)?;
        for n in 0..3 {
            let done = run(&null, |old| {
                AtomicWr::fetch_add(old, at(remote, 8), 1 << 40)
            })?;
            check_eq!(old(done, Opcode::FetchAdd)?, 7 + (n << 40));
        }
        check_eq!((word(&region, 0)?, word(&region, 8)?), (3, 7 + (3 << 40)));
        Ok(())
    }

    #[test]
    fn compare_and_swap() -> Result {
        let null = Null::new()?;
        let (region, remote) = words(&null, atomic)?;
        for (compare, is) in [(4, 3), (3, 99)] {
            let done = run(&null, |old| AtomicWr::cmp_swap(old, remote, compare, 99))?;
            check_eq!(old(done, Opcode::CompSwap)?, 3);
            check_eq!((word(&region, 0)?, word(&region, 8)?), (is, 7));
        }
        Ok(())
    }

    #[test]
    fn atomic_is_aligned() -> Result {
        let (null, inbox) = (Null::new()?, Inbox::new()?);
        let (region, remote) = words(&null, atomic)?;
        for offset in 1..8 {
            let message = null.env.message(&inbox, &[0; 8])?;
            let posted = null.a.post_send(message, |m| {
                let old = m.buf.whole_mut();
                Ok(AtomicWr::fetch_add(old, at(remote, offset), 1))
            });
            check_err!(posted, EINVAL);
        }
        null.a.drain(&null.env.cx)?;
        check_eq!((inbox.len(), inbox.dropped()), (0, 7));
        check_eq!((word(&region, 0)?, word(&region, 8)?), (3, 7));
        Ok(())
    }

    #[test]
    fn atomic_is_an_access_of_its_own() -> Result {
        let null = Null::new()?;
        let (region, remote) = words(&null, |region| both(region))?;
        let done = run(&null, |old| AtomicWr::fetch_add(old, remote, 1))?;
        check_eq!(done.status(), Some(wc::Status::REM_ACCESS_ERR));
        check_eq!(word(&region, 0)?, 3);
        Ok(())
    }

    #[test]
    fn atomic_beyond_the_end_is_refused() -> Result {
        let null = Null::new()?;
        let (_region, remote) = words(&null, atomic)?;
        let done = run(&null, |old| AtomicWr::cmp_swap(old, at(remote, 16), 0, 1))?;
        check_eq!(done.status(), Some(wc::Status::REM_ACCESS_ERR));
        Ok(())
    }

    #[test]
    fn failed_atomic_says_nothing_of_the_memory() -> Result {
        let null = Null::new()?;
        let (_region, remote) = words(&null, atomic)?;
        null.inject_status(wc::Status::REM_OP_ERR.as_raw(), 1)?;
        let done = run(&null, |old| AtomicWr::fetch_add(old, remote, 1))?;
        check_eq!(done.status(), Some(wc::Status::REM_OP_ERR));
        Ok(())
    }

    #[test]
    fn invalidation_that_fails_proves_nothing() -> Result {
        let null = Null::new()?;
        for status in [
            wc::Status::LOC_QP_OP_ERR,
            wc::Status::WR_FLUSH_ERR,
            wc::Status::GENERAL_ERR,
        ] {
            let (region, outcome, _) = carry(&null, alone(&null)?, false)?;
            check_eq!(outcome, Ok(Opcode::RegMr));
            fail_next(&null, status)?;
            let (region, outcome, idle) = carry(&null, region, true)?;
            check_eq!((outcome, idle), (Err(status), false));
            check!(region.into_parts().is_err());
        }
        Ok(())
    }

    #[test]
    fn invalidation_can_be_tried_again() -> Result {
        let null = Null::new()?;
        let (region, ..) = carry(&null, alone(&null)?, false)?;
        fail_next(&null, wc::Status::RETRY_EXC_ERR)?;
        let (region, ..) = carry(&null, region, true)?;
        // The device has forgotten the key, so that it can fail only. What it reports then is no
        // proof.
        let (region, outcome, idle) = carry(&null, region, true)?;
        check_eq!((outcome, idle), (Err(wc::Status::LOC_QP_OP_ERR), false));
        drop(region);
        Ok(())
    }

    #[test]
    fn refused_invalidation_is_undone() -> Result {
        let null = Null::new()?;
        let (mut region, ..) = carry(&null, alone(&null)?, false)?;
        let num = null.b.num();
        for _ in 0..3 {
            null.dev
                .inject_qp(num, Injection::Refuse { after: 0, errno: 5 })?;
            let (carrier, carried) = Carried::new(region)?;
            let Err(e) = null.b.post_send(carrier, |c| Ok(InvWr::new(&c.region))) else {
                return Err(crate::check::fail("it was posted"));
            };
            check_eq!(e.error(), EIO);
            check!(carried.take().is_none());
            region = KBox::into_inner(Pin::into_inner(e.owner.ok_or(EIO)?)).region;
            check!(!region.is_idle());
        }
        let (region, outcome, idle) = carry(&null, region, true)?;
        check_eq!((outcome, idle), (Ok(Opcode::LocalInv), true));
        check!(region.into_parts().is_ok());
        Ok(())
    }

    #[test]
    fn refused_registration_is_undone() -> Result {
        let null = Null::new()?;
        let mut region = alone(&null)?;
        let num = null.b.num();
        for _ in 0..3 {
            null.dev
                .inject_qp(num, Injection::Refuse { after: 0, errno: 5 })?;
            let (carrier, _) = Carried::new(region)?;
            let Err(e) = null.b.post_send(carrier, |c| Ok(both(&c.region))) else {
                return Err(crate::check::fail("it was posted"));
            };
            region = KBox::into_inner(Pin::into_inner(e.owner.ok_or(EIO)?)).region;
            check!(region.is_idle());
        }
        check!(region.into_parts().is_ok());
        Ok(())
    }

    #[test]
    fn registration_that_fails_is_not_taken_for_idle() -> Result {
        let null = Null::new()?;
        for status in [
            wc::Status::LOC_QP_OP_ERR,
            wc::Status::WR_FLUSH_ERR,
            wc::Status::GENERAL_ERR,
        ] {
            fail_next(&null, status)?;
            let (region, outcome, idle) = carry(&null, alone(&null)?, false)?;
            check_eq!((outcome, idle), (Err(status), false));
            check!(region.into_parts().is_err());
        }
        Ok(())
    }
}
