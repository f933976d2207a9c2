// SPDX-License-Identifier: GPL-2.0

//! Requests that are answered, many at once.

use crate::{
    check::expect,
    fixture::{
        recv,
        wait,
        with_faults,
        CountDrop,
        Counter,
        Env,
        Inbox,
        Link,
        Message,
        Null,
        NullEnv,
        OnDone,
        Polled,
        CAPS, //
    },
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
use rdma::{
    prelude::*,
    qp::Chain,
    session::tags::{
        Exchange,
        Reply,
        TagId,
        Tags, //
    },
    session::{
        Received,
        RecvHandler,
        RecvRing, //
    },
    wc::Success, //
};
use rdma_null::{
    Injection,
    NullDevice, //
};

const COUNT: u32 = 4;
const BITS: u32 = 4;
const LEN: usize = 8;
/// The number of threads that wait for a tag.
const WAITERS: i32 = 6;

/// The time, in microseconds, that a post waits for another one which does not come.
const WINDOW: u32 = 100_000;

/// The ends of all exchanges: the number of the tag, and the value of the reply.
#[pin_data]
struct Log {
    #[pin]
    ends: SpinLockIrq<KVec<(u16, Option<u32>)>>,
    sent: Arc<Counter>,
    failed: Arc<Counter>,
    gone: Arc<Counter>,
    /// The number of ends with a region that was idle.
    idle: Arc<Counter>,
    /// Counted when the table is freed.
    freed: Arc<Counter>,
}

/// The part that the exchanges share.
struct Common {
    log: Arc<Log>,
    _freed: CountDrop,
}

impl Common {
    fn new(log: &Arc<Log>) -> Self {
        Self {
            log: log.clone(),
            _freed: CountDrop(log.freed.clone()),
        }
    }
}

/// The memory of a request, which is posted.
struct Request {
    buf: Buf<ToDevice>,
    region: Region<FromDevice>,
    log: Arc<Log>,
}

/// The state of a request that waits for the reply.
struct Wanted {
    value: Option<u32>,
    _gone: CountDrop,
}

struct Io;

impl Exchange for Io {
    type Request = Request;
    type Reply = Wanted;
    type Connection = Common;
    type Needs = context::Atomic;

    fn sent(request: &Request, wc: &Wc, _cx: &context::Atomic) {
        match wc.result() {
            Ok(_) => request.log.sent.up(),
            Err(_) => request.log.failed.up(),
        };
    }

    fn invalidated(mut reply: Reply<'_, Self>, _wc: &Wc, _cx: &context::Atomic) {
        if reply.request().region.is_idle() {
            reply.value = reply.value.map(|value| value + 1000);
        }
    }

    fn ended(mut tag: rdma::session::tags::Tag<Self>) {
        let index = tag.id().index;
        let (request, wanted) = tag.parts();
        let (is_idle, end) = (request.region.is_idle(), (index, wanted.value.take()));
        let log = &tag.connection().log;
        if is_idle {
            log.idle.up();
        }
        if log.ends.lock().push(end, GFP_ATOMIC).is_err() {
            pr_err!("FAILED: no memory for an end\n");
        }
    }
}

type Tag = rdma::session::tags::Tag<Io>;

/// Adds the send of a request.
fn send<'a, const LINKS: usize>(request: &'a Request, chain: &mut Chain<'a, LINKS>) -> Result {
    chain.push(SendWr::send([request.buf.whole()]))
}

/// Adds the registration of its region, too.
fn register<'a>(request: &'a Request, chain: &mut Chain<'a, 2>) -> Result {
    chain.push(RegWr::remote_write(&request.region))?;
    send(request, chain)
}

/// A QP with exchanges, and its peer.
struct Ends<C: Polled> {
    tags: Arc<Tags<Io>>,
    log: Arc<Log>,
    qp: Drained<C>,
    peer: Qp<C>,
    cq: Cq<C>,
    /// The requests that have come.
    inbox: Arc<Inbox>,
    null: NullEnv,
}

/// Drains a QP whose receives keep it, also where a test fails, when its null device may still hold
/// completions back.
struct Drained<C: Polled>(Qp<C>, Option<Arc<NullDevice>>);

impl<C: Polled> Drop for Drained<C> {
    fn drop(&mut self) {
        if let Some(dev) = &self.1 {
            dev.calm();
        }
        if let Ok(cx) = Sleepable::current() {
            if let Err(e) = self.0.drain(&cx) {
                pr_err!("FAILED: {e:?}\n");
            }
        }
    }
}

impl<C: Polled> core::ops::Deref for Drained<C> {
    type Target = Qp<C>;

    fn deref(&self) -> &Qp<C> {
        &self.0
    }
}

fn make(env: &Env, log: &Arc<Log>) -> Result<(Request, Wanted)> {
    let request = Request {
        buf: Buf::alloc(&env.pd, LEN, &env.cx)?,
        region: Region::new(Buf::alloc(&env.pd, 64, &env.cx)?, &env.cx)?,
        log: log.clone(),
    };
    let wanted = Wanted {
        value: None,
        _gone: CountDrop(log.gone.clone()),
    };
    Ok((request, wanted))
}

fn new_log() -> Result<Arc<Log>> {
    let (sent, failed) = (Counter::new()?, Counter::new()?);
    let (gone, idle, freed) = (Counter::new()?, Counter::new()?, Counter::new()?);
    let init = pin_init!(Log {
        ends <- new_spinlock_irq!(KVec::new()),
        sent,
        failed,
        gone,
        idle,
        freed,
    });
    Arc::pin_init(init, GFP_KERNEL)
}

impl<C: Polled + Provides<context::Atomic>> Ends<C> {
    fn new() -> Result<Self> {
        Self::with(COUNT)
    }

    fn with(count: u32) -> Result<Self> {
        Self::on(NullEnv::new()?, count)
    }

    fn on(null: NullEnv, count: u32) -> Result<Self> {
        // What is on the device goes before it, where something fails.
        let ends = Null::<C>::on(null, &CAPS)?;
        let (log, inbox) = (new_log()?, Inbox::new()?);
        let init = |_| make(&ends.env, &log);
        let tags = Tags::new(&ends.a, Common::new(&log), count, BITS, init, &ends.env.cx)?;
        let tags = Arc::new(tags, GFP_KERNEL)?;
        let (qp, peer) = (ends.a, ends.b);
        let (env, dev) = (ends.env, ends.dev);
        Ok(Self {
            tags,
            log,
            qp: Drained(qp, Some(dev.clone())),
            peer,
            cq: ends.cq,
            inbox,
            null: NullEnv { env, dev },
        })
    }

    /// Has the peer post a receive for a request.
    fn expect(&self) -> Result {
        let request = self.null.env.message(&self.inbox, &[0; LEN])?;
        Ok(recv(&self.peer, request)?)
    }

    fn inject(&self, injection: Injection) -> Result {
        self.null.dev.inject_qp(self.qp.num(), injection)
    }

    fn post(&self, tag: Tag) -> Result<TagId> {
        let id = tag.id();
        self.expect()?;
        tag.post(&self.qp, |request, chain: &mut Chain<'_, 1>| {
            send(request, chain)
        })?;
        Ok(id)
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
        self.qp.post_recv(recv, |_| Ok(RecvWr::new([])))?;
        let message = OnDone::<context::Atomic, _>::new(|_, _| {})?;
        self.peer.post_send(message, |_| Ok(SendWr::send([])))?;
        self.wait(|| got.lock().is_some())?;
        let value = got.lock().take();
        value.ok_or(ENODATA)
    }

    /// Has a reply come. Returns whether it was waited for.
    fn reply(&self, id: TagId, value: u32) -> Result<bool> {
        self.message(move |tags, _, wc| match tags.reply(wc, id) {
            Ok(mut reply) => {
                reply.value = Some(value);
                true
            }
            Err(_) => false,
        })
    }

    /// Takes what has ended.
    fn ended(&self) -> KVec<(u16, Option<u32>)> {
        core::mem::take(&mut *self.log.ends.lock())
    }

    fn reclaim(&self) -> Result {
        self.tags.reclaim(&self.qp, &self.null.env.cx)
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

    #[track_caller]
    fn wait_for_end(&self) -> Result {
        self.wait(|| !self.log.ends.lock().is_empty())
    }

    /// Checks that all tags are free.
    #[track_caller]
    fn all_free(&self, count: u32) -> Result {
        let mut held = KVec::new();
        for _ in 0..count {
            held.push(self.tags.take()?, GFP_KERNEL)?;
        }
        check_err!(self.tags.take(), EAGAIN);
        Ok(())
    }

    fn hold(&self, count: u32) -> Result {
        self.inject(Injection::Hold { count })
    }

    fn release(&self) -> Result {
        self.inject(Injection::Release {
            count: u32::MAX,
            reversed: false,
        })
    }
}

fn both_orders<C: Polled + Provides<context::Atomic>>() -> Result {
    let ends = Ends::<C>::new()?;
    // The send completes before the reply.
    let id = ends.post(ends.tags.take()?)?;
    ends.wait_for_sends(1)?;
    check!(ends.ended().is_empty());
    check!(ends.reply(id, 7)?);
    check_eq!(&ends.ended()[..], &[(id.index, Some(7))]);

    // The reply comes first. The tag is not free before the send has completed.
    ends.hold(1)?;
    let id = ends.post(ends.tags.take()?)?;
    check!(ends.reply(id, 8)?);
    check!(ends.ended().is_empty());
    let mut held = KVec::new();
    while let Ok(tag) = ends.tags.take() {
        check!(tag.id().index != id.index);
        held.push(tag, GFP_KERNEL)?;
    }
    check_eq!(held.len() as u32, COUNT - 1);
    drop(held);
    ends.release()?;
    ends.wait_for_end()?;
    check_eq!(&ends.ended()[..], &[(id.index, Some(8))]);
    ends.all_free(COUNT)
}

/// Registers a region and posts the request; then the reply comes, without an invalidation by the
/// peer. Its handler has the region invalidated, which may go wrong. Returns whether that was
/// posted.
fn invalidates<C: Polled + Provides<context::Atomic>>(
    ends: &Ends<C>,
    wrong: Option<Injection>,
) -> Result<bool> {
    let tag = ends.tags.take()?;
    let id = tag.id();
    ends.expect()?;
    tag.post(&ends.qp, register)?;
    ends.wait(|| ends.log.sent.get() > 0)?;
    let dev = ends.null.dev.clone();
    ends.message(move |tags, qp, wc| {
        let Ok(mut reply) = tags.reply(wc, id) else {
            return false;
        };
        reply.value = Some(1);
        if wrong.is_some_and(|wrong| dev.inject_qp(qp.num(), wrong).is_err()) {
            return false;
        }
        reply
            .post(qp, |request| Ok(InvWr::new(&request.region)))
            .is_ok()
    })
}

/// An end of a connection: the one that asks has tags.
struct Conn {
    qp: Qp<Workqueue>,
    tags: Option<Arc<Tags<Io>>>,
    pd: Pd,
    sent: Arc<Inbox>,
    strange: Arc<Counter>,
}

impl RecvHandler for Conn {
    type Send = Workqueue;
    type Recv = Workqueue;
    type Needs = Sleepable;

    fn qp(&self) -> &Qp<Workqueue> {
        &self.qp
    }

    fn received(mut message: Received<'_, Self>, cx: &Sleepable) {
        let wc = *message.wc();
        let (conn, bytes) = message.open();
        let word = |at: usize| {
            let bytes = bytes.get(at..at + 4).and_then(|b| b.try_into().ok());
            u32::from_le_bytes(bytes.unwrap_or_default())
        };
        let handled = match &conn.tags {
            Some(tags) => conn.answered(tags, &wc, word(0)),
            None => conn.answer(&bytes, word(4), cx),
        };
        if handled.is_err() {
            conn.strange.up();
        }
    }

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {}

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {}
}

impl Conn {
    fn new(env: &Env, qp: &Qp<Workqueue>, tags: Option<Arc<Tags<Io>>>) -> Result<Arc<Self>> {
        let this = Self {
            pd: env.pd.clone(),
            qp: qp.clone(),
            tags,
            sent: Inbox::new()?,
            strange: Counter::new()?,
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// A reply has come, and has invalidated the region of its request.
    fn answered(&self, tags: &Tags<Io>, wc: &Success<'_>, id: u32) -> Result {
        let mut reply = tags.reply(wc, TagId::from_u32(id))?;
        let region = &reply.request().region;
        if !region.remote_invalidated(wc, &self.qp) {
            return Err(EPROTO);
        }
        reply.value = Some(id);
        Ok(())
    }

    /// A request has come: the reply has the same bytes.
    fn answer(&self, bytes: &[u8], rkey: u32, cx: &Sleepable) -> Result {
        let message = Message::new(&self.pd, &self.sent, bytes, cx)?;
        self.qp.post_send(message, |m| {
            Ok(SendWr::send([m.buf.whole()]).invalidating(rkey))
        })?;
        Ok(())
    }
}

const THREADS: u32 = 3;
const EXCHANGES: u32 = 200;

/// Threads have `EXCHANGES` each, of a few tags, and each gets its own reply.
fn many(env: &Env, a: &Qp<Workqueue>, b: &Qp<Workqueue>) -> Result {
    let log = new_log()?;
    let tags = Tags::new(
        a,
        Common::new(&log),
        COUNT,
        16,
        |_| make(env, &log),
        &env.cx,
    )?;
    let tags = Arc::new(tags, GFP_KERNEL)?;
    let (host, target) = (
        Conn::new(env, a, Some(tags.clone()))?,
        Conn::new(env, b, None)?,
    );
    let drained = (Drained(a.clone(), None), Drained(b.clone(), None));
    let (pd, count, len) = (&env.pd, COUNT, LEN);
    RecvRing { pd, count, len }.post(&host, &env.cx)?;
    RecvRing { pd, count, len }.post(&target, &env.cx)?;
    let exchanged = exchange(env, &tags, a, &log);
    // Whoever waits for a tag ends by this.
    tags.reclaim(a, &env.cx)?;
    let total = exchanged?;
    check_eq!((host.strange.get(), target.strange.get()), (0, 0));
    check_eq!(log.ends.lock().len(), total);
    for (tag, value) in log.ends.lock().iter() {
        check_eq!(value.map(|id| TagId::from_u32(id).index), Some(*tag));
    }
    drop(drained);
    Ok(())
}

/// Has the threads do their exchanges, waits for all ends, and returns their number.
fn exchange(env: &Env, tags: &Arc<Tags<Io>>, qp: &Qp<Workqueue>, log: &Log) -> Result<usize> {
    // With a fault, what is allocated later takes long.
    let each = if with_faults() { 10 } else { EXCHANGES };
    let (done, failed) = (Counter::new()?, Counter::new()?);
    for _ in 0..THREADS {
        let (tags, qp) = (tags.clone(), qp.clone());
        let (done, failed) = (done.clone(), failed.clone());
        env.client.spawn(GFP_KERNEL, move |cx| {
            let ask = || {
                let tag = tags.wait(100_000, cx)?;
                let id = tag.id().to_u32();
                tag.post(&qp, |request, chain: &mut Chain<'_, 2>| {
                    let remote = chain.push(RegWr::remote_write(&request.region))?;
                    request.buf.write(0, &id.to_le_bytes())?;
                    request.buf.write(4, &remote.rkey.to_le_bytes())?;
                    send(request, chain)
                })
                .map_err(Error::from)
            };
            if (0..each).any(|_| ask().is_err()) {
                failed.up();
            }
            drop((tags, qp));
            done.up();
        })?;
    }
    wait(|| done.get() == THREADS as i32)?;
    let total = (THREADS * each) as usize;
    wait(|| failed.get() > 0 || log.ends.lock().len() == total)?;
    check_eq!(failed.get(), 0);
    Ok(total)
}

#[kunit_tests(rdma_session_tags)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_the_tags() -> Result {
        let ends = Null::<Workqueue>::with(&Caps::new(16, 8))?;
        let (a, b) = (ends.a, ends.b);
        many(&ends.env, &a, &b)
    }

    #[test]
    fn threads_share_the_tags_of_a_connection() -> Result {
        let (env, caps) = (Env::new()?, Caps::new(16, 8));
        let cq = env.cq::<Workqueue>(2 * caps.entries())?;
        let link = Link::on(env, &cq, &cq, &caps, &cm::ConnParam::default())?;
        many(&link.env, &link.a.qp, &link.b.qp)
    }

    #[test]
    fn both_halves_come_home_softirq() -> Result {
        both_orders::<Softirq>()
    }

    #[test]
    fn both_halves_come_home_workqueue() -> Result {
        both_orders::<Workqueue>()
    }

    #[test]
    fn both_halves_come_home_direct() -> Result {
        both_orders::<Direct>()
    }

    #[test]
    fn both_halves_come_home_waited() -> Result {
        both_orders::<Waited>()
    }

    #[test]
    fn strange_replies_find_nothing() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let tag = ends.tags.take()?;
        let id = tag.id();
        let other = |index: u16, generation: u16| TagId { index, generation };
        // It is not posted.
        check!(!ends.reply(id, 1)?);
        ends.hold(1)?;
        let id = ends.post(tag)?;
        for generation in 1..1 << BITS {
            check!(!ends.reply(other(id.index, id.generation + generation), 1)?);
        }
        for index in [COUNT as u16, u16::MAX] {
            check!(!ends.reply(other(index, id.generation), 1)?);
        }
        // The peer returns four bits.
        check!(ends.reply(other(id.index, id.generation + (1 << BITS)), 2)?);
        check!(!ends.reply(id, 3)?);
        ends.release()?;
        ends.wait_for_end()?;
        check!(!ends.reply(id, 4)?);
        check_eq!(&ends.ended()[..], &[(id.index, Some(2))]);
        // The next exchange of the tag.
        let tag = ends.tags.take()?;
        check_eq!(tag.id(), other(id.index, id.generation + 1));
        let next = ends.post(tag)?;
        check!(!ends.reply(id, 5)?);
        check!(ends.reply(next, 6)?);
        ends.wait_for_end()?;
        check_eq!(&ends.ended()[..], &[(id.index, Some(6))]);
        ends.all_free(COUNT)
    }

    #[test]
    fn names_are_one_word() -> Result {
        for raw in [0, 1, 0x1_0000, 0x8000_7fff, u32::MAX] {
            check_eq!(TagId::from_u32(raw).to_u32(), raw);
        }
        let id = TagId {
            index: 3,
            generation: 2,
        };
        check_eq!(id.to_u32(), 0x2_0003);
        Ok(())
    }

    #[test]
    fn request_that_is_not_made_gives_the_tag_back() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let refused = ends
            .tags
            .take()?
            .post(&ends.qp, |_, _: &mut Chain<'_, 1>| Err(EDOM));
        let e = refused.err().ok_or(ENODATA)?;
        check_eq!(e.error(), EDOM);
        check!(e.owner.is_some());
        drop(e);
        let refused = ends
            .tags
            .take()?
            .post(&ends.peer, |request, chain: &mut Chain<'_, 1>| {
                send(request, chain)
            });
        let e = refused.err().ok_or(ENODATA)?;
        check_eq!(e.error(), EINVAL);
        check!(e.owner.is_some());
        drop(e);
        ends.all_free(COUNT)
    }

    /// The driver refuses a request, or the one behind it. The peer answers nevertheless. The
    /// exchange ends once the QP was drained, or is destroyed if a request was posted.
    #[test]
    fn refused_request_ends_after_the_drain() -> Result {
        // The last driver does not say that it has posted the first one.
        for (posted, answered, erdma) in [
            (0, false, false),
            (0, true, false),
            (1, false, false),
            (1, true, false),
            (1, false, true),
        ] {
            let (ends, error) = match erdma {
                true => (Ends::<Softirq>::on(NullEnv::erdma()?, COUNT)?, ENOMEM),
                false => (Ends::<Softirq>::new()?, EIO),
            };
            ends.inject(Injection::Refuse {
                after: posted,
                errno: error.to_errno().unsigned_abs(),
            })?;
            let tag = ends.tags.take()?;
            let id = tag.id();
            ends.expect()?;
            let e = tag.post(&ends.qp, register).err().ok_or(ENODATA)?;
            check_eq!(e.error(), error);
            check_eq!(e.posted(), posted);
            check!(e.owner.is_none());
            if answered {
                check!(ends.reply(id, 1)?);
            }
            check!(!answered || !ends.reply(id, 1)?);
            check!(ends.ended().is_empty());
            ends.reclaim()?;
            let end = (id.index, answered.then_some(1));
            if posted > 0 {
                check!(ends.ended().is_empty());
                let Ends { log, qp, peer, .. } = ends;
                drop((qp, peer));
                wait(|| !log.ends.lock().is_empty())?;
                check_eq!(&log.ends.lock()[..], &[end]);
            } else {
                check_eq!(&ends.ended()[..], &[end]);
            }
        }
        Ok(())
    }

    /// The driver does not say which request it has refused. The exchange may never end, and then
    /// the table is leaked.
    #[test]
    fn send_that_lapses_completes() -> Result {
        let ends = Ends::<Softirq>::new()?;
        expect(
            1,
            "did not say which request it refused: the owner is leaked",
        );
        ends.inject(Injection::Lapse { after: 0, errno: 5 })?;
        let e = ends.post(ends.tags.take()?).err().ok_or(ENODATA)?;
        check_eq!(e, EIO);
        ends.wait_for_sends(1)?;
        ends.reclaim()?;
        check_eq!(ends.ended().len(), 1);
        Ok(())
    }

    #[test]
    fn reclaim_ends_what_is_out() -> Result {
        let ends = Ends::<Workqueue>::new()?;
        // One that was sent, one whose send is held, and one that was answered before that.
        ends.post(ends.tags.take()?)?;
        ends.wait_for_sends(1)?;
        ends.hold(2)?;
        ends.post(ends.tags.take()?)?;
        let id = ends.post(ends.tags.take()?)?;
        check!(ends.reply(id, 3)?);
        check!(ends.ended().is_empty());
        let held = ends.tags.take()?;
        ends.tags.close(ECONNRESET);
        check!(!ends.reply(held.id(), 1)?);
        ends.release()?;
        ends.reclaim()?;
        let mut all = ends.ended();
        all.sort_unstable();
        check_eq!(&all[..], &[(0, None), (1, None), (2, Some(3))]);
        check_err!(ends.tags.take(), ECONNRESET);
        // The tag comes back.
        check_err!(ends.post(held), ECONNRESET);
        check!(ends.ended().is_empty());
        Ok(())
    }

    /// Another thread posts while the table is closed and the QP drained. That is flushed, and ends
    /// by that.
    #[test]
    fn post_that_races_with_the_close_ends() -> Result {
        let ends = Ends::<Workqueue>::new()?;
        let tag = ends.tags.take()?;
        let (tags, qp) = (ends.tags.clone(), ends.qp.0.clone());
        tag.post(&ends.qp, |request, chain: &mut Chain<'_, 1>| {
            // The table was open when the post began.
            tags.close(ECONNRESET);
            qp.drain(&Sleepable::current()?)?;
            send(request, chain)
        })?;
        ends.wait_for_end()?;
        check_eq!(&ends.ended()[..], &[(0, None)]);
        check_eq!(ends.log.failed.get(), 1);
        Ok(())
    }

    /// A peer answers a request that the driver has not posted yet, and the device invalidates a
    /// region that is not registered yet. It is not idle by that.
    #[test]
    fn invalidation_that_overtakes_the_request_proves_nothing() -> Result {
        let ends = Ends::<Workqueue>::on(NullEnv::iwarp()?, COUNT)?;
        let (tag, done) = (ends.tags.take()?, Counter::new()?);
        let (id, num, dev, over) = (
            tag.id(),
            ends.qp.num(),
            ends.null.dev.clone(),
            Counter::new()?,
        );
        let (tags, qp, up) = (ends.tags.clone(), ends.qp.0.clone(), done.clone());
        // The handler is called where there is another CPU than that which posts.
        let answer = OnDone::<context::Atomic, _>::new(move |wc, _| {
            let reply = wc.result().ok().and_then(|wc| tags.reply(&wc, id).ok());
            if reply.is_some_and(|reply| reply.post(&qp, |r| Ok(InvWr::new(&r.region))).is_ok()) {
                up.up();
            }
        })?;
        ends.qp.post_recv(answer, |_| Ok(RecvWr::new([])))?;
        ends.expect()?;
        ends.inject(Injection::Stall {
            us: WINDOW,
            late: false,
        })?;
        let (peer, ends_too) = (ends.peer.clone(), over.clone());
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
        tag.post(&ends.qp, register)?;
        wait(|| over.get() == 1)?;
        ends.wait_for_sends(1)?;
        check_eq!(done.get(), 1);
        check!(ends.ended().is_empty());
        ends.reclaim()?;
        check_eq!(&ends.ended()[..], &[(id.index, None)]);
        check_eq!(ends.log.idle.get(), 0);
        Ok(())
    }

    /// Another QP of the CQ is drained by a thread that polls for that.
    #[test]
    fn drain_of_another_qp_handles_completions_as_any_poller() -> Result {
        let ends = Ends::<Direct>::new()?;
        ends.post(ends.tags.take()?)?;
        ends.peer.drain(&ends.null.env.cx)?;
        check_eq!(ends.log.sent.get(), 1);
        Ok(())
    }

    #[test]
    fn reclaim_is_for_its_own_qp() -> Result {
        let ends = Ends::<Softirq>::new()?;
        check_err!(ends.tags.reclaim(&ends.peer, &ends.null.env.cx), EINVAL);
        drop(ends.tags.take()?);
        Ok(())
    }

    /// The table goes first, or the QP does, or a tag is held for longer than both.
    #[test]
    fn parts_are_dropped_once_all_is_gone() -> Result {
        for order in 0..3 {
            let ends = Ends::<Softirq>::new()?;
            ends.post(ends.tags.take()?)?;
            ends.post(ends.tags.take()?)?;
            let held = ends.tags.take()?;
            let Ends {
                tags,
                log,
                qp,
                peer,
                cq,
                inbox,
                null,
            } = ends;
            drop(peer);
            match order {
                0 => {
                    drop((tags, held));
                    check_eq!((log.gone.get(), log.freed.get()), (0, 0));
                    drop(qp);
                }
                1 => {
                    drop((qp, held));
                    wait(|| null.dev.objects()[1] == 0)?;
                    wait(|| log.ends.lock().len() == 2)?;
                    check_eq!(log.gone.get(), 0);
                    check_err!(tags.take(), ENOTCONN);
                    drop(tags);
                }
                _ => {
                    drop((qp, tags));
                    wait(|| log.ends.lock().len() == 2)?;
                    check_eq!((log.gone.get(), log.freed.get()), (0, 0));
                    check!(Arc::ptr_eq(&held.connection().log, &log));
                    drop(held);
                }
            }
            wait(|| log.gone.get() == COUNT as i32)?;
            wait(|| log.freed.get() == 1)?;
            check_eq!(log.ends.lock().len(), 2);
            drop((cq, inbox));
        }
        Ok(())
    }

    /// A completion in an array is handled some time, so the tag is back after the drain only, and
    /// after the end of the QP if it is handled then.
    #[test]
    fn completions_in_an_array_are_strays() -> Result {
        for late in [false, true] {
            let ends = Ends::<Direct>::new()?;
            let id = ends.post(ends.tags.take()?)?;
            let mut array = WcArray::<4>::new();
            // The receive of the peer, too.
            check_eq!(ends.cq.poll(&mut array)?, 2);
            if !late {
                array.completions().for_each(cq::Completion::dispatch);
            }
            check!(ends.reply(id, 5)?);
            check!(ends.ended().is_empty());
            check_eq!(ends.log.sent.get(), 0);
            ends.reclaim()?;
            check_eq!(ends.ended().len(), usize::from(!late));
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
            check_eq!(log.ends.lock().len(), usize::from(late));
            drop((cq, inbox));
        }
        Ok(())
    }

    /// A reply whose completion is in an array is not found.
    #[test]
    fn reply_in_an_array_finds_nothing() -> Result {
        let ends = Ends::<Direct>::new()?;
        let id = ends.post(ends.tags.take()?)?;
        ends.wait_for_sends(1)?;
        let found = Counter::new()?;
        let (tags, finds) = (ends.tags.clone(), found.clone());
        let recv = OnDone::<context::Atomic, _>::new(move |wc, _| {
            if wc.result().is_ok_and(|wc| tags.reply(&wc, id).is_ok()) {
                finds.up();
            }
        })?;
        ends.qp.post_recv(recv, |_| Ok(RecvWr::new([])))?;
        let message = OnDone::<context::Atomic, _>::new(|_, _| {})?;
        ends.peer.post_send(message, |_| Ok(SendWr::send([])))?;
        let mut array = WcArray::<4>::new();
        check!(ends.cq.poll(&mut array)? > 0);
        drop(array);
        check_eq!(found.get(), 0);
        check!(ends.reply(id, 1)?);
        check_eq!(ends.ended().len(), 1);
        Ok(())
    }

    #[test]
    fn waiter_gets_the_tag_that_is_freed() -> Result {
        let ends = Ends::<Workqueue>::with(1)?;
        let cx = &ends.null.env.cx;
        let tag = ends.tags.take()?;
        check_err!(ends.tags.wait(0, cx), ETIMEDOUT);
        let id = ends.post(tag)?;
        let (tags, got) = (ends.tags.clone(), Counter::new()?);
        let gets = got.clone();
        ends.null.env.client.spawn(GFP_KERNEL, move |cx| {
            if tags.wait(100_000, cx).is_ok() {
                gets.up();
            }
            drop(tags);
            gets.up();
        })?;
        check!(ends.reply(id, 1)?);
        ends.wait(|| got.get() == 2)?;
        // Nothing waits for a tag.
        ends.all_free(1)
    }

    /// By either wait. Each holds the tag for a while, so that others wait.
    #[test]
    fn tag_goes_from_waiter_to_waiter() -> Result {
        let ends = Ends::<Workqueue>::with(1)?;
        let (tag, got) = (ends.tags.take()?, Counter::new()?);
        for n in 0..WAITERS {
            let (tags, gets) = (ends.tags.clone(), got.clone());
            ends.null.env.client.spawn(GFP_KERNEL, move |cx| {
                let tag = match n % 2 {
                    0 => tags.wait(100_000, cx),
                    _ => tags.wait_killable(cx),
                };
                fsleep(Delta::from_millis(1));
                if tag.is_ok() {
                    gets.up();
                }
                drop(tag);
                drop(tags);
                gets.up();
            })?;
        }
        drop(tag);
        ends.wait(|| got.get() == 2 * WAITERS)?;
        ends.all_free(1)
    }

    /// The error is that of the ULP, also if it is the one of `take()` where no tag is free.
    #[test]
    fn waiters_fail_when_the_table_is_closed() -> Result {
        for error in [ECONNRESET, EAGAIN] {
            let ends = Ends::<Workqueue>::with(1)?;
            let held = ends.tags.take()?;
            let failed = Counter::new()?;
            for n in 0..WAITERS {
                let (tags, fails) = (ends.tags.clone(), failed.clone());
                ends.null.env.client.spawn(GFP_KERNEL, move |cx| {
                    let tag = match n % 2 {
                        0 => tags.wait(100_000, cx),
                        _ => tags.wait_killable(cx),
                    };
                    if matches!(tag, Err(e) if e == error) {
                        fails.up();
                    }
                    drop(tags);
                    fails.up();
                })?;
            }
            ends.tags.close(error);
            ends.wait(|| failed.get() == 2 * WAITERS)?;
            drop(held);
        }
        Ok(())
    }

    #[test]
    fn more_tags_than_a_word_has_bits() -> Result {
        let count = 2 * usize::BITS + 3;
        let ends = Ends::<Softirq>::with(count)?;
        let mut held: KVec<Tag> = KVec::new();
        let mut seen = KVec::from_elem(false, count as usize, GFP_KERNEL)?;
        for _ in 0..count {
            let tag = ends.tags.take()?;
            let index = usize::from(tag.id().index);
            check!(!core::mem::replace(&mut seen[index], true));
            held.push(tag, GFP_KERNEL)?;
        }
        check_err!(ends.tags.take(), EAGAIN);
        drop(held);
        ends.all_free(count)
    }

    #[test]
    fn tag_is_taken_by_its_index() -> Result {
        let count = 2 * usize::BITS + 3;
        let ends = Ends::<Softirq>::with(count)?;
        let mut held: KVec<Tag> = KVec::new();
        // From the last one on, so that no other is the first that is free.
        for index in (0..count as u16).rev() {
            let tag = ends.tags.take_at(index)?;
            check_eq!(tag.id().index, index);
            check_err!(ends.tags.take_at(index), EBUSY);
            held.push(tag, GFP_KERNEL)?;
        }
        check_err!(ends.tags.take(), EAGAIN);
        check_err!(ends.tags.take_at(count as u16), EINVAL);
        check_err!(ends.tags.take_at(u16::MAX), EINVAL);
        // The last one that was taken is that of index 0.
        drop(held.pop());
        check_err!(ends.tags.take_at(1), EBUSY);
        let tag = ends.tags.take()?;
        check_eq!(tag.id().index, 0);
        check_err!(ends.tags.take_at(0), EBUSY);
        drop((tag, held));
        ends.all_free(count)?;
        ends.tags.close(ECONNRESET);
        check_err!(ends.tags.take_at(0), ECONNRESET);
        Ok(())
    }

    /// As a request of blk-mq whose tag is used again, and as a command behind those.
    #[test]
    fn index_is_busy_until_its_exchange_has_ended() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let last = COUNT as u16 - 1;
        ends.hold(1)?;
        let id = ends.post(ends.tags.take_at(last)?)?;
        check_eq!(id.index, last);
        check_err!(ends.tags.take_at(last), EBUSY);
        check!(ends.reply(id, 7)?);
        check_err!(ends.tags.take_at(last), EBUSY);
        ends.release()?;
        ends.wait_for_end()?;
        check_eq!(&ends.ended()[..], &[(last, Some(7))]);
        let next = ends.tags.take_at(last)?;
        check_eq!(
            (next.id().index, next.id().generation),
            (last, id.generation + 1)
        );
        drop(next);
        ends.all_free(COUNT)
    }

    #[test]
    fn waiter_gets_a_tag_that_was_taken_by_its_index() -> Result {
        let ends = Ends::<Workqueue>::with(1)?;
        let tag = ends.tags.take_at(0)?;
        let (tags, got) = (ends.tags.clone(), Counter::new()?);
        let gets = got.clone();
        ends.null.env.client.spawn(GFP_KERNEL, move |cx| {
            if tags.wait(100_000, cx).is_ok() {
                gets.up();
            }
            drop(tags);
            gets.up();
        })?;
        check_err!(ends.tags.take_at(0), EBUSY);
        drop(tag);
        ends.wait(|| got.get() == 2)?;
        ends.all_free(1)
    }

    #[test]
    fn table_is_refused() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let (env, log) = (&ends.null.env, &ends.log);
        let new = |qp: &Qp<Softirq>, count, bits| {
            let make = |_| make(env, log);
            Tags::<Io>::new(qp, Common::new(log), count, bits, make, &env.cx).map(drop)
        };
        check_err!(new(&ends.qp, 0, 4), EINVAL);
        check_err!(new(&ends.qp, (1 << 16) + 1, 4), EINVAL);
        check_err!(new(&ends.qp, 1, 17), EINVAL);
        new(&ends.qp, 1, 16)?;
        new(&ends.qp, 1, 0)?;
        let cqs = [env.cq::<Softirq>(64)?, env.cq::<Softirq>(64)?];
        let two = Qp::create_raw(&env.pd, &cqs[0], &cqs[1], &CAPS, &env.cx)?;
        check_err!(new(&two, 1, 4), EINVAL);
        let pooled = Cq::<Softirq>::pool_get(&env.dev, 64, None, &env.cx)?;
        check_err!(new(&env.raw_qp(&pooled, &CAPS)?, 1, 4), EINVAL);
        let made = Tags::<Io>::new(
            &ends.qp,
            Common::new(log),
            2,
            4,
            |id| match id.index {
                0 => make(env, log),
                _ => Err(EDOM),
            },
            &env.cx,
        );
        check_err!(made.map(drop), EDOM);
        Ok(())
    }

    #[test]
    fn region_is_invalidated_for_the_reply() -> Result {
        let ends = Ends::<Softirq>::new()?;
        check!(invalidates(&ends, None)?);
        ends.wait_for_end()?;
        check_eq!(&ends.ended()[..], &[(0, Some(1001))]);
        // The region is idle, so that it can be registered again.
        let mut tag = ends.tags.take()?;
        check!(tag.parts().0.region.is_idle());
        ends.expect()?;
        tag.post(&ends.qp, register)?;
        ends.reclaim()
    }

    #[test]
    fn region_is_invalidated_where_the_caller_polls() -> Result {
        let ends = Ends::<Direct>::new()?;
        check!(invalidates(&ends, None)?);
        ends.wait_for_end()?;
        check_eq!(&ends.ended()[..], &[(0, Some(1001))]);
        Ok(())
    }

    /// The exchange is out until the QP was drained.
    #[test]
    fn invalidation_fails() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let fails = Injection::Status {
            status: wc::Status::GENERAL_ERR.as_raw(),
            vendor_err: 0,
            count: 1,
            fatal: false,
        };
        check!(invalidates(&ends, Some(fails))?);
        check!(ends.ended().is_empty());
        ends.reclaim()?;
        check_eq!(&ends.ended()[..], &[(0, Some(1))]);
        Ok(())
    }

    #[test]
    fn invalidation_is_not_posted_to_another_qp() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let tag = ends.tags.take()?;
        let (id, peer) = (tag.id(), ends.peer.clone());
        ends.expect()?;
        tag.post(&ends.qp, register)?;
        let error = ends.message(move |tags, _, wc| {
            let reply = tags.reply(wc, id).ok()?;
            let posted = reply.post(&peer, |request| Ok(InvWr::new(&request.region)));
            posted.err().map(|e| (e.error(), e.owner.is_some()))
        })?;
        check_eq!(error, Some((EINVAL, true)));
        ends.wait_for_end()
    }

    #[test]
    fn invalidation_is_refused() -> Result {
        let ends = Ends::<Softirq>::new()?;
        let refuse = Injection::Refuse { after: 0, errno: 5 };
        check!(!invalidates(&ends, Some(refuse))?);
        check_eq!(&ends.ended()[..], &[(0, Some(1))]);
        Ok(())
    }
}
