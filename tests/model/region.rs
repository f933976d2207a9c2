// SPDX-License-Identifier: GPL-2.0

//! A region is never idle while a peer can reach it, or is about to.

use crate::state::Word;
use loom::{
    cell::UnsafeCell,
    sync::{Arc, Mutex},
    thread,
};

/// A request that is in the send queue.
#[derive(Clone, Copy)]
enum Request {
    Register,
    Invalidate,
}

/// A region that threads share, the QP that they post to, and the device.
struct Shared {
    word: Word,
    /// `Own`, in `mr/state.rs`.
    own: UnsafeCell<u32>,
    /// The memory, which peers write to.
    memory: UnsafeCell<u32>,
    turn: Mutex<()>,
    queue: Mutex<Vec<Request>>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            word: Word::new(),
            own: UnsafeCell::new(0),
            memory: UnsafeCell::new(0),
            turn: Mutex::new(()),
            queue: Mutex::new(Vec::new()),
        })
    }

    fn use_own(&self) {
        // SAFETY: This is what is checked.
        self.own.with_mut(|own| unsafe { *own += 1 });
    }

    /// The driver: what is posted is in the queue, in the order of its lock.
    fn post(&self, request: Request) {
        self.queue.lock().unwrap().push(request);
    }

    /// As `FastRegMr::prepare`.
    fn prepare(&self, alone: bool) -> Option<u64> {
        let generation = self.word.begin()?;
        self.use_own();
        match alone {
            true => self.word.registered(generation),
            false => self.word.prepared(generation),
        }
        Some(generation)
    }

    /// As `Qp::post_reg`, of a region that others may reach.
    fn register(&self) -> bool {
        let Some(generation) = self.prepare(false) else {
            return false;
        };
        let _turn = self.turn.lock().unwrap();
        self.word.registered(generation);
        self.post(Request::Register);
        true
    }

    /// As `Qp::post_reg` when the driver refuses it.
    fn register_in_vain(&self) {
        let Some(generation) = self.prepare(false) else {
            return;
        };
        let turn = self.turn.lock().unwrap();
        self.word.registered(generation);
        drop(turn);
        self.word.not_posted(generation);
    }

    /// As `Qp::post_inv`.
    fn invalidate(&self) -> bool {
        let turn = self.turn.lock().unwrap();
        let claimed = self.word.invalidating();
        drop(turn);
        if claimed {
            self.use_own();
            self.post(Request::Invalidate);
        }
        claimed
    }

    /// As `Qp::post_inv` to another QP.
    fn invalidate_elsewhere(&self) {
        if self.word.invalidating() {
            self.use_own();
            self.word.still_registered();
        }
    }

    /// As `Region::remote_invalidated`. A device says that the peer has invalidated a key, which is
    /// valid at that time only.
    fn look(&self, proof: bool) {
        if let Some(generation) = self.word.look() {
            self.use_own();
            self.word.looked(generation, proof);
        }
    }

    /// As `Region::into_parts`, and the memory is used for something else.
    fn take_apart(&self) -> bool {
        let idle = self.word.is_idle();
        if idle {
            // SAFETY: This is what is checked.
            self.memory.with_mut(|memory| unsafe { *memory = 0 });
        }
        idle
    }

    /// The device does what is in the queue, and takes no offence at the invalidation of a key that
    /// is not registered. Says whether the key is valid.
    fn work(&self, mut valid: bool) -> bool {
        let requests: Vec<_> = self.queue.lock().unwrap().drain(..).collect();
        for request in requests {
            match request {
                Request::Register => valid = true,
                Request::Invalidate => {
                    valid = false;
                    // As `invalidated`, called by who polls the CQ.
                    self.use_own();
                    self.word.invalidated();
                }
            }
            if valid {
                // SAFETY: This is what is checked.
                self.memory.with_mut(|memory| unsafe { *memory += 1 });
            }
        }
        valid
    }
}

#[test]
fn invalidation_follows_the_registration() {
    loom::model(|| {
        let region = Shared::new();
        let threads = [
            (|region: &Shared| drop(region.register())) as fn(&Shared),
            |region| drop(region.invalidate()),
            |region| region.invalidate_elsewhere(),
        ]
        .map(|function| {
            let region = region.clone();
            thread::spawn(move || function(&region))
        });
        for thread in threads {
            thread.join().unwrap();
        }
        let valid = region.work(false);
        assert!(
            !(valid && region.take_apart()),
            "idle while it is registered"
        );
    });
}

#[test]
fn device_works_meanwhile() {
    loom::model(|| {
        let region = Shared::new();
        let device = {
            let region = region.clone();
            thread::spawn(move || {
                let valid = region.work(false);
                region.work(valid)
            })
        };
        let other = {
            let region = region.clone();
            thread::spawn(move || region.invalidate())
        };
        let registered = region.register();
        assert!(registered);
        let invalidated = other.join().unwrap();
        // Idle only if the device has done both.
        let apart = region.take_apart();
        let valid = device.join().unwrap();
        assert!(!(apart && valid));
        assert!(!apart || invalidated);
    });
}

#[test]
fn one_registration_at_a_time() {
    loom::model(|| {
        let region = Shared::new();
        let other = {
            let region = region.clone();
            thread::spawn(move || region.register())
        };
        let both = [region.register(), other.join().unwrap()];
        assert!(both.contains(&true));
        assert_eq!(both, [!both[1], !both[0]]);
    });
}

#[test]
fn refused_registration_is_no_registration() {
    loom::model(|| {
        let region = Shared::new();
        let other = {
            let region = region.clone();
            thread::spawn(move || {
                region.look(false);
                region.invalidate()
            })
        };
        region.register_in_vain();
        let invalidated = other.join().unwrap();
        let valid = region.work(false);
        assert!(!valid);
        // What somebody has claimed meanwhile may count as registered still.
        assert!(!invalidated || region.take_apart());
    });
}

#[test]
fn peer_invalidates_too() {
    loom::model(|| {
        let region = Shared::new();
        assert!(region.register());
        let valid = region.work(false);
        assert!(valid);
        // The peer's message has come, so the key is not valid any more.
        let other = {
            let region = region.clone();
            thread::spawn(move || region.look(true))
        };
        region.invalidate();
        let again = region.register();
        other.join().unwrap();
        let valid = region.work(false);
        assert!(!(valid && region.take_apart()));
        assert!(again || !valid);
    });
}

/// A region that is a part of its owner, and so has one thread at a time.
struct Alone {
    word: Word,
    memory: u32,
}

/// The owner moves into the queue with each request, to the device, and back. What was written
/// without an atomic on the way is seen by the next one.
#[test]
fn owner_who_moves_needs_no_atomics() {
    loom::model(|| {
        let queue = Arc::new(Mutex::new(None));
        let mut owner = Alone {
            word: Word::new(),
            memory: 0,
        };
        let refused = |owner: &mut Alone| {
            assert!(owner.word.is_idle_alone() && !owner.word.is_registered_alone());
            owner.word.register_alone();
            assert!(!owner.word.is_idle_alone() && owner.word.is_registered_alone());
            owner.word.end_alone();
        };
        refused(&mut owner);
        assert!(owner.word.is_idle_alone());
        owner.word.register_alone();
        assert!(owner.word.has_key());
        owner.word.invalidate_alone();
        assert!(!owner.word.is_idle_alone() && !owner.word.is_registered_alone());
        assert!(!owner.word.has_key() && !owner.word.is_idle());
        *queue.lock().unwrap() = Some(owner);
        let device = {
            let queue = queue.clone();
            thread::spawn(move || {
                let mut owner: Alone = queue.lock().unwrap().take().unwrap();
                owner.memory += 1;
                owner.word.end_alone();
                *queue.lock().unwrap() = Some(owner);
            })
        };
        device.join().unwrap();
        let mut owner = queue.lock().unwrap().take().unwrap();
        assert!(owner.word.is_idle());
        assert_eq!(owner.memory, 1);
        owner.word.register_alone();
        assert!(!owner.word.is_idle());
        // Each of the three is counted.
        assert_eq!(owner.word.look(), Some(3 * crate::state::GENERATION));
    });
}

#[test]
fn who_is_alone_takes_no_turn() {
    loom::model(|| {
        let region = Shared::new();
        let generation = region.prepare(true).unwrap();
        region.post(Request::Register);
        drop(generation);
        // The owner is back when the device has done the request, and somebody else gets it.
        let valid = region.work(false);
        let other = {
            let region = region.clone();
            thread::spawn(move || {
                assert!(region.word.invalidating());
                region.use_own();
                region.post(Request::Invalidate);
            })
        };
        other.join().unwrap();
        assert!(!region.work(valid));
        assert!(region.take_apart());
    });
}
