// SPDX-License-Identifier: GPL-2.0

//! A region is never idle while a peer can reach it, or is about to.

use crate::state::{Exclusive, Shared as SharedState, State, GENERATION};
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
    state: SharedState,
    /// The data that a claim gives access to.
    claimed: UnsafeCell<u32>,
    /// The memory, which peers write to.
    memory: UnsafeCell<u32>,
    reg_lock: Mutex<()>,
    queue: Mutex<Vec<Request>>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            state: SharedState::new(),
            claimed: UnsafeCell::new(0),
            memory: UnsafeCell::new(0),
            reg_lock: Mutex::new(()),
            queue: Mutex::new(Vec::new()),
        })
    }

    fn use_claim(&self) {
        // SAFETY: This is what is checked.
        self.claimed.with_mut(|claimed| unsafe { *claimed += 1 });
    }

    /// The driver: what is posted is in the queue, in the order of its lock.
    fn post(&self, request: Request) {
        self.queue.lock().unwrap().push(request);
    }

    /// As `RegOp::prepare`.
    fn prepare(&self) -> Option<u64> {
        if !self.state.claim_idle() {
            return None;
        }
        self.use_claim();
        Some(self.state.prepare())
    }

    /// As `RegOp::prepare` for a QP of another PD.
    fn prepare_in_vain(&self) {
        if self.state.claim_idle() {
            self.use_claim();
            self.state.set_idle();
        }
    }

    /// As posting a `RegWr`.
    fn register(&self) -> bool {
        let Some(generation) = self.prepare() else {
            return false;
        };
        let _lock = self.reg_lock.lock().unwrap();
        self.state.commit(generation);
        self.post(Request::Register);
        true
    }

    /// As posting a `RegWr` when the driver refuses it. A chain that cannot be made does not get to
    /// the commit.
    fn register_in_vain(&self, commit: bool) {
        let Some(generation) = self.prepare() else {
            return;
        };
        let lock = self.reg_lock.lock().unwrap();
        if commit {
            self.state.commit(generation);
        }
        self.state.abort(generation);
        drop(lock);
    }

    /// As posting an `InvWr`.
    fn invalidate(&self) -> bool {
        let lock = self.reg_lock.lock().unwrap();
        let claimed = self.state.claim_registered();
        if claimed {
            self.state.set_invalidating();
        }
        drop(lock);
        if claimed {
            self.use_claim();
            self.post(Request::Invalidate);
        }
        claimed
    }

    /// As posting an `InvWr` to another QP, whose lock is another one.
    fn invalidate_elsewhere(&self) {
        if self.state.claim_registered() {
            self.use_claim();
            self.state.set_registered();
        }
    }

    /// As `Region::remote_invalidated`. A device reports that the peer has invalidated a key, which
    /// is valid at that time only.
    fn look(&self, proof: bool) {
        if self.state.claim_registered() {
            self.use_claim();
            match proof {
                true => self.state.set_idle(),
                false => self.state.set_registered(),
            }
        }
    }

    /// As `Region::into_parts`, and the memory is used for something else.
    fn take_apart(&self) -> bool {
        let idle = self.state.is_idle();
        if idle {
            // SAFETY: This is what is checked.
            self.memory.with_mut(|memory| unsafe { *memory = 0 });
        }
        idle
    }

    /// The device does what is in the queue, and takes no offence at the invalidation of a key that
    /// is not registered. Returns whether the key is valid.
    fn work(&self, mut valid: bool) -> bool {
        let requests: Vec<_> = self.queue.lock().unwrap().drain(..).collect();
        for request in requests {
            match request {
                Request::Register => valid = true,
                Request::Invalidate => {
                    valid = false;
                    // As `FastRegMr::invalidated`, in the thread that polls the CQ.
                    self.use_claim();
                    self.state.set_idle();
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
fn qp_of_another_pd_registers_nothing() {
    loom::model(|| {
        let region = Shared::new();
        let other = {
            let region = region.clone();
            thread::spawn(move || region.prepare_in_vain())
        };
        let registered = region.register();
        other.join().unwrap();
        assert!(registered || region.take_apart());
        let valid = region.work(false);
        assert_eq!(valid, registered);
    });
}

fn refused(commit: bool) {
    loom::model(move || {
        let region = Shared::new();
        let other = {
            let region = region.clone();
            thread::spawn(move || {
                region.look(false);
                region.invalidate()
            })
        };
        region.register_in_vain(commit);
        let invalidated = other.join().unwrap();
        let valid = region.work(false);
        assert!(!valid);
        // A region that was claimed meanwhile may count as registered still.
        assert!(!invalidated || region.take_apart());
    });
}

#[test]
fn refused_registration_is_no_registration() {
    refused(true);
}

#[test]
fn prepared_registration_is_no_registration() {
    refused(false);
}

#[test]
fn peer_invalidates_too() {
    loom::model(|| {
        let region = Shared::new();
        assert!(region.register());
        let valid = region.work(false);
        assert!(valid);
        // The peer's message has come, so the key is no longer valid.
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

/// A region of one owner, with a state that is not atomic, and its memory.
struct Owned {
    state: UnsafeCell<Exclusive>,
    memory: u32,
}

impl Owned {
    /// A step of the state: loom fails if it does not come after those of other threads.
    fn step<T>(&self, step: impl FnOnce(&Exclusive) -> T) -> T {
        // SAFETY: This is what is checked.
        self.state.with_mut(|state| step(unsafe { &*state }))
    }
}

// SAFETY: `Exclusive` and `u32` are.
unsafe impl Send for Owned {}

/// The owner moves into the queue with each request, to the device, and back. A step without an
/// atomic on the way is seen by the next one.
#[test]
fn exclusive_state_moves_with_its_owner() {
    loom::model(|| {
        let queue = Arc::new(Mutex::new(None));
        let owner = Owned {
            state: UnsafeCell::new(Exclusive::new()),
            memory: 0,
        };
        owner.step(|state| {
            // One that is refused.
            assert!(state.claim_idle() && !state.claim_registered());
            assert_eq!(state.prepare(), 0);
            assert!(!state.claim_idle() && state.claim_registered());
            state.set_idle();
            assert!(state.is_idle());
            // And one that is posted, and invalidated.
            state.prepare();
            assert!(state.claim_registered());
            state.set_invalidating();
            assert!(!state.is_idle());
            assert!(!state.claim_idle() && !state.claim_registered());
        });
        *queue.lock().unwrap() = Some(owner);
        let device = {
            let queue = queue.clone();
            thread::spawn(move || {
                let mut owner: Owned = queue.lock().unwrap().take().unwrap();
                owner.memory += 1;
                // As `FastRegMr::invalidated` of one that has failed, and of the next one.
                owner.step(|state| {
                    state.set_idle();
                    state.set_registered();
                    assert!(state.claim_registered());
                    state.set_invalidating();
                    state.set_idle();
                });
                *queue.lock().unwrap() = Some(owner);
            })
        };
        device.join().unwrap();
        let owner = queue.lock().unwrap().take().unwrap();
        assert_eq!(owner.memory, 1);
        owner.step(|state| {
            assert!(state.claim_idle());
            state.prepare();
            assert!(state.claim_registered());
            // Each of the three is counted.
            assert_eq!(state.generation(), 3 * GENERATION);
        });
    });
}

/// Both kinds make of a step the same state: an exclusive region may become a shared one.
#[test]
fn both_kinds_agree() {
    fn run<S: State>(state: &S, commit: fn(&S, u64)) -> Vec<(bool, u64)> {
        let mut seen = Vec::new();
        let mut see = |state: &S| seen.push((state.is_idle(), state.generation()));
        for _ in 0..2 {
            see(state);
            assert!(!state.claim_registered() && state.claim_idle());
            let generation = state.prepare();
            commit(state, generation);
            see(state);
            for ok in [false, true] {
                assert!(!state.claim_idle() && state.claim_registered());
                state.set_invalidating();
                see(state);
                match ok {
                    true => state.set_idle(),
                    false => state.set_registered(),
                }
                see(state);
            }
        }
        seen
    }
    loom::model(|| {
        let exclusive = run(&Exclusive::new(), |_, generation| assert_eq!(generation, 0));
        let shared = run(&SharedState::new(), SharedState::commit);
        assert_eq!(exclusive, shared);
    });
}
