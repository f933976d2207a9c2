// SPDX-License-Identifier: GPL-2.0

//! Invalidation by the peer: which completions are proof.

use crate::fixture::{
    both,
    invalidate,
    register,
    wait,
    write,
    Env,
    Inbox,
    Link,
    Null,
    NullEnv,
    OnDone,
    Polled,
    RegOwner, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::SpinLockIrq,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::prelude::*;
use rdma_null::Injection;

/// `IB_WC_SEND`, `IB_WC_RECV`.
const SEND: u32 = 0;
const RECV: u32 = 1 << 7;

type Whole = Region<Bidirectional>;

/// A region that a receive has had, the key that was invalidated, and whether that was proof.
type Said = Arc<SpinLockIrq<Option<(Whole, Option<u32>, bool)>>>;

/// A receive that perhaps ends the registration of a region.
#[derive(HasCqe)]
struct Ends<C: Polled> {
    cqe: Cqe<Self>,
    buf: Buf<FromDevice>,
    region: Whole,
    qp: Qp<C>,
    said: Said,
}

impl<C: Polled> CqeHandler for Ends<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let this = KBox::into_inner(Pin::into_inner(this));
        if let Ok(wc) = wc.result() {
            let proved = this.region.remote_invalidated(&wc, &this.qp);
            let again = this.region.remote_invalidated(&wc, &this.qp);
            if again || proved != this.region.is_idle() {
                pr_err!("FAILED: a completion was proof twice\n");
            }
            *this.said.lock() = Some((this.region, wc.invalidated_rkey(), proved));
        }
    }
}

/// Has side `a` of `link` invalidate a key, and returns whether that was proof for the region.
#[track_caller]
fn end<C: Polled>(link: &Link<C>, region: Whole, rkey: u32) -> Result<(Whole, bool)> {
    let said: Said = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
    let receive = Ends {
        cqe: Cqe::new(),
        buf: Buf::alloc(&link.env.pd, 4, &link.env.cx)?,
        region,
        qp: link.b.qp.clone(),
        said: said.clone(),
    };
    let receive = KBox::pin(receive, GFP_KERNEL)?;
    link.b
        .qp
        .post_recv(receive, |r| Ok(RecvWr::new([r.buf.whole_mut()])))?;
    let sent = Inbox::new()?;
    let message = link.env.message(&sent, b"end")?;
    link.a.qp.post_send(message, |m| {
        Ok(SendWr::send([m.buf.whole()]).invalidating(rkey))
    })?;
    let mut back = None;
    link.wait(|| {
        if let Some(said) = said.lock().take() {
            back = Some(said);
        }
        back.is_some() && sent.len() == 1
    })?;
    sent.pop()?.ok()?;
    let (region, invalidated, proved) = back.ok_or(EINVAL)?;
    check_eq!(invalidated, Some(rkey));
    Ok((region, proved))
}

fn registered<C: Polled>(link: &Link<C>) -> Result<(Whole, Remote)> {
    let region = Region::new(Buf::alloc(&link.env.pd, 8, &link.env.cx)?, &link.env.cx)?;
    register(link, region, both)
}

/// The peer ends the registration, twice; then its key is refused.
fn cycle<C: Polled>() -> Result {
    let link = Link::<C>::new()?;
    let (mut region, mut remote) = registered(&link)?;
    for _ in 0..2 {
        write(&link, remote, b"valid")?.ok()?;
        let proved;
        (region, proved) = end(&link, region, remote.rkey)?;
        check!(proved);
        (region, remote) = register(&link, region, both)?;
    }
    let (region, proved) = end(&link, region, remote.rkey)?;
    check!(proved);
    let refused = write(&link, remote, b"never")?;
    check_eq!(refused.status(), Some(wc::Status::REM_ACCESS_ERR));
    let Ok((_, mut buf)) = region.into_parts() else {
        return Err(crate::check::fail("the region is not idle"));
    };
    check_eq!(&buf.cpu()[..5], b"valid");
    Ok(())
}

/// Registers and invalidates locally, so often.
fn local<C: Polled>(link: &Link<C>, mut region: Whole, times: usize) -> Result<Whole> {
    for _ in 0..times {
        region = invalidate(link, register(link, region, both)?.0)?.0;
    }
    Ok(region)
}

/// A QP of a null device, its peer, and their CQ, which is polled where a test does that only.
#[allow(clippy::type_complexity)]
fn unpolled() -> Result<(NullEnv, Qp<Direct>, Qp<Direct>, Cq<Direct>)> {
    let Null { a, b, cq, env, dev } = Null::<Direct>::new()?;
    Ok((NullEnv { env, dev }, a, b, cq))
}

/// A region whose registration or invalidation is posted.
#[derive(HasCqe)]
struct Posted {
    cqe: Cqe<Self>,
    region: Whole,
    back: Arc<SpinLockIrq<Option<Whole>>>,
}

impl CqeHandler for Posted {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        let Posted { region, back, .. } = KBox::into_inner(Pin::into_inner(this));
        *back.lock() = Some(region);
    }
}

/// Posts a request of a region, and takes its completion, without finding the CQ empty.
fn posted<T>(
    cq: &Cq<Direct>,
    region: Whole,
    post: impl FnOnce(Pin<KBox<Posted>>) -> Result<T>,
) -> Result<(Whole, T)> {
    let back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
    let owner = Posted {
        cqe: Cqe::new(),
        region,
        back: back.clone(),
    };
    let output = post(KBox::pin(owner, GFP_KERNEL)?)?;
    check_eq!(cq.process(16), 1);
    let region = back.lock().take();
    Ok((region.ok_or(ENODATA)?, output))
}

fn register_unpolled(qp: &Qp<Direct>, cq: &Cq<Direct>, region: Whole) -> Result<(Whole, Remote)> {
    posted(cq, region, |owner| {
        Ok(qp.post_send(owner, |o| Ok(both(&o.region)))?)
    })
}

/// Has the peer invalidate a key, and returns whether the completion that `poll` takes was proof.
fn end_unpolled(
    env: &Env,
    qp: &Qp<Direct>,
    peer: &Qp<Direct>,
    region: Whole,
    rkey: u32,
    poll: impl FnOnce() -> Result,
) -> Result<(Whole, bool)> {
    let said: Said = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
    let receive = Ends {
        cqe: Cqe::new(),
        buf: Buf::alloc(&env.pd, 4, &env.cx)?,
        region,
        qp: qp.clone(),
        said: said.clone(),
    };
    let receive = KBox::pin(receive, GFP_KERNEL)?;
    qp.post_recv(receive, |r| Ok(RecvWr::new([r.buf.whole_mut()])))?;
    let message = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    peer.post_send(message, |_| Ok(SendWr::send([]).invalidating(rkey)))?;
    poll()?;
    let (region, _, proved) = said.lock().take().ok_or(ENODATA)?;
    Ok((region, proved))
}

/// The number of MRs that a null device can have: it gives their numbers in turn.
const MRS: usize = 4096;

type Ours = Arc<SharedRegion<Bidirectional>>;

/// Registers a region with side `a`, and does not wait.
fn register_shared<C: PollContext + Provides<context::Atomic>>(
    qp: &Qp<C>,
    region: &Ours,
) -> Result<Remote> {
    Ok(qp.post_send(RegOwner::new(region)?, |o| Ok(both(&o.region)))?)
}

/// Has side `b` invalidate a key, and returns what `handle` does in the handler of the message.
fn invalidated<C: Polled + Provides<Sleepable>>(
    null: &Null<C>,
    rkey: u32,
    handle: impl FnOnce(&wc::Success<'_>, &Sleepable) -> Result<bool> + Unpin + Send + 'static,
) -> Result<bool> {
    let said = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
    let handled = said.clone();
    let handler = OnDone::<Sleepable, _>::new(move |wc, cx| {
        let result = wc.result().map_err(Error::from);
        let result = result.and_then(|wc| handle(&wc, cx));
        *handled.lock() = Some(result);
    })?;
    null.a.post_recv(handler, |_| Ok(RecvWr::new([])))?;
    let message = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    (null.b).post_send(message, |_| Ok(SendWr::send([]).invalidating(rkey)))?;
    wait(|| said.lock().is_some())?;
    let result = said.lock().take();
    result.ok_or(ENODATA)?
}

/// In the handler of a completion, makes an MR with the key that this has invalidated, which was
/// that of an earlier one. The completion must not be proof for it.
fn key_comes_again<C: Polled + Provides<Sleepable>>() -> Result {
    let null = Null::<C>::new()?;
    let early = null.env.region(8)?;
    let remote = register_shared(&null.a, &early)?;
    let (dev, pd, qp) = (null.dev.clone(), null.env.pd.clone(), null.a.clone());
    let proved = invalidated(&null, remote.rkey, move |wc, cx| {
        check_eq!(wc.invalidated_rkey(), Some(remote.rkey));
        drop(early);
        wait(|| dev.objects()[3] == 0)?;
        for _ in 1..MRS {
            Mr::alloc(&pd, 1, cx)?;
        }
        let region: Whole = Region::new(Buf::alloc(&pd, 8, cx)?, cx)?;
        let region = Arc::new(region.into_shared(), GFP_KERNEL)?;
        check_eq!(register_shared(&qp, &region)?.rkey, remote.rkey);
        Ok(region.remote_invalidated(wc, &qp))
    })?;
    check!(!proved);
    Ok(())
}

/// The numbers of MRs that a device tells apart, as far as it knows which are gone.
const PLACES: usize = 4096 / size_of::<usize>();

/// Registers a region for the first time in a handler; after one that may have had its number has
/// gone, if `gone` is set. Then has the peer invalidate it, at once or, after a pause of so many
/// milliseconds, when it is registered again. Returns whether that was proof.
fn first_in_handler<C: Polled + Provides<Sleepable>>(
    gone: bool,
    pause: Option<i64>,
) -> Result<bool> {
    let null = Null::<C>::new()?;
    let early = null.env.region(8)?;
    let remote = register_shared(&null.a, &early)?;
    if gone {
        for _ in 0..PLACES {
            Mr::alloc(&null.env.pd, 1, &null.env.cx)?;
        }
        wait(|| null.dev.objects()[3] == 1)?;
    }
    let region = null.env.region(8)?;
    let key = Arc::pin_init(new_spinlock_irq!(0), GFP_KERNEL)?;
    let (ours, qp, to) = (region.clone(), null.a.clone(), key.clone());
    invalidated(&null, remote.rkey, move |_, _| {
        *to.lock() = register_shared(&qp, &ours)?.rkey;
        Ok(true)
    })?;
    let mut rkey = *key.lock();
    if let Some(ms) = pause {
        let owner = RegOwner::new(&region)?;
        null.a.post_send(owner, |o| Ok(InvWr::new(&o.region)))?;
        wait(|| region.is_idle())?;
        fsleep(Delta::from_millis(ms));
        rkey = register_shared(&null.a, &region)?.rkey;
    }
    let (ours, qp) = (region.clone(), null.a.clone());
    invalidated(&null, rkey, move |wc, _| {
        Ok(ours.remote_invalidated(wc, &qp))
    })
}

#[kunit_tests(rdma_mr_remote)]
mod tests {
    use super::*;

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
    fn cycle_direct() -> Result {
        cycle::<Direct>()
    }

    #[test]
    fn cycle_waited() -> Result {
        cycle::<Waited>()
    }

    /// A completion that was in a CQ when the MR came to it may be of an earlier MR of that key.
    #[test]
    fn direct_cq_is_no_proof_before_it_was_empty() -> Result {
        let (null, qp, peer, cq) = unpolled()?;
        for (empty, proof) in [(0, false), (1, false), (2, true)] {
            let buf = Buf::alloc(&null.env.pd, 8, &null.env.cx)?;
            let mut region = Region::new(buf, &null.env.cx)?;
            // Once is enough for an MR.
            for empty in [empty, 0] {
                let (registered, remote) = register_unpolled(&qp, &cq, region)?;
                for _ in 0..empty {
                    check_eq!(cq.process(16), 0);
                }
                let poll = || {
                    check_eq!(cq.process(16), 2);
                    Ok(())
                };
                let ended = end_unpolled(&null.env, &qp, &peer, registered, remote.rkey, poll)?;
                check_eq!(ended.1, proof);
                region = ended.0;
                if !proof {
                    break;
                }
            }
        }
        Ok(())
    }

    /// A handler may sleep for long, and its completion be of an earlier MR of that key.
    #[test]
    fn completion_of_an_earlier_mr_is_no_proof() -> Result {
        key_comes_again::<Workqueue>()?;
        key_comes_again::<UnboundWorkqueue>()
    }

    /// Where no MR has gone, none had the key before.
    #[test]
    fn first_key_of_a_device_is_proof_while_the_cq_is_polled() -> Result {
        check!(first_in_handler::<Workqueue>(false, None)?);
        check!(!first_in_handler::<Workqueue>(true, None)?);
        Ok(())
    }

    /// The CQ is looked at again while it is not known whether it has something of an MR that is
    /// gone.
    #[test]
    fn later_registration_is_proof_once_the_poller_has_idled() -> Result {
        for ms in 0..100 {
            if first_in_handler::<Workqueue>(true, Some(ms))? {
                return Ok(());
            }
        }
        Err(crate::check::fail("the CQ was not looked at again"))
    }

    /// A completion in an array may be handled at any time.
    #[test]
    fn array_is_no_proof() -> Result {
        let (null, qp, peer, cq) = unpolled()?;
        let region = Region::new(Buf::alloc(&null.env.pd, 8, &null.env.cx)?, &null.env.cx)?;
        let (region, remote) = register_unpolled(&qp, &cq, region)?;
        check_eq!((cq.process(16), cq.process(16)), (0, 0));
        let (region, proved) = end_unpolled(&null.env, &qp, &peer, region, remote.rkey, || {
            let mut array = WcArray::<4>::new();
            check_eq!(cq.poll(&mut array)?, 2);
            Ok(())
        })?;
        check!(!proved && !region.is_idle());
        Ok(())
    }

    /// Some drivers set the flag in the completions of sends, too, where the key is a stale one.
    #[test]
    fn completion_of_a_send_is_no_proof() -> Result {
        // Without the proof of a receive before it, and with that.
        for opcodes in [&[SEND][..], &[RECV, SEND]] {
            let (null, qp, peer, cq) = unpolled()?;
            let mut region = Region::new(Buf::alloc(&null.env.pd, 8, &null.env.cx)?, &null.env.cx)?;
            for opcode in opcodes.iter().copied() {
                let (registered, remote) = register_unpolled(&qp, &cq, region)?;
                check_eq!((cq.process(16), cq.process(16)), (0, 0));
                let injection = Injection::Opcode { opcode, count: 1 };
                null.dev.inject_qp(qp.num(), injection)?;
                let poll = || {
                    check_eq!(cq.process(16), 2);
                    Ok(())
                };
                let ended = end_unpolled(&null.env, &qp, &peer, registered, remote.rkey, poll)?;
                check_eq!(ended.1, opcode == RECV);
                region = ended.0;
            }
            check!(!region.is_idle());
        }
        Ok(())
    }

    #[test]
    fn key_of_another_region_is_no_proof() -> Result {
        let link = Link::<Softirq>::new()?;
        let ((one, _), (other, remote)) = (registered(&link)?, registered(&link)?);
        let (one, proved) = end(&link, one, remote.rkey)?;
        check!(!proved && !one.is_idle() && !other.is_idle());
        Ok(())
    }

    #[test]
    fn another_cq_is_no_proof() -> Result {
        // rxe lets any QP of the device invalidate any key.
        let (link, other) = (Link::<Softirq>::new()?, Link::<Softirq>::new()?);
        let (region, remote) = registered(&link)?;
        let (region, proved) = end(&other, region, remote.rkey)?;
        check!(!proved && !region.is_idle());
        Ok(())
    }

    #[test]
    fn each_proof_is_good_for_the_next_255() -> Result {
        let link = Link::<Softirq>::new()?;
        let buf = Buf::alloc(&link.env.pd, 8, &link.env.cx)?;
        let mut region = Region::new(buf, &link.env.cx)?;
        for (before, proof) in [(1, true), (254, true), (255, false)] {
            let remote;
            region = local(&link, region, before)?;
            (region, remote) = register(&link, region, both)?;
            let proved;
            (region, proved) = end(&link, region, remote.rkey)?;
            check_eq!(proved, proof);
        }
        check!(!region.is_idle());
        Ok(())
    }
}
