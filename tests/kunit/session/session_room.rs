// SPDX-License-Identifier: GPL-2.0

//! Owners that wait for places of a send queue.

use crate::{
    check::expect,
    fixture::{
        wait,
        CountDrop,
        Counter,
        Null,
        NullEnv,
        Polled, //
    }, //
};
use kernel::{
    new_spinlock_irq,
    prelude::*,
    sync::SpinLockIrq, //
};
use rdma::{
    prelude::*,
    qp::Chain,
    session::Room, //
};
use rdma_null::Injection;

/// The places of the queue.
const PLACES: u32 = 8;
/// The largest request.
const MOST: u32 = 4;
const WAITERS: u32 = 40;

const HOLD: Injection = Injection::Hold { count: u32::MAX };
const RELEASE: Injection = Injection::Release {
    count: u32::MAX,
    reversed: false,
};

/// A request of several sends, of which the last is signaled.
#[derive(HasCqe)]
struct Request<C: Polled> {
    cqe: Cqe<Self>,
    number: u32,
    places: u32,
    conn: Arc<Conn<C>>,
    _gone: CountDrop,
}

impl<C: Polled> CqeHandler for Request<C> {
    type Pointer = Pin<KBox<Self>>;
    type Needs = context::Atomic;

    fn done(this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
        let (conn, places) = (this.conn.clone(), this.places);
        drop(this);
        conn.give(places);
        // Whoever waits for the last one finds its places free.
        match wc.result() {
            Ok(_) => conn.sent.up(),
            Err(_) => conn.flushed.up(),
        };
    }
}

#[pin_data]
struct Conn<C: Polled> {
    qp: Qp<C>,
    room: Room<Pin<KBox<Request<C>>>>,
    /// The numbers of the requests, in the order in which they were posted, or refused.
    #[pin]
    order: SpinLockIrq<KVec<u32>>,
    sent: Arc<Counter>,
    flushed: Arc<Counter>,
    refused: Arc<Counter>,
    /// The number of posts that are under way, and of those that have found another.
    posting: Arc<Counter>,
    nested: Arc<Counter>,
    gone: Arc<Counter>,
}

impl<C: Polled> Conn<C> {
    /// Asks for places for a request. Returns whether it was posted, or waits.
    fn submit(this: &Arc<Self>, number: u32, places: u32) -> Result<bool> {
        let request = Request {
            cqe: Cqe::new(),
            number,
            places,
            conn: this.clone(),
            _gone: CountDrop(this.gone.clone()),
        };
        let has_places = this.room.take(places, KBox::pin(request, GFP_KERNEL)?)?;
        let is_posted = has_places.is_some();
        if let Some(request) = has_places {
            this.post(request);
        }
        Ok(is_posted)
    }

    fn post(&self, request: Pin<KBox<Request<C>>>) {
        if self.posting.up() > 1 {
            self.nested.up();
        }
        let places = request.places;
        // There is room for all.
        let _ = self.order.lock().push_within_capacity(request.number);
        let posted =
            (self.qp).post_chain(request, |r, chain: &mut Chain<'_, { MOST as usize }>| {
                (0..r.places).try_for_each(|_| chain.push(SendWr::send([])))
            });
        if let Err(e) = posted {
            self.refused.up();
            let left = places - e.posted();
            let is_named = e.owner.is_some() || e.posted() > 0;
            drop(e);
            if is_named {
                self.give(left);
            }
        }
        self.posting.down();
    }

    fn give(&self, places: u32) {
        self.room.give(places, |next| self.post(next));
    }
}

/// A QP to no peer, with its room.
struct Sends<C: Polled> {
    conn: Arc<Conn<C>>,
    cq: Cq<C>,
    null: NullEnv,
}

impl<C: Polled> Sends<C> {
    fn new() -> Result<Self> {
        let null = Null::<C>::with(&Caps::new(PLACES, 1))?;
        null.disconnect()?;
        let room = Room::new(&null.a, PLACES, WAITERS, &null.env.cx)?;
        let Null { a, b, cq, env, dev } = null;
        drop(b);
        let order = KVec::with_capacity(2 * WAITERS as usize, GFP_KERNEL)?;
        let (sent, flushed, refused) = (Counter::new()?, Counter::new()?, Counter::new()?);
        let (posting, nested, gone) = (Counter::new()?, Counter::new()?, Counter::new()?);
        let init = pin_init!(Conn {
            qp: a,
            room,
            order <- new_spinlock_irq!(order),
            sent,
            flushed,
            refused,
            posting,
            nested,
            gone,
        });
        Ok(Self {
            conn: Arc::pin_init(init, GFP_KERNEL)?,
            cq,
            null: NullEnv { env, dev },
        })
    }

    fn inject(&self, injection: Injection) -> Result {
        self.null.dev.inject_qp(self.conn.qp.num(), injection)
    }

    #[track_caller]
    fn wait_for(&self, counter: &Counter, count: u32) -> Result {
        wait(|| {
            C::poll(&self.cq);
            counter.get() == count as i32
        })
    }

    /// The requests that were posted, or refused, are these, in their order.
    #[track_caller]
    fn is_order(&self, numbers: impl Iterator<Item = u32>) -> Result {
        check!(self.conn.order.lock().iter().copied().eq(numbers));
        Ok(())
    }
}

/// More requests than the queue has room for, each of some places.
fn requests_share_a_queue<C: Polled>() -> Result {
    let sends = Sends::<C>::new()?;
    let conn = &sends.conn;
    sends.inject(HOLD)?;
    let mut waiting = 0;
    for number in 0..WAITERS {
        waiting += u32::from(!Conn::submit(conn, number, 1 + number % MOST)?);
    }
    // Those of 1, 2 and 3 places have come.
    check_eq!(waiting, WAITERS - 3);
    sends.inject(RELEASE)?;
    sends.wait_for(&conn.sent, WAITERS)?;
    sends.is_order(0..WAITERS)?;
    check_eq!((conn.refused.get(), conn.nested.get()), (0, 0));
    // All places are free, and nobody waits.
    check!(Conn::submit(conn, WAITERS, MOST)?);
    check!(Conn::submit(conn, WAITERS + 1, MOST)?);
    sends.wait_for(&conn.sent, WAITERS + 2)
}

/// Posts of requests that have waited are refused, all the way through: the next one follows, and
/// no call is in another.
fn refused_ones_give_way<C: Polled>() -> Result {
    let sends = Sends::<C>::new()?;
    let conn = &sends.conn;
    sends.inject(HOLD)?;
    check!(Conn::submit(conn, 0, MOST)?);
    check!(Conn::submit(conn, 1, MOST)?);
    for number in 2..8 {
        check!(!Conn::submit(conn, number, MOST)?);
    }
    // The first of its sends, and the last of the next request.
    sends.inject(Injection::Refuse { after: 0, errno: 5 })?;
    sends.inject(RELEASE)?;
    sends.wait_for(&conn.sent, 7)?;
    sends.is_order(0..8)?;
    check_eq!((conn.refused.get(), conn.nested.get()), (1, 0));
    check_eq!(conn.gone.get(), 8);
    Ok(())
}

/// The device loses what has the places: who waits goes back when the QP was drained.
fn drain_ends_the_wait<C: Polled>() -> Result {
    let sends = Sends::<C>::new()?;
    let conn = &sends.conn;
    sends.inject(Injection::Hold { count: 2 })?;
    check!(Conn::submit(conn, 0, MOST)?);
    check!(Conn::submit(conn, 1, MOST)?);
    for number in 2..5 {
        check!(!Conn::submit(conn, number, 1)?);
    }
    conn.qp.drain(&sends.null.env.cx)?;
    check_eq!(conn.gone.get(), 3);
    check_err!(Conn::submit(conn, 5, 1), ENOTCONN);
    check_eq!(conn.gone.get(), 4);
    // The owners of what is lost.
    sends.inject(RELEASE)?;
    sends.wait_for(&conn.gone, 6)?;
    sends.is_order(0..2)
}

/// Who waits is flushed, as what is posted, where the QP fails and the ULP has not closed the room.
fn flush_ends_the_wait<C: Polled>() -> Result {
    let sends = Sends::<C>::new()?;
    let conn = &sends.conn;
    sends.inject(HOLD)?;
    for number in 0..WAITERS / 2 {
        Conn::submit(conn, number, 1 + number % MOST)?;
    }
    sends.null.dev.inject_qp(conn.qp.num(), Injection::Fail)?;
    sends.inject(RELEASE)?;
    sends.wait_for(&conn.gone, WAITERS / 2)?;
    check!(conn.flushed.get() > 0);
    sends.is_order(0..WAITERS / 2)
}

/// A room with no places left, for which `count` owners wait that only count their end.
fn full(
    qp: &Qp<Softirq>,
    count: u32,
    gone: &Arc<Counter>,
    cx: &Sleepable,
) -> Result<Room<CountDrop>> {
    let room = Room::new(qp, PLACES, WAITERS, cx)?;
    // It has the places, and gives none back.
    drop(room.take(PLACES, CountDrop(Counter::new()?))?);
    for _ in 0..count {
        check!(room.take(1, CountDrop(gone.clone()))?.is_none());
    }
    Ok(room)
}

#[kunit_tests(rdma_session_room)]
mod tests {
    use super::*;

    #[test]
    fn requests_share_a_queue_softirq() -> Result {
        requests_share_a_queue::<Softirq>()
    }

    #[test]
    fn requests_share_a_queue_workqueue() -> Result {
        requests_share_a_queue::<Workqueue>()
    }

    #[test]
    fn requests_share_a_queue_direct() -> Result {
        requests_share_a_queue::<Direct>()
    }

    #[test]
    fn refused_ones_give_way_softirq() -> Result {
        refused_ones_give_way::<Softirq>()
    }

    #[test]
    fn refused_ones_give_way_direct() -> Result {
        refused_ones_give_way::<Direct>()
    }

    #[test]
    fn drain_ends_the_wait_softirq() -> Result {
        drain_ends_the_wait::<Softirq>()
    }

    #[test]
    fn drain_ends_the_wait_workqueue() -> Result {
        drain_ends_the_wait::<Workqueue>()
    }

    #[test]
    fn drain_ends_the_wait_direct() -> Result {
        drain_ends_the_wait::<Direct>()
    }

    #[test]
    fn flush_ends_the_wait_softirq() -> Result {
        flush_ends_the_wait::<Softirq>()
    }

    /// The end of the QP, with the room still there, the end of the room, and that of the device.
    #[test]
    fn end_of_either_ends_the_wait() -> Result {
        let (null, gone) = (
            Null::<Softirq>::with(&Caps::new(PLACES, 1))?,
            Counter::new()?,
        );
        let cx = &null.env.cx;
        let room = full(&null.a, 3, &gone, cx)?;
        let other = full(&null.b, 2, &gone, cx)?;
        drop(other);
        check_eq!(gone.get(), 2);
        let Null { a, b, cq, env, dev } = null;
        drop(a);
        wait(|| gone.get() == 5)?;
        let e = room.take(1, CountDrop(gone.clone())).err().ok_or(ENODATA)?;
        check_eq!(e.error(), ENOTCONN);
        check!(e.owner.is_some());
        drop((e, room, b, cq, env));
        dev.begin_removal()?;
        wait(|| dev.is_removed())
    }

    /// A small request does not overtake a large one that waits, though there are its places.
    #[test]
    fn order_is_that_of_the_calls() -> Result {
        let null = Null::<Softirq>::with(&Caps::new(PLACES, 1))?;
        let room = Room::new(&null.a, PLACES, 4, &null.env.cx)?;
        check_eq!(room.take(PLACES - 1, 0)?, Some(0));
        check_eq!(room.take(PLACES, 1)?, None);
        check_eq!(room.take(1, 2)?, None);
        check_eq!(room.take(1, 3)?, None);
        let mut resumed = KVec::with_capacity(4, GFP_KERNEL)?;
        let resume = |places, resumed: &mut KVec<u32>| {
            room.give(places, |owner| {
                let _ = resumed.push_within_capacity(owner);
            });
        };
        resume(PLACES - 2, &mut resumed);
        check_eq!(&resumed[..], &[] as &[u32]);
        resume(1, &mut resumed);
        check_eq!(&resumed[..], &[1]);
        resume(PLACES, &mut resumed);
        check_eq!(&resumed[..], &[1, 2, 3]);
        check_eq!(room.take(PLACES - 2, 4)?, Some(4));
        Ok(())
    }

    #[test]
    fn closed_room_gives_owners_back() -> Result {
        let null = Null::<Softirq>::with(&Caps::new(PLACES, 1))?;
        let room = Room::new(&null.a, 1, 4, &null.env.cx)?;
        check_eq!(room.take(1, 0)?, Some(0));
        for n in 1..4 {
            check_eq!(room.take(1, n)?, None);
        }
        let mut back = KVec::with_capacity(4, GFP_KERNEL)?;
        room.close(ECONNRESET, |owner| {
            let _ = back.push_within_capacity(owner);
        });
        check_eq!(&back[..], &[1, 2, 3]);
        room.close(EIO, |_| ());
        room.give(1, |_| ());
        let e = room.take(1, 7).err().ok_or(ENODATA)?;
        check_eq!((e.error(), e.owner), (ECONNRESET, Some(7)));
        Ok(())
    }

    #[test]
    fn room_has_limits() -> Result {
        let null = Null::<Softirq>::with(&Caps::new(PLACES, 1))?;
        let new = |places, waiters| Room::<u32>::new(&null.a, places, waiters, &null.env.cx);
        check_err!(new(0, 1).map(drop), EINVAL);
        check_err!(new(1 << 14, 1).map(drop), EINVAL);
        let room = new(PLACES, 1)?;
        let e = room.take(PLACES + 1, 5).err().ok_or(ENODATA)?;
        check_eq!((e.error(), e.owner), (EINVAL, Some(5)));
        let e = room.take(u32::MAX, 5).err().ok_or(ENODATA)?;
        check_eq!((e.error(), e.owner), (EINVAL, Some(5)));
        check_eq!(room.take(PLACES, 1)?, Some(1));
        check_eq!(room.take(1, 2)?, None);
        let e = room.take(1, 3).err().ok_or(ENODATA)?;
        check_eq!((e.error(), e.owner), (EAGAIN, Some(3)));
        let mut resumed = None;
        room.give(PLACES, |owner| resumed = Some(owner));
        check_eq!(resumed, Some(2));
        // One is taken.
        expect(2, "places of a send queue were given back that were free");
        room.give(2, |_| ());
        check_eq!(room.take(PLACES, 4)?, Some(4));
        room.give(u32::MAX, |_| ());
        room.give(1, |_| ());
        check_eq!(room.take(PLACES, 4)?, Some(4));
        check_eq!(room.take(1, 4)?, None);
        Ok(())
    }
}
