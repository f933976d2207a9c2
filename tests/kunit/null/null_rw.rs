// SPDX-License-Identifier: GPL-2.0

//! Transfers by `rdma_rw` that are prepared and not posted, or posted in part, of owners that
//! others have, too: what a drain has proved to be out of use is ended by it.

use crate::{
    check::fail,
    fixture::{
        wait,
        CountDrop,
        Counter,
        NullEnv, //
    }, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    prelude::*,
    qp::{
        Chain,
        Event,
        Events,
        InitAttr,
        SendRing, //
    },
    rw::{
        Ctx,
        Rw, //
    },
    session::tags::{
        Exchange,
        Tags, //
    },
    srq::{
        Receive,
        Slot,
        Srq, //
    }, //
};
use rdma_null::Injection;

/// Two requests of as many entries as the device has in one.
const LEN: usize = 40 * PAGE_SIZE;
const NOWHERE: Remote = Remote { addr: 0, rkey: 0 };

/// Pages that a table of requests would have, too.
#[derive(HasCqe)]
struct Shared {
    cqe: Cqe<Self>,
    data: Ctx,
    times: Arc<Counter>,
}

impl Shared {
    fn new(times: &Arc<Counter>, cx: &Sleepable) -> Result<Arc<Self>> {
        let this = Self {
            cqe: Cqe::new(),
            data: Ctx::alloc(LEN, cx)?,
            times: times.clone(),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    fn write<'a>(&'a self, cx: &Sleepable) -> Result<Rw<'a>> {
        Ok(Rw::write(&self.data, .., NOWHERE, cx))
    }

    /// As [`Shared::write`], with a range that the crate looks at.
    fn write_range<'a>(&'a self, cx: &Sleepable) -> Result<Rw<'a>> {
        Ok(Rw::write(&self.data, 0..LEN, NOWHERE, cx))
    }
}

impl CqeHandler for Shared {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Arc<Self>, _wc: &Wc, _cx: &context::Atomic) {
        this.times.up();
    }
}

/// How a transfer is made.
type Write = for<'a> fn(&'a Shared, &Sleepable) -> Result<Rw<'a>>;

const CAPS: Caps = Caps {
    send_sge: 32,
    ..Caps::new(4, 4)
};

/// Returns a QP for transfers to no peer.
fn lone(null: &NullEnv) -> Result<Qp<Direct>> {
    let cq = null.env.cq::<Direct>(64)?;
    with_contexts(null, InitAttr::new(&null.env.pd, &cq, &cq, &CAPS))
}

fn with_contexts<C: PollContext>(null: &NullEnv, init: InitAttr<'_, C>) -> Result<Qp<C>> {
    let qp = init.rw_contexts(2, 1).create(&null.env.cx)?;
    null.dev
        .inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    Ok(qp)
}

/// What a QP keeps: a part of it has a context, which is prepared for the QP itself.
struct Part {
    _shared: Arc<Shared>,
    _gone: CountDrop,
}

/// A device, and the context that a part of a QP has.
struct Parts {
    null: NullEnv,
    shared: Arc<Shared>,
    gone: Arc<Counter>,
}

impl Parts {
    fn new() -> Result<Self> {
        let null = NullEnv::new()?;
        Ok(Self {
            shared: Shared::new(&Counter::new()?, &null.env.cx)?,
            null,
            gone: Counter::new()?,
        })
    }

    fn part(&self) -> Part {
        Part {
            _shared: self.shared.clone(),
            _gone: CountDrop(self.gone.clone()),
        }
    }

    /// Prepares the context, and drops all that has the QP: it ends, and the part with it.
    #[track_caller]
    fn end<C: PollContext>(self, qp: Qp<C>) -> Result {
        let Self { null, shared, gone } = self;
        qp.prepare_rw(shared.write(&null.env.cx)?)?;
        drop(shared);
        check_eq!(gone.get(), 0);
        drop(qp);
        wait(|| gone.get() == 1)?;
        check_eq!(null.dev.objects()[1], 0);
        Ok(())
    }
}

impl Exchange for Part {
    type Request = Part;
    type Reply = ();
    type Connection = ();
    type Needs = context::Atomic;
}

impl Events for Part {
    fn event(self: ArcBorrow<'_, Self>, _event: Event, _qp_num: u32, _cx: &context::Atomic) {}
}

impl Receive<0> for Part {
    type Needs = context::Atomic;

    fn recv(&self) -> RecvWr<'_, 0> {
        RecvWr::new([])
    }

    fn done(_slot: Slot<Self, 0>, _wc: &Wc, _cx: &context::Atomic) {}
}

/// A request with a part.
#[derive(HasCqe)]
struct Sent {
    cqe: Cqe<Self>,
    _part: Part,
}

impl CqeHandler for Sent {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(_this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {}
}

#[kunit_tests(rdma_null_rw)]
mod tests {
    use super::*;

    #[test]
    fn device_that_does_not_say_its_limits() -> Result {
        let (null, times) = (NullEnv::vague()?, Counter::new()?);
        let port = null.env.dev.port(1).ok_or(ENODEV)?;
        check_err!(port.rw_contexts(1), EOPNOTSUPP);
        let shared = Shared::new(&times, &null.env.cx)?;
        let (qp, cx) = (lone(&null)?, &null.env.cx);
        check_err!(qp.post_rw(shared.clone(), |x| x.write(cx)), EINVAL);
        check_err!(qp.post_rw(shared, |x| x.write_range(cx)), EINVAL);
        check_eq!(times.get(), 0);
        Ok(())
    }

    #[test]
    fn shared_transfer_in_part_is_ended_by_the_drain() -> Result {
        in_part_until_the_drain(Shared::write)
    }

    #[test]
    fn range_in_part_is_ended_by_the_drain() -> Result {
        in_part_until_the_drain(Shared::write_range)
    }

    fn in_part_until_the_drain(write: Write) -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp, other) = (&null.env.cx, lone(&null)?, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Refuse { after: 1, errno: 5 })?;
        let Err(e) = qp.post_rw(shared.clone(), |x| write(x, cx)) else {
            return Err(fail("it was posted"));
        };
        check_eq!(e.error(), EIO);
        check!(e.owner.is_none());
        // As long as it may be in use it stays that.
        check_err!(other.post_rw(shared.clone(), |x| x.write(cx)), EBUSY);
        qp.drain(cx)?;
        other.post_rw(shared.clone(), |x| x.write(cx))?;
        other.drain(cx)?;
        check_eq!(times.get(), 1);
        // Not leaked as one whose transfers have not ended.
        qp.destroy(cx)?;
        other.destroy(cx)?;
        check!(Arc::into_unique_or_drop(shared).is_some());
        Ok(())
    }

    /// A driver that names the first request of a list, whichever had no room.
    #[test]
    fn driver_that_names_the_first_may_have_posted_some() -> Result {
        for after in 0..2 {
            let (null, times) = (NullEnv::erdma()?, Counter::new()?);
            let (cx, qp) = (&null.env.cx, lone(&null)?);
            let shared = Shared::new(&times, cx)?;
            null.dev
                .inject_qp(qp.num(), Injection::Refuse { after, errno: 12 })?;
            let Err(e) = qp.post_rw(shared.clone(), |x| x.write(cx)) else {
                return Err(fail("it was posted"));
            };
            check_eq!((e.error(), e.posted()), (ENOMEM, 1));
            check!(e.owner.is_none());
            check_err!(qp.post_rw(shared.clone(), |x| x.write(cx)), EBUSY);
            qp.drain(cx)?;
            check_eq!(times.get(), 0);
            check!(Arc::into_unique_or_drop(shared).is_some());
        }
        Ok(())
    }

    #[test]
    fn transfer_that_is_refused_is_posted_again() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp) = (&null.env.cx, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        let writes: [Write; 2] = [Shared::write, Shared::write_range];
        for write in writes {
            let post = || qp.post_rw(shared.clone(), |x| write(x, cx));
            null.dev
                .inject_qp(qp.num(), Injection::Refuse { after: 0, errno: 5 })?;
            check_err!(post(), EIO);
            post()?;
            qp.drain(cx)?;
        }
        check_eq!(times.get(), 2);
        // Not leaked as one whose transfers have not ended.
        qp.destroy(cx)
    }

    /// The end of the QP takes a transfer back, and the context is prepared for another QP.
    #[test]
    fn end_of_the_qp_takes_back_what_is_prepared() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp, other) = (&null.env.cx, lone(&null)?, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        qp.prepare_rw(shared.write(cx)?)?;
        check_err!(other.prepare_rw(shared.write(cx)?), EBUSY);
        qp.destroy(cx)?;
        other.prepare_rw(shared.write(cx)?)?;
        other.post_rw(shared.clone(), |x| Ok(Rw::prepared(&x.data)))?;
        other.drain(cx)?;
        check_eq!(times.get(), 1);
        // Prepared for one QP after the other, it is taken back by the last.
        let third = lone(&null)?;
        third.prepare_rw(shared.write_range(cx)?)?;
        other.destroy(cx)?;
        third.post_rw(shared.clone(), |x| Ok(Rw::prepared(&x.data)))?;
        third.drain(cx)?;
        third.prepare_rw(shared.write_range(cx)?)?;
        third.destroy(cx)?;
        check!(Arc::into_unique_or_drop(shared).is_some());
        Ok(())
    }

    #[test]
    fn table_with_a_prepared_context_goes_with_the_qp() -> Result {
        let parts = Parts::new()?;
        let (qp, cx) = (lone(&parts.null)?, &parts.null.env.cx);
        Tags::<Part>::new(&qp, (), 1, 0, |_| Ok((parts.part(), ())), cx)?;
        parts.end(qp)
    }

    #[test]
    fn ring_with_a_prepared_context_goes_with_the_qp() -> Result {
        let parts = Parts::new()?;
        let (qp, cx) = (lone(&parts.null)?, &parts.null.env.cx);
        let sent = Sent {
            cqe: Cqe::new(),
            _part: parts.part(),
        };
        let mut ring = SendRing::new(&qp, 4, 2, cx)?;
        ring.post(
            &qp,
            KBox::pin(sent, GFP_KERNEL)?,
            |_, chain: &mut Chain<'_, 1>| chain.push(SendWr::send([])),
        )?;
        drop(ring);
        parts.end(qp)
    }

    #[test]
    fn slot_with_a_prepared_context_goes_with_the_qp() -> Result {
        let parts = Parts::new()?;
        let env = &parts.null.env;
        let cq = env.cq::<Softirq>(64)?;
        let srq = Srq::create(&env.pd, 1, |_| Ok::<_, Error>(parts.part()), &env.cx)?;
        let qp = with_contexts(&parts.null, InitAttr::on_srq(&env.pd, &cq, &srq, &CAPS))?;
        drop(srq);
        parts.end(qp)
    }

    #[test]
    fn own_context_with_a_prepared_one_goes_with_the_qp() -> Result {
        let parts = Parts::new()?;
        let (qp, cx) = (lone(&parts.null)?, &parts.null.env.cx);
        qp.set_context(Arc::new(parts.part(), GFP_KERNEL)?, cx)?;
        parts.end(qp)
    }

    #[test]
    fn events_with_a_prepared_context_go_with_the_qp() -> Result {
        let parts = Parts::new()?;
        let env = &parts.null.env;
        let cq = env.cq::<Direct>(64)?;
        let init = InitAttr::new(&env.pd, &cq, &cq, &CAPS);
        let events = Arc::new(parts.part(), GFP_KERNEL)?;
        let qp = with_contexts(&parts.null, init.events(events))?;
        parts.end(qp)
    }

    /// The CPU's view of the memory keeps its mapping, and so the QP.
    #[test]
    fn view_of_a_prepared_context_keeps_the_qp() -> Result {
        let null = NullEnv::new()?;
        let (cx, qp) = (&null.env.cx, lone(&null)?);
        let mut data = Ctx::<Bidirectional>::alloc(LEN, cx)?;
        qp.prepare_rw(Rw::write(&data, .., NOWHERE, cx))?;
        data.cpu().write(0, &[1])?;
        let mut view = data.cpu();
        drop(qp);
        fsleep(Delta::from_millis(30));
        check_eq!(null.dev.objects()[1], 1);
        view.write(1, &[2])?;
        drop(view);
        wait(|| null.dev.objects()[1] == 0)?;
        let mut bytes = [0; 2];
        data.cpu().read(0, &mut bytes)?;
        check_eq!(bytes, [1, 2]);
        Ok(())
    }

    /// Threads drop or cancel contexts while the QP ends.
    #[test]
    fn contexts_go_while_the_qp_ends() -> Result {
        const CONTEXTS: usize = 16;
        let null = NullEnv::new()?;
        let cx = &null.env.cx;
        for _ in 0..100 {
            let (qp, ended) = (lone(&null)?, Counter::new()?);
            let mut all = KVec::with_capacity(CONTEXTS, GFP_KERNEL)?;
            for _ in 0..CONTEXTS {
                let data = Ctx::<Bidirectional>::alloc(PAGE_SIZE, cx)?;
                qp.prepare_rw(Rw::write(&data, .., NOWHERE, cx))?;
                all.push(data, GFP_KERNEL)?;
            }
            let end = ended.clone();
            null.env.client.spawn(GFP_KERNEL, move |_| {
                for (n, mut data) in all.into_iter().enumerate() {
                    match n % 3 {
                        0 => data.cancel(),
                        1 => drop(data.cpu()),
                        _ => drop(data.take()),
                    }
                }
                end.up();
            })?;
            qp.destroy(cx)?;
            wait(|| ended.get() == 1)?;
        }
        Ok(())
    }

    #[test]
    fn qp_without_contexts_prepares_nothing() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (env, cq) = (&null.env, null.env.cq::<Direct>(64)?);
        let init = InitAttr::new(&env.pd, &cq, &cq, &CAPS).rw_contexts(0, 1);
        let (qp, shared) = (init.create(&env.cx)?, Shared::new(&times, &env.cx)?);
        check_err!(qp.prepare_rw(shared.write(&env.cx)?), EINVAL);
        Ok(())
    }

    #[test]
    fn prepared_transfer_that_is_refused_is_prepared_again() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp) = (&null.env.cx, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Refuse { after: 0, errno: 5 })?;
        qp.prepare_rw(shared.write(cx)?)?;
        let post = || qp.post_rw(shared.clone(), |x| Ok(Rw::prepared(&x.data)));
        check_err!(post(), EIO);
        check_err!(post(), EINVAL);
        qp.prepare_rw(shared.write(cx)?)?;
        post()?;
        qp.drain(cx)?;
        check_eq!(times.get(), 1);
        Ok(())
    }

    /// As `shared_transfer_in_part_is_ended_by_the_drain`, with no drain but the last.
    #[test]
    fn qp_of_a_shared_transfer_in_part_is_destroyed() -> Result {
        let (null, times) = (NullEnv::new()?, Counter::new()?);
        let (cx, qp) = (&null.env.cx, lone(&null)?);
        let shared = Shared::new(&times, cx)?;
        null.dev
            .inject_qp(qp.num(), Injection::Refuse { after: 1, errno: 5 })?;
        check_err!(qp.post_rw(shared.clone(), |x| x.write(cx)), EIO);
        qp.destroy(cx)?;
        check_eq!(times.get(), 0);
        check!(Arc::into_unique_or_drop(shared).is_some());
        Ok(())
    }
}
