// SPDX-License-Identifier: GPL-2.0

//! A value that the handlers of one CQ share without a lock, and handlers that are none of it.

use crate::fixture::{
    both,
    wait,
    Counter,
    NullEnv,
    OnDone,
    Polls,
    RegOwner, //
};
use kernel::{
    page::PAGE_SIZE,
    prelude::*,
    sync::SetOnce,
    time::{
        delay::fsleep,
        Delta, //
    }, //
};
use rdma::{
    cq::HandlerCell,
    prelude::*,
    qp::InitAttr,
    rw::{
        Ctx,
        Rw, //
    }, //
};
use rdma_null::Injection;

const CAPS: Caps = Caps::new(32, 1);

/// The number of requests of each QP.
const REQUESTS: u32 = 24;

/// Two QPs whose requests go nowhere and complete at once to one CQ, which has a cell.
struct Pair<C: PollContext> {
    qps: [Qp<C>; 2],
    cell: Arc<HandlerCell<u32>>,
    cq: Cq<C>,
    null: NullEnv,
}

/// Makes a QP whose requests go nowhere.
fn lone<C: PollContext>(null: &NullEnv, cq: &Cq<C>) -> Result<Qp<C>> {
    let qp = null.env.raw_qp(cq, &CAPS)?;
    (null.dev).inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    Ok(qp)
}

/// Posts a request that calls a function.
fn post<C: Provides<context::Atomic>>(
    qp: &Qp<C>,
    function: impl FnOnce(&Wc, &context::Atomic) + Unpin + Send + 'static,
) -> Result {
    Ok(qp.post_send(OnDone::new(function)?, |_| Ok(SendWr::send([])))?)
}

impl<C: Polls + Provides<context::Atomic>> Pair<C> {
    fn on(null: NullEnv, cq: Cq<C>) -> Result<Self> {
        Ok(Self {
            qps: [lone(&null, &cq)?, lone(&null, &cq)?],
            cell: Arc::new(HandlerCell::new(&cq, 0)?, GFP_KERNEL)?,
            cq,
            null,
        })
    }

    /// Calls a function in a handler of the first QP, and returns what it has returned.
    fn in_a_handler<T: Copy + Send + Sync + 'static>(
        &self,
        function: impl FnOnce(&HandlerCell<u32>, &Wc) -> T + Unpin + Send + 'static,
    ) -> Result<T> {
        let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
        let (answer, cell) = (said.clone(), self.cell.clone());
        post(&self.qps[0], move |wc, _| {
            answer.populate(function(&cell, wc));
        })?;
        wait(|| {
            C::poll(&self.cq);
            said.copy().is_some()
        })?;
        said.copy().ok_or(EIO)
    }

    /// Handlers of both QPs count, each a little slowly.
    fn count(&self, counted: &Arc<Counter>) -> Result {
        for qp in self.qps.iter().cycle().take(2 * REQUESTS as usize) {
            let (cell, counted) = (self.cell.clone(), counted.clone());
            post(qp, move |wc, _| {
                let add = |count: &mut u32| {
                    let before = *count;
                    core::hint::black_box(&*count);
                    *count = before + 1;
                };
                if cell.with(wc, add).is_ok() {
                    counted.up();
                }
            })?;
        }
        Ok(())
    }
}

fn fixed<C: Polls + FixedContext + Provides<context::Atomic>>() -> Result<Pair<C>> {
    let null = NullEnv::new()?;
    let cq = null.env.cq::<C>(2 * CAPS.entries())?;
    Pair::on(null, cq)
}

/// All handlers of the CQ use the value.
fn shared<C: Polls + Provides<context::Atomic>>(pair: Pair<C>) -> Result {
    let counted = Counter::new()?;
    pair.count(&counted)?;
    wait(|| {
        C::poll(&pair.cq);
        counted.get() == 2 * REQUESTS as i32
    })?;
    check_eq!(
        pair.in_a_handler(|cell, wc| cell.with(wc, |count| *count))?,
        Ok(2 * REQUESTS)
    );
    Ok(())
}

fn of_any_context<C: FixedContext>() -> Result {
    let null = NullEnv::new()?;
    let cq = null.env.cq::<C>(2 * CAPS.entries())?.into_any();
    shared(Pair::on(null, cq)?)
}

/// A function that has the value calls for it again.
fn borrowed_twice<C: Polls + FixedContext + Provides<context::Atomic>>() -> Result {
    let pair = fixed::<C>()?;
    let said = pair.in_a_handler(|cell, wc| {
        let inner = |count: &mut u32| {
            *count += 1;
            cell.with(wc, |count| *count)
        };
        (cell.with(wc, inner), cell.with(wc, |count| *count))
    })?;
    check_eq!(said, (Ok(Err(EBUSY)), Ok(1)));
    Ok(())
}

/// A handler of another CQ.
fn of_another_cq<C: Polls + FixedContext + Provides<context::Atomic>>() -> Result {
    let pair = fixed::<C>()?;
    let cq = pair.null.env.cq::<C>(2 * CAPS.entries())?;
    let other = Arc::new(HandlerCell::new(&cq, 0u32)?, GFP_KERNEL)?;
    let said = pair.in_a_handler(move |cell, wc| {
        (
            other.with(wc, |count| *count),
            cell.with(wc, |count| *count),
        )
    })?;
    check_eq!(said, (Err(EINVAL), Ok(0)));
    Ok(())
}

/// Pages on their way.
#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx,
    cell: Arc<HandlerCell<u32>>,
    said: Arc<SetOnce<(bool, Result)>>,
}

impl CqeHandler for Transfer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let lent = this.cell.with(wc, |count| *count += 1);
        this.said.populate((wc.result().is_ok(), lent));
    }
}

/// A transfer, which the device loses if that is said.
fn transfer<C: Polls + FixedContext + Provides<context::Atomic>>(
    is_lost: bool,
) -> Result<(bool, Result)> {
    let null = NullEnv::new()?;
    let env = &null.env;
    let cq = env.cq::<C>(64)?;
    let caps = Caps {
        send_sge: 32,
        ..Caps::new(4, 4)
    };
    let qp = InitAttr::new(&env.pd, &cq, &cq, &caps)
        .rw_contexts(2, 1)
        .create(&env.cx)?;
    (null.dev).inject_qp(qp.num(), Injection::Connect { peer: 0 })?;
    if is_lost {
        null.dev.inject_qp(qp.num(), Injection::Hold { count: 1 })?;
    }
    let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
    let transfer = Transfer {
        cqe: Cqe::new(),
        data: Ctx::alloc(4 * PAGE_SIZE, &env.cx)?,
        cell: Arc::new(HandlerCell::new(&cq, 0)?, GFP_KERNEL)?,
        said: said.clone(),
    };
    let nowhere = Remote { addr: 0, rkey: 0 };
    qp.post_rw(KBox::pin(transfer, GFP_KERNEL)?, |t| {
        Ok(Rw::write(&t.data, .., nowhere, &env.cx))
    })?;
    qp.destroy(&env.cx)?;
    said.copy().ok_or(EIO)
}

/// Invalidates a region.
#[derive(HasCqe)]
struct Invalidation {
    cqe: Cqe<Self>,
    region: Arc<SharedRegion<Bidirectional>>,
    cell: Arc<HandlerCell<u32>>,
    said: Arc<SetOnce<(bool, Result)>>,
}

impl CqeHandler for Invalidation {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let lent = this.cell.with(wc, |count| *count += 1);
        this.said.populate((wc.result().is_ok(), lent));
    }
}

/// A local invalidation, which is flushed if that is said.
fn invalidation<C: Polls + FixedContext + Provides<context::Atomic>>(
    is_flushed: bool,
) -> Result<(bool, Result)> {
    let pair = fixed::<C>()?;
    let (qp, env) = (&pair.qps[0], &pair.null.env);
    let region = env.region(8)?;
    let owner = RegOwner::new(&region)?;
    let registered = owner.registered.clone();
    qp.post_send(owner, |o| Ok(both(&*o.region)))?;
    wait(|| {
        C::poll(&pair.cq);
        registered.get() == 1
    })?;
    if is_flushed {
        qp.drain(&env.cx)?;
    }
    let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
    let invalidation = Invalidation {
        cqe: Cqe::new(),
        region,
        cell: pair.cell.clone(),
        said: said.clone(),
    };
    let invalidation = KBox::pin(invalidation, GFP_KERNEL)?;
    qp.post_send(invalidation, |i| Ok(InvWr::new(&*i.region)))?;
    wait(|| {
        C::poll(&pair.cq);
        said.copy().is_some()
    })?;
    said.copy().ok_or(EIO)
}

#[kunit_tests(rdma_handler_cell)]
mod tests {
    use super::*;

    #[test]
    fn shared_in_softirqs() -> Result {
        shared(fixed::<Softirq>()?)
    }

    #[test]
    fn shared_in_work_items() -> Result {
        shared(fixed::<Workqueue>()?)
    }

    #[test]
    fn shared_where_a_caller_polls() -> Result {
        shared(fixed::<Direct>()?)
    }

    #[test]
    fn shared_where_a_thread_waits() -> Result {
        shared(fixed::<Waited>()?)
    }

    #[test]
    fn shared_in_any_context() -> Result {
        of_any_context::<Softirq>()?;
        of_any_context::<Direct>()
    }

    #[test]
    fn borrowed_twice_in_a_softirq() -> Result {
        borrowed_twice::<Softirq>()
    }

    #[test]
    fn borrowed_twice_where_a_caller_polls() -> Result {
        borrowed_twice::<Direct>()
    }

    #[test]
    fn handler_of_another_cq_softirq() -> Result {
        of_another_cq::<Softirq>()
    }

    #[test]
    fn handler_of_another_cq_direct() -> Result {
        of_another_cq::<Direct>()
    }

    #[test]
    fn shared_cq_has_no_cell() -> Result {
        let null = NullEnv::new()?;
        let cq = Cq::<Softirq>::pool_get(&null.env.dev, 16, None, &null.env.cx)?;
        check_err!(HandlerCell::new(&cq, 0).map(drop), EINVAL);
        check_err!(HandlerCell::new(&cq.into_any(), 0).map(drop), EINVAL);
        Ok(())
    }

    /// A handler that has the value polls, with other completions waiting: none is handled.
    #[test]
    fn handler_that_polls() -> Result {
        let pair = fixed::<Direct>()?;
        let (said, done) = (Arc::new(SetOnce::new(), GFP_KERNEL)?, Counter::new()?);
        let (answer, cell, cq) = (said.clone(), pair.cell.clone(), pair.cq.clone());
        post(&pair.qps[0], move |wc, _| {
            let polls = |_: &mut u32| {
                let mut array = WcArray::<4>::new();
                (cq.process(8), cq.poll(&mut array))
            };
            answer.populate(cell.with(wc, polls));
        })?;
        let counts = done.clone();
        post(&pair.qps[1], move |_, _| {
            counts.up();
        })?;
        check_eq!(pair.cq.process(1), 1);
        check_eq!(said.copy(), Some(Ok((0, Ok(0)))));
        check_eq!((pair.cq.process(8), done.get()), (1, 1));
        Ok(())
    }

    #[test]
    fn completion_in_an_array() -> Result {
        let pair = fixed::<Direct>()?;
        let said = Arc::new(SetOnce::new(), GFP_KERNEL)?;
        let (answer, cell) = (said.clone(), pair.cell.clone());
        post(&pair.qps[0], move |wc, _| {
            answer.populate(cell.with(wc, |count| *count += 1));
        })?;
        let mut array = WcArray::<4>::new();
        check_eq!(pair.cq.poll(&mut array), Ok(1));
        drop(array);
        check_eq!(said.copy(), Some(Err(EINVAL)));
        check_eq!(
            pair.in_a_handler(|cell, wc| cell.with(wc, |count| *count))?,
            Ok(0)
        );
        Ok(())
    }

    /// One that a caller takes while it polls is in its turn.
    #[test]
    fn completion_that_a_caller_takes() -> Result {
        let pair = fixed::<Direct>()?;
        post(&pair.qps[0], |_, _| {})?;
        let mut lent = None;
        pair.cq.process_with(1, |completion| {
            // It is dispatched.
            lent = Some(
                completion
                    .result()
                    .map_or(Err(EIO), |wc| pair.cell.with(&wc, |_| ())),
            );
        })?;
        check_eq!(lent, Some(Ok(())));
        Ok(())
    }

    #[test]
    fn lost_transfer() -> Result {
        check_eq!(transfer::<Softirq>(true)?, (false, Err(EINVAL)));
        check_eq!(transfer::<Workqueue>(true)?, (false, Err(EINVAL)));
        check_eq!(transfer::<Direct>(true)?, (false, Err(EINVAL)));
        Ok(())
    }

    #[test]
    fn transfer_that_is_flushed_or_done() -> Result {
        check_eq!(transfer::<Softirq>(false)?.1, Ok(()));
        check_eq!(transfer::<Direct>(false)?.1, Ok(()));
        Ok(())
    }

    #[test]
    fn invalidation_that_is_done() -> Result {
        check_eq!(invalidation::<Softirq>(false)?, (true, Ok(())));
        check_eq!(invalidation::<Workqueue>(false)?, (true, Ok(())));
        check_eq!(invalidation::<Direct>(false)?, (true, Ok(())));
        Ok(())
    }

    /// It completes to the MR, which passes the completion on: as it is, unless a caller has polled
    /// it.
    #[test]
    fn invalidation_that_fails() -> Result {
        check_eq!(invalidation::<Softirq>(true)?, (false, Ok(())));
        check_eq!(invalidation::<Workqueue>(true)?, (false, Ok(())));
        check_eq!(invalidation::<Direct>(true)?, (false, Err(EINVAL)));
        Ok(())
    }

    /// Two threads poll, one completion at a time.
    #[test]
    fn two_callers() -> Result {
        let pair = fixed::<Direct>()?;
        let (counted, ended) = (Counter::new()?, Counter::new()?);
        pair.count(&counted)?;
        for _ in 0..2 {
            let (cq, counted, ended) = (pair.cq.clone(), counted.clone(), ended.clone());
            pair.null.env.client.spawn(GFP_KERNEL, move |_| {
                let all = wait(|| {
                    cq.process(1);
                    counted.get() == 2 * REQUESTS as i32
                });
                if all.is_ok() {
                    ended.up();
                }
            })?;
        }
        wait(|| ended.get() == 2)?;
        check_eq!(
            pair.in_a_handler(|cell, wc| cell.with(wc, |count| *count))?,
            Ok(2 * REQUESTS)
        );
        Ok(())
    }

    #[test]
    fn cell_keeps_its_cq() -> Result {
        let Pair {
            qps,
            cell,
            cq,
            null,
        } = fixed::<Softirq>()?;
        drop(qps);
        check_err!(cq.destroy(&null.env.cx), EBUSY);
        let NullEnv { env, dev } = null;
        drop(env);
        dev.begin_removal()?;
        fsleep(Delta::from_millis(20));
        check!(!dev.is_removed());
        drop(cell);
        wait(|| dev.is_removed())
    }
}
