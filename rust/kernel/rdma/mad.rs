// SPDX-License-Identifier: GPL-2.0

//! Management datagrams (MADs): 256 bytes to and from queue pair 1 of a port.
//!
//! An [`Agent`] sends requests of its [`Class`] and waits for the replies, and receives the
//! requests of others for the [`Methods`] that it serves. Any number of threads may wait at one
//! agent at once: each for the reply to its own request, which the MAD layer finds by its
//! transaction id, or in [`Agent::recv`] for whatever comes, which goes to one of them.
//!
//! A wait ends with the MAD, with `ETIMEDOUT`, with `ERESTARTSYS` on a signal, or with `ENODEV` or
//! `ECANCELED` when the device goes or the agent is stopped. No code of the ULP runs in the MAD
//! layer's own context.
//!
//! MADs of one segment only: there is no RMPP.
//!
//! # Examples
//!
//! ```
//! use rdma::{
//!     device::{
//!         Gid,
//!         GidAttr, //
//!     },
//!     mad::{
//!         Agent,
//!         Class,
//!         Message,
//!         Method,
//!         Methods,
//!         Peer, //
//!     },
//!     prelude::*, //
//! };
//!
//! /// Asks who is there, and returns what the first byte of the answer is.
//! fn ask(from: &GidAttr, to: Gid, cx: &Sleepable) -> Result<u8> {
//!     let class = Class::with_oui(0x30, [0x00, 0x00, 0x5e]);
//!     let (dev, port) = (from.device(), from.port_num());
//!     let agent = Agent::register(dev, port, class, Methods::NONE, 0, cx)?;
//!     let peer = Peer::new(&agent, from, to, cx)?;
//!     let message = Message {
//!         method: Method::GET,
//!         attr_id: 1,
//!         attr_mod: 0,
//!         payload: b"who is there?",
//!     };
//!     let reply = agent.request(&peer, &message, 100, 3, cx)?;
//!     reply.payload().first().copied().ok_or(EIO)
//! }
//! # let _ = ask;
//! # Ok::<(), Error>(())
//! ```
//!
//! C header: [`include/rdma/ib_mad.h`](srctree/include/rdma/ib_mad.h)

mod agent;
mod handler;
mod header;
mod peer;
mod queue;
mod received;
mod request;
mod send;
pub(crate) mod timeouts;

pub use agent::Agent;
pub use header::{
    Class,
    Header,
    Message,
    Method,
    Methods, //
};
pub use peer::Peer;
pub use received::Received;

/// The length of a MAD, in bytes.
pub const MAD_LEN: usize = 256;
