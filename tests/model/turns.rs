// SPDX-License-Identifier: GPL-2.0

//! Sends that are not signaled: what they send is left alone until the device has done with it, and
//! each exchange ends once; what a local invalidation proves.

use crate::{
    tags_state::{Half, Mask, State},
    turns_state::{Link, Turns},
};
use loom::{
    cell::UnsafeCell,
    sync::{
        atomic::{AtomicBool, AtomicU32, Ordering},
        Arc, Mutex,
    },
    thread,
};
use std::collections::VecDeque;

const MASK: Mask = Mask::new(4);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wr {
    /// The registration and the send of an exchange, and whether the send is signaled.
    Send(usize, bool),
    /// A local invalidation of the region of an exchange.
    Inv(usize),
    /// That of a drain.
    Marker,
}

/// The answer of a driver to a post.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    Posts,
    Refuses,
}

struct Exchange {
    state: State,
    link: Link,
    inv_link: Link,
    /// What the device reads.
    send: UnsafeCell<u32>,
    reply: UnsafeCell<u32>,
    /// The device has executed the registration.
    registered: AtomicBool,
    ends: AtomicU32,
}

/// A table of a QP, and the device.
struct Table {
    turns: Mutex<Turns>,
    closed: AtomicBool,
    queue: Mutex<VecDeque<Wr>>,
    /// The lock of the CQ's poller.
    poll: Mutex<()>,
    exchanges: [Exchange; 3],
}

impl Exchange {
    fn new() -> Self {
        Self {
            state: State::new(),
            link: Link::new(),
            inv_link: Link::new(),
            send: UnsafeCell::new(0),
            reply: UnsafeCell::new(0),
            registered: AtomicBool::new(false),
            ends: AtomicU32::new(0),
        }
    }

    /// As the device, which may read it until all before a completion is done; and as a handler
    /// then.
    fn read(&self) {
        assert!(
            self.state.is_send_out(),
            "the exchange has ended before its send"
        );
        // SAFETY: This is what is checked.
        self.send.with(|part| unsafe { *part });
    }

    fn touch_reply(&self) {
        // SAFETY: This is what is checked.
        self.reply.with_mut(|part| unsafe { *part += 1 });
    }

    /// As code that holds the tag.
    fn touch(&self) {
        // SAFETY: This is what is checked.
        self.send.with_mut(|part| unsafe { *part += 1 });
        self.touch_reply();
    }

    fn ended(&self) {
        self.touch();
        self.ends.fetch_add(1, Ordering::Relaxed);
    }

    fn ends(&self) -> u32 {
        self.ends.load(Ordering::Relaxed)
    }
}

impl Table {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            turns: Mutex::new(Turns::new()),
            closed: AtomicBool::new(false),
            queue: Mutex::default(),
            poll: Mutex::default(),
            exchanges: [Exchange::new(), Exchange::new(), Exchange::new()],
        })
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// As `Tag::post_in_turn`. Returns whether the tag is not given back.
    fn post(&self, n: usize, interval: u32, driver: Driver) -> bool {
        let x = &self.exchanges[n];
        x.touch();
        let mut turns = self.turns.lock().unwrap();
        if self.is_closed() {
            return false;
        }
        let given = turns.is_due(interval).then(|| turns.give(&x.link));
        x.state.start();
        match (driver, given) {
            (Driver::Posts, _) => {
                let wr = Wr::Send(n, given.is_some());
                self.queue.lock().unwrap().push_back(wr);
                if given.is_none() {
                    turns.add(n as u16, &x.link);
                }
            }
            (Driver::Refuses, given) => {
                if let Some(count) = given {
                    turns.take_back(&x.link, count);
                }
                drop(turns);
                assert!(!x.state.stray(Half::Send));
            }
        }
        true
    }

    /// As `Reply::post`, of the exchange whose reply is being handled. Returns if it is posted.
    fn post_inv(&self, n: usize, driver: Driver) -> bool {
        let mut turns = self.turns.lock().unwrap();
        if self.is_closed() {
            return false;
        }
        let count = turns.give(&self.exchanges[n].inv_link);
        if driver == Driver::Refuses {
            turns.take_back(&self.exchanges[n].inv_link, count);
            return false;
        }
        self.queue.lock().unwrap().push_back(Wr::Inv(n));
        true
    }

    /// The sends from `next` on are done, as a handler of the CQ was called for one behind them.
    fn home(&self, mut next: Option<u16>) {
        while let Some(index) = next {
            let x = &self.exchanges[index as usize];
            next = x.link.next();
            x.read();
            if x.state.end_send(self.is_closed()) {
                x.ended();
            }
        }
    }

    /// As the handler of a reply. Returns whether it was waited for.
    fn reply(&self, n: usize, generation: u16) -> bool {
        let _poller = self.poll.lock().unwrap();
        let x = &self.exchanges[n];
        if self.is_closed() || !x.state.take_reply(generation, MASK) {
            return false;
        }
        x.touch_reply();
        if x.state.end_reply() {
            x.ended();
        }
        true
    }

    /// As that of one which does not prove that the region is invalidated.
    fn reply_and_inv(&self, n: usize, driver: Driver) -> bool {
        let _poller = self.poll.lock().unwrap();
        let x = &self.exchanges[n];
        if self.is_closed() || !x.state.take_reply(0, MASK) {
            return false;
        }
        x.touch_reply();
        if !self.post_inv(n, driver) && x.state.end_reply() {
            x.ended();
        }
        true
    }

    /// As the device: works on one request, and completes it if that is signaled. All before it
    /// may be sent again until then.
    fn work(&self, sent: &mut VecDeque<usize>) -> Option<Wr> {
        let wr = self.queue.lock().unwrap().pop_front()?;
        match wr {
            Wr::Send(n, signaled) => {
                self.exchanges[n].registered.store(true, Ordering::Relaxed);
                sent.push_back(n);
                if signaled {
                    self.acknowledged(sent);
                    let _poller = self.poll.lock().unwrap();
                    let x = &self.exchanges[n];
                    let next = x.link.next();
                    x.read();
                    if x.state.end_send(self.is_closed()) {
                        x.ended();
                    }
                    self.home(next);
                }
            }
            Wr::Inv(n) => {
                self.acknowledged(sent);
                let x = &self.exchanges[n];
                let was_registered = x.registered.load(Ordering::Relaxed);
                let _poller = self.poll.lock().unwrap();
                self.home(x.inv_link.next());
                assert!(!x.state.is_send_out());
                assert!(
                    was_registered,
                    "the invalidation came before the registration"
                );
                x.touch_reply();
                if x.state.end_reply() {
                    x.ended();
                }
            }
            Wr::Marker => self.acknowledged(sent),
        }
        Some(wr)
    }

    fn acknowledged(&self, sent: &mut VecDeque<usize>) {
        for n in sent.drain(..) {
            self.exchanges[n].read();
        }
    }

    /// As the device, until the queue is empty.
    fn work_all(&self) {
        let mut sent = VecDeque::new();
        while self.work(&mut sent).is_some() {}
    }

    /// As `Tags::reclaim`, with the device in this thread.
    fn reclaim(&self) {
        self.closed.store(true, Ordering::Relaxed);
        for _ in 0..2 {
            drop(self.turns.lock().unwrap());
            self.queue.lock().unwrap().push_back(Wr::Marker);
            self.work_all();
            drop(self.poll.lock().unwrap());
            self.sweep();
        }
    }

    /// As what follows a drain there.
    fn sweep(&self) {
        self.stray_all();
        for x in &self.exchanges {
            if x.state.sweep() {
                x.ended();
            }
        }
    }

    /// As `Table::drained`.
    fn stray_all(&self) {
        let mut next = self.turns.lock().unwrap().take();
        while let Some(index) = next {
            let x = &self.exchanges[index as usize];
            next = x.link.next();
            if x.state.stray(Half::Send) {
                x.ended();
            }
        }
    }

    fn last_sweep(&self) {
        self.stray_all();
        for x in &self.exchanges {
            if x.state.last_sweep() {
                x.ended();
            }
        }
    }

    #[track_caller]
    fn check_ends<const N: usize>(&self, ends: [u32; N]) {
        for (x, ends) in self.exchanges.iter().zip(ends) {
            assert_eq!(x.ends(), ends);
        }
    }
}

fn spawn<T: 'static>(
    table: &Arc<Table>,
    f: impl FnOnce(&Table) -> T + 'static,
) -> thread::JoinHandle<T> {
    let table = table.clone();
    thread::spawn(move || f(&table))
}

/// A reply ends nothing before the device has done with the send.
#[test]
fn send_comes_home_with_the_next() {
    loom::model(|| {
        let table = Table::new();
        for n in 0..3 {
            assert!(table.post(n, 3, Driver::Posts));
        }
        let device = spawn(&table, Table::work_all);
        assert!(table.reply(0, 0));
        device.join().unwrap();
        table.check_ends([1, 0, 0]);
        assert!(table.reply(1, 0));
        assert!(table.reply(2, 0));
        table.check_ends([1; 3]);
    });
}

/// Two threads post at a time, and the list has each send once.
#[test]
fn threads_take_turns() {
    loom::model(|| {
        let table = Table::new();
        let poster = spawn(&table, |table| assert!(table.post(0, 2, Driver::Posts)));
        assert!(table.post(1, 2, Driver::Posts));
        let device = spawn(&table, Table::work_all);
        poster.join().unwrap();
        device.join().unwrap();
        assert!(table.post(2, 1, Driver::Posts));
        table.work_all();
        for n in 0..3 {
            assert!(table.reply(n, 0));
        }
        table.check_ends([1; 3]);
    });
}

/// The reply comes before the post returns, and the tag is used again.
#[test]
fn tag_is_used_again_when_its_send_is_home() {
    loom::model(|| {
        let table = Table::new();
        let peer = spawn(&table, |table| table.reply(0, 0));
        assert!(table.post(0, 2, Driver::Posts));
        let came = peer.join().unwrap();
        let device = spawn(&table, |table| {
            table.work_all();
            // By the thread that holds the tag.
            if table.exchanges[0].ends() == 1 {
                assert!(table.post(0, 2, Driver::Posts));
            }
        });
        assert!(table.post(1, 1, Driver::Posts));
        device.join().unwrap();
        table.work_all();
        assert!(table.reply(1, 0));
        let again = came && table.exchanges[0].state.is_send_out();
        assert_eq!(table.reply(0, 1), again);
        assert!(table.post(2, 1, Driver::Posts));
        table.work_all();
        assert!(table.reply(2, 0));
        table.check_ends([u32::from(came) + u32::from(again), 1, 1]);
    });
}

/// The next signaled one has the sends of one that the driver has refused.
#[test]
fn refused_request_gives_the_list_back() {
    loom::model(|| {
        let table = Table::new();
        assert!(table.post(0, 2, Driver::Posts));
        let device = spawn(&table, Table::work_all);
        assert!(table.post(1, 2, Driver::Refuses));
        assert!(table.reply(0, 0));
        assert!(table.post(2, 2, Driver::Posts));
        device.join().unwrap();
        table.work_all();
        assert!(table.reply(2, 0));
        table.check_ends([1, 0, 1]);
        // What was refused ends with the drain.
        table.reclaim();
        table.check_ends([1; 3]);
    });
}

#[test]
fn drain_brings_home_what_was_posted_before() {
    loom::model(|| {
        let table = Table::new();
        let poster = spawn(&table, |table| table.post(0, 8, Driver::Posts));
        let peer = spawn(&table, |table| {
            table.reply(0, 0);
        });
        table.reclaim();
        let posted = poster.join().unwrap();
        peer.join().unwrap();
        table.check_ends([u32::from(posted), 0, 0]);
    });
}

#[test]
fn two_threads_sweep_once() {
    loom::model(|| {
        let table = Table::new();
        assert!(table.post(0, 8, Driver::Posts));
        table.closed.store(true, Ordering::Relaxed);
        table.work_all();
        let other = spawn(&table, Table::sweep);
        table.sweep();
        other.join().unwrap();
        table.sweep();
        table.check_ends([1, 0, 0]);
    });
}

/// The completion that would bring a send home is in an array, and is dispatched after all.
#[test]
fn lost_completion_leaves_sends_to_the_end() {
    loom::model(|| {
        let table = Table::new();
        assert!(table.post(0, 2, Driver::Posts));
        assert!(table.post(1, 2, Driver::Posts));
        // As the device, whose completion is lost.
        table.queue.lock().unwrap().clear();
        let stray = spawn(&table, |table| {
            let mut next = Some(1);
            while let Some(index) = next {
                let x = &table.exchanges[index as usize];
                next = x.link.next();
                if x.state.stray(Half::Send) {
                    x.ended();
                }
            }
        });
        assert!(table.reply(0, 0));
        table.closed.store(true, Ordering::Relaxed);
        table.last_sweep();
        stray.join().unwrap();
        table.check_ends([1, 1, 0]);
    });
}

#[test]
fn end_of_the_qp_brings_home_what_nothing_follows() {
    loom::model(|| {
        let table = Table::new();
        assert!(table.post(0, 8, Driver::Posts));
        let device = spawn(&table, Table::work_all);
        table.reply(0, 0);
        device.join().unwrap();
        table.closed.store(true, Ordering::Relaxed);
        table.last_sweep();
        table.check_ends([1, 0, 0]);
    });
}

/// A peer answers what is not posted yet. The invalidation waits for the post, so it is behind the
/// registration, and brings the send home.
#[test]
fn invalidation_waits_for_the_post() {
    loom::model(|| {
        let table = Table::new();
        let peer = spawn(&table, |table| {
            let came = table.reply_and_inv(0, Driver::Posts);
            table.work_all();
            came
        });
        assert!(table.post(0, 8, Driver::Posts));
        let came = peer.join().unwrap();
        table.work_all();
        table.check_ends([came.into(), 0, 0]);
    });
}

#[test]
fn refused_invalidation_gives_the_list_back() {
    loom::model(|| {
        let table = Table::new();
        assert!(table.post(0, 8, Driver::Posts));
        let device = spawn(&table, Table::work_all);
        assert!(table.reply_and_inv(0, Driver::Refuses));
        device.join().unwrap();
        table.check_ends([0; 3]);
        assert!(table.post(1, 1, Driver::Posts));
        table.work_all();
        assert!(table.reply(1, 0));
        table.check_ends([1, 1, 0]);
    });
}
