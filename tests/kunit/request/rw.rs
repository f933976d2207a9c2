// SPDX-License-Identifier: GPL-2.0

//! Transfers by `rdma_rw`.

use crate::fixture::{
    both,
    pattern,
    recv,
    register,
    wait,
    CountDrop,
    Counter,
    Env,
    Gap,
    Inbox,
    Link,
    Polled, //
};
use core::ops::{
    Bound,
    Deref, //
};
use kernel::{
    new_spinlock_irq,
    page::PAGE_SIZE,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::{
    cm::ConnParam,
    dma::Direction,
    prelude::*,
    rw::{
        Ctx,
        Rw, //
    },
    sg::{
        SgList,
        SgOwner, //
    }, //
};

/// The memory that the tests transfer: pages, not all of the last.
const LEN: usize = 10 * PAGE_SIZE - 7;

type Outcome = core::result::Result<Opcode, wc::Status>;
type Back = Arc<SpinLockIrq<Option<(Pin<KBox<Transfer>>, Outcome)>>>;

/// Pages on their way.
#[derive(HasCqe)]
struct Transfer {
    cqe: Cqe<Self>,
    data: Ctx,
    message: Buf<ToDevice>,
    back: Option<Back>,
    _gone: CountDrop,
}

impl CqeHandler for Transfer {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(mut this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let outcome = wc.result().map(|wc| wc.opcode()).map_err(|e| e.status);
        if let Some(back) = this.back.take() {
            *back.lock() = Some((this, outcome));
        }
    }
}

/// Two connected sides with room for transfers, and memory of `b` that `a` may access.
struct Transfers<C: Polled> {
    link: Link<C>,
    region: Region<Bidirectional, SgBuf<Bidirectional>>,
    remote: Remote,
    gone: Arc<Counter>,
}

impl<C: Polled> Transfers<C> {
    fn new() -> Result<Self> {
        let caps = Caps {
            send_sge: 2,
            recv_sge: 2,
            ..Caps::new(8, 8)
        };
        Self::with(&caps, 16)
    }

    fn with(caps: &Caps, contexts: u32) -> Result<Self> {
        let env = Env::new()?;
        let requests = env.dev.port(1).ok_or(ENODEV)?.rw_requests(contexts);
        let with_requests = Caps {
            send_wr: caps.send_wr + requests,
            ..*caps
        };
        let cqs = (
            env.cq::<C>(2 * with_requests.entries())?,
            env.cq::<C>(2 * caps.entries())?,
        );
        let param = ConnParam::default();
        let link = Link::connect(env, &cqs.0, &cqs.1, caps, contexts, &param)?;
        let memory = SgBuf::alloc(&link.env.pd, LEN, &link.env.cx)?;
        let (region, remote) = register(&link, Region::new(memory, &link.env.cx)?, both)?;
        Ok(Self {
            link,
            region,
            remote,
            gone: Counter::new()?,
        })
    }

    /// Returns where the region's bytes from `offset` on are.
    fn remote_at(&self, offset: usize) -> Remote {
        Remote {
            addr: self.remote.addr + offset as u64,
            ..self.remote
        }
    }

    fn transfer(&self) -> Result<Pin<KBox<Transfer>>> {
        let env = &self.link.env;
        let transfer = Transfer {
            cqe: Cqe::new(),
            data: Ctx::alloc(LEN, &env.cx)?,
            message: Buf::alloc(&env.pd, 4, &env.cx)?,
            back: None,
            _gone: CountDrop(self.gone.clone()),
        };
        Ok(KBox::pin(transfer, GFP_KERNEL)?)
    }

    fn cx(&self) -> &Sleepable {
        &self.link.env.cx
    }

    /// Posts a transfer from side `a` and waits for it.
    fn run(
        &self,
        mut transfer: Pin<KBox<Transfer>>,
        rw: impl for<'a> FnOnce(&'a Transfer) -> Result<Rw<'a>>,
    ) -> Result<(Pin<KBox<Transfer>>, Outcome)> {
        let back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        transfer.back = Some(back.clone());
        self.link.a.qp.post_rw(transfer, rw)?;
        self.wait(&back)
    }

    fn wait(&self, back: &Back) -> Result<(Pin<KBox<Transfer>>, Outcome)> {
        let mut done = None;
        self.link.wait(|| {
            done = back.lock().take();
            done.is_some()
        })?;
        done.ok_or(EINVAL)
    }

    fn bytes(&self) -> Result<KVec<u8>> {
        let mut bytes = KVec::from_elem(0, LEN, GFP_KERNEL)?;
        self.region.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

/// Returns the bytes of a transfer that has ended.
fn bytes(transfer: &mut Transfer) -> Result<KVec<u8>> {
    let mut bytes = KVec::from_elem(0, LEN, GFP_KERNEL)?;
    transfer.data.cpu().read(0, &mut bytes)?;
    Ok(bytes)
}

/// Writes all pages to the peer, and reads them back into others.
fn there_and_back<C: Polled>() -> Result {
    let (t, all) = (Transfers::<C>::new()?, pattern(LEN)?);
    let mut transfer = t.transfer()?;
    transfer.data.cpu().write(0, &all)?;
    let (_, outcome) = t.run(transfer, |x| Ok(Rw::write(&x.data, .., t.remote, t.cx())))?;
    check_eq!(outcome, Ok(Opcode::RdmaWrite));
    // On iWARP they may still be on their way.
    t.link
        .wait(|| t.bytes().is_ok_and(|is| is[..] == all[..]))?;

    let transfer = t.transfer()?;
    let (mut transfer, outcome) =
        t.run(transfer, |x| Ok(Rw::read(&x.data, .., t.remote, t.cx())))?;
    check_eq!(outcome, Ok(Opcode::RdmaRead));
    check!(bytes(&mut transfer)?[..] == all[..]);
    Ok(())
}

/// The post was refused, and has given the owner back.
#[track_caller]
fn refused<T>(posted: Result<(), PostError<T>>, error: Error) -> Result<T> {
    match posted.map_err(|e| (e.error(), e.owner)) {
        Err((e, Some(owner))) => {
            check_eq!(e, error);
            Ok(owner)
        }
        _ => Err(crate::check::fail("it was not refused")),
    }
}

/// The memory of another owner on its way.
#[derive(HasCqe)]
struct Foreign<D: Direction, O: SgOwner<D>> {
    cqe: Cqe<Self>,
    data: Ctx<D, O>,
    back: Arc<SpinLockIrq<Option<(Ctx<D, O>, Outcome)>>>,
}

impl<D: Direction, O: SgOwner<D>> CqeHandler for Foreign<D, O> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let outcome = wc.result().map(|wc| wc.opcode()).map_err(|e| e.status);
        let Self { data, back, .. } = KBox::into_inner(Pin::into_inner(this));
        *back.lock() = Some((data, outcome));
    }
}

impl<D: Direction, O: SgOwner<D>> Foreign<D, O> {
    /// Posts a transfer from side `a`, and waits for it.
    fn run<C: Polled>(
        t: &Transfers<C>,
        data: Ctx<D, O>,
        rw: impl for<'a> FnOnce(&'a Ctx<D, O>) -> Rw<'a>,
    ) -> Result<(Ctx<D, O>, Outcome)> {
        let back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        let this = Self {
            cqe: Cqe::new(),
            data,
            back: back.clone(),
        };
        let this = KBox::pin(this, GFP_KERNEL)?;
        t.link.a.qp.post_rw(this, |x| Ok(rw(&x.data)))?;
        let mut done = None;
        t.link.wait(|| {
            done = back.lock().take();
            done.is_some()
        })?;
        done.ok_or(EINVAL)
    }
}

/// A peer's memory is read into a vector, and written from one that is shared, in parts that begin
/// and end within entries.
fn others_memory<V, O>(list: O, into_vector: fn(O) -> V) -> Result
where
    V: Deref<Target = [u8]>,
    O: SgOwner<Bidirectional>,
{
    let (t, all) = (Transfers::<Softirq>::new()?, pattern(LEN)?);
    let shared = Arc::new(pattern(LEN)?, GFP_KERNEL)?;
    let mut data: Ctx<ToDevice, _> = Ctx::new(SgList::new(shared.clone(), t.cx())?, GFP_KERNEL)?;
    let ranges = [0..PAGE_SIZE + 9, PAGE_SIZE + 9..LEN - 3, LEN - 3..LEN];
    for range in &ranges {
        let remote = t.remote_at(range.start);
        let outcome;
        (data, outcome) = Foreign::run(&t, data, |data| {
            Rw::write(data, range.clone(), remote, t.cx())
        })?;
        check_eq!(outcome, Ok(Opcode::RdmaWrite));
    }
    t.link
        .wait(|| t.bytes().is_ok_and(|is| is[..] == all[..]))?;
    let back = data.take().ok_or(EINVAL)?.into_inner();
    check!(Arc::ptr_eq(&back, &shared));

    let mut data: Ctx<Bidirectional, _> = Ctx::new(list, GFP_KERNEL)?;
    for range in &ranges {
        let remote = t.remote_at(range.start);
        let outcome;
        (data, outcome) = Foreign::run(&t, data, |data| {
            Rw::read(data, range.clone(), remote, t.cx())
        })?;
        check_eq!(outcome, Ok(Opcode::RdmaRead));
    }
    let vector = into_vector(data.take().ok_or(EINVAL)?);
    check!(vector[..] == all[..]);
    Ok(())
}

/// A transfer that others share.
#[derive(HasCqe)]
struct Shared {
    cqe: Cqe<Self>,
    data: Ctx,
    done: Arc<Counter>,
}

impl CqeHandler for Shared {
    type Pointer = Arc<Self>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, _wc: &Wc, _cx: &context::Atomic) {
        this.done.up();
    }
}

#[kunit_tests(rdma_rw)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back_direct() -> Result {
        there_and_back::<Direct>()
    }

    #[test]
    fn there_and_back_softirq() -> Result {
        there_and_back::<Softirq>()
    }

    #[test]
    fn there_and_back_workqueue() -> Result {
        there_and_back::<Workqueue>()
    }

    #[test]
    fn there_and_back_unbound_workqueue() -> Result {
        there_and_back::<UnboundWorkqueue>()
    }

    #[test]
    fn memory_of_a_vector() -> Result {
        let vector = KVec::from_elem(0, LEN, GFP_KERNEL)?;
        others_memory(
            SgList::new(vector, &Sleepable::current()?)?,
            SgList::into_inner,
        )
    }

    #[test]
    fn memory_of_a_vector_of_pages() -> Result {
        let vector = VVec::from_elem(0, LEN, GFP_KERNEL)?;
        others_memory(
            SgList::new(vector, &Sleepable::current()?)?,
            SgList::into_inner,
        )
    }

    /// The first entry ends within its page, so there are no pages that an MR could map.
    #[test]
    fn entries_of_any_length() -> Result {
        not_on_iwarp!(c"transfers take MRs");
        let (t, all) = (Transfers::<Softirq>::new()?, pattern(LEN)?);
        t.region.write(0, &all)?;
        let data: Ctx<Bidirectional, _> = Ctx::new(Gap::new(300)?, GFP_KERNEL)?;
        check_eq!(data.len(), 400);
        // Into the first and the second entry, and from there to the peer.
        let (data, outcome) =
            Foreign::run(&t, data, |data| Rw::read(data, 250..350, t.remote, t.cx()))?;
        check_eq!(outcome, Ok(Opcode::RdmaRead));
        let remote = t.remote_at(5 * PAGE_SIZE);
        let (_, outcome) =
            Foreign::run(&t, data, |data| Rw::write(data, 240..350, remote, t.cx()))?;
        check_eq!(outcome, Ok(Opcode::RdmaWrite));
        let is = t.bytes()?;
        check!(is[5 * PAGE_SIZE + 10..][..100] == all[..100]);
        check!(is[5 * PAGE_SIZE + 110..] == all[5 * PAGE_SIZE + 110..]);
        Ok(())
    }

    #[test]
    fn owner_of_a_prepared_transfer_comes_back() -> Result {
        let t = Transfers::<Softirq>::new()?;
        let mut data: Ctx<ToDevice, _> = Ctx::new(SgList::new(pattern(LEN)?, t.cx())?, GFP_KERNEL)?;
        let qp = &t.link.a.qp;
        qp.prepare_rw(Rw::write(&data, 5..LEN, t.remote, t.cx()))?;
        let vector = data.take().ok_or(EINVAL)?.into_inner();
        check!(vector[..] == pattern(LEN)?[..]);
        Ok(())
    }

    #[test]
    fn parts_of_pages() -> Result {
        let (t, all) = (Transfers::<Softirq>::new()?, pattern(LEN)?);
        t.region.write(0, &all)?;
        let mut transfer = t.transfer()?;
        let ranges = [
            0..1,
            5..PAGE_SIZE + 5,
            PAGE_SIZE - 1..3 * PAGE_SIZE + 1,
            4 * PAGE_SIZE..5 * PAGE_SIZE,
            9 * PAGE_SIZE + 3..LEN,
        ];
        let mut expected = KVec::from_elem(0, LEN, GFP_KERNEL)?;
        for range in &ranges {
            let remote = t.remote_at(range.start);
            let (back, outcome) = t.run(transfer, |x| {
                Ok(Rw::read(&x.data, range.clone(), remote, t.cx()))
            })?;
            check_eq!(outcome, Ok(Opcode::RdmaRead));
            expected[range.clone()].copy_from_slice(&all[range.clone()]);
            transfer = back;
            check!(bytes(&mut transfer)?[..] == expected[..]);
        }
        // The list is as long as it was.
        let (mut transfer, _) = t.run(transfer, |x| Ok(Rw::read(&x.data, .., t.remote, t.cx())))?;
        check!(bytes(&mut transfer)?[..] == all[..]);
        Ok(())
    }

    #[test]
    fn ranges_of_any_kind() -> Result {
        let (t, all) = (Transfers::<Softirq>::new()?, pattern(LEN)?);
        t.region.write(0, &all)?;
        let before = |n: usize| (Bound::Excluded(n - 1), Bound::Included(n + 1));
        for n in [7, PAGE_SIZE, 2 * PAGE_SIZE + 1] {
            let (end, range) = (t.transfer()?, before(n));
            let (mut end, _) = t.run(end, |x| Ok(Rw::read(&x.data, n.., t.remote, t.cx())))?;
            check!(bytes(&mut end)?[n..] == all[..LEN - n]);
            let (mut start, _) = t.run(t.transfer()?, |x| {
                Ok(Rw::read(&x.data, ..=n, t.remote, t.cx()))
            })?;
            check!(bytes(&mut start)?[..=n] == all[..=n]);
            check!(bytes(&mut start)?[n + 1..].iter().all(|byte| *byte == 0));
            let (mut two, _) = t.run(t.transfer()?, |x| {
                Ok(Rw::read(&x.data, range, t.remote, t.cx()))
            })?;
            check!(bytes(&mut two)?[n..n + 2] == all[..2]);
        }
        let max = usize::MAX;
        for range in [
            (Bound::Excluded(max), Bound::Unbounded),
            (Bound::Included(0), Bound::Included(max)),
            before(LEN - 1),
        ] {
            let posted = t.link.a.qp.post_rw(t.transfer()?, |x| {
                Ok(Rw::read(&x.data, range, t.remote, t.cx()))
            });
            refused(posted, EINVAL)?;
        }
        Ok(())
    }

    #[test]
    fn write_of_a_part_leaves_the_rest() -> Result {
        let (t, all) = (Transfers::<Workqueue>::new()?, pattern(LEN)?);
        let mut transfer = t.transfer()?;
        transfer.data.cpu().write(0, &all)?;
        let range = PAGE_SIZE + 100..4 * PAGE_SIZE - 100;
        let remote = t.remote_at(range.start);
        let (_, outcome) = t.run(transfer, |x| {
            Ok(Rw::write(&x.data, range.clone(), remote, t.cx()))
        })?;
        check!(outcome.is_ok());
        t.link.wait(|| {
            t.bytes()
                .is_ok_and(|is| is[range.clone()] == all[range.clone()])
        })?;
        for (i, byte) in t.bytes()?.iter().enumerate() {
            check_eq!(*byte, if range.contains(&i) { all[i] } else { 0 });
        }
        Ok(())
    }

    #[test]
    fn bad_ranges_are_refused() -> Result {
        let t = Transfers::<Softirq>::new()?;
        let mut transfer = t.transfer()?;
        for (start, end) in [(0, 0), (7, 6), (0, LEN + 1), (LEN, LEN), (0, usize::MAX)] {
            let posted = t.link.a.qp.post_rw(transfer, |x| {
                Ok(Rw::read(&x.data, start..end, t.remote, t.cx()))
            });
            transfer = refused(posted, EINVAL)?;
        }
        let (_, outcome) = t.run(transfer, |x| Ok(Rw::read(&x.data, .., t.remote, t.cx())))?;
        check!(outcome.is_ok());
        Ok(())
    }

    #[test]
    fn context_is_busy_until_the_completion() -> Result {
        let t = Transfers::<Direct>::new()?;
        let cx = &t.link.env.cx;
        let shared = Arc::new(
            Shared {
                cqe: Cqe::new(),
                data: Ctx::alloc(LEN, cx)?,
                done: Counter::new()?,
            },
            GFP_KERNEL,
        )?;
        let all = || {
            t.link.a.qp.post_rw(shared.clone(), |x| {
                Ok(Rw::read(&x.data, .., t.remote, t.cx()))
            })
        };
        let part = || {
            t.link.a.qp.post_rw(shared.clone(), |x| {
                Ok(Rw::read(&x.data, 1..LEN, t.remote, t.cx()))
            })
        };
        for i in 1..5 {
            if i % 2 == 0 { all() } else { part() }?;
            refused(all(), EBUSY)?;
            refused(part(), EBUSY)?;
            t.link.wait(|| shared.done.get() == i)?;
        }
        Ok(())
    }

    #[test]
    fn flushed_transfer_can_be_repeated() -> Result {
        not_on_iwarp!(c"a context is of no use after a READ that has failed");
        let t = Transfers::<Softirq>::new()?;
        t.link.a.qp.drain(&t.link.env.cx)?;
        let mut transfer = t.transfer()?;
        for _ in 0..3 {
            let outcome;
            (transfer, outcome) =
                t.run(transfer, |x| Ok(Rw::read(&x.data, .., t.remote, t.cx())))?;
            check_eq!(outcome, Err(wc::Status::WR_FLUSH_ERR));
        }
        Ok(())
    }

    /// The requests of a transfer but the last have no callback, and complete when they are
    /// flushed.
    #[test]
    fn flushed_transfer_is_taken_once() -> Result {
        let t = Transfers::<Direct>::new()?;
        let (cq, cx) = (&t.link.send_cq, &t.link.env.cx);
        t.link.a.qp.drain(cx)?;
        let post = || -> Result {
            let transfer = t.transfer()?;
            let qp = &t.link.a.qp;
            Ok(qp.post_rw(transfer, |x| {
                Ok(Rw::read(&x.data, 0..LEN, t.remote, t.cx()))
            })?)
        };
        post()?;
        let (mut batch, mut polled) = (WcArray::<4>::new(), 0);
        wait(|| {
            polled += cq.poll(&mut batch).unwrap_or(0);
            for completion in batch.completions() {
                drop(completion.take::<Transfer, 0>());
            }
            t.gone.get() == 1
        })?;
        check!(polled > 1);
        post()?;
        let mut processed = 0;
        wait(|| {
            let take = |completion: cq::Completion<'_>| drop(completion.take::<Transfer, 0>());
            processed += cq.process_with(3, take).unwrap_or(0);
            t.gone.get() == 2
        })?;
        check_eq!(processed as usize, polled);
        Ok(())
    }

    #[test]
    fn transfers_in_flight_end_with_the_qp() -> Result {
        let t = Transfers::<Direct>::new()?;
        for _ in 0..3 {
            let transfer = t.transfer()?;
            t.link
                .a
                .qp
                .post_rw(transfer, |x| Ok(Rw::write(&x.data, .., t.remote, t.cx())))?;
        }
        check_eq!(t.gone.get(), 0);
        t.link.a.qp.drain(&t.link.env.cx)?;
        check_eq!(t.gone.get(), 3);
        Ok(())
    }

    #[test]
    fn access_of_the_peer_is_checked() -> Result {
        not_on_iwarp!(c"a write completes before the peer has refused it");
        let t = Transfers::<Softirq>::new()?;
        let wrong = Remote {
            rkey: t.remote.rkey ^ 1,
            ..t.remote
        };
        let (_, outcome) = t.run(t.transfer()?, |x| Ok(Rw::write(&x.data, .., wrong, t.cx())))?;
        // The request that was refused may not be the last one, which is flushed then.
        check!(matches!(
            outcome,
            Err(wc::Status::REM_ACCESS_ERR | wc::Status::WR_FLUSH_ERR)
        ));
        check!(t.bytes()?.iter().all(|byte| *byte == 0));
        Ok(())
    }

    #[test]
    fn message_follows_the_data() -> Result {
        let (t, received) = (Transfers::<Softirq>::new()?, Inbox::new()?);
        let (all, env) = (pattern(LEN)?, &t.link.env);
        recv(&t.link.b.qp, env.message(&received, &[0; 4])?)?;
        let mut transfer = t.transfer()?;
        transfer.data.cpu().write(0, &all)?;
        transfer.message.cpu().copy_from_slice(b"done");
        let back: Back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        transfer.back = Some(back.clone());
        t.link.a.qp.post_rw(transfer, |x| {
            let rw = Rw::write(&x.data, .., t.remote, t.cx());
            Ok(rw.then(SendWr::send([x.message.whole()])))
        })?;
        t.link.wait(|| received.len() == 1)?;
        check!(t.bytes()?[..] == all[..]);
        check_eq!(&received.pop()?.bytes()?[..], b"done");
        let (_, outcome) = t.wait(&back)?;
        check_eq!(outcome, Ok(Opcode::Send));
        Ok(())
    }

    #[test]
    fn message_of_a_foreign_pd_is_refused() -> Result {
        let (t, foreign) = (Transfers::<Softirq>::new()?, crate::fixture::Env::new()?);
        let mut transfer = t.transfer()?;
        transfer.message = Buf::alloc(&foreign.pd, 4, &foreign.cx)?;
        let posted = t.link.a.qp.post_rw(transfer, |x| {
            let rw = Rw::write(&x.data, 0..LEN, t.remote, t.cx());
            Ok(rw.then(SendWr::send([x.message.whole()])))
        });
        refused(posted, EINVAL)?;
        Ok(())
    }

    #[test]
    fn prepared_transfer_is_posted_where_one_cannot_sleep() -> Result {
        let (t, all) = (Transfers::<Softirq>::new()?, pattern(LEN)?);
        let (mut transfer, qp) = (t.transfer()?, &t.link.a.qp);
        let range = PAGE_SIZE + 100..4 * PAGE_SIZE - 100;
        let back: Back = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        transfer.back = Some(back.clone());
        let remote = t.remote_at(range.start);
        qp.prepare_rw(Rw::write(&transfer.data, range.clone(), remote, t.cx()))?;
        // The data come when the transfer is prepared, as those of a disk do; all of the pages are
        // where they were, also those that are not transferred.
        transfer.data.cpu().write(0, &all)?;
        check!(bytes(&mut transfer)?[..] == all[..]);
        {
            let _atomic = back.lock();
            qp.post_rw(transfer, |x| Ok(Rw::prepared(&x.data)))?;
        }
        let (mut transfer, outcome) = t.wait(&back)?;
        check!(outcome.is_ok());
        check!(bytes(&mut transfer)?[..] == all[..]);
        t.link.wait(|| {
            t.bytes()
                .is_ok_and(|is| is[range.clone()] == all[range.clone()])
        })?;
        for (i, byte) in t.bytes()?.iter().enumerate() {
            check_eq!(*byte, if range.contains(&i) { all[i] } else { 0 });
        }
        Ok(())
    }

    #[test]
    fn prepared_context_may_be_moved() -> Result {
        let (t, all) = (Transfers::<Workqueue>::new()?, pattern(LEN)?);
        t.region.write(0, &all)?;
        let (mut old, mut new) = (t.transfer()?, t.transfer()?);
        let qp = &t.link.a.qp;
        qp.prepare_rw(Rw::read(&old.data, 0..LEN, t.remote, t.cx()))?;
        core::mem::swap(&mut old.data, &mut new.data);
        drop(old);
        let (mut new, outcome) = t.run(new, |x| Ok(Rw::prepared(&x.data)))?;
        check!(outcome.is_ok());
        check!(bytes(&mut new)?[..] == all[..]);
        // It has to be prepared again.
        let posted = qp.post_rw(new, |x| Ok(Rw::prepared(&x.data)));
        refused(posted, EINVAL)?;
        Ok(())
    }

    #[test]
    fn context_is_prepared_once() -> Result {
        let t = Transfers::<Softirq>::new()?;
        let (transfer, qp) = (t.transfer()?, &t.link.a.qp);
        let read = || Rw::read(&transfer.data, 0..LEN, t.remote, t.cx());
        check_err!(qp.prepare_rw(Rw::prepared(&transfer.data)), EINVAL);
        qp.prepare_rw(read())?;
        check_err!(qp.prepare_rw(read()), EBUSY);
        check_err!(t.link.b.qp.prepare_rw(read()), EBUSY);
        let posted = t.link.b.qp.post_rw(transfer, |x| Ok(Rw::prepared(&x.data)));
        let transfer = refused(posted, EINVAL)?;
        let (_, outcome) = t.run(transfer, |x| Ok(Rw::prepared(&x.data)))?;
        check!(outcome.is_ok());
        Ok(())
    }

    #[test]
    fn prepared_transfer_is_cancelled() -> Result {
        let (t, all) = (Transfers::<Softirq>::new()?, pattern(LEN)?);
        t.region.write(0, &all)?;
        let (mut transfer, other) = (t.transfer()?, Transfers::<Softirq>::new()?);
        transfer.data.cancel();
        let part = Rw::read(&transfer.data, 7..PAGE_SIZE, t.remote, t.cx());
        t.link.a.qp.prepare_rw(part)?;
        transfer.data.cancel();
        let part = Rw::read(&transfer.data, 9..10, t.remote, t.cx());
        other.link.a.qp.prepare_rw(part)?;
        transfer.data.cancel();
        drop(other);
        // Its list is as it was.
        let (mut transfer, outcome) =
            t.run(transfer, |x| Ok(Rw::read(&x.data, .., t.remote, t.cx())))?;
        check!(outcome.is_ok());
        check!(bytes(&mut transfer)?[..] == all[..]);
        Ok(())
    }

    #[test]
    fn prepared_transfer_has_a_message_behind() -> Result {
        let (t, received) = (Transfers::<Softirq>::new()?, Inbox::new()?);
        let (all, env) = (pattern(LEN)?, &t.link.env);
        recv(&t.link.b.qp, env.message(&received, &[0; 4])?)?;
        let mut transfer = t.transfer()?;
        transfer.data.cpu().write(0, &all)?;
        transfer.message.cpu().copy_from_slice(b"done");
        let qp = &t.link.a.qp;
        qp.prepare_rw(Rw::write(&transfer.data, .., t.remote, t.cx()))?;
        qp.post_rw(transfer, |x| {
            let message = SendWr::send([x.message.whole()]);
            Ok(Rw::prepared(&x.data).then(message))
        })?;
        t.link.wait(|| received.len() == 1)?;
        check!(t.bytes()?[..] == all[..]);
        t.link.wait(|| t.gone.get() == 1)
    }

    #[test]
    fn prepared_transfer_stays_so_if_what_follows_is_refused() -> Result {
        let (t, foreign) = (Transfers::<Softirq>::new()?, crate::fixture::Env::new()?);
        let (mut transfer, all) = (t.transfer()?, pattern(LEN)?);
        transfer.data.cpu().write(0, &all)?;
        transfer.message = Buf::alloc(&foreign.pd, 4, &foreign.cx)?;
        let qp = &t.link.a.qp;
        qp.prepare_rw(Rw::write(&transfer.data, .., t.remote, t.cx()))?;
        let posted = qp.post_rw(transfer, |x| {
            let message = SendWr::send([x.message.whole()]);
            Ok(Rw::prepared(&x.data).then(message))
        });
        let transfer = refused(posted, EINVAL)?;
        let posted = qp.post_rw(transfer, |x| match x.data.len() {
            0 => Ok(Rw::prepared(&x.data)),
            _ => Err(ECANCELED),
        });
        let transfer = refused(posted, ECANCELED)?;
        check_err!(
            qp.prepare_rw(Rw::write(&transfer.data, .., t.remote, t.cx())),
            EBUSY
        );
        let (_, outcome) = t.run(transfer, |x| Ok(Rw::prepared(&x.data)))?;
        check!(outcome.is_ok());
        check!(t.bytes()?[..] == all[..]);
        Ok(())
    }

    #[test]
    fn owner_of_a_part_stays_until_the_drain() -> Result {
        // Ten pages, one a request, are too many for this queue.
        let t = Transfers::<Softirq>::with(&Caps::new(2, 2), 0)?;
        let posted = t.link.a.qp.post_rw(t.transfer()?, |x| {
            Ok(Rw::write(&x.data, 0..LEN, t.remote, t.cx()))
        });
        match posted {
            Err(e) if e.owner.is_none() => {
                check_eq!(e.error(), ENOMEM);
                check!(e.posted() > 0);
            }
            _ => return Err(crate::check::fail("it was not posted in part")),
        }
        check_eq!(t.gone.get(), 0);
        t.link.a.qp.drain(&t.link.env.cx)?;
        check_eq!(t.gone.get(), 1);
        Ok(())
    }

    #[test]
    fn room_for_contexts() -> Result {
        let env = crate::fixture::Env::new()?;
        let port = env.dev.port(1).ok_or(ENODEV)?;
        check!(port.rw_contexts(1)? == 1);
        check!(port.rw_contexts(4096)? > 1);
        check_err!(port.rw_contexts(u32::MAX), EINVAL);
        check!((4..=12).contains(&port.rw_requests(4)));
        Ok(())
    }
}
