// SPDX-License-Identifier: GPL-2.0

//! Parts that protocols have between the verbs and their own messages.
//!
//! Each ULP that has requests and answers writes these parts by hand in C: a set of receives that
//! are posted again, tags and what waits for their replies, a count of credits, the sizes of its
//! queues, the end of a connection that could not be made, timers, and reconnecting. Each of them
//! can be used without the others. See Documentation/session.rst.

mod credits;
mod end;
mod idle;
mod reconnect;
mod recv;
mod sizes;
mod stop;
pub mod tags;

pub use credits::{
    Credit,
    RecvCredits,
    SendCredits, //
};
pub use end::{
    end,
    Connecting, //
};
pub use idle::{
    Activity,
    Ticker, //
};
pub use reconnect::{
    Backoff,
    Connector,
    Reconnect, //
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
