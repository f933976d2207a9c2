// SPDX-License-Identifier: GPL-2.0

//! Model checks of the counters and the state that soundness rests on.
//!
//! The files of the crate are compiled as they are, on the host, with loom's atomics for those of
//! the kernel. loom runs each test in every order of the threads' steps, with every value that a
//! load may return under its ordering, and fails when a cell is used by two threads at once or
//! without one's use happening before the other's.

#![allow(dead_code)]

extern crate self as kernel;

#[path = "kernel.rs"]
mod shim;
use loom::sync::atomic;
pub use shim::sync;

#[path = "../../rust/kernel/rdma/deferred/batch.rs"]
mod batch_state;
#[path = "../../rust/kernel/rdma/sync.rs"]
mod counters;
#[path = "../../rust/kernel/rdma/posted/state.rs"]
mod requests_state;
#[path = "../../rust/kernel/rdma/session/room/state.rs"]
mod room_state;
#[path = "../../rust/kernel/rdma/mr/state.rs"]
mod state;
#[path = "../../rust/kernel/rdma/session/tags/state.rs"]
mod tags_state;
#[path = "../../rust/kernel/rdma/session/tags/turns.rs"]
mod turns_state;

mod cqe {
    /// As that of the crate.
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub enum Queue {
        Send = 0,
        Recv = 1,
    }
}

#[cfg(test)]
mod batch;
#[cfg(test)]
mod completion;
#[cfg(test)]
mod polling;
#[cfg(test)]
mod refs;
#[cfg(test)]
mod region;
#[cfg(test)]
mod requests;
#[cfg(test)]
mod reservation;
#[cfg(test)]
mod room;
#[cfg(test)]
mod rw;
#[cfg(test)]
mod send_ring;
#[cfg(test)]
mod slots;
#[cfg(test)]
mod tags;
#[cfg(test)]
mod turns;
