// SPDX-License-Identifier: GPL-2.0

//! Local invalidation, registration again, and taking a region apart.

use crate::fixture::{
    both,
    denied,
    invalidate,
    readable,
    recv,
    register,
    send,
    write,
    write_flushed,
    Carried,
    Env,
    Inbox,
    Link,
    OnDone,
    Polled, //
};
use kernel::prelude::*;
use rdma::{mr::Memory, prelude::*};

type Whole = Region<Bidirectional>;
type Ours = SharedRegion<Bidirectional>;

fn region(env: &Env, len: usize) -> Result<Whole> {
    Region::new(Buf::alloc(&env.pd, len, &env.cx)?, &env.cx)
}

/// Takes a region apart that is idle.
#[track_caller]
fn parts<D: rdma::dma::Direction, M: Memory<D>>(region: Region<D, M>) -> Result<(Mr, M)> {
    region
        .into_parts()
        .map_err(|_| crate::check::fail("the region is not idle"))
}

/// Registers, invalidates and registers again.
fn cycle<C: Polled>() -> Result {
    let link = Link::<C>::new()?;
    let (region, first) = register(&link, region(&link.env, 100)?, both)?;
    check!(!region.is_idle());
    let (region, outcome) = invalidate(&link, region)?;
    check_eq!(outcome, Ok(Opcode::LocalInv));
    check!(region.is_idle());
    let (region, second) = register(&link, region, both)?;
    check!(first.rkey != second.rkey);
    check_eq!(first.addr, second.addr);
    write(&link, second, b"again")?.ok()?;
    let mut bytes = [0; 5];
    link.wait(|| region.read(0, &mut bytes).is_ok() && bytes == *b"again")?;
    // The first key is no longer valid.
    denied(&link, &write(&link, first, b"never")?)?;
    region.read(0, &mut bytes)?;
    check_eq!(&bytes, b"again");
    Ok(())
}

/// An invalidation that waits to be polled, of a region that others share.
#[derive(HasCqe)]
struct Shared {
    cqe: Cqe<Self>,
    region: Arc<Ours>,
}

impl Shared {
    fn new(region: &Arc<Ours>) -> Result<Pin<KBox<Self>>> {
        let this = Self {
            cqe: Cqe::new(),
            region: region.clone(),
        };
        Ok(KBox::pin(this, GFP_KERNEL)?)
    }
}

impl CqeHandler for Shared {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

/// Posts sends to side `b` until its send queue is full: nothing is there to receive them.
fn fill(link: &Link<Direct>, inbox: &Arc<Inbox>) -> Result<usize> {
    let mut count = 0;
    while send(&link.b.qp, link.env.message(inbox, b"x")?).is_ok() {
        count += 1;
    }
    Ok(count)
}

#[kunit_tests(rdma_mr_inv)]
mod tests {
    use super::*;

    #[test]
    fn cycle_direct() -> Result {
        cycle::<Direct>()
    }

    #[test]
    fn cycle_softirq() -> Result {
        cycle::<Softirq>()
    }

    #[test]
    fn cycle_workqueue() -> Result {
        cycle::<Workqueue>()
    }

    #[test]
    fn cycle_unbound_workqueue() -> Result {
        cycle::<UnboundWorkqueue>()
    }

    #[test]
    fn new_region_is_idle() -> Result {
        let env = Env::new()?;
        let region = region(&env, 10)?;
        check!(region.is_idle());
        region.write(0, b"0123456789")?;
        let (_, mut buf) = parts(region)?;
        check_eq!(&buf.cpu()[..], b"0123456789");
        Ok(())
    }

    #[test]
    fn registered_region_stays_whole() -> Result {
        let link = Link::<Softirq>::new()?;
        let (region, remote) = register(&link, region(&link.env, 10)?, both)?;
        let Err(region) = region.into_parts() else {
            return Err(crate::check::fail("a registered region came apart"));
        };
        write_flushed(&link, remote, b"works")?;
        let (region, _) = invalidate(&link, region)?;
        let (_, mut buf) = parts(region)?;
        check_eq!(&buf.cpu()[..5], b"works");
        Ok(())
    }

    #[test]
    fn key_ends_with_the_invalidation() -> Result {
        let link = Link::<Softirq>::new()?;
        let (region, remote) = register(&link, region(&link.env, 10)?, both)?;
        let (region, _) = invalidate(&link, region)?;
        denied(&link, &write(&link, remote, b"never")?)?;
        check!(parts(region)?.1.cpu().iter().all(|byte| *byte == 0));
        Ok(())
    }

    #[test]
    fn three_hundred_registrations() -> Result {
        // Keys come again after 256.
        let link = Link::<Softirq>::new()?;
        let mut region = region(&link.env, 8)?;
        for i in 0..300u64 {
            let (registered, remote) = register(&link, region, both)?;
            if i % 50 == 0 {
                write_flushed(&link, remote, &i.to_le_bytes())?;
            }
            region = invalidate(&link, registered)?.0;
        }
        let mut last = [0; 8];
        region.read(0, &mut last)?;
        check_eq!(u64::from_le_bytes(last), 250);
        Ok(())
    }

    #[test]
    fn idle_region_is_not_invalidated() -> Result {
        let link = Link::<Softirq>::new()?;
        let (carrier, _) = Carried::new(region(&link.env, 8)?)?;
        match link.b.qp.post_send(carrier, |c| Ok(InvWr::new(&c.region))) {
            Ok(()) => Err(crate::check::fail("an idle region was invalidated")),
            Err(e) => {
                check_eq!(e.error(), EBUSY);
                check!(e.owner.ok_or(EIO)?.region.is_idle());
                Ok(())
            }
        }
    }

    #[test]
    fn region_is_busy_until_the_completion() -> Result {
        let link = Link::<Direct>::new()?;
        let (region, _) = register(&link, region(&link.env, 8)?, both)?;
        let region = Arc::new(region.into_shared(), GFP_KERNEL)?;
        let qp = &link.b.qp;
        qp.post_send(Shared::new(&region)?, |s| Ok(InvWr::new(&s.region)))?;
        check!(!region.is_idle());
        for _ in 0..2 {
            let twice = qp.post_send(Shared::new(&region)?, |s| Ok(InvWr::new(&s.region)));
            check_err!(twice, EBUSY);
            let again = qp.post_send(Shared::new(&region)?, |s| Ok(RegWr::remote_read(&s.region)));
            check_err!(again, EBUSY);
        }
        link.wait(|| region.is_idle())
    }

    #[test]
    fn another_qp_does_not_invalidate() -> Result {
        let link = Link::<Softirq>::new()?;
        let (region, remote) = register(&link, region(&link.env, 8)?, both)?;
        let region = Arc::new(region.into_shared(), GFP_KERNEL)?;
        for _ in 0..2 {
            let posted = link
                .a
                .qp
                .post_send(Shared::new(&region)?, |s| Ok(InvWr::new(&s.region)));
            check_err!(posted, EINVAL);
        }
        write(&link, remote, b"valid")?.ok()?;
        Ok(())
    }

    #[test]
    fn flushed_invalidation_proves_nothing() -> Result {
        let link = Link::<Softirq>::new()?;
        let (region, _) = register(&link, region(&link.env, 8)?, both)?;
        link.b.qp.drain(&link.env.cx)?;
        for _ in 0..2 {
            let (carrier, carried) = Carried::new(self::region(&link.env, 8)?)?;
            // The registration too is flushed, and may have been done for all one knows.
            link.b.qp.post_send(carrier, |c| Ok(readable(&c.region)))?;
            let (region, outcome) = carried.wait(&link)?;
            check_eq!(outcome, Err(wc::Status::WR_FLUSH_ERR));
            check!(!region.is_idle());
        }
        let (region, outcome) = invalidate(&link, region)?;
        check_eq!(outcome, Err(wc::Status::WR_FLUSH_ERR));
        check!(region.into_parts().is_err());
        Ok(())
    }

    #[test]
    fn refused_posts_leave_the_region_as_it_was() -> Result {
        not_on_iwarp!(c"no send waits for a receive");
        let patient = cm::ConnParam {
            rnr_retry_count: 7,
            ..Default::default()
        };
        let link = Link::<Direct>::with(&Caps::new(8, 8), &patient)?;
        let (sent, received) = (Inbox::new()?, Inbox::new()?);
        let (registered, _) = register(&link, region(&link.env, 8)?, both)?;
        let registered = Arc::new(registered.into_shared(), GFP_KERNEL)?;
        let idle = link.env.region(8)?;
        let count = fill(&link, &sent)?;
        let qp = &link.b.qp;
        let posted = qp.post_send(Shared::new(&registered)?, |s| Ok(InvWr::new(&s.region)));
        check_err!(posted, ENOMEM);
        let posted = qp.post_send(Shared::new(&idle)?, |s| Ok(both(&s.region)));
        check_err!(posted, ENOMEM);
        check!(idle.is_idle());

        for _ in 0..count {
            recv(&link.a.qp, link.env.message(&received, b"x")?)?;
        }
        link.wait(|| sent.len() == count)?;
        qp.post_send(Shared::new(&registered)?, |s| Ok(InvWr::new(&s.region)))?;
        qp.post_send(Shared::new(&idle)?, |s| Ok(both(&s.region)))?;
        link.wait(|| registered.is_idle())?;
        check!(!idle.is_idle());
        Ok(())
    }

    #[test]
    fn parts_of_a_region() -> Result {
        let link = Link::<Softirq>::new()?;
        let (region, remote) = register(&link, region(&link.env, 8)?, both)?;
        let tail = Remote {
            addr: remote.addr + 5,
            ..remote
        };
        write_flushed(&link, tail, b"end")?;
        let mut bytes = [1; 8];
        region.read(0, &mut bytes)?;
        check_eq!(&bytes, b"\0\0\0\0\0end");
        Ok(())
    }

    #[test]
    fn mr_maps_other_memory() -> Result {
        let link = Link::<Softirq>::new()?;
        let (mut mr, mut buf) = parts(region(&link.env, 3000)?)?;
        for i in 1..4u8 {
            let region = Region::map(mr, buf)?;
            let (region, remote) = register(&link, region, both)?;
            write_flushed(&link, remote, &[i; 3000])?;
            let mut written;
            (mr, written) = parts(invalidate(&link, region)?.0)?;
            check!(written.cpu().iter().all(|byte| *byte == i));
            buf = Buf::alloc(&link.env.pd, 3000, &link.env.cx)?;
        }
        Ok(())
    }

    #[test]
    fn what_is_not_mapped_comes_back() -> Result {
        let (env, foreign) = (Env::new()?, Env::new()?);
        let mr = Mr::alloc(&env.pd, 1, &env.cx)?;
        let large = SgBuf::<Bidirectional>::alloc(&env.pd, 5000, &env.cx)?;
        let Err(e) = Region::map(mr, large) else {
            return Err(crate::check::fail("two pages were mapped by one"));
        };
        check_eq!(e.error, EINVAL);
        let other = SgBuf::<Bidirectional>::alloc(&foreign.pd, 100, &env.cx)?;
        check_err!(Region::map(e.mr, other), EINVAL);
        check_err!(Mr::alloc(&env.pd, 0, &env.cx), EINVAL);
        let most = env.dev.attrs().max_fast_reg_page_list_len;
        check_err!(Mr::alloc(&env.pd, most + 1, &env.cx), EINVAL);
        Ok(())
    }

    #[test]
    fn dropped_in_flight() -> Result {
        // The owner comes back in the drain, and the region ends after that.
        let link = Link::<Direct>::new()?;
        let (region, _) = register(&link, region(&link.env, 8)?, both)?;
        let region = Arc::new(region.into_shared(), GFP_KERNEL)?;
        let qp = &link.b.qp;
        qp.post_send(Shared::new(&region)?, |s| Ok(InvWr::new(&s.region)))?;
        drop(region);
        qp.post_send(OnDone::<rdma::context::Atomic, _>::new(|_, _| {})?, |_| {
            Ok(SendWr::send([]))
        })?;
        qp.drain(&link.env.cx)
    }
}
