// SPDX-License-Identifier: GPL-2.0

//! How invalidations end regions: those that one owner has, and those that several share.

use crate::{
    check::fail,
    fixture::{
        both,
        wait,
        Null, //
    }, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::prelude::*;

type Whole = Region<Bidirectional>;

type Ours = SharedRegion<Bidirectional>;

/// A region that has come back, and whether its request was successful.
type Back<R> = Arc<SpinLockIrq<Option<(R, bool)>>>;

/// Has a region, or a part in one, until its request has completed.
#[derive(HasCqe)]
struct Own<R: Send + Unpin + 'static> {
    cqe: Cqe<Self>,
    region: R,
    back: Back<R>,
}

impl<R: Send + Unpin + 'static> CqeHandler for Own<R> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let Self { region, back, .. } = KBox::into_inner(Pin::into_inner(this));
        *back.lock() = Some((region, wc.result().is_ok()));
    }
}

/// Has a part in a region, and others have it too.
#[derive(HasCqe)]
struct Counted {
    cqe: Cqe<Self>,
    region: Arc<Ours>,
}

impl CqeHandler for Counted {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

fn whole(null: &Null<Direct>) -> Result<Whole> {
    Region::new(Buf::alloc(&null.env.pd, 8, &null.env.cx)?, &null.env.cx)
}

fn ours(null: &Null<Direct>) -> Result<Arc<Ours>> {
    Ok(Arc::new(whole(null)?.into_shared(), GFP_KERNEL)?)
}

/// Returns an owner of a region, and the place to which that comes back.
fn own<R: Send + Unpin + 'static>(region: R) -> Result<(Pin<KBox<Own<R>>>, Back<R>)> {
    let back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
    let own = Own {
        cqe: Cqe::new(),
        region,
        back: back.clone(),
    };
    Ok((KBox::pin(own, GFP_KERNEL)?, back))
}

/// Processes one completion.
#[track_caller]
fn process(null: &Null<Direct>) -> Result {
    wait(|| null.cq.process(1) == 1)
}

/// Processes the completion of a region's request, and returns the region.
#[track_caller]
fn take<R: Unpin>(null: &Null<Direct>, back: &Back<R>) -> Result<(R, bool)> {
    process(null)?;
    let back = back.lock().take();
    back.ok_or_else(|| fail("the region is not back"))
}

/// Registers a region with side `a`.
fn register(null: &Null<Direct>, region: Whole) -> Result<Whole> {
    let (owner, back) = own(region)?;
    null.a.post_send(owner, |o| Ok(both(&o.region)))?;
    let (region, ok) = take(null, &back)?;
    check!(ok && !region.is_idle());
    Ok(region)
}

/// Invalidates a region with side `a`, and returns whether that was successful.
fn invalidate(null: &Null<Direct>, region: Whole) -> Result<(Whole, bool)> {
    let (owner, back) = own(region)?;
    null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
    take(null, &back)
}

/// Registers a region that others have too.
fn register_ours(null: &Null<Direct>, region: &Arc<Ours>) -> Result {
    let (owner, back) = own(region.clone())?;
    null.a.post_send(owner, |o| Ok(both(&o.region)))?;
    let (region, ok) = take(null, &back)?;
    check!(ok && !region.is_idle());
    Ok(())
}

#[kunit_tests(rdma_mr_ended)]
mod tests {
    use super::*;

    #[test]
    fn exclusive_region_is_ended() -> Result {
        let null = Null::new()?;
        let mut region = whole(&null)?;
        for _ in 0..3 {
            region = register(&null, region)?;
            let ok;
            (region, ok) = invalidate(&null, region)?;
            check!(ok && region.is_idle());
        }
        Ok(())
    }

    #[test]
    fn exclusive_region_may_lie_behind_a_box() -> Result {
        let null = Null::<Direct>::new()?;
        let mut region = KBox::new(whole(&null)?, GFP_KERNEL)?;
        for _ in 0..3 {
            let (owner, back) = own(region)?;
            null.a.post_send(owner, |o| Ok(both(&o.region)))?;
            let (registered, ok) = take(&null, &back)?;
            check!(ok && !registered.is_idle());
            let (owner, back) = own(registered)?;
            null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
            let ok;
            (region, ok) = take(&null, &back)?;
            check!(ok && region.is_idle());
        }
        Ok(())
    }

    #[test]
    fn registered_region_may_become_shared() -> Result {
        let null = Null::new()?;
        let region = register(&null, whole(&null)?)?;
        let region = Arc::new(region.into_shared(), GFP_KERNEL)?;
        check!(!region.is_idle());
        let (again, _) = own(region.clone())?;
        check_err!(null.a.post_send(again, |o| Ok(both(&o.region))), EBUSY);
        let (owner, _) = own(region.clone())?;
        null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
        process(&null)?;
        check!(region.is_idle());
        Ok(())
    }

    #[test]
    fn failed_invalidation_leaves_it_registered() -> Result {
        let null = Null::new()?;
        let region = register(&null, whole(&null)?)?;
        null.inject_fatal(wc::Status::LOC_QP_OP_ERR)?;
        let (region, ok) = invalidate(&null, region)?;
        check!(!ok && !region.is_idle());
        // This one is flushed.
        let (region, ok) = invalidate(&null, region)?;
        check!(!ok && !region.is_idle());
        Ok(())
    }

    /// It completes to the callback of the MR, which calls the owner's handler.
    #[test]
    fn polled_invalidation_is_dispatched() -> Result {
        let null = Null::new()?;
        let (owner, back) = own(register(&null, whole(&null)?)?)?;
        null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
        let mut batch = WcArray::<1>::new();
        wait(|| null.cq.poll(&mut batch).is_ok_and(|n| n == 1))?;
        let completion = batch.completions().next().ok_or(EIO)?;
        match completion.take::<Own<Whole>, 0>() {
            Err(completion) => completion.dispatch(),
            Ok(_) => return Err(fail("its own callback has not completed")),
        }
        let (region, ok) = back.lock().take().ok_or(EIO)?;
        check!(ok && region.is_idle());
        Ok(())
    }

    #[test]
    fn shared_region_is_ended() -> Result {
        let null = Null::new()?;
        let region = ours(&null)?;
        let counted = Counted {
            cqe: Cqe::new(),
            region: region.clone(),
        };
        let counted = Arc::new(counted, GFP_KERNEL)?;
        for _ in 0..2 {
            register_ours(&null, &region)?;
            let (owner, back) = own(region.clone())?;
            null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
            let (same, ok) = take(&null, &back)?;
            check!(ok && same.is_idle());

            let qp = &null.a;
            qp.post_send(counted.clone(), |o| Ok(both(&o.region)))?;
            process(&null)?;
            check!(!region.is_idle());
            qp.post_send(counted.clone(), |o| Ok(InvWr::new(&o.region)))?;
            process(&null)?;
            check!(region.is_idle());
        }
        register_ours(&null, &region)?;
        null.inject_fatal(wc::Status::LOC_QP_OP_ERR)?;
        (null.a).post_send(counted, |o| Ok(InvWr::new(&o.region)))?;
        process(&null)?;
        check!(!region.is_idle());
        Ok(())
    }

    #[test]
    fn another_qp_does_not_invalidate() -> Result {
        let null = Null::new()?;
        let (mut owner, back) = own(register(&null, whole(&null)?)?)?;
        for _ in 0..2 {
            let Err(e) = null.b.post_send(owner, |o| Ok(InvWr::new(&o.region))) else {
                return Err(fail("it was invalidated by another QP"));
            };
            check_eq!(e.error(), EINVAL);
            owner = e.owner.ok_or(EIO)?;
            check!(!owner.region.is_idle());
        }
        null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
        let (region, ok) = take(&null, &back)?;
        check!(ok && region.is_idle());
        // Now the other one may.
        let (owner, back) = own(region)?;
        null.b.post_send(owner, |o| Ok(both(&o.region)))?;
        let (owner, back) = own(take(&null, &back)?.0)?;
        let Err(e) = null.a.post_send(owner, |o| Ok(InvWr::new(&o.region))) else {
            return Err(fail("it was invalidated by the QP before"));
        };
        check_eq!(e.error(), EINVAL);
        let owner = e.owner.ok_or(EIO)?;
        null.b.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
        let (region, ok) = take(&null, &back)?;
        check!(ok && region.is_idle());
        Ok(())
    }

    #[test]
    fn region_of_another_pd_stays_idle() -> Result {
        let null = Null::<Direct>::new()?;
        let pd = Pd::alloc(&null.env.dev, &null.env.cx)?;
        let buf = Buf::<Bidirectional>::alloc(&pd, 8, &null.env.cx)?;
        let (mut owner, _) = own(Region::new(buf, &null.env.cx)?)?;
        for _ in 0..2 {
            let Err(e) = null.a.post_send(owner, |o| Ok(both(&o.region))) else {
                return Err(fail("it was registered through another PD"));
            };
            check_eq!(e.error(), EINVAL);
            owner = e.owner.ok_or(EIO)?;
            check!(owner.region.is_idle());
        }
        let region = KBox::into_inner(Pin::into_inner(owner)).region;
        let region = Arc::new(region.into_shared(), GFP_KERNEL)?;
        for _ in 0..2 {
            let (owner, _) = own(region.clone())?;
            check_err!(null.a.post_send(owner, |o| Ok(both(&o.region))), EINVAL);
            check!(region.is_idle());
        }
        Ok(())
    }
}
