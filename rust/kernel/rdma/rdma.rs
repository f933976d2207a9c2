// SPDX-License-Identifier: GPL-2.0

//! RDMA verbs for upper-layer protocols.
//!
//! The kernel's completion queue API (`ib_alloc_cq`, `struct ib_cqe`) and what a protocol needs
//! around it, safe and at C's cost. The rules that C writes in comments are types here:
//!
//! - A posted request owns what the device uses, until its completion gives it back: [`cqe`],
//!   [`wr`].
//! - A completion is a [`Result`](wc::Wc::result): of a failed one only what is valid can be read.
//! - The context that a completion queue is polled in is a type: [`context`].
//! - A queue pair leases the completion queue entries that it may need: [`cq`], [`qp`].
//! - Teardown is in order, after a drain that was proved, and never in the context of whoever drops
//!   last: [`qp`].
//! - Devices and modules go only after every handle: [`client`].
//! - Receives of a shared receive queue are slots that post themselves again: [`srq`].
//! - Peers reach memory only through a registration, and it outlives that: [`mr`].

#[doc(hidden)]
pub mod build;

mod bindings {
    pub(crate) use rdma_bindings::*;
}

pub mod ah;
pub mod client;
pub mod cm;
pub mod context;
pub mod cq;
pub mod cqe;
mod debug;
mod deferred;
pub mod device;
pub mod dma;
mod drain;
pub mod flush;
pub mod ibcm;
pub mod mad;
pub mod mr;
mod objects;
pub mod op;
pub mod pd;
pub mod prelude;
pub mod qp;
mod refs;
mod removal;
pub mod reuse;
pub mod rw;
pub mod sg;
pub mod srq;
mod sync;
pub mod ud;
pub mod wc;
pub mod wr;

use ::kernel::prelude::*;
use core::sync::atomic;

module! {
    type: Module,
    name: "rdma_rs",
    authors: ["rdma-rs authors"],
    description: "RDMA verbs for ULPs in Rust",
    license: "GPL",
}

crate::build_info!();

struct Module {
    _queue: deferred::Queue,
    _objects: objects::Table,
    _debug: Option<Pin<KBox<debug::Table>>>,
}

impl kernel::Module for Module {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        Ok(Self {
            // SAFETY: This is the module's init.
            _objects: unsafe { objects::Table::new() },
            _queue: deferred::Queue::new()?,
            _debug: debug::Table::new()?,
        })
    }
}
