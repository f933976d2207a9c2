// SPDX-License-Identifier: GPL-2.0

//! The callbacks of invalidations: how callers that poll recognise them, and how they end regions
//! that a single owner has.

use crate::{
    check::fail,
    fixture::{
        both,
        wait,
        Null, //
    }, //
};
use kernel::prelude::*;
use rdma::prelude::*;

type Whole = Region<Bidirectional>;

type Ours = SharedRegion<Bidirectional>;

/// Has a region, or a part in one.
#[derive(HasCqe)]
struct Own<R: Send + Unpin + 'static> {
    cqe: Cqe<Self>,
    region: R,
}

impl<R: Send + Unpin + 'static> CqeHandler for Own<R> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
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

fn own<R: Send + Unpin + 'static>(region: R) -> Result<Pin<KBox<Own<R>>>> {
    let cqe = Cqe::new();
    Ok(KBox::pin(Own { cqe, region }, GFP_KERNEL)?)
}

/// Polls one completion and gives it to `look`.
#[track_caller]
fn polled<T>(null: &Null<Direct>, look: impl FnOnce(cq::Completion<'_>) -> Result<T>) -> Result<T> {
    let mut batch = WcArray::<1>::new();
    wait(|| null.cq.poll(&mut batch).is_ok_and(|n| n == 1))?;
    let completion = batch.completions().next().ok_or(EIO)?;
    look(completion)
}

/// Registers a region that is a part of its owner, with side `a`.
fn register(null: &Null<Direct>, owner: Pin<KBox<Own<Whole>>>) -> Result<Pin<KBox<Own<Whole>>>> {
    null.a.post_send(owner, |o| Ok(both(&o.region)))?;
    polled(null, |completion| {
        // It is no invalidation.
        let Err(completion) = completion.take_inv::<Own<Whole>, 0>() else {
            return Err(fail("a registration was taken for an invalidation"));
        };
        let (owner, wc) = completion.take::<Own<Whole>, 0>().map_err(|_| EIO)?;
        wc.result()?;
        Ok(owner)
    })
}

/// Invalidates a region that is a part of its owner, with side `a`, and returns whether that was
/// successful.
fn invalidate(
    null: &Null<Direct>,
    owner: Pin<KBox<Own<Whole>>>,
) -> Result<(Pin<KBox<Own<Whole>>>, bool)> {
    null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
    polled(null, |completion| {
        let (owner, wc) = completion.take_inv::<Own<Whole>, 0>().map_err(|_| EIO)?;
        Ok((owner, wc.result().is_ok()))
    })
}

#[kunit_tests(rdma_mr_ended)]
mod tests {
    use super::*;

    #[test]
    fn invalidation_is_taken() -> Result {
        let null = Null::new()?;
        let mut owner = own(whole(&null)?)?;
        for _ in 0..3 {
            owner = register(&null, owner)?;
            check!(!owner.region.is_idle());
            let ok;
            (owner, ok) = invalidate(&null, owner)?;
            check!(ok && owner.region.is_idle());
        }
        Ok(())
    }

    #[test]
    fn exclusive_region_may_lie_behind_a_box() -> Result {
        let null = Null::<Direct>::new()?;
        let mut owner = own(KBox::new(whole(&null)?, GFP_KERNEL)?)?;
        for _ in 0..3 {
            null.a.post_send(owner, |o| Ok(both(&o.region)))?;
            owner = polled(&null, |completion| {
                let (owner, wc) = completion.take::<Own<KBox<Whole>>, 0>().map_err(|_| EIO)?;
                wc.result()?;
                Ok(owner)
            })?;
            check!(!owner.region.is_idle());
            null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
            owner = polled(&null, |completion| {
                let (owner, wc) = completion
                    .take_inv::<Own<KBox<Whole>>, 0>()
                    .map_err(|_| EIO)?;
                wc.result()?;
                Ok(owner)
            })?;
            check!(owner.region.is_idle());
        }
        Ok(())
    }

    #[test]
    fn registered_region_may_become_shared() -> Result {
        let null = Null::new()?;
        let owner = register(&null, own(whole(&null)?)?)?;
        let region = KBox::into_inner(Pin::into_inner(owner)).region;
        let region = Arc::new(region.into_shared(), GFP_KERNEL)?;
        check!(!region.is_idle());
        let again = null
            .a
            .post_send(own(region.clone())?, |o| Ok(both(&o.region)));
        check_err!(again, EBUSY);
        null.a
            .post_send(own(region.clone())?, |o| Ok(InvWr::new(&o.region)))?;
        polled(&null, |completion| Ok(drop(completion)))?;
        check!(region.is_idle());
        Ok(())
    }

    #[test]
    fn failed_invalidation_leaves_it_registered() -> Result {
        let null = Null::new()?;
        let owner = register(&null, own(whole(&null)?)?)?;
        null.inject_fatal(wc::Status::LOC_QP_OP_ERR)?;
        let (owner, ok) = invalidate(&null, owner)?;
        check!(!ok && !owner.region.is_idle());
        // This one is flushed.
        let (owner, ok) = invalidate(&null, owner)?;
        check!(!ok && !owner.region.is_idle());
        Ok(())
    }

    #[test]
    fn invalidation_of_another_type_is_not_taken() -> Result {
        let null = Null::new()?;
        let region = Arc::new(whole(&null)?.into_shared(), GFP_KERNEL)?;
        null.a
            .post_send(own(region.clone())?, |o| Ok(both(&o.region)))?;
        polled(&null, |completion| Ok(drop(completion)))?;
        let alone = register(&null, own(whole(&null)?)?)?;
        null.a.post_send(alone, |o| Ok(InvWr::new(&o.region)))?;
        polled(&null, |completion| {
            let completion = match completion.take::<Own<Whole>, 0>() {
                Err(completion) => completion,
                Ok(_) => return Err(fail("its own callback has not completed")),
            };
            match completion.take_inv::<Own<Arc<Ours>>, 0>() {
                Err(_) => Ok(()),
                Ok(_) => Err(fail("an owner of another type")),
            }
        })?;
        null.a
            .post_send(own(region.clone())?, |o| Ok(InvWr::new(&o.region)))?;
        polled(&null, |completion| {
            match completion.take_inv::<Own<Whole>, 0>() {
                // Its handler ends it.
                Err(completion) => Ok(drop(completion)),
                Ok(_) => Err(fail("an owner of another type")),
            }
        })?;
        check!(region.is_idle());
        Ok(())
    }

    #[test]
    fn invalidation_of_a_shared_region_is_taken() -> Result {
        let null = Null::new()?;
        let region = Arc::new(whole(&null)?.into_shared(), GFP_KERNEL)?;
        let ours = Counted {
            cqe: Cqe::new(),
            region: region.clone(),
        };
        let ours = Arc::new(ours, GFP_KERNEL)?;
        for _ in 0..2 {
            null.a
                .post_send(own(region.clone())?, |o| Ok(both(&o.region)))?;
            polled(&null, |completion| Ok(drop(completion)))?;
            null.a
                .post_send(own(region.clone())?, |o| Ok(InvWr::new(&o.region)))?;
            polled(&null, |completion| {
                let (owner, wc) = completion
                    .take_inv::<Own<Arc<Ours>>, 0>()
                    .map_err(|_| EIO)?;
                wc.result()?;
                check!(owner.region.is_idle());
                Ok(())
            })?;

            null.a.post_send(ours.clone(), |o| Ok(both(&o.region)))?;
            polled(&null, |completion| Ok(drop(completion)))?;
            null.a
                .post_send(ours.clone(), |o| Ok(InvWr::new(&o.region)))?;
            polled(&null, |completion| {
                let (owner, wc) = completion.take_inv::<Counted, 0>().map_err(|_| EIO)?;
                wc.result()?;
                check!(owner.region.is_idle());
                Ok(())
            })?;
        }
        null.a.post_send(ours.clone(), |o| Ok(both(&o.region)))?;
        polled(&null, |completion| Ok(drop(completion)))?;
        null.inject_fatal(wc::Status::LOC_QP_OP_ERR)?;
        null.a
            .post_send(ours.clone(), |o| Ok(InvWr::new(&o.region)))?;
        polled(&null, |completion| {
            let (owner, wc) = completion.take_inv::<Counted, 0>().map_err(|_| EIO)?;
            check!(wc.result().is_err() && !owner.region.is_idle());
            Ok(())
        })
    }

    #[test]
    fn another_qp_does_not_invalidate() -> Result {
        let null = Null::new()?;
        let mut owner = register(&null, own(whole(&null)?)?)?;
        for _ in 0..2 {
            let Err(e) = null.b.post_send(owner, |o| Ok(InvWr::new(&o.region))) else {
                return Err(fail("it was invalidated by another QP"));
            };
            check_eq!(e.error(), EINVAL);
            owner = e.owner.ok_or(EIO)?;
            check!(!owner.region.is_idle());
        }
        let (owner, ok) = invalidate(&null, owner)?;
        check!(ok && owner.region.is_idle());
        // Now the other one may.
        null.b.post_send(owner, |o| Ok(both(&o.region)))?;
        let owner = polled(&null, |completion| {
            Ok(completion.take::<Own<Whole>, 0>().map_err(|_| EIO)?.0)
        })?;
        let Err(e) = null.a.post_send(owner, |o| Ok(InvWr::new(&o.region))) else {
            return Err(fail("it was invalidated by the QP before"));
        };
        check_eq!(e.error(), EINVAL);
        null.b
            .post_send(e.owner.ok_or(EIO)?, |o| Ok(InvWr::new(&o.region)))?;
        polled(&null, |completion| {
            let (owner, _) = completion.take_inv::<Own<Whole>, 0>().map_err(|_| EIO)?;
            check!(owner.region.is_idle());
            Ok(())
        })
    }

    #[test]
    fn region_of_another_pd_stays_idle() -> Result {
        let null = Null::<Direct>::new()?;
        let pd = Pd::alloc(&null.env.dev, &null.env.cx)?;
        let buf = Buf::<Bidirectional>::alloc(&pd, 8, &null.env.cx)?;
        let mut owner = own(Region::new(buf, &null.env.cx)?)?;
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
            check_err!(
                null.a
                    .post_send(own(region.clone())?, |o| Ok(both(&o.region))),
                EINVAL
            );
            check!(region.is_idle());
        }
        Ok(())
    }
}
