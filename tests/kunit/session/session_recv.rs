// SPDX-License-Identifier: GPL-2.0

//! Receives that are posted again when their message was handled.

#[cfg(has_faults)]
use crate::fixture::with_fault;
use crate::{
    check::expect,
    fixture::{
        send,
        wait,
        CountDrop,
        Counter,
        Inbox,
        Link,
        Null,
        NullEnv,
        OnDone,
        Polled,
        Polls,
        CAPS, //
    }, //
};
use core::marker::PhantomData;
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
    session::{
        Kept,
        Received,
        RecvHandler,
        RecvRing, //
    }, //
};
use rdma_null::Injection;

const LEN: usize = 16;
const COUNT: u32 = 4;

/// The receiving end of a connection. A message that begins with [`KEEP`] is kept.
#[pin_data]
struct Conn<C: Polls> {
    qp: Qp<C>,
    /// The first bytes of all messages, or their number where they have none.
    #[pin]
    first: SpinLockIrq<KVec<u8>>,
    /// What each message has behind its header, or the error of one that is too short.
    #[pin]
    behind: SpinLockIrq<KVec<Result<usize>>>,
    #[pin]
    kept: SpinLockIrq<KVec<Kept<Self>>>,
    failed: Arc<Counter>,
    refused: Arc<Counter>,
    _gone: CountDrop,
    _context: PhantomData<C>,
}

/// What a message begins with.
#[derive(FromBytes)]
#[repr(C)]
struct Header([u8; 8]);

const KEEP: u8 = 0x80;
const EMPTY: u8 = 0xff;

impl<C: Polls> RecvHandler for Conn<C> {
    type Send = C;
    type Recv = C;
    type Needs = context::Atomic;

    fn qp(&self) -> &Qp<C> {
        &self.qp
    }

    fn received(mut message: Received<'_, Self>, _cx: &context::Atomic) {
        let (conn, bytes) = message.open();
        let first = bytes.first().copied().unwrap_or(EMPTY);
        let behind = bytes.header::<Header>().and_then(|(header, rest)| {
            let is_right = header.0 == [first; 8];
            is_right.then_some(rest.len()).ok_or(EBADMSG)
        });
        let noted = conn.first.lock().push(first, GFP_ATOMIC);
        let noted = noted.and(conn.behind.lock().push(behind, GFP_ATOMIC));
        drop(bytes);
        if noted.is_err() {
            pr_err!("FAILED: no memory for a message\n");
        }
        if first == KEEP {
            let conn = message.conn().clone();
            let kept = conn.kept.lock().push(message.keep(), GFP_ATOMIC);
            if kept.is_err() {
                pr_err!("FAILED: no memory for a message that is kept\n");
            }
        }
    }

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {
        self.failed.up();
    }

    fn refused(self: ArcBorrow<'_, Self>, error: Error) {
        if error == ENOMEM {
            self.refused.up();
        }
    }
}

/// The counts that are left of a connection.
struct Counts {
    failed: Arc<Counter>,
    refused: Arc<Counter>,
    gone: Arc<Counter>,
}

impl<C: Polls> Conn<C> {
    fn new(qp: Qp<C>) -> Result<(Arc<Self>, Counts)> {
        let counts = Counts {
            failed: Counter::new()?,
            refused: Counter::new()?,
            gone: Counter::new()?,
        };
        let (failed, refused) = (counts.failed.clone(), counts.refused.clone());
        let gone = CountDrop(counts.gone.clone());
        let conn = pin_init!(Self {
            qp,
            first <- new_spinlock_irq!(KVec::new()),
            behind <- new_spinlock_irq!(KVec::new()),
            kept <- new_spinlock_irq!(KVec::new()),
            failed,
            refused,
            _gone: gone,
            _context: PhantomData,
        });
        Ok((Arc::pin_init(conn, GFP_KERNEL)?, counts))
    }

    fn messages(&self) -> usize {
        self.first.lock().len()
    }

    fn give_back(&self) {
        let kept = core::mem::take(&mut *self.kept.lock());
        drop(kept);
    }
}

/// Drains a QP whose receives keep it, also where a test fails.
struct Drained<C: Polls>(Qp<C>);

impl<C: Polls> Drop for Drained<C> {
    fn drop(&mut self) {
        if let Ok(cx) = Sleepable::current() {
            if let Err(e) = self.0.drain(&cx) {
                pr_err!("FAILED: {e:?}\n");
            }
        }
    }
}

/// A QP with receives, and its peer, which sends.
struct Ends<C: Polled> {
    drained: Drained<C>,
    peer: Qp<C>,
    conn: Arc<Conn<C>>,
    counts: Counts,
    cq: Cq<C>,
    inbox: Arc<Inbox>,
    null: NullEnv,
}

impl<C: Polled> Ends<C> {
    /// Posts nothing yet.
    fn bare(null: NullEnv) -> Result<Self> {
        let Null { a, b, cq, env, dev } = Null::<C>::on(null, &CAPS)?;
        let (conn, counts) = Conn::new(b)?;
        Ok(Self {
            drained: Drained(conn.qp.clone()),
            peer: a,
            conn,
            counts,
            cq,
            inbox: Inbox::new()?,
            null: NullEnv { env, dev },
        })
    }

    fn new() -> Result<Self> {
        Self::on(NullEnv::new()?)
    }

    fn on(null: NullEnv) -> Result<Self> {
        let this = Self::bare(null)?;
        this.post()?;
        Ok(this)
    }

    fn post(&self) -> Result {
        let ring = RecvRing {
            pd: &self.null.env.pd,
            count: COUNT,
            len: LEN,
        };
        ring.post(&self.conn, &self.null.env.cx)
    }

    fn inject(&self, injection: Injection) -> Result {
        self.null.dev.inject_qp(self.conn.qp.num(), injection)
    }

    /// Sends messages of these first bytes, one after the other, and waits for the completion of
    /// each.
    fn send(&self, first: impl Iterator<Item = u8>) -> Result {
        for first in first {
            let sent = self.inbox.len() + 1;
            let message = self.null.env.message(&self.inbox, &[first; LEN])?;
            send(&self.peer, message)?;
            self.wait(|| self.inbox.len() == sent)?;
        }
        Ok(())
    }

    fn wait(&self, mut condition: impl FnMut() -> bool) -> Result {
        wait(|| {
            C::poll(&self.cq);
            condition()
        })
    }

    /// Waits until all receives have come back and the connection is freed.
    fn ends(self, failed: i32) -> Result {
        // Dropped in this order: the removal of the device waits for the rest.
        let null = self.null;
        let (cq, counts, conn) = (self.cq, self.counts, self.conn);
        drop((self.peer, self.inbox));
        drop(conn);
        drop(self.drained);
        wait(|| {
            C::poll(&cq);
            counts.gone.get() == 1
        })?;
        check_eq!(counts.failed.get(), failed);
        wait(|| null.dev.objects()[1] == 0)
    }
}

fn many_messages<C: Polled>() -> Result {
    let ends = Ends::<C>::new()?;
    ends.send(0..50)?;
    ends.wait(|| ends.conn.messages() == 50)?;
    for (n, first) in ends.conn.first.lock().iter().enumerate() {
        check_eq!(usize::from(*first), n);
    }
    check_eq!(ends.counts.failed.get(), 0);
    ends.ends(COUNT as i32)
}

/// Messages that come when the receives were released are none.
fn releases<C: Polled>() -> Result {
    let ends = Ends::<C>::new()?;
    ends.send(0..2)?;
    ends.wait(|| ends.conn.messages() == 2)?;
    ends.conn.qp.release_recvs(&ends.null.env.cx)?;
    ends.send(2..4)?;
    ends.conn.qp.drain(&ends.null.env.cx)?;
    check_eq!(ends.conn.messages(), 2);
    ends.ends(0)
}

/// A connection whose handler goes on when its receives are being released.
struct Slow {
    qp: Qp<Workqueue>,
    begun: Arc<Counter>,
    /// A thread is about to release the receives, and has.
    releases: Arc<Counter>,
    released: Arc<Counter>,
    /// The handler could not do that, and the other thread had not meanwhile.
    refused: Arc<Counter>,
    alive: Arc<Counter>,
    _gone: CountDrop,
}

impl RecvHandler for Slow {
    type Send = Workqueue;
    type Recv = Workqueue;
    type Needs = Sleepable;

    fn qp(&self) -> &Qp<Workqueue> {
        &self.qp
    }

    fn received(message: Received<'_, Self>, cx: &Sleepable) {
        let conn = message.conn();
        conn.begun.up();
        let releases = wait(|| conn.releases.get() == 1);
        if conn.qp.release_recvs(cx) == Err(EDEADLK) {
            conn.refused.up();
        }
        fsleep(Delta::from_millis(20));
        if releases.is_ok() && conn.released.get() == 0 {
            conn.alive.up();
        }
    }

    fn failed(self: ArcBorrow<'_, Self>, _error: WcError) {}

    fn refused(self: ArcBorrow<'_, Self>, _error: Error) {}
}

/// Releases receives by `release` while the handler of one runs, which posts it again.
fn released_in_handler(release: fn(&Qp<Workqueue>, &Sleepable) -> Result) -> Result {
    let Null { a, b, cq, env, dev } = Null::<Workqueue>::new()?;
    let (refused, alive, gone) = (Counter::new()?, Counter::new()?, Counter::new()?);
    let conn = Slow {
        qp: b,
        begun: Counter::new()?,
        releases: Counter::new()?,
        released: Counter::new()?,
        refused: refused.clone(),
        alive: alive.clone(),
        _gone: CountDrop(gone.clone()),
    };
    let conn = Arc::new(conn, GFP_KERNEL)?;
    let ring = RecvRing {
        pd: &env.pd,
        count: COUNT,
        len: LEN,
    };
    ring.post(&conn, &env.cx)?;
    let sent = OnDone::<context::Atomic, _>::new(|_, _| {})?;
    a.post_send(sent, |_| Ok(SendWr::send([])))?;
    wait(|| conn.begun.get() == 1)?;
    let (qp, releases) = (conn.qp.clone(), conn.releases.clone());
    let released = conn.released.clone();
    env.client.spawn(GFP_KERNEL, move |cx| {
        releases.up();
        if release(&qp, cx).is_ok() {
            released.up();
        }
    })?;
    wait(|| conn.released.get() == 1)?;
    check_eq!((refused.get(), alive.get(), gone.get()), (1, 1, 0));
    drop(conn);
    wait(|| gone.get() == 1)?;
    drop((a, cq, env));
    dev.begin_removal()?;
    wait(|| dev.is_removed())
}

/// Posts receives while a thread that releases others waits for a handler of the sends.
fn posted_while_others_are_released() -> Result {
    let null = NullEnv::new()?;
    let (env, cx) = (&null.env, &null.env.cx);
    let (sends, recvs) = (env.cq::<Workqueue>(64)?, env.cq::<Workqueue>(64)?);
    let qp = Qp::create_raw(&env.pd, &sends, &recvs, &CAPS, cx)?;
    let qp = Drained(qp);
    let peer = env.raw_qp(&recvs, &CAPS)?;
    null.connect(&peer, &qp.0)?;
    let others = [env.raw_qp(&sends, &CAPS)?, env.raw_qp(&recvs, &CAPS)?];
    for other in &others {
        null.dev
            .inject_qp(other.num(), Injection::Connect { peer: 0 })?;
    }
    let [blocking, marking] = others;
    let (begun, goes_on, released) = (Counter::new()?, Counter::new()?, Counter::new()?);
    let (begins, waits) = (begun.clone(), goes_on.clone());
    let handler = OnDone::<Sleepable, _>::new(move |_, _| {
        begins.up();
        let _ = wait(|| waits.get() == 1);
    })?;
    blocking.post_send(handler, |_| Ok(SendWr::send([])))?;
    wait(|| begun.get() == 1)?;

    let ring = RecvRing {
        pd: &env.pd,
        count: COUNT,
        len: LEN,
    };
    let (first, first_counts) = Conn::new(qp.0.clone())?;
    ring.post(&first, cx)?;
    let (own, releases) = (qp.0.clone(), released.clone());
    env.client.spawn(GFP_KERNEL, move |cx| {
        if own.release_recvs(cx).is_ok() {
            releases.up();
        }
    })?;
    let inbox = Inbox::new()?;
    // A later completion of the same CQ shows that the message was handled, or ignored.
    let gets = |conn: &Conn<Workqueue>| -> Result<bool> {
        let (before, marked) = (conn.messages(), Counter::new()?);
        send(&peer, env.message(&inbox, &[1; LEN])?)?;
        let marks = marked.clone();
        let marker = OnDone::<context::Atomic, _>::new(move |_, _| {
            marks.up();
        })?;
        marking.post_send(marker, |_| Ok(SendWr::send([])))?;
        wait(|| marked.get() == 1)?;
        Ok(conn.messages() > before)
    };
    wait(|| gets(&first) == Ok(false))?;

    let (second, second_counts) = Conn::new(qp.0.clone())?;
    ring.post(&second, cx)?;
    goes_on.up();
    wait(|| released.get() == 1)?;
    check_eq!(first_counts.failed.get(), 0);
    for _ in 1..COUNT {
        check!(!gets(&first)?);
    }
    check!(gets(&second)?);
    qp.0.drain(cx)?;
    check_eq!(second_counts.failed.get(), COUNT as i32);
    drop((first, second));
    check_eq!((first_counts.gone.get(), second_counts.gone.get()), (1, 1));
    Ok(())
}

#[kunit_tests(rdma_session_recv)]
mod tests {
    use super::*;

    #[test]
    fn released_in_a_softirq() -> Result {
        releases::<Softirq>()
    }

    #[test]
    fn released_in_a_work_item() -> Result {
        releases::<Workqueue>()
    }

    #[test]
    fn released_at_a_caller() -> Result {
        releases::<Direct>()
    }

    #[test]
    fn release_waits_for_handlers() -> Result {
        released_in_handler(Qp::release_recvs)
    }

    #[cfg(has_faults)]
    #[test]
    fn release_needs_no_memory() -> Result {
        released_in_handler(|qp, cx| {
            let (released, failed) = with_fault(1, || qp.release_recvs(cx));
            check!(!failed);
            released
        })
    }

    /// Receives that are posted while others are released stay: their handler may have begun.
    #[test]
    fn receives_that_are_posted_meanwhile_are_not_released() -> Result {
        posted_while_others_are_released()
    }

    #[test]
    fn kept_message_is_not_released() -> Result {
        let ends = Ends::<Workqueue>::new()?;
        ends.send([KEEP].into_iter())?;
        ends.wait(|| ends.conn.kept.lock().len() == 1)?;
        check_err!(ends.conn.qp.release_recvs(&ends.null.env.cx), EBUSY);
        check_eq!(ends.counts.gone.get(), 0);
        ends.conn.give_back();
        ends.conn.qp.release_recvs(&ends.null.env.cx)?;
        ends.ends(0)
    }

    /// Another thread may have what was polled into an array.
    #[test]
    fn array_is_not_released() -> Result {
        let ends = Ends::<Direct>::new()?;
        ends.cq.poll(&mut WcArray::<4>::new())?;
        check_err!(ends.conn.qp.release_recvs(&ends.null.env.cx), EOPNOTSUPP);
        ends.ends(COUNT as i32)
    }

    /// The receives are freed with their QP, also where somebody has polled the completions of some
    /// after they were released, and keeps what he has polled.
    #[test]
    fn released_receives_do_not_wait_in_an_array() -> Result {
        let ends = Ends::<Direct>::new()?;
        ends.conn.qp.release_recvs(&ends.null.env.cx)?;
        let mut arrays = [const { WcArray::<1>::new() }; 3];
        for array in &mut arrays {
            send(&ends.peer, ends.null.env.message(&ends.inbox, &[1; LEN])?)?;
            wait(|| ends.cq.poll(array) == Ok(1))?;
        }
        let (null, inbox, _cq) = (ends.null, ends.inbox, ends.cq);
        drop((ends.peer, ends.conn));
        drop(ends.drained);
        wait(|| null.dev.objects()[1] == 0)?;
        check_eq!(inbox.len(), 0);
        drop(arrays);
        // Of the sends alone.
        check_eq!(inbox.len(), 3);
        Ok(())
    }

    /// As above, of receives that a device completes which two drains have found lost.
    #[test]
    fn lost_receives_do_not_wait_in_an_array() -> Result {
        let ends = Ends::<Direct>::new()?;
        ends.inject(Injection::Hold { count: COUNT })?;
        ends.conn.qp.drain(&ends.null.env.cx)?;
        ends.inject(Injection::Release {
            count: COUNT,
            reversed: false,
        })?;
        let mut array = WcArray::<{ COUNT as usize }>::new();
        check_eq!(ends.cq.poll(&mut array), Ok(0));
        let (null, _cq) = (ends.null, ends.cq);
        drop((ends.peer, ends.conn));
        drop(ends.drained);
        wait(|| null.dev.objects()[1] == 0)?;
        drop(array);
        Ok(())
    }

    #[test]
    fn shared_cq_is_not_released() -> Result {
        let null = NullEnv::new()?;
        let (env, cx) = (&null.env, &null.env.cx);
        let cq = Cq::<Softirq>::pool_get(&env.dev, CAPS.entries(), None, cx)?;
        let qp = env.raw_qp(&cq, &CAPS)?;
        let (conn, counts) = Conn::new(qp)?;
        let ring = RecvRing {
            pd: &env.pd,
            count: COUNT,
            len: LEN,
        };
        null.dev
            .inject_qp(conn.qp.num(), Injection::Connect { peer: 0 })?;
        ring.post(&conn, cx)?;
        check_err!(conn.qp.release_recvs(cx), EOPNOTSUPP);
        conn.qp.drain(cx)?;
        wait(|| counts.failed.get() == COUNT as i32)
    }

    /// A peer may send fewer bytes than the protocol has, or write elsewhere. That is an error,
    /// not a panic, which would end the machine.
    #[test]
    fn short_message_is_an_error() -> Result {
        let ends = Ends::<Softirq>::new()?;
        for (n, len) in (1..).zip([1, 7, 8, 9, LEN]) {
            let message = ends.null.env.message(&ends.inbox, &[7; LEN][..len])?;
            send(&ends.peer, message)?;
            wait(|| ends.inbox.len() == n && ends.conn.behind.lock().len() == n)?;
        }
        let opcode = rdma_bindings::ib_wc_opcode_IB_WC_RECV_RDMA_WITH_IMM;
        ends.inject(Injection::Opcode { opcode, count: 1 })?;
        ends.send([7].into_iter())?;
        wait(|| ends.conn.behind.lock().len() == 6)?;
        check_eq!(
            &ends.conn.behind.lock()[..],
            &[
                Err(EPROTO),
                Err(EPROTO),
                Ok(0),
                Ok(1),
                Ok(LEN - 8),
                Err(EPROTO)
            ]
        );
        Ok(())
    }

    #[test]
    fn receives_go_round_softirq() -> Result {
        many_messages::<Softirq>()
    }

    #[test]
    fn receives_go_round_workqueue() -> Result {
        many_messages::<Workqueue>()
    }

    #[test]
    fn receives_go_round_direct() -> Result {
        many_messages::<Direct>()
    }

    #[test]
    fn receives_go_round_waited() -> Result {
        many_messages::<Waited>()
    }

    /// The context is known at run time only.
    #[test]
    fn receives_go_round_any() -> Result {
        let null = NullEnv::new()?;
        for cq in [
            null.env.cq::<Direct>(2 * CAPS.entries())?.into_any(),
            null.env.cq::<Workqueue>(2 * CAPS.entries())?.into_any(),
        ] {
            let qp = |cq| null.env.raw_qp(cq, &CAPS);
            let (peer, (conn, counts)) = (qp(&cq)?, Conn::new(qp(&cq)?)?);
            null.connect(&peer, &conn.qp)?;
            let pd = &null.env.pd;
            let ring = RecvRing {
                pd,
                count: COUNT,
                len: LEN,
            };
            ring.post(&conn, &null.env.cx)?;
            for n in 1..10 {
                peer.post_send(OnDone::<context::Atomic, _>::new(|_, _| {})?, |_| {
                    Ok(SendWr::send([]))
                })?;
                wait(|| {
                    AnyContext::poll(&cq);
                    conn.messages() == n
                })?;
            }
            conn.qp.drain(&null.env.cx)?;
            AnyContext::poll(&cq);
            wait(|| counts.failed.get() == COUNT as i32)?;
        }
        Ok(())
    }

    /// All receives are kept, and given back by another thread.
    #[test]
    fn kept_messages_are_given_back() -> Result {
        let ends = Ends::<Workqueue>::new()?;
        ends.send((0..COUNT).map(|_| KEEP))?;
        ends.wait(|| ends.conn.kept.lock().len() == COUNT as usize)?;
        let (conn, given) = (ends.conn.clone(), Counter::new()?);
        let gives = given.clone();
        ends.null.env.client.spawn(GFP_KERNEL, move |_cx| {
            conn.give_back();
            drop(conn);
            gives.up();
        })?;
        ends.wait(|| given.get() == 1)?;
        ends.send(1..20)?;
        ends.wait(|| ends.conn.messages() == COUNT as usize + 19)?;
        ends.ends(COUNT as i32)
    }

    /// The bytes of a message that was kept are there after others have come.
    #[test]
    fn kept_bytes_stay() -> Result {
        let ends = Ends::<Softirq>::new()?;
        ends.send((0..10).map(|n| if n == 0 { KEEP } else { n }))?;
        ends.wait(|| ends.conn.messages() == 10)?;
        let kept = ends.conn.kept.lock().pop();
        let mut kept = kept.ok_or(ENOENT)?;
        let (conn, bytes) = kept.open();
        check!(Arc::ptr_eq(conn, &ends.conn));
        check_eq!(&bytes[..], &[KEEP; LEN]);
        drop(bytes);
        check!(Arc::ptr_eq(kept.conn(), &ends.conn));
        drop(kept);
        ends.ends(COUNT as i32)
    }

    /// A receive that is given back when the QP is in the error state is flushed as well.
    #[test]
    fn kept_message_outlives_the_drain() -> Result {
        let ends = Ends::<Workqueue>::new()?;
        ends.send([KEEP].into_iter())?;
        ends.wait(|| ends.conn.messages() == 1)?;
        ends.conn.qp.drain(&ends.null.env.cx)?;
        check_eq!(ends.counts.failed.get(), COUNT as i32 - 1);
        ends.conn.give_back();
        ends.wait(|| ends.counts.failed.get() == COUNT as i32)?;
        ends.ends(COUNT as i32)
    }

    /// Two drains prove that receives are lost whose completions never come. The driver refuses the
    /// second marker, and its own drain returns at once: that is no proof.
    #[test]
    fn driver_s_own_drain_ends_no_receive() -> Result {
        let ends = Ends::<Workqueue>::on(NullEnv::with_drain()?)?;
        ends.inject(Injection::Vanish { count: COUNT })?;
        // The markers of the first drain, and one of the second.
        ends.inject(Injection::Refuse { after: 3, errno: 5 })?;
        check_err!(ends.conn.qp.drain(&ends.null.env.cx), EIO);
        ends.conn.qp.drain(&ends.null.env.cx)?;
        ends.ends(0)
    }

    #[test]
    fn flushed_receives_are_not_posted_again() -> Result {
        let ends = Ends::<Softirq>::new()?;
        ends.send(0..3)?;
        ends.inject(Injection::Fail)?;
        ends.wait(|| ends.counts.failed.get() == COUNT as i32)?;
        ends.ends(COUNT as i32)
    }

    /// The connection is told, and the receive is gone.
    #[test]
    fn refused_receive_ends_the_connection() -> Result {
        let ends = Ends::<Softirq>::new()?;
        ends.inject(Injection::Refuse {
            after: 0,
            errno: ENOMEM.to_errno().unsigned_abs(),
        })?;
        ends.send(0..1)?;
        ends.wait(|| ends.counts.refused.get() == 1)?;
        ends.ends(COUNT as i32 - 1)
    }

    #[test]
    fn refused_message_that_was_kept_ends_the_connection() -> Result {
        let ends = Ends::<Softirq>::new()?;
        ends.send([KEEP].into_iter())?;
        ends.wait(|| ends.conn.messages() == 1)?;
        ends.inject(Injection::Refuse {
            after: 0,
            errno: ENOMEM.to_errno().unsigned_abs(),
        })?;
        ends.conn.give_back();
        check_eq!(ends.counts.refused.get(), 1);
        ends.ends(COUNT as i32 - 1)
    }

    /// A driver that fails and does not say whether it has posted the receive, which it has.
    #[test]
    fn unnamed_receive_is_taken_for_posted() -> Result {
        let ends = Ends::<Softirq>::new()?;
        expect(1, "did not say which request it refused");
        ends.inject(Injection::Lapse {
            after: 0,
            errno: ENOMEM.to_errno().unsigned_abs(),
        })?;
        ends.send(0..10)?;
        ends.wait(|| ends.conn.messages() == 10)?;
        check_eq!(ends.counts.refused.get(), 0);
        ends.ends(COUNT as i32)
    }

    /// Receives that were posted before one that was refused stay until the drain.
    #[test]
    fn ring_that_is_posted_in_part_comes_back() -> Result {
        let ends = Ends::<Softirq>::bare(NullEnv::new()?)?;
        ends.inject(Injection::Refuse {
            after: 2,
            errno: ENOMEM.to_errno().unsigned_abs(),
        })?;
        check_err!(ends.post(), ENOMEM);
        check_eq!(ends.counts.refused.get(), 0);
        ends.ends(2)
    }

    #[test]
    fn ring_without_length_posts_nothing() -> Result {
        let ends = Ends::<Softirq>::bare(NullEnv::new()?)?;
        let env = &ends.null.env;
        let ring = RecvRing {
            pd: &env.pd,
            count: COUNT,
            len: 0,
        };
        check_err!(ring.post(&ends.conn, &env.cx), EINVAL);
        ends.ends(0)
    }

    /// Receives for another PD's QP.
    #[test]
    fn ring_of_another_pd_posts_nothing() -> Result {
        let ends = Ends::<Softirq>::bare(NullEnv::new()?)?;
        let env = &ends.null.env;
        let pd = Pd::alloc(&env.dev, &env.cx)?;
        let ring = RecvRing {
            pd: &pd,
            count: COUNT,
            len: LEN,
        };
        check_err!(ring.post(&ends.conn, &env.cx), EINVAL);
        drop(pd);
        ends.ends(0)
    }

    /// To the end of a connection.
    #[test]
    fn connection_ends_with_all_receives_back() -> Result {
        let link = Link::<Softirq>::new()?;
        let (conn, counts) = Conn::new(link.b.qp.clone())?;
        let ring = RecvRing {
            pd: &link.env.pd,
            count: COUNT,
            len: LEN,
        };
        ring.post(&conn, &link.env.cx)?;
        let inbox = Inbox::new()?;
        for n in 0..30 {
            // Shorter than the receive.
            let message = link.env.message(&inbox, &[n; 3])?;
            send(&link.a.qp, message)?;
            // On iWARP it has left then, no more.
            let count = usize::from(n) + 1;
            link.wait(|| inbox.len() == count && conn.messages() == count)?;
        }
        drop(conn);
        link.a.id.disconnect(&link.env.cx)?;
        link.wait(|| counts.gone.get() == 1)?;
        check_eq!(counts.failed.get(), COUNT as i32);
        Ok(())
    }
}
