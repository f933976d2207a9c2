// SPDX-License-Identifier: GPL-2.0

//! Exchanges whose sends are signaled in turn, and memory that comes back with the reply.

use crate::fixture::{
    recv,
    wait,
    CountDrop,
    Counter,
    Env,
    Inbox,
    Null,
    NullEnv,
    OnDone,
    Polled, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::{
    mr::LentRegion,
    prelude::*,
    qp::Chain,
    session::tags::{
        Exchange,
        Reply,
        Tag,
        TagId,
        Tags, //
    },
    wc::Success, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

const COUNT: u32 = 8;
const BITS: u32 = 4;
const LEN: usize = 8;
/// One send in so many is signaled.
const INTERVAL: u32 = 3;
/// Each exchange has a registration, a send and an invalidation.
const CAPS: Caps = Caps::new(3 * COUNT, 16);

/// The time, in microseconds, that a post waits for another one which does not come.
const WINDOW: u32 = 100_000;

#[pin_data]
struct Log {
    /// The tags whose exchanges have ended.
    #[pin]
    ends: SpinLockIrq<KVec<u16>>,
    sent: Arc<Counter>,
    /// The number of replies that gave memory back.
    taken: Arc<Counter>,
    gone: Arc<Counter>,
}

struct Request {
    buf: Buf<ToDevice>,
    region: Option<LentRegion<FromDevice>>,
    log: Arc<Log>,
}

struct Wanted {
    mr: Option<Mr>,
    memory: Option<Buf<FromDevice>>,
    _gone: CountDrop,
}

struct Io;

impl Exchange for Io {
    type Request = Request;
    type Reply = Wanted;
    type Connection = Arc<Log>;
    type Needs = context::Atomic;

    const IN_TURN: bool = true;

    fn sent(request: &Request, _wc: &Wc, _cx: &context::Atomic) {
        request.log.sent.up();
    }

    fn invalidated(reply: Reply<'_, Self>, _wc: &Wc, _cx: &context::Atomic) {
        take_memory(reply);
    }

    fn ended(mut tag: Tag<Self>) {
        let index = tag.id().index;
        let (request, wanted) = tag.parts();
        if let Some(region) = request.region.take() {
            if let Ok((mr, memory)) = region.into_mr() {
                wanted.mr = Some(mr);
                wanted.memory = memory.or(wanted.memory.take());
            }
        }
        if tag
            .connection()
            .ends
            .lock()
            .push(index, GFP_ATOMIC)
            .is_err()
        {
            pr_err!("FAILED: no memory for an end\n");
        }
    }
}

/// Takes the memory of a region that is idle, while its exchange may be out.
fn take_memory(mut reply: Reply<'_, Io>) {
    let memory = reply.request().region.as_ref().map(|r| r.take_memory());
    if let Some(memory) = memory.flatten() {
        reply.memory = Some(memory);
        reply.request().log.taken.up();
    }
}

struct Ends<C: Polled> {
    tags: Arc<Tags<Io>>,
    log: Arc<Log>,
    qp: Drained<C>,
    peer: Qp<C>,
    cq: Cq<C>,
    inbox: Arc<Inbox>,
    null: NullEnv,
}

/// Drains a QP whose receives keep it, also where a test fails.
struct Drained<C: Polled>(Qp<C>, Arc<NullDevice>);

impl<C: Polled> Drop for Drained<C> {
    fn drop(&mut self) {
        self.1.calm();
        if let Ok(cx) = Sleepable::current() {
            if let Err(e) = self.0.drain(&cx) {
                pr_err!("FAILED: {e:?}\n");
            }
        }
    }
}

fn make(env: &Env, log: &Arc<Log>) -> Result<(Request, Wanted)> {
    let request = Request {
        buf: Buf::alloc(&env.pd, LEN, &env.cx)?,
        region: None,
        log: log.clone(),
    };
    let wanted = Wanted {
        mr: Some(Mr::alloc(&env.pd, 2, &env.cx)?),
        memory: Some(Buf::alloc(&env.pd, 64, &env.cx)?),
        _gone: CountDrop(log.gone.clone()),
    };
    Ok((request, wanted))
}

/// Adds the registration of the region, if there is one, and the send of a request.
fn send<'a>(request: &'a Request, chain: &mut Chain<'a, 2>) -> Result {
    if let Some(region) = &request.region {
        chain.push(RegWr::remote_write(region))?;
    }
    chain.push(SendWr::send([request.buf.whole()]))
}

/// Gives the request of a tag its region.
fn lend(tag: &mut Tag<Io>) -> Result {
    let (request, wanted) = tag.parts();
    let (mr, memory) = (wanted.mr.take(), wanted.memory.take());
    let (mr, memory) = mr.zip(memory).ok_or(ENODATA)?;
    request.region = Some(LentRegion::lend(mr, memory)?);
    Ok(())
}

impl<C: Polled + Provides<context::Atomic>> Ends<C> {
    fn new() -> Result<Self> {
        Self::on(NullEnv::new()?)
    }

    fn on(null: NullEnv) -> Result<Self> {
        // What is on the device goes before it, where something fails.
        let ends = Null::<C>::on(null, &CAPS)?;
        let (sent, taken, gone) = (Counter::new()?, Counter::new()?, Counter::new()?);
        let log = pin_init!(Log {
            ends <- new_spinlock_irq!(KVec::new()),
            sent,
            taken,
            gone,
        });
        let log = Arc::pin_init(log, GFP_KERNEL)?;
        let inbox = Inbox::new()?;
        let init = |_| make(&ends.env, &log);
        let tags = Tags::new(&ends.a, log.clone(), COUNT, BITS, init, &ends.env.cx)?;
        let tags = Arc::new(tags, GFP_KERNEL)?;
        let (qp, peer) = (ends.a, ends.b);
        let (env, dev) = (ends.env, ends.dev);
        Ok(Self {
            tags,
            log,
            qp: Drained(qp, dev.clone()),
            peer,
            cq: ends.cq,
            inbox,
            null: NullEnv { env, dev },
        })
    }

    fn inject(&self, injection: Injection) -> Result {
        self.null.dev.inject_qp(self.qp.0.num(), injection)
    }

    fn post_tag(&self, tag: Tag<Io>, interval: u32) -> Result<TagId> {
        let id = tag.id();
        recv(&self.peer, self.null.env.message(&self.inbox, &[0; LEN])?)?;
        tag.post_in_turn(&self.qp.0, interval, send)?;
        Ok(id)
    }

    fn post(&self, interval: u32) -> Result<TagId> {
        self.post_tag(self.tags.take()?, interval)
    }

    /// Posts a request with a region.
    fn post_region(&self, interval: u32) -> Result<TagId> {
        let mut tag = self.tags.take()?;
        lend(&mut tag)?;
        self.post_tag(tag, interval)
    }

    /// Has a message come, in whose handler `f` is called.
    fn message<T: Send + Unpin + 'static>(
        &self,
        f: impl FnOnce(&Tags<Io>, &Qp<C>, &Success<'_>) -> T + Unpin + Send + 'static,
    ) -> Result<T> {
        let got = Arc::pin_init(new_spinlock_irq!(None), GFP_KERNEL)?;
        let (tags, qp, gets) = (self.tags.clone(), self.qp.0.clone(), got.clone());
        let recv = OnDone::<context::Atomic, _>::new(move |wc, _| {
            *gets.lock() = wc.result().ok().map(|wc| f(&tags, &qp, &wc));
        })?;
        self.qp.0.post_recv(recv, |_| Ok(RecvWr::new([])))?;
        let message = OnDone::<context::Atomic, _>::new(|_, _| {})?;
        self.peer.post_send(message, |_| Ok(SendWr::send([])))?;
        self.wait(|| got.lock().is_some())?;
        let value = got.lock().take();
        value.ok_or(ENODATA)
    }

    /// Has a reply come. Returns whether it was waited for.
    fn reply(&self, id: TagId) -> Result<bool> {
        self.message(move |tags, _, wc| tags.reply(wc, id).is_ok())
    }

    /// Has a reply come whose handler invalidates the region. Returns whether that was posted.
    fn reply_and_inv(&self, id: TagId, wrong: Option<Injection>) -> Result<bool> {
        let dev = self.null.dev.clone();
        self.message(move |tags, qp, wc| {
            let injected = wrong.map_or(Ok(()), |wrong| dev.inject_qp(qp.num(), wrong));
            injected.and_then(|()| inv(tags, qp, wc, id)).is_ok()
        })
    }

    /// Takes what has ended.
    fn ended(&self) -> KVec<u16> {
        let mut ends = core::mem::take(&mut *self.log.ends.lock());
        ends.sort_unstable();
        ends
    }

    fn reclaim(&self) -> Result {
        self.tags.reclaim(&self.qp.0, &self.null.env.cx)
    }

    #[track_caller]
    fn wait(&self, mut condition: impl FnMut() -> bool) -> Result {
        wait(|| {
            C::poll(&self.cq);
            condition()
        })
    }

    #[track_caller]
    fn wait_for_sends(&self, count: i32) -> Result {
        self.wait(|| self.log.sent.get() == count)
    }

    /// Drops the QP, and all else that a test has but the log.
    fn end(self) -> Result<Arc<Log>> {
        let Self {
            tags,
            log,
            qp,
            peer,
            cq,
            inbox,
            null,
        } = self;
        drop((tags, qp, peer));
        wait(|| null.dev.objects()[1] == 0)?;
        drop((cq, inbox));
        Ok(log)
    }
}

fn inv<C: Provides<context::Atomic>>(
    tags: &Tags<Io>,
    qp: &Qp<C>,
    wc: &Success<'_>,
    id: TagId,
) -> Result {
    let reply = tags.reply(wc, id)?;
    let posted = reply.post(qp, |request| {
        request.region.as_ref().map(InvWr::new).ok_or(ENODATA)
    });
    posted.map_err(|e| e.error())
}

/// A reply is handled when it comes, and the exchange ends with the next signaled send.
fn come_home<C: Polled + Provides<context::Atomic>>() -> Result {
    let ends = Ends::<C>::new()?;
    let (first, second) = (ends.post(INTERVAL)?, ends.post(INTERVAL)?);
    check!(ends.reply(first)?);
    check!(!ends.reply(first)?);
    check!(ends.ended().is_empty());
    check_eq!(ends.log.sent.get(), 0);
    // Neither is handed out.
    let mut held = KVec::new();
    while let Ok(tag) = ends.tags.take() {
        check!(tag.id().index > second.index);
        held.push(tag, GFP_KERNEL)?;
    }
    check_eq!(held.len() as u32, COUNT - 2);
    drop(held);
    let third = ends.post(INTERVAL)?;
    ends.wait_for_sends(3)?;
    check_eq!(&ends.ended()[..], &[first.index]);
    check!(ends.reply(second)?);
    check!(ends.reply(third)?);
    check_eq!(&ends.ended()[..], &[second.index, third.index]);
    // The count begins again.
    ends.post(INTERVAL)?;
    ends.post(INTERVAL)?;
    check_eq!(ends.log.sent.get(), 3);
    ends.post(INTERVAL)?;
    ends.wait_for_sends(6)?;
    ends.reclaim()?;
    check_eq!(ends.ended().len(), 3);
    Ok(())
}

#[kunit_tests(rdma_session_turns)]
mod tests {
    use super::*;

    #[test]
    fn sends_come_home_in_turn_softirq() -> Result {
        come_home::<Softirq>()
    }

    #[test]
    fn sends_come_home_in_turn_workqueue() -> Result {
        come_home::<Workqueue>()
    }

    #[test]
    fn sends_come_home_in_turn_direct() -> Result {
        come_home::<Direct>()
    }

    #[test]
    fn sends_come_home_in_turn_waited() -> Result {
        come_home::<Waited>()
    }

    /// Nothing follows them.
    #[test]
    fn drain_brings_sends_home() -> Result {
        let ends = Ends::<Workqueue>::new()?;
        let (answered, other) = (ends.post(COUNT)?, ends.post(COUNT)?);
        check!(ends.reply(answered)?);
        ends.reclaim()?;
        check_eq!(&ends.ended()[..], &[answered.index, other.index]);
        check_err!(ends.tags.take(), ENOTCONN);
        Ok(())
    }

    /// The driver refuses the marker, and its own drain returns at once: the device may still have
    /// the send.
    #[test]
    fn driver_s_own_drain_brings_no_send_home() -> Result {
        let ends = Ends::<Workqueue>::on(NullEnv::with_drain()?)?;
        let answered = ends.post(COUNT)?;
        check!(ends.reply(answered)?);
        ends.inject(Injection::Refuse { after: 0, errno: 5 })?;
        check_err!(ends.reclaim(), EIO);
        check!(ends.ended().is_empty());
        ends.reclaim()?;
        check_eq!(&ends.ended()[..], &[answered.index]);
        Ok(())
    }

    /// They end with the QP, which nobody has drained.
    #[test]
    fn end_of_the_qp_brings_sends_home() -> Result {
        let ends = Ends::<Softirq>::new()?;
        check!(ends.reply(ends.post(COUNT)?)?);
        ends.post_region(COUNT)?;
        let log = ends.end()?;
        wait(|| log.gone.get() == COUNT as i32)?;
        check_eq!(log.ends.lock().len(), 2);
        Ok(())
    }

    #[test]
    fn post_to_a_closed_table_gives_the_tag_back() -> Result {
        let ends = Ends::<Workqueue>::new()?;
        let (tag, tags) = (ends.tags.take()?, ends.tags.clone());
        let e = tag.post_in_turn(&ends.qp.0, COUNT, |request, chain: &mut Chain<'_, 2>| {
            // The table was open when the post began.
            tags.close(ECONNRESET);
            send(request, chain)
        });
        let e = e.err().ok_or(ENODATA)?;
        check_eq!(e.error(), ECONNRESET);
        check!(e.owner.is_some());
        drop(e);
        ends.reclaim()?;
        check!(ends.ended().is_empty());
        Ok(())
    }

    /// The driver refuses the signaled one, or the send behind its registration. The next one has
    /// the sends before it.
    #[test]
    fn refused_send_leaves_others_to_the_next() -> Result {
        for after in [0, 1] {
            let ends = Ends::<Softirq>::new()?;
            let ids = [ends.post(INTERVAL)?, ends.post(INTERVAL)?];
            ends.inject(Injection::Refuse { after, errno: 5 })?;
            check_err!(ends.post_region(INTERVAL), EIO);
            check_eq!(ends.log.sent.get(), 0);
            for id in ids {
                check!(ends.reply(id)?);
            }
            check!(ends.ended().is_empty());
            let next = ends.post(INTERVAL)?;
            ends.wait_for_sends(3)?;
            check_eq!(&ends.ended()[..], &ids.map(|id| id.index));
            check!(ends.reply(next)?);
            check_eq!(ends.ended().len(), 1);
            ends.reclaim()?;
            // What was posted in part ends with the QP.
            check_eq!(ends.ended().len(), 1 - after as usize);
            let log = ends.end()?;
            wait(|| log.gone.get() == COUNT as i32)?;
            check_eq!(log.ends.lock().len(), after as usize);
        }
        Ok(())
    }

    /// One that is not signaled is refused, and ends after the drain.
    #[test]
    fn refused_send_that_is_not_signaled() -> Result {
        let ends = Ends::<Softirq>::new()?;
        ends.inject(Injection::Refuse { after: 0, errno: 5 })?;
        check_err!(ends.post(INTERVAL), EIO);
        ends.post(1)?;
        ends.wait_for_sends(1)?;
        check!(ends.ended().is_empty());
        ends.reclaim()?;
        check_eq!(ends.ended().len(), 2);
        Ok(())
    }

    /// The device loses the completion. All end when the QP is destroyed.
    #[test]
    fn lost_completion_leaves_sends_to_the_end_of_the_qp() -> Result {
        let ends = Ends::<Softirq>::new()?;
        ends.inject(Injection::Hold { count: 1 })?;
        let ids = [ends.post(2)?, ends.post(2)?];
        for id in ids {
            check!(ends.reply(id)?);
        }
        check!(ends.ended().is_empty());
        let held = ends.log.sent.get();
        check_eq!(held, 0);
        let log = ends.end()?;
        wait(|| log.gone.get() == COUNT as i32)?;
        check_eq!(log.ends.lock().len(), 2);
        Ok(())
    }

    /// The QP's end looks at another table first, of which a send is out, too. Each ends once.
    #[test]
    fn lost_completion_of_another_table() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let (env, log) = (&ends.null.env, &ends.log);
        let other = Tags::<Io>::new(
            &ends.qp.0,
            log.clone(),
            1,
            BITS,
            |_| make(env, log),
            &env.cx,
        )?;
        ends.inject(Injection::Hold { count: 1 })?;
        let id = ends.post(COUNT)?;
        recv(&ends.peer, env.message(&ends.inbox, &[0; LEN])?)?;
        other.take()?.post(&ends.qp.0, send)?;
        check!(ends.reply(id)?);
        drop(other);
        let log = ends.end()?;
        wait(|| log.gone.get() == COUNT as i32 + 1)?;
        check_eq!(log.ends.lock().len(), 2);
        Ok(())
    }

    /// The completion is in an array, and all sends before it are strays with it.
    #[test]
    fn completion_in_an_array_brings_home_strays() -> Result {
        for late in [false, true] {
            let ends = Ends::<Direct>::new()?;
            let ids = [ends.post(2)?, ends.post(2)?];
            let mut array = WcArray::<4>::new();
            // The receives of the peer, too.
            check_eq!(ends.cq.poll(&mut array)?, 3);
            if !late {
                array.completions().for_each(cq::Completion::dispatch);
            }
            for id in ids {
                check!(ends.reply(id)?);
            }
            check!(ends.ended().is_empty());
            ends.reclaim()?;
            check_eq!(ends.ended().len(), if late { 0 } else { 2 });
            let Ends {
                tags,
                log,
                qp,
                peer,
                cq,
                inbox,
                null,
            } = ends;
            drop((tags, qp, peer));
            wait(|| null.dev.objects()[1] == 0)?;
            drop(array);
            wait(|| log.gone.get() == COUNT as i32)?;
            check_eq!(log.ends.lock().len(), if late { 2 } else { 0 });
            drop((cq, inbox));
        }
        Ok(())
    }

    /// A local invalidation is signaled, and behind the send: it brings that home, and others.
    #[test]
    fn invalidation_brings_sends_home() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let (other, id) = (ends.post(COUNT)?, ends.post_region(COUNT)?);
        check!(ends.reply(other)?);
        check!(ends.reply_and_inv(id, None)?);
        ends.wait_for_sends(2)?;
        ends.wait(|| ends.log.ends.lock().len() == 2)?;
        check_eq!(ends.log.taken.get(), 1);
        // The MR, and the memory, are used again.
        for _ in 0..COUNT {
            ends.post_region(1)?;
        }
        ends.reclaim()
    }

    #[test]
    fn invalidation_fails_behind_sends() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let (other, id) = (ends.post(COUNT)?, ends.post_region(COUNT)?);
        check!(ends.reply(other)?);
        let fails = Injection::Status {
            status: wc::Status::GENERAL_ERR.as_raw(),
            vendor_err: 0,
            count: 1,
            fatal: false,
        };
        check!(ends.reply_and_inv(id, Some(fails))?);
        ends.wait_for_sends(2)?;
        check_eq!(&ends.ended()[..], &[other.index]);
        check_eq!(ends.log.taken.get(), 0);
        ends.reclaim()?;
        check_eq!(&ends.ended()[..], &[id.index]);
        Ok(())
    }

    #[test]
    fn refused_invalidation_leaves_sends_to_the_next() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let id = ends.post_region(COUNT)?;
        let refuse = Injection::Refuse { after: 0, errno: 5 };
        check!(!ends.reply_and_inv(id, Some(refuse))?);
        check_eq!(ends.log.sent.get(), 0);
        ends.post(1)?;
        ends.wait_for_sends(2)?;
        check_eq!(&ends.ended()[..], &[id.index]);
        Ok(())
    }

    /// A peer answers a request that is not posted yet. The invalidation waits for the post, so it
    /// is behind the registration.
    #[test]
    fn invalidation_waits_for_the_post() -> Result {
        let ends = Ends::<Workqueue>::on(NullEnv::iwarp()?)?;
        let (mut tag, done) = (ends.tags.take()?, Counter::new()?);
        lend(&mut tag)?;
        let id = tag.id();
        let (tags, qp, up) = (ends.tags.clone(), ends.qp.0.clone(), done.clone());
        let answer = OnDone::<context::Atomic, _>::new(move |wc, _| {
            if wc.result().is_ok_and(|wc| inv(&tags, &qp, &wc, id).is_ok()) {
                up.up();
            }
        })?;
        ends.qp.0.post_recv(answer, |_| Ok(RecvWr::new([])))?;
        ends.inject(Injection::Stall {
            us: WINDOW,
            late: false,
        })?;
        let (num, over) = (ends.qp.0.num(), Counter::new()?);
        let (peer, dev, ends_too) = (ends.peer.clone(), ends.null.dev.clone(), over.clone());
        ends.null.env.client.spawn(GFP_KERNEL, move |_| {
            let said = wait(|| dev.stalls(num) != Ok(true)).and_then(|()| {
                let message = OnDone::<context::Atomic, _>::new(|_, _| {})?;
                Ok(peer.post_send(message, |_| Ok(SendWr::send([])))?)
            });
            if let Err(e) = said {
                pr_err!("FAILED: the peer: {e:?}\n");
            }
            drop((peer, dev));
            ends_too.up();
        })?;
        ends.post_tag(tag, COUNT)?;
        wait(|| over.get() == 1)?;
        ends.wait(|| ends.log.taken.get() == 1)?;
        ends.wait_for_sends(1)?;
        check_eq!(done.get(), 1);
        check_eq!(&ends.ended()[..], &[id.index]);
        Ok(())
    }

    #[test]
    fn memory_is_taken_once_and_not_while_it_is_registered() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let mut tag = ends.tags.take()?;
        lend(&mut tag)?;
        let request = tag.parts().0;
        let region = request.region.as_ref().ok_or(ENODATA)?;
        check_eq!(region.len(), 64);
        check!(region.write(0, &[1]).is_ok());
        let memory = region.take_memory().ok_or(ENODATA)?;
        check!(region.take_memory().is_none());
        check_eq!(region.len(), 0);
        check_err!(region.read(0, &mut [0]), EINVAL);
        check_err!(region.write(0, &[1]), EINVAL);
        // Nor can it be registered again.
        let e = tag.post_in_turn(&ends.qp.0, 1, send).err();
        let mut e = e.ok_or(ENODATA)?;
        check_eq!(e.error(), EBUSY);
        let tag = e.owner.as_mut().ok_or(ENODATA)?;
        let (request, wanted) = tag.parts();
        let region = request.region.take().ok_or(ENODATA)?;
        let (mr, none) = region.into_mr().map_err(|_| EBUSY)?;
        check!(none.is_none());
        (wanted.mr, wanted.memory) = (Some(mr), Some(memory));
        lend(tag)?;
        let id = ends.post_tag(e.owner.take().ok_or(ENODATA)?, 1)?;
        ends.wait_for_sends(1)?;
        let taken = ends.message(move |tags, _, wc| {
            let reply = tags.reply(wc, id).ok()?;
            let region = reply.request().region.as_ref()?;
            Some(region.take_memory().is_some())
        })?;
        check_eq!(taken, Some(false));
        // The region is registered, so it stays until the MR is gone.
        check_eq!(&ends.ended()[..], &[id.index]);
        Ok(())
    }

    /// A region is dropped with its memory and without.
    #[test]
    fn region_is_dropped_without_memory() -> Result {
        let env = Env::new()?;
        for takes in [false, true] {
            let (mr, memory) = (
                Mr::alloc(&env.pd, 2, &env.cx)?,
                Buf::<FromDevice>::alloc(&env.pd, 64, &env.cx)?,
            );
            let region = LentRegion::lend(mr, memory)?;
            check_eq!(
                takes.then(|| region.take_memory()).flatten().is_some(),
                takes
            );
            drop(region);
        }
        Ok(())
    }

    /// Threads post while replies come, and each exchange ends once.
    #[test]
    fn threads_take_turns() -> Result {
        const ROUNDS: i32 = 50;
        let ends = Ends::<Workqueue>::new()?;
        let (over, replies) = (Counter::new()?, Counter::new()?);
        for _ in 0..2 {
            let (tags, qp, peer) = (ends.tags.clone(), ends.qp.0.clone(), ends.peer.clone());
            let (over, replies) = (over.clone(), replies.clone());
            ends.null.env.client.spawn(GFP_KERNEL, move |cx| {
                for _ in 0..ROUNDS {
                    let said = tags.wait(10_000, cx).and_then(|tag| {
                        let recv = OnDone::<context::Atomic, _>::new(|_, _| {})?;
                        peer.post_recv(recv, |_| Ok(RecvWr::new([])))?;
                        let id = tag.id();
                        // The peer has no memory for what it gets.
                        tag.post_in_turn(&qp, INTERVAL, |_, chain: &mut Chain<'_, 1>| {
                            chain.push(SendWr::send([]))
                        })?;
                        let (tags, replies) = (tags.clone(), replies.clone());
                        let recv = OnDone::<context::Atomic, _>::new(move |wc, _| {
                            if wc.result().is_ok_and(|wc| tags.reply(&wc, id).is_ok()) {
                                replies.up();
                            }
                        })?;
                        qp.post_recv(recv, |_| Ok(RecvWr::new([])))?;
                        let message = OnDone::<context::Atomic, _>::new(|_, _| {})?;
                        Ok(peer.post_send(message, |_| Ok(SendWr::send([])))?)
                    });
                    if let Err(e) = said {
                        pr_err!("FAILED: {e:?}\n");
                    }
                }
                drop((tags, qp, peer));
                over.up();
            })?;
        }
        wait(|| over.get() == 2)?;
        wait(|| replies.get() == 2 * ROUNDS)?;
        ends.reclaim()?;
        check_eq!(ends.ended().len() as i32, 2 * ROUNDS);
        Ok(())
    }
}
