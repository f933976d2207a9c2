// SPDX-License-Identifier: GPL-2.0

//! The context of a transfer has one user at a time, and the QP outlives all transfers.

use crate::{
    completion::Completion,
    counters::{RwState, Users},
};
use loom::{
    cell::UnsafeCell,
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        Arc, Mutex,
    },
    thread,
};

/// The address of a QP, and of another one.
const QP: usize = 8;
const OTHER: usize = 16;

/// As `rw::RawCtx`.
struct Ctx {
    state: RwState,
    inner: UnsafeCell<u32>,
}

impl Ctx {
    fn new() -> Arc<Self> {
        let ctx = Self {
            state: RwState::new(),
            inner: UnsafeCell::new(0),
        };
        assert!(ctx.state.claim(RwState::IDLE, QP).is_err());
        // As `RawCtx::fill`.
        ctx.state.set(RwState::IDLE);
        Arc::new(ctx)
    }

    /// As what a claim or a completion does with `inner`.
    fn touch(&self) {
        // SAFETY: This is what is checked.
        self.inner.with_mut(|inner| unsafe { *inner += 1 });
    }

    fn touched(&self) -> u32 {
        // SAFETY: There is no other thread.
        self.inner.with(|inner| unsafe { *inner })
    }

    /// As `Qp::post_rw` of all of the memory, and the completion in another thread.
    fn transfer(this: &Arc<Self>, qp: usize) -> Option<thread::JoinHandle<()>> {
        // A QP that has to look at each transfer finds no context idle.
        assert!(this.state.claim(RwState::NEVER, qp).is_err());
        this.state.claim(RwState::IDLE, qp).is_ok().then(|| {
            this.touch();
            Self::complete(this, qp)
        })
    }

    fn complete(this: &Arc<Self>, qp: usize) -> thread::JoinHandle<()> {
        let this = this.clone();
        thread::spawn(move || {
            this.touch();
            assert_eq!(this.state.qp(), qp);
            this.state.set(RwState::IDLE);
        })
    }
}

#[test]
fn one_transfer_at_a_time() {
    loom::model(|| {
        let ctx = Ctx::new();
        let second = {
            let ctx = ctx.clone();
            thread::spawn(move || Ctx::transfer(&ctx, OTHER).map(|done| done.join().unwrap()))
        };
        let first = Ctx::transfer(&ctx, QP).map(|done| done.join().unwrap());
        let second = second.join().unwrap();
        let count = [first, second].into_iter().flatten().count() as u32;
        assert!(count > 0);
        assert_eq!(ctx.touched(), 2 * count);
        assert!(ctx.state.claim(RwState::IDLE, QP).is_ok());
    });
}

#[test]
fn prepared_transfer_is_posted_once() {
    loom::model(|| {
        let ctx = Ctx::new();
        let posters = [0, 1].map(|_| {
            let ctx = ctx.clone();
            thread::spawn(move || {
                assert!(ctx.state.claim(OTHER | RwState::PREPARED, OTHER).is_err());
                let claimed = ctx.state.claim(QP | RwState::PREPARED, QP);
                claimed.is_ok().then(|| {
                    ctx.touch();
                    ctx.touch();
                    ctx.state.set(RwState::IDLE);
                })
            })
        });
        ctx.state.claim(RwState::IDLE, QP).unwrap();
        ctx.touch();
        ctx.state.set(QP | RwState::PREPARED);
        assert!(ctx.state.claim(RwState::IDLE, OTHER).is_err() || ctx.touched() == 3);
        let posted = posters.map(|poster| poster.join().unwrap());
        assert!(posted.iter().flatten().count() <= 1);
    });
}

/// One that is to be synchronised is found as such only, and by the address of its QP.
#[test]
fn stale_transfer_is_posted_once() {
    const STALE: usize = RwState::PREPARED | RwState::STALE;
    loom::model(|| {
        let ctx = Ctx::new();
        ctx.state.claim(RwState::IDLE, QP).unwrap();
        ctx.touch();
        ctx.state.set(QP | STALE);
        assert!(ctx.state.is_prepared_for(QP) && !ctx.state.is_prepared_for(OTHER));
        ctx.state.hold(true);
        assert!(!ctx.state.is_prepared_for(QP) && ctx.state.any_qp() == QP);
        ctx.state.hold(false);
        let posters = [0, 1].map(|_| {
            let ctx = ctx.clone();
            thread::spawn(move || {
                let claimed = ctx.state.claim(QP | RwState::PREPARED, QP);
                let state = claimed.unwrap_err();
                assert!(RwState::is_claimed(state) != (state == QP | STALE));
                ctx.state.claim(QP | STALE, QP).is_ok().then(|| ctx.touch())
            })
        });
        let posted = posters.map(|poster| poster.join().unwrap());
        assert_eq!(posted.iter().flatten().count(), 1);
        assert_eq!(ctx.state.any_qp(), QP);
        ctx.state.set(QP | STALE);
        assert!(ctx.state.is_prepared() && ctx.state.any_qp() == QP);
    });
}

#[test]
fn lost_memory_is_not_transferred() {
    loom::model(|| {
        let ctx = Ctx::new();
        ctx.state.claim(RwState::IDLE, QP).unwrap();
        let completion = {
            let ctx = ctx.clone();
            thread::spawn(move || {
                ctx.touch();
                ctx.state.set(RwState::EMPTY);
            })
        };
        assert!(ctx.state.claim(RwState::IDLE, OTHER).is_err());
        assert!(ctx.state.claim(QP | RwState::PREPARED, QP).is_err());
        completion.join().unwrap();
        assert_eq!(ctx.state.claim(RwState::IDLE, OTHER), Err(RwState::EMPTY));
        assert_eq!(ctx.state.any_qp(), 0);
    });
}

/// As `qp::Transfers`, with the QP that it is part of.
struct Qp {
    users: Users,
    ended: Completion,
    there: UnsafeCell<bool>,
}

impl Qp {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            users: Users::new(),
            ended: Completion::new(),
            there: UnsafeCell::new(true),
        })
    }

    /// As `Transfers::end`, of a transfer that uses the QP until then.
    fn end(&self) {
        // SAFETY: This is what is checked.
        assert!(self.there.with(|there| unsafe { *there }));
        if self.users.put() {
            self.ended.complete();
        }
    }

    /// As `Transfers::wait`; then the QP is destroyed.
    fn destroy(&self) {
        if !self.users.put() {
            self.ended.wait();
        }
        // SAFETY: This is what is checked.
        self.there.with_mut(|there| unsafe { *there = false });
    }
}

/// A context that is prepared, its memory, and its list in `lost`.
struct Prepared {
    qp: Arc<Qp>,
    ctx: Arc<Ctx>,
    memory: UnsafeCell<bool>,
    /// Whether the context is listed.
    list: Mutex<bool>,
    /// As `Transfers::is_closed`.
    is_closed: AtomicBool,
}

impl Prepared {
    fn new() -> Arc<Self> {
        let this = Self {
            qp: Qp::new(),
            ctx: Ctx::new(),
            memory: UnsafeCell::new(true),
            list: Mutex::new(true),
            is_closed: AtomicBool::new(false),
        };
        this.ctx.state.claim(RwState::IDLE, QP).unwrap();
        this.qp.users.get();
        this.ctx.state.set(QP | RwState::PREPARED);
        Arc::new(this)
    }

    /// As `RawCtx::finish`.
    fn finish(&self) {
        // SAFETY: This is what is checked.
        assert!(self.memory.with(|memory| unsafe { *memory }));
        self.ctx.touch();
        self.ctx.state.set(RwState::IDLE);
        self.qp.end();
    }

    /// As `Inner::end_use`.
    fn end(&self) {
        self.is_closed.store(true, Relaxed);
        let list = self.list.lock().unwrap();
        if *list && self.ctx.state.is_prepared_for(QP) {
            self.finish();
        }
        drop(list);
        self.qp.destroy();
    }

    /// As `Prepared::end`, in a thread.
    fn end_qp(this: &Arc<Self>) -> thread::JoinHandle<()> {
        let this = this.clone();
        thread::spawn(move || this.end())
    }

    fn hold(&self) {
        let _list = self.list.lock().unwrap();
        self.ctx.state.hold(true);
    }

    /// As `Ctx::take` and `Ctx::fill`.
    fn fill_again(&self) {
        if self.ctx.state.is_prepared() {
            self.hold();
            if self.ctx.state.any_qp() != 0 {
                self.finish();
            }
        }
        self.ctx.touch();
        self.ctx.state.set(RwState::EMPTY);
        self.ctx.touch();
        self.ctx.state.set(RwState::IDLE);
    }

    /// As `Qp::prepare_rw` for another QP.
    fn prepare_for_other(&self) {
        self.ctx.state.claim(RwState::IDLE, OTHER).unwrap();
        self.ctx.touch();
        self.ctx.state.set(OTHER | RwState::PREPARED);
    }

    /// The context is filled again and prepared for another QP while the first one ends. That end
    /// is the thread which loom runs first, as it would not come to find the context taken back
    /// otherwise.
    fn fill_while_the_qp_ends(this: Arc<Self>) {
        let filler = {
            let this = this.clone();
            thread::spawn(move || {
                this.fill_again();
                this.prepare_for_other();
            })
        };
        this.end();
        filler.join().unwrap();
        // Once by the end of the first transfer, and by nothing since.
        assert_eq!(this.ctx.touched(), 4);
        assert_eq!(this.ctx.state.any_qp(), OTHER);
    }

    /// As the drop of a context.
    fn free(&self) {
        *self.list.lock().unwrap() = false;
        if self.ctx.state.any_qp() != 0 {
            self.finish();
        }
        // SAFETY: This is what is checked.
        self.memory.with_mut(|memory| unsafe { *memory = false });
    }
}

#[test]
fn prepared_transfer_is_dropped_or_taken_back() {
    loom::model(|| {
        let prepared = Prepared::new();
        let end = Prepared::end_qp(&prepared);
        prepared.free();
        end.join().unwrap();
        assert_eq!(prepared.ctx.touched(), 1);
    });
}

#[test]
fn prepared_transfer_is_filled_again_or_taken_back() {
    loom::model(|| {
        Prepared::fill_while_the_qp_ends(Prepared::new());
    });
}

#[test]
fn end_of_the_first_qp_leaves_what_was_filled_again() {
    loom::model(|| {
        let prepared = Prepared::new();
        // It was posted and has completed.
        prepared.ctx.state.set(QP);
        prepared.finish();
        Prepared::fill_while_the_qp_ends(prepared);
    });
}

#[test]
fn view_keeps_what_is_prepared() {
    loom::model(|| {
        let prepared = Prepared::new();
        let end = Prepared::end_qp(&prepared);
        // As `Ctx::cpu`, and the drop of the view.
        prepared.hold();
        if prepared.ctx.state.any_qp() != 0 {
            // The mapping, which is the device's.
            // SAFETY: This is what is checked.
            assert!(prepared.qp.there.with(|there| unsafe { *there }));
        }
        let list = prepared.list.lock().unwrap();
        prepared.ctx.state.hold(false);
        if prepared.ctx.state.any_qp() != 0 && prepared.is_closed.load(Relaxed) {
            prepared.finish();
        }
        drop(list);
        end.join().unwrap();
        assert_eq!(prepared.ctx.touched(), 1);
        prepared.free();
        assert_eq!(prepared.ctx.touched(), 1);
    });
}

#[test]
fn qp_outlives_its_transfers() {
    loom::model(|| {
        let qp = Qp::new();
        let transfers = [0, 1].map(|_| {
            qp.users.get();
            let qp = qp.clone();
            thread::spawn(move || qp.end())
        });
        qp.destroy();
        for transfer in transfers {
            transfer.join().unwrap();
        }
    });
}
