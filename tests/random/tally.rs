// SPDX-License-Identifier: GPL-2.0

//! Counts of owners: each one that is made is dropped once, and each post comes back
//! once.

use kernel::{
    fmt,
    prelude::*,
    sync::{
        atomic::{
            ordering::{
                Acquire,
                Full,
                Relaxed, //
            },
            Atomic, //
        },
        Arc, //
    }, //
};

/// The sums of one round.
pub(crate) struct Tally {
    made: Atomic<i64>,
    dropped: Atomic<i64>,
    posted: Atomic<i64>,
    /// Came to their handlers.
    back: Atomic<i64>,
    /// Were not posted.
    refused: Atomic<i64>,
    /// Were posted in part, and dropped after a drain.
    kept: Atomic<i64>,
    wrong: Atomic<i64>,
}

impl Tally {
    pub(crate) fn new() -> Result<Arc<Self>> {
        let zero = || Atomic::new(0);
        let this = Self {
            made: zero(),
            dropped: zero(),
            posted: zero(),
            back: zero(),
            refused: zero(),
            kept: zero(),
            wrong: zero(),
        };
        Ok(Arc::new(this, GFP_KERNEL)?)
    }

    /// Notes, and prints, what must never be.
    pub(crate) fn wrong(&self, what: &str) {
        pr_err!("FAILED: {what}\n");
        self.wrong.fetch_add(1, Relaxed);
    }

    /// Returns whether no owner is left.
    pub(crate) fn is_over(&self) -> bool {
        let dropped = self.dropped.load(Acquire);
        dropped == self.made.load(Relaxed)
    }

    /// Returns whether every owner came back once, when there is none left.
    pub(crate) fn is_exact(&self) -> bool {
        let [made, dropped, posted, back, refused, kept, wrong] = self.all();
        wrong == 0 && made == dropped && posted == back + refused + kept
    }

    fn all(&self) -> [i64; 7] {
        [
            &self.made,
            &self.dropped,
            &self.posted,
            &self.back,
            &self.refused,
            &self.kept,
            &self.wrong,
        ]
        .map(|sum| sum.load(Acquire))
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [made, dropped, posted, back, refused, kept, wrong] = self.all();
        f.write_fmt(fmt!(
            "{made} owners made, {dropped} dropped, {posted} posted, {back} back, \
             {refused} refused, {kept} in part, {wrong} wrong"
        ))
    }
}

/// The part of an owner that counts what becomes of it.
pub(crate) struct Life {
    tally: Arc<Tally>,
    /// The number of posts of it that have not come back.
    out: Atomic<i32>,
    /// `true` if a post may be ended by a drain, without its handler.
    in_part: Atomic<bool>,
}

impl Life {
    pub(crate) fn new(tally: &Arc<Tally>) -> Self {
        tally.made.fetch_add(1, Relaxed);
        Self {
            tally: tally.clone(),
            out: Atomic::new(0),
            in_part: Atomic::new(false),
        }
    }

    /// The owner is about to be posted.
    pub(crate) fn post(&self) {
        self.tally.posted.fetch_add(1, Relaxed);
        self.out.fetch_add(1, Relaxed);
    }

    /// The owner is about to be posted with other requests, or by several.
    pub(crate) fn post_in_part(&self) {
        self.in_part.store(true, Relaxed);
        self.post();
    }

    /// Notes, and prints, what must never be.
    pub(crate) fn wrong(&self, what: &str) {
        self.tally.wrong(what);
    }

    /// The owner was not posted.
    pub(crate) fn refused(&self) {
        self.tally.refused.fetch_add(1, Relaxed);
        self.came();
    }

    /// The owner is in its handler.
    pub(crate) fn back(&self) {
        self.tally.back.fetch_add(1, Relaxed);
        self.came();
    }

    fn came(&self) {
        if self.out.fetch_sub(1, Full) <= 0 {
            self.tally.wrong("an owner came back twice");
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let out = self.out.load(Acquire);
        if self.in_part.load(Relaxed) {
            self.tally.kept.fetch_add(out.into(), Relaxed);
        } else if out != 0 {
            self.tally.wrong("an owner was dropped that is posted");
        }
        self.tally.dropped.fetch_add(1, Full);
    }
}
