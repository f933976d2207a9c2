// SPDX-License-Identifier: GPL-2.0

//! What a protocol needs between the verbs and its own messages.
//!
//! Each ULP that has requests and answers writes these parts by hand in C: a set of receives that
//! are posted again, a count of credits, the sizes of its queues, the end of a connection that could
//! not be made, timers, and reconnecting. They are on the public interface of the crate alone, and
//! each of them can be used without the others. See Documentation/session.rst.

mod credits;
mod recv;
mod sizes;

pub use credits::{
    Credit,
    RecvCredits,
    SendCredits, //
};
pub use recv::{
    Kept,
    Received,
    RecvBytes,
    RecvHandler,
    RecvRing, //
};
pub use sizes::{
    Limit,
    Load,
    Misfit,
    Sizes, //
};
