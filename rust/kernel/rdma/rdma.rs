// SPDX-License-Identifier: GPL-2.0

//! RDMA verbs for upper-layer protocols.
//!
//! The kernel's completion queue API (`ib_alloc_cq`, `struct ib_cqe`) and the verbs around it, for
//! safe Rust. The rules that C has in comments are types here:
//!
//! - A posted request owns the memory that the device uses, until its completion: [`cqe`], [`wr`].
//! - A completion is a [`Result`](wc::Wc::result): a failed one has its valid fields only.
//! - The context that a completion queue is polled in is a type: [`context`].
//! - A queue pair reserves the completion queue entries that it may need: [`cq`], [`qp`].
//! - Teardown is in order, after a drain that was proved, and in a work item: [`qp`].
//! - Devices and modules are removed only after every handle: [`client`].
//! - Receives of a shared receive queue are slots that are posted again when dropped: [`srq`].
//! - Peers access memory only through a registration, which the memory outlives: [`mr`].
//!
//! Parts that protocols build on top of that are in [`session`].
//!
//! # Examples
//!
//! A message that is sent, and comes back when it was:
//!
//! ```
//! use rdma::prelude::*;
//!
//! #[derive(HasCqe)]
//! struct Message {
//!     cqe: Cqe<Self>,
//!     buf: Buf<ToDevice>,
//! }
//!
//! impl CqeHandler for Message {
//!     type Pointer = Pin<KBox<Self>>;
//!     type Needs = context::Atomic;
//!
//!     /// The message is ours again, and is dropped.
//!     fn done(_this: Self::Pointer, wc: &Wc, _cx: &context::Atomic) {
//!         match wc.result() {
//!             Ok(_) => pr_info!("sent\n"),
//!             Err(e) => pr_err!("{}\n", e.status),
//!         }
//!     }
//! }
//!
//! /// The queue owns the message from here on, until it has completed.
//! fn send(qp: &Qp<Softirq>, pd: &Pd, text: &[u8], cx: &Sleepable) -> Result {
//!     let mut buf = Buf::alloc(pd, text.len(), cx)?;
//!     buf.cpu().copy_from_slice(text);
//!     let message = KBox::pin(Message { cqe: Cqe::new(), buf }, GFP_KERNEL)?;
//!     Ok(qp.post_send(message, |m| Ok(SendWr::send([m.buf.whole()])))?)
//! }
//! ```

#![warn(clippy::unwrap_used)]

pub mod ah;
pub mod client;
pub mod cm;
mod code;
mod completion;
pub mod context;
pub mod cq;
pub mod cqe;
mod debug;
mod deferred;
pub mod device;
pub mod dma;
pub mod ibcm;
mod identity;
mod links;
mod lost;
pub mod mad;
pub mod message;
pub mod mr;
mod noted;
mod objects;
pub mod op;
pub mod param;
pub mod pd;
mod posted;
pub mod prelude;
mod published;
pub mod qp;
mod qp_id;
pub mod ratelimit;
mod refs;
mod removal;
mod rnr_timer;
pub mod rw;
pub mod session;
pub mod sg;
pub mod srq;
mod sync;
mod timeouts;
mod trace;
pub mod ud;
pub mod wc;
pub mod wr;

use ::kernel::{
    debugfs,
    prelude::*, //
};
use core::sync::atomic;
use rdma_bindings as bindings;

// For tests.
#[doc(hidden)]
pub use noted::set as note_posts;

module! {
    type: Module,
    name: "rdma_rs",
    authors: ["rdma-rs authors"],
    description: "RDMA verbs for ULPs in Rust",
    license: "GPL",
    params: {
        note_posts: bool {
            default: false,
            description: "note each post, so that single owners end that a device has lost",
        },
    },
}

crate::build_info!();

struct Module {
    // Dropped first: its work items use all others.
    _queue: deferred::CoreWorkqueue,
    _objects: objects::File<objects::AllObjects>,
    _ratelimited: objects::File<ratelimit::NotPrinted>,
    _debug: Option<Pin<KBox<debug::Table>>>,
    _contexts: Pin<KBox<lost::Table>>,
    _noted: Pin<KBox<noted::Table>>,
}

impl kernel::Module for Module {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        let dir = debugfs::Dir::new(c"rdma_rs");
        // SAFETY: `init` is called once, when the module is loaded.
        let (objects, ratelimited) = unsafe {
            client::init();
            cm::init();
            (objects::init(&dir), ratelimit::init(&dir))
        };
        Ok(Self {
            _objects: objects,
            _ratelimited: ratelimited,
            _queue: deferred::CoreWorkqueue::new()?,
            _debug: debug::Table::new()?,
            _contexts: lost::Table::new()?,
            _noted: noted::Table::new(module_parameters::note_posts.value())?,
        })
    }
}

// The build of the crate that a module belongs to.
//
// The symbols of the crate have a hash of its sources and of the kernel's configuration in their
// names, so the module loader refuses a module that was built against another build. `modinfo`
// shows the hash as `rdma_build` and the crate's version as `rdma_version`, of each ULP too.

/// The version of the crate, which packages and pages take from here.
macro_rules! version {
    () => {
        "0.1.0"
    };
}

#[cfg(MODULE)]
const VERSION: &str = concat!("version=", version!(), "\0");

#[cfg(MODULE)]
#[link_section = ".modinfo"]
#[used(compiler)]
static MODINFO: [u8; VERSION.len()] = match VERSION.as_bytes().first_chunk() {
    Some(info) => *info,
    None => [0; VERSION.len()],
};

const INFO: &str = concat!(
    "rdma_version=",
    version!(),
    "\0rdma_build=",
    env!("RDMA_BUILD"),
    "\0"
);

/// The entries of `.modinfo`, each with a zero at its end.
#[doc(hidden)]
pub const BUILD_INFO: [u8; INFO.len()] = match INFO.as_bytes().first_chunk() {
    Some(info) => *info,
    None => [0; INFO.len()],
};

/// Adds the build of the crate to the module's information (`MODULE_INFO`).
#[doc(hidden)]
#[macro_export]
macro_rules! build_info {
    () => {
        const _: () = {
            #[cfg(MODULE)]
            #[link_section = ".modinfo"]
            #[used(compiler)]
            static MODINFO: [u8; $crate::BUILD_INFO.len()] = $crate::BUILD_INFO;
        };
    };
}
