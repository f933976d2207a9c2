// SPDX-License-Identifier: GPL-2.0

//! The room of a send queue: no more places are taken than there are; whoever waits is resumed, in
//! the order in which all came, or goes back when the room is closed, once; and nobody stays.

use crate::room_state::{Line, Places, TakeError, Waiters};
use loom::{
    sync::{
        atomic::{AtomicU32, Ordering},
        Arc, Mutex,
    },
    thread,
};
use std::collections::VecDeque;

/// The owners that wait, of which there is room for two.
#[derive(Default)]
struct Owners(VecDeque<(u32, u32)>);

impl Waiters for Owners {
    type Owner = u32;

    fn first(&self) -> Option<u32> {
        self.0.front().map(|(count, _)| *count)
    }

    fn push(&mut self, count: u32, owner: u32) -> Result<(), u32> {
        if self.0.len() == 2 {
            return Err(owner);
        }
        self.0.push_back((count, owner));
        Ok(())
    }

    fn pop(&mut self) -> Option<u32> {
        Some(self.0.pop_front()?.1)
    }
}

/// As `session::Room`, of owners that are numbers.
struct Room {
    places: Places,
    line: Mutex<Line<Owners>>,
    /// The number of places that are taken.
    taken: AtomicU32,
    total: u32,
    /// The owners that were resumed or went back, each a digit.
    resumed: AtomicU32,
    back: AtomicU32,
}

impl Room {
    fn new(total: u32) -> Arc<Self> {
        Arc::new(Self {
            places: Places::new(total),
            line: Mutex::new(Line::new(Owners::default())),
            taken: AtomicU32::new(0),
            total,
            resumed: AtomicU32::new(0),
            back: AtomicU32::new(0),
        })
    }

    /// The caller has these places by now.
    fn has(&self, count: u32) {
        let taken = self.taken.fetch_add(count, Ordering::Relaxed) + count;
        assert!(taken <= self.total, "{taken} places are taken");
    }

    /// Returns whether the owner has its places; `None` if the room is closed.
    fn take(&self, count: u32, owner: u32) -> Option<bool> {
        if self.places.take(count) {
            self.has(count);
            return Some(true);
        }
        let mut line = self.line.lock().unwrap();
        match line.take(&self.places, count, owner) {
            Ok(None) => Some(false),
            Ok(Some(_)) => {
                self.has(count);
                Some(true)
            }
            Err((_, TakeError::Closed(_))) => None,
            Err((_, TakeError::Full)) => panic!("there is room for two"),
        }
    }

    fn give(&self, count: u32, resume: &dyn Fn(u32)) {
        self.taken.fetch_sub(count, Ordering::Relaxed);
        if !self.places.give(count) {
            return;
        }
        assert!(!self.places.trim());
        if !self.line.lock().unwrap().begin() {
            return;
        }
        let next = || self.line.lock().unwrap().next(&self.places);
        while let Some(owner) = next() {
            resume(owner);
        }
    }

    /// Notes that an owner is resumed, with so many places.
    fn resumed(&self, count: u32, owner: u32) {
        self.has(count);
        // One thread at a time does this.
        let resumed = self.resumed.load(Ordering::Relaxed);
        self.resumed.store(resumed * 10 + owner, Ordering::Relaxed);
    }

    fn close(&self) {
        let next = || self.line.lock().unwrap().close(&self.places, 1);
        while let Some(owner) = next() {
            self.back.fetch_add(owner, Ordering::Relaxed);
        }
    }

    fn resumed_all(&self) -> u32 {
        self.resumed.load(Ordering::Relaxed)
    }
}

fn spawn(room: &Arc<Room>, f: impl FnOnce(&Room) + 'static) -> thread::JoinHandle<()> {
    let room = room.clone();
    thread::spawn(move || f(&room))
}

/// All places are free, and nobody waits: the fast path takes them all.
fn is_as_new(room: &Room) {
    assert_eq!(room.taken.load(Ordering::Relaxed), 0);
    assert!(room.places.take(room.total));
    assert!(!room.places.give(room.total));
}

/// An owner that comes while the last places are given back has them, or is resumed.
#[test]
fn nobody_stays() {
    loom::model(|| {
        let room = Room::new(2);
        assert_eq!(room.take(2, 0), Some(true));
        let holder = spawn(&room, |room| {
            room.give(2, &|owner| {
                room.resumed(1, owner);
                room.give(1, &|_| unreachable!());
            });
        });
        if room.take(1, 1).unwrap() {
            room.give(1, &|_| unreachable!());
            holder.join().unwrap();
        } else {
            holder.join().unwrap();
            assert_eq!(room.resumed_all(), 1);
        }
        is_as_new(&room);
    });
}

/// The places of two threads make those of one owner, and the next one follows.
#[test]
fn order_is_kept() {
    loom::model(|| {
        let room = Room::new(2);
        assert_eq!(room.take(1, 0), Some(true));
        assert_eq!(room.take(1, 0), Some(true));
        // A large one, and a small one behind it.
        assert_eq!(room.take(2, 1), Some(false));
        assert_eq!(room.take(1, 2), Some(false));
        let resume = |room: &Room| {
            room.give(1, &|owner| {
                let count = if owner == 1 { 2 } else { 1 };
                room.resumed(count, owner);
                // It is refused: another call takes care of the line.
                room.give(count, &|_| unreachable!());
            });
        };
        let other = spawn(&room, move |room| resume(room));
        resume(&room);
        other.join().unwrap();
        assert_eq!(room.resumed_all(), 12);
        is_as_new(&room);
    });
}

/// A newcomer does not overtake one that waits.
#[test]
fn small_ones_do_not_starve_a_large_one() {
    loom::model(|| {
        let room = Room::new(2);
        assert_eq!(room.take(1, 0), Some(true));
        assert_eq!(room.take(2, 1), Some(false));
        let newcomer = spawn(&room, |room| {
            if room.take(1, 2).unwrap() {
                // The large one had its turn.
                assert_eq!(room.resumed_all(), 1);
                room.give(1, &|_| unreachable!());
            }
        });
        room.give(1, &|owner| {
            let count = if owner == 1 { 2 } else { 1 };
            room.resumed(count, owner);
            room.give(count, &|_| unreachable!());
        });
        newcomer.join().unwrap();
        assert!(matches!(room.resumed_all(), 1 | 12));
        is_as_new(&room);
    });
}

/// Whoever waits when the room is closed goes back, or was resumed before; later ones are refused.
#[test]
fn closed_room_keeps_nobody() {
    loom::model(|| {
        let room = Room::new(1);
        assert_eq!(room.take(1, 0), Some(true));
        let holder = spawn(&room, |room| {
            room.give(1, &|owner| {
                room.resumed(1, owner);
                room.give(1, &|_| unreachable!());
            });
        });
        let closer = spawn(&room, |room| room.close());
        let taken = room.take(1, 1);
        if taken == Some(true) {
            room.give(1, &|_| unreachable!());
        }
        holder.join().unwrap();
        closer.join().unwrap();
        let (resumed, back) = (room.resumed_all(), room.back.load(Ordering::Relaxed));
        assert_eq!(resumed + back, u32::from(taken == Some(false)));
        assert_eq!(room.taken.load(Ordering::Relaxed), 0);
        assert_eq!(room.take(1, 2), None);
    });
}

/// What was not taken and is given is no place.
#[test]
fn excess_is_trimmed() {
    loom::model(|| {
        let room = Room::new(2);
        assert_eq!(room.take(1, 0), Some(true));
        let other = spawn(&room, |room| {
            if room.places.give(2) {
                room.places.trim();
            }
        });
        if room.places.give(u32::MAX) {
            room.places.trim();
        }
        other.join().unwrap();
        room.places.trim();
        assert!(room.places.take(2));
        assert!(!room.places.take(1));
    });
}
