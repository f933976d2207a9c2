// SPDX-License-Identifier: GPL-2.0

//! An exchange in two halves: each part has one user at a time, both halves come back before the
//! tag is used again, and once; and a table is freed once, after its last tag.

use crate::tags_state::{BitmapWord, Half, Mask, State};
use loom::{
    cell::UnsafeCell,
    sync::{
        atomic::{AtomicBool, AtomicU32, Ordering},
        Arc, Condvar, Mutex,
    },
    thread,
};

const MASK: Mask = Mask::new(4);

/// An exchange of a table whose handlers run one after the other, in any thread.
struct Exchange {
    state: State,
    send: UnsafeCell<u32>,
    reply: UnsafeCell<u32>,
    /// The lock of the CQ's poller.
    poll: Mutex<()>,
    closed: AtomicBool,
    ends: AtomicU32,
}

impl Exchange {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            state: State::new(),
            send: UnsafeCell::new(0),
            reply: UnsafeCell::new(0),
            poll: Mutex::new(()),
            closed: AtomicBool::new(false),
            ends: AtomicU32::new(0),
        })
    }

    /// As code with `&` of what is posted.
    fn look_at_send(&self) {
        // SAFETY: This is what is checked.
        self.send.with(|part| unsafe { *part });
    }

    /// As code with `&mut` of the reply's part.
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

    fn start(&self) {
        self.touch();
        self.state.start();
    }

    fn ended(&self) {
        self.touch();
        self.ends.fetch_add(1, Ordering::Relaxed);
    }

    /// As the handler of a reply.
    fn reply(&self, generation: u16) -> bool {
        let _poller = self.poll.lock().unwrap();
        if self.closed.load(Ordering::Relaxed) || !self.state.take_reply(generation, MASK) {
            return false;
        }
        self.look_at_send();
        self.touch_reply();
        if self.state.end_reply() {
            self.ended();
        }
        true
    }

    /// As the handler of the send's completion.
    fn sent(&self) {
        let _poller = self.poll.lock().unwrap();
        self.look_at_send();
        if self.state.end_send(self.closed.load(Ordering::Relaxed)) {
            self.ended();
        }
    }

    /// As the marker of a drain.
    fn drain(&self) {
        drop(self.poll.lock().unwrap());
    }

    /// As a thread that has completions in an array of its own.
    fn stray(&self, half: Half) {
        if self.state.stray(half) {
            self.ended();
        }
    }

    fn sweep(&self) {
        if self.state.sweep() {
            self.ended();
        }
    }

    fn last_sweep(&self) {
        if self.state.last_sweep() {
            self.ended();
        }
    }

    fn end_lost(&self) {
        if self.state.end_lost() {
            self.ended();
        }
    }

    fn ends(&self) -> u32 {
        self.ends.load(Ordering::Relaxed)
    }
}

fn spawn(x: &Arc<Exchange>, f: impl FnOnce(&Exchange) + 'static) -> thread::JoinHandle<()> {
    let x = x.clone();
    thread::spawn(move || f(&x))
}

#[test]
fn exchange_ends_once_after_both_halves() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        let reply = spawn(&x, |x| assert!(x.reply(0)));
        x.sent();
        reply.join().unwrap();
        assert_eq!(x.ends(), 1);
        assert_eq!(x.state.generation(MASK), 1);
    });
}

#[test]
fn reply_comes_before_the_post_returns() {
    loom::model(|| {
        let x = Exchange::new();
        // A peer that guesses the number of the exchange is answered as soon as that has begun.
        let early = spawn(&x, |x| {
            x.reply(0);
        });
        x.start();
        early.join().unwrap();
        x.sent();
        let came = x.ends() == 1;
        assert_eq!(x.reply(0), !came);
        assert_eq!(x.ends(), 1);
    });
}

#[test]
fn second_reply_and_one_of_another_exchange_find_nothing() {
    loom::model(|| {
        let x = Exchange::new();
        assert!(!x.reply(0));
        x.start();
        assert!(!x.reply(1));
        let came = Arc::new(AtomicU32::new(0));
        let other = {
            let came = came.clone();
            spawn(&x, move |x| {
                came.fetch_add(x.reply(0).into(), Ordering::Relaxed);
            })
        };
        came.fetch_add(x.reply(0).into(), Ordering::Relaxed);
        other.join().unwrap();
        assert_eq!(came.load(Ordering::Relaxed), 1);
        x.sent();
        assert_eq!(x.ends(), 1);
        // The tag is used again, by the thread that holds it.
        x.start();
        assert!(!x.reply(0));
        assert!(x.reply(1));
        x.sent();
        assert_eq!(x.ends(), 2);
    });
}

#[test]
fn closed_table_ends_what_is_out() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        let handlers = spawn(&x, |x| {
            x.reply(0);
            x.sent();
        });
        x.closed.store(true, Ordering::Relaxed);
        x.drain();
        // The marker comes after what was posted.
        handlers.join().unwrap();
        x.sweep();
        assert_eq!(x.ends(), 1);
    });
}

#[test]
fn what_is_posted_after_the_close_ends() {
    loom::model(|| {
        let x = Exchange::new();
        let poster = spawn(&x, |x| x.start());
        x.closed.store(true, Ordering::Relaxed);
        x.drain();
        x.sweep();
        poster.join().unwrap();
        // Flushed.
        x.sent();
        assert_eq!(x.ends(), 1);
    });
}

#[test]
fn strays_end_once() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        let stray = spawn(&x, |x| {
            x.look_at_send();
            x.stray(Half::Send);
        });
        x.closed.store(true, Ordering::Relaxed);
        x.drain();
        x.sweep();
        x.last_sweep();
        stray.join().unwrap();
        assert_eq!(x.ends(), 1);
    });
}

#[test]
fn stray_waits_for_the_drain() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        let stray = spawn(&x, |x| {
            x.look_at_send();
            x.stray(Half::Send);
        });
        x.reply(0);
        stray.join().unwrap();
        assert_eq!(x.ends(), 0);
        x.closed.store(true, Ordering::Relaxed);
        x.drain();
        x.last_sweep();
        assert_eq!(x.ends(), 1);
    });
}

#[test]
fn two_strays_end_once() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        assert!(x.state.take_reply(0, MASK));
        let strays = [Half::Send, Half::Reply].map(|half| spawn(&x, move |x| x.stray(half)));
        x.closed.store(true, Ordering::Relaxed);
        x.drain();
        x.last_sweep();
        for stray in strays {
            stray.join().unwrap();
        }
        assert_eq!(x.ends(), 1);
    });
}

#[test]
fn reply_is_handled_before_a_stray_and_the_last_sweep() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        let reply = spawn(&x, |x| assert!(x.reply(0)));
        // The thread that has the stray does not see the reply; the sweep may come before or after.
        let stray = spawn(&x, |x| x.stray(Half::Send));
        reply.join().unwrap();
        x.closed.store(true, Ordering::Relaxed);
        x.drain();
        x.last_sweep();
        stray.join().unwrap();
        assert_eq!(x.ends(), 1);
    });
}

#[test]
fn two_sweeps_leave_the_next_exchange() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        x.stray(Half::Send);
        x.closed.store(true, Ordering::Relaxed);
        x.drain();
        let other = spawn(&x, |x| x.sweep());
        let taken = x.state.sweep();
        if taken {
            x.ended();
            // The thread that posts this did not see the table closed.
            x.start();
            x.sent();
        }
        other.join().unwrap();
        assert_eq!(x.ends(), 1 + u32::from(taken));
    });
}

#[test]
fn what_was_refused_in_part_waits_for_the_last_sweep() {
    loom::model(|| {
        let x = Exchange::new();
        let reply = spawn(&x, |x| {
            x.reply(0);
        });
        x.start();
        assert!(!x.state.stray(Half::SentInPart));
        reply.join().unwrap();
        x.closed.store(true, Ordering::Relaxed);
        x.drain();
        x.sweep();
        assert_eq!(x.ends(), 0);
        x.last_sweep();
        assert_eq!(x.ends(), 1);
    });
}

/// As `struct completion`, completed many times.
#[derive(Default)]
struct Freed(Mutex<u32>, Condvar);

impl Freed {
    fn complete(&self) {
        *self.0.lock().unwrap() += 1;
        self.1.notify_one();
    }

    fn wait(&self) {
        let mut done = self.0.lock().unwrap();
        while *done == 0 {
            done = self.1.wait(done).unwrap();
        }
        *done -= 1;
    }

    fn reset(&self) {
        *self.0.lock().unwrap() = 0;
    }
}

/// A table of two tags.
struct Table {
    word: BitmapWord,
    parts: [UnsafeCell<u32>; 2],
    locked: Mutex<Locked>,
    freed: Freed,
    /// Written when it is freed.
    memory: UnsafeCell<bool>,
}

#[derive(Default)]
struct Locked {
    waiters: u32,
    /// There is no handle any longer.
    ended: bool,
}

impl Table {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            word: BitmapWord::new(2),
            parts: [UnsafeCell::new(0), UnsafeCell::new(0)],
            locked: Mutex::default(),
            freed: Freed::default(),
            memory: UnsafeCell::new(true),
        })
    }

    fn alive(&self) {
        // SAFETY: This is what is checked.
        self.memory.with(|memory| assert!(unsafe { *memory }));
    }

    fn free(&self) {
        // SAFETY: This is what is checked.
        self.memory.with_mut(|memory| unsafe {
            assert!(*memory, "freed twice");
            *memory = false;
        });
    }

    fn take(&self) -> Option<u32> {
        self.alive();
        self.word.take()
    }

    fn take_at(&self, tag: u32) -> Option<u32> {
        self.alive();
        self.word.take_at(1 << tag).then_some(tag)
    }

    /// As code that holds a tag.
    fn touch(&self, tag: u32) {
        // SAFETY: This is what is checked.
        self.parts[tag as usize].with_mut(|part| unsafe { *part += 1 });
    }

    /// As `Tag::drop`.
    fn put(&self, tag: u32) {
        self.alive();
        if self.word.put(1 << tag) {
            return;
        }
        let locked = self.locked.lock().unwrap();
        self.word.put_locked(1 << tag);
        if locked.waiters > 0 {
            self.freed.complete();
        }
        let last = locked.ended && self.word.free() == 2;
        drop(locked);
        if last {
            self.free();
        }
    }

    /// As `Tags::wait`.
    fn wait(&self) -> u32 {
        if let Some(tag) = self.take() {
            return tag;
        }
        let mut locked = self.locked.lock().unwrap();
        locked.waiters += 1;
        self.word.set_locked(true);
        let tag = loop {
            if let Some(tag) = self.take() {
                break tag;
            }
            drop(locked);
            self.freed.wait();
            locked = self.locked.lock().unwrap();
        };
        locked.waiters -= 1;
        if locked.waiters == 0 {
            self.word.set_locked(false);
            self.freed.reset();
        }
        tag
    }

    /// As the end of a table's last handle.
    fn end(&self) {
        let mut locked = self.locked.lock().unwrap();
        self.word.set_locked(true);
        locked.ended = true;
        let last = self.word.free() == 2;
        drop(locked);
        if last {
            self.free();
        }
    }
}

#[test]
fn tag_has_one_holder() {
    loom::model(|| {
        let table = Table::new();
        let other = {
            let table = table.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    if let Some(tag) = table.take() {
                        table.touch(tag);
                        table.put(tag);
                    }
                }
            })
        };
        let tag = table.take().unwrap();
        table.touch(tag);
        let second = table.take();
        if let Some(second) = second {
            assert_ne!(tag, second);
            table.touch(second);
            table.put(second);
        }
        table.put(tag);
        other.join().unwrap();
        assert_eq!(table.word.free(), 2);
    });
}

/// By its index, where others take it so, and where they take any.
#[test]
fn tag_that_is_taken_by_its_index_has_one_holder() {
    loom::model(|| {
        let table = Table::new();
        let takers: [fn(&Table) -> Option<u32>; 2] = [|table| table.take_at(0), Table::take];
        let others = takers.map(|take| {
            let table = table.clone();
            thread::spawn(move || {
                if let Some(tag) = take(&table) {
                    table.touch(tag);
                    table.put(tag);
                }
            })
        });
        if let Some(tag) = table.take_at(0) {
            assert_eq!(tag, 0);
            assert_eq!(table.take_at(0), None);
            table.touch(tag);
            table.put(tag);
        }
        for other in others {
            other.join().unwrap();
        }
        assert_eq!(table.word.free(), 2);
    });
}

/// A tag that is taken by its index while others wait is put under the lock.
#[test]
fn waiter_is_woken_by_a_tag_of_an_index() {
    loom::model(|| {
        let table = Table::new();
        let tag = table.take_at(1).unwrap();
        let other = table.take_at(0).unwrap();
        let holder = {
            let table = table.clone();
            thread::spawn(move || {
                table.touch(tag);
                table.put(tag);
                if let Some(tag) = table.take_at(1) {
                    table.touch(tag);
                    table.put(tag);
                }
            })
        };
        let got = table.wait();
        table.touch(got);
        holder.join().unwrap();
        table.put(got);
        table.put(other);
        assert_eq!(table.word.free(), 2);
    });
}

#[test]
fn waiter_is_woken() {
    loom::model(|| {
        let table = Table::new();
        let tags = [table.take().unwrap(), table.take().unwrap()];
        let holder = {
            let table = table.clone();
            thread::spawn(move || {
                table.touch(tags[0]);
                table.put(tags[0]);
            })
        };
        let tag = table.wait();
        table.touch(tag);
        holder.join().unwrap();
        table.put(tag);
        table.put(tags[1]);
        assert_eq!(table.word.free(), 2);
    });
}

/// A tag that is put wakes one of those that wait, which puts its own. Only orders in which few
/// threads are interrupted.
#[test]
fn both_waiters_are_woken() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let table = Table::new();
        let tags = [table.take().unwrap(), table.take().unwrap()];
        let waiters = [0, 1].map(|_| {
            let table = table.clone();
            thread::spawn(move || {
                let tag = table.wait();
                table.touch(tag);
                table.put(tag);
            })
        });
        table.put(tags[0]);
        for waiter in waiters {
            waiter.join().unwrap();
        }
        table.put(tags[1]);
        assert_eq!(table.word.free(), 2);
    });
}

#[test]
fn table_is_freed_once_after_its_last_tag() {
    loom::model(|| {
        let table = Table::new();
        let tags = [table.take().unwrap(), table.take().unwrap()];
        let holders = tags.map(|tag| {
            let table = table.clone();
            thread::spawn(move || {
                table.touch(tag);
                table.put(tag);
            })
        });
        table.end();
        for holder in holders {
            holder.join().unwrap();
        }
        // SAFETY: There is no other thread.
        table.memory.with(|memory| assert!(!unsafe { *memory }));
    });
}

/// The device has lost the send. A stray that has come before the end of the QP counts once.
#[test]
fn lost_send_ends_once() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        let stray = spawn(&x, |x| x.stray(Half::Reply));
        x.last_sweep();
        stray.join().unwrap();
        assert_eq!(x.ends(), 0);
        x.end_lost();
        x.end_lost();
        assert_eq!(x.ends(), 1);
    });
}

#[test]
fn exchange_that_has_ended_is_not_lost() {
    loom::model(|| {
        let x = Exchange::new();
        x.start();
        let stray = spawn(&x, |x| x.stray(Half::Send));
        x.last_sweep();
        stray.join().unwrap();
        x.end_lost();
        assert_eq!(x.ends(), 1);
    });
}
